"""`step`: a training step whose result does not depend on the ranks.

`programs.py` has what is compiled, and `shares.py` decides which rank computes which
pieces. This module calls the programs. It repeats them if a rank was lost, or if
tensors have become larger than the sums expected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ringjax import runtime
from ringjax.elastic.place import Place, current_place
from ringjax.errors import RingjaxError
from ringjax.pieces import training as states
from ringjax.pieces.audit import Audit
from ringjax.pieces.bits import hash_words, with_flips
from ringjax.pieces.control import Control
from ringjax.pieces.programs import MAX_REPEATS, Programs
from ringjax.pieces.shares import (
    MAX_MICROSECONDS,
    Shares,
    pieces_of,
    share_of_missing,
)
from ringjax.pieces.signature import Signature
from ringjax.pieces.start_check import StartCheck
from ringjax.pieces.training import NAME, Training
from ringjax.world.time_spent import spent

# If the pieces of a rank take fewer seconds than this, it measures them in every fourth
# step only: a host that waits for the pieces calls the exchange 0.1 to 0.2 ms later.
_SHORT = 0.01
_MEASURED = 4

Load = Callable[[int, int], Any]


class Step:
    """A training step that `step` has made."""

    def __init__(
        self,
        programs: Programs,
        *,
        pieces: int,
        has_aux: bool,
        balance: bool,
        one_program: bool,
        audit: int | None,
    ) -> None:
        self._programs, self._pieces = programs, pieces
        self._has_aux, self._balance = has_aux, balance
        self._one_program, self._every = one_program, audit
        self._run = self._run_whole if one_program else self._run_pieces
        self._check = StartCheck(pieces)
        self._data: Signature | None = None
        self._plan: object = None
        self._shares = Shares(pieces, 1)
        self._compiled = False
        self._taken = math.inf  # seconds, when last measured
        self._next: tuple[Any, int] = (None, 0)  # the next step's number

    def init(self, params: Any, load: Load, stats: Any = None) -> Training:
        """Returns the state before the first step. All ranks pass equal values.

        Computes piece 0 of step 0 on every rank, to find the scale of the gradients.

        Args:
            params: a tree of float arrays.
            load: ``load(number, piece)`` returns the data of one piece.
            stats: None, or a tree of float arrays that `loss_of` carries from step to
                step besides the parameters.

        Raises:
            TypeError, ValueError: an argument is wrong; the text names the leaf.
        """
        runtime.current(NAME)
        states.check_groups()
        for what, tree in (("parameter", params), ("stats", stats)):
            states.check_floats(what, tree, states.KEEP_OUT)
        params, stats = jax.tree.map(jnp.asarray, (params, stats))
        training = self._programs.first(params, stats, self._loaded(load, 0, 0))
        states.check_optimizer(training.opt_state)
        return training

    def __call__(self, training: Training, load: Load) -> tuple[Training, Any]:
        """Makes one step. All ranks call it together.

        Args:
            training: the state that `init` or the previous step has returned.
            load: ``load(number, piece)`` returns the data of one piece, a tree of
                arrays whose shapes and dtypes are the same for all pieces.

        Returns:
            The next state, and the mean loss over the pieces as float32. With
            `has_aux`, the pair of the loss and the mean of aux instead of the loss.

        Raises:
            TypeError, ValueError: an argument is wrong.
            InvalidArgument: this rank would compute other bits than the others.
            RingjaxError, JaxRuntimeError: a rank was lost in a job that is not elastic,
                or the ranks' calls differ. `training` stays valid.
        """
        states.check_not_traced()
        number, place = self._number_of(training), current_place(NAME)
        if place.plan is not self._plan or self._programs.several_devices:
            training = self._programs.placed(training)
        if place.plan is not self._plan:
            self._check(place, lambda: self._text(training, load, place), training)
            self._plan = place.plan
            self._shares = Shares(self._pieces, place.count)
        training = training._replace(params=with_flips(training.params))
        for attempt in range(MAX_REPEATS):
            with spent.on("repeated") if attempt else nullcontext():
                (new, loss, aux), again = self._run(training, load, number, place)
            self._compiled = True
            if not again:
                self._next = new.number, number + 1
                return new, (loss, aux) if self._has_aux else loss
            training = training._replace(exponents=new.exponents)
        raise RingjaxError(
            f"{NAME}: step {number} was repeated {MAX_REPEATS} times, and its sums "
            "still do not fit; does `loss_of` depend on anything but its arguments?"
        )

    def _run_pieces(
        self, training: Training, load: Load, number: int, place: Place
    ) -> Any:
        """Adds the own pieces, exchanges, and adds pieces that lost ranks have left."""
        own = Control.of_rank(self._pieces, place)
        todo, acc = pieces_of(place.index, self._shares.counts), None
        missing: list[int] = []  # the pieces of ranks that were lost in this step
        audit = self._audit(own, training, number, place)
        if audit.owns:  # the piece comes first: its checksum is that of the sum so far
            todo.remove(audit.piece)
            own.add([audit.piece])
            acc = self._add(None, training, load, number, [audit.piece])
            own.vote(0, acc.checksum)
        while True:
            for slot in audit.slots():
                alone = self._add(None, training, load, number, [audit.piece])
                own.vote(slot, alone.checksum)
            began = time.perf_counter()
            with spent.on("losses") if missing else nullcontext():
                acc = self._add(acc, training, load, number, todo)
            own.add(todo)
            if todo and (self._taken >= _SHORT or number % _MEASURED == 0):
                own.microseconds[place.index] = self._time_of_piece(acc, began, todo)
            # The words are copied: the program may read them after the next change.
            applied, words = self._programs.finish(acc, training, own.words.copy())
            again, total = self._received(words)
            missing = total.missing(number)
            if not audit.judge(total) and not missing:
                break
            todo = share_of_missing(missing, total.present.tolist(), place.index)
        if self._balance:
            count = place.count
            self._shares.update(
                total.present[:count].tolist(),
                total.microseconds[:count].tolist(),
            )
        return applied, again

    def _number_of(self, training: Training) -> int:
        """Returns the number of the step; reads the array only if it is not known."""
        array, number = self._next
        return number if training.number is array else int(training.number)

    def _received(self, words: jax.Array) -> tuple[bool, Control]:
        """Waits for the words that `finish` and `whole` return."""
        # They are one array, because the host takes 20 to 80 us to read one.
        received = np.asarray(words)
        return bool(received[0]), Control.of(received[1:], self._pieces)

    def _audit(
        self, own: Control, training: Training, number: int, place: Place
    ) -> Audit:
        """Begins the audit of a step."""
        piecewise = not self._one_program
        audit = Audit(self._every, number, place, self._shares.counts, piecewise)
        if audit.due:
            own.states[place.index] = hash_words(training)
        return audit

    def _text(self, training: Training, load: Load, place: Place) -> str:
        """Returns the text of the programs, which must be equal on all ranks."""
        words = Control.of_rank(self._pieces, place).words
        data = self._example(load, int(training.number))
        return self._programs.text(training, data, words, self._one_program)

    def _example(self, load: Load, number: int) -> Any:
        """Returns the shapes of a piece's data, also if this rank has no piece."""
        self._data = self._data or Signature(load(number, 0))
        return self._data.example()

    def _add(
        self, acc: Any, training: Training, load: Load, number: int, todo: Iterable[int]
    ) -> Any:
        """Adds pieces to an accumulator; None is an empty one."""
        training = training._replace(opt_state=None)  # fewer arguments of each call
        if acc is None:
            acc = self._programs.zeros(training, self._example(load, number))
        for piece in todo:
            data = self._loaded(load, number, piece)
            where = np.array([number, piece], np.int32)
            acc = self._programs.add(acc, training, data, where)
        return acc

    def _time_of_piece(self, acc: Any, began: float, todo: list[int]) -> int:
        """Waits for the sum of the pieces; returns microseconds per piece, or 0.

        This must precede the exchange, which also waits for slower ranks. The first
        step compiles its programs, so its time says nothing about later steps.
        """
        if not (self._balance and self._compiled):
            return 0
        jax.block_until_ready(acc)
        self._taken = time.perf_counter() - began
        return min(max(int(1e6 * self._taken) // len(todo), 1), MAX_MICROSECONDS)

    def _run_whole(
        self, training: Training, load: Load, number: int, place: Place
    ) -> Any:
        """Makes the step by one program, to which all pieces' data are passed."""
        loaded = [self._loaded(load, number, piece) for piece in range(self._pieces)]
        data = jax.tree.map(lambda *rows: np.stack(rows), *loaded)
        own = Control.of_rank(self._pieces, place)
        own.add(pieces_of(place.index, self._shares.counts))
        audit = self._audit(own, training, number, place)
        while True:
            applied, words = self._programs.whole(training, data, own.words)
            again, total = self._received(words)
            total.missing(number)
            if not audit.judge(total):
                return applied, again

    def _loaded(self, load: Load, number: int, piece: int) -> Any:
        data = load(number, piece)
        if self._data is None:
            self._data = Signature(data)
        else:
            self._data.check(data, number, piece)
        return data


def step(
    loss_of: Callable[..., Any],
    tx: optax.GradientTransformation,
    pieces: int,
    *,
    seed: int = 0,
    has_aux: bool = False,
    balance: bool = True,
    one_program: bool = False,
    audit: int | None = None,
) -> Step:
    """Makes a training step that gives the same bits on any number of ranks.

    Every step has `pieces` pieces. Ranks compute the gradients of their pieces, add
    them exactly, and apply the mean. The ranks' shares may differ, and change: ranks
    that are slower get fewer pieces, and if ranks are lost, the others compute the lost
    pieces in the same step. Neither changes the result.

    Args:
        loss_of: ``loss_of(params, data, key)`` returns the mean loss over one piece.
            It must depend on nothing else, in particular not on the rank. `key` is a
            key of jax.random that depends on seed, step and piece.
        tx: an optimizer of optax, without `ringjax.allreduce_grads`.
        pieces: the number of pieces, such as 12 or 24. A number with many divisors
            shares out evenly; ranks beyond it have nothing to do. It is part of the
            result: another number gives other bits.
        seed: seeds the keys.
        has_aux: whether `loss_of` returns ``(loss, aux)``. `aux` is a tree of floats,
            such as metrics; the step returns their exact mean over the pieces.
        balance: whether the shares follow the measured speed of each rank.
        one_program: whether the step is one compiled program, with a loop over the
            pieces. It saves calls, but needs the data of all pieces on every rank, has
            even shares, and is slow for convolutions on CPUs. Its bits may differ from
            those of the other form, so all ranks must choose the same.

        audit: the number of steps from one audit to the next; 0 for none. None chooses
            a number with which audits take less than a fiftieth of the time. In an
            audit, all ranks compare their parameters and optimizer states, and a second
            rank computes one of the pieces (not with `one_program`). If ranks differ,
            there is a fault of memory or of a CPU. The step raises an error that names
            the rank, or in an elastic job loses that rank and computes its pieces
            again.

    Returns:
        A step with these two uses:

        ``training = step.init(params, load, stats=None)``: the state before the first
        step, a `Training`. If there are `stats`, such as running averages of batch
        normalisation, ``loss_of(params, stats, data, key)`` returns ``(loss, stats)``,
        or ``(loss, (stats, aux))`` with `has_aux`. The next step gets the exact mean
        of all pieces' `stats`.

        ``training, loss = step(training, load)``: one step. ``load(number, piece)``
        returns the data of one piece, in arrays of equal shapes for all pieces.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, ringjax
        >>> ringjax.init()
        >>> def load(number, piece):
        ...     return np.random.default_rng([number, piece]).normal(size=(8, 3))
        >>> def loss_of(params, data, key):
        ...     return jnp.mean((data @ params - 1) ** 2)
        >>> step = ringjax.pieces.step(loss_of, optax.sgd(0.1), pieces=4)
        >>> training = step.init(jnp.zeros(3), load)
        >>> for _ in range(3):
        ...     training, loss = step(training, load)
        >>> int(training.number)
        3

    References:
        J. Demmel, H. D. Nguyen, Parallel reproducible summation, IEEE Transactions on
        Computers 64 (2015) (sums that do not depend on the order).

        M. Li et al., EasyScale: elastic training with consistent accuracy and improved
        utilization on GPUs, SC 2023 (a fixed number of logical workers).
    """
    if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
        raise ValueError(
            f"{NAME}: `pieces` is {pieces!r}, expected a positive integer, which is "
            "equal on all ranks"
        )
    if audit is not None and audit < 0:
        raise ValueError(
            f"{NAME}: `audit` is {audit}, expected 0, or a number of steps"
        )
    return Step(
        Programs(loss_of, tx, pieces, seed, has_aux),
        pieces=pieces,
        has_aux=has_aux,
        balance=balance,
        one_program=one_program,
        audit=audit,
    )
