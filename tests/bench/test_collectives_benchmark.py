"""The comparison of all collectives without its peers: cases, checks, the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import collectives
from benchmarks.harness import patterns, turns, worker
from benchmarks.harness.turns import Case, Variant
from benchmarks.peers.adapter import COLLECTIVES, Peer


def test_default_cases() -> None:
    options = collectives.parse([])
    assert options.ranks == [2, 4] and {"limit", "mpich"} <= set(options.peers)
    assert not {"jax-empty", "ringjax-tcp"} & set(options.peers)  # no collectives
    cases = collectives.cases(options, 4)
    assert [(c.collective, c.size) for c in cases] == [
        (name, size) for name in COLLECTIVES for size in collectives.SIZES
    ]
    (odd,) = collectives.cases(
        collectives.parse(["--sizes", "4K", "--collectives", "alltoall"]), 3
    )
    assert (odd.title, odd.shapes) == ("alltoall, 4 KiB", [(1023,)])


def test_other_options_override_quick() -> None:
    options = collectives.parse(["--quick", "--rounds", "5"])
    assert (options.rounds, options.ranks, options.seconds) == (5, [2], 0.01)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--sizes", "12", "-np", "4"]])
def test_bad_options_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        collectives.parse(words)
    assert "--rounds must be 1 or more, --sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("allreduce", [1, 3, 5, 7]),
        ("broadcast", [0, 1, 2, 3]),
        ("allgather", [0, 1, 1, 2]),
        ("alltoall", [2, 3, 3, 4]),
        ("reducescatter", [5, 7]),
    ],
)
def test_expected_results_of_rank_1_of_2(name: str, right: list[int]) -> None:
    given = patterns.input_of(name, 1, 2, 4).tolist()
    assert given == ([1, 2] if name == "allgather" else [1, 2, 3, 4])
    assert patterns.expected(name, 1, 2, 4).tolist() == right


class OneRank(Peer):
    """A peer of one rank. Its result is its input, or wrong by `off`."""

    arrays = models = ()

    def __init__(self, off: float, returns: bool) -> None:
        self.rank, self.size, self.version = 0, 1, "1"
        self.off, self.returns = off, returns
        self.arrays_given: list[Any] = []

    def collective(self, name: str, given: Any, out: Any) -> Any:
        self.arrays_given = [given, out]

        def step() -> Any:
            result = given + np.float32(self.off)
            if not self.returns:
                out[:] = result
            return [result] if self.returns else None

        return step


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_checked_before_it_is_timed(name: str, returns: bool) -> None:
    peer = OneRank(0, returns)
    worker.collective(peer, name, 10)
    given, out = peer.arrays_given
    assert (given is out) == (name in ("allreduce", "broadcast"))
    assert not given.any()  # zeros stay zeros in a sum in place
    with pytest.raises(ArithmeticError, match=f"{name} of 10 numbers came out wrong"):
        worker.collective(OneRank(1, returns), name, 10)


def test_fresh_input_is_written_outside_the_measured_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seen = [0.0], []

    class Given:
        """An input whose assignment takes ten seconds."""

        def fill(self, value: float) -> None:
            now[0] += 10
            seen.append(value)

    def step() -> None:
        now[0] += 1
        seen.append("called")

    monkeypatch.setattr(worker.time, "perf_counter", lambda: now[0])
    given: Any = Given()
    assert worker.Fresh(step, given).seconds(3) == 3
    assert seen == [0, "called"] * 3
    made = worker.collective(OneRank(0, True), "alltoall", 10, fresh=True)
    assert isinstance(made, worker.Fresh)


def test_fresh_is_refused_for_peers_that_copy_their_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = collectives.parse(["--fresh"])
    assert options.peers == ["ringjax", "mpi4py", "mpich", "impi", "oneccl"]
    assert all(case.fresh for case in collectives.cases(options, 2))
    with pytest.raises(SystemExit):
        collectives.parse(["--fresh", "--peers", "ringjax", "limit"])
    assert "--fresh: not with limit" in capsys.readouterr().err


def test_bus_factor_of_each_collective() -> None:
    factors = [
        Case("", [(4,)], "collectives", collective=name).bus_factor(4)
        for name in COLLECTIVES
    ]
    assert factors == [1.5, 1.0, 0.75, 0.75, 0.75]


class World:
    """A stand-in for a world, with only its name."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


