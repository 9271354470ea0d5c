"""A step that is tuned: all ranks try the same, agree, and remember it."""

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
    """What a step runs with: tried out, known from an earlier job, or the default.

    All ranks make one at the same point, and tell of the same steps.

    Args:
        name: stands for the step in messages, and is called so on all ranks.
        step: describes it, in what JSON can hold: what was found out for such a step on
            such hosts is found again.
        overlapped: whether the default overlaps with the backward pass; None: where
            that is not a choice.

    Attributes:
        setting: of the next step.
        settled: whether it stays so.

    Raises:
        NotInitialized, PeerLost: as everywhere.
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
        # Alone there is nothing to send; and who joins later has tried nothing.
        if process_set.size() == 1 or config.elastic:
            return
        communicator = runtime.communicator(process_set, "autotune")
        settings = trials.candidate_settings(self.setting, overlapped)
        self._what = {
            "step": step,
            "hosts": list(communicator.hosts),
            "settings": [trials.to_json(one) for one in settings],
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
        """Whether `setting` stays as it is."""
        return self._trials is None

    def record_step(self, seconds: float) -> None:
        """How long the step took that had `setting`. The last of all trials decides."""
        if self._trials is None:
            return
        self._trials.record_step(seconds)
        if self._trials.finished:
            past, self._trials = self._trials, None
            times = self._slowest(past)
            self.setting = past.winner(times)
            if self._set.rank() == 0:
                self._tell(past, times)
        else:
            self.setting = self._trials.setting

    def _remembered(self) -> Setting | None:
        """What the first rank knows; caches of several hosts may differ."""
        found = None
        if self._set.rank() == 0:
            found = measurement_cache.read(
                self._config.cache_folder(), _KIND, self._what
            )
        root = self._set.ranks[0]
        name = f"autotune.{self._name}"
        value = eager.broadcast_object(found, root, name, self._set)
        return trials.from_json(value)

    def _slowest(self, tried: Trials) -> Times:
        """The times of all steps, of the slowest rank each."""
        mine = np.array(tried.times)
        name = f"autotune.{self._name}.times"
        both = eager.allreduce(mine, op=ops.Max, name=name, process_set=self._set)
        times: Times = both.tolist()
        return times

    def _tell(self, tried: Trials, times: Times) -> None:
        value, log = trials.to_json(self.setting), self._config.autotune_log
        measurement_cache.write(self._config.cache_folder(), _KIND, self._what, value)
        seconds = trials.medians(times)
        chosen = tried.settings.index(self.setting)
        said = f"{self.setting}: {seconds[chosen] * 1e3:.3g} ms a step"
        said += f", {seconds[0] * 1e3:.3g} before" if chosen else ", as before"
        sys.stderr.write(f"ringjax autotune: {self._name}: {said}\n")
        self._report(said)
        if log:
            _log(log, self._name, tried, seconds, chosen)

    def _report(self, said: str) -> None:
        """For who watches the job, and for its summary."""
        world = runtime.current("autotune")
        world.tuned = "; ".join(filter(None, (world.tuned, f"{self._name}: {said}")))


def _log(
    path: str, name: str, tried: Trials, seconds: list[float], chosen: int
) -> None:
    """Adds a line for each setting; a file that cannot be written ends no job."""
    try:
        with open(path, "a", newline="") as file:
            rows = csv.writer(file)
            if file.tell() == 0:
                rows.writerow(_COLUMNS)
            for i, one in enumerate(tried.settings):
                values = trials.to_json(one)
                rows.writerow((name, *values, f"{seconds[i] * 1e3:.4g}", i == chosen))
    except OSError as error:
        sys.stderr.write(f"ringjax autotune: {path}: {error.strerror}\n")
