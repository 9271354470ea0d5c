"""Plain calls of ringjax.eager, which the binding runs without the Python functions."""

from __future__ import annotations

import copy
import inspect
import os
import pickle  # noqa: TID251
import typing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rank_worker import World

import ringjax
from ringjax import eager, runtime
from ringjax.eager import movement, operations, reductions

pytestmark = [pytest.mark.ranks(2), pytest.mark.launch("torch")]
FUNCTIONS = [
    eager.allgather,
    eager.allreduce,
    eager.alltoall,
    eager.broadcast,
    eager.reducescatter,
]
X = np.arange(4.0)


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the operations that the Python functions submit."""
    found: list[str] = []

    def record(submit: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(op: str, *args: Any, **options: Any) -> Any:
            found.append(op)
            return submit(op, *args, **options)

        return recorded

    for module in (movement, operations):
        monkeypatch.setattr(module, "submit", record(operations.submit))
        monkeypatch.setattr(module, "submit_ragged", record(operations.submit_ragged))
    return found


def test_plain_calls_avoid_the_python_functions(
    world: World, submissions: list[str]
) -> None:
    size, out = world.size, np.empty_like(X)
    assert eager.allreduce(X, name="p", out=out) is out
    assert (out == X).all()
    total = eager.allreduce(X, ringjax.Sum, name=None, prescale_factor=2)
    assert (total == 2 * size * X).all()
    total = eager.allreduce(tensor=X, op=1, name="", postscale_factor=0.5, out=None)
    assert (total == size / 2 * X).all()
    assert eager.allreduce(np.array(3.0)).shape == ()
    given = np.full(3, world.rank)
    assert (eager.broadcast(given, 1) == 1).all()
    assert (eager.broadcast(given, root_rank=0, out=given) == 0).all()
    pieces = eager.reducescatter(X, ringjax.Max)
    assert (pieces == np.split(X, size)[world.rank]).all()
    rows = np.empty(size * 4)
    assert (eager.allgather(X, out=rows) == np.tile(X, size)).all()
    assert eager.alltoall(X, None, out=out) is out
    assert (out == np.tile(pieces, size)).all()
    assert submissions == []


def test_other_calls_reach_the_python_functions(
    world: World, submissions: list[str]
) -> None:
    assert eager.allreduce(1.0) == 1
    assert (eager.allreduce(X[::2]) == X[::2]).all()
    assert (eager.allreduce(X.astype(">f8")) == X).all()
    assert eager.allreduce(np.float64(2)) == 2
    assert len(eager.allgather(X)) == 4 * world.size
    assert submissions == ["allreduce"] * 4 + ["allgather"]


def test_plain_and_other_calls_are_one_operation(world: World) -> None:
    x = X if world.rank else X.astype(">f8")
    assert (eager.broadcast(x, 0, name="both") == X).all()
    assert (eager.allreduce(x, name="both 2") == X).all()
    assert (eager.allreduce(x) == X).all()  # one counter names both


def test_a_process_set_has_its_own_lane(world: World, submissions: list[str]) -> None:
    alone = [ringjax.add_process_set([rank]) for rank in range(world.size)]
    own, other = alone[world.rank], alone[1 - world.rank]
    given = X + world.rank
    assert (eager.allreduce(given, process_set=own) == given).all()
    assert (eager.broadcast(given, world.rank, process_set=own) == given).all()
    assert submissions == []
    with pytest.raises(ValueError, match="does not include this rank"):
        eager.allreduce(given, process_set=other)
    for each in alone:
        ringjax.remove_process_set(each)
    with pytest.raises(ValueError, match="is not registered"):
        eager.allreduce(given, process_set=own)


@pytest.mark.parametrize("how", ["context", "set"])
def test_a_limit_applies(world: World, how: str) -> None:
    if world.rank == 0:
        with pytest.raises(ringjax.errors.Stalled, match=r"'late .*\b1\b") as caught:
            if how == "context":
                with ringjax.collective_timeout(0.2):
                    eager.allreduce(X, name=f"late {how}")
            else:
                everybody = runtime.global_process_set
                everybody.timeout = 0.2
                try:
                    eager.allreduce(X, name=f"late {how}")
                finally:
                    everybody.timeout = None
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    eager.barrier()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_keeps_its_description(world: World, function: Any) -> None:
    plain = function.__wrapped__
    assert inspect.signature(function) == inspect.signature(plain)
    assert typing.get_type_hints(function) == typing.get_type_hints(plain)
    assert function.__doc__ == plain.__doc__
    assert function.__module__ in (reductions.__name__, movement.__name__)
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert weakref.ref(function)() is function
    assert inspect.isroutine(function) and repr(function) == repr(plain)
    assert type("", (), {"method": function})().method.__func__ is plain


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((X, 1, "name"), {}),
        ((X,), {"tensor": X}),
        ((X,), {"bogus": 1}),
    ],
)
def test_arguments_that_do_not_fit(
    world: World, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"allreduce\(\)"):
        eager.allreduce(*args, **options)


def test_a_name_must_be_encodable(world: World) -> None:
    with pytest.raises(UnicodeEncodeError):
        eager.allreduce(X, name="\ud800")


@pytest.mark.launch("core")
def test_no_plain_call_outlives_the_world() -> None:
    ringjax.shutdown()  # tests of other files run in the same processes
    with pytest.raises(ringjax.errors.NotInitialized):
        eager.allreduce(X)
    for _ in range(2):
        ringjax.init()
        assert (eager.allreduce(X) == X).all()
        ringjax.shutdown()
        with pytest.raises(ringjax.errors.NotInitialized):
            eager.allreduce(X)


@pytest.mark.launch("core")
def test_a_forked_child_makes_no_plain_call() -> None:
    ringjax.init()
    assert (eager.allreduce(X) == X).all()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            eager.allreduce(X)
        except ringjax.errors.RingjaxError as error:
            code = 0 if "forked" in str(error) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (eager.allreduce(X) == X).all()
