"""Triton's interpreter, repaired where it stands in the way. Import this before running kernels.

Its scalars are arrays of one element, which NumPy 2.4 no longer turns into an int: so loops would
have no bounds. And it keeps bfloat16 as bit patterns, which it would multiply as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _widened(handle: Any) -> Any:
    if handle.dtype != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _create_dot(self, _widened(a), _widened(b), *rest)


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpreterBuilder.create_dot = _dot_of_floats
