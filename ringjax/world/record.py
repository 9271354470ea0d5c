"""The recorder of this process: what it has exchanged lately, and in all.

The core adds every call by itself; what users see of it is in observe/.
"""

from __future__ import annotations

from pathlib import Path

from ringjax import _native
from ringjax.config import Config
from ringjax.control import temporary

KEPT = 1024  # calls; about 200 bytes each in the file


def recorder(config: Config, who: str, job: str) -> _native.Recorder:
    """One that writes what it has when the job ends with an error.

    Args:
        who: "rank 3".
        job: the job's id; a job of one has none, and nothing to write.
    """
    folder = config.record_dir or temporary.folder()
    path = ""
    if job and folder not in ("", "off"):
        path = str(Path(folder) / f"ringjax-{job[:8]}-{who.replace(' ', '')}.jsonl")
    return _native.Recorder(KEPT, who, path)
