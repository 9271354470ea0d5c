"""TensorFlow's C interface for kernels, as a table of functions: nothing is compiled.

The functions are those of tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h, which
TensorFlow keeps for plug-ins that were built elsewhere. They are looked up in the
library that the program's TensorFlow has loaded. What the kernels do is in kernels.py.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ringjax import _native
from ringjax.eager import dtypes
from ringjax.tensorflow.continuations import Continuation

Address = ctypes.c_void_p
CREATE = ctypes.CFUNCTYPE(Address, Address)
COMPUTE = ctypes.CFUNCTYPE(None, Address, Address)
COMPUTE_LATER = ctypes.CFUNCTYPE(None, Address, Address, Address)

OK = 0


class Text(ctypes.Structure):
    """Characters of TensorFlow's."""

    _fields_ = (("data", ctypes.c_void_p), ("length", ctypes.c_size_t))

    def __str__(self) -> str:
        return ctypes.string_at(self.data, self.length).decode()


INT32, INT64 = int(tf.int32.as_datatype_enum), int(tf.int64.as_datatype_enum)
RESOURCE = int(tf.resource.as_datatype_enum)

CORE_DTYPES = {
    int(tf.as_dtype(name).as_datatype_enum): number
    for name, number in dtypes.NUMBERS.items()
}
"""The core's number of an element type, by TensorFlow's."""

_WIDTHS = {
    int(tf.as_dtype(name).as_datatype_enum): tf.as_dtype(name).size
    for name in dtypes.NUMBERS
}

_FOLDER = Path(tf.sysconfig.get_lib())
library = ctypes.CDLL(str(next(_FOLDER.glob("libtensorflow_framework.*"))))


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


_text, _int, _long = ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
_longs = ctypes.POINTER(ctypes.c_int64)

new_status = _function("TF_NewStatus", Address)
delete_status = _function("TF_DeleteStatus", None, Address)
set_status = _function("TF_SetStatus", None, Address, _int, _text)
get_code = _function("TF_GetCode", _int, Address)
get_message = _function("TF_Message", _text, Address)

new_op = _function("TF_NewOpDefinitionBuilder", Address, _text)
add_attribute = _function("TF_OpDefinitionBuilderAddAttr", None, Address, _text)
add_input = _function("TF_OpDefinitionBuilderAddInput", None, Address, _text)
add_output = _function("TF_OpDefinitionBuilderAddOutput", None, Address, _text)
set_stateful = _function(
    "TF_OpDefinitionBuilderSetIsStateful", None, Address, ctypes.c_bool
)
set_shape_function = _function(
    "TF_OpDefinitionBuilderSetShapeInferenceFunction", None, Address, Address
)
# Has the signature of a shape function, and is given as one.
unknown_shapes = ctypes.cast(library.TF_ShapeInferenceContextSetUnknownShape, Address)
register_op = _function("TF_RegisterOpDefinition", None, Address, Address)

new_kernel = _function(
    "TF_NewKernelBuilder", Address, _text, _text, CREATE, COMPUTE, Address
)
new_later_kernel = _function(
    "TF_NewAsyncKernelBuilder", Address, _text, _text, CREATE, COMPUTE_LATER, Address
)
run_done = _function("TF_RunAsyncOpKernelDoneCallback", None, Address)
register_kernel = _function("TF_RegisterKernelBuilder", None, _text, Address, Address)
attribute_size = _function(
    *("TF_OpKernelConstruction_GetAttrSize", None, Address, _text),
    *(ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int32), Address),
)
attribute_text = _function(
    *("TF_OpKernelConstruction_GetAttrString", None, Address, _text, _text),
    *(ctypes.c_size_t, Address),
)
node_name = _function("TF_OpKernelConstruction_GetName", Text, Address)
fail_construction = _function("TF_OpKernelConstruction_Failure", None, Address, Address)
fail = _function("TF_OpKernelContext_Failure", None, Address, Address)
count_inputs = _function("TF_NumInputs", _int, Address)
turn_of = _function("TF_GetIterId", _long, Address)
frame_of = _function("TF_GetFrameId", ctypes.c_uint64, Address)

new_tensor = _function(
    "TF_AllocateTensor", Address, _int, _longs, _int, ctypes.c_size_t
)
delete_tensor = _function("TF_DeleteTensor", None, Address)
type_of = _function("TF_TensorType", _int, Address)
bytes_of = _function("TF_TensorByteSize", ctypes.c_size_t, Address)
data_of = _function("TF_TensorData", Address, Address)

tensors = _native.TensorInterface(
    {
        f"TF_{name}": ctypes.cast(getattr(library, f"TF_{name}"), Address).value or 0
        for name in (
            *("NewStatus", "DeleteStatus", "GetCode", "Message"),
            *("GetInput", "SetOutput", "AllocateTensor", "DeleteTensor"),
            *("TensorType", "NumDims", "Dim", "TensorByteSize", "TensorData"),
        )
    }
)
"""What is done with all tensors of a node at once."""


class Failed(Exception):
    """A function of TensorFlow's has failed."""


class Status:
    """A status to hand in, and a check of what came back."""

    def __init__(self) -> None:
        self.address = new_status()

    def __enter__(self) -> Address:
        address: Address = self.address
        return address

    def __exit__(self, kind: object, *_: object) -> None:
        code, text = get_code(self.address), get_message(self.address)
        delete_status(self.address)
        if code != OK and kind is None:
            raise Failed(text.decode(errors="replace"))


