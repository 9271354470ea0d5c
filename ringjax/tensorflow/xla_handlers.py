"""ringjax's XLA handlers, for the XLA inside of TensorFlow.

The handlers are those that JAX calls. TensorFlow has an XLA of its own, with the same
interface in an older version, which it lets others have (XLA_FFI_GetApi). A handler
says when it is registered which version it was built for, and a newer one than XLA's is
refused; so what is registered here is a small function that says XLA's own version, and
calls the handler, which uses nothing that the older version lacks.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import tensorflow as tf

from ringjax import _native, errors
from ringjax.tensorflow.c_api import library

_Pointer = ctypes.c_void_p
_METADATA = 1  # XLA_FFI_Extension_Metadata
_MIN_API, _MAX_API = (0, 1), (0, 3)  # versions whose structures are these


class _ApiVersion(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("extension", _Pointer)),
        *(("major", ctypes.c_int), ("minor", ctypes.c_int)),
    )


class _Api(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("extension", _Pointer)),
        *(("version", _ApiVersion), ("internal", _Pointer)),
        *(("create_error", _Pointer), ("get_message", _Pointer)),
        *(("destroy_error", _Pointer), ("register", _Pointer)),
    )


class _StringView(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("length", ctypes.c_size_t))


class _HandlerRegistration(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("extension", _Pointer)),
        *(("name", _StringView), ("platform", _StringView)),
        *(("instantiate", _Pointer), ("prepare", _Pointer)),
        *(("initialize", _Pointer), ("execute", _Pointer)),
        ("traits", ctypes.c_uint32),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", _Pointer))


class _Extension(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int)),
        *(("next", _Pointer), ("metadata", _Pointer)),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _ApiVersion))


_HANDLER = ctypes.CFUNCTYPE(_Pointer, _Pointer)
_kept_alive: list[Any] = []


@functools.cache
def ensure_registered() -> None:
    """Tells TensorFlow's XLA of the handlers, once.

    Raises:
        RingjaxError: this TensorFlow does not take them.
    """
    try:
        get = library.XLA_FFI_GetApi
    except AttributeError:
        raise _unsupported("it does not let others have XLA's interface") from None
    get.restype = _Pointer
    api = _Api.from_address(get())
    version = api.version.major, api.version.minor
    if not _MIN_API <= version <= _MAX_API:
        raise _unsupported(f"its XLA has interface {version[0]}.{version[1]}")
    register = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(_HandlerRegistration))(
        api.register
    )
    for name, capsule in _native.ffi_targets().items():
        text = name.encode()
        handler = _with_api_version(_capsule_address(capsule), api.version.minor)
        wanted = _HandlerRegistration(
            struct_size=ctypes.sizeof(_HandlerRegistration),
            name=_StringView(text, len(text)),
            platform=_StringView(b"Host", 4),
            execute=ctypes.cast(handler, _Pointer),
        )
        if register(wanted):
            raise _unsupported(f"its XLA does not take the handler {name}")


def _unsupported(why: str) -> errors.RingjaxError:
    return errors.RingjaxError(
        f"ringjax: TensorFlow {tf.__version__} cannot compile collectives with XLA: "
        f"{why}; use tf.function without jit_compile=True"
    )


def _with_api_version(handler: int, minor: int) -> Any:
    """The handler, as one that was built for version 0.`minor`."""
    call = _HANDLER(handler)

    def speak(frame: int) -> int | None:
        error: int | None = call(frame)
        extension = _CallFrame.from_address(frame).extension
        if extension:
            asked = _Extension.from_address(extension)
            if asked.kind == _METADATA:
                version = _Metadata.from_address(asked.metadata).version
                version.minor = min(version.minor, minor)
        return error

    spoken = _HANDLER(speak)
    _kept_alive.append((call, spoken))
    return spoken


def _capsule_address(capsule: Any) -> int:
    python = ctypes.pythonapi
    name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
        ("PyCapsule_GetName", python)
    )
    pointer = ctypes.PYFUNCTYPE(_Pointer, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", python)
    )
    found: int = pointer(capsule, name(capsule))
    return found
