"""Runs `ringjax doctor` on a machine that a shell script has broken.

The script breaks the machine inside a namespace and then starts the doctor. A test may
also run the fixes that the doctor prints, and then the doctor again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launch import ROOT, environment

DOCTOR = [sys.executable, "-P", "-m", "ringjax", "doctor", "--json"]


@dataclass(frozen=True)
class DoctorRun:
    """The output of one run of the doctor."""

    code: int
    found: dict[str, object]

    def problems(self, check: str, host: str = "") -> list[tuple[str, str]]:
        """Returns status and text of each finding of a check that is not ok."""
        return [
            (row["status"], row["text"])
            for row in self.rows()
            if row["check"] == check and row["status"] != "ok" and host in row["host"]
        ]

    def rows(self) -> list[dict[str, str]]:
        """Returns all findings as dictionaries."""
        rows = self.found["checks"]
        assert isinstance(rows, list)
        return rows

    def fix_of(self, check: str) -> str:
        """Returns the command that fixes the problem that a check has found."""
        return next(r["mend"] for r in self.rows() if r["check"] == check and r["mend"])

    def failed_checks(self) -> set[str]:
        """Returns the names of the checks with findings that are not ok."""
        return {row["check"] for row in self.rows() if row["status"] != "ok"}


def needs_root(*programs: str) -> pytest.MarkDecorator:
    """Skips a test if the user is not root or if a program is missing."""
    why = "" if os.geteuid() == 0 else "only root may make such a namespace"
    absent = [name for name in programs if shutil.which(name) is None]
    if absent:
        why = f"there is no {', '.join(absent)}"
    return pytest.mark.skipif(bool(why), reason=why or "possible")


def run_doctor(
    *words: str,
    before: str = "",
    inside: Sequence[str] = (),
    trial: bool = False,
    env: Mapping[str, str] | None = None,
    again: bool = False,
    folder: Path | None = None,
) -> list[DoctorRun]:
    """Runs the doctor after a script, in one shell.

    Args:
        words: options of the doctor.
        before: a script that breaks the machine. If it fails, the test fails.
        inside: a command that runs the shell, such as `unshare -m`.
        trial: whether the doctor also runs its trial job.
        env: additional variables.
        again: run the fixes that the doctor printed, with a `sudo` that only runs its
            arguments, and then the doctor again.
        folder: an empty folder, needed with `again`.
    """
    command = [*DOCTOR, *([] if trial else ["--no-trial"]), *words]
    quoted = " ".join(f"'{word}'" for word in command)
    variables = environment("doctor", {"NO_COLOR": "1", **(env or {})})
    script = f"set -e\n{before}\nset +e\n{quoted}; echo rc=$?\n"
    if again:
        assert folder is not None
        (folder / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
        (folder / "sudo").chmod(0o755)
        # The PATH of sudo contains the folders of administrators' commands, which not
        # every user's PATH contains.
        folders = (str(folder), variables["PATH"], "/usr/sbin", "/sbin")
        variables["PATH"] = os.pathsep.join(folders)
        pick = f"'{sys.executable}' -c '{_PICK}'"
        script += f"{quoted} | {pick} > '{folder}/mend'; . '{folder}/mend' >&2\n"
        script += f"{quoted}; echo rc=$?\n"
    done = subprocess.run(
        [*inside, shutil.which("bash") or "sh", "-c", script],
        env=variables,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
    )
    parts = done.stdout.split("rc=")
    assert len(parts) == (3 if again else 2), done.stdout + done.stderr
    codes = [int(part.split()[0]) for part in parts[1:]]
    texts = [parts[0], *(part.partition("\n")[2] for part in parts[1:-1])]
    return [DoctorRun(c, json.loads(t)) for c, t in zip(codes, texts, strict=True)]


# The commands of all findings that are not ok, as a script.
_PICK = (
    "import json, sys; "
    'print(*[r["mend"] for r in json.load(sys.stdin)["checks"]'
    ' if r["status"] != "ok"], sep="\\n")'
)
