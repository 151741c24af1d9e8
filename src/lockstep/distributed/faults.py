"""The error of an exchange that fails: which ranks no longer answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

# How long ranks that still run are given to say so, at most.
PATIENCE = timedelta(seconds=5)


class RankLost(RuntimeError):
    """An exchange failed; the message names the ranks that do not answer."""


@contextmanager
def named_faults(group: ProcessGroup, what: str) -> Iterator[None]:
    """Turns the failure of an exchange into a `RankLost` that names the silent ranks.

    The ranks that see the failure write to the store of the default group; the others are the
    ones that ended, or that hang elsewhere. Where all write, the error stays what it was.
    """
    try:
        yield
    except RuntimeError as error:
        lost = _silent_ranks(group)
        if lost is None:
            raise
        raise RankLost(f"{what} failed: {lost}") from error


def _silent_ranks(group: ProcessGroup) -> str | None:
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank()
    try:
        store = dist.distributed_c10d._get_default_store()
        key = f"lockstep/failed/{group.group_name}"
        store.set(f"{key}/{me}", "")
        end = time.monotonic() + PATIENCE.total_seconds()
        silent = ranks
        while silent and time.monotonic() < end:
            silent = [rank for rank in silent if not store.check([f"{key}/{rank}"])]
            time.sleep(0.05)
    except RuntimeError:
        return "the store does not answer: the process that holds it, rank 0 or a launcher, ended"
    if not silent:
        return None
    lost = ", ".join(map(str, silent))
    return f"rank {lost} does not answer, of the ranks {ranks}: it ended, or hangs"
