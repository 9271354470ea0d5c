"""Collectives between hosts, as root: `python -m benchmarks.hosts.collectives`.

Builds hosts as network namespaces with links of a given rate. Times ringjax in these
hosts next to plain TCP streams, lower bounds of the links, and the backward pass of a
real model. rank.py is the program of a rank, support/namespaces.py makes the network,
layouts.py places ranks and computes the bounds, and README.md explains the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.namespaces import Namespaces, spawn

from benchmarks.harness import machine
from benchmarks.harness.report import columns
from benchmarks.hosts.layouts import LOOPBACK, Layout, parse_rate, parse_size
from benchmarks.peers.adapter import COLLECTIVES

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


class HostsError(RuntimeError):
    """Error: a world has failed; the text contains the reason."""


def run(layout: Layout, options: argparse.Namespace, folder: Path) -> list[Any]:
    """Runs a world; returns the results of its rank 0.

    Raises:
      HostsError: a rank has failed, or the time limit has passed.
    """
    plan = {
        "ring": layout.ring,
        "cases": cases(layout, options),
        "flows": options.flows,
        "rounds": options.rounds,
        "batch": 0 if layout.loopback else options.batch,
        "bucket_bytes": options.bucket_bytes,
    }
    words = [sys.executable, "-m", "benchmarks.hosts.rank", json.dumps(plan)]
    network: Any = contextlib.nullcontext()
    if not layout.loopback:
        network = Namespaces(layout.hosts, layout.rate, f"{os.getpid():x}"[-5:])
    with network as hosts:
        lines = launch(layout, hosts, words, folder, options.timeout)
    return [json.loads(line) for line in lines if line.startswith("{")]


def cases(layout: Layout, options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Returns each collective and size, and the bytes that plain TCP must carry."""
    whole = 4 * layout.size
    sizes = [size // whole * whole for size in options.sizes]
    return [
        (name, size, round(layout.crossing(name, size)))
        for name in options.collectives
        for size in sizes
    ]


def launch(
    layout: Layout,
    network: Namespaces | None,
    words: Sequence[str],
    folder: Path,
    timeout: float,
) -> list[str]:
    """Runs a command as all ranks of a world; returns the lines of rank 0.

    Raises:
      HostsError: a rank has failed, or the time limit has passed.
    """
    job, secret = secrets.token_hex(8), secrets.token_hex(32)
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    common = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": python}
    common["RINGJAX_CACHE_DIR"] = str(
        folder / "cache"
    )  # do not use results of autotune from other links
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"{job}.{rank}" for rank in range(layout.size)]
    try:
        for rank, log in enumerate(logs):
            env = common | layout.environment(rank, job, secret)
            with log.open("wb") as file:
                if network is None:
                    ranks.append(spawn(words, env, file))
                else:
                    ranks.append(network.start(rank // layout.ranks, words, env, file))
        _wait(ranks, timeout, logs)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return logs[0].read_text().splitlines()


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], timeout: float, logs: Sequence[Path]
) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((r for r, code in enumerate(codes) if code), None)
        if failed is None and None in codes and time.monotonic() > deadline:
            failed = codes.index(None)
        if failed is not None:
            tail = logs[failed].read_text(errors="replace")[-2000:]
            how = codes[failed] if codes[failed] is not None else "no end in time"
            raise HostsError(f"rank {failed} has failed ({how})\n{tail}")
        if None not in codes:
            return
        time.sleep(0.2)


# -- what is printed -------------------------------------------------------------------


def rows_of(results: Sequence[Any], layout: Layout) -> list[dict[str, Any]]:
    """Returns a row for each collective and size, with bounds and plain streams."""
    rows = []
    for mine in (r for r in results if r["kind"] == "collective"):
        name, size, seconds = mine["collective"], mine["size"], mine["seconds"]
        plain = {
            r["flows"]: r
            for r in results
            if r["kind"] == "streams" and (r["collective"], r["size"]) == (name, size)
        }
        best = min(plain.values(), key=lambda r: float(r["seconds"]))
        bounds = layout.bounds(name, size)
        rows.append(
            {
                **mine,
                "ring_bound": bounds and bounds[0],
                "bound": bounds and bounds[1],
                "share_of_ring_bound": bounds and bounds[0] / seconds,
                "share_of_bound": bounds and bounds[1] / seconds,
                "streams": {flows: r["seconds"] for flows, r in plain.items()},
                "share_of_streams": statistics.median(
                    limit / own
                    for own, limit in zip(mine["rounds"], best["rounds"], strict=True)
                ),
                "streams_busy": best["busy"],
            }
        )
    return rows


def model_row(results: Sequence[Any], layout: Layout) -> dict[str, Any] | None:
    """Returns a row with the share of communication that the backward pass hides."""
    rounds = {r["variant"]: r["rounds"] for r in results if r["kind"] == "model"}
    if not rounds:
        return None
    shares = [
        hidden(none, turn, beside)
        for none, turn, beside in zip(
            rounds["none"], rounds["in turn"], rounds["overlapped"], strict=True
        )
    ]
    size = next(r["size"] for r in results if r["kind"] == "model")
    exposed = next(
        r["exposed"]
        for r in results
        if (r["kind"], r.get("variant")) == ("model", "overlapped")
    )
    bounds = layout.bounds("allreduce", size)
    usual = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    return {
        "size": size,
        "bound": bounds and bounds[1],
        **usual,
        "hidden": hidden(usual["none"], usual["in turn"], usual["overlapped"]),
        "hidden_rounds": shares,
        "exposed": exposed,
        "hidden_waiting": 1 - exposed / usual["alone"],
        "rounds": rounds,
    }


