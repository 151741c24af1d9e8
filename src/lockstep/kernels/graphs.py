"""Tensors that CUDA graphs have the addresses of.

What a call allocates while a graph is captured belongs to the graph. What a prepared call has made
before does not, and the call cache may forget the call while the graph lives on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# By address. Nothing tells when a graph is gone.
_CAPTURED: dict[int, Tensor] = {}


def keep_if_captured(tensors: Iterable[Tensor]) -> None:
    """Keeps these tensors for good if the current stream is being captured."""
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.update((x.data_ptr(), x) for x in tensors)
