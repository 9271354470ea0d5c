"""The native core, as `xla_ext/binding` binds it. A test compares this file with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLLECTIVES: dict[str, int]
REDUCE_OPS: dict[str, int]
DTYPES: dict[str, int]

def waits_since(recorder: Recorder, seen: int) -> tuple[int, list[Any]]:
    """Returns the number of calls, and the waits of calls after the first `seen`."""

class StatusError(RuntimeError):
    """The failure of a call of the core."""

    code: str
    """MISMATCH, UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, FAILED_PRECONDITION,
    INVALID_ARGUMENT or INTERNAL."""
    rank: int
    """The world rank that caused the failure, or -1."""

# TCP links; or else the rank to blame, and the reason, a predicate.
Connected = tuple[list[tuple[int, list[int], list[bytes]]], int, str]
# Makes TCP links to the given ranks of a communicator. Stops if the second
# argument, a function, returns True.
Connect = Callable[[list[int], Callable[[], bool]], Connected]

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
        links: Sequence[tuple[int, list[int], list[bytes]]],
        memory: tuple[int, int, int, list[int]] | None = None,
        doorbell: str = "",
        options: Mapping[str, float | str | Mapping[str, float] | Recorder],
        fabric: Mapping[str, float | str] | None = None,
        connect: Connect | None = None,
        resilient: ResilientComm | None = None,
        ending: Communicator | None = None,
        registered: bool = True,
    ) -> None:
        """Takes ownership of the descriptors in `links` and `memory`.

        The constructor takes ownership even if it raises an error, unless the error is
        a TypeError. ringjax.links.descriptors.LinkDescriptors describes `links`,
        `memory`, and the name `doorbell`. `connect` makes the links to ranks that a
        call needs and that have none.

        With `fabric`, links to ranks of other hosts go over libfabric; each has one
        socket, over which it learns that its peer is lost. Keys: library, provider,
        source and local_rank, as fabric_probe has them; slot_bytes and slots; and
        seconds, the limit of the wait for the peers in `links`.

        If `registered`, compiled programs find the communicator by its id, with
        `resilient` only after ResilientComm.install. If `ending` is given, each call
        ends with a barrier of its ranks.
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
    def doorbell_socket(self) -> int:
        """The socket that wakes the rank out of poll; -1 if it never polls."""
    @property
    def aborted(self) -> bool: ...
    @property
    def reason(self) -> str:
        """The reason of the abort, or an empty text."""
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
        timeout: float = -1.0,
    ) -> int:
        """Runs one call on this thread without the GIL.

        A resilient communicator runs the call in the current epoch, and again if that
        epoch ends. `timeout` limits the waits for other ranks, in seconds: 0 means no
        limit, and -1 the limit of the job.

        Returns:
            The epoch in which the call was finished.

        Raises:
            StatusError: the call has failed.
        """
    def abort(self, message: str, rank: int = -1) -> None: ...
    def quiesce(self, seconds: float) -> tuple[int, int, bool]:
        """Waits, after abort() and without the GIL, until no call makes progress.

        Calls are counted since the communicator was installed in its resilient
        communicator.

        Returns:
            The number of calls that have returned; the number of calls with complete
            results on this rank; and whether the call in progress, if any, still has
            its inputs.

        Raises:
            StatusError: DEADLINE_EXCEEDED if a call does not stop; FAILED_PRECONDITION
                if the communicator was not aborted.
        """
    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def set_cost(
        self, cost: Mapping[str, float], algorithm: str = "", trial: bool = False
    ) -> None:
        """Sets the constants of the cost model, or forces one algorithm.

        Missing constants get their defaults. All ranks must set equal values between
        the same two calls. Statistics start again. Calls of a `trial` are not reported.
        """
    @property
    def cost(self) -> dict[str, float]: ...

