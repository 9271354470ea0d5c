"""Flight recorder of this process: its last calls, and totals over all calls.

The native core records every call. observe/ shows the records to users.
"""

from __future__ import annotations

from pathlib import Path

from ringjax import _native
from ringjax.config import Config
from ringjax.control import temporary

RECORDER_CAPACITY = 1024  # calls; each takes about 200 bytes in the file


def create_recorder(config: Config, name: str, job: str) -> _native.Recorder:
    """Makes a recorder that writes its calls to a file if the job fails.

    If `job` is "", this is a job of one process, and the recorder writes no file.
    """
    folder = config.record_dir or temporary.folder()
    path = ""
    if job and folder not in ("", "off"):
        path = str(Path(folder) / f"ringjax-{job[:8]}-{name.replace(' ', '')}.jsonl")
    return _native.Recorder(RECORDER_CAPACITY, name, path)
