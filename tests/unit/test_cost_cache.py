"""Tests of the file with a network's constants, which is checked before its use."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ringjax.links import cost_cache

NETWORK = {"names": ["a", "b"], "ranks": [0, 0, 1]}
COST: dict[str, Any] = dict.fromkeys(cost_cache.NAMES, 1e-5)


def file_of(folder: Path, network: Any = NETWORK) -> Path:
    return Path(cost_cache.path_of(str(folder), network))


def change(folder: Path, **content: Any) -> None:
    """Replaces some entries of the file."""
    path = file_of(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def test_constants_are_stored_per_network(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert cost_cache.read(str(folder), NETWORK) is None
    assert cost_cache.write(str(folder), NETWORK, COST)
    assert cost_cache.read(str(folder), NETWORK) == COST
    assert cost_cache.read(str(folder), NETWORK | {"ranks": [0, 1, 1]}) is None
    assert cost_cache.write(str(folder), NETWORK, COST | {"remote_byte": 2e-9})
    found = cost_cache.read(str(folder), NETWORK)
    assert found is not None
    assert found["remote_byte"] == 2e-9
    assert [p.name for p in folder.iterdir()] == [file_of(folder).name]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file_of(folder).stat().st_mode & 0o777 == 0o600


def test_without_a_folder_no_constants_are_stored() -> None:
    assert not cost_cache.write("", NETWORK, COST)
    assert cost_cache.read("", NETWORK) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "[]", "7", '"value"', "{}", "\x00\x01"),
        *('{"when": 1e400}', "[" * 4000, "9" * 4000, " " * 5000),
    ],
    ids=range(12),
)
def test_damaged_files_are_ignored(tmp_path: Path, text: str) -> None:
    file_of(tmp_path).write_text(text)
    assert cost_cache.read(str(tmp_path), NETWORK) is None


def test_files_that_are_not_text_are_ignored(tmp_path: Path) -> None:
    file_of(tmp_path).write_bytes(b"\xff\xfe\x80")
    assert cost_cache.read(str(tmp_path), NETWORK) is None


@pytest.mark.parametrize(
    "content",
    [
        {"when": time.time() - 8 * 86400},
        {"when": time.time() + 86400},
        {"when": "yesterday"},
        {"when": None},
        {"thing": None},
        {"thing": "0" * 64},  # the network of a copied file
        {"value": None},
        {"value": []},
        {"value": {}},
        {"value": {k: v for k, v in COST.items() if k != "remote_byte"}},
        {"value": COST | {"another": 1e-6}},
        *(
            {"value": COST | {"remote_latency": value}}
            for value in (0.0, -1e-6, 2.0, 1, "1e-6", None, [1e-6], True, 1e-300)
        ),
        {"value": COST | {"remote_byte": math.nan}},
        {"value": COST | {"local_byte": math.inf}},
    ],
)
def test_expired_foreign_and_invalid_content_is_ignored(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    cost_cache.write(str(tmp_path), NETWORK, COST)
    change(tmp_path, when=time.time())
    assert cost_cache.read(str(tmp_path), NETWORK) == COST
    change(tmp_path, **content)
    assert cost_cache.read(str(tmp_path), NETWORK) is None


def test_fifos_folders_and_links_are_not_opened(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    os.mkfifo(path)
    assert cost_cache.read(str(tmp_path), NETWORK) is None
    path.unlink()
    path.mkdir()
    assert cost_cache.read(str(tmp_path), NETWORK) is None
    assert not cost_cache.write(str(tmp_path), NETWORK, COST)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file
    path.rmdir()
    cost_cache.write(str(tmp_path / "elsewhere"), NETWORK, COST)
    path.symlink_to(file_of(tmp_path / "elsewhere"))
    assert cost_cache.read(str(tmp_path), NETWORK) is None


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert not cost_cache.write(str(folder), NETWORK, COST)
        assert cost_cache.read(str(folder), NETWORK) is None
    # Not even root can write to this folder.
    assert not cost_cache.write("/proc/self/ringjax", NETWORK, COST)


def test_large_networks(tmp_path: Path) -> None:
    many = {"names": [f"host{i}" for i in range(10_000)]}
    assert cost_cache.write(str(tmp_path), many, COST)
    assert cost_cache.read(str(tmp_path), many) == COST
    many["names"][-1] = "another"
    assert cost_cache.read(str(tmp_path), many) is None


def test_only_expired_files_are_removed(tmp_path: Path) -> None:
    week = time.time() - 8 * 86400
    for name in ("network-old.json", ".network-left", "another", "network-new.json"):
        (tmp_path / name).write_text("")
        if name != "network-new.json":
            os.utime(tmp_path / name, (week, week))
    assert cost_cache.write(str(tmp_path), NETWORK, COST)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"another", "network-new.json", file_of(tmp_path).name}