class ResilientComm:
    """The epochs of one communicator in a job that outlives its ranks.

    A call runs in the current epoch. If that epoch is aborted, the call waits for the
    next epoch. There it returns, is repeated or fails, as the ranks have decided.
    """

    def __init__(self, epoch_timeout: float) -> None:
        """Limits the wait for an epoch to `epoch_timeout` seconds; 0 means no limit."""
    def install(
        self,
        communicator: Communicator | None,
        finished: int = 0,
        repeats: bool = True,
        ranks: Sequence[int] = (),
        reason: str = "",
    ) -> None:
        """Sends all later calls to `communicator`, which was made with this object.

        The other arguments describe the previous epoch; the first epoch has none.

        Args:
            communicator: the communicator of the next epoch. None stands for an epoch
                that this rank has never formed; another epoch follows.
            finished: the number of calls of the previous epoch that count as finished.
            repeats: if it is True, the next call runs again, unless it has failed. If
                it is False, that call fails on all ranks. A rank that is not in that
                call fails its next call, unless it calls `resume` before.
            ranks: for each rank of the previous epoch, its rank now; -1 if it is lost.
            reason: why the previous epoch has ended.

        Raises:
            StatusError: FAILED_PRECONDITION: the resilient communicator has ended.
        """
    def resume(self) -> None:
        """Cancels the pending failure: this rank starts again with the other ranks."""
    def end(self, message: str, rank: int = -1) -> None:
        """Ends all epochs: waiting and later calls fail with UNAVAILABLE."""

class Heartbeat:
    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        peers: Sequence[tuple[int, int]],
        *,
        interval: float,
        timeout: float,
        notify: int = -1,
        inquire: int = -1,
        keys: list[bytes] = ...,
    ) -> None:
        """Takes ownership of the sockets in `peers`: (neighbour, socket).

        `hosts` are the names of the hosts of all ranks, for texts.
        `keys` has a key for each socket; an empty key means no encryption. `notify` is
        an eventfd, which the heartbeat duplicates and writes to whenever lost() or
        left() grows. With `notify` the job is elastic: if a communicator reports a rank
        as lost, the heartbeat counts the rank as lost, too. `inquire` is an eventfd, to
        which the heartbeat writes when a peer requests the place of the program; the
        reader calls asked() and answer() within half a second.
        """
    def watch(
        self, communicator: Communicator, sharing: Sequence[int] = ()
    ) -> None: ...
    def forget(self, communicator: Communicator) -> None: ...
    def fail(self, message: str) -> None: ...
    def leave(self) -> None: ...
    def lost(self) -> list[tuple[int, str]]: ...
    def left(self) -> list[int]:
        """Returns the neighbours that have announced their regular end."""
    def asked(self) -> tuple[int, list[str]]:
        """Returns the straggler probes of peers that wait for answer().

        Returns:
            The number of the newest probe, 0 if none waits; and, once, a sentence for
            each call or operation for which other ranks wait.
        """
    def answer(self, newest: int, place: str) -> None:
        """Replies to probes up to a number, as in "it is at train.py:41 in load"."""
    def share_waits(self, recorder: Recorder | None) -> None:
        """Sends the waits of the recorder to the first rank, with each heartbeat."""
    def say_where(self, place: str) -> None:
        """Sets the place of the program in the source, which is sent with the waits."""
    def take_waits(
        self,
    ) -> dict[int, tuple[int, float, float, list[tuple[int, int, int]], str]]:
        """Returns the reports of the peers since the last call, by rank.

        Returns:
            The number of calls; the seconds of waiting and of moving data; (lane,
            sequence, microseconds) of the last calls; and the place of the program.
        """
    def ask_clock(self, times: int) -> None:
        """Requests the first rank's clock `times` times, except on the first rank."""
    def take_clocks(self) -> list[tuple[int, float, float, float]]:
        """Returns (rank, own clock, lead of the rank's clock, round trip) in s."""
    def release(self) -> list[tuple[int, int, bytes, bytes]]:
        """Ends the heartbeat, and returns the connections for the next epoch.

        Sends the peers of all other connections that this rank leaves, as `leave`.

        Returns:
            (neighbour, socket, received and unread bytes, unsent bytes) of each open
            connection without a key. The caller owns the sockets.
        """
    def close(self) -> None: ...

