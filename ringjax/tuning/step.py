"""`autotune`: a training step of JAX, compiled for the settings that suit it best."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from ringjax import optim, runtime
from ringjax.tuning import trials
from ringjax.tuning.tuning import Tuning


def autotune(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a training step that finds out how its gradients travel best.

    Its first calls are steps as all others, with one setting of `allreduce_grads` after
    the other: bucket sizes, bytes on their way, with overlap and without. Each is
    compiled once, and the calls are waited for. Then the fastest stays, the same on all
    ranks; the default, unless another was faster by 2 % and in three of four rounds.
    The result is remembered for the next job on such hosts, for 7 days.

    Only what `allreduce_grads` leaves open is tried: not with `bucket_bytes=` or
    `overlap=`. A job of one rank, and an elastic one, which ranks join that have tried
    nothing, takes the defaults.

    Args:
        fun: the step itself, not compiled; all ranks call it equally often.
        options: of `jax.jit`.

    Returns:
        A function as `jax.jit` returns it, with `lower`.

    Raises:
        TypeError: `fun` is compiled already: its trace would be used for all settings.

    Example:
        >>> import jax.numpy as jnp, ringjax
        >>> ringjax.init()
        >>> step = ringjax.autotune(lambda x: x + 1, donate_argnums=0)
        >>> step(jnp.zeros(2)).tolist()
        [1.0, 1.0]

    RINGJAX_AUTOTUNE_STEPS_PER_SAMPLE says how many calls each setting has (10), after
    RINGJAX_AUTOTUNE_WARMUP_SAMPLES (3); RINGJAX_AUTOTUNE_LOG is a file for the times.
    """
    if hasattr(fun, "lower"):
        raise TypeError(
            "ringjax.autotune: this function is compiled already; give the function "
            "itself, and what jax.jit was told to ringjax.autotune"
        )
    return _AutotunedStep(fun, options)


class _AutotunedStep:
    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._options = fun, options
        self._programs: dict[trials.Setting | None, Any] = {}
        self._tuning: Tuning | None = None
        self._settled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._settled is not None:
            return self._settled(*args, **kwargs)
        return self._try(args, kwargs)

    @property
    def setting(self) -> trials.Setting | None:
        """Of the next call; None: that of the job, nothing is known yet."""
        return self._tuning.setting if self._tuning else None

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`, for the setting of the next call."""
        return self._program(self.setting).lower(*args, **kwargs)

    def _program(self, setting: trials.Setting | None) -> Any:
        if setting not in self._programs:
            # JAX keeps traces by function: each setting needs one of its own.
            @functools.wraps(self._fun)
            def step(*args: Any, **kwargs: Any) -> Any:
                with trials.use_setting(setting):
                    return self._fun(*args, **kwargs)

            self._programs[setting] = jax.jit(step, **self._options)
        return self._programs[setting]

    def _try(self, args: Any, kwargs: Any) -> Any:
        if not runtime.is_initialized():
            return self._program(None)(*args, **kwargs)
        if self._tuning is None:
            world, config = runtime.communicator(op="autotune"), runtime.config()
            self._tuning = Tuning(
                getattr(self._fun, "__qualname__", "step"),
                [jax.__version__, *map(str, _shapes((args, kwargs)))],
                optim.should_overlap("auto", world, config),
            )
        tuning = self._tuning
        began = time.perf_counter()
        results = self._program(tuning.setting)(*args, **kwargs)
        if not tuning.settled:
            jax.block_until_ready(results)
            tuning.record_step(time.perf_counter() - began)
        if tuning.settled:
            self._settled = self._program(tuning.setting)
            self._programs = {tuning.setting: self._settled}
        return results


def _shapes(tree: Any) -> list[Any]:
    return [
        (list(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf))))
        for leaf in jax.tree.leaves(tree)
    ]
