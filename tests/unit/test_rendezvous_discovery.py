"""Tests of rendezvous discovery without ringrun: credentials files, ports, secrets."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LONG

from ringjax.config import Config
from ringjax.control import addresses
from ringjax.control.launch_environment import LaunchInfo
from ringjax.errors import StartupError
from ringjax.membership import rendezvous_discovery
from ringjax.membership.job_credentials import (
    CredentialsFile,
    JobCredentials,
    derive_job_id,
)
from ringjax.membership.joined_job import JoinedJob, join
from ringjax.membership.rendezvous_discovery import join_job

SECRET = "5e" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"ringjax-{os.geteuid()}"


def single_host(rank: int, size: int = 2, identity: str = "test 1") -> LaunchInfo:
    return LaunchInfo(rank, size, "a test", single_host=True, identity=identity)


def several_hosts(rank: int, size: int = 2, **more: Any) -> LaunchInfo:
    info = {"identity": "test 2", "rank0_host": "127.0.0.1"} | more
    return LaunchInfo(rank, size, "a test", **info)


def start(infos: Sequence[LaunchInfo], config: Config) -> list[Future[JoinedJob]]:
    pool = ThreadPoolExecutor(len(infos))
    found = [
        pool.submit(
            join_job,
            info,
            config,
            {"rank": info.rank, "size": info.size},
            lambda secret, job: {"addresses": job},
        )
        for info in infos
    ]
    pool.shutdown(wait=False)
    return found


def check(futures: Sequence[Future[JoinedJob]]) -> list[JoinedJob]:
    joined = [future.result() for future in futures]
    for found in joined:
        assert [m.rank for m in found.client.members] == list(range(len(joined)))
        ranks, epoch = range(len(joined)), found.client.epoch
        others = found.client.locate(ranks, LONG, "test", epoch).values()
        assert {other.addresses for other in others} == {joined[0].job}
        assert found.secret == joined[0].secret
    for found in reversed(joined):
        found.close()
    return joined


USUAL = Config(start_timeout=LONG)


def test_ranks_of_one_host_join_by_a_private_file(folder: Path) -> None:
    (late,) = start([single_host(1)], USUAL)
    time.sleep(0.1)  # the late rank looks for the file before it exists
    info = single_host(0)
    found = rendezvous_discovery.start_coordinator(info, USUAL, CredentialsFile(info))
    credentials, coordinator = found
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert credentials.secret.hex() in file.read_text()
    assert credentials.addresses.startswith("127.0.0.1:")
    first = join(credentials, 0, {"size": 2}, LONG)
    late.result().close()
    first.close()
    coordinator.close()


def test_the_file_is_removed_when_all_have_joined(folder: Path) -> None:
    for _ in range(3):  # later jobs reuse the name of the file
        check(start([single_host(rank, 3) for rank in (2, 0, 1)], USUAL))
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        '{"addresses": "127.0.0.1:1", "secret": "00"}',
        '{"addresses": "x", "secret": "00", "job": "00"}',
        '{"addresses": "127.0.0.1:%d", "secret": "%s", "job": "0123456789abcdef"}',
    ],
)
def test_a_stale_file_is_read_again(folder: Path, text: str) -> None:
    with addresses.listen("127.0.0.1") as dead:
        port = dead.getsockname()[1]
    file = Path(CredentialsFile(single_host(0)).path)
    file.write_text(text % (port, SECRET) if "%d" in text else text)
    file.chmod(0o600)
    (late,) = start([single_host(1)], USUAL)
    time.sleep(0.1)
    check([*start([single_host(0)], USUAL), late])


def test_a_file_that_others_can_write_is_ignored(folder: Path) -> None:
    credentials = JobCredentials("127.0.0.1:1", bytes(32), "0123456789abcdef")
    file = CredentialsFile(single_host(0))
    file.write(credentials)
    assert file.read() == credentials
    os.chmod(file.path, 0o622)
    assert file.read() is None
    os.unlink(file.path)
    (folder / "elsewhere").write_text("{}")
    os.symlink(folder / "elsewhere", file.path)
    assert file.read() is None


def test_a_folder_that_others_can_use_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(StartupError, match="must be a folder that only this user can"):
        CredentialsFile(single_host(0))
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(StartupError, match="must be a folder that only this user can"):
        CredentialsFile(single_host(0))


def test_rank_0_never_appears(folder: Path) -> None:
    (alone,) = start([single_host(1, identity="")], Config(start_timeout=0.3))
    with pytest.raises(StartupError) as error:
        alone.result()
    assert str(error.value) == (
        "rank 1 could not join its job within 0.3 s: rank 0 of 2 (a test) has not "
        "appeared; ranks started by different parents need the same RINGJAX_JOB"
    )


def test_a_missing_rank_is_named_and_the_file_is_removed(
    folder: Path,
) -> None:
    futures = start([single_host(0, 3), single_host(2, 3)], Config(start_timeout=2.0))
    for future in futures:
        with pytest.raises(StartupError, match=r"rank 1 of 3 did not join within 2 s"):
            future.result()
    assert list(folder.iterdir()) == []


def test_two_jobs_at_the_same_time(folder: Path) -> None:
    infos = [single_host(rank, 2, name) for rank in (0, 1) for name in ("one", "two")]
    futures = start(infos, USUAL)
    assert check(futures[::2])[0].job != check(futures[1::2])[0].job


# Several hosts.


def settings(**more: Any) -> Config:
    values = {"start_timeout": LONG, "secret": SECRET, "network_interfaces": "lo"}
    return Config(**values | more)


def test_ranks_of_several_hosts_derive_the_port() -> None:
    found = check(start([several_hosts(rank, 3) for rank in (1, 0, 2)], settings()))
    assert found[0].secret == bytes.fromhex(SECRET)
    assert found[0].job == derive_job_id("test 2", 3)


def test_a_taken_port_is_skipped() -> None:
    infos = [several_hosts(rank, identity="taken") for rank in (0, 1)]
    port = rendezvous_discovery._candidate_ports(infos[0])[0]
    with addresses.listen("127.0.0.1", port):
        # Each candidate port is tried for an eighth of the start timeout.
        check(start(infos, settings(start_timeout=10.0)))


def test_the_engines_port_is_tried_first() -> None:
    assert rendezvous_discovery._candidate_ports(several_hosts(0, port=4000)) == [
        4000,
        4001,
        4002,
        4003,
    ]
    assert rendezvous_discovery._candidate_ports(several_hosts(0, port=65535)) == [
        65535
    ]
    assert all(
        61000 <= port < 65536
        for port in rendezvous_discovery._candidate_ports(several_hosts(0))
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_secret_is_an_error_with_advice(rank: int) -> None:
    (future,) = start([several_hosts(rank)], settings(secret=""))
    with pytest.raises(StartupError) as error:
        future.result()
    assert str(error.value).startswith(
        "the job has 2 ranks (a test) but no secret: set RINGJAX_SECRET_FILE to a file"
    )


def test_a_missing_host_of_rank_0_is_an_error_with_advice() -> None:
    (future,) = start([several_hosts(1, rank0_host="")], settings())
    with pytest.raises(StartupError, match="set MASTER_ADDR to the name of its host"):
        future.result()


def test_another_secret_is_refused_after_the_timeout() -> None:
    infos = [several_hosts(rank, identity="secrets") for rank in (0, 1)]
    (zero,) = start(infos[:1], settings(start_timeout=3.0))
    (one,) = start(infos[1:], settings(start_timeout=1.5, secret="ab" * 32))
    with pytest.raises(StartupError, match="does not know this job's secret"):
        one.result()
    with pytest.raises(StartupError, match="rank 1 of 2 did not join"):
        zero.result()
