"""The comparison in benchmarks/ without its peers: shapes, options, ratios, tables.

test_limit.py tests the limit. No test measures time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import (
    launchers,
    machine,
    options,
    plots,
    report,
    shapes,
    turns,
)
from benchmarks.harness.turns import Case, Variant
from benchmarks.peers.table import PEERS, Entry

USUAL = [name for name, entry in PEERS.items() if entry.usual]

# -- shapes and options ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "numbers"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("transformer", 1204, 26_391_424),
    ],
)
def test_sets_have_the_tensors_of_their_network(
    name: str, tensors: int, numbers: int
) -> None:
    found = shapes.SETS[name][1]()
    assert (len(found), shapes.count(found)) == (tensors, numbers)


def test_the_wide_transformer_has_as_many_tensors() -> None:
    assert len(shapes.transformer()) == len(shapes.narrow_transformer()) == 1204


@pytest.mark.parametrize("tensors", [1, 3, 7, 10])
def test_even_tensors_hold_all_numbers(tensors: int) -> None:
    found = shapes.even(tensors, 10)
    assert len(found) == tensors and shapes.count(found) == 10
    assert max(found)[0] - min(found)[0] <= 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4K", 4096), ("100m", 100 << 20), ("1GiB", 1 << 30)],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert options.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4T", "x"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        options.parse_bytes(text)


@pytest.mark.parametrize("text", ["1", "2,1", "", "2,x"])
def test_invalid_numbers_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="-np is 2 or more"):
        options.parse_ranks(text)


def test_default_cases() -> None:
    found = options.parse([])
    assert found.ranks == [2] and found.peers == USUAL
    kinds = [(c.kind, c.size, len(c.shapes)) for c in options.cases(found, 2)]
    assert kinds == [
        *(("arrays", size, 1) for size in options.SIZES),
        ("models", 4 * 25_557_032, 161),
        ("streams", options.STREAMED, 1),
    ]
    assert [c.kind for c in options.cases(found, 4)].count("streams") == 0


def test_full_has_all_cases() -> None:
    found = options.parse(["--full", "--peers", "limit", "all"])
    assert found.ranks == [2, 3, 4, 8] and found.peers == USUAL
    cases = options.cases(found, 4)
    assert {c.dtype for c in cases} == {"float32", "bfloat16"}
    assert len(cases) == 2 * (len(options.FULL_SIZES) + 3)
    sizes = {c.size for c in cases if c.kind == "arrays"}
    assert min(sizes) == 4096 and max(sizes) == 256 << 20


def test_cases_of_counts_have_equal_bytes() -> None:
    words = ["--no-model", "--no-tcp", "--sizes", "--counts", "--dtype", "bfloat16"]
    cases = options.cases(options.parse(words), 2)
    assert [len(c.shapes) for c in cases] == [1, 10, 100, 1000, 10_000]
    assert {c.size for c in cases} == {16 << 20} and all(c.counts for c in cases)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rounds", "0"], "--rounds must be 1"),
        (["--sizes", "2"], "--sizes 4 or more"),
        (["--counts", "0"], "--counts must be 1"),
        (["--counts", "9", "--total", "32"], "no more than --total has numbers"),
        (["--peers", "nccl"], "invalid choice"),
        (["--python", "horovod"], "'horovod' is not PEER=PYTHON"),
        (["--python", "nccl=python3"], "'nccl=python3' is not PEER=PYTHON"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(words)
    assert text in capsys.readouterr().err


def test_plot_is_refused_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options.parse(["--plot", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


# -- who starts the ranks --------------------------------------------------------------


def test_a_missing_module_or_program_is_named(tmp_path: Path) -> None:
    words = argparse.Namespace(mpirun="no-such-mpirun", mpich="no-such-mpich")
    for launcher, text in (
        ("mpirun", "no program no-such-mpirun here"),
        ("mpich", "no program no-such-mpich here"),
        ("impi", "no mpiexec.hydra beside"),
    ):
        entry = Entry(PEERS["mpi4py"].kind, (), launcher)
        with pytest.raises(launchers.Absent, match=text):
            launchers.find(entry, 2, words, tmp_path)
    absent = Entry(PEERS["mpi4py"].kind, ("no_such_module",))
    with pytest.raises(launchers.Absent, match="no module no_such_module here"):
        launchers.find(absent, 2, words, tmp_path)


def test_the_headers_of_a_peer_are_searched_beside_its_python(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    entry = Entry(PEERS["oneccl"].kind, (), "impi")
    with pytest.raises(launchers.Absent, match=rf"oneccl\.cc -I{tmp_path}/include"):
        launchers.find(entry, 2, options.parse([]), tmp_path, str(python))


def test_a_peer_may_have_another_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def named(*words: str) -> str:
        return launchers.interpreter("horovod", options.parse(words))

    monkeypatch.setattr(launchers, "PEERS_FOLDER", tmp_path)
    assert named() == sys.executable
    built = tmp_path / "horovod" / "bin" / "python"
    built.parent.mkdir(parents=True)
    built.symlink_to(sys.executable)
    # The link is not followed, because its target belongs to another environment.
    assert named() == str(built)
    assert named("--python", "horovod=/other/python", "mpich=x") == "/other/python"
    entry = Entry(PEERS["horovod"].kind, ("json",), "horovodrun")
    words = options.parse([])
    with pytest.raises(launchers.Absent, match="no program horovodrun here"):
        monkeypatch.setenv("PATH", "")
        launchers.find(entry, 2, words, tmp_path, str(built))
    run = built.with_name("horovodrun")
    run.touch(0o755)
    found = launchers.find(entry, 2, words, tmp_path, str(built))
    assert (found.python, found.words[0]) == (str(built), str(run))


def test_modules_are_searched_by_the_python_of_the_peer(tmp_path: Path) -> None:
    entry = Entry(PEERS["mpi4py"].kind, ("json", "no_such_module"))
    words = options.parse([])
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    with pytest.raises(launchers.Absent, match=f"no_such_module for {other}"):
        launchers.find(entry, 2, words, tmp_path, str(other))
    with pytest.raises(launchers.Absent, match=f"no Python {tmp_path}/none"):
        launchers.find(entry, 2, words, tmp_path, f"{tmp_path}/none")


def test_more_ranks_than_cores_must_yield() -> None:
    assert launchers.open_mpi_words(2, 2) == ["--bind-to", "core"]
    crowded = launchers.open_mpi_words(3, 2)
    assert "mpi_yield_when_idle" in crowded and "none" in crowded


# -- ratios and tables -----------------------------------------------------------------


class World:
    """A stand-in for a world, with only its name."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


