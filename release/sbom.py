"""Writes what a wheel is made of: CycloneDX, for its `.dist-info/sboms/` (PEP 770).

    sbom.py --version V --compiler ID VERSION --device-code FILE --native FILE OUTPUT

Run by CMake, with RINGJAX_SBOM, when the extension is linked, by the Python whose
packages it was built from; the standard library is enough. Listed is what is inside the
extension, and as excluded what only made it. No clock and no path: equal builds, equal
bytes. Not what Python imports at run time: that is the wheel's METADATA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

SPEC = "1.6"
# What a compiler leaves in the extension where its runtime is linked statically: the
# name, whose it is, and the license.
RUNTIMES = {
    "Clang": (
        "libc++",
        "pkg:github/llvm/llvm-project@llvmorg-{}#libcxx",
        "Apache-2.0 WITH LLVM-exception",
    ),
    "GNU": (
        "libstdc++",
        "pkg:generic/gcc@{}#libstdc++-v3",
        "GPL-3.0-or-later WITH GCC-exception-3.1",
    ),
}
# Needed by the extension where it is not.
SHARED = (b"libc++.so", b"libstdc++.so")


def component(
    name: str,
    version: str,
    purl: str,
    license: str = "",
    *,
    why: str,
    kind: str = "library",
    inside: bool = True,
) -> dict[str, Any]:
    """One entry; `inside` says whether any of it is in the wheel."""
    entry: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name}
    entry |= {"version": version, "description": why}
    entry["scope"] = "required" if inside else "excluded"
    if license:
        entry["licenses"] = [{"expression": license}]
    return entry | {"purl": purl}


def robin_map() -> str:
    """The version of the hash table in nanobind's package."""
    spec = importlib.util.find_spec("nanobind")
    (folder,) = spec.submodule_search_locations if spec else ()  # type: ignore[misc]
    file = "ext/robin_map/include/tsl/robin_growth_policy.h"
    found = re.findall(
        r"define TSL_RH_VERSION_\w+ (\d+)", Path(folder, file).read_text()
    )
    return ".".join(found)


def headers() -> list[dict[str, Any]]:
    """What was compiled into the extension beside our own sources."""
    binding, table, xla = version("nanobind"), robin_map(), version("jaxlib")
    return [
        component(
            "nanobind",
            binding,
            f"pkg:pypi/nanobind@{binding}",
            "BSD-3-Clause",
            why="the binding to Python, linked statically",
        ),
        component(
            "robin-map",
            table,
            f"pkg:github/Tessil/robin-map@v{table}",
            "MIT",
            why="nanobind's hash table, of headers",
        ),
        component(
            "XLA FFI headers",
            xla,
            f"pkg:pypi/jaxlib@{xla}#include/xla/ffi/api",
            "Apache-2.0",
            why="XLA's interface for custom calls, of jaxlib; headers only",
        ),
    ]


def compilers(
    kind: str, number: str, native: bytes, origin: str
) -> list[dict[str, Any]]:
    """Who made the code, and which of their libraries are in it."""
    found = [
        component(
            kind,
            number,
            f"pkg:generic/{kind.lower()}@{number}",
            kind="application",
            why="compiled the sources",
            inside=False,
        )
    ]
    if kind in RUNTIMES and not any(library in native for library in SHARED):
        name, purl, license = RUNTIMES[kind]
        why = f"the runtime of {kind}, linked statically"
        found.append(component(name, number, purl.format(number), license, why=why))
    if origin != "none":
        name, _, number = origin.partition(" ")
        found.append(
            component(
                name,
                number,
                f"pkg:generic/{name}@{number}",
                kind="application",
                why="compiled the CUDA images inside of the extension",
                inside=False,
            )
        )
    return found


def bill(version: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The document."""
    purl = f"pkg:pypi/ringjax@{version}"
    main = component("ringjax", version, purl, "Apache-2.0", why="this wheel")
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {"component": main},
        "components": parts,
        "dependencies": [
            {"ref": purl, "dependsOn": [part["bom-ref"] for part in parts]},
        ],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True, help="of ringjax")
    parser.add_argument("--compiler", nargs=2, required=True, metavar=("ID", "VERSION"))
    parser.add_argument("--device-code", type=Path, required=True, help="the source")
    parser.add_argument("--native", type=Path, required=True, help="the extension")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    origin = re.search(
        r'DeviceCodeOrigin\(\) \{ return "(.*)"', args.device_code.read_text()
    )
    assert origin, f"{args.device_code} does not say who compiled it"
    kind, number = args.compiler
    made = compilers(kind, number, args.native.read_bytes(), origin[1])
    text = json.dumps(bill(args.version, [*headers(), *made]), indent=1)
    args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