class CudaCommunicator:
    """An NCCL communicator of a process set, on one device and a stream of its own.

    Pointers are device addresses, and streams are handles of the driver, both as
    integers, so tensors of any framework can be sent. If the epoch fails on a device of
    the process, the communicators of all its devices refuse all later calls.
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
        """Enqueues one call on `stream` and returns, or raises StatusError.

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
        """Enqueues an allreduce on another stream; see `done` with the same `site`."""
    def done(
        self,
        ins: Sequence[tuple[int, int, Sequence[int]]] = ...,
        outs: Sequence[tuple[int, int]] = ...,
        *,
        site: int,
        stream: int = 0,
        name: str = "",
    ) -> None:
        """Makes `stream` wait for a start; tensors are needed only for copies."""
    def synchronize(self, stream: int = 0) -> None:
        """Waits for the device without the GIL; StatusError if the epoch has failed."""
    def confirm(self) -> None:
        """Waits until all calls have ended; StatusError if results are void."""
    def check(self) -> None:
        """Raises StatusError if the epoch has failed. Does not wait."""
    def abort(self, message: str, rank: int = -1) -> None: ...
    def close(self) -> None:
        """Closes the communicator in bounded time, or immediately after a failure."""
    def stats(self) -> dict[str, Any]: ...

class Recorder:
    """Records the calls of all communicators of a process, over all epochs.

    It keeps the last `capacity` calls, and sums over all calls. If `path` is not empty,
    the first communicator whose failure ends the job writes the calls to it.
    """

    def __init__(self, capacity: int, who: str, path: str = "") -> None: ...
    def events(self) -> list[dict[str, Any]]:
        """Returns the kept calls, the oldest first; see ringjax.recent_calls."""
    def totals(self) -> list[dict[str, Any]]:
        """Returns sums by process set, lane and collective; see ringjax.stats."""
    def busy(self) -> tuple[float, float]:
        """Returns the seconds in which calls waited, and in which calls moved data."""
    def keep(self, capacity: int) -> None:
        """Sets the number of calls to keep; the newest calls stay."""
    def lines_since(self, seen: int) -> tuple[int, int, bytes]:
        """Returns the number of calls, how many after `seen` are lost, and the others.

        The others are lines of JSON.
        """
    def tell(self, timeline: Timeline | None) -> None:
        """Reports each later call to the timeline."""
    @property
    def count(self) -> int:
        """The number of all calls."""
    @property
    def dumped(self) -> str:
        """The path of the written calls; empty before they are written."""

class Timeline:
    def __init__(self, path: str, mark_rounds: bool, most_bytes: int = ...) -> None:
        """Replaces `path`. Limits `path` and `path`.1 together to `most_bytes`.

        Raises StatusError if the file cannot be written.
        """
    def close(self) -> None:
        """Writes all reports; later reports are dropped."""

def plain_call(
    op: int,
    function: Callable[..., Any],
    *,
    process_set: Any,
    array_type: type,
    new_result: Callable[[Any, Any], Any],
    next_name: Callable[[Any], str],
    error_of: Callable[[StatusError], BaseException],
) -> Callable[..., Any]:
    """Makes a callable that runs plain calls and passes other calls to `function`.

    The callable is pickled by its attribute `__qualname__`, which the caller sets.

    Args:
        process_set: the set of a call without a set. All sets have its type.
        array_type: the type of the tensors of plain calls.
        new_result: makes the result of a tensor and a process set.
        next_name: names an operation of a process set that has no name.
        error_of: makes the exception that replaces a StatusError.
    """

def exact_add(
    ins: Sequence[tuple[int, int, tuple[int, ...]]],
    units: Sequence[int],
    width: int,
    sums: Any,
    checksum: Any,
) -> None:
    """Adds the leaves of one piece to exact sums, without the GIL.

    Args:
        ins: the address, the number of the dtype in DTYPES, and the shape of each leaf.
            The address 0 stands for zeros.
        units: the exponent of the unit of each leaf's sums.
        width: the bits of a term, without its sign.
        sums: int64[n], the sums of all leaves, one after the other.
        checksum: uint64[2], the checksum of `sums`, to which that of the terms is
            added.

    Raises:
        ValueError: the arguments do not fit together, or a value is too large.
    """

def set_world(world: object) -> None:
    """Makes plain calls use `world.lanes.lanes`; None makes all calls not plain."""

def heed_limits() -> None:
    """Makes plain calls ask their process set for its limit, from now on."""

