"""autotune: finds the fastest communication setting of a JAX training step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from ringjax import optim, runtime
from ringjax.tuning import trials
from ringjax.tuning.tuning import Tuning

_P = ParamSpec("_P")
_R = TypeVar("_R")


def autotune(fun: Callable[_P, _R], **options: Any) -> Callable[_P, _R]:
    """Compiles a step as `jax.jit` does, and tunes how its gradients are sent.

    The first calls are normal steps, which try settings of `allreduce_grads` one after
    the other: bucket sizes, bytes in flight, with overlap and without. Each setting is
    compiled once, and each of these calls waits for its result. Afterwards, all ranks
    use the fastest setting. A setting counts as faster than the default only if it was
    faster by 2 % and in three of four rounds. Later jobs on the same hosts use the
    result for 7 days.

    If the step itself passes `bucket_bytes=` or `overlap=` to `allreduce_grads`, no
    trial changes that argument. A job of one rank uses the defaults. An elastic job
    uses the defaults, too, because joining ranks have tried nothing.

    Args:
        fun: the step, a function that is not compiled. All ranks call it equally often.
        options: options of `jax.jit`.

    Returns:
        A function like the result of `jax.jit`, with `lower`.

    Raises:
        TypeError: `fun` is compiled already, so all settings would use one trace.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> step = ringjax.autotune(lambda x: x + 1, donate_argnums=0)
        >>> step(jnp.zeros(2)).tolist()
        [1.0, 1.0]

    Each setting gets RINGJAX_AUTOTUNE_STEPS_PER_SAMPLE calls (10), after
    RINGJAX_AUTOTUNE_WARMUP_SAMPLES calls that do not count (3). Rank 0 appends the
    times to the file RINGJAX_AUTOTUNE_LOG.
    """
    if hasattr(fun, "lower"):
        raise TypeError(
            "ringjax.autotune: this function is compiled already; give the function "
            "itself, and what jax.jit was told to ringjax.autotune"
        )
    return _AutotunedStep(fun, options)


class _AutotunedStep(Generic[_P, _R]):
    """A training step that has one compiled program for each setting under trial."""

    def __init__(self, fun: Callable[_P, _R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._options = fun, options
        self._programs: dict[trials.Setting | None, Any] = {}
        self._tuning: Tuning | None = None
        self._settled: Callable[_P, _R] | None = None

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._settled is not None:
            return self._settled(*args, **kwargs)
        return self._try(*args, **kwargs)

    @property
    def setting(self) -> trials.Setting | None:
        """The setting of the next call; None before the first call."""
        return self._tuning.setting if self._tuning else None

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Lowered:
        """Lowers the step with the setting of the next call, as `jax.jit` does."""
        lowered: jax.stages.Lowered
        lowered = self._program(self.setting).lower(*args, **kwargs)
        return lowered

    def _program(self, setting: trials.Setting | None) -> Any:
        if setting not in self._programs:
            # JAX caches traces by function, so each setting needs a function object of
            # its own.
            @functools.wraps(self._fun)
            def step(*args: _P.args, **kwargs: _P.kwargs) -> _R:
                with trials.use_setting(setting):
                    return self._fun(*args, **kwargs)

            self._programs[setting] = jax.jit(step, **self._options)
        return self._programs[setting]

    def _try(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not runtime.is_initialized():
            untuned: _R = self._program(None)(*args, **kwargs)
            return untuned
        if self._tuning is None:
            world, config = runtime.communicator(op="autotune"), runtime.config()
            self._tuning = Tuning(
                getattr(self._fun, "__qualname__", "step"),
                [jax.__version__, *map(str, _shapes((args, kwargs)))],
                optim.should_overlap("auto", world, config),
            )
        tuning = self._tuning
        began = time.perf_counter()
        results: _R = self._program(tuning.setting)(*args, **kwargs)
        if not tuning.settled:
            jax.block_until_ready(results)
            tuning.record_step(time.perf_counter() - began)
        if tuning.settled:
            self._settled = self._program(tuning.setting)
            self._programs = {tuning.setting: self._settled}
        return results


def _shapes(tree: object) -> list[tuple[list[int], str]]:
    return [
        (list(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf))))
        for leaf in jax.tree.leaves(tree)
    ]
