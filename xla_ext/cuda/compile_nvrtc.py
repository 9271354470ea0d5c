"""Compiles one CUDA source with NVRTC for one architecture, or lists architectures.

    compile_nvrtc.py LIBRARY                              prints "12.1 50 52 ... 90"
    compile_nvrtc.py LIBRARY KIND SM OUTPUT SOURCE [HEADER...]

build_blob.py runs this script in a process of its own, because a library that crashes
when it is loaded must not end the build. KIND is cubin or ptx, SM a number such as 90.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path


class NvrtcError(Exception):
    """The library cannot be loaded, or refuses the source."""


class Nvrtc:
    """The few functions of NVRTC that compile one source."""

    def __init__(self, path: str) -> None:
        try:
            # NVRTC opens its builtins by name only. The linker does not search the
            # folder of a wheel for that name, so the builtins are loaded beforehand.
            for beside in Path(path).parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(beside))
            self._library = ctypes.CDLL(path)
        except OSError as e:
            raise NvrtcError(f"{path}: {e}") from e
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = self._library.nvrtcGetErrorString(code).decode()
            raise NvrtcError(f"{name}: {text}")

    def version(self) -> str:
        """Returns a version such as 12.1."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def architectures(self) -> list[int]:
        """Returns the architectures that NVRTC supports, such as 90 for sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def compile(
        self, kind: str, sm: int, source: Path, headers: Sequence[Path]
    ) -> bytes:
        """Returns a "cubin" for sm_<sm>, or "ptx" for compute_<sm> with a final NUL."""
        program = ctypes.c_void_p()
        array = ctypes.c_char_p * len(headers)
        texts = array(*(h.read_bytes() for h in headers))
        names = array(*(h.name.encode() for h in headers))
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            texts,
            names,
        )
        architecture = f"{'sm' if kind == 'cubin' else 'compute'}_{sm}"
        words = [b"--std=c++17", f"--gpu-architecture={architecture}".encode()]
        options = (ctypes.c_char_p * len(words))(*words)
        try:
            self._call("nvrtcCompileProgram", program, len(words), options)
        except NvrtcError as e:
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode()
            raise NvrtcError(f"{e}\n{log}") from e
        return self._text(program, kind.upper())


def main(library: str, *arguments: str) -> None:
    """Compiles a source, or prints the architectures, as the command line says."""
    nvrtc = Nvrtc(library)
    if not arguments:
        print(nvrtc.version(), *nvrtc.architectures())
        return
    kind, sm, output, source, *headers = arguments
    paths = [Path(h) for h in headers]
    Path(output).write_bytes(nvrtc.compile(kind, int(sm), Path(source), paths))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NvrtcError as e:
        sys.exit(str(e))
