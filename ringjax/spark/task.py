"""A task of Spark that is a rank: it starts a process, and waits for its end.

A process of its own, since Spark uses its Python workers again: what a training leaves
behind, JAX with its threads for one, must not be in somebody's next job. That process
ends with its task.
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
    """What a task does, for any task of the job.

    Attributes:
        ticket: what all ranks' variables have in common.
        payload: function and arguments, from `task.encode`; None: `argv` is a program.
        argv: the command of the rank.
        size: partitions.
        elastic: the tasks start one by one, and may be tried again.
        keeps_output: whether all output is returned, and not only why a rank failed.
        use_gpu: the rank sees the GPUs that Spark has assigned to its task.
    """

    ticket: Mapping[str, str]
    payload: bytes | None
    argv: Sequence[str]
    size: int
    elastic: bool
    keeps_output: bool = False
    use_gpu: bool = True

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What Spark calls in each partition; the batches are of no interest."""
        for _ in batches:
            pass
        context = BarrierTaskContext.get() if not self.elastic else TaskContext.get()
        assert context is not None
        partition, node = context.partitionId(), socket.gethostname()
        if self.elastic:
            rank, number = -1, partition + self.size * context.attemptNumber()
            # Who comes first is ranked by its number, who comes later is the last.
            likely = self.size - 1 if context.attemptNumber() else partition
            own = {"RINGJAX_WORKER": str(number), "HOROVOD_HOSTNAME": node}
            own |= {"HOROVOD_RANK": str(likely), "HOROVOD_SIZE": str(self.size)}
        else:
            rank, own = _assign_rank(context, node)
            number = rank
        # What somebody says of GPUs counts more than what Spark has assigned.
        env = {**environ.inherited(), **self._gpus(context), **self.ticket, **own}
        env["PYTHONPATH"] = environ.agent_path()
        ended = _run_process(
            self.argv, env, self.payload, rank if rank >= 0 else number
        )
        if self.elastic and ended.code:
            # Spark tries it again: a newcomer of the job.
            raise RuntimeError(f"worker {number} (on {node}){ended.why}")
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "worker": number,
                    "rank": rank,
                    "node": node,
                    "code": ended.code,
                    "error": ended.error,
                    "result": ended.result,
                    "output": json.dumps(ended.lines) if self.keeps_output else "",
                }
            ]
        )

    def _gpus(self, context: TaskContext) -> dict[str, str]:
        gpus = context.resources().get("gpu") if self.use_gpu else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)} if gpus else {}


def get_available_devices() -> list[str]:
    """The GPUs that a rank sees, those that Spark has assigned to its task."""
    gpus = environ.inherited().get("CUDA_VISIBLE_DEVICES", "")
    return gpus.split(",") if gpus else []


def host_hash(salt: str | None = None) -> str:
    """A name for this host, and the container of YARN in which this process runs.

    Example:
        >>> host_hash() == host_hash(), host_hash() == host_hash("other")
        (True, False)
    """
    container = environ.inherited().get("CONTAINER_ID", "")
    words = "\0".join([socket.gethostname(), container, salt or ""])
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _assign_rank(context: BarrierTaskContext, node: str) -> tuple[int, dict[str, str]]:
    """This task's rank: the tasks of a host follow each other."""
    nodes = context.allGather(node)
    order = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
    rank = order.index(context.partitionId())
    return rank, places([nodes[i] for i in order])[rank]


@dataclass
class _ProcessResult:
    """How a rank has ended.

    Attributes:
        lines: what it wrote, with the name of the stream.
        result: what `task.py` has answered.
    """

    code: int = 0
    lines: list[tuple[str, str]] = field(default_factory=list)
    result: bytes = b""

    @property
    def error(self) -> str:
        """Why it has failed: a traceback, or what it wrote last."""
        if not self.code:
            return ""
        text = task.error_text(self.result)
        if text:
            return text
        last = [line for stream, line in self.lines if stream == "stderr"]
        return "its process" + describe_failure(
            self.code, last_words=last_line("\n".join(last))
        )

    @property
    def why(self) -> str:
        """The same in a line, to be put behind its name."""
        text = task.error_text(self.result)
        return f" failed: {last_line(text)}\n\n{text}" if text else f": {self.error}"


def _run_process(
    argv: Sequence[str], env: Mapping[str, str], payload: bytes | None, name: int
) -> _ProcessResult:
    """Runs a rank to its end; its output goes to the executor's log, too."""
    child = processes.start(argv, dict(env), payload=payload)
    ended = _ProcessResult()
    rests = dict.fromkeys(child.pipes, b"")
    with selectors.DefaultSelector() as selector:
        for stream, descriptor in child.pipes.items():
            selector.register(descriptor, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                if key.data == "result":
                    ended.result += data
                    continue
                *lines, rests[key.data] = (rests[key.data] + data).split(b"\n")
                if not data and rests[key.data]:
                    lines = [*lines, rests[key.data]]
                for line in lines:
                    _log_line(ended, name, key.data, line.decode(errors="replace"))
    code = child.process.wait()
    ended.code = code if code >= 0 else 128 - code
    return ended


def _log_line(ended: _ProcessResult, name: int, stream: str, line: str) -> None:
    ended.lines.append((stream, line))
    print(f"[{name}]<{stream}>:{line}", file=sys.stderr, flush=True)
