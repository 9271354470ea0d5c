"""What is made of the parts of a profile: an archive for Perfetto, a JSON for others.

`profile.tar` opens in https://ui.perfetto.dev: our trace, those of JAX, and a manifest
that lays them over each other. `profile.json.gz` holds all of it for older viewers,
such as chrome://tracing.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ringjax.profile import chrome, jax_events, perfetto
from ringjax.profile.breakdown import MergedProfile
from ringjax.profile.parts import ProfilePart, missing
from ringjax.profile.trace import TraceProcess, processes

ARCHIVE, MERGED = "profile.tar", "profile.json.gz"
OURS = "ringjax.pftrace"
MOST_EVENTS = 200_000  # of JAX's traces, of all ranks


def write(
    directory: Path, profile: MergedProfile, most_events: int = MOST_EVENTS
) -> list[str]:
    """Writes both files.

    Returns:
        A line about each.

    Raises:
        OSError: they cannot be written; what was there before stays.
    """
    drawn = list(processes(profile))
    traces = dict(_traces(profile, most_events // len(profile.parts)))
    with _replacing(directory / ARCHIVE) as file:
        _tar(file, profile, drawn, traces)
    with _replacing(directory / MERGED) as file, gzip.open(file, "wt") as text:
        _json(text, profile, drawn, traces)
    return [
        f"{directory / ARCHIVE}: open it with https://ui.perfetto.dev",
        f"{directory / MERGED}: the same for older viewers, as chrome://tracing",
    ]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there once it is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            yield file
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _traces(
    profile: MergedProfile, most: int
) -> Iterator[tuple[str, tuple[ProfilePart, list[Any]]]]:
    """JAX's, by their name in the archive."""
    for part in profile.parts:
        try:
            found = list(jax_events.events(part, profile.base, most))
        except (OSError, ValueError, EOFError, KeyError) as error:
            part.notes.append(f"jax's own trace cannot be read: {error}")
            continue
        if found:
            yield f"jax-{part.who.replace(' ', '-')}.json", (part, found)


def _tar(
    file: IO[bytes],
    profile: MergedProfile,
    drawn: Iterable[TraceProcess],
    traces: dict[str, tuple[ProfilePart, list[Any]]],
) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        _member(tar, "perfetto_manifest.json", _manifest(profile, traces))
        with tempfile.TemporaryFile() as ours:
            for packet in perfetto.packets(drawn):
                ours.write(packet)
            about = tarfile.TarInfo(OURS)
            about.size = ours.tell()
            ours.seek(0)
            tar.addfile(about, ours)
        for name, (_, found) in traces.items():
            _member(tar, name, json.dumps({"traceEvents": found}).encode())


def _member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    tar.addfile(about, io.BytesIO(data))


def _manifest(
    profile: MergedProfile, traces: dict[str, tuple[ProfilePart, list[Any]]]
) -> bytes:
    """https://perfetto.dev/docs/reference/perfetto-manifest.

    All files have one time base already; "clocks" says that of those without a clock.
    """
    files: list[dict[str, Any]] = [{"path": OURS}]
    for name in traces:
        clock = {"file": OURS, "clock": "BOOTTIME"}
        files.append({"path": name, "clocks": {"sync_to": clock, "offset_ns": 0}})
    manifest: dict[str, Any] = {
        "version": 1,
        "trace_time": {"clock": "BOOTTIME", "file": OURS},
        "files": files,
    }
    manifest["attributes"] = {f"ringjax.{k}": v for k, v in _about(profile).items()}
    # Perfetto knows it by its first bytes.
    return json.dumps({"perfetto_manifest": manifest}).encode()


def _about(profile: MergedProfile) -> dict[str, str]:
    error = profile.base.error
    known = "unknown" if error is None else f"{error * 1e6:.3g} us"
    about = {"run": profile.parts[0].run, "clock_error": known}
    if gone := missing(list(profile.parts)):
        about["missing"] = "; ".join(gone)
    return about


def _json(
    text: IO[str],
    profile: MergedProfile,
    drawn: Iterable[TraceProcess],
    traces: dict[str, tuple[ProfilePart, list[Any]]],
) -> None:
    about = json.dumps(_about(profile))
    text.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[')
    comma = "\n"
    every: list[Iterable[Any]] = [chrome.events(drawn)]
    every += [found for _, found in traces.values()]
    for found in every:
        for event in found:
            text.write(comma + json.dumps(event, separators=(",", ":")))
            comma = ",\n"
    text.write("\n]}\n")
