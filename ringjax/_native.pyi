"""The native core, as xla_ext/module.cc binds it. Written by hand; a test compares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLLECTIVES: dict[str, int]
REDUCE_OPS: dict[str, int]
DTYPES: dict[str, int]

def waits_since(recorder: Recorder, seen: int) -> tuple[int, list[Any]]:
    """How many calls there were, and the waits of those after the first `seen`."""

class StatusError(RuntimeError):
    """A failed call of the core."""

    code: str
    """MISMATCH, UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, FAILED_PRECONDITION,
    INVALID_ARGUMENT or INTERNAL."""
    rank: int
    """The world rank that caused it, or -1."""

class Communicator:
    def __init__(
        self,
        *,
        id: int,
        name: str,
        job: int,
        epoch: int,
        rank: int,
        hosts: Sequence[int],
        members: Sequence[int],
        links: Sequence[tuple[Any, ...]],
        doorbell: int,
        options: Mapping[str, float | str | Mapping[str, float] | Recorder],
        segment: tuple[int, int, list[int]] | None = None,
        resilient: ResilientComm | None = None,
        ending: Communicator | None = None,
    ) -> None:
        """Takes ownership of every descriptor in `links`, `segment` and of `doorbell`.

        Also if it raises, unless that is a TypeError: then it has taken nothing.
        Links are ("shm", peer, memfd, side, ring_bytes, peer_doorbell, process) or
        ("tcp", peer, [socket, ...]), and perhaps keys. A shared segment is (memfd,
        tile_bytes, bells). Compiled programs find it under its id from here on; a
        `resilient` one from ResilientComm.install on; its calls end when the ranks of
        `ending` are there.
        """
    @property
    def id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def hosts(self) -> list[int]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def reason(self) -> str:
        """Why it was aborted, or an empty text."""
    def execute(
        self,
        op: int,
        reduce_op: int,
        ins: Sequence[Any],
        outs: Sequence[Any],
        *,
        counts: Sequence[int] = ...,
        root: int = 0,
        wire: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        names: Sequence[str] = ...,
    ) -> int:
        """Runs one call on this thread without the GIL; raises StatusError.

        Of a resilient communicator, in the present epoch, and once more if that ends.

        Returns:
            The epoch in which the call was finished.
        """
    def abort(self, message: str, rank: int = -1) -> None: ...
    def quiesce(self, seconds: float) -> tuple[int, int, bool]:
        """After abort(): waits without the GIL until no call makes progress in it.

        Counted since it was installed in its resilient communicator.

        Returns:
            How many calls have returned; how many have complete results here; whether
            the one that is under way, if any, still has its inputs.

        Raises:
            StatusError: DEADLINE_EXCEEDED: one does not stop. FAILED_PRECONDITION: it
                was not aborted.
        """
    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def set_cost(
        self, cost: Mapping[str, float], algorithm: str = "", trial: bool = False
    ) -> None:
        """Chooses by these constants from now on, or a forced algorithm.

        Constants that are missing get their defaults. All ranks do it alike, between
        the same two calls. Forgets the statistics; nobody hears of calls of a `trial`.
        """
    @property
    def cost(self) -> dict[str, float]: ...

class ResilientComm:
    """The epochs of one communicator in a job that outlives its ranks.

    Every call of an epoch that has been installed runs in the current one.
    If that is aborted, the call waits for the next one, and there it returns, is
    repeated or fails, as the ranks have decided.
    """

    def __init__(self, epoch_timeout: float) -> None:
        """`epoch_timeout`: seconds that a call waits for a next epoch; 0: for ever."""
    def install(
        self,
        communicator: Communicator | None,
        finished: int = 0,
        repeats: bool = True,
        ranks: Sequence[int] = (),
        reason: str = "",
    ) -> None:
        """From now on calls go to `communicator`, which was made with this one.

        What follows it says of the epoch before, and nothing of the first one.
        Without `repeats` one call fails on every rank; a rank that is not in that call
        fails its next one, unless `resume` comes first.

        Args:
            communicator: None: an epoch that never came to life on this rank, but
                of which it has heard; another one follows.
            finished: so many of the calls of the one before count as finished.
            repeats: the next one is run again, where it has not failed.
            ranks: by rank before: the rank now, -1: lost.
            reason: why the one before has ended.

        Raises:
            StatusError: FAILED_PRECONDITION: the resilient communicator has ended.
        """
    def resume(self) -> None:
        """No call needs to fail any more: this rank starts again with the others."""
    def end(self, message: str, rank: int = -1) -> None:
        """Nothing follows: calls that wait and later ones fail with UNAVAILABLE."""

class Heartbeat:
    def __init__(
        self,
        rank: int,
        peers: Sequence[tuple[int, int]],
        *,
        interval: float,
        timeout: float,
        notify: int = -1,
        inquire: int = -1,
        hosts: Sequence[str] = (),
        keys: list[bytes] = ...,
    ) -> None:
        """Takes ownership of the sockets in `peers`: (rank, socket).

        `keys` has one for each, empty: plain. `notify`, an eventfd, is duplicated here
        and written to whenever lost() or left() grows; with it the job is elastic: whom
        a communicator blames is lost here as well. `inquire` is written to when a peer
        asks where the program is; who hears it calls asked() and answer() within half
        a second. `hosts` are the names of the hosts by rank, for texts.
        """
    def watch(self, communicator: Communicator) -> None: ...
    def forget(self, communicator: Communicator) -> None: ...
    def fail(self, message: str) -> None: ...
    def leave(self) -> None: ...
    def lost(self) -> list[tuple[int, str]]: ...
    def left(self) -> list[int]:
        """The ranks that have said that they leave in good order."""
    def asked(self) -> tuple[int, list[str]]:
        """What waits for answer().

        Returns:
            The number of the newest question, 0 if none waits; a sentence for each
            call or operation that others wait for, once.
        """
    def answer(self, newest: int, place: str) -> None:
        """Answers the questions up to that number: "it is at train.py:41 in load"."""
    def share_waits(self, recorder: Recorder | None) -> None:
        """From now on its waits go to the first rank, with each beat."""
    def say_where(self, place: str) -> None:
        """Where the program is, which goes with them."""
    def take_waits(
        self,
    ) -> dict[int, tuple[int, float, float, list[tuple[bool, int, int]], str]]:
        """What the peers have told since the last time, by rank.

        Returns:
            Calls and seconds of waiting and moving in all; (named, sequence,
            microseconds) of the last ones; where the program was seen.
        """
    def ask_clock(self, times: int) -> None:
        """Asks the first rank so often what its clock shows; itself asks nobody."""
    def take_clocks(self) -> list[tuple[int, float, float, float]]:
        """(rank, our clock, its clock is ahead by, way there and back), in seconds."""
    def close(self) -> None: ...

class CudaCommunicator:
    """The ranks of a process set, joined by NCCL on a device and a stream of their own.

    Pointers are device addresses and streams handles of the driver, both as integers:
    tensors of any framework may be sent. Refuses all calls once its epoch has failed,
    on this device or on another one of the process.
    """
    @property
    def id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def aborted(self) -> bool: ...
    def execute(
        self,
        op: int,
        reduce_op: int,
        ins: Sequence[tuple[int, int, Sequence[int]]],
        outs: Sequence[tuple[int, int]],
        *,
        stream: int = 0,
        counts: Sequence[int] = ...,
        root: int = 0,
        wire: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        names: Sequence[str] = ...,
    ) -> None:
        """Enqueues one call on `stream` and returns; raises StatusError.

        Args:
            ins: (pointer, number of the dtype in DTYPES, shape) of each tensor.
            outs: (pointer, bytes) of each result; the same pointer works in place.
        """
    def start(
        self,
        ins: Sequence[tuple[int, int, Sequence[int]]],
        outs: Sequence[tuple[int, int]],
        *,
        site: int,
        first: bool,
        stream: int = 0,
        reduce_op: int = ...,
        wire: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        name: str = "",
        names: Sequence[str] = ...,
    ) -> None:
        """Enqueues an allreduce beside `stream`; `done` with the same `site` joins."""
    def done(
        self,
        ins: Sequence[tuple[int, int, Sequence[int]]] = ...,
        outs: Sequence[tuple[int, int]] = ...,
        *,
        site: int,
        stream: int = 0,
        name: str = "",
    ) -> None:
        """Lets `stream` wait for a start; tensors only where they are to be copied."""
    def synchronize(self, stream: int = 0) -> None:
        """Waits for the device, without the GIL; StatusError if the epoch failed."""
    def confirm(self) -> None:
        """Waits until all calls have ended; StatusError if results are void."""
    def check(self) -> None:
        """Raises StatusError if the epoch has failed. Does not wait."""
    def abort(self, message: str, rank: int = -1) -> None: ...
    def close(self) -> None:
        """Ends it: in good order and bounded in time, or at once after a failure."""
    def stats(self) -> dict[str, Any]: ...

class Recorder:
    """Calls of a process, as its communicators tell; of all its epochs.

    Keeps `capacity` of them, and sums of all. The first communicator that fails for the
    end of a job writes them to `path`, unless that is empty.
    """

    def __init__(self, capacity: int, who: str, path: str = "") -> None: ...
    def events(self) -> list[dict[str, Any]]:
        """Those that are kept, the oldest first; see ringjax.recent_calls."""
    def totals(self) -> list[dict[str, Any]]:
        """By set, lane and collective; see ringjax.stats."""
    def busy(self) -> tuple[float, float]:
        """Seconds in which some call waited, and in which some call moved data."""
    def keep(self, capacity: int) -> None:
        """Keeps so many from now on; the newest stay."""
    def lines_since(self, seen: int) -> tuple[int, int, bytes]:
        """How many there are; of those after `seen`: how many are lost, and JSON."""
    def tell(self, timeline: Timeline | None) -> None:
        """Tells it of each call from now on."""
    @property
    def count(self) -> int:
        """Of all that were ever added."""
    @property
    def dumped(self) -> str:
        """The path, once it has been written."""

class Timeline:
    def __init__(self, path: str, mark_rounds: bool, most_bytes: int = ...) -> None:
        """Replaces `path`, keeps so many bytes there and in `path`.1; StatusError."""
    def close(self) -> None:
        """Writes what has been reported; later reports go nowhere."""

class EagerLane:
    """Named operations of a process set, submitted in any order from any thread.

    A thread without the interpreter's lock agrees with those of the other ranks which
    operations all have submitted, and runs them.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        fusion_threshold: int,
        cycle_seconds: float,
        cache_capacity: int,
        stall_warning: float,
        timeout: float,
        cuda: dict[str, Any] | None = None,
    ) -> None:
        """Nobody else may use `communicator`.

        Of a resilient communicator, in which it has been installed, the lane goes on in
        every later epoch: what the loss of a rank interrupts is done again by those
        that are left. A broadcast whose root is lost, alltoall with splits,
        reducescatter and CUDA tensors fail then with UNAVAILABLE, and so does all that
        is pending where training starts again. `close` ends the resilient communicator.

        Args:
            fusion_threshold: most bytes of one message, 0: nothing is fused. Alike on
                all ranks, as is `cache_capacity`, the operations to remember.
            cycle_seconds: how long an operation waits for more to fuse with.
            stall_warning: seconds of waiting for other ranks until a warning.
            timeout: and until an error; 0 = never, for both.
            cuda: what it needs to take CUDA tensors: the options of CudaCommunicator,
                `nccl`, the paths to try for it, and `device`, the one of a rank that
                joins without having submitted any tensor, -1 for none. All ranks or
                none have this.
        """
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def aborted(self) -> bool: ...
    def submit(
        self,
        op: int,
        name: str,
        ins: Sequence[tuple[int, int, Sequence[int]]],
        outs: Sequence[int],
        *,
        reduce_op: int = 1,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        splits: Sequence[int] = (),
        keep: object = None,
        cuda: bool = False,
        stream: int = 0,
        alone: bool = False,
        timeout: float = -1.0,
        waits: bool = False,
        rooms: Sequence[int] = (),
    ) -> Work:
        """Hands in an operation; raises StatusError if it is impossible.

        INVALID_ARGUMENT also if one of this name is under way; what has failed this
        lane before, at once.

        Args:
            ins: (address, number of the dtype in DTYPES, shape), C-contiguous.
            outs: where the results go: for allreduce and broadcast as large as the
                inputs, for reducescatter of rank r dim0 // size rows, and one more if
                r < dim0 % size. May be empty for allgather and alltoall.
            root: rank in the set.
            splits: of alltoall: rows for each rank, input by input; empty: equal parts.
            keep: referred to until the operation has ended.
            alone: never fused with others.
            timeout: seconds until an error, 0 = never; negative: the lane's.
            waits: the caller will wait at once: this may return only at the end.
            rooms: bytes at each of `outs`, needed for allgather and alltoall, whose
                results are in memory of the core if they have another size.
            cuda: the addresses are of memory on a CUDA device, one for all tensors of
                this rank, and are used when `stream` has come as far as it is now.
        """
    def run_plain(
        self,
        op: int,
        name: str | Callable[[], str],
        array: Any,
        out: Any,
        reduce_op: int,
        root: int,
        prescale: float,
        postscale: float,
        timeout: float,
    ) -> bool:
        """`submit` and `wait` for an array with a buffer, and another for the result.

        False: it is not for these two, and nothing has happened. ValueError: `out` has
        other rows than the result of an allgather or alltoall.
        """
    def run_at(
        self,
        op: int,
        name: str,
        tensor: tuple[int, int, Sequence[int]],
        out: int,
        reduce_op: int,
        root: int,
        prescale: float,
        postscale: float,
        timeout: float,
        keep: object,
    ) -> None:
        """`submit` and `wait` for a tensor of this host, a result of known shape."""
    def set_timeline(self, timeline: Timeline | None) -> None:
        """From the next round on, reports there what it does."""
    def join(self) -> Work:
        """This rank has nothing more to submit until all ranks have joined."""
    def hold(self) -> None:
        """What is submitted wakes nobody until `release`, so that it goes together."""
    def release(self) -> None: ...
    def abort(self, message: str, rank: int = -1) -> None: ...
    def close(self) -> None:
        """Ends it, bounded in time; what is pending fails."""
    @property
    def takes_cuda(self) -> bool:
        """Whether tensors on CUDA devices may be submitted."""
    @property
    def joined(self) -> bool:
        """Whether NCCL joins the ranks, in the present epoch."""
    def confirm(self) -> None:
        """As CudaCommunicator.confirm, for what is enqueued on a device."""
    def cuda_stats(self) -> dict[str, dict[str, Any]]:
        """As CudaCommunicator.stats; empty before the first call on a device."""
    def stats(self) -> dict[str, int]:
        """Keys: rounds, message_bytes, submissions, cached, calls, fused, failures.

        `cached` are the submissions that travelled as a number, `fused` those in calls.
        """

