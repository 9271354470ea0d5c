"""A world apart: connects the processes of `jax.distributed`, independently of `init`.

JAX's own collectives run on its communicators. Its ranks are JAX's processes, or their
devices (device_ranks.py). The processes may be one group of a larger job, or need no
ringrun at all. So a rank has a listener and an epoch of its own, and compiled programs
do not find its communicators by their ids, which are ids of the ordinary world, too.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringjax import _native, stderr
from ringjax.config import LOG_LEVELS, Config
from ringjax.control.listener import LinkListener
from ringjax.errors import RingjaxError, StartupError, from_status
from ringjax.membership.coordinator import Coordinator
from ringjax.membership.directives import EpochDirective
from ringjax.membership.job_credentials import JobCredentials
from ringjax.membership.joined_job import JoinedJob, join
from ringjax.membership.rendezvous_discovery import configured_secret
from ringjax.world.call_records import ApartRecords
from ringjax.world.communicator_ids import private_id
from ringjax.world.epoch import Epoch
from ringjax.world.epoch_builder import EpochBuilder
from ringjax.world.hello import create_hello, listening_hosts
from ringjax.world.key_value_store import KeyValueStore
from ringjax.world.rank_info import RankInfo
from ringjax.world.stack_probe import StackProbe

_SECRET_LABEL = b"ringjax: the world apart of jax.distributed, "


class WorldApart:
    """The connection of one rank with the other ranks of `jax.distributed`.

    All ranks make it at the same time. The constructor raises StartupError if not all
    of them come, and PeerLost if one is lost meanwhile.

    Args:
        store: the ranks' key-value store, with the rank and the size of the world.
        config: the settings. Those about the ordinary job, such as ranks, do not apply.
        owners: the process of each rank, if the ranks are devices.
    """

    def __init__(
        self, store: KeyValueStore, config: Config, owners: Sequence[int] = ()
    ) -> None:
        self.rank, self.size, self._owners = store.rank, store.size, owners
        self._config, self._launched = _static(config), config
        self._process = owners[self.rank] if owners else self.rank
        self._records: ApartRecords | None = None
        # The ranks and the use of each communicator, by its id.
        self._groups: dict[int, tuple[tuple[int, ...], str]] = {}
        self._coordinator: Coordinator | None = None
        self._listener: LinkListener | None = None
        self._job: JoinedJob | None = None
        self._stack_probe: StackProbe | None = None
        self._epoch: Epoch | None = None
        try:
            self._join(store)
        except BaseException:
            self.close()
            raise

    def _join(self, store: KeyValueStore) -> None:
        config = self._config
        hello = create_hello(self.rank, self.size, config)
        machines = store.exchange("machine", hello["machine"])
        hosts = listening_hosts(config, single_host=len(set(machines)) == 1)
        found = store.from_first("coordinator", lambda: self._start_coordinator(hosts))
        secret = _derived_secret(config, found["job"]) or bytes.fromhex(found["secret"])
        if not secret:
            raise StartupError(
                f"{store.member} 0 has the secret of a job (RINGJAX_SECRET), and "
                f"{store.member} {self.rank} does not: all processes must be started "
                "by one ringrun"
            )
        self._listener = LinkListener(
            secret,
            found["job"],
            rank=self.rank,
            size=self.size,
            hosts=hosts,
            log=lambda text: self.log("warning", text),
            failed=self._on_thread_failure,
            tls=config.tls,
        )
        client = join(
            JobCredentials(found["addresses"], secret, found["job"]),
            self.rank,
            hello | self._listener.hello_entries(),
            config.start_timeout,
            failure_timeout=config.failure_timeout,
            tls=config.tls,
        )
        self._job = JoinedJob(client, secret, found["job"], self._coordinator)
        self._records = ApartRecords(self, self._launched, self._process, found["job"])
        self.recorder = self._records.recorder
        self._connect_everybody(client.first)
        self._records.open(samples=self._is_job)

    def _start_coordinator(self, hosts: Sequence[str]) -> dict[str, str]:
        """Returns what the other processes need to join; runs on rank 0.

        A secret that all ranks derive is not among it, because anybody can read
        JAX's key-value store.
        """
        config, job = self._config, secrets.token_hex(8)
        derived = _derived_secret(config, job)
        secret = derived or secrets.token_bytes(32)
        self._coordinator = Coordinator(
            secret,
            job,
            np=self.size,
            on_loss="stop",
            hosts=hosts,
            start_timeout=config.start_timeout,
            tls=config.tls,
        )
        self._coordinator.start()
        return {
            "addresses": ",".join(self._coordinator.addresses),
            "job": job,
            "secret": "" if derived else secret.hex(),
        }

    def _connect_everybody(self, members: Any) -> None:
        assert isinstance(members, EpochDirective)
        assert self._job is not None
        self._stack_probe = StackProbe(self.log)
        builder = EpochBuilder(
            config=self._config,
            joined_job=self._job,
            listener=self._listener,
            notify=-1,
            stack_probe=self._stack_probe,
            log=self.log,
            recorder=self.recorder,
            registered=False,
        )
        self._epoch = builder.build(members, self._job.client, None)
        everybody = 0, range(self.size), self._name()
        builder.connect(self._epoch, members, [everybody], {})

    def connect(self, ranks: Sequence[int], use: str = "") -> _native.Communicator:
        """Connects processes, and returns their communicator, in the order of `ranks`.

        All of `ranks` call it at the same time, and this process is one of them. If
        they are connected already for this `use`, it returns the communicator at once.
        Two threads may connect different groups, but not the same, at the same time.

        Raises:
            Unreachable: not all of them have called it within the start timeout.
            PeerLost: one of them is lost.
            RingjaxError: the world is closed.
        """
        epoch, chosen = self.epoch, tuple(ranks)
        # Others may connect groups in another order, so the id is not a count.
        number = private_id("apart", chosen, use)
        if self._groups.setdefault(number, (chosen, use)) != (chosen, use):
            other = self._name(self._groups[number][0])
            raise RingjaxError(
                f"{self._name(chosen)} have, by chance, the id of {other}: give one "
                "group its members in another order"
            )
        if (known := epoch.communicators.get(number)) is not None:
            return known
        try:
            name, process_set = self._name(chosen), self._process_set(chosen)
            return epoch.connect(number, chosen, name, process_set)
        except BaseException as error:
            epoch.disconnect(number)
            if isinstance(error, _native.StatusError):
                raise from_status(error) from error
            raise

    def _process_set(self, ranks: tuple[int, ...]) -> int:
        """Returns the id that records show: 0 if `ranks` are all ranks of the job."""
        everybody = ranks == tuple(range(self.size)) and self._is_job
        return 0 if everybody else private_id("apart", ranks, "")

    def _name(self, ranks: Sequence[int] = ()) -> str:
        """Returns the name of these ranks in errors, or that of all."""
        if not self._owners:
            return f"JAX's processes {_text(ranks)}".rstrip()
        processes = f"of processes {_text([self._owners[r] for r in ranks])}"
        return f"JAX's devices {_text(ranks)} {processes}" if ranks else "JAX's devices"

    def _on_thread_failure(self, text: str) -> None:
        self.log("error", text)
        if self._epoch is not None:
            self._epoch.fail(text)
            self._epoch.abort(text, self.rank)

    # -- what records show -------------------------------------------------------------

    tuned = ""  # nothing tunes JAX's collectives

    @property
    def _is_job(self) -> bool:
        """Whether these processes are all processes of a job that is not elastic."""
        launched = self._launched
        grouped = launched.elastic or launched.group_size > 1
        return not grouped and launched.size in (None, self.size)

    @property
    def current_epoch(self) -> Epoch | None:
        """The only epoch, or None while the world is not connected."""
        return self._epoch

    @property
    def epoch(self) -> Epoch:
        """The only epoch. Raises RingjaxError while the world is not connected."""
        if self._epoch is None:
            raise RingjaxError(f"{self._name()} are not connected any more")
        return self._epoch

    @property
    def rank_info(self) -> RankInfo:
        return self.epoch.rank_info

    @property
    def communicators(self) -> dict[int, _native.Communicator]:
        return {} if self._epoch is None else self._epoch.communicators

    def log(self, level: str, text: str) -> None:
        if LOG_LEVELS.index(level) >= LOG_LEVELS.index(self._config.log_level):
            stderr.line(f"[ringjax, JAX {self.rank}/{self.size}] {level}: {text}")

    def close(self) -> None:
        """Leaves in good order, and closes everything. Further calls do nothing."""
        if self._records is not None:
            self._records.close()
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.leave()
            if self._job is not None:
                self._job.client.leave()
            epoch.close()
        for part in (self._stack_probe, self._listener, self._job or self._coordinator):
            if part is not None:
                part.close()
        self._stack_probe = self._listener = self._job = self._coordinator = None

    def close_in_child(self) -> None:
        """Closes the copies of the sockets in a forked child."""
        for part in (
            self._records,
            self._epoch,
            self._stack_probe,
            self._listener,
            self._job or self._coordinator,
        ):
            if part is not None:
                part.close_in_child()


def _text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _static(config: Config) -> Config:
    """Returns the settings of a static job whose ranks no launcher has assigned."""
    assigned = ("rank", "size", "worker")
    places = ("local_rank", "local_size", "cross_rank", "cross_size")
    unset: dict[str, Any] = dict.fromkeys((*assigned, *places))
    return replace(config, elastic=False, group_size=1, **unset)


def _derived_secret(config: Config, job: str) -> bytes:
    """Returns a secret derived from that of this process's job; empty without one."""
    secret = configured_secret(config)
    if secret is None:
        return b""
    return hmac.digest(secret, _SECRET_LABEL + job.encode(), hashlib.sha256)
