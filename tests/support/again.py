"""Runs pytest, and runs each failed test again, alone: `again.py PYTEST-OPTIONS`.

A test that fails and then passes alone is flaky. A flaky test does not fail the run. It
is listed at the end and counted in the closing line. A test that fails twice fails the
run. Many failures at once also fail the run, because they have a common cause. CI runs
this program, which is not a plugin of pytest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_RETRIED = 10  # with more failures, no test is tried again
TESTS_FAILED = 1  # the exit code of pytest


def main(options: list[str]) -> int:
    """Returns pytest's exit code, or 0 if every failed test has passed alone."""
    with tempfile.TemporaryDirectory(prefix="ringjax-again-") as folder:
        code, text = _pytest(options, Path(folder, "all"))
        failed = _failed(Path(folder, "all"))
        if code != TESTS_FAILED or not 0 < len(failed) <= MAX_RETRIED:
            return code
        broken = []
        for number, test in enumerate(failed):
            print(f"\nagain, alone: {test}", flush=True)
            alone = ["--durations=0", test]
            if _pytest(alone, Path(folder, str(number)))[0]:
                broken.append(test)
    for test in failed:
        print(f"{'FAILED TWICE' if test in broken else 'FLAKY'} {test}")
    print(closing(text, len(failed) - len(broken), len(broken)))
    return TESTS_FAILED if broken else 0


def closing(text: str, flaky: int, broken: int) -> str:
    """Returns pytest's closing line with separate counts of flaky and broken tests."""
    counts, seconds = re.findall(r"(?m)^=+ (\d.*) in (\d.*?) =+$", text)[-1]
    others = [c for c in counts.split(", ") if not re.search("failed|error", c)]
    known = {"failed": broken, "flaky": flaky}
    words = [f"{n} {word}" for word, n in known.items() if n]
    return f" {', '.join(words + others)} in {seconds} ".center(80, "=")


def _pytest(options: list[str], cache: Path) -> tuple[int, str]:
    """Runs pytest and shows its output. Returns its exit code and its output."""
    words = [sys.executable, "-P", "-m", "pytest", "-o", f"cache_dir={cache}"]
    lines = []
    with subprocess.Popen(
        [*words, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pytest:
        assert pytest.stdout is not None
        for line in pytest.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return pytest.returncode, "".join(lines)


def _failed(cache: Path) -> list[str]:
    """Returns the ids of the tests that failed, also in setup or teardown."""
    file = cache / "v" / "cache" / "lastfailed"
    return list(json.loads(file.read_text())) if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