def variant(peer: str, *rounds: list[float], **known: Any) -> Variant:
    """Makes a variant with measured `rounds`."""
    about = {"wall": 1.0, "busy": 0.5, "own": 0.5} | known
    return Variant(World(peer), f"of {peer}", rounds=list(rounds), **about)


CASE = Case("4 MB, float32, sum", [(1_000_000,)])


def rows() -> list[dict[str, Any]]:
    """Returns rows of three rounds; the second is slower for all, with equal ratios."""
    return turns.compare(
        [
            variant("limit", [0.5], [5.0], [0.5]),
            variant("limit", [0.9], [9.0], [0.9]),
            variant("ringjax", [1.0], [10.0], [1.0]),
            variant("other", [2.0], [20.0], [4.0], wall=0.1),
        ],
        CASE,
        ranks=4,
    )


def test_ratios_are_taken_within_a_round() -> None:
    best, _, ours, theirs = rows()
    ratios = [theirs[name] for name in ("ratio", "ratio_min", "ratio_max")]
    assert ratios == [2.0, 2.0, 4.0]
    assert ours["ratio"] == 1.0 and ours["share"] == 0.5 and best["share"] == 1.0
    assert theirs["share"] == 0.25
    assert ours["against"] == {"limit": 0.5, "ringjax": 1.0, "other": 2.0}
    assert ours["us_median"] == 1e6 and ours["algbw"] == pytest.approx(4e-3)
    assert ours["busbw"] == pytest.approx(6e-3)
    assert ours["foreign"] == 0.0 and theirs["foreign"] is None


