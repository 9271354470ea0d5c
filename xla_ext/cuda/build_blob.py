"""Compiles pack.cu and writes a C++ source that holds the result (see blob.h).

    build_blob.py --output device_code.cc [--mode MODE] [--nvcc FILE]

CMake runs this script with the Python that builds the package. It needs only the
standard library. Mode `auto` tries each nvcc (named, on PATH, of a toolkit, of pip
packages), then NVRTC, and keeps the code of the first compiler that works; if none
works, the extension has no device code. Every other mode names one kind of compiler and
fails if that fails: `nvcc`, `wheel` (an nvcc from pip packages), `nvrtc` (or `nvrtc12`,
`nvrtc13`).

At run time, device/kernels.cc decides which of the images a driver loads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("pack.cu")
HEADERS = tuple(Path(__file__).with_name(n) for n in ("pack_abi.h", "pack_ptx.h"))
NVRTC_SCRIPT = Path(__file__).with_name("compile_nvrtc.py")

# The architectures that get a binary. Devices of the same major and a higher minor
# version run that binary, too. For all later devices the driver compiles the PTX.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
LEAST_PTX = 80

MODES = ("auto", "nvcc", "wheel", "nvrtc", "nvrtc12", "nvrtc13", "off")

# Compilations that run at one time: few, because the build compiles other files, too.
JOBS = 2
SECONDS = 600


class Failed(Exception):
    """Raised if a compiler cannot be used; the message says why."""


@dataclass(frozen=True)
class Image:
    """Device code that the driver can load: one "fatbin", "cubin" or "ptx"."""

    kind: str
    sm: int
    data: bytes


@dataclass(frozen=True)
class DeviceCode:
    """All images of one compiler, and its name and version."""

    origin: str
    images: tuple[Image, ...] = ()


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """Returns the output of a command; raises Failed with the output on failure."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Failed(f"{command[0]}: {e}") from e
    if done.returncode != 0:
        text = done.stdout.rstrip()
        if len(text) > 4000:
            text = text[:4000] + "\n..."
        raise Failed(f"{command[0]}: ended with {done.returncode}\n{text}".rstrip())
    return done.stdout


def numbers(text: str, prefix: str) -> list[int]:
    """Returns 75 for each compute_75 or sm_75. Skips variants such as sm_90a."""
    return sorted({int(n) for n in re.findall(rf"\b{prefix}_(\d+)\b", text)})


def ptx_of(supported: Sequence[int]) -> int | None:
    """Returns the lowest architecture from sm_80 on: most devices accept its PTX.

    pack.cu uses instructions of sm_80.
    """
    return min((a for a in supported if a >= LEAST_PTX), default=None)


# --- nvcc ---------------------------------------------------------------------------


def wheel_folders() -> list[Path]:
    """Returns the folders in which pip installs NVIDIA's packages for this Python."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec and spec.submodule_search_locations) or ()]


def wheel_nvccs() -> Iterator[Path]:
    """Yields each nvcc of pip packages. The packages for CUDA 12 contain none."""
    for folder in wheel_folders():
        yield from sorted(folder.glob("cu[0-9]*/bin/nvcc"), reverse=True)


def toolkit_nvccs(named: str) -> Iterator[Path]:
    """Yields where a toolkit's nvcc may be, the places that the user named first."""
    for text in (named, os.environ.get("CUDACXX", "")):
        if text:
            yield Path(shutil.which(text) or text)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable], "bin", "nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    usual = Path("/usr/local/cuda/bin/nvcc")
    if usual.exists():
        yield usual


