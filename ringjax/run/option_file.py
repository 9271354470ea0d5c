"""Reads a configuration file of ringrun, in TOML or YAML, with Horovod's keys."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ringjax.config import LOG_LEVELS

# Horovod's key in a configuration file -> (option of ringrun, type of the value).
_OPTIONS: dict[str, tuple[str, type]] = {
    "params.fusion_threshold_mb": ("fusion_threshold_mb", float),
    "params.cycle_time_ms": ("cycle_time_ms", float),
    "params.cache_capacity": ("cache_capacity", int),
    "autotune.enabled": ("autotune", bool),
    "autotune.log_file": ("autotune_log_file", str),
    "autotune.warmup_samples": ("autotune_warmup_samples", int),
    "autotune.steps_per_sample": ("autotune_steps_per_sample", int),
    "timeline.filename": ("timeline_filename", str),
    "timeline.mark_cycles": ("timeline_mark_cycles", bool),
    "stall_check.enabled": ("stall_check", bool),
    "stall_check.warning_time_seconds": ("stall_check_warning_time_seconds", float),
    "stall_check.shutdown_time_seconds": ("stall_check_shutdown_time_seconds", float),
    "library_options.gloo_timeout_seconds": ("gloo_timeout_seconds", float),
    "logging.level": ("log_level", str),
}
_EXPECTED = {
    str: "a path",
    bool: "true or false",
    int: "a whole number, at least 0",
    float: "a number, at least 0",
}


class OptionError(ValueError):
    """An option in a configuration file is invalid."""


def merge(args: argparse.Namespace, path: str) -> None:
    """Sets options in `args` from a file. Options of the command line take precedence.

    Raises OptionError if the file or a key is invalid; the error names both.
    """
    for key, value in _flatten(_load(path)).items():
        if key not in _OPTIONS:
            args.ignored = [*args.ignored, f"{key} in {path}"]
            continue
        name, kind = _OPTIONS[key]
        if getattr(args, name) is None:
            where = f"--config-file {path}: {key} is {value!r}"
            setattr(args, name, _checked(name, kind, value, where))


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
    """Converts nested tables to one table whose keys have dots."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _checked(name: str, kind: type, value: object, where: str) -> object:
    if name == "log_level":
        level = str(value).lower()
        if level not in LOG_LEVELS:
            raise OptionError(f"{where}: expected one of {', '.join(LOG_LEVELS)}")
        return level
    right = isinstance(value, (int, float) if kind is float else kind)
    if isinstance(value, (int, float)) and kind is not bool:
        right = right and not isinstance(value, bool) and value >= 0
    if not right:
        raise OptionError(f"{where}: expected {_EXPECTED[kind]}")
    return value
