"""Tests of the table of settings: names, precedence, and errors of bad values."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import environment

from ringjax import config
from ringjax.config import Config
from ringjax.settings.unknown_variables import unknown_variable_warnings

SECRET = "ab" * 32


def test_defaults_without_rank_and_size() -> None:
    settings = Config.from_env({})
    assert settings.rank is settings.size is settings.local_rank is None
    assert (settings.start_timeout, settings.stall_warning) == (120.0, 10.0)
    assert settings.collective_timeout == 60.0
    assert (settings.failure_timeout, settings.heartbeat) == (5.0, 1.0)
    assert (settings.ring_bytes, settings.tcp_streams) == (1 << 20, 2)
    assert (settings.shm, settings.bucket_bytes) == (True, 25 << 20)
    assert settings == Config()


def test_every_field_has_a_variable_and_a_description() -> None:
    for field in dataclasses.fields(Config):
        names = config.variables(field)
        assert names[0] == f"RINGJAX_{field.name.upper()}"
        assert all(name.startswith("HOROVOD_") for name in names[1:])
        assert field.metadata["meaning"]


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "1024", "bucket_bytes", 1024),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "7", "stall_warning", 7.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "collective_timeout", 0.0),
        ("HOROVOD_GLOO_IFACE", "eth0", "network_interfaces", "eth0"),
        ("HOROVOD_LOG_LEVEL", "WARN", "log_level", "warning"),
        ("HOROVOD_START_TIMEOUT", "3", "start_timeout", 3.0),
        ("HOROVOD_HOSTNAME", "node1", "hostname", "node1"),
        ("RINGJAX_SHM", "off", "shm", False),
        ("RINGJAX_ALGORITHM", "allreduce:ring", "algorithm", "allreduce:ring"),
        ("RINGJAX_JOB", "0123456789ABCDEF", "job", "0123456789abcdef"),
        ("RINGJAX_FABRIC", "False", "fabric", "off"),
        ("RINGJAX_FABRIC", "Verbs:mlx5_0", "fabric", "verbs:mlx5_0"),
    ],
)
def test_values_are_parsed(name: str, text: str, field: str, value: object) -> None:
    assert getattr(Config.from_env({name: text}), field) == value


def test_ringjax_variables_precede_horovod_variables() -> None:
    both = {"RINGJAX_START_TIMEOUT": "5", "HOROVOD_START_TIMEOUT": "9"}
    assert Config.from_env(both).start_timeout == 5.0


def test_an_empty_variable_counts_as_unset() -> None:
    both = {"RINGJAX_START_TIMEOUT": " ", "HOROVOD_START_TIMEOUT": "9"}
    assert Config.from_env(both).start_timeout == 9.0


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("RINGJAX_TCP_STREAMS", "many", "expected an integer"),
        ("RINGJAX_TCP_STREAMS", "0", "expected an integer between 1 and 16"),
        ("RINGJAX_START_TIMEOUT", "nan", "expected a number of seconds, at least 0.1"),
        ("RINGJAX_COLLECTIVE_TIMEOUT", "-1", "expected a number of seconds"),
        ("RINGJAX_RING_BYTES", "100000", "expected a power of two between"),
        ("RINGJAX_RING_BYTES", "²", "expected a power of two between"),
        ("RINGJAX_SHM", "perhaps", "expected 1 or 0"),
        ("RINGJAX_FABRIC", "auto", "expected off, or a provider such as verbs"),
        ("RINGJAX_FABRIC", "1", "expected off, or a provider such as verbs"),
        ("RINGJAX_FABRIC", "efa:", "expected off, or a provider such as verbs"),
        ("RINGJAX_JOB", "xyz", "expected 16 hexadecimal digits"),
        ("HOROVOD_LOG_LEVEL", "loud", "expected one of trace, debug"),
    ],
)
def test_an_error_names_the_variable_and_its_valid_values(
    name: str, text: str, expected: str
) -> None:
    with pytest.raises(ValueError) as error:
        Config.from_env({name: text})
    assert str(error.value).startswith(f"{name} is {text!r}: {expected}")


def test_a_bad_secret_is_not_shown() -> None:
    with pytest.raises(
        ValueError, match=r"RINGJAX_SECRET is \(hidden\): expected"
    ) as e:
        Config.from_env({"RINGJAX_SECRET": "swordfish"})
    assert "swordfish" not in str(e.value)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RINGJAX_RANK": "0"}, "RINGJAX_RANK is set but RINGJAX_SIZE is not"),
        ({"HOROVOD_SIZE": "2"}, "RINGJAX_SIZE is set but RINGJAX_RANK is not"),
        (
            {"RINGJAX_RANK": "2", "RINGJAX_SIZE": "2"},
            "RINGJAX_RANK is 2: expected less",
        ),
    ],
)
def test_rank_and_size_must_fit(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Config.from_env(environ)


def test_the_secret_is_hidden_where_settings_are_shown() -> None:
    settings = Config.from_env({"RINGJAX_SECRET": SECRET})
    rows = {row[0]: row for row in settings.table()}
    assert rows["secret"][3] == "(hidden)"
    assert SECRET not in repr(settings)
    assert settings.secret_bytes() == bytes.fromhex(SECRET)


def _file(path: Path, text: str, mode: int) -> Config:
    path.write_text(text)
    path.chmod(mode)
    return Config(secret_file=str(path))


def test_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert _file(path, SECRET + "\n", 0o600).secret_bytes() == bytes.fromhex(SECRET)
    assert _file(path, SECRET, 0o400).secret_bytes() == bytes.fromhex(SECRET)


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        (SECRET, 0o640, "others may use it (mode 0640); chmod 600 it"),
        (SECRET, 0o604, "others may use it (mode 0604); chmod 600 it"),
        ("swordfish", 0o600, "expected a line of at least 32 hexadecimal digits"),
        ("", 0o600, "expected a line of at least 32 hexadecimal digits"),
    ],
)
def test_a_bad_secret_file(tmp_path: Path, text: str, mode: int, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        _file(tmp_path / "secret", text, mode).secret_bytes()
    assert expected in str(error.value)


def test_a_missing_secret_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        Config(secret_file=str(tmp_path / "none")).secret_bytes()
    with pytest.raises(ValueError, match="not a regular file"):
        Config(secret_file=str(tmp_path)).secret_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_file_of_another_user(tmp_path: Path) -> None:
    settings = _file(tmp_path / "secret", SECRET, 0o600)
    os.chown(settings.secret_file, 12345, 12345)
    with pytest.raises(ValueError, match="it belongs to user 12345, expected 0"):
        settings.secret_bytes()


def test_the_table_of_settings() -> None:
    environ = {**os.environ, "RINGJAX_TCP_STREAMS": "4", "RINGJAX_SECRET": SECRET}
    done = subprocess.run(
        [sys.executable, "-m", "ringjax.config"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(dataclasses.fields(Config))
    streams = next(line.split() for line in lines if line.startswith("tcp_streams"))
    assert streams[:4] == ["tcp_streams", "RINGJAX_TCP_STREAMS", "2", "4"]
    assert SECRET not in done.stdout


def test_unknown_variables_cause_a_warning() -> None:
    given = {
        "RINGJAX_LOGLEVEL": "info",
        "RINGJAX_QWXYZ": "1",
        "RINGJAX_TEST_RANK_DIR": "/tmp",
        "RINGJAX_WORKER": "3",
        "RINGJAX_EMPTY": "",
        "HOROVOD_LOGLEVEL": "info",
    }
    assert unknown_variable_warnings(given) == [
        "RINGJAX_LOGLEVEL has no effect; is it RINGJAX_LOG_LEVEL?",
        "RINGJAX_QWXYZ has no effect",
    ]


def test_rank_0_warns_of_an_unknown_variable_once() -> None:
    script = "import ringjax\nfor _ in range(2): ringjax.init(); ringjax.shutdown()"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=environment("misspelt", {"RINGJAX_LOGLEVEL": "info"}),
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert ended.stderr == (
        "[ringjax 0/1] warning: RINGJAX_LOGLEVEL has no effect; is it "
        "RINGJAX_LOG_LEVEL?\n"
    )
