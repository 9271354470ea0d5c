"""JaxBackend: the reduction is a part of the train step that Keras compiles.

The primitive is that of `ringjax.allreduce_grads`, but its sequence number is always 0.
An optimizer that plain Keras can load has no variable for the sequence number. The
steps of a program run in order without it, because each step needs the weights of the
step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import keras

from ringjax import runtime
from ringjax.compression import Compression
from ringjax.eager.parameter_check import AFTER_FIRST_STEP
from ringjax.keras.backends.base_backend import Backend, ReductionOptions, wire_dtype
from ringjax.keras.keras_types import Tensor, TensorChange, Variable
from ringjax.ops import Average, Min
from ringjax.optim import AllreduceState, allreduce_grads
from ringjax.world.process_set import ProcessSet
from ringjax.xla import parameter_check


class _JaxBackend(Backend):
    """Reduces gradients with XLA custom calls, inside and outside of compiled steps."""

    name = "jax"

    def reduce(
        self,
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        variables: Sequence[Variable],
        groups: Sequence[Sequence[int]],
        options: ReductionOptions,
    ) -> list[Tensor]:
        """Reduces gradients in one call or in buckets. The groups have no effect."""
        del groups
        wire = wire_dtype(options.compression)
        packed, contexts = list(gradients), [None] * len(gradients)
        if wire is None:  # a compressor of the program
            pairs = [options.compression.compress(gradient) for gradient in gradients]
            packed, contexts = [p for p, _ in pairs], [c for _, c in pairs]
        reduce = allreduce_grads(
            options.op,
            process_set=options.process_set,
            gradient_predivide_factor=(
                options.predivide if options.op == Average else 1.0
            ),
            name=options.name,
            compression=wire or Compression.none,
        )
        named = {f"{i:05d}": g for i, g in zip(indices, packed, strict=True)}
        updates, _ = reduce.update(named, _check_parameters(variables, options))
        out = list(updates.values())
        if wire is None:
            decompress = options.compression.decompress
            out = [decompress(g, c) for g, c in zip(out, contexts, strict=True)]
        return out

    def all_true(self, flag: Tensor, process_set: ProcessSet) -> Tensor:
        reduce = allreduce_grads(Min, process_set=process_set, name="finite")
        votes = {"finite": jnp.asarray(flag, jnp.float32)}
        return reduce.update(votes, _initial_state())[0]["finite"] > 0

    def cond(
        self,
        condition: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
        variables: Sequence[Variable],
    ) -> None:
        """Makes the functions pure for `jax.lax.cond`.

        A branch receives the values of the variables as arguments, and returns the
        values that the variables have after the function.
        """

        def pure(change: Callable[[], None]) -> TensorChange:
            def branch(values: list[Tensor]) -> list[Tensor]:
                mapping = list(zip(variables, values, strict=True))
                with keras.StatelessScope(state_mapping=mapping):
                    change()
                    return [variable.value for variable in variables]

            return branch

        before = [variable.value for variable in variables]
        after = jax.lax.cond(condition, pure(true_fn), pure(false_fn), before)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def change_on_update(
        self, condition: Tensor, change: TensorChange, values: list[Tensor]
    ) -> list[Tensor]:
        """Changes the values if `condition` is true.

        On JAX, Keras computes an update in every step and applies only some updates.
        """
        out: list[Tensor] = jax.lax.cond(condition, change, list, values)
        return out


def _initial_state() -> AllreduceState:
    return AllreduceState(jnp.zeros((1,), jnp.uint32))


def _check_parameters(
    variables: Sequence[Variable], options: ReductionOptions
) -> AllreduceState:
    """Compares the variables in some steps; returns the reduction's order value.

    Keras does not number its train steps, so the comparison counts its own calls.
    """
    state, every = _initial_state(), runtime.config().check_parameters
    kept = [variable for variable in variables if isinstance(variable, keras.Variable)]
    if not every or not kept:
        return state
    seq = parameter_check.check(
        state.seq,
        [variable.value for variable in kept],
        [variable.path for variable in kept],
        comm=runtime.communicator(options.process_set, "allreduce_grads").id,
        every=every,
        first=AFTER_FIRST_STEP,
        name=f"the check of the parameters of {options.name}",
        timeout=options.process_set.limit(),
    )
    return AllreduceState(seq)


BACKEND = _JaxBackend()