class Work:
    """The outcome of a submission, to be polled or waited for."""

    @property
    def done(self) -> bool:
        """Whether it has ended, on the device as well if its tensors are there."""
    def wait(self, stream: int | None = None) -> None:
        """Without the interpreter's lock; raises StatusError, or KeyboardInterrupt.

        Of tensors on a device: until it is enqueued. What is enqueued on `stream` from
        then on, by default the one that submitted it, comes after it.
        """
    def output(self, i: int) -> Any:
        """The result of allgather or alltoall: has a buffer and __dlpack__.

        On a device __dlpack__ only, for the stream that was last given to wait(): when
        that has passed the moment of the last reference, the memory is used again.
        """
    def received(self, i: int) -> list[int]:
        """How many of its rows came from each rank."""
    @property
    def last_joined(self) -> int:
        """The rank in the set that joined last, once a join is done."""

class TensorInterface:
    """Many tensors of a TensorFlow kernel at once, through its C functions, by name.

    Tensors and contexts are addresses. RuntimeError is what TensorFlow has refused.
    """

    def __init__(self, functions: dict[str, int]) -> None: ...
    def inputs(self, context: int, count: int) -> list[int]:
        """The first inputs of a node; give them to `delete`."""
    def describe(
        self, tensors: Sequence[int]
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """Address of the elements, TensorFlow's number of the dtype, shape."""
    def allocate_like(self, tensors: Sequence[int]) -> list[int]:
        """New ones, uninitialised; give them to `delete`. MemoryError: none is made."""
    def put(self, context: int, first: int, tensors: Sequence[int]) -> None:
        """Makes them outputs of a node from `first` on; lets them go in any case."""
    def delete(self, tensors: Sequence[int]) -> None:
        """Lets them go."""

def local_world(
    hosts: Sequence[int], options: Mapping[str, float | str] = ...
) -> list[Communicator]: ...
def ffi_targets() -> dict[str, Any]: ...
def compares_at(step: int, every: int) -> bool: ...
def hash_memory(pieces: Sequence[tuple[int, int]]) -> list[int]: ...
def difference(
    hashes: Sequence[int],
    names: str,
    members: Sequence[int],
    rank: int,
    greatest: Callable[[list[int]], list[int]],
) -> str:
    """Which tensor differs between ranks, or ""; see engine/call/alike.h."""

def shm_bytes(ring_bytes: int) -> int: ...
def segment_bytes(size: int, tile_bytes: int) -> int: ...
def set_failure_hook(f: Callable[[], None] | None) -> None: ...
def failpoints() -> list[str]: ...
def arm_failpoint(point: str, action: str, number: float, passage: int) -> None: ...
def version() -> str: ...
def algorithms() -> list[tuple[str, str]]: ...
def applies(op: str, algorithm: str, host: Sequence[int]) -> bool: ...
def schedule(
    op: str,
    algorithm: str,
    rank: int,
    counts: Sequence[Sequence[int]],
    host: Sequence[int],
    root: int = 0,
) -> list[dict[str, Any]]: ...
def verify(
    op: str,
    algorithm: str,
    counts: Sequence[Sequence[int]],
    host: Sequence[int],
    root: int = 0,
) -> dict[str, Any]: ...
def verify_schedules(
    op: str,
    schedules: Sequence[Sequence[dict[str, Any]]],
    counts: Sequence[Sequence[int]],
    host: Sequence[int],
    root: int = 0,
) -> dict[str, Any]: ...
def predict(
    op: str, bytes: int, host: Sequence[int], cost: Mapping[str, float] = ...
) -> list[tuple[str, float]]:
    """Seconds by the cost model, of all algorithms that apply."""

def connect_devices(
    *,
    id: int,
    devices: Sequence[int],
    controls: Sequence[Communicator],
    unique_ids: Sequence[bytes],
    options: Mapping[str, float | str],
) -> list[CudaCommunicator]:
    """Joins each device of this process with those of its place on the other ranks.

    `controls` join the same ranks, one for each device, for nothing else; options are
    start_timeout, fusion, fusion_small and comm_stream. Compiled programs use `id`.
    """

def device_here(id: int) -> int:
    """The device of a program's call on this thread; -1: none of this process set."""

def cuda_info() -> dict[str, Any]:
    """What is compiled in and what the driver shows; never raises.

    Keys: device_code ("nvcc 13.0" or "none"), images [(kind, architecture, bytes)],
    driver (13000 for 13.0, or 0), driver_error, devices [{name, uuid,
    compute_capability}], nccl (22809 for 2.28.9, 0 while none is open), nccl_path.
    """

def open_nccl(path: str = "") -> tuple[int, str]:
    """Version and file of NCCL: what is open or mapped already, else `path`.

    An empty path leaves the search to the loader. Raises StatusError.
    """

def nccl_unique_id() -> bytes: ...
def pack(
    ins: Sequence[tuple[int, int, Sequence[int]]],
    fused: int,
    *,
    wire: int = -1,
    scale: float = 1.0,
    stream: int = 0,
    unpack: bool = False,
    device: int = 0,
    poison: int = 0,
) -> int:
    """Enqueues the copy of tensors to one buffer, or back; returns the launches."""

def cuda_ffi_targets() -> dict[str, Any]: ...
