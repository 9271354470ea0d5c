"""The pytest items of rank tests: a test marked `ranks(2, 3)` becomes two items.

Starting Python and jax costs seconds, so all selected tests of one file with equal rank
count and environment share a launch, which is one run of ringrun. The first test starts
the launch, and the other tests read their results from it. Files with an equal mark
`pytestmark = pytest.mark.launch("name")` share a launch, too. After a failure the ranks
may be out of step, so they stop, and the next test starts a new launch. In the ranks,
tests/support/rank_worker.py runs the tests.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import leaks, rank_worker, warm
from support.launch import Job

START_UP = 180.0  # seconds until the first test; importing torch from a disk is slow
GRACE = 15.0  # seconds beyond a test's own timeout before the launch is ended


class RankFailure(Exception):
    """A test failed on a rank. The text holds the ranks' reports."""


@dataclass(frozen=True)
class Group:
    """The properties of a launch. Tests with equal properties share a launch."""

    name: str  # the argument of the mark `launch`, or the name of the file
    np: int
    # If this is a function, it is called when the ranks start, because it may build a
    # program.
    env: tuple[tuple[str, str], ...] | Callable[[], Mapping[str, str]] = ()
    alone: str = ""  # the id of an isolated test


@dataclass
class Verdict:
    """The combined outcome of a test on all ranks."""

    outcome: str  # "passed", "failed", "skipped" or "xfailed"
    text: str = ""
    seconds: float = 0.0  # on the slowest rank, without the launch


