"""Triton's interpreter, made to work with NumPy 2.4: its scalars are arrays of one element.

NumPy no longer turns such an array into an int, which is how the interpreter reads the bounds of a
loop. Importing this module repairs that.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_and_index
