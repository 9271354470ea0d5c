"""Tests of `make gpu-check` that need no GPU: sections, tables, shapes, profiles.

The tests of several ranks in tests/gpu run here on the CPU. No measurement is tested.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import gpu_ranks
from support.launch import ROOT
from support.stubs import stub_environment

from benchmarks.gpu import build, check, models, pack, trace
from benchmarks.gpu.check import Outcome, Section
from benchmarks.gpu.section import Report, Spread, markdown_table, text_table

# -- sections --------------------------------------------------------------------------


def section(name: str, code: str, limit: float = 20, **options: Any) -> Section:
    """Returns a section that runs Python code, also without a GPU."""
    options = {"needs_build": False, "needs_gpu": False} | options
    return Section(name, ("-c", code), limit, dry=("-c", code), **options)


REPORT = (
    "from pathlib import Path; import os; from benchmarks.gpu.section import Report; "
)
REPORT += "r = Report(Path(os.environ['RINGJAX_GPU_CHECK_RESULT'])); "


def run(folder: Path, *sections: Section, seconds: float = 200) -> list[Outcome]:
    words = ["--work", str(folder), "--dry-run", "--seconds", str(seconds)]
    return check.run(check.parse(words), sections)


def test_a_section_that_fails_crashes_or_hangs_does_not_stop_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
    child += f"'import signal; signal.pause() # {tmp_path.name}'],"
    child += " start_new_session=True)"
    outcomes = run(
        tmp_path,
        section("one", REPORT + "r.table('T', 'a', 'b'); r.row(1, 2)"),
        section("wrong", REPORT + "r.fail('two and two'); print('why')"),
        section("crash", "import os; print('the last words'); os.abort()"),
        section("hangs", f"{child}; {REPORT} r.table('H'); r.row('had this'); "
                         "import signal; signal.pause()", 2),
        section("last", "print('...'); print('3 passed')"),
    )  # fmt: skip
    assert [o.status for o in outcomes] == ["ok", "failed", "failed", "timed out", "ok"]
    assert outcomes[0].report["tables"][0]["rows"] == [["1", "2"]]
    assert outcomes[1].reason == "two and two"
    assert outcomes[4].reason == "3 passed"
    assert outcomes[3].reason == "after 2 s"
    assert outcomes[3].report["tables"][0]["rows"] == [["had this"]]  # kept
    said = capfd.readouterr().out
    assert "the last words" in said
    assert "last: ok (3 passed)" in said
    assert not _running(tmp_path.name)  # also what a section had started


def _running(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in text and path.parent.name != str(os.getpid()):
            found.append(text)
    return found


def test_sections_that_cannot_run_report_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = run(
        tmp_path,
        section("build", "raise SystemExit(1)"),
        section("needs it", "pass", needs_build=True),
        Section("GPU only", ("-c", "pass"), 9, needs_build=False),  # left out
    )
    assert [(o.status, o.reason) for o in outcomes] == [
        ("failed", "exit code 1"),
        ("not run", "nothing was built"),
    ]
    monkeypatch.setattr(check.driver, "count_devices", lambda: (0, "none"))
    options = check.parse(["--work", str(tmp_path)])
    (outcome,) = check.run(options, [section("pack", "pass", needs_gpu=True)])
    assert (outcome.status, outcome.reason) == ("not run", "no CUDA device")


def test_later_sections_keep_some_time(tmp_path: Path) -> None:
    long, later = section("x", "pass", 100), [section("y", "pass", reserved=20)] * 2
    assert check.limit_of(long, 470, later) == 100
    assert check.limit_of(long, 60, later) == 20
    assert check.limit_of(section("x", "pass", 100, reserved=30), 60, later) == 30
    (one,) = run(tmp_path, section("x", "pass"), seconds=0.5)
    assert (one.status, one.reason) == ("not run", "no time left")


def test_environment_of_a_section(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RINGJAX_FUSION", "group")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (tmp_path / "ringjax").mkdir()
    env = check.environment(tmp_path, dry=False)
    assert env["PYTHONPATH"].split(":") == [str(tmp_path), "/somewhere", str(ROOT)]
    assert env["JAX_PLATFORMS"] == "cuda"
    assert "RINGJAX_FUSION" not in env
    assert check.environment(tmp_path / "none", dry=True)["JAX_PLATFORMS"] == "cpu"


def test_the_sections_exist_and_fit_into_the_time() -> None:
    for one in check.SECTIONS:
        for words in filter(None, (one.arguments, one.dry)):
            files = [word for word in words if word.endswith(".py")]
            if words[1].startswith("benchmarks."):
                files.append(words[1].replace(".", "/") + ".py")
            assert files
            assert all((ROOT / file).is_file() for file in files)
    first, *later = check.SECTIONS
    assert first.name == "build"
    assert check.SECONDS < 480
    # Even a slow build leaves every section what it needs at least.
    assert check.limit_of(first, check.SECONDS, later) >= 100
    assert all(one.reserved <= one.limit for one in check.SECTIONS)


def test_the_command_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    chosen = (section("build", "pass"), section("a", "pass"), section("b", "1/0"))
    monkeypatch.setattr(check, "SECTIONS", chosen)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    words = ["--work", str(tmp_path / "work"), "--dry-run"]
    assert check.main([*words, "--only", "a"]) == 0
    assert check.main([*words, "--skip", "a"]) == 1
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [s["status"] for s in results["sections"]] == ["ok", "failed"]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "a dry run on the CPU: no number here means anything" in text
    assert "| b | failed |" in text
    assert "ZeroDivisionError" in (tmp_path / "out" / "log.txt").read_text()
    assert "ZeroDivisionError" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check.parse(["--only", "nothing"])
    assert "no section 'nothing'; there are build, a, b" in capsys.readouterr().err


# -- tables and statistics -------------------------------------------------------------


def test_spread() -> None:
    spread = Spread.of([float(v) for v in (5, 1, 3, 2, 4, 100, 6, 7, 8, 9, 10)])
    assert (spread.median, spread.p10, spread.p90, spread.count) == (6, 2, 10, 11)
    assert spread.show(0) == "6 (2–10)"
    assert Spread.of([2.5]).show() == "2.5 (2.5–2.5)"


def test_report_tables_and_targets(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json")
    report.table("Speed", "what", "GB/s")
    report.row("pack | f32", 4000)
    report.note("of a run")
    assert report.compare_with_target("pack", 91.0, 90, " %") == "≥ 90 %: reached"
    assert report.compare_with_target("pack", 89.0, 90, " %") == "≥ 90 %: missed"
    assert report.compare_with_target("handler", 20.0, -20, " µs") == "≤ 20 µs: reached"
    assert report.compare_with_target("handler", 21.0, -20, " µs") == "≤ 20 µs: missed"
    assert report.missed == [
        "pack: 89 %, target ≥ 90 %",
        "handler: 21 µs, target ≤ 20 µs",
    ]
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["missed"] == report.missed
    assert text_table(kept["tables"][0]).splitlines() == [
        "Speed",
        "what        GB/s",
        "pack | f32  4000",
        "* of a run",
    ]
    assert markdown_table(kept["tables"][0]).splitlines() == [
        "### Speed",
        "",
        "| what | GB/s |",
        "| --- | --- |",
        "| pack \\| f32 | 4000 |",
        "",
        "* of a run",
    ]


def test_missed_targets_are_notes_and_no_failures() -> None:
    outcome = Outcome("pack", "ok", 1.0, report={"missed": ["pack: 80 %"]})
    assert check.summary([outcome])["notes"] == ["target missed: pack: 80 %"]


# -- shapes and networks ---------------------------------------------------------------


def test_sets_have_the_tensors_of_their_network() -> None:
    resnet, transformer = models.SETS["ResNet-50"], models.SETS["transformer"]
    assert (len(resnet), models.count(resnet)) == (161, 25_557_032)
    assert (len(transformer), models.count(transformer)) == (1204, 1_312_136_192)
    assert models.count(models.SETS["one tensor"]) == 25_557_032
    sizes = [4 * math.prod(shape) for shape in resnet]
    large = [size for size in sizes if size >= 1 << 20]
    assert len(large) == 29
    assert sum(large) / sum(sizes) == pytest.approx(0.937, abs=0.001)


def test_moved_and_fused_bytes() -> None:
    resnet = models.SETS["ResNet-50"]
    assert pack.moved_bytes(resnet, 4) == 8 * 25_557_032
    assert pack.moved_bytes(resnet, 2) == 6 * 25_557_032
    assert pack.fused_bytes([(1,), (4,), (5,)], 4) == 16 + 16 + 32
    assert pack.fused_bytes([(1,), (4,), (9,)], 2) == 16 + 16 + 32


def test_the_networks_can_be_trained() -> None:
    import jax
    import jax.numpy as jnp

    parameters = jax.eval_shape(models.resnet_parameters)
    shapes = [x.shape for x in parameters]
    assert shapes == [tuple(s) for s in models.SETS["ResNet-50"]]
    batch = jax.eval_shape(lambda: models.resnet_batch(2, 64))
    loss, grads = jax.eval_shape(
        jax.value_and_grad(models.resnet_loss), parameters, batch
    )
    assert loss.shape == () and [g.shape for g in grads] == shapes
    held, x, loss_of = models.build("mlp", 4, 2, 16)
    slope = jax.grad(loss_of)(held, x)
    assert all(bool(jnp.abs(g).max() > 0) for g in slope)


# -- the tests of tests/gpu ------------------------------------------------------------


def test_every_rank_gets_a_host_of_its_own() -> None:
    given = {
        "XLA_CLIENT_MEM_FRACTION": ".5",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
        "CUDA_VISIBLE_DEVICES": "3,4",
        "NCCL_PROTO": "LL",
    }
    common = gpu_ranks.environment(given, on_cpu=False)
    assert (common["JAX_PLATFORMS"], common["CUDA_VISIBLE_DEVICES"]) == ("cuda", "3")
    assert common["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert (common["NCCL_PROTO"], common["NCCL_SOCKET_IFNAME"]) == ("LL", "lo")
    ranks = [given | common for _ in range(2)]
    for rank, env in enumerate(ranks):
        gpu_ranks.separate_host(rank, env)
        assert not [name for name in env if "MEM_FRACTION" in name]
    assert ranks[0]["NCCL_HOSTID"] != ranks[1]["NCCL_HOSTID"]


def test_devices_of_ranks_with_several() -> None:
    devices = [gpu_ranks.visible_devices(8, rank) for rank in (0, 1)]
    assert devices == ["0,1,2,3", "4,5,6,7"]
    assert [gpu_ranks.visible_devices(3, rank) for rank in (0, 1)] == ["0,1"] * 2


class Item:
    """A stand-in for a collected test, with the attributes that the hook reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: list[str] = []

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_tests_without_a_device_are_skipped_but_no_schedules(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    folder = ROOT / "tests" / "gpu"
    spec = importlib.util.spec_from_file_location("of_gpu", folder / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    monkeypatch.setattr(conftest.driver, "count_devices", lambda: (0, "no driver"))
    monkeypatch.setattr(gpu_ranks, "ON_CPU", on_cpu)
    items = [Item(path) for path in folder.glob("*.py")]
    items.append(Item(ROOT / "tests" / "unit" / "test_optim.py"))
    conftest.pytest_collection_modifyitems(items)
    skipped = {item.path for item in items if "skip" in item.marks}
    one_rank = {folder / name for name in conftest.ONE_RANK}
    assert skipped == (one_rank if on_cpu else set(folder.glob("test_*.py")))
    assert one_rank < set(folder.glob("test_*.py"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["ranks", "elastic", "torch", "several"])
def test_sections_of_several_ranks_succeed_on_the_cpu(tmp_path: Path, name) -> None:
    (chosen,) = (one for one in check.SECTIONS if one.name == name)
    (outcome,) = run(tmp_path, chosen)
    log = next((tmp_path / "sections").glob("*.log")).read_text()
    assert outcome.status == "ok", log
    (table,) = outcome.report["tables"]
    results = [result for _, result, _ in table["rows"]]
    left_out = [result for result in results if not result.endswith(" ok")]
    assert left_out == ["not run: a CPU has no streams"] * (name == "torch")
    assert results


def test_tests_of_the_driver_succeed_on_the_stubs() -> None:
    files = [f"tests/gpu/test_{name}.py" for name in ("communicator", "kernels")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-k", "not large_tensor", *files],
        cwd=ROOT,
        env=os.environ | stub_environment(),
        capture_output=True,
        text=True,
        timeout=55,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout
    assert " passed, 1 deselected" in last and "skipped" not in last


def test_a_missing_device_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain pytest only skips these tests."""
    if check.driver.count_devices()[0]:
        pytest.skip("this machine has a CUDA device, so none is missing")
    monkeypatch.setattr(check.driver, "count_devices", lambda: (1, ""))
    (chosen,) = (one for one in check.SECTIONS if one.name == "one rank")
    outcome = check.run(check.parse(["--work", str(tmp_path)]), [chosen])[0]
    assert outcome.status == "failed"
    assert "no CUDA device: libcuda.so.1" in outcome.reason
    assert {row[1] for row in outcome.report["tables"][0]["rows"]} == {"FAILED"}


# -- the profile -----------------------------------------------------------------------


def recorded(*kernels: tuple[str, int, float, float]) -> list[dict[str, Any]]:
    """Returns events of jax.profiler: a GPU with two streams and a line of modules."""
    names = {1: "Stream #13(Compute)", 2: "Stream #20(Compute)", 9: "XLA Modules"}
    meta = [
        {"ph": "M", "pid": 1, "name": "process_name",
         "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": 7, "tid": 1, "name": "thread_name",
         "args": {"name": "Stream of thoughts"}},
    ]  # fmt: skip
    meta += [
        {"ph": "M", "pid": 1, "tid": k, "name": "thread_name", "args": {"name": v}}
        for k, v in names.items()
    ]
    spans = [
        {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": ts, "dur": dur}
        for name, tid, ts, dur in kernels
    ]
    host = {"ph": "X", "pid": 7, "tid": 1, "name": "gemm", "ts": 0, "dur": 1000}
    module = {"ph": "X", "pid": 1, "tid": 9, "name": "jit_step", "ts": 0, "dur": 1000}
    return [*meta, host, module, *spans, {"name": "no phase"}]


def test_hidden_share_of_communication(tmp_path: Path) -> None:
    events = recorded(
        ("gemm", 1, 0, 100),
        ("fusion", 1, 110, 40),
        ("rj_pack_f32_f32_160", 2, 50, 20),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 70, 50),
        ("void oneRankReduce<float>", 2, 110, 10),  # inside another of ours
        ("rj_unpack_f32_f32_160", 2, 150, 20),
    )
    path = tmp_path / "plugins" / "profile" / "x" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = trace.overlap(trace.read(trace.find(tmp_path)))
    assert found.communication == 70 + 20
    assert found.computation == 140
    assert found.hidden == pytest.approx((50 + 10) / 90)
    assert (found.kernels, found.streams) == (4, ("Stream #20(Compute)",))


def test_on_one_stream_nothing_is_hidden() -> None:
    events = recorded(("gemm", 1, 0, 100), ("rj_pack_f32_f32_160", 1, 100, 20))
    assert trace.overlap(trace.kernels(events)).hidden == 0.0


def test_incomplete_profiles_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(trace.TraceError, match="1 kernels of the allreduce and 0"):
        trace.overlap(trace.kernels(recorded(("rj_pack", 1, 0, 1))))
    with pytest.raises(trace.TraceError, match=r"0 kernels .* \['gemm'\]"):
        trace.overlap(trace.kernels(recorded(("gemm", 1, 0, 1))))
    with pytest.raises(trace.TraceError, match="no stream of a GPU"):
        trace.kernels([])
    with pytest.raises(trace.TraceError, match=r"no \*.trace.json.gz"):
        trace.find(tmp_path)


# -- the build -------------------------------------------------------------------------


def test_the_build_needs_no_network(tmp_path: Path, monkeypatch: Any) -> None:
    words = build.commands(tmp_path / "site", tmp_path)
    assert {program for program, *_ in words} == {"cmake"}  # pip would ask an index
    assert f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'site'}" in words[0]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}/carried")
    env = build.environment()
    assert env["PYTHONPATH"] == "/carried"  # wheels that were brought along stay


def test_missing_tools_are_named(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "missing", lambda *names: list(names))
    assert build.programs_missing() == ["cmake", "ninja", "c++"]