class EagerLane:
    """Named operations of a process set, submitted in any order from any thread.

    A thread without the GIL negotiates with the other ranks which operations all ranks
    have submitted, and runs these operations.
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
        """Makes a lane, the only user of `communicator`.

        On a resilient communicator, in which `communicator` has been installed, the
        lane continues in each later epoch: the remaining ranks repeat operations that
        the loss of a rank interrupts. A broadcast whose root is lost, an alltoall with
        splits, a reducescatter, and operations on CUDA tensors fail with UNAVAILABLE,
        as do all pending operations if training starts again. `close` ends the
        resilient communicator.

        Args:
            fusion_threshold: the most bytes of one message; 0 means no fusion. Equal on
                all ranks.
            cache_capacity: the number of submissions to remember. Equal on all ranks.
            cycle_seconds: the seconds that an operation waits for other operations to
                fuse with.
            stall_warning: seconds of waiting for other ranks until a warning.
            timeout: seconds until an error. Here and for the warning, 0 means never.
            cuda: options for CUDA tensors: the options of CudaCommunicator; `nccl`,
                paths of NCCL to try; and `device`, the device of a rank that joins
                before it has submitted a tensor, -1 for none. Either all ranks have
                these options, or no rank.
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
        """Submits an operation.

        Raises:
            StatusError: the operation is not possible. INVALID_ARGUMENT also if another
                operation of this name is in progress. If the lane has failed, the error
                of that failure.

        Args:
            ins: (address, number of the dtype in DTYPES, shape), C-contiguous.
            outs: the memory of the results: for allreduce and broadcast as large as the
                inputs, for reducescatter of rank r dim0 // size rows, and one more if r
                < dim0 % size. May be empty for allgather and alltoall.
            root: the root's rank in the set.
            splits: for alltoall, the rows for each rank, input by input. If it is
                empty, all parts are equal.
            keep: an object that the lane refers to until the operation has ended.
            alone: True if the operation is never fused with other operations.
            timeout: seconds until an error. 0 means never, and a negative number the
                lane's timeout.
            waits: True if the caller will wait immediately: `submit` may then return
                only when the operation has ended.
            rooms: the bytes at each address of `outs`, for allgather and alltoall. A
                result of another size is in memory of the core.
            cuda: True if the addresses are on a CUDA device, one device for all tensors
                of this rank. The lane uses them once `stream` has passed this point.
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
        """Submits an operation on a host tensor and waits; not for ragged results."""
    def set_timeline(self, timeline: Timeline | None) -> None:
        """Reports all work from the next round on to the timeline."""
    def join(self) -> Work:
        """Announces that this rank submits nothing more until all ranks have joined."""
    def hold(self) -> None:
        """Holds later submissions until `release`, so that they are sent together."""
    def release(self) -> None: ...
    def abort(self, message: str, rank: int = -1) -> None: ...
    def close(self) -> None:
        """Closes the lane within bounded time; pending operations fail."""
    @property
    def takes_cuda(self) -> bool:
        """True if tensors on CUDA devices may be submitted."""
    @property
    def joined(self) -> bool:
        """True if the ranks have an NCCL communicator in the current epoch."""
    def confirm(self) -> None:
        """Waits as CudaCommunicator.confirm, for operations on a device."""
    def cuda_stats(self) -> dict[str, dict[str, Any]]:
        """Returns CudaCommunicator.stats; empty before the first call on a device."""
    def stats(self) -> dict[str, int]:
        """Returns rounds, message_bytes, submissions, cached, calls, fused, failures.

        `cached` counts submissions that were sent as a number, `fused` operations in
        calls.
        """

class Work:
    """The outcome of a submission, to be polled or waited for."""

    @property
    def done(self) -> bool:
        """True if the operation has ended, on its device, too."""
    def wait(self, stream: int | None = None) -> None:
        """Waits without the GIL; raises StatusError or KeyboardInterrupt.

        For tensors on a device `wait` returns when the operation is enqueued. All later
        work on `stream`, by default the stream of the submission, runs after it.
        """
    def output(self, i: int) -> Any:
        """Returns a result of allgather or alltoall, with a buffer and __dlpack__.

        On a device the result has only __dlpack__, for the stream of the last wait().
        Its memory is used again when that stream has passed the last reference.
        """
    def received(self, i: int) -> list[int]:
        """Returns the number of rows from each rank in result `i`."""
    @property
    def last_joined(self) -> int:
        """The rank in the set that joined last, after a join has ended."""

class TensorInterface:
    """TensorFlow's C functions, by name, for many tensors of a kernel in one call.

    Tensors and contexts are addresses. RuntimeError: TensorFlow has refused a call.
    """

    def __init__(self, functions: dict[str, int]) -> None: ...
    def inputs(self, context: int, count: int) -> list[int]:
        """Returns the first inputs of a node; pass them to `delete` afterwards."""
    def describe(
        self, tensors: Sequence[int]
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """Returns the address of the elements, TensorFlow's dtype number, the shape."""
    def allocate_like(self, tensors: Sequence[int]) -> list[int]:
        """Makes uninitialised tensors, to be deleted; MemoryError: it made none."""
    def put(self, context: int, first: int, tensors: Sequence[int]) -> None:
        """Makes tensors the outputs of a node from `first` on. Always deletes them."""
    def delete(self, tensors: Sequence[int]) -> None:
        """Deletes tensors."""

