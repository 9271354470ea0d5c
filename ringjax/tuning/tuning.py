"""Tunes a step: all ranks try settings, choose one setting together, and store it."""

from __future__ import annotations

import csv
import sys
from typing import Any

import numpy as np

from ringjax import eager, ops, runtime
from ringjax.settings import measurement_cache
from ringjax.tuning import trials
from ringjax.tuning.trials import Setting, Times, Trials

_KIND = "tuning"
_COLUMNS = ["step", "bucket_bytes", "overlap_memory", "overlap", "ms", "chosen"]


class Tuning:
    """Finds the `setting` of a step by trials, or reads it from an earlier job's cache.

    All ranks of `process_set` create this object for a step, and record all its steps.
    `name` is the name of the step in messages, equal on all ranks. `step` describes the
    step in a form that JSON can hold: a later job with an equal description and the
    same hosts uses the result. `overlapped` is that of `trials.candidate_settings`.
    """

    def __init__(
        self,
        name: str,
        step: Any,
        overlapped: bool | None,
        process_set: runtime.ProcessSet = runtime.global_process_set,
    ) -> None:
        config = self._config = runtime.config()
        self._name, self._set = name, process_set
        self.setting = Setting(config.bucket_bytes, config.overlap_memory)
        self._trials: Trials | None = None
        # A single rank sends no gradients. In an elastic job, ranks that join later
        # have tried no settings, but all ranks must use the same setting.
        if process_set.size() == 1 or config.elastic:
            return
        communicator = runtime.communicator(process_set, "autotune")
        settings = trials.candidate_settings(self.setting, overlapped)
        self._key = {
            "step": step,
            "hosts": list(communicator.hosts),
            "settings": [trials.to_json(setting) for setting in settings],
        }
        if known := self._remembered():
            self.setting = known
            self._report(f"{known}, from an earlier job")
            return
        self._trials = Trials(
            settings, config.autotune_warmup_samples, config.autotune_steps_per_sample
        )

    @property
    def settled(self) -> bool:
        """Whether `setting` is final, so that no trial follows."""
        return self._trials is None

    def record_step(self, seconds: float) -> None:
        """Records the duration of the step that used the current `setting`.

        After the last trial, all ranks choose a setting together.
        """
        if self._trials is None:
            return
        self._trials.record_step(seconds)
        if self._trials.finished:
            finished, self._trials = self._trials, None
            times = self._slowest_times(finished)
            self.setting = finished.winner(times)
            if self._set.rank() == 0:
                self._save_result(finished, times)
        else:
            self.setting = self._trials.setting

    def _remembered(self) -> Setting | None:
        """Returns the setting in the first rank's cache, or None if the cache has none.

        Caches of different hosts may hold different settings, but all ranks must use
        one.
        """
        found = None
        if self._set.rank() == 0:
            found = measurement_cache.read(
                self._config.cache_folder(), _KIND, self._key
            )
        root = self._set.ranks[0]
        name = f"autotune.{self._name}"
        value = eager.broadcast_object(found, root, name, self._set)
        return trials.from_json(value)

    def _slowest_times(self, tried: Trials) -> Times:
        """Returns the time of the slowest rank for each step in `tried`."""
        own = np.array(tried.times)
        name = f"autotune.{self._name}.times"
        slowest = eager.allreduce(own, op=ops.Max, name=name, process_set=self._set)
        times: Times = slowest.tolist()
        return times

    def _save_result(self, tried: Trials, times: Times) -> None:
        value, log = trials.to_json(self.setting), self._config.autotune_log
        measurement_cache.write(self._config.cache_folder(), _KIND, self._key, value)
        seconds = trials.medians(times)
        chosen = tried.settings.index(self.setting)
        result = f"{self.setting}: {seconds[chosen] * 1e3:.3g} ms a step"
        result += f", {seconds[0] * 1e3:.3g} before" if chosen else ", as before"
        sys.stderr.write(f"ringjax autotune: {self._name}: {result}\n")
        self._report(result)
        if log:
            _write_log(log, self._name, tried.settings, seconds, chosen)

    def _report(self, result: str) -> None:
        """Adds the result to this rank's telemetry, for ringrun and its summary."""
        world = runtime.current("autotune")
        world.tuned = "; ".join(filter(None, (world.tuned, f"{self._name}: {result}")))


def _write_log(
    path: str, name: str, settings: list[Setting], seconds: list[float], chosen: int
) -> None:
    """Appends a line for each setting to a file. If writing fails, prints the error."""
    try:
        with open(path, "a", newline="") as file:
            rows = csv.writer(file)
            if file.tell() == 0:
                rows.writerow(_COLUMNS)
            for i, setting in enumerate(settings):
                values = trials.to_json(setting)
                rows.writerow((name, *values, f"{seconds[i] * 1e3:.4g}", i == chosen))
    except OSError as error:
        sys.stderr.write(f"ringjax autotune: {path}: {error.strerror}\n")
