"""TensorFlow's C interface for kernels, as a table of functions. Nothing is compiled.

The functions are declared in tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h, which
TensorFlow keeps stable for plug-ins of other projects. ctypes finds the functions in
the library that the program's TensorFlow has loaded. Contexts, statuses and tensors are
addresses in this module.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf

from ringjax import _native
from ringjax.eager import dtypes

CFunction: TypeAlias = Callable[..., Any]
"""A function of the library. The type of its result depends on the function."""

Address = ctypes.c_void_p
CREATE = ctypes.CFUNCTYPE(Address, Address)
COMPUTE = ctypes.CFUNCTYPE(None, Address, Address)
COMPUTE_ASYNC = ctypes.CFUNCTYPE(None, Address, Address, Address)

OK = 0


class StringView(ctypes.Structure):
    """TF_StringView: characters that TensorFlow owns."""

    _fields_ = (("data", ctypes.c_void_p), ("length", ctypes.c_size_t))

    def __str__(self) -> str:
        return ctypes.string_at(self.data, self.length).decode()


INT32, INT64 = int(tf.int32.as_datatype_enum), int(tf.int64.as_datatype_enum)
RESOURCE = int(tf.resource.as_datatype_enum)

CORE_DTYPES = {
    int(tf.as_dtype(name).as_datatype_enum): number
    for name, number in dtypes.NUMBERS.items()
}
"""The core's number of an element type, by TensorFlow's number."""

_ITEM_SIZES = {
    int(tf.as_dtype(name).as_datatype_enum): tf.as_dtype(name).size
    for name in dtypes.NUMBERS
}

_FOLDER = Path(tf.sysconfig.get_lib())
library = ctypes.CDLL(str(next(_FOLDER.glob("libtensorflow_framework.*"))))


def _function(name: str, result: Any, *arguments: Any) -> CFunction:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


_text, _int, _long = ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
_longs = ctypes.POINTER(ctypes.c_int64)
_int32s = ctypes.POINTER(ctypes.c_int32)

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
# TF_ShapeInferenceContextSetUnknownShape has the signature of a shape function.
unknown_shapes = ctypes.cast(library.TF_ShapeInferenceContextSetUnknownShape, Address)
register_op = _function("TF_RegisterOpDefinition", None, Address, Address)

new_kernel = _function(
    "TF_NewKernelBuilder", Address, _text, _text, CREATE, COMPUTE, Address
)
new_async_kernel = _function(
    "TF_NewAsyncKernelBuilder", Address, _text, _text, CREATE, COMPUTE_ASYNC, Address
)
run_done = _function("TF_RunAsyncOpKernelDoneCallback", None, Address)
register_kernel = _function("TF_RegisterKernelBuilder", None, _text, Address, Address)
attribute_size = _function(
    "TF_OpKernelConstruction_GetAttrSize",
    None,
    Address,
    _text,
    _int32s,
    _int32s,
    Address,
)
attribute_text = _function(
    "TF_OpKernelConstruction_GetAttrString",
    None,
    Address,
    _text,
    _text,
    ctypes.c_size_t,
    Address,
)
node_name = _function("TF_OpKernelConstruction_GetName", StringView, Address)
fail_construction = _function("TF_OpKernelConstruction_Failure", None, Address, Address)
fail = _function("TF_OpKernelContext_Failure", None, Address, Address)
count_inputs = _function("TF_NumInputs", _int, Address)
iteration_of = _function("TF_GetIterId", _long, Address)
frame_of = _function("TF_GetFrameId", ctypes.c_uint64, Address)

new_tensor = _function(
    "TF_AllocateTensor", Address, _int, _longs, _int, ctypes.c_size_t
)
delete_tensor = _function("TF_DeleteTensor", None, Address)
type_of = _function("TF_TensorType", _int, Address)
bytes_of = _function("TF_TensorByteSize", ctypes.c_size_t, Address)
data_of = _function("TF_TensorData", Address, Address)

_TENSOR_FUNCTIONS = """
    NewStatus DeleteStatus GetCode Message GetInput SetOutput AllocateTensor
    DeleteTensor TensorType NumDims Dim TensorByteSize TensorData
"""
tensors = _native.TensorInterface(
    {
        f"TF_{name}": ctypes.cast(library[f"TF_{name}"], Address).value or 0
        for name in _TENSOR_FUNCTIONS.split()
    }
)
"""Handles all tensors of a node in one call into the core.

ctypes takes about 20 microseconds for each tensor.
"""


class CApiError(Exception):
    """A function of TensorFlow's C interface has failed."""


class CApiStatus:
    """A TF_Status for one call: the `with` block raises if the call has failed."""

    def __init__(self) -> None:
        self.address: Any = new_status()

    def __enter__(self) -> Any:
        return self.address

    def __exit__(self, kind: object, *_: object) -> None:
        code, text = get_code(self.address), get_message(self.address)
        delete_status(self.address)
        if code != OK and kind is None:
            raise CApiError(text.decode(errors="replace"))


def allocate(dtype: int, dims: Sequence[int]) -> int:
    """Returns a new, uninitialised tensor; the caller calls `delete_tensor`."""
    size = math.prod(dims) * _ITEM_SIZES[dtype]
    tensor: int | None = new_tensor(dtype, (_long * len(dims))(*dims), len(dims), size)
    if tensor is None:
        raise MemoryError(f"TensorFlow has no {size} bytes for a tensor")
    return tensor


def put_scalar(context: int, index: int, dtype: int, number: int) -> None:
    """Sets an output to a scalar; `dtype` is INT32 or INT64."""
    tensor = allocate(dtype, ())
    kind = ctypes.c_int32 if dtype == INT32 else _long
    kind.from_address(data_of(tensor)).value = number
    tensors.put(context, index, [tensor])


def take_scalar(tensor: int) -> int:
    """Returns the value of an int64 scalar and frees the tensor."""
    value: int = _long.from_address(data_of(tensor)).value
    delete_tensor(tensor)
    return value


def put_handle(context: int, index: int, handle: bytes) -> None:
    """Sets an output to a resource whose handle TensorFlow has serialized."""
    tensor = new_tensor(RESOURCE, None, 0, len(handle))
    ctypes.memmove(data_of(tensor), handle, len(handle))
    tensors.put(context, index, [tensor])


def read_attribute(construction: int, attribute: bytes) -> str:
    """Returns a string attribute of the node whose kernel is being made."""
    length, total = ctypes.c_int32(), ctypes.c_int32()
    with CApiStatus() as status:
        attribute_size(construction, attribute, length, total, status)
    text = ctypes.create_string_buffer(total.value + 1)
    with CApiStatus() as status:
        attribute_text(construction, attribute, text, total.value + 1, status)
    return text.value.decode()
