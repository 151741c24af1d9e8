"""Exchanges on a stream of their own, so that a GPU computes while blocks are under way.

What is exchanged has to be there when the exchanges begin: `fork_streams` says when. From then on
they wait for no computation, and computation waits for them at `join_streams` alone. Memory that
is filled on the stream of the exchanges has to be allocated there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Run what is inside on the stream of the exchanges; on a CPU, nothing changes."""
    return torch.cuda.stream(_stream_of(device)) if device.type == "cuda" else nullcontext()


def fork_streams(*tensors: Tensor) -> None:
    """Let further exchanges of these tensors wait for what is on the current stream so far."""
    for x in filter(_is_cuda, tensors):
        _stream_of(x.device).wait_stream(torch.cuda.current_stream(x.device))
        x.record_stream(_stream_of(x.device))


def join_streams(*tensors: Tensor) -> None:
    """Let what comes on the current stream from now on wait for the exchanges that fill these
    tensors."""
    for x in filter(_is_cuda, tensors):
        current = torch.cuda.current_stream(x.device)
        current.wait_stream(_stream_of(x.device))
        x.record_stream(current)


def _is_cuda(x: Tensor) -> bool:
    return x.is_cuda