def test_streams_carry_each_byte_once() -> None:
    case = Case("TCP", [(1_000_000,)], "streams")
    (row,) = turns.compare([variant("limit", [1.0])], case, ranks=2)
    assert row["busbw"] == row["algbw"] and row["ratio"] is None


def test_columns_are_aligned() -> None:
    text = report.table("title", rows())
    head, *lines = text.splitlines()[2:]
    ends = {name: head.index(name) + len(name) for name in ("p90", "busbw", "foreign")}
    assert all(len(line) == ends["foreign"] for line in lines)
    assert all(line[ends["busbw"]] == line[ends["p90"]] == " " for line in lines)
    assert lines[-1].split()[-6:] == ["2.00", "(2.00", "..", "4.00)", "0.25", "-"]
    faster = report.ratio_table(rows()).splitlines()
    assert faster[0].split()[-2:] == ["limit", "other"]
    assert faster[1].split() == ["ringjax:", "of", "ringjax", "0.50", "2.00"]
    assert report.ratio_table(rows()[:2]) == ""


def counted() -> list[dict[str, Any]]:
    """Returns rows of two peers and two tensor counts; one failed in the second."""
    about = {"kind": "models", "counts": True, "dtype": "float32", "ranks": 2}
    about |= {"size": 1 << 20, "variant": "v"}
    found = [("limit", 1, 4.0), ("other", 1, 5.0), ("limit", 1000, 6.0)]
    return [
        {**about, "peer": peer, "tensors": n, "us_median": t} for peer, n, t in found
    ]


def test_table_of_time_by_tensors() -> None:
    title, head, first, second = report.counts_table(counted()).strip().splitlines()
    assert title.startswith("1 MiB in so many tensors")
    assert head.split()[-3:] == ["1", "1000", "last/first"]
    assert first.split() == ["limit:", "v", "2", "float32", "4.0", "6.0", "1.50"]
    assert second.split()[-3:] == ["5.0", "-", "-"]
    assert report.counts_table([]) == ""


def test_a_line_of_the_plot_is_the_fastest_variant() -> None:
    more = [*counted(), {**counted()[0], "variant": "w", "us_median": 3.0}]
    points = {"limit": [(1, 3.0), (1000, 6.0)], "other": [(1, 5.0)]}
    assert plots.lines(more, "tensors") == points


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    more = [{**row, "counts": False, "kind": "arrays"} for row in counted()]
    files = plots.draw([*counted(), *more], tmp_path / "x.png")
    assert [file.name for file in files] == ["x.png", "x-counts.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_variants_that_do_not_fit_into_memory_are_left_out() -> None:
    one = turns.COPIES * 100 * 2
    assert turns.variants_that_fit([3, 1], 100, 2, one * 4) == 3
    assert turns.variants_that_fit([3, 1], 100, 2, one * 4 - 1) == 2
    assert turns.variants_that_fit([3, 1], 100, 2, one * 2) == 1
    assert turns.variants_that_fit([3, 1], 100, 2, one) == 0
    assert turns.variants_that_fit([], 100, 2, 0) == 0


def test_quiet_waits_while_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    busy = iter([0.0, 0.9 * cores, 0.9 * cores, 0.95 * cores, 9.0, 19.0 * cores])
    wall = iter([0.0, 1.0, 1.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(turns, "_clocks", lambda: (next(wall), next(busy), 0.0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    quiet = turns.Quiet(3.0)
    quiet.wait()  # a busy second, then a quiet one
    assert quiet.left == 1.0
    quiet.wait()  # busy, and no time left
    quiet.wait()
    assert quiet.left == 0.0


def test_results_describe_the_machine() -> None:
    about = json.loads(json.dumps(machine.describe()))
    assert about["machine"]["cpus"] >= 1 and about["machine"]["cpu"]
    assert about["when"][:2] == "20"