def hidden(none: float, in_turn: float, overlapped: float) -> float:
    """Returns the share of the time for allreduce that overlap removes from a step."""
    added = in_turn - none
    return (in_turn - overlapped) / added if added > 0 else 0.0


def table(layout: Layout, rows: Sequence[dict[str, Any]]) -> str:
    """Formats the rows of one world."""
    head = ",size,algorithm,ms,(min .. max),bound,share,ring,plain,share,busy"
    lines = [head.split(",")]
    for row in rows:
        times = [t * 1e3 for t in row["rounds"]]
        lines.append(
            [
                row["collective"],
                f"{row['size'] / MIB:.2f} MiB",
                row["algorithm"],
                f"{row['seconds'] * 1e3:.2f}",
                f"({min(times):.1f} .. {max(times):.1f})",
                _ms(row["bound"]),
                _share(row["share_of_bound"]),
                _share(row["share_of_ring_bound"]),
                f"{min(row['streams'].values()) * 1e3:.2f}",
                f"{row['share_of_streams']:.2f}",
                f"{row['busy']:.2f}",
            ]
        )
    return f"\n{layout.title}\n{columns(lines)}"


def model_text(row: dict[str, Any]) -> str:
    times = ", ".join(
        f"{name} {row[name] * 1e3:.0f}"
        for name in ("none", "in turn", "overlapped", "tuned", "alone")
    )
    spread = f"{min(row['hidden_rounds']):.2f} .. {max(row['hidden_rounds']):.2f}"
    return (
        f"model with {row['size'] / MIB:.1f} MiB of gradients, ms a step: {times}"
        f" (bound {_ms(row['bound'])}); hidden: {row['hidden']:.2f} ({spread}), of the "
        f"waiting: {row['hidden_waiting']:.2f} ({row['exposed'] * 1e3:.1f} ms left)"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options. Ends the process with a message if they are wrong."""
    p = argparse.ArgumentParser(
        prog="benchmarks.hosts.collectives", description=__doc__
    )
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    layouts = [LOOPBACK, "2x1", "4x1", "4x2"]
    p.add_argument(
        "--layouts",
        nargs="+",
        type=Layout.parse,
        default=[Layout.parse(text) for text in layouts],
        help=f"HOSTSxRANKS, or loopback ({' '.join(layouts)})",
    )
    p.add_argument("--rates", nargs="+", type=parse_rate, default=["1gbit", "10gbit"])
    p.add_argument(
        "--sizes", nargs="*", type=parse_size, default=[MIB, 16 * MIB, 100 * MIB]
    )
    p.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=["allreduce"]
    )
    p.add_argument("--flows", nargs="+", type=int, default=[1, 2], help="plain (1 2)")
    p.add_argument("--rounds", type=int, default=5, help="turns of everything (5)")
    p.add_argument("--batch", type=int, default=48, help="of the model; 0: none (48)")
    p.add_argument("--bucket-bytes", type=parse_size, default=25 * MIB, help="(25M)")
    p.add_argument("--timeout", type=float, default=300, help="seconds a world (300)")
    p.add_argument("--json", type=Path, default=Path("build/benchmarks/hosts.json"))
    options = p.parse_args(words)
    if options.rounds < 1 or options.batch < 0 or min(options.flows) < 1:
        p.error("--rounds and --flows must be 1 or more, --batch 0 or more")
    if min(options.sizes, default=MIB) < 4 * max(x.size for x in options.layouts):
        p.error("--sizes must be 4 bytes or more for each rank")
    return options


def worlds(options: argparse.Namespace) -> list[Layout]:
    """Returns every layout with every rate. Loopback has no rate."""
    found = [layout for layout in options.layouts if layout.loopback]
    shaped = [layout for layout in options.layouts if not layout.loopback]
    return found + [
        Layout(layout.hosts, layout.ranks, rate)
        for rate in options.rates
        for layout in shaped
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Runs all cases, prints the tables and writes the JSON file."""
    options = parse(words)
    if os.geteuid() != 0 and not all(layout.loopback for layout in options.layouts):
        raise SystemExit(
            "benchmarks.hosts.collectives: only root may make network namespaces; "
            "--layouts loopback does without"
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    control = _congestion_control()
    print(f"# {os.cpu_count()} CPUs, TCP with {control}; ms, {options.rounds} rounds")
    found = []
    with tempfile.TemporaryDirectory(prefix="ringjax-hosts-") as folder:
        for layout in worlds(options):
            try:
                results = run(layout, options, Path(folder))
            except (HostsError, RuntimeError, OSError) as error:
                raise SystemExit(
                    f"benchmarks.hosts.collectives: {layout.title}: {error}"
                ) from None
            rows = rows_of(results, layout)
            step = model_row(results, layout)
            print(table(layout, rows) if rows else f"\n{layout.title}")
            if step is not None:
                print(model_text(step))
            sys.stdout.flush()
            where = {"layout": layout.title, "hosts": layout.hosts}
            where |= {"ranks_per_host": layout.ranks, "rate": layout.rate}
            found.append({**where, "collectives": rows, "model": step})
    results = {"congestion_control": control, "rounds": options.rounds, "worlds": found}
    machine.write_results(options.json, results)
    print(f"\n# written to {options.json}")


def _congestion_control() -> str:
    """Returns TCP's default congestion control, which namespaces inherit."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _end(number: int, frame: object) -> None:
    """Ends the program like Ctrl-C, so that the network is removed."""
    del frame
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
