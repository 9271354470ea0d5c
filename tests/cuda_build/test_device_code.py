"""build_blob.py compiles the CUDA kernels and writes them as C++ source.

The tests need compilers but no GPU and no driver. They skip missing compilers by name.
tests/native/pack_kernel_test.cc tests the results of the kernels.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "xla_ext" / "cuda"
SCRIPT = CUDA / "build_blob.py"

PROGRAM = """
#include <cstdio>
#include "cuda/blob.h"
int main() {
  std::printf("%s\\n", std::string(ringjax::cuda::DeviceCodeOrigin()).c_str());
  for (const auto& i : ringjax::cuda::DeviceImages()) {
    unsigned long sum = 0;
    for (size_t k = 0; k < i.size; ++k) sum = sum * 31 + i.data[k];
    std::printf("%s %d %zu %lu\\n", i.kind.data(), i.sm, i.size, sum);
  }
}
"""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_blob", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Needed by the dataclasses of the script, which look up their module.
    sys.modules["build_blob"] = module
    spec.loader.exec_module(module)
    return module


build_blob = load_script()


def environment(path: str, **more: str) -> dict[str, str]:
    """Returns the variables of this process with PATH=`path` and no CUDA variables."""
    hidden = ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "RINGJAX_CUDA", "RINGJAX_NVCC")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {
        "PATH": path,
        **more,
    }


def build(
    output: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(output), *arguments]
    return subprocess.run(
        command, env=env, text=True, capture_output=True, check=False, timeout=100
    )


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def fake_nvcc(file: Path, compiles: bool = True) -> Path:
    """Writes a script that stands for nvcc and compiles all files to the same bytes."""
    return script(
        file,
        f"""case "$*" in
  --version) echo "Cuda compilation tools, release 12.34, V12.34.5" ;;
  --list-gpu-code) printf 'sm_50\\nsm_80\\nsm_90\\nsm_90a\\n' ;;
  --list-gpu-arch) printf 'compute_50\\ncompute_80\\ncompute_90\\n' ;;
  *) echo "$@" > "{file}.options"
     printf 'fat\\000"\\\\?1' > pack.fatbin
     {"exit 0" if compiles else "echo no such architecture; exit 7"} ;;
esac""",
    )


def images(source: Path) -> list[str]:
    """Compiles the source that build_blob wrote; returns the lines about its images."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    program = source.with_suffix(".main.cc")
    program.write_text("#include <string>\n" + PROGRAM)
    binary = source.with_suffix(".out")
    strict = ["-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    include = ["-I", str(ROOT / "xla_ext")]
    files = [str(program), str(source), "-o", str(binary)]
    subprocess.run([compiler, *strict, *include, *files], check=True)
    return subprocess.check_output([binary], text=True).splitlines()


def checksum(data: bytes) -> int:
    total = 0
    for byte in data:
        total = (total * 31 + byte) % 2**64
    return total


def listed(code: object) -> list[str]:
    """Returns the lines that `images` should return for `code`."""
    return [
        f"{i.kind} {i.sm} {len(i.data)} {checksum(i.data)}"
        for i in code.images  # type: ignore[attr-defined]
    ]


def test_mode_off_generates_an_empty_list_that_compiles(tmp_path: Path) -> None:
    output = tmp_path / "device_code.cc"
    done = build(output, "--mode", "off", env=environment("/nonexistent"))
    assert done.returncode == 0, done.stderr
    assert images(output) == ["none"]


def test_any_bytes_round_trip_through_the_cpp_source(tmp_path: Path) -> None:
    every = bytes(range(256)) + b'??="\\\n0123\0' + bytes(range(255, -1, -1))
    sparse = bytes(2000) + every + bytes(700) + b"x" + bytes(511) + b"7" + bytes(512)
    code = build_blob.DeviceCode(
        "nvrtc 1.2",
        tuple(
            build_blob.Image(*parts)
            for parts in [
                ("cubin", 80, every * 9),
                ("cubin", 90, sparse),
                ("cubin", 100, bytes(5000)),
                ("ptx", 80, b"// text\n\0"),
            ]
        ),
    )
    output = tmp_path / "device_code.cc"
    output.write_text(build_blob.cpp_source(code))
    assert images(output) == ["nvrtc 1.2", *listed(code)]
    assert len(build_blob.without_zeros(sparse)[1]) < len(sparse) - 3000


def test_an_nvcc_that_does_not_run_is_skipped(tmp_path: Path) -> None:
    broken = script(tmp_path / "first" / "nvcc", "echo no driver wrapper here; exit 1")
    toolkit = tmp_path / "toolkit"
    good = fake_nvcc(toolkit / "bin" / "nvcc")
    env = environment(f"{broken.parent}:{os.environ['PATH']}", CUDA_HOME=str(toolkit))
    output = tmp_path / "device_code.cc"
    # --nvcc names a third nvcc, which runs but does not compile.
    bad = fake_nvcc(tmp_path / "bad" / "nvcc", compiles=False)
    done = build(output, "--mode", "auto", "--nvcc", str(bad), env=env)
    assert done.returncode == 0, done.stderr
    assert f"skipping {bad}: ended with 7\nno such architecture" in done.stderr
    assert 'return "nvcc 12.34"' in output.read_text()
    data = b'fat\0"\\?1'
    assert images(output)[1:] == [f"fatbin 80 {len(data)} {checksum(data)}"]
    options = good.with_name("nvcc.options").read_text().split()
    generated = [o.removeprefix("--generate-code=") for o in options if "arch" in o]
    assert generated == [
        "arch=compute_80,code=sm_80",
        "arch=compute_90,code=sm_90",
        "arch=compute_80,code=compute_80",
    ]


def test_a_broken_nvcc_first_on_path_does_not_fail_the_build(tmp_path: Path) -> None:
    broken = script(tmp_path / "nvcc", "echo no toolkit behind this wrapper; exit 1")
    env = environment(f"{tmp_path}:/usr/bin:/bin", CUDA_PATH=str(tmp_path / "none"))
    # build_blob also searches the usual folder of CUDA and Python packages. Hide both.
    hide = (
        "import runpy, sys, pathlib, importlib.util as u; "
        "u.find_spec = lambda *a: None; real = pathlib.Path.exists; "
        "pathlib.Path.exists = lambda p: 'cuda/bin' not in str(p) and real(p); "
        f"sys.argv = ['build_blob.py', '--output', {str(tmp_path / 'x.cc')!r}]; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide],
        env=env,
        text=True,
        capture_output=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert f"skipping {broken}: ended with 1\nno toolkit behind" in done.stderr
    assert "device code by none (no images)" in done.stdout
    assert images(tmp_path / "x.cc") == ["none"]


@pytest.mark.parametrize("broken", [False, True])
def test_an_nvcc_that_is_requested_must_work(tmp_path: Path, broken: bool) -> None:
    nvcc = tmp_path / "nvcc"
    if broken:
        script(nvcc, "echo out of order; exit 3")
    output = tmp_path / "device_code.cc"
    done = build(output, "--mode", "nvcc", "--nvcc", str(nvcc))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "ringjax: RINGJAX_CUDA=nvcc: no compiler for device code works\n"
    )
    reason = "ended with 3\nout of order" if broken else "No such file or directory"
    assert str(nvcc) in done.stderr and reason in done.stderr
    assert not output.exists()


def test_a_mode_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path / "x.cc", "--mode", "nvc")
    assert done.returncode == 2
    assert "RINGJAX_CUDA is 'nvc', not one of auto, nvcc, wheel" in done.stderr


