"""The compiled programs of a step: one piece, the exchange, and both in one program."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ringjax.exact import Sums
from ringjax.pieces import sharded
from ringjax.pieces import training as states
from ringjax.pieces.control import places_in
from ringjax.pieces.training import Training
from ringjax.xla import jax_private

# A step whose gradients do not fit its exponents is repeated with those of the same
# gradients, so once is enough if `loss_of` always computes the same.
MAX_REPEATS = 4
# The object of a jax.custom_partitioning, which has another address in each process.
_ADDRESS = re.compile(r'(?<=backend_config = ")\d+(?=")')


class Programs:
    """The functions that are compiled, for one loss and one optimizer.

    Args:
        loss_of: the loss of one piece; see `ringjax.pieces.step`.
        tx: the optimizer.
        pieces: the number of pieces.
        seed: seeds the keys of all steps and pieces.
        has_aux: whether `loss_of` returns auxiliary values.
    """

    def __init__(
        self,
        loss_of: Callable[..., Any],
        tx: optax.GradientTransformation,
        pieces: int,
        seed: int,
        has_aux: bool,
    ) -> None:
        self._loss_of, self._seed, self._has_aux = loss_of, seed, has_aux
        self._tx = optax.with_extra_args_support(tx)
        self._sums = Sums(pieces=pieces)
        self._pieces = pieces
        self._empty: Callable[[], Any] | None = None
        # The mesh is None if the parameters are on one device. Otherwise the shardings
        # are those of all leaves of a Training.
        self._mesh: Mesh | None = None
        self._shardings: Any = None
        # The accumulator is updated in place. All other arguments are kept, because a
        # step is repeated from them.
        self.add = jax.jit(self._add, donate_argnums=0)
        self.finish = jax.jit(self._finish)
        self.whole = jax.jit(self._whole)

    def placed(self, training: Training) -> Training:
        """Returns the training with the shardings of the first one.

        Otherwise the compiler would choose other shardings for the next training, and
        so would a program that has read it from a checkpoint. Other shardings mean
        other programs, and other bits.
        """
        if self._mesh is None:
            self._mesh = sharded.mesh_of(training.params)
            if self._mesh is None:
                return training
            training = sharded.placed(training, self._mesh)
            self._shardings = jax.tree.map(lambda x: x.sharding, training)
        placed: Training = jax.device_put(training, self._shardings)
        return placed

    @property
    def several_devices(self) -> bool:
        """Whether the parameters are on several devices of this process."""
        return self._mesh is not None

    def first(self, params: Any, stats: Any, data: Any) -> Training:
        """Returns the state before the first step, after checking loss and optimizer.

        The exponents follow from the largest gradients of a piece, not from the sums,
        so `add` with any exponents finds them, and no other program is compiled.
        """
        self._mesh = self._empty = None
        number = jnp.zeros((), jnp.int32)
        opt_state = self._tx.init(params)
        training = self.placed(Training(params, opt_state, stats, number, number))
        if not self.several_devices:
            sharded.check_on_one(data)
        shapes = self._shapes(training, data)
        leaves, structure = jax.tree.flatten(shapes)
        training = training._replace(exponents=jnp.zeros(len(leaves), jnp.int32))
        where, few = np.zeros(2, np.int32), training._replace(opt_state=None)
        acc = self.add(self.zeros(few, data), few, data, where)
        top = jax.tree.unflatten(structure, list(acc.top))
        return training._replace(exponents=self._sums.exponents(top))

    def zeros(self, training: Training, data: Any) -> Any:
        """Returns an empty accumulator for pieces of the shapes in `data`."""
        if self._empty is None:
            shapes = self._shapes(training, data)
            everywhere = self._mesh and sharded.replicated(self._mesh)
            self._empty = jax.jit(
                lambda: self._sums.zeros(shapes), out_shardings=everywhere
            )
        return self._empty()

    def text(self, training: Training, data: Any, words: Any, whole: bool) -> str:
        """Returns the text of the programs for data, or shapes, of one piece."""
        if whole:
            data = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((self._pieces, *x.shape), x.dtype), data
            )
            return _text(self.whole.lower(training, data, words))
        acc = jax.eval_shape(lambda: self._sums.zeros(self._shapes(training, data)))
        where, few = np.zeros(2, np.int32), training._replace(opt_state=None)
        add = self.add.lower(acc, few, data, where)
        return _text(add) + _text(self.finish.lower(acc, training, words))

    def _shapes(self, training: Training, data: Any) -> Any:
        """Returns the shapes of all that one piece adds."""
        arguments = (training, data, jnp.zeros(2, jnp.int32))
        if jax_private.has_collective(self._gradients, arguments, {}):
            raise ValueError(
                f"{states.NAME}: `loss_of` calls a collective of ringjax, but the "
                "ranks compute different numbers of pieces; return what the collective "
                "would average as aux (has_aux=True)"
            )
        return jax.eval_shape(self._gradients, *arguments)

    def _gradients(self, training: Training, data: Any, where: jax.Array) -> Any:
        """Returns all that is summed over pieces; `where` is (number, piece)."""
        key = jax.random.key(self._seed)
        key = jax.random.fold_in(jax.random.fold_in(key, where[0]), where[1])

        def loss_of(params: Any) -> tuple[Any, Any]:
            # nnx only changes variables that were made at this level of the trace.
            stats = jax.tree.map(lambda x: x, training.stats)
            stats = () if stats is None else (stats,)
            result = self._loss_of(params, *stats, data, key)
            returns_more = self._has_aux or stats
            if not returns_more:
                states.check_loss(result)
                return result, (None, None)
            loss, more = states.pair(result)
            states.check_loss(loss)
            if not stats:
                return loss, (None, more)
            return loss, (states.pair(more) if self._has_aux else (more, None))

        (loss, (stats, aux)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            training.params
        )
        states.check_floats("stats", stats, states.KEEP_OUT)
        states.check_floats("aux", aux, states.AS_FLOAT)
        found = {"gradients": gradients, "loss": loss, "stats": stats, "aux": aux}
        if self._mesh is None:
            return found
        everywhere = sharded.replicated(self._mesh)
        return jax.tree.map(lambda x: sharded.constrained(x, everywhere), found)

    def _add(self, acc: Any, training: Training, data: Any, where: jax.Array) -> Any:
        gradients = self._gradients(training, data, where)
        return self._sums.add(acc, gradients, training.exponents)

    def _finish(self, acc: Any, training: Training, control: jax.Array) -> Any:
        """Exchanges the accumulators, and applies the mean to `training`.

        The new training is valid only if `control` says that all pieces are in the
        mean, and if the step need not be repeated. To apply it in the same program
        spares the host a call, and a second wait.
        """
        mean, exponents, again, control = self._sums.exchange(
            acc, training.exponents, extra=control
        )
        return self._applied(training, mean, exponents), _words(again, control)

    def _applied(self, training: Training, mean: Any, exponents: jax.Array) -> Any:
        """Returns the next training, the loss, and aux."""
        params = training.params
        if self._mesh:
            mean["gradients"] = jax.tree.map(
                sharded.constrained, mean["gradients"], self._shardings.params
            )
            mean["stats"] = jax.tree.map(
                sharded.constrained, mean["stats"], self._shardings.stats
            )
        # Optimizers keep the dtype of the gradients in their state.
        gradients = jax.tree.map(
            lambda g, p: g.astype(p.dtype), mean["gradients"], params
        )
        updates, opt_state = self._tx.update(
            gradients, training.opt_state, params, value=mean["loss"]
        )
        stats = jax.tree.map(
            lambda s, old: s.astype(old.dtype), mean["stats"], training.stats
        )
        new = Training(
            optax.apply_updates(params, updates),
            opt_state,
            stats,
            exponents,
            training.number + 1,
        )
        if self._mesh:
            new = jax.tree.map(sharded.constrained, new, self._shardings)
        return new, mean["loss"], mean["aux"]

    def _whole(self, training: Training, data: Any, own: jax.Array) -> Any:
        """The step as one program. `data` has the pieces in the first axis.

        `own` are the control words of this rank, with 1 for the pieces to compute.
        Returns what `finish` returns.
        """

        def repeat(carry: Any) -> Any:
            count, again, exponents, mean, control = carry
            del again, mean, control
            current = training._replace(exponents=exponents)
            mean, exponents, again, control = self._complete(current, data, own)
            return count + 1, again, exponents, mean, control

        shapes = self._shapes_of_piece(training, data)
        start = (0, True, training.exponents, _zero_mean(shapes), own)
        _, again, exponents, mean, control = jax.lax.while_loop(
            lambda carry: carry[1] & (carry[0] < MAX_REPEATS), repeat, start
        )
        return self._applied(training, mean, exponents), _words(again, control)

    def _complete(self, training: Training, data: Any, own: jax.Array) -> Any:
        """Adds and exchanges until all pieces are in the sum, also those of lost ranks.

        Returns what `Sums.exchange` returns.
        """
        pieces = self._pieces
        present = own[pieces : pieces + places_in(len(own), pieces)]

        def add(index: jax.Array, carry: Any) -> Any:
            acc, order = carry
            piece = order[index]
            where = jnp.stack([training.number, piece]).astype(jnp.int32)
            return self._add(acc, training, _piece(data, piece), where), order

        def exchange(carry: Any) -> Any:
            acc, done, todo, *_ = carry
            order = jnp.argsort(~todo, stable=True).astype(jnp.int32)
            acc, _ = jax.lax.fori_loop(0, todo.sum(), add, (acc, order))
            done += todo
            mean, exponents, again, control = self._sums.exchange(
                acc, training.exponents, extra=own.at[:pieces].set(done)
            )
            missing = control[:pieces] == 0
            here = control[pieces : pieces + len(present)] > 0
            # The missing pieces go to the present places in turn.
            turn = ((jnp.cumsum(here) - 1) * present).sum()
            todo = missing & ((jnp.cumsum(missing) - 1) % here.sum() == turn)
            return acc, done, todo, mean, exponents, again, control

        shapes = self._shapes_of_piece(training, data)
        start = (
            self._sums.zeros(shapes),
            jnp.zeros(pieces, jnp.int32),
            own[:pieces] > 0,
            _zero_mean(shapes),
            training.exponents,
            jnp.array(False),
            jnp.zeros_like(own),
        )
        carry = jax.lax.while_loop(
            lambda carry: (carry[-1][:pieces] == 0).any(), exchange, start
        )
        return carry[3:]

    def _shapes_of_piece(self, training: Training, data: Any) -> Any:
        where = jnp.zeros(2, jnp.int32)
        return jax.eval_shape(self._gradients, training, _piece(data, 0), where)


def _text(lowered: jax.stages.Lowered) -> str:
    return _ADDRESS.sub("", lowered.as_text())


def _words(again: Any, control: jax.Array) -> jax.Array:
    """Returns all that the host reads: whether to repeat the step, then `control`."""
    return jnp.concatenate([jnp.asarray(again, jnp.int32)[None], control])


def _piece(data: Any, piece: jax.Array | int) -> Any:
    return jax.tree.map(lambda x: x[piece], data)


def _zero_mean(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