def compile_with_nvcc(nvcc: Path) -> DeviceCode:
    """Makes one compressed fatbin with a binary for each architecture, and PTX."""
    release = re.search(r"release (\d+\.\d+)", run([nvcc, "--version"]))
    if release is None:
        raise Failed(f"{nvcc}: says no version and is no nvcc")
    real = numbers(run([nvcc, "--list-gpu-code"]), "sm")
    virtual = numbers(run([nvcc, "--list-gpu-arch"]), "compute")
    targets = [a for a in ARCHITECTURES if a in real and a in virtual]
    if not targets:
        raise Failed(f"{nvcc}: compiles for none of sm_{ARCHITECTURES}")
    options = [f"--generate-code=arch=compute_{a},code=sm_{a}" for a in targets]
    ptx = ptx_of(virtual)
    if ptx is not None:
        options.append(f"--generate-code=arch=compute_{ptx},code=compute_{ptx}")
    with tempfile.TemporaryDirectory() as scratch:
        # The file names have no path, so that all machines produce the same bytes.
        for file in (SOURCE, *HEADERS):
            shutil.copy(file, scratch)
        command: list[str | Path] = [
            nvcc,
            "-std=c++17",
            "-fatbin",
            f"--threads={JOBS}",
            *options,
        ]
        # Allow a host compiler that nvcc does not know: it only preprocesses here.
        command += ["-allow-unsupported-compiler", "-Xfatbin=-compress-all"]
        command += ["-o", "pack.fatbin", SOURCE.name]
        run(command, cwd=Path(scratch))
        data = Path(scratch, "pack.fatbin").read_bytes()
    return DeviceCode(f"nvcc {release[1]}", (Image("fatbin", targets[0], data),))


# --- NVRTC --------------------------------------------------------------------------