def fabric_probe(
    library: str = "", provider: str = "", source: str = "", local_rank: int = 0
) -> dict[str, Any]:
    """Looks for a provider of libfabric that can carry links; never raises.

    Keys: provider, domain and protocol (a number) of the one that was found; version
    (major, minor) and path of the library; providers, the names of all that could
    carry links; error, the reason if there is none, or "".

    Args:
        library: the path of libfabric.so.1; without it the loader searches.
        provider: "verbs", or with the name of a card "efa:rdmap0s6-rdm".
        source: the IP address of this rank on the fabric, or "".
        local_rank: with several cards, the ranks of a host take them in turn.
    """

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
    """Returns a text about tensors that differ, or ""; see engine/call/alike.h."""

def host_bytes(ranks: int, ring_bytes: int, tile_bytes: int) -> tuple[int, int]:
    """Returns the bytes of a host's memory to allocate at once, and all its bytes."""

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
    root: int = 0,
) -> dict[str, Any]: ...
def predict(
    op: str, bytes: int, host: Sequence[int], cost: Mapping[str, float] = ...
) -> list[tuple[str, float]]:
    """Returns the seconds of all algorithms that apply, by the cost model."""

def connect_devices(
    *,
    id: int,
    devices: Sequence[int],
    controls: Sequence[Communicator],
    unique_ids: Sequence[bytes],
    options: Mapping[str, float | str],
) -> list[CudaCommunicator]:
    """Connects each device with the devices of the same position on other ranks.

    `controls` are host communicators of the same ranks, one for each device, that have
    no other use. Options: start_timeout, fusion, fusion_small, comm_stream. Compiled
    programs use `id`.
    """

def device_here(id: int) -> int:
    """Returns the device of a program's call on this thread; -1 if not in this set."""

def cuda_info() -> dict[str, Any]:
    """Describes the CUDA support of this build and of the driver; never raises.

    Keys: device_code ("nvcc 13.0" or "none"), images [(kind, architecture, bytes)],
    driver (13000 for 13.0, or 0), driver_error, devices [{name, uuid,
    compute_capability}], nccl (22809 for 2.28.9, 0 while none is open), nccl_path.
    """

def open_nccl(path: str = "") -> tuple[int, str]:
    """Opens NCCL unless it is open or mapped already; returns its version and file.

    With an empty path the loader searches for NCCL. Raises StatusError.
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
    """Enqueues copies of tensors to one buffer, or back; returns the launch count."""

def cuda_ffi_targets() -> dict[str, Any]: ...
def mpi_install(path: str) -> None:
    """Makes the library at `path` pass JAX's MPI calls on to the groups here.

    Raises:
        RuntimeError: jaxlib has not loaded this library.
    """

def mpi_set_world(rank: int, size: int) -> None: ...
def mpi_expect(
    color: int, key: int, collectives: Communicator, messages: Communicator
) -> None:
    """Makes the next MPI_Comm_split with this color and key a group on both.

    Both communicators have the ranks of the group. `messages` serves messages between
    pairs of ranks only.
    """

def mpi_close(why: str) -> None:
    """Makes all calls of all groups fail with `why`, and drops the communicators."""
