"""A TorchState on disk: one file of `torch.save`, a dict with all attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ringjax.elastic.checkpoint import synced

NAME = "state.pt"


class TorchFiles:
    """Lays out a `TorchState`.

    As everywhere in PyTorch, plain objects of other kinds are pickled, and reading a
    pickle runs code that its writer chose: load only what you have written.
    """

    def prepared(self, committed: dict[str, Any]) -> dict[str, Any]:
        """What was committed is a copy already."""
        return committed

    def write(self, folder: Path, prepared: dict[str, Any]) -> None:
        """Fills the folder."""
        with synced(folder / NAME) as file:
            torch.save(prepared, file)

    def read(self, folder: Path, present: dict[str, Any]) -> dict[str, Any]:
        """The attributes that both the file and the program have."""
        found = torch.load(folder / NAME, map_location="cpu", weights_only=False)
        return {name: value for name, value in found.items() if name in present}
