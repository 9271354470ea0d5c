"""Registers ringjax's XLA handlers with the XLA inside of TensorFlow.

JAX calls these handlers, too. TensorFlow contains its own XLA, whose handler interface
is older, and exports XLA_FFI_GetApi. When a handler is registered, the handler reports
the version of the interface for which it was compiled, and XLA refuses a newer version
than its own. Each handler is therefore registered behind a small function that reports
XLA's own version. The handlers use nothing that the older version lacks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from ringjax import _native, errors
from ringjax.tensorflow.c_api import library

_Pointer = ctypes.c_void_p
_METADATA = 1  # XLA_FFI_Extension_Metadata
_MIN_API, _MAX_API = (0, 1), (0, 3)  # versions that have the structures below


class _Header(ctypes.Structure):
    """The first fields of most structures of the interface."""

    _fields_: ClassVar[Sequence[tuple[str, type[Any]]]] = (
        ("struct_size", ctypes.c_size_t),
        ("extension", _Pointer),
    )


class _ApiVersion(_Header):
    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Api(_Header):
    _fields_ = (
        ("version", _ApiVersion),
        ("internal", _Pointer),
        ("create_error", _Pointer),
        ("get_message", _Pointer),
        ("destroy_error", _Pointer),
        ("register", _Pointer),
    )


class _StringView(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("length", ctypes.c_size_t))


class _HandlerRegistration(_Header):
    _fields_ = (
        ("name", _StringView),
        ("platform", _StringView),
        ("instantiate", _Pointer),
        ("prepare", _Pointer),
        ("initialize", _Pointer),
        ("execute", _Pointer),
        ("traits", ctypes.c_uint32),
    )


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", _Pointer),
        ("metadata", _Pointer),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _ApiVersion))


_HANDLER = ctypes.CFUNCTYPE(_Pointer, _Pointer)
# XLA keeps the addresses of these functions for the rest of the process.
_registered_handlers: list[tuple[object, object]] = []


@functools.cache
def ensure_registered() -> None:
    """Registers the handlers, once in a process."""
    try:
        get = library.XLA_FFI_GetApi
    except AttributeError:
        raise _unsupported("it does not export XLA_FFI_GetApi") from None
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
        registration = _HandlerRegistration(
            struct_size=ctypes.sizeof(_HandlerRegistration),
            name=_StringView(text, len(text)),
            platform=_StringView(b"Host", 4),
            execute=ctypes.cast(handler, _Pointer),
        )
        if register(registration):
            raise _unsupported(f"its XLA refuses the handler {name}")


def _unsupported(reason: str) -> errors.RingjaxError:
    return errors.RingjaxError(
        f"ringjax: TensorFlow {tf.__version__} cannot compile collectives with XLA: "
        f"{reason}; use tf.function without jit_compile=True"
    )


def _with_api_version(address: int, minor: int) -> ctypes._FuncPointer:
    """Makes a handler that reports at most version 0.`minor`."""
    handler = _HANDLER(address)

    def call(frame: int) -> int | None:
        error: int | None = handler(frame)
        extension = _Header.from_address(frame).extension
        if extension:
            request = _Extension.from_address(extension)
            if request.kind == _METADATA:
                version = _Metadata.from_address(request.metadata).version
                version.minor = min(version.minor, minor)
        return error

    versioned = _HANDLER(call)
    _registered_handlers.append((handler, versioned))
    return versioned


def _capsule_address(capsule: object) -> int:
    python = ctypes.pythonapi
    name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
        ("PyCapsule_GetName", python)
    )
    pointer = ctypes.PYFUNCTYPE(_Pointer, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", python)
    )
    address: int = pointer(capsule, name(capsule))
    return address
