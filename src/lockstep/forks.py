"""Forked children, where OpenMP cannot be used again. Costs nothing to import.

OpenMP's threads do not survive a fork, and a child that waits for them hangs: in our kernels, but
also in torch's own operations, which share these threads.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

P = ParamSpec("P")
T = TypeVar("T")


def _was_forked() -> bool:
    """Whether this process was forked before this import."""
    by_fork = multiprocessing.get_start_method(allow_none=True) in (None, "fork")
    return by_fork and multiprocessing.parent_process() is not None


forked = _was_forked()
_caller = threading.local()


def _note_fork() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def threads() -> int:
    """How many threads a kernel may use: as many as the caller has set."""
    if not forked:
        return torch.get_num_threads()
    return getattr(_caller, "threads", None) or torch.get_num_threads()


def fork_safe(function: Callable[P, T]) -> Callable[P, T]:
    """Let torch's operations inside ``function`` run on the calling thread in a forked child.

    The child's own setting is put back afterwards, and `threads` tells it in between.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not forked or getattr(_caller, "threads", None):
            return function(*args, **kwargs)
        _caller.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(_caller.threads)
            _caller.threads = None

    return call


def derive_fork_safe(tensor: Tensor) -> Tensor:
    """Let a backward pass that comes to ``tensor`` go on on the calling thread in a forked child.

    Likewise a pass through the gradients of that pass, of any order. The child's own setting is put
    back when the pass has ended; after one that fails it stays at one thread.
    """
    if tensor.requires_grad:
        tensor.register_hook(_go_on_alone)
    return tensor


@unserializable_hook  # else torch.save of a tensor with it warns
def _go_on_alone(gradient: Tensor | None) -> Tensor | None:
    threads = torch.get_num_threads()
    if forked and threads > 1:
        torch.set_num_threads(1)
        Variable._execution_engine.queue_callback(partial(torch.set_num_threads, threads))
    # The caller's own gradient keeps no hook.
    return None if gradient is None else derive_fork_safe(gradient.view_as(gradient))
