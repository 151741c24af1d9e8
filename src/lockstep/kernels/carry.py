"""Attention over keys, or gradients over rows, that come in blocks: what kernels have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.kernels.window import move_window
from lockstep.problem import AttentionProblem


class Carry(NamedTuple):
    """Functions that run a call whose keys or rows come in blocks, with the bits of one call.

    `forward(problem, q, sinks, start)` makes a state of the rows of q, which begin at position
    `start`; `state.fold(k, v, first)` adds keys from position `first` on, and `state.close()`
    returns what `Prepared` does. Blocks of keys begin at multiples of `span` and come in ascending
    order. `queries(problem, q, rows, dout, start)` does the same for dq.

    `rows(problem, q, out, statistics, dout, dlse)` returns [B, Hq, S, 3]: what gradients take of
    each row besides q and dout.

    `keys(problem, k, v, start)` makes a state of the keys that begin at `start`;
    `state.fold(q, dout, rows, first)` adds rows, and `state.close()` returns dk and dv. Rows come
    in ascending order, from multiples of `multiple` on. If they come `by_token`, tensors are
    [B, Hq, n, ..], and rows are counted in tokens. Otherwise they are [B, Hkv, n, ..], and rows are
    the queries of each query head in turn that reads a key head.

    `sinks(problem, sinks, rows)` returns dsinks of some heads with all their rows.

    The problem has the mask and the length of the whole sequence, with as many queries as keys.
    """

    span: int
    multiple: int
    by_token: bool
    forward: Callable[..., Any]
    rows: Callable[..., Tensor]
    queries: Callable[..., Any]
    keys: Callable[..., Any]
    sinks: Callable[..., Tensor]


def moved(problem: AttentionProblem, n: int, **sizes: int) -> AttentionProblem:
    """The problem of rows that the kernels put n keys after their place."""
    left, right = move_window(*problem.window, n)
    return replace(problem, causal=False, window_left=left, window_right=right, **sizes)


def between(problem: AttentionProblem, rows: range, keys: range) -> AttentionProblem | None:
    """The problem of rows and keys at these positions of a sequence; None if no row sees a key."""
    left, right = problem.window
    if right is not None and keys.start > rows.stop - 1 + right:
        return None
    if left is not None and keys.stop - 1 < rows.start - left:
        return None
    return moved(problem, keys.stop - rows.stop, Sq=len(rows), Skv=len(keys))