def allocate(dtype: int, dims: Sequence[int]) -> int:
    """A new tensor, uninitialised; give it to `delete_tensor`.

    Raises:
        MemoryError: there is no memory for it.
    """
    size = math.prod(dims) * _WIDTHS[dtype]
    tensor: int | None = new_tensor(dtype, (_long * len(dims))(*dims), len(dims), size)
    if tensor is None:
        raise MemoryError(f"TensorFlow has no {size} bytes for a tensor")
    return tensor


def put_number(context: int, index: int, dtype: int, number: int) -> None:
    """A scalar as an output; `dtype` is INT32 or INT64."""
    tensor = allocate(dtype, ())
    kind = ctypes.c_int32 if dtype == INT32 else _long
    kind.from_address(data_of(tensor)).value = number
    tensors.put(context, index, [tensor])


def number_of(tensor: int) -> int:
    """The value of an int64 scalar, which is let go."""
    value: int = _long.from_address(data_of(tensor)).value
    delete_tensor(tensor)
    return value


def put_handle(context: int, index: int, text: bytes) -> None:
    """The handle of a resource as an output, from how TensorFlow writes it."""
    tensor = new_tensor(RESOURCE, None, 0, len(text))
    ctypes.memmove(data_of(tensor), text, len(text))
    tensors.put(context, index, [tensor])


def read_text(construction: int, attribute: bytes) -> str:
    """An attribute of the node for which a kernel is made."""
    length, total = ctypes.c_int32(), ctypes.c_int32()
    with Status() as status:
        attribute_size(construction, attribute, length, total, status)
    text = ctypes.create_string_buffer(total.value + 1)
    with Status() as status:
        attribute_text(construction, attribute, text, total.value + 1, status)
    return text.value.decode()


def _define(name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    builder = new_op(name.encode())
    specs = [*inputs, *outputs]
    kinds = {"N": "int >= 0", "M": "int >= 0", "T": "list(type) >= 0"}
    add_attribute(builder, b"call: string")
    for attribute, kind in kinds.items():
        if any(attribute in spec for spec in specs):
            add_attribute(builder, f"{attribute}: {kind}".encode())
    for add, ends in ((add_input, inputs), (add_output, outputs)):
        for spec in ends:
            add(builder, spec.encode())
    set_stateful(builder, True)
    set_shape_function(builder, unknown_shapes)
    with Status() as status:
        register_op(builder, status)


class Node:
    """One execution of a node that ends later than its kernel returns.

    Args:
        context: TensorFlow's.
        tell: makes it fail with an exception.
        go_on: tells TensorFlow that it has ended.

    Attributes:
        context: as given.
        late: `end` may be called after the kernel has returned.
    """

    def __init__(
        self,
        context: int,
        tell: Callable[[BaseException], None],
        go_on: Continuation,
    ) -> None:
        self.context = context
        self.late = go_on.late
        self._tell, self._go_on = tell, go_on

    def end(self, put: Callable[[], None]) -> None:
        """Calls `put`, which sets the outputs or raises; to be called once."""
        try:
            put()
        except BaseException as error:
            self._tell(error)
        self._go_on()


def register(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    create: Callable[[str, str], Any],
    compute: Callable[[Any, Any], None],
    code_of: Callable[[BaseException], int],
    later: bool = False,
) -> None:
    """Makes a stateful operation and its kernel for CPUs, for ever.

    Args:
        name: of the operation. It has an attribute `call`, a text.
        inputs, outputs: as in TensorFlow's own definitions; N and M are numbers of
            tensors, T is a list of dtypes.
        create: makes what a node needs from its `call` and its name.
        compute: runs a node, with that and TensorFlow's context, or if `later` with a
            `Node`, whose `end` it sees to; if it raises, nobody calls `end`.
        code_of: TensorFlow's code for an exception that one of them has raised.
        later: nodes occupy no thread until they end.

    Raises:
        Failed: there is one of that name, or TensorFlow does not like it.
    """
    made: list[Any] = []

    @functools.cache
    def number_of(text: str, node: str) -> int:
        made.append(create(text, node))
        return len(made) - 1

    def tell(error: BaseException, where: int, fails: Any) -> None:
        status = new_status()
        set_status(status, code_of(error), str(error).encode())
        fails(where, status)
        delete_status(status)

    def make(construction: int) -> int:
        try:
            return number_of(
                read_text(construction, b"call"), str(node_name(construction))
            )
        except BaseException as error:
            tell(error, construction, fail_construction)
            return 0

    def run(number: int | None, context: int) -> None:
        try:
            compute(made[number or 0], context)
        except BaseException as error:
            tell(error, context, fail)

    def run_later(number: int | None, context: int, done: int) -> None:
        def fails(error: BaseException) -> None:
            tell(error, context, fail)

        node = Node(context, fails, Continuation(done, run_done))
        try:
            compute(made[number or 0], node)
        except BaseException as error:
            node.end(functools.partial(_raise, error))

    _define(name, inputs, outputs)
    create_, label = CREATE(make), name.encode()
    runs: Any = COMPUTE_LATER(run_later) if later else COMPUTE(run)
    _for_ever.append((create_, runs))
    # Nothing is done when a kernel goes: that may be after the interpreter's end.
    new = new_later_kernel if later else new_kernel
    builder = new(label, b"CPU", create_, runs, None)
    with Status() as status:
        register_kernel(label, builder, status)


def _raise(error: BaseException) -> None:
    raise error


_for_ever: list[Any] = []