def working_nvcc() -> Path:
    """Returns an nvcc of this machine that runs, or skips the test."""
    candidates = [*build_blob.toolkit_nvccs(""), *build_blob.wheel_nvccs()]
    for nvcc in candidates:
        try:
            build_blob.run([nvcc, "--version"])
        except build_blob.Failed:
            continue
        return Path(nvcc)
    pytest.skip("no nvcc on this machine")


# The test takes ten seconds on two idle processors.
@pytest.mark.timeout(180)
def test_nvcc_compiles_every_kernel_without_spilling(tmp_path: Path) -> None:
    nvcc = working_nvcc()
    supported = build_blob.numbers(build_blob.run([nvcc, "--list-gpu-code"]), "sm")
    targets = [sm for sm in build_blob.ARCHITECTURES if sm in supported]
    assert targets
    options = [f"--generate-code=arch=compute_{a},code=sm_{a}" for a in targets]
    command = [nvcc, "-std=c++17", "-fatbin", "--threads=2", "-Xptxas=-v", *options]
    files = ["-o", tmp_path / "pack.fatbin", CUDA / "pack.cu"]
    log = build_blob.run([*command, "-allow-unsupported-compiler", *files])
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(kernels) == len(spills) == len(registers) == 68 * len(targets)
    assert [k for k, s in zip(kernels, spills, strict=True) if s != ("0", "0")] == []
    # With so few registers, three blocks of 512 threads fit into the 64 Ki registers of
    # a multiprocessor. On sm_75, which has at most 1024 threads, two blocks fit.
    too_many = {
        kernel: n
        for kernel, n in zip(kernels, registers, strict=True)
        if n > (64 if kernel[1] == "75" else 40)
    }
    assert too_many == {}


@pytest.mark.timeout(180)
def test_nvcc_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = working_nvcc()
    monkeypatch.setattr(build_blob, "ARCHITECTURES", (90,))
    first = build_blob.compile_with_nvcc(nvcc)
    (image,) = first.images
    assert image.kind == "fatbin" and re.fullmatch(r"nvcc \d+\.\d+", first.origin)
    assert build_blob.compile_with_nvcc(nvcc) == first
    assert str(tmp_path.parent).encode() not in image.data
    output = tmp_path / "device_code.cc"
    output.write_text(build_blob.cpp_source(first))
    assert images(output) == [first.origin, *listed(first)]


@pytest.mark.timeout(180)
def test_nvrtc_compiles_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = list(build_blob.nvrtc_libraries(""))
    if not libraries:
        pytest.skip("no NVRTC in this environment: pip install nvidia-cuda-nvrtc-cu12")
    monkeypatch.setattr(build_blob, "ARCHITECTURES", (80, 90))
    code = build_blob.compile_with_nvrtc(libraries[0])
    assert re.fullmatch(r"nvrtc \d+\.\d+", code.origin)
    assert [(i.kind, i.sm) for i in code.images] == [
        ("cubin", 80),
        ("cubin", 90),
        ("ptx", 80),
    ]
    *cubins, ptx = [i.data for i in code.images]
    assert all(c.startswith(b"\x7fELF") and b"rj_seal_f64_1360" in c for c in cubins)
    assert ptx.endswith(b"\0") and b".entry rj_unpack_f32_bf16_168" in ptx


def test_nvrtc_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    library = tmp_path / "libnvrtc.so.12"
    library.write_bytes(b"not a library")
    with pytest.raises(
        build_blob.Failed, match=r"libnvrtc\.so\.12: (file too|invalid)"
    ):
        build_blob.compile_with_nvrtc(library)