class RankItem(pytest.Item):
    """A test with the mark `ranks`, for one of its rank counts."""

    group: Group
    test: str
    limit: float
    line: int | None
    verdict: Verdict

    @staticmethod
    def expand(function: pytest.Function) -> list[RankItem]:
        """Makes an item for every rank count in the function's `ranks` mark."""
        marks = list(function.iter_markers("ranks"))
        counts = marks[0].args
        if not counts or not all(isinstance(n, int) and n > 0 for n in counts):
            raise pytest.UsageError(
                f"{function.nodeid}: ranks(…) wants numbers of ranks"
            )
        # A test whose own mark has other counts keeps the environment of its file.
        options: dict[str, Any] = {}
        for mark in reversed(marks):
            options |= mark.kwargs
        unknown = options.keys() - {"isolated", "env"}
        if unknown:
            raise pytest.UsageError(f"{function.nodeid}: ranks(…) has no {unknown}")
        return [RankItem._make(function, np, **options) for np in counts]

    @staticmethod
    def _make(
        function: pytest.Function,
        np: int,
        isolated: bool = False,
        env: dict[str, str] | Callable[[], Mapping[str, str]] | None = None,
    ) -> RankItem:
        label = "1 rank" if np == 1 else f"{np} ranks"
        name = function.name
        name = f"{name[:-1]}-{label}]" if name.endswith("]") else f"{name}[{label}]"
        assert function.parent is not None
        item: RankItem = RankItem.from_parent(function.parent, name=name)
        # The ranks enforce the timeout of each test. This item has no timeout, because
        # it may wait for a launch of many tests.
        item.own_markers = [pytest.mark.timeout(0).mark, *function.own_markers]
        item.keywords.update(function.keywords)
        item.test = function.nodeid
        item.line = function.reportinfo()[1]
        item.limit = rank_worker.limit(function)
        item.group = Group(
            name=_launch_name(function),
            np=np,
            env=env if callable(env) else tuple(sorted((env or {}).items())),
            alone=function.nodeid if isolated else "",
        )
        return item

    def setup(self) -> None:
        """Gets the verdict. Launches the ranks if there is no verdict yet."""
        self.verdict = self.config.stash[RUNS].verdict(self)

    def runtest(self) -> None:
        """Reports the verdict as this item's outcome."""
        verdict = self.verdict
        if verdict.outcome == "failed":
            raise RankFailure(verdict.text)
        if verdict.outcome == "skipped":
            pytest.skip(verdict.text)
        if verdict.outcome == "xfailed":
            pytest.xfail(verdict.text)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> Any:
        """Shows the ranks' reports instead of this process's traceback."""
        if isinstance(excinfo.value, RankFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Returns the file, line and name of the test."""
        return self.path, self.line, self.name

    def iter_markers_with_node(
        self, name: str | None = None
    ) -> Iterator[tuple[Any, pytest.Mark]]:
        """Returns all marks except xfail, which the ranks evaluate themselves."""
        pairs = super().iter_markers_with_node(name)
        return (pair for pair in pairs if pair[1].name != "xfail")


@dataclass
class Launch:
    """The results of one launch."""

    np: int
    exit_code: int
    logs: str
    stalled: bool
    left_behind: list[str]
    starts: dict[str, set[int]] = field(default_factory=dict)
    ends: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        """Reads the lines that the ranks have written."""
        for rank in range(self.np):
            path = rank_worker.results(folder, rank)
            for line in path.read_text().splitlines() if path.exists() else ():
                event = json.loads(line)
                if event["event"] == "start":
                    self.starts.setdefault(event["test"], set()).add(rank)
                else:
                    self.ends.setdefault(event["test"], {})[rank] = event

    def verdict(self, test: str) -> Verdict | None:
        """Returns the verdict of a test; None if no rank has started the test."""
        ends = self.ends.get(test, {})
        failed = {r: e for r, e in sorted(ends.items()) if e["outcome"] == "failed"}
        missing = sorted(set(range(self.np)) - ends.keys())
        if failed or (missing and test in self.starts):
            texts = [self._report(rank, event) for rank, event in failed.items()]
            texts += [f"rank {r} of {self.np} has no result" for r in missing]
            if missing:
                texts.append(self.end())
            return Verdict("failed", "\n\n".join(texts))
        if missing:
            return None
        outcomes = {(e["outcome"], e["text"]) for e in ends.values()}
        if len(outcomes) > 1:
            return Verdict("failed", f"the ranks disagree: {sorted(outcomes)}")
        return Verdict(*outcomes.pop(), max(e["seconds"] for e in ends.values()))

    def end(self) -> str:
        """Describes how the launch ended, with the logs."""
        how = f"ringrun ended with exit code {self.exit_code}"
        if self.stalled:
            how = "the ranks made no progress and were ended"
        return f"{how}\n{self.logs}"

    def _report(self, rank: int, event: dict[str, Any]) -> str:
        sections = [f"--- {name}\n{text}" for name, text in event["sections"]]
        head = f"rank {rank} of {self.np}: {event['crash']}"
        return "\n".join([head, event["text"], *sections])


class Runs:
    """All launches of a pytest session and their verdicts."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Verdict] = {}

    def verdict(self, item: RankItem) -> Verdict:
        """Returns the verdict of `item`. Launches the ranks if necessary."""
        if item.nodeid not in self._verdicts:
            self._run(item.group, self._waiting(item))
        return self._verdicts[item.nodeid]

    def _waiting(self, item: RankItem) -> list[RankItem]:
        """Returns `item` and the selected items of its group without a verdict."""
        peers = [i for i in item.session.items if isinstance(i, RankItem)]
        waiting = [
            i
            for i in peers
            if i.group == item.group
            and i.nodeid not in self._verdicts
            and i is not item
        ]
        return [item, *waiting]

    def _run(self, group: Group, items: Sequence[RankItem]) -> None:
        before = leaks.Snapshot.take()
        launch = _launch(group, items, items[0].config)
        left = [*launch.left_behind, *leaks.settle(before.leaked_since)]
        verdicts = {item: launch.verdict(item.test) for item in items}
        known = {item: v for item, v in verdicts.items() if v is not None}
        if not known:
            # The ranks ended before their first test. So would those of a new launch.
            nothing = Verdict("failed", f"no test was started\n{launch.end()}")
            known = dict.fromkeys(items, nothing)
        if left:
            last = list(known)[-1]
            text = "\n".join([known[last].text, "the launch left behind:", *left])
            known[last] = Verdict("failed", text.strip())
        self._verdicts |= {item.nodeid: verdict for item, verdict in known.items()}


RUNS = pytest.StashKey[Runs]()


@functools.cache
def _launch_named_in(path: Path) -> str:
    found = re.search(r'mark\.launch\("(\w+)"\)', path.read_text())
    return found[1] if found else str(path)


def xdist_scope(nodeid: str, root: Path) -> str:
    """Returns the scope of a test, for pytest-xdist.

    xdist runs all tests of a scope in one process, and all tests of a launch have one
    scope. The scope is derived from the id and the file of the test, because xdist's
    scheduler has no items.
    """
    found = re.search(r"\b(\d+) ranks?\]$", nodeid)
    if found is None:
        return nodeid
    return f"{_launch_named_in(root / nodeid.partition('::')[0])} {found[1]}"


def _launch_name(function: pytest.Function) -> str:
    mark = function.get_closest_marker("launch")
    return str(mark.args[0]) if mark else str(function.path)


def _launch(group: Group, items: Sequence[RankItem], config: pytest.Config) -> Launch:
    with tempfile.TemporaryDirectory(prefix="ringjax-ranks-") as name:
        folder = Path(name)
        rank_worker.write_selection(folder, [item.test for item in items])
        added = group.env() if callable(group.env) else dict(group.env)
        env = {**added, rank_worker.VARIABLE: str(folder)}
        command = rank_worker.command(config, sorted({item.path for item in items}))
        job = Job(group.np, command, folder, env, source=_source(group, items)).start()
        try:
            stalled = not _watch(job, folder, max(item.limit for item in items))
            launch = Launch(
                np=group.np,
                exit_code=job.poll() or 0,
                logs=job.logs() + _stacks(folder, group.np),
                stalled=stalled,
                left_behind=job.left_behind(),
            )
        finally:
            job.close()
        launch.read(folder)
        return launch


def _source(group: Group, items: Sequence[RankItem]) -> str | None:
    """Returns the source of the tests, whose imports choose the warm server.

    Returns None for an isolated test, whose ranks start without a warm server. Thus
    some tests of each framework run in processes that are not forks of a server.
    """
    if group.alone:
        return None
    return "\n".join(warm.sources(path) for path in sorted({i.path for i in items}))


def _watch(job: Job, folder: Path, limit: float) -> bool:
    """Waits for the end of the job. Ends a job without progress, and returns False."""
    seen, deadline = -1, time.monotonic() + START_UP
    while job.poll() is None:
        written = sum(_sizes(rank_worker.results(folder, r) for r in range(job.np)))
        if written != seen:
            extra = limit + GRACE if written else START_UP
            seen, deadline = written, time.monotonic() + extra
        if time.monotonic() > deadline:
            job.end_with_stacks()
            return False
        time.sleep(0.02)
    return True


def _sizes(paths: Iterable[Path]) -> Iterable[int]:
    return (path.stat().st_size if path.exists() else 0 for path in paths)


def _stacks(folder: Path, np: int) -> str:
    texts = []
    for rank in range(np):
        path = rank_worker.stacks(folder, rank)
        lines = path.read_text().splitlines() if path.exists() else []
        ours = [s for s in lines if "/_pytest/" not in s and "/pluggy/" not in s]
        texts += [f"--- stacks of rank {rank}", *ours] if ours else []
    return "\n".join(["", *texts])
