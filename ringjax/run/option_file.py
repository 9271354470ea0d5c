"""Reads a configuration file of ringrun: TOML, or Horovod's YAML, with Horovod's keys.

An option on the command line has priority over the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ringjax.config import LOG_LEVELS

# Horovod's keys of a configuration file, and the option for each key.
_FILE_KEYS = {
    "params.fusion_threshold_mb": "fusion_threshold_mb",
    "params.cycle_time_ms": "cycle_time_ms",
    "params.cache_capacity": "cache_capacity",
    "autotune.enabled": "autotune",
    "autotune.log_file": "autotune_log_file",
    "autotune.warmup_samples": "autotune_warmup_samples",
    "autotune.steps_per_sample": "autotune_steps_per_sample",
    "timeline.filename": "timeline_filename",
    "timeline.mark_cycles": "timeline_mark_cycles",
    "stall_check.enabled": "stall_check",
    "stall_check.warning_time_seconds": "stall_check_warning_time_seconds",
    "stall_check.shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    "library_options.gloo_timeout_seconds": "gloo_timeout_seconds",
    "logging.level": "log_level",
}
_PATHS = ("timeline_filename", "autotune_log_file")
_SWITCHES = ("stall_check", "timeline_mark_cycles", "autotune")
# Options with whole numbers. All other options of ringrun here take any number.
_WHOLE = ("cache_capacity", "autotune_warmup_samples", "autotune_steps_per_sample")


class OptionError(ValueError):
    """Error: an option in a configuration file is not valid."""


def merge(args: argparse.Namespace, path: str) -> None:
    """Adds the options of a file that are not on the command line to `args`.

    Raises:
        OptionError: the file or a key is not valid; the text names both.
    """
    for key, value in _flatten(_load(path)).items():
        name = _FILE_KEYS.get(key)
        if name is None:
            args.ignored = [*args.ignored, f"{key} in {path}"]
        elif getattr(args, name) is None:
            setattr(args, name, _checked(key, name, value, path))


def _load(path: str) -> Mapping[str, object]:
    try:
        values = _load_toml(path) if path.endswith(".toml") else _load_yaml(path)
    except OptionError:
        raise
    except OSError as error:
        raise OptionError(f"--config-file {path}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"--config-file {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise OptionError(f"--config-file {path}: it holds no table of options")
    return values


def _load_toml(path: str) -> object:
    import tomllib

    with open(path, "rb") as file:
        return tomllib.load(file)


def _load_yaml(path: str) -> object:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise OptionError(
            f"--config-file {path}: reading YAML needs PyYAML (pip install pyyaml); a "
            "file with the same keys as TOML, named *.toml, needs nothing"
        ) from error
    with open(path, encoding="utf-8") as file:
        try:
            return yaml.safe_load(file) or {}
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error


def _flatten(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Converts nested tables to one table with dotted keys."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _checked(key: str, name: str, value: object, path: str) -> object:
    where = f"--config-file {path}: {key}"
    if name in _PATHS:
        if not isinstance(value, str):
            raise OptionError(f"{where} is {value!r}: expected a path")
        return value
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise OptionError(f"{where} is {value!r}: expected true or false")
        return value
    if name == "log_level":
        if str(value).lower() not in LOG_LEVELS:
            expected = ", ".join(LOG_LEVELS)
            raise OptionError(f"{where} is {value!r}: expected one of {expected}")
        return str(value).lower()
    kinds = (int,) if name in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise OptionError(f"{where} is {value!r}: expected {kind}, at least 0")
    return value