def variant(peer: str, name: str, *times: float) -> Variant:
    """Makes a variant with `times`: the milliseconds of each round."""
    rounds = [[t / 1e3] for t in times]
    return Variant(World(peer), name, rounds=rounds, wall=1.0, busy=0.5, own=0.25)


def rows(*more: Variant, **times: list[float]) -> list[dict[str, Any]]:
    """Returns the rows of one case, from each peer's milliseconds per round."""
    case = Case("alltoall, 4 KiB", [(1024,)], "collectives", collective="alltoall")
    variants = [variant(peer, "alltoall", *of) for peer, of in times.items()]
    found = turns.compare([*more, *variants], case, ranks=2)
    return [{"case": case.title, **row} for row in found]


def test_the_table_compares_with_the_best_mpi() -> None:
    more = rows(ringjax=[0.01, 0.02, 0.03], mpi4py=[5, 6, 7], mpich=[0.02, 0.02, 0.09])
    other = [{**more[0], "case": "broadcast, 4 KiB"}]  # no other peer has this case
    head, first, second = collectives.table([*more, *other]).splitlines()
    assert head.split()[4:] == ["/", "MPI", "ringjax", "mpi4py", "mpich", "foreign"]
    first_cells, second_cells = (" ".join(x.split()) for x in (first, second))
    ours, theirs = "20.0 (10.0 .. 30.0)", "20.0 (20.0 .. 90.0) 1.00"
    known = f"{ours} 0.50 6000 (5000 .. 7000) 250.00 {theirs} 0.12"
    assert first_cells == f"alltoall, 4 KiB {known}"
    assert second_cells == f"broadcast, 4 KiB {ours} - - 0.12"
    assert len(head) == len(first) == len(second)


def test_table_without_mpi_has_no_ratio() -> None:
    head, line = collectives.table(rows(ringjax=[0.02])).splitlines()
    assert "MPI" not in head and "20.0 (20.0 .. 20.0)  " in line


def test_the_best_variant_of_the_limit_has_the_fastest_round() -> None:
    often = variant("limit", "alltoall: often", 0.02, 0.02, 0.02)
    once = variant("limit", "alltoall: once", 0.01, 0.03, 0.03)
    found = rows(often, once, ringjax=[0.04, 0.04, 0.06], mpich=[0.02, 0.02, 0.03])
    head, line = (x.split() for x in collectives.table(found).splitlines())
    assert head[6:] == ["limit", "ringjax", "of", "limit", "mpich", "foreign"]
    limit, ours = ["30.0", "(10.0", "..", "30.0)"], ["40.0", "(40.0", "..", "60.0)"]
    assert line[3:] == [*limit, "1.00", *ours, "2.00", "0.50", *line[-6:]]
    without = collectives.table(rows(often, mpich=[0.02, 0.02, 0.03]))
    assert "of limit" not in without


class Worlds:
    """A peer with three variants that records the requested variants."""

    peer, dtypes = "limit", ("float32",)

    def __init__(self) -> None:
        names = ["broadcast: a", "broadcast: b", "alltoall"]
        self.variants = {"collectives": names}
        self.prepared: list[str] = []

    def request(self, **message: Any) -> list[dict[str, Any]]:
        if message["do"] == "prepare":
            self.prepared = message["variants"]
            return [{}]
        return [{"seconds": [0.001] * message["batches"], "cpu": 0.0}]


def test_each_case_runs_the_variants_of_its_collective() -> None:
    options = collectives.parse(["--rounds", "2", "--sizes", "4K"])
    world = Worlds()
    quiet = turns.Quiet(0.0)
    asked = {}
    for case in collectives.cases(options, 2):
        world.prepared = []
        found = turns.measure([world], case, 2, options, quiet)
        assert [row["variant"] for row in found] == world.prepared
        asked[case.collective] = world.prepared
    assert {k: v for k, v in asked.items() if v} == {
        "broadcast": ["broadcast: a", "broadcast: b"],
        "alltoall": ["alltoall"],
    }
