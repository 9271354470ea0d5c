"""Tests of profiles from simulated part files: clocks, late ranks, both formats."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.launch import ROOT
from support.unread_pipe import run_without_reader

from ringjax.profile import archive, breakdown, merge, parts, show
from ringjax.profile.__main__ import main
from ringjax.profile.clocks import CommonClock
from ringjax.world.part_file import PartFile

STEP, MOVE = 0.05, 0.002
LATE = 0.01
# Seconds by which the clock of each host is ahead of true time, and its drift per
# second.
CLOCKS = {"host-a": (100.0, 0.0), "host-b": (5_000.0, 20e-6), "host-c": (-40.0, -30e-6)}
START = 10_000.0


def clock_time(host: str, when: float) -> float:
    """Returns the time on the clock of `host` at the true time `when`."""
    ahead, drift = CLOCKS[host]
    return when + ahead + drift * (when - START)


class Rank:
    """Writes the part file of a simulated rank."""

    def __init__(self, folder: Path, rank: int, size: int, host: str, run: str) -> None:
        self.rank, self.host = rank, host
        path = folder / parts.PARTS / f"{run}.rank-{rank}.jsonl"
        self.file = PartFile(path, pytest.fail)
        at = clock_time(host, START - 1)
        self.file.write_header(
            format=1, run=run, who=f"rank {rank}", pid=1, host=host, clock=host,
            monotonic=at, realtime=1.7e9 + START,
        )  # fmt: skip
        self.file.write_header(epoch=0, rank=rank, size=size, host=host, at=at)

    def read_clock(self, when: float, there: float, back: float) -> None:
        """Records a clock reading from rank 0, which runs on host-a.

        Args:
            there: seconds that the request takes.
            back: seconds that the reply takes.
        """
        asked, heard = (
            clock_time(self.host, when),
            clock_time(self.host, when + there + back),
        )
        answered = clock_time("host-a", when + there)
        self.file.write_record(
            clock=0, epoch=0, when=heard, ahead=answered - (asked + heard) / 2,
            trip=heard - asked,
        )  # fmt: skip

    def call(
        self, seq: int, entered: float, agreed: float, done: float, **more: Any
    ) -> None:
        """Writes the line of a call. The times are true times."""
        times = {"entered": entered, "agreed": agreed, "done": done}
        told = {key: clock_time(self.host, when) for key, when in times.items()}
        self.file.write_record(
            **{
                "op": "allreduce", "name": "grads", "lane": "compiled", "set": 0,
                "epoch": 0, "seq": seq, "bytes": 8_000_000, "code": 0,
                "algorithm": "shared", **told, **more,
            }
        )  # fmt: skip

    def end(self, epoch: int = 0, size: int = 1) -> None:
        at = clock_time(self.host, START + 100)
        self.file.write_record(end=at, why="", epoch=epoch, size=size)
        self.file.close()


def job(
    folder: Path, hosts: list[str], *, steps: int = 20, run: str = "abc"
) -> list[Rank]:
    """Writes the parts of a job in which rank 1 is LATE seconds late in each step."""
    size = len(hosts)
    ranks = [Rank(folder, r, size, host, run) for r, host in enumerate(hosts)]
    choose = random.Random(7)
    for rank in ranks[1:]:
        for when in range(int(steps * STEP) + 2):
            there, back = (choose.uniform(20e-6, 400e-6) for _ in range(2))
            rank.read_clock(START + when, there, back)
    for seq in range(1, steps + 1):
        begins = START + seq * STEP
        agreed = begins + (LATE if size > 1 else 0.0)
        for rank in ranks:
            entered = agreed if rank.rank == 1 else begins
            rank.call(seq, entered, agreed, agreed + MOVE)
            # Two named operations that are fused into one call of the eager lane.
            for name in ("x", "y"):
                rank.call(
                    seq, begins + 0.02, begins + 0.021, begins + 0.022,
                    lane="named", name=name, bytes=12, algorithm="note",
                )  # fmt: skip
    for rank in ranks:
        rank.end()
    return ranks


HOSTS = [["host-a"], ["host-a", "host-b"], ["host-a", "host-b", "host-c"]]


@pytest.mark.parametrize("hosts", HOSTS, ids=len)
def test_clocks_align_within_the_reported_error(
    tmp_path: Path, hosts: list[str]
) -> None:
    job(tmp_path, hosts, steps=4000)  # 200 s: the clocks drift by 4 and 6 ms
    found = parts.read(tmp_path)
    base = CommonClock(found)
    assert base.error is not None
    assert base.error < 420e-6
    for part in found:
        for seq, call in enumerate(c for c in part.calls if c.lane == "compiled"):
            agreed = START + (seq + 1) * STEP + (LATE if len(hosts) > 1 else 0.0)
            want = agreed - START
            assert call.agreed is not None
            got = base.seconds(part, call.agreed)
            zero = base.seconds(found[0], clock_time("host-a", START))
            assert abs(got - zero - want) <= base.error + 1e-9


def test_clocks_fall_back_to_the_time_of_day(tmp_path: Path) -> None:
    for rank, host in enumerate(("host-a", "host-b")):
        one = Rank(tmp_path, rank, 2, host, "abc")
        one.call(1, START, START + 1, START + 2)
        one.end()
    found = parts.read(tmp_path)
    base = CommonClock(found)
    assert base.error is None
    ends = [base.seconds(part, part.calls[0].done) for part in found]
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)
    assert "time of day" in show(tmp_path)


@pytest.mark.parametrize("hosts", HOSTS, ids=len)
def test_breakdown_of_the_step_time(tmp_path: Path, hosts: list[str]) -> None:
    job(tmp_path, hosts)
    ranks = breakdown.rank_breakdowns(breakdown.MergedProfile.of(parts.read(tmp_path)))
    for number, rank in enumerate(ranks):
        waits = 0.001 + (LATE if len(hosts) > 1 and number != 1 else 0.0)
        assert rank.steps == 19
        assert rank.step == pytest.approx(STEP, rel=1e-3)
        assert rank.typical == pytest.approx(STEP, rel=1e-3)
        assert rank.waits == pytest.approx(waits, rel=1e-2)
        assert rank.moves == pytest.approx(MOVE + 0.001, rel=1e-2)
        assert rank.computes + rank.moves + rank.waits == pytest.approx(rank.step)
        if len(hosts) > 1:
            late = LATE if number == 1 else 0
            assert rank.late_by == pytest.approx(late, abs=1e-5)
            assert rank.lost == pytest.approx(20 * late, rel=1e-3)
    text = show(tmp_path)
    assert max(map(len, text.splitlines())) <= 88
    named = [line for line in text.splitlines() if "<- slowest" in line]
    assert [line.split()[:2] for line in named] == [["rank", "1"]] * (len(hosts) > 1)
    assert "allreduce grads (jit)" in text
    assert "allreduce x + 1 more" in text
    assert "4.00" in text  # GB/s


def test_only_exposed_time_of_overlapped_buckets_counts(
    tmp_path: Path,
) -> None:
    rank = Rank(tmp_path, 0, 1, "host-a", "abc")
    for seq in range(1, 41):
        at = START + seq * STEP
        # The call takes 40 ms of a step of 50 ms, waits for 10 ms, and 8 ms are
        # exposed.
        rank.call(seq, at, at + 0.01, at + 0.04, overlapped=True)
        when = clock_time("host-a", at + STEP - 0.001)
        rank.file.write_record(sent=seq, exposed=seq * 0.008, at=when)
    rank.end()
    (found,) = breakdown.rank_breakdowns(
        breakdown.MergedProfile.of(parts.read(tmp_path))
    )
    assert found.steps == 39
    assert found.waits == pytest.approx(0.002, rel=0.05)
    assert found.moves == pytest.approx(0.006, rel=0.05)
    assert found.computes == pytest.approx(STEP - 0.008, rel=0.01)


def test_a_rank_that_is_late_once_is_not_marked(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, r, 2, "host-a", "abc") for r in range(2)]
    for seq in range(1, 21):
        at = START + seq * STEP
        late = 1.0 if seq == 7 else 0.0
        ranks[0].call(seq, at, at + late, at + late + MOVE)
        ranks[1].call(seq, at + late, at + late, at + late + MOVE)
    for rank in ranks:
        rank.end()
    assert "<-" not in show(tmp_path)


def trace(folder: Path) -> Any:
    """Reads ringjax's trace in the archive by Perfetto's own parser."""
    pytest.importorskip("perfetto", reason="the perfetto package is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    with tarfile.open(folder / archive.ARCHIVE) as tar:
        member = tar.extractfile(archive.TRACE)
        assert member is not None
        found = Trace()
        found.ParseFromString(member.read())
    return found


@pytest.mark.parametrize("hosts", HOSTS, ids=len)
def test_perfetto_reads_rows_slices_and_arrows(
    tmp_path: Path, hosts: list[str]
) -> None:
    job(tmp_path, hosts)
    merge(tmp_path)
    packets = trace(tmp_path).packet
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in packets
        if p.HasField("track_descriptor")
    }
    titles = [t.process.process_name for t in tracks.values() if t.HasField("process")]
    assert titles == [f"rank {r} · {host}" for r, host in enumerate(hosts)]
    rows = Counter(
        t.thread.thread_name for t in tracks.values() if t.HasField("thread")
    )
    assert rows == {
        "step": len(hosts),
        "jit lane": len(hosts),
        "eager lane": len(hosts),
    }
    flows: dict[int, set[int]] = {}
    open_slices: dict[int, list[tuple[str, int]]] = {}
    names: dict[int, Counter[str]] = {uuid: Counter() for uuid in tracks}
    last: dict[int, int] = {}
    for packet in packets:
        event = packet.track_event
        if not packet.HasField("track_event"):
            continue
        track = tracks[event.track_uuid]
        assert packet.timestamp >= last.get(event.track_uuid, 0), "across each other"
        last[event.track_uuid] = packet.timestamp
        stack = open_slices.setdefault(event.track_uuid, [])
        if event.type == event.TYPE_SLICE_BEGIN:
            stack.append((event.name, packet.timestamp))
            names[event.track_uuid][event.name] += 1
            for flow in event.flow_ids:
                flows.setdefault(flow, set()).add(track.thread.pid)
        else:
            assert event.type == event.TYPE_SLICE_END
            stack.pop()
    assert not any(open_slices.values())
    if len(hosts) > 1:
        assert all(pids == set(range(1, len(hosts) + 1)) for pids in flows.values())
        assert len(flows) == 40  # steps of two calls
    else:
        assert not flows
    for uuid, track in tracks.items():
        if track.thread.thread_name != "jit lane":
            continue
        rank = track.thread.pid - 1
        waits = "agree" if rank == 1 or len(hosts) == 1 else "wait for rank 1"
        assert names[uuid]["allreduce grads"] == 20
        assert names[uuid][waits] == 20
        assert names[uuid]["shared 8 MB 4 GB/s"] == 20


def test_arguments_of_a_slice(tmp_path: Path) -> None:
    job(tmp_path, ["host-a", "host-b"], steps=2)
    merge(tmp_path)
    found: dict[str, dict[str, Any]] = {}
    for packet in trace(tmp_path).packet:
        told = {
            a.name: a.string_value or a.uint_value
            for a in packet.track_event.debug_annotations
        }
        if told:
            found[packet.track_event.name] = told
    assert found["allreduce grads"] == {
        "op": "allreduce", "seq": 2, "epoch": 0, "bytes": 8_000_000,
        "algorithm": "shared",
    }  # fmt: skip
    assert found["allreduce x + 1 more"]["names"] == "x, y"
    assert found["allreduce x + 1 more"]["bytes"] == 24


def jax_trace(folder: Path, rank: Rank, run: str = "abc") -> None:
    """Writes a trace like that of jax.profiler, whose times count from START + 0.5."""
    path = folder / parts.PARTS / f"{run}.rank-{rank.rank}.jax" / "vm.trace.json.gz"
    path.parent.mkdir(parents=True)
    events = [
        {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 701, "tid": 5, "ts": 10.0, "dur": 2.0,
         "name": "ringjax_allreduce.7"},
        {"ph": "X", "pid": 701, "tid": 5, "ts": 20.0, "dur": 2.0, "name": "dot.3"},
        {},
    ]  # fmt: skip
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    # The header of the part has read both clocks at START - 1.
    rank.file.write_record(jax=path.name, began=(1.7e9 + START + 1.5) * 1e9)


def test_jax_traces_are_merged_into_the_archive(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, r, 2, "host-a", "abc") for r in range(2)]
    for rank in ranks:
        rank.call(1, START, START + 1, START + 2)
        jax_trace(tmp_path, rank)
        rank.end()
    merge(tmp_path)
    with tarfile.open(tmp_path / archive.ARCHIVE) as tar:
        assert tar.getnames() == [
            "perfetto_manifest.json", archive.TRACE,
            "jax-rank-0.json", "jax-rank-1.json",
        ]  # fmt: skip
        head = tar.extractfile("perfetto_manifest.json")
        assert head is not None
        data = head.read()
        member = tar.extractfile("jax-rank-1.json")
        assert member is not None
        alone = json.load(io.BytesIO(member.read()))["traceEvents"]
    assert data.startswith(b'{"perfetto_manifest"')
    manifest = json.loads(data)["perfetto_manifest"]
    assert manifest["version"] == 1
    assert [f["path"] for f in manifest["files"]] == [
        archive.TRACE, "jax-rank-0.json", "jax-rank-1.json"
    ]  # fmt: skip
    for file in manifest["files"][1:]:
        assert file["clocks"]["sync_to"] == {
            "file": archive.TRACE,
            "clock": "BOOTTIME",
        }
    with gzip.open(tmp_path / archive.MERGED, "rt") as text:
        merged = json.load(text)["traceEvents"]
    assert [e for e in merged if e["pid"] == 2_000_701] == alone
    ours = [e for e in merged if e["pid"] == 1 and e["name"] == "allreduce grads"]
    (theirs,) = [e for e in alone if e["name"] == "ringjax.allreduce"]
    # JAX's event is 10 us after START + 0.5, and our call was entered at START.
    assert theirs["ts"] - ours[0]["ts"] == pytest.approx(0.5e6 + 10, abs=0.5)
    assert alone[0]["args"]["name"] == "rank 1 · host-a: jax /host:CPU"


def test_the_json_for_older_viewers(tmp_path: Path) -> None:
    job(tmp_path, ["host-a", "host-b", "host-c"], steps=5)
    merge(tmp_path)
    with gzip.open(tmp_path / archive.MERGED, "rt") as text:
        found = json.load(text)
    events = found["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank {r} · host-{x}" for r, x in enumerate("abc")}
    arrows: dict[int, list[tuple[float, str]]] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append((event["ts"], event["ph"]))
    assert len(arrows) == 10
    for places in arrows.values():
        assert [kind for _, kind in sorted(places)] == ["s", "t", "f"]
    slices = [e for e in events if e["ph"] == "X" and e["name"] == "wait for rank 1"]
    assert {e["pid"] for e in slices} == {0, 2}


def test_missing_data_is_reported(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, r, 4, "host-a", "abc") for r in (0, 1, 2)]
    for rank in ranks:
        rank.call(1, START, START + 1, START + 2)
        rank.call(2, START + 3, START + 4, START + 5)
    ranks[0].file.write_record(lost=17, at=1.0)
    ranks[0].file.write_record(jax_absent="RuntimeError: there is one")
    ranks[0].end()
    ranks[1].end()
    ranks[2].file.close()
    with open(tmp_path / "parts" / "abc.rank-2.jsonl", "ab") as file:
        file.write(b'{"op": "allred')  # rank 2 died while it wrote
    text = merge(tmp_path)
    assert "rank 3: no file" in text
    assert "rank 2: its file has no end" in text
    assert "rank 0: 17 calls came too fast" in text
    assert "rank 0: without jax's own trace: RuntimeError: there is one" in text
    with tarfile.open(tmp_path / archive.ARCHIVE) as tar:
        head = tar.extractfile("perfetto_manifest.json")
        assert head is not None
        about = json.load(head)["perfetto_manifest"]["attributes"]
    assert "rank 3: no file" in about["ringjax.missing"]
    assert "2 calls" in show(tmp_path)


def test_a_profile_without_calls_is_reported(tmp_path: Path) -> None:
    for rank in range(2):
        Rank(tmp_path, rank, 2, "host-a", "abc").end()
    assert "no rank has ended a collective" in merge(tmp_path)
    assert len(trace(tmp_path).packet) == 8  # two processes with three rows


def test_only_the_newest_profile_of_a_folder_is_read(tmp_path: Path) -> None:
    job(tmp_path, ["host-a", "host-a"], steps=3, run="old")
    one = Rank(tmp_path, 0, 1, "host-a", "new")
    one.file._header = one.file._header.replace(
        b"17000", b"17001"
    )  # later by the clock
    one.file._rotate()
    one.call(1, START, START + 1, START + 2)
    one.end()
    assert [part.run for part in parts.read(tmp_path)] == ["new"]


def test_only_the_last_calls_of_a_long_profile_are_read(tmp_path: Path) -> None:
    job(tmp_path, ["host-a", "host-b"], steps=30)
    found = parts.read(tmp_path, max_calls=40)
    assert [len(part.calls) for part in found] == [20, 20]
    assert found[0].calls[-1].seq == 30
    assert any(
        "first 70 calls were left out" in text for text in parts.describe_missing(found)
    )


def test_a_part_file_is_bounded_and_keeps_its_newest_lines(tmp_path: Path) -> None:
    file = PartFile(tmp_path / "parts" / "x.rank-0.jsonl", pytest.fail, max_bytes=4000)
    file.write_header(
        format=1, run="x", who="rank 0", pid=1, host="a", clock="a", monotonic=1.0,
        realtime=1.0,
    )  # fmt: skip
    file.write_header(epoch=0, rank=0, size=1, host="a", at=1.0)
    for number in range(1000):
        file.write_record(step=float(number))
    file.close()
    assert sum(p.stat().st_size for p in (tmp_path / "parts").iterdir()) <= 4000
    (part,) = parts.read(tmp_path)
    assert 50 < len(part.marks) < 999
    assert part.marks == [float(n) for n in range(1000 - len(part.marks), 1000)]
    assert len(part.members) == 1


def test_a_profile_without_a_lost_rank_is_complete(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank, 3, "host-a", "abc") for rank in range(3)]
    for rank in ranks[:2]:
        for seq in range(100):
            rank.call(seq, START, START, START)
        rank.file.write_header(
            epoch=1, rank=rank.rank, size=2, host="host-a", at=START + 50
        )
    ranks[2].file.close()  # rank 2 is lost
    ranks[0].end(epoch=1, size=2)
    assert not parts.complete(tmp_path, "abc")
    ranks[1].end(epoch=1, size=2)
    assert parts.complete(tmp_path, "abc")
    assert not parts.complete(tmp_path, "other")


def test_show_reports_missing_and_damaged_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path / "none")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 1
    assert "no rank has written a profile there" in capsys.readouterr().err
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "x.rank-0.jsonl").write_text('garbage\n{"format": 99}\n[]\n')
    assert main(["merge", str(tmp_path)]) == 1
    assert "no rank has written a profile there" in capsys.readouterr().err
    job(tmp_path, ["host-a"], steps=3)
    assert main(["show", str(tmp_path)]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert not (tmp_path / archive.ARCHIVE).exists()
    show_it = [sys.executable, "-Pm", "ringjax.profile", "show", str(tmp_path)]
    assert run_without_reader(show_it) == (0, "")


def test_the_documented_example_has_the_words_of_the_output() -> None:
    page = (ROOT / "docs" / "operate" / "profiling.md").read_text()
    for word in ("exposed comm", "waiting", "last in", "late by", "<- slowest"):
        assert word in page
