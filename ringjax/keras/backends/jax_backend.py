"""Keras on JAX: the reduction is a part of the train step that Keras compiles.

The primitive is that of `ringjax.allreduce_grads`. Its sequence number is always 0:
Keras' optimizers have no place for another variable that plain Keras could read, and
the steps of one program are in order because each needs the weights of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from ringjax import runtime
from ringjax.compression import Compression
from ringjax.eager.parameter_check import AFTER_FIRST_STEP
from ringjax.keras.backends.base_backend import Backend, ReductionOptions, wire_dtype
from ringjax.ops import Average, Min
from ringjax.optim import AllreduceState, allreduce_grads
from ringjax.world.process_set import ProcessSet
from ringjax.xla import parameter_check


class JaxBackend(Backend):
    """Reductions as XLA calls, in compiled steps and outside of them."""

    name = "jax"

    def reduce(
        self,
        gradients: Sequence[Any],
        places: Sequence[int],
        variables: Sequence[Any],
        groups: Sequence[Sequence[int]],
        how: ReductionOptions,
    ) -> list[Any]:
        """See the base class. All are one call, or travel in buckets, not in groups."""
        del groups
        wire = wire_dtype(how.compression)
        packed, contexts = list(gradients), [None] * len(gradients)
        if wire is None:  # a program's own class
            both = [how.compression.compress(gradient) for gradient in gradients]
            packed, contexts = [p for p, _ in both], [c for _, c in both]
        reduce = allreduce_grads(
            how.op,
            process_set=how.process_set,
            gradient_predivide_factor=how.predivide if how.op == Average else 1.0,
            name=how.name,
            compression=wire or Compression.none,
        )
        named = {f"{place:05d}": g for place, g in zip(places, packed, strict=True)}
        updates, _ = reduce.update(named, _checked(variables, how))
        out = list(updates.values())
        if wire is None:
            pairs = zip(out, contexts, strict=True)
            out = [how.compression.decompress(g, context) for g, context in pairs]
        return out

    def all_true(self, flag: Any, process_set: ProcessSet) -> Any:
        """See the base class."""
        reduce = allreduce_grads(Min, process_set=process_set, name="finite")
        votes = {"finite": jnp.asarray(flag, jnp.float32)}
        return reduce.update(votes, _first())[0]["finite"] > 0

    def cond(
        self,
        condition: Any,
        yes: Callable[[], None],
        no: Callable[[], None],
        variables: Sequence[Any],
    ) -> None:
        """See the base class; what changes goes through the branches as values."""

        def pure(change: Callable[[], None]) -> Callable[[list[Any]], list[Any]]:
            def run(values: list[Any]) -> list[Any]:
                mapping = list(zip(variables, values, strict=True))
                with keras.StatelessScope(state_mapping=mapping):
                    change()
                    return [variable.value for variable in variables]

            return run

        before = [variable.value for variable in variables]
        after = jax.lax.cond(condition, pure(yes), pure(no), before)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def change_on_update(
        self,
        condition: Any,
        change: Callable[[list[Any]], list[Any]],
        values: list[Any],
    ) -> list[Any]:
        """See the base class; here Keras computes every update, and drops some."""
        out: list[Any] = jax.lax.cond(condition, change, list, values)
        return out


def _first() -> AllreduceState:
    return AllreduceState(jnp.zeros((1,), jnp.uint32))


def _checked(variables: Sequence[Any], how: ReductionOptions) -> AllreduceState:
    """The state for a reduction, behind a check of the variables.

    No step has a number here, so the look counts its calls.
    """
    state, every = _first(), runtime.config().check_parameters
    kept = [variable for variable in variables if isinstance(variable, keras.Variable)]
    if not every or not kept:
        return state
    seq = parameter_check.check(
        state.seq,
        [variable.value for variable in kept],
        [variable.path for variable in kept],
        comm=runtime.communicator(how.process_set, "allreduce_grads").id,
        every=every,
        first=AFTER_FIRST_STEP,
        name=f"the check of the parameters of {how.name}",
        timeout=how.process_set.limit(),
    )
    return AllreduceState(seq)


BACKEND = JaxBackend()
