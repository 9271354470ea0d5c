"""A warm server: a process that has imported the modules of ranks, and forks ranks.

Importing costs a rank 0.8 s of CPU for JAX, 1.6 s for PyTorch, 4.5 s for TensorFlow,
and the suite starts hundreds of ranks. The server imports once, starts no backend and
no thread, and forks each program that tests/support/warm.py requests. In a forked
ringrun and its agent, `subprocess.Popen` also forks Python programs instead of starting
an interpreter. So the processes of a job have the parents, groups, signals, pipes, exit
codes and entries in /proc of a job that a user starts.

Two things differ: the modules are already loaded, and the ranks of a job have an equal
seed of hash(). A program with other values of variables that imports read starts
without a server. So do the tests of how ringrun starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOM = 1 << 16  # bytes for the command line of a forked program, and for its variables
ROOM_VARIABLE = "RINGJAX_TEST_ROOM"
# The interpreter and libraries read variables with these prefixes while they load.
READ_AT_IMPORT = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "MKL_", "KMP_"),
    *("NPY_", "NUMPY_", "JAX_", "ENABLE_", "TF_", "TORCH", "PYTORCH_", "LC_", "LANG"),
    "MPITRAMPOLINE_",
)
_LAUNCHER = "ringjax.run"


def fixed(env: Mapping[str, str], words: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables of `env` that must be equal in a server that forks `words`.

    For ringrun and its agent the result is empty, because the server has imported all
    their modules.
    """
    if _module(words).startswith(_LAUNCHER):
        return {}
    return {name: env[name] for name in env if name.startswith(READ_AT_IMPORT)}


def _module(words: Sequence[str]) -> str:
    """Returns the module X of the command `python -P -m X …`, or an empty text."""
    return words[3] if len(words) > 3 and list(words[1:3]) == ["-P", "-m"] else ""


def _script(words: Sequence[str]) -> int:
    """Returns the index of the script in the command `python [-P] X.py …`, or 0."""
    place = 2 if len(words) > 1 and words[1] == "-P" else 1
    return place if len(words) > place and words[place].endswith(".py") else 0


def can_fork(
    words: Sequence[str], env: Mapping[str, str], server: Mapping[str, str]
) -> bool:
    """Returns whether a server with the variables `server` can fork the command."""
    if (
        not words
        or words[0] != sys.executable
        or not (_module(words) or _script(words))
    ):
        return False
    room = len(_joined(words)) <= ROOM and len(_joined(_assigned(env))) <= ROOM
    return room and fixed(env, words) == fixed(server, words)


class ForkingPopen(subprocess.Popen[bytes]):
    """A Popen that, if possible, forks this process and starts no interpreter."""

    def _execute_child(  # type: ignore[override,unused-ignore]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any,
        pass_fds: Iterable[int], cwd: Any, env: Any, startupinfo: Any,
        creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
        c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any,
        gids: Any, uid: Any, umask: Any, start_new_session: Any, process_group: Any,
    ) -> None:  # fmt: skip
        variables = dict(os.environ if env is None else env)
        words = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
        if shell or executable or not can_fork(words, variables, _environment):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env,
                startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite,
                errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # Python warns about a fork with threads
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            with _fatal():
                _set_descriptors((p2cread, c2pwrite, errwrite), pass_fds)
                _reset_signals()
                if cwd is not None:
                    os.chdir(cwd)
                if start_new_session:
                    os.setsid()
                if process_group is not None and process_group >= 0:
                    os.setpgid(0, process_group)
                if preexec_fn is not None:
                    preexec_fn()
                # Python installs this handler at its start.
                if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                _set_environment_and_name(words, variables)
            _exit(_run_program(words))
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


@contextlib.contextmanager
def _fatal() -> Any:
    """Ends the child at an error between fork and program, like a failed exec."""
    try:
        yield
    except BaseException as error:
        os.write(2, f"warm server: {type(error).__name__}: {error}\n".encode())
        os._exit(127)


# -- the work of exec ------------------------------------------------------------------


