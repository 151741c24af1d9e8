"""Interpreted kernels that touch nothing but their arguments: what compute-sanitizer is to a GPU.

`with checked():` every load and store that a mask lets through must lie inside one of the tensors
that the kernel was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

_BUILDER, _GRID = interpreter.InterpreterBuilder, interpreter.GridExecutor


class OutOfBounds(Exception):
    pass


@contextmanager
def checked() -> Iterator[None]:
    given: list[tuple[int, int]] = []
    load, store = _BUILDER.create_masked_load, _BUILDER.create_masked_store
    to_host = _GRID._init_args_hst

    def remember(self: Any, args: Any, kwargs: Any) -> Any:
        found = to_host(self, args, kwargs)
        tensors = [x for x in (*found[0], *found[1].values()) if isinstance(x, torch.Tensor)]
        given[:] = [(x.data_ptr(), x.data_ptr() + _extent(x)) for x in tensors]
        return found

    def check(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        # Those of descriptors come as they are.
        mask = mask if isinstance(mask, np.ndarray) else mask.data
        active = np.broadcast_to(mask.astype(bool), pointers.data.shape)
        at = pointers.data[active].astype(np.int64)
        inside = np.zeros(at.shape, bool)
        for start, end in given:
            inside |= (at >= start) & (at + size <= end)
        if not inside.all():
            raise OutOfBounds(f"{(~inside).sum()} of {at.size} accesses hit none of the tensors")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(_GRID, "_init_args_hst", remember),
        mock.patch.object(_BUILDER, "create_masked_load", checked_load),
        mock.patch.object(_BUILDER, "create_masked_store", checked_store),
    ):
        yield


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not x.numel():
        return 0
    steps = zip(x.shape, x.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * x.element_size()
