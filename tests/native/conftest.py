"""The native tests as items of pytest: `pytest tests/native/waits_test.cc -k Turn`.

Each test runs in a process of its own, so a crash or a hang fails only that test. The
program has its own time limit. support/native_build.py builds it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support import fabric, native_build


class NativeFailure(Exception):
    """A check failed, or the program crashed. The text is the program's output."""


class NativeTest(pytest.Item):
    """The item for one `TEST` of a C++ file."""

    line: int

    def setup(self) -> None:
        """Builds the changed files. The time limit of a test does not apply here."""
        try:
            self.program = native_build.tests()
        except native_build.BuildError as error:
            pytest.fail(str(error), pytrace=False)

    def runtest(self) -> None:
        done = subprocess.run(
            [self.program, f"={self.name}"],
            env={"RINGJAX_FABRIC_LIBRARY": fabric.library(), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise NativeFailure(f"exit code {done.returncode}\n{done.stdout}")

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> Any:
        """Shows the program's output instead of this process's traceback."""
        if isinstance(excinfo.value, NativeFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line, self.name


class NativeFile(pytest.File):
    """A file of tests."""

    def collect(self) -> Iterable[NativeTest]:
        """Reads the file, since nothing may be built yet."""
        text = self.path.read_text()
        for found in re.finditer(r"(?m)^TEST\((\w+)\)", text):
            item: NativeTest = NativeTest.from_parent(self, name=found[1])
            item.line = text.count("\n", 0, found.start())
            item.add_marker(pytest.mark.timeout(0))
            yield item


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Any:
    if file_path.name.endswith("_test.cc"):
        return NativeFile.from_parent(parent, path=file_path)
    return None
