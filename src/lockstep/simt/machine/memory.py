"""Arrays of the three memory spaces: addresses, bounds, data."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.simt import ir
from lockstep.simt.types import Scalar, bfloat16, float16

from .addresses import row_major
from .frames import Lanes
from .hazards.global_shadow import GlobalShadow
from .hazards.shadow import SharedShadow
from .values import NUMPY, Value, bfloat_bits, from_bfloat_bits


class GlobalArray:
    """A global array: a flat view of the caller's memory and where a GPU would see it."""

    space = "global"

    def __init__(self, array: ir.Array, host: np.ndarray, address: int):
        assert isinstance(array.dtype, Scalar)
        self.name, self.dtype = array.name, array.dtype
        self.item = array.dtype.size
        self.shape = host.shape
        self.strides = tuple(s // self.item for s in host.strides)
        spans = zip(host.shape, self.strides, strict=True)
        self.size = 1 + sum((n - 1) * s for n, s in spans) if host.size else 0
        self.flat = np.lib.stride_tricks.as_strided(host, (self.size,), (self.item,))
        self.address = address
        self.shadow: GlobalShadow | None = None
        self.shadow_start = 0

    def element(self, number: int) -> str:
        """An element of the memory, by number, as the kernel would write it."""
        number -= self.shadow_start
        index = []
        for stride in self.strides:
            index.append(number // stride if stride else 0)
            number -= index[-1] * stride
        return f"{self.name}[{', '.join(map(str, index))}]"

    def gather(self, address: Value, lanes: Lanes) -> Value:
        raw = self.flat.take(address) if isinstance(address, np.ndarray) else self.flat[address]
        if isinstance(address, np.ndarray):
            if self.dtype == bfloat16:
                return from_bfloat_bits(raw)
            return raw.astype(np.float32) if self.dtype == float16 else raw
        if self.dtype == bfloat16:
            return from_bfloat_bits(np.array([raw]))[0]
        return np.float32(raw) if self.dtype.is_float else raw.item()

    def scatter(self, address: Value, value: Value, lanes: Lanes) -> None:
        if not isinstance(address, np.ndarray):
            address = np.full((1, 1), address)
        value = np.asarray(value, NUMPY[self.dtype])
        if value.ndim == 0:
            value = value.reshape(1, 1)
        address, value = np.broadcast_arrays(address, value)
        self.flat[address] = bfloat_bits(value) if self.dtype == bfloat16 else value


class SharedArray:
    """A shared array: data [elements, blocks]."""

    space = "shared"

    def __init__(
        self, name: str, dtype: Scalar, shape: tuple[int, ...], base: int, shadow: SharedShadow
    ):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.item = dtype.size
        self.strides = row_major(shape)
        self.size = int(np.prod(shape))
        self.base = base  # byte
        self.shadow = shadow
        self.blocks = shadow.block_numbers.size
        self.data = np.zeros((self.size, self.blocks), NUMPY[dtype])
        self.valid = np.zeros((self.size, 1), bool)
        self.all_valid = False
        self.pending: np.ndarray | None = None  # asynchronous copies: see `pipeline`
        self.static = True

    def gather(self, address: Value, lanes: Lanes) -> Value:
        return gather(self.data, address, lanes)

    def gather_vector(self, address: Value, lanes: Lanes, width: int) -> tuple[Value, ...]:
        """`width` neighbouring elements from `address` on."""
        alike = isinstance(address, np.ndarray) and address.shape[1] == 1
        if alike and lanes.all_blocks and not lanes.flat:
            places = address[:, 0] + np.arange(width)[:, None]  # [width, threads]
            return tuple(self.data.take(place, axis=0) for place in places)
        return tuple(self.gather(address + k, lanes) for k in range(width))

    def scatter(self, address: Value, value: Value, lanes: Lanes) -> None:
        scatter(self.data, address, value, lanes)

    def _valid_index(self, address: Value, lanes: Lanes) -> tuple:
        varies = isinstance(address, np.ndarray) and address.shape[1] != 1
        if (lanes.flat or not lanes.all_blocks or varies) and self.valid.shape[1] != self.blocks:
            self.valid = np.repeat(self.valid, self.blocks, axis=1)
        if self.valid.shape[1] == 1 and not varies and not lanes.flat:
            return (address[:, 0] if isinstance(address, np.ndarray) else address), 0
        return address, lanes.column

    def mark_valid(self, address: Value, lanes: Lanes) -> None:
        if not self.all_valid:
            index = self._valid_index(address, lanes)  # may replace self.valid
            self.valid[index] = True

    def first_invalid(self, address: Value, lanes: Lanes) -> np.ndarray | None:
        """The lanes that read an element never written; None if there are none."""
        if self.all_valid:
            return None
        index = self._valid_index(address, lanes)
        valid = self.valid[index]
        if np.all(valid):
            return None
        bad = ~np.atleast_1d(valid)
        return bad[:, None] if bad.ndim == 1 else bad

    def all_met(self) -> None:
        """After a barrier of all blocks: narrow what has become the same everywhere."""
        self.shadow.all_met()
        if not self.all_valid:
            everywhere = self.valid.all(axis=1)
            self.all_valid = bool(everywhere.all())
            if self.valid.shape[1] != 1 and np.array_equal(everywhere, self.valid.any(axis=1)):
                self.valid = everywhere[:, None].copy()


class LocalArray:
    """A local array of every thread: data [elements, threads, blocks]."""

    space = "local"

    def __init__(self, array: ir.Array, threads: int, blocks: int):
        assert array.shape is not None
        assert isinstance(array.dtype, Scalar)
        self.name, self.dtype, self.shape = array.name, array.dtype, array.shape
        self.item = array.dtype.size
        self.strides = row_major(self.shape)
        self.size = array.size
        self.data = np.zeros((self.size, threads, blocks), NUMPY[array.dtype])
        self.valid = np.zeros((self.size, threads, blocks), bool)

    def index(self, address: Value, lanes: Lanes) -> tuple:
        return address, lanes.threads[:, None], lanes.column

    def gather(self, address: Value, lanes: Lanes) -> Value:
        return self.data[self.index(address, lanes)]

    def scatter(self, address: Value, value: Value, lanes: Lanes) -> None:
        index = self.index(address, lanes)
        self.data[index] = value
        self.valid[index] = True

    def first_invalid(self, address: Value, lanes: Lanes) -> np.ndarray | None:
        valid = self.valid[self.index(address, lanes)]
        return None if valid.all() else ~valid


Memory = GlobalArray | SharedArray | LocalArray


def gather(data: np.ndarray, address: Value, lanes: Lanes) -> Value:
    """Elements of `data` [elements, blocks] at an address of any broadcast shape."""
    if not isinstance(address, np.ndarray):
        if lanes.flat:
            return data[address, lanes.blocks][:, None]
        return data[address][None].copy() if lanes.all_blocks else data[address, lanes.blocks][None]
    if not lanes.flat and address.shape[1] == 1:
        if lanes.all_blocks:
            return data.take(address[:, 0], axis=0)
        return data[address, lanes.blocks[None, :]]
    return data.reshape(-1).take(address.astype(np.int64) * data.shape[1] + lanes.column)


def scatter(data: np.ndarray, address: Value, value: Value, lanes: Lanes) -> None:
    """Store; where several lanes hit one element, the last of them wins."""
    if not isinstance(address, np.ndarray):
        if isinstance(value, np.ndarray):
            value = value[-1] if not lanes.flat else value[:, 0]
        data[address, slice(None) if lanes.all_blocks and not lanes.flat else lanes.blocks] = value
    elif not lanes.flat and address.shape[1] == 1 and lanes.all_blocks:
        data[address[:, 0]] = value
    else:
        data[address, lanes.column] = value


def host_array(value: Any, name: str, dtype: Scalar) -> tuple[np.ndarray, int]:
    """NumPy view of an argument, and its byte offset in the allocation it belongs to."""
    if hasattr(value, "untyped_storage"):  # a torch tensor
        if value.device.type != "cpu":
            raise TypeError(f"'{name}' is on {value.device}; the machine takes host memory")
        offset = value.storage_offset() * value.element_size()
        tensor = value.detach()
        if dtype == bfloat16:
            import torch

            tensor = tensor.view(torch.uint16)
        return tensor.numpy(), offset
    array = np.asarray(value)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    if any(s < 0 or s % array.itemsize for s in array.strides):
        raise ValueError(f"'{name}' has strides {array.strides}: they must be whole elements, >= 0")
    return array, offset


def check_extent(array: GlobalArray) -> None:
    if array.size >= 2**31:
        raise ValueError(f"'{array.name}' spans {array.size} elements; int32 indices end at 2**31")