def nvrtc_libraries(major: str) -> Iterator[Path]:
    """Yields libnvrtc of pip packages and toolkits; an empty `major` means any."""
    pattern = f"libnvrtc.so.{major}" if major else "libnvrtc.so.1[0-9]"
    for folder in wheel_folders():
        for inside in ("cu[0-9]*/lib", "cuda_nvrtc/lib"):
            yield from sorted(folder.glob(f"{inside}/{pattern}"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield from Path(os.environ[variable], "lib64").glob(pattern)


def compile_with_nvrtc(library: Path) -> DeviceCode:
    """Makes a cubin for each architecture and one PTX, each in a process of its own."""

    def child(*arguments: str) -> str:
        return run([sys.executable, NVRTC_SCRIPT, library, *arguments])

    # Another process loads the library, so that a crash there does not end the build.
    version, *supported = child().split()
    known = [int(a) for a in supported]
    wanted = [("cubin", a) for a in ARCHITECTURES if a in known]
    ptx = ptx_of(known)
    if ptx is not None:
        wanted.append(("ptx", ptx))
    if not wanted:
        raise Failed(f"{library}: compiles for none of sm_{ARCHITECTURES}")

    with tempfile.TemporaryDirectory() as scratch:

        def compiled(target: tuple[str, int]) -> Image:
            kind, sm = target
            file = Path(scratch, f"{kind}{sm}")
            child(kind, str(sm), str(file), *map(str, (SOURCE, *HEADERS)))
            return Image(kind, sm, file.read_bytes())

        with ThreadPoolExecutor(JOBS) as pool:
            images = tuple(pool.map(compiled, wanted))
    return DeviceCode(f"nvrtc {version}", images)


# --- the choice, and the C++ source ---------------------------------------------------


Compiler = Callable[[Path], DeviceCode]


def attempts(mode: str, nvcc: str) -> Iterator[tuple[Compiler, Path]]:
    """Yields the compilers that `mode` allows, in the order in which to try them."""
    if mode == "nvcc" and nvcc:
        yield compile_with_nvcc, Path(nvcc)  # no other nvcc is tried
        return
    if mode in ("auto", "nvcc"):
        for file in toolkit_nvccs(nvcc):
            yield compile_with_nvcc, file
    if mode in ("auto", "nvcc", "wheel"):
        for file in wheel_nvccs():
            yield compile_with_nvcc, file
    if mode == "auto" or mode.startswith("nvrtc"):
        for file in nvrtc_libraries(mode.removeprefix("nvrtc").removeprefix("auto")):
            yield compile_with_nvrtc, file


def device_code(mode: str, nvcc: str) -> DeviceCode:
    """Compiles pack.cu with the first compiler that works.

    If none works, returns no code for `auto` and `off`, otherwise raises Failed.
    """
    reasons = []
    for compiler, file in dict.fromkeys(attempts(mode, nvcc)):
        try:
            return compiler(file)
        except Failed as e:
            reasons.append(str(e))
            if mode == "auto":
                print(f"ringjax: device code: skipping {e}", file=sys.stderr)
    if mode in ("auto", "off"):
        return DeviceCode("none")
    listed = "\n".join(reasons) or "there is none in the places where one may be"
    raise Failed(f"RINGJAX_CUDA={mode}: no compiler for device code works\n{listed}")


def without_zeros(data: bytes) -> tuple[list[int], bytes]:
    """Returns the lengths of the runs of zeros and other bytes, and the other bytes.

    Half of a cubin is zeros: it has a bank of parameters for each kernel.
    """
    lengths, kept, position = [], [], 0
    for zeros in re.finditer(rb"\0{512,}|\Z", data):
        lengths.append(zeros.start() - position)
        kept.append(data[position : zeros.start()])
        position = zeros.end()
        lengths.append(zeros.end() - zeros.start())
    return [0, *lengths], b"".join(kept)


def literal(data: bytes) -> str:
    """Returns a C++ string literal in lines; three-digit escapes cannot run on."""
    plain = set(range(32, 127)) - set(b'"\\?')
    text = [chr(b) if b in plain else f"\\{b:03o}" for b in data]
    lines = ("".join(text[i : i + 1024]) for i in range(0, len(text), 1024))
    return "\n".join(f'    "{line}"' for line in lines) or '    ""'


# The extension contains the images without long runs of zeros, and expands the images
# when they are first used.
EXPANSION = """\
struct Packed {
  std::string_view kind;
  int sm;
  const char* bytes;              // without the zeros
  std::vector<unsigned> lengths;  // alternately of zeros and of bytes
};

std::vector<unsigned char> Expanded(const Packed& packed) {
  std::vector<unsigned char> data;
  const char* next = packed.bytes;
  for (size_t i = 0; i + 1 < packed.lengths.size(); i += 2) {
    data.resize(data.size() + packed.lengths[i]);
    data.insert(data.end(), next, next + packed.lengths[i + 1]);
    next += packed.lengths[i + 1];
  }
  return data;
}
"""


def cpp_source(code: DeviceCode) -> str:
    """Returns the definitions of the functions that blob.h declares."""
    arrays, table = [], []
    for i, image in enumerate(code.images):
        lengths, kept = without_zeros(image.data)
        arrays.append(f"constexpr char kImage{i}[] =\n{literal(kept)};\n")
        list_of = ", ".join(map(str, lengths))
        table.append(f'      {{"{image.kind}", {image.sm}, kImage{i}, {{{list_of}}}}},')
    return f"""\
// Written by build_blob.py.
#include "cuda/blob.h"

#include <vector>

namespace ringjax::cuda {{
namespace {{

{EXPANSION}
{"".join(arrays)}
struct Images {{
  std::vector<std::vector<unsigned char>> data;
  std::vector<Image> images;

  Images() {{
    const std::vector<Packed> all = {{
{chr(10).join(table)}
    }};
    for (const Packed& packed : all) data.push_back(Expanded(packed));
    for (size_t i = 0; i < all.size(); ++i)
      images.push_back({{all[i].kind, all[i].sm, data[i].data(), data[i].size()}});
  }}
}};

}}  // namespace

std::span<const Image> DeviceImages() {{
  static const Images images;
  return images.images;
}}

std::string_view DeviceCodeOrigin() {{ return "{code.origin}"; }}

}}  // namespace ringjax::cuda
"""


def main() -> None:
    """Compiles pack.cu and writes the C++ source, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--nvcc", default="", help="the nvcc to try first")
    args = parser.parse_args()
    mode = args.mode.lower()
    if mode not in MODES:
        parser.error(f"RINGJAX_CUDA is {args.mode!r}, not one of {', '.join(MODES)}")
    code = device_code(mode, args.nvcc)
    args.output.write_text(cpp_source(code))
    sizes = ", ".join(f"{i.kind} {i.sm}: {len(i.data)}" for i in code.images)
    print(f"ringjax: device code by {code.origin} ({sizes or 'no images'})")


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"ringjax: {failure}")