def _set_descriptors(streams: Sequence[int], more: Iterable[int]) -> None:
    """Makes `streams` descriptors 0, 1, 2. Closes all others except `more`."""
    import fcntl

    moved = [fcntl.fcntl(s, fcntl.F_DUPFD, 3) if s >= 0 else -1 for s in streams]
    for number, stream in enumerate(moved):
        if stream >= 0:
            os.dup2(stream, number)
    kept = {0, 1, 2, *more}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of listdir is closed
                os.close(int(name))
    for number in kept - {0, 1, 2}:
        os.set_inheritable(number, True)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _assigned(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]


def _joined(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _set_environment_and_name(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Sets the variables, and makes /proc show them and `words` for this process.

    /proc/PID/cmdline and /proc/PID/environ show memory that the kernel filled when the
    server started. The server has a long argument and a long variable, so that this
    memory has enough room.
    """
    os.environ.clear()
    os.environ.update(env)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, env_begin, env_end = map(int, fields[45:49])
    for first, last, text in (
        (begin, end, _joined(words)),
        (env_begin, env_end, _joined(_assigned(env))),
    ):
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, text, len(text))


# -- the work of a new interpreter -----------------------------------------------------


def _run_program(words: Sequence[str]) -> int:
    """Runs the program. Returns its exit code; a negative code is a signal."""
    name, script = _module(words), _script(words)
    if not name.startswith(_LAUNCHER):
        subprocess.Popen = _Popen  # type: ignore[misc]
    tempfile.tempdir = None
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.path[:] = _path
    try:
        if name:
            sys.argv[:] = ["-m", *words[4:]]
            sys.modules.pop(name, None)
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            sys.argv[:] = words[script:]
            main.__file__ = words[script]
            if script == 1:  # the option -P is missing
                sys.path.insert(0, os.path.dirname(os.path.realpath(words[script])))
            source = Path(words[script]).read_bytes()
            exec(compile(source, words[script], "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit(code: int) -> NoReturn:
    """Ends this process as an interpreter does: threads, atexit, modules, C's exit."""
    if code < 0:  # after Ctrl-C, the parent must see the signal as the status
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    ctypes.pythonapi.Py_Exit(code & 0xFF)
    raise AssertionError("Py_Exit has returned")


# -- the server ------------------------------------------------------------------------

_Popen = subprocess.Popen
_environment: dict[str, str] = {}
_path: list[str] = []


class Server:
    """Starts programs by requests that arrive over a socket with the descriptors."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, self._start_program)
        self._serving = True

    def run(self) -> None:
        """Serves until the other end is closed."""
        while self._serving:
            for key, _ in self._selector.select():
                key.data()

    def _start_program(self) -> None:
        text, fds, _, _ = socket.recv_fds(self._orders, 4 * ROOM, 4)
        if not text:
            self._serving = False
            return
        order, answers = json.loads(text), socket.socket(fileno=fds[3])
        try:
            process = ForkingPopen(
                order["words"], env=order["env"], cwd=order["cwd"], stdin=fds[0],
                stdout=fds[1], stderr=fds[2], start_new_session=order["session"],
            )  # fmt: skip
        except OSError as error:
            answers.send(json.dumps({"error": str(error)}).encode())
            answers.close()
            return
        finally:
            for fd in fds[:3]:
                os.close(fd)
        answers.send(json.dumps({"pid": process.pid}).encode())
        alive = os.pidfd_open(process.pid)

        def ended() -> None:
            self._selector.unregister(alive)
            os.close(alive)
            with contextlib.suppress(OSError):  # the client no longer waits
                answers.send(json.dumps({"code": process.wait()}).encode())
            answers.close()

        self._selector.register(alive, selectors.EVENT_READ, ended)


def main(orders: int, modules: Sequence[str]) -> None:
    """Imports `modules` and serves."""
    _environment.update(os.environ)
    del _environment[ROOM_VARIABLE]
    _path[:] = sys.path
    _set_environment_and_name(sys.argv[:-1], _environment)
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"an import of {modules} has started a thread")
    subprocess.Popen = ForkingPopen  # type: ignore[assignment,misc]
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork would write to, and copy, all pages
    Server(socket.socket(fileno=orders)).run()
    os._exit(0)


if __name__ == "__main__":
    _this = sys.modules["__main__"]  # keep this module; forks replace the entry
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
