"""A task of Spark that starts a rank as a process and waits for its end.

Spark reuses its Python workers for later jobs. A rank loads JAX, which starts threads
and keeps memory, so the rank runs in a process of its own that ends with the task.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import BarrierTaskContext, TaskContext

from ringjax.run import environ, task
from ringjax.run.engine_job import places
from ringjax.run.hosts import processes
from ringjax.run.outcome import describe_failure, last_line

SCHEMA = (
    "worker long, rank long, node string, code long, error string, result binary, "
    "output string"
)


@dataclass(frozen=True)
class RankTask:
    """The work of a task, the same for all tasks of the job.

    Attributes:
        common_env: the environment variables that all ranks have in common.
        payload: function and arguments, from `task.encode`; None if `argv` is a
            program.
        argv: the command of the rank.
        size: the number of partitions.
        elastic: whether Spark starts the tasks one by one, and may repeat a task.
        keep_output: whether the result has all output, and not only the reason of a
            failure.
        use_gpu: whether the rank sees the GPUs that Spark has assigned to its task.
    """

    common_env: Mapping[str, str]
    payload: bytes | None
    argv: Sequence[str]
    size: int
    elastic: bool
    keep_output: bool = False
    use_gpu: bool = True

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the rank of a partition. Spark calls this method; ignores `batches`."""
        for _ in batches:
            pass
        context = BarrierTaskContext.get() if not self.elastic else TaskContext.get()
        assert context is not None
        partition, node = context.partitionId(), socket.gethostname()
        if self.elastic:
            rank, number = -1, partition + self.size * context.attemptNumber()
            # The coordinator assigns the rank. `likely` is the probable rank: the index
            # of the partition, or the last rank for a repeated task.
            likely = self.size - 1 if context.attemptNumber() else partition
            own = {"RINGJAX_WORKER": str(number), "HOROVOD_HOSTNAME": node}
            own |= {"HOROVOD_RANK": str(likely), "HOROVOD_SIZE": str(self.size)}
        else:
            rank, own = _assign_rank(context, node)
            number = rank
        # A user's own CUDA_VISIBLE_DEVICES in `common_env` overrides Spark's choice.
        env = {**environ.inherited(), **self._gpus(context), **self.common_env, **own}
        env["PYTHONPATH"] = environ.agent_path()
        result = _run_process(self.argv, env, self.payload, number)
        if self.elastic and result.code:
            # After an error Spark repeats the task, whose rank then joins the job as a
            # new worker.
            raise RuntimeError(f"worker {number} (on {node}){result.one_line_error}")
        row = {
            "worker": number,
            "rank": rank,
            "node": node,
            "code": result.code,
            "error": result.error,
            "result": result.payload,
            "output": json.dumps(result.lines) if self.keep_output else "",
        }
        yield pa.RecordBatch.from_pylist([row])

    def _gpus(self, context: TaskContext) -> dict[str, str]:
        gpus = context.resources().get("gpu") if self.use_gpu else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)} if gpus else {}


def get_available_devices() -> list[str]:
    """Returns the GPUs that this rank sees, which Spark has assigned to its task."""
    gpus = environ.inherited().get("CUDA_VISIBLE_DEVICES", "")
    return gpus.split(",") if gpus else []


def host_hash(salt: str | None = None) -> str:
    """Returns a name for this host and, on YARN, for the container of this process.

    Example:
        >>> host_hash() == host_hash(), host_hash() == host_hash("other")
        (True, False)
    """
    container = environ.inherited().get("CONTAINER_ID", "")
    words = "\0".join([socket.gethostname(), container, salt or ""])
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _assign_rank(context: BarrierTaskContext, node: str) -> tuple[int, dict[str, str]]:
    """Returns the rank of this task and the environment variables of the rank.

    The tasks of one host have consecutive ranks.
    """
    nodes = context.allGather(node)
    order = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
    rank = order.index(context.partitionId())
    return rank, places([nodes[i] for i in order])[rank]


@dataclass
class _ProcessResult:
    """The result of a rank's process.

    Attributes:
        code: the exit code; 128 plus the number if a signal has ended the process.
        lines: the lines of output, each with the name of its stream.
        payload: the result of `ringjax.run.task`.
    """

    code: int = 0
    lines: list[tuple[str, str]] = field(default_factory=list)
    payload: bytes = b""

    @property
    def error(self) -> str:
        """The traceback of a failed rank, or else the last line of the stderr."""
        if not self.code:
            return ""
        text = task.error_text(self.payload)
        if text:
            return text
        last = [line for stream, line in self.lines if stream == "stderr"]
        return "its process" + describe_failure(
            self.code, last_words=last_line("\n".join(last))
        )

    @property
    def one_line_error(self) -> str:
        """The error as the continuation of a line that names the rank."""
        text = task.error_text(self.payload)
        return f" failed: {last_line(text)}\n\n{text}" if text else f": {self.error}"


def _run_process(
    argv: Sequence[str], env: Mapping[str, str], payload: bytes | None, number: int
) -> _ProcessResult:
    """Runs a rank until it ends, and copies its output to the executor's log."""
    child = processes.start(argv, dict(env), payload=payload)
    result = _ProcessResult()
    rests = dict.fromkeys(child.pipes, b"")
    with selectors.DefaultSelector() as selector:
        for stream, descriptor in child.pipes.items():
            selector.register(descriptor, selectors.EVENT_READ, stream)
        # Read all pipes in turn: a rank that fills one pipe would otherwise block.
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                stream = key.data
                if stream == "result":
                    result.payload += data
                    continue
                *lines, rests[stream] = (rests[stream] + data).split(b"\n")
                if not data and rests[stream]:
                    lines = [*lines, rests[stream]]
                for line in lines:
                    text = line.decode(errors="replace")
                    result.lines.append((stream, text))
                    print(f"[{number}]<{stream}>:{text}", file=sys.stderr, flush=True)
    code = child.process.wait()
    result.code = code if code >= 0 else 128 - code
    return result
