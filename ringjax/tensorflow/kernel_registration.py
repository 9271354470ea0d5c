"""Registers TensorFlow operations whose kernels are Python functions.

An asynchronous kernel returns before its operation has ended, so the operation occupies
no thread of TensorFlow. The kernel reports the end later through a
`KernelDoneCallback`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from ringjax.tensorflow import c_api
from ringjax.tensorflow.failures import error_code_of

S = TypeVar("S")

_Words = ctypes.c_void_p * 4
_MANAGER, _INVOKER = 2, 3
_DESTROY = 3  # the operation of the manager that destroys a held function
_Manager = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
)
_dladdr = ctypes.CDLL(None).dladdr
_dladdr.argtypes = ctypes.c_void_p, _Words  # a Dl_info has four words, too

# TensorFlow keeps the addresses of these callbacks until the process ends.
_registered_callbacks: list[tuple[object, object]] = []


class KernelDoneCallback:
    """The callback by which an asynchronous kernel reports that it has ended.

    TensorFlow 2.21 passes a kernel the address of a `std::function`, and destroys this
    function as soon as the kernel returns. The constructor therefore moves the function
    away, exactly as libstdc++'s move constructor does: it copies the four words and
    clears the manager in the original, so that TensorFlow destroys nothing. The words
    are the held object (two), the function that copies and destroys that object
    (manager), and the function that calls the object (invoker).

    Attributes:
        outlives_kernel: True if the callback may run after the kernel has returned.
            False if the words do not look like libstdc++'s. Then the function stays
            where it is, and the kernel must call it before the kernel returns.
    """

    def __init__(
        self, address: int, run: Callable[[int], object] = c_api.run_done
    ) -> None:
        self._run = run
        original = _Words.from_address(address)
        # Manager and invoker must be addresses of functions, whose library dladdr
        # finds.
        self.outlives_kernel = all(
            _dladdr(original[i], _Words()) for i in (_MANAGER, _INVOKER)
        )
        if self.outlives_kernel:
            self._words = _Words(*original)
            original[_MANAGER] = None
        else:
            self._words = original

    def __call__(self) -> None:
        """Makes the graph continue; must be called once."""
        address = ctypes.addressof(self._words)
        self._run(address)
        if self.outlives_kernel:
            _Manager(self._words[_MANAGER] or 0)(address, address, _DESTROY)


class AsyncKernelRun:
    """One execution of an asynchronous kernel that has not ended yet.

    Attributes:
        context: TensorFlow's TF_OpKernelContext.
        outlives_kernel: whether `end` may be called after the kernel has returned.
    """

    def __init__(self, context: int, done: KernelDoneCallback) -> None:
        self.context = context
        self.outlives_kernel = done.outlives_kernel
        self._done = done

    def end(self, put_outputs: Callable[[], None]) -> None:
        """Calls `put_outputs` and ends the execution; call this method once.

        If `put_outputs` raises an exception, the execution fails with it.
        """
        try:
            put_outputs()
        except BaseException as error:
            _fail(c_api.fail, self.context, error)
        self._done()


def register_op(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    create: Callable[[str, str], S],
    compute: Callable[[S, int], None],
) -> None:
    """Registers a stateful operation and its kernel for CPUs, for the whole process.

    Args:
        name: the name of the operation. The operation has an attribute `call`, a text.
        inputs, outputs: specifications as in TensorFlow's own definitions; N and M are
            numbers of tensors, T is a list of dtypes.
        create: makes the state of a node from its `call` and the node's name.
        compute: runs a node with that state and the TF_OpKernelContext.
    """
    states: list[S] = []

    def run(index: int | None, context: int) -> None:
        try:
            compute(states[index or 0], context)
        except BaseException as error:
            _fail(c_api.fail, context, error)

    callbacks = _creator(states, create), c_api.COMPUTE(run)
    _register(name, inputs, outputs, c_api.new_kernel, callbacks)


def register_async_op(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    create: Callable[[str, str], S],
    compute: Callable[[S, AsyncKernelRun], None],
) -> None:
    """Registers as `register_op` does, but a running node occupies no thread.

    `compute` starts a node, and ensures that `AsyncKernelRun.end` is called once. If
    `compute` raises an exception, the execution fails with it.
    """
    states: list[S] = []

    def run(index: int | None, context: int, done: int) -> None:
        execution = AsyncKernelRun(context, KernelDoneCallback(done))
        try:
            compute(states[index or 0], execution)
        except BaseException as error:
            execution.end(functools.partial(_raise, error))

    callbacks = _creator(states, create), c_api.COMPUTE_ASYNC(run)
    _register(name, inputs, outputs, c_api.new_async_kernel, callbacks)


def _creator(states: list[S], create: Callable[[str, str], S]) -> object:
    """Makes the callback by which TensorFlow creates the kernel of a node.

    The kernel is an index into `states`, so one node in several graphs has one state.
    """

    @functools.cache
    def index_of(call: str, node: str) -> int:
        states.append(create(call, node))
        return len(states) - 1

    def make(construction: int) -> int:
        try:
            call = c_api.read_attribute(construction, b"call")
            return index_of(call, str(c_api.node_name(construction)))
        except BaseException as error:
            _fail(c_api.fail_construction, construction, error)
            return 0

    return c_api.CREATE(make)


def _register(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    new_kernel: Callable[..., int],
    callbacks: tuple[object, object],
) -> None:
    _define(name, inputs, outputs)
    _registered_callbacks.append(callbacks)
    # The last argument would be a function that deletes a kernel. It stays None,
    # because TensorFlow still deletes kernels after Python's interpreter has ended.
    builder = new_kernel(name.encode(), b"CPU", *callbacks, None)
    with c_api.CApiStatus() as status:
        c_api.register_kernel(name.encode(), builder, status)


def _define(name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    builder = c_api.new_op(name.encode())
    c_api.add_attribute(builder, b"call: string")
    for attribute, kind in (
        ("N", "int >= 0"),
        ("M", "int >= 0"),
        ("T", "list(type) >= 0"),
    ):
        if any(attribute in spec for spec in (*inputs, *outputs)):
            c_api.add_attribute(builder, f"{attribute}: {kind}".encode())
    for spec in inputs:
        c_api.add_input(builder, spec.encode())
    for spec in outputs:
        c_api.add_output(builder, spec.encode())
    c_api.set_stateful(builder, True)
    c_api.set_shape_function(builder, c_api.unknown_shapes)
    with c_api.CApiStatus() as status:
        c_api.register_op(builder, status)


def _fail(
    report: Callable[[int, int], None], address: int, error: BaseException
) -> None:
    status = c_api.new_status()
    c_api.set_status(status, error_code_of(error), str(error).encode())
    report(address, status)
    c_api.delete_status(status)


def _raise(error: BaseException) -> None:
    raise error
