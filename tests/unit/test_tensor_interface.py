"""Tests of `_native.TensorInterface` with a fake of TensorFlow's C functions.

The fake lets calls fail. Tests of graphs use TensorFlow's real functions.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from ringjax import _native

_P, _I, _L, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
DIMS = (2, 3)
STATUS = 1


def _snake(name: str) -> str:
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


class FakeTensorFlow:
    """A fake of TensorFlow's C API. Tensors are numbers; `alive` has all that exist."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.code = 0
        self.fails_at = self.made = -1
        self.outputs: dict[int, int] = {}
        self._text = ctypes.create_string_buffer(b"no such thing")
        signatures: dict[str, tuple[Any, ...]] = {
            "NewStatus": (_P,),
            "DeleteStatus": (None, _P),
            "GetCode": (_I, _P),
            "Message": (_P, _P),
            "GetInput": (None, _P, _I, ctypes.POINTER(_P), _P),
            "SetOutput": (None, _P, _I, _P, _P),
            "AllocateTensor": (_P, _I, ctypes.POINTER(_L), _I, _S),
            "DeleteTensor": (None, _P),
            "TensorType": (_I, _P),
            "NumDims": (_I, _P),
            "Dim": (_L, _P, _I),
            "TensorByteSize": (_S, _P),
            "TensorData": (_P, _P),
        }
        self._keep = {
            name: ctypes.CFUNCTYPE(*types)(getattr(self, _snake(name)))
            for name, types in signatures.items()
        }
        self.interface = _native.TensorInterface(
            {f"TF_{k}": ctypes.cast(f, _P).value or 0 for k, f in self._keep.items()}
        )

    def _new(self) -> int:
        self.made += 1
        if self.made == self.fails_at:
            self.code = 3
            return 0
        self.alive.add(100 + self.made)
        return 100 + self.made

    def new_status(self) -> int:
        self.code = 0
        return STATUS

    def delete_status(self, status: int) -> None:
        assert status == STATUS

    def get_code(self, status: int) -> int:
        assert status == STATUS
        return self.code

    def message(self, status: int) -> int:
        return ctypes.addressof(self._text)

    def get_input(self, context: int, i: int, to: Any, status: int) -> None:
        assert context == 7
        to[0] = self._new()

    def set_output(self, context: int, i: int, tensor: int, status: int) -> None:
        assert tensor in self.alive
        self.outputs[i] = tensor
        self.code = 3 if i == self.fails_at else 0

    def allocate_tensor(self, dtype: int, dims: Any, rank: int, size: int) -> int:
        assert (dtype, tuple(dims[:rank]), size) == (1, DIMS, 24)
        return self._new()

    def delete_tensor(self, tensor: int) -> None:
        self.alive.remove(tensor)

    def tensor_type(self, tensor: int) -> int:
        return 1

    def num_dims(self, tensor: int) -> int:
        return len(DIMS)

    def dim(self, tensor: int, i: int) -> int:
        return DIMS[i]

    def tensor_byte_size(self, tensor: int) -> int:
        return 24

    def tensor_data(self, tensor: int) -> int:
        return 1000 * tensor


@pytest.fixture
def fake() -> FakeTensorFlow:
    return FakeTensorFlow()


def test_tensors_are_created_and_deleted(fake: FakeTensorFlow) -> None:
    tensors = fake.interface.inputs(7, 2)
    assert tensors == [100, 101] == sorted(fake.alive)
    assert fake.interface.describe(tensors) == [(100000, 1, DIMS), (101000, 1, DIMS)]
    made = fake.interface.allocate_like(tensors)
    assert made == [102, 103]
    fake.interface.put(7, 4, made)
    assert fake.outputs == {4: 102, 5: 103} and sorted(fake.alive) == tensors
    fake.interface.delete(tensors)
    assert not fake.alive and fake.interface.inputs(7, 0) == []


def test_a_failed_input_deletes_all_tensors(fake: FakeTensorFlow) -> None:
    fake.fails_at = 1
    with pytest.raises(RuntimeError, match="no such thing"):
        fake.interface.inputs(7, 3)
    assert not fake.alive and fake.made == 1


def test_a_failed_allocation_deletes_its_tensors(fake: FakeTensorFlow) -> None:
    tensors = fake.interface.inputs(7, 2)
    fake.fails_at = 3
    with pytest.raises(MemoryError):
        fake.interface.allocate_like(tensors)
    assert sorted(fake.alive) == tensors


def test_a_failed_output_deletes_all_tensors(fake: FakeTensorFlow) -> None:
    made = fake.interface.inputs(7, 3)
    fake.fails_at = 1
    with pytest.raises(RuntimeError, match="no such thing"):
        fake.interface.put(7, 0, made)
    assert not fake.alive and sorted(fake.outputs) == [0, 1]


def test_a_missing_function_is_named() -> None:
    with pytest.raises(KeyError, match="TF_NewStatus"):
        _native.TensorInterface({})
