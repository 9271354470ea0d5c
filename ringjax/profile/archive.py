"""Writes the traces of a profile: an archive for Perfetto, JSON for other viewers.

`profile.tar` opens in https://ui.perfetto.dev. The archive contains ringjax's trace,
JAX's traces, and a manifest that aligns these traces in time. `profile.json.gz`
contains all traces for older viewers such as chrome://tracing.
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
from ringjax.profile.parts import describe_missing
from ringjax.profile.trace import TraceProcess, trace_processes

ARCHIVE, MERGED = "profile.tar", "profile.json.gz"
TRACE = "ringjax.pftrace"
MAX_EVENTS = 200_000  # most events from JAX's traces, the sum over all ranks


def write(
    directory: Path, profile: MergedProfile, max_events: int = MAX_EVENTS
) -> list[str]:
    """Writes `profile.tar` and `profile.json.gz`, and returns a line about each file.

    Raises OSError if writing a file fails. An earlier file of this name then remains.
    """
    processes = list(trace_processes(profile))
    jax_traces = dict(_jax_traces(profile, max_events // len(profile.parts)))
    with _replacing(directory / ARCHIVE) as file:
        _write_archive(file, profile, processes, jax_traces)
    with _replacing(directory / MERGED) as file, gzip.open(file, "wt") as text:
        _write_json(text, profile, processes, jax_traces)
    return [
        f"{directory / ARCHIVE}: open it with https://ui.perfetto.dev",
        f"{directory / MERGED}: the same for older viewers, as chrome://tracing",
    ]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a temporary file that replaces `path` once the file is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            yield file
        # mkstemp lets only the owner read. Give the file the mode of the umask instead.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o022)  # a process can read its umask only by setting a new one
    os.umask(mask)
    return mask


# The events of each trace of JAX, by the name of its file in the archive.
_JaxTraces = dict[str, list[chrome.Event]]


def _jax_traces(
    profile: MergedProfile, most: int
) -> Iterator[tuple[str, list[chrome.Event]]]:
    for part in profile.parts:
        try:
            found = list(jax_events.events(part, profile.clock, most))
        except (OSError, ValueError, EOFError, KeyError) as error:
            part.notes.append(f"jax's own trace cannot be read: {error}")
            continue
        if found:
            yield f"jax-{part.who.replace(' ', '-')}.json", found


def _write_archive(
    file: IO[bytes],
    profile: MergedProfile,
    processes: Iterable[TraceProcess],
    jax_traces: _JaxTraces,
) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        _add_member(tar, "perfetto_manifest.json", _manifest(profile, jax_traces))
        # Write to a temporary file: a tar needs the size of the trace before its data,
        # and the trace may be too large for memory.
        with tempfile.TemporaryFile() as trace:
            for packet in perfetto.packets(processes):
                trace.write(packet)
            member = tarfile.TarInfo(TRACE)
            member.size = trace.tell()
            trace.seek(0)
            tar.addfile(member, trace)
        for name, found in jax_traces.items():
            _add_member(tar, name, json.dumps({"traceEvents": found}).encode())


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _manifest(profile: MergedProfile, jax_traces: _JaxTraces) -> bytes:
    """Returns a manifest: https://perfetto.dev/docs/reference/perfetto-manifest."""
    files: list[dict[str, Any]] = [{"path": TRACE}]
    for name in jax_traces:
        # All times are on one clock already. Name the clock, as JAX's files do not.
        clock = {"file": TRACE, "clock": "BOOTTIME"}
        files.append({"path": name, "clocks": {"sync_to": clock, "offset_ns": 0}})
    attributes = {f"ringjax.{k}": v for k, v in _attributes(profile).items()}
    manifest = {
        "version": 1,
        "trace_time": {"clock": "BOOTTIME", "file": TRACE},
        "files": files,
        "attributes": attributes,
    }
    # This key must come first: Perfetto recognizes a manifest by its first bytes.
    return json.dumps({"perfetto_manifest": manifest}).encode()


def _attributes(profile: MergedProfile) -> dict[str, str]:
    error = profile.clock.error
    known = "unknown" if error is None else f"{error * 1e6:.3g} us"
    attributes = {"run": profile.parts[0].run, "clock_error": known}
    if missing := describe_missing(list(profile.parts)):
        attributes["missing"] = "; ".join(missing)
    return attributes


def _write_json(
    text: IO[str],
    profile: MergedProfile,
    processes: Iterable[TraceProcess],
    jax_traces: _JaxTraces,
) -> None:
    about = json.dumps(_attributes(profile))
    text.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[')
    comma = "\n"
    traces: list[Iterable[chrome.Event]] = [chrome.events(processes)]
    for trace in [*traces, *jax_traces.values()]:
        for event in trace:
            text.write(comma + json.dumps(event, separators=(",", ":")))
            comma = ",\n"
    text.write("\n]}\n")
