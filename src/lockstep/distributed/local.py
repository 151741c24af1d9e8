"""Attention between a run of queries and a run of keys of one sequence, on this rank alone.

The operators put the last query level with the last key. Where a run ends elsewhere, the keys are
cut where nothing is seen of them anyway, and the window is moved by what is left. `q`, `k`, `v`
below are dense; k and v of all S tokens, which is what they are cut from.

Which rank runs a row or a key does not show in its bits: a row of out, lse and dq is summed over
keys at their absolute positions, a row of dk and dv over all queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.call import ops as ops  # registers the operators
from lockstep.kernels.kernel import Gradients, Needs
from lockstep.kernels.window import move_window


class Settings(NamedTuple):
    """The options of a call, in the order in which the operators take them."""

    causal: bool
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    query_invariant: bool
    allow_tf32: bool
    constant_time: bool
    secret_lengths: bool
    max_seqlen_q: int | None
    kernel: str | None

    @property
    def reach(self) -> int | None:
        """Keys that a row sees after its own position."""
        return 0 if self.causal else self.right

    def moved(self, n: int) -> Settings:
        """The settings of rows that the operators place n keys too late."""
        if n == 0:
            return self
        left, right = move_window(self.left, self.reach, n)
        return self._replace(causal=False, left=left, right=right)


class Rows(NamedTuple):
    """The results of a forward, which a backward takes."""

    out: Tensor
    lse: Tensor
    statistics: Tensor


class RowGradients(NamedTuple):
    """The gradients of out and lse."""

    dout: Tensor
    dlse: Tensor | None


class KeyGradients(NamedTuple):
    dk: Tensor
    dv: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, at: range, settings: Settings
) -> Rows:
    """Rows of the queries at positions `at`."""
    k, v, settings = _seen_by(k, v, at, settings)
    rows = torch.ops.lockstep.attention(q, k, v, None, sinks, *(None,) * 3, *settings)
    return Rows(*rows)


def gradient_of_queries(
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    at: range,
    settings: Settings,
) -> Tensor:
    """dq of the queries at positions `at`."""
    k, v, settings = _seen_by(k, v, at, settings)
    needs = Needs(q=True, k=False, v=False, bias=False, sinks=False)
    dq = gradients_of(grads, rows, q, k, v, sinks, settings, needs).q
    assert dq is not None
    return dq


def gradients_of_keys(
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    at: range,
    settings: Settings,
) -> KeyGradients:
    """dk and dv of the keys at positions `at`, from all queries."""
    length = q.shape[2]
    # The operators take no window that begins after a row: keys after `at`, then, which are
    # computed for nothing.
    end = at.stop if settings.left is None else max(at.stop, length - settings.left)
    k, v = k[:, :, at.start : end], v[:, :, at.start : end]
    needs = Needs(q=False, k=True, v=True, bias=False, sinks=False)
    _, dk, dv, *_ = gradients_of(grads, rows, q, k, v, sinks, settings.moved(end - length), needs)
    assert dk is not None
    assert dv is not None
    return KeyGradients(dk[:, :, : len(at)], dv[:, :, : len(at)])


def gradient_of_sinks(
    grads: RowGradients, rows: Rows, q: Tensor, sinks: Tensor, settings: Settings
) -> Tensor:
    """dsinks [Hq] from all queries.

    It does not depend on the keys. Kernels take at least one: the first query and its result have
    the right shapes.
    """
    key, value = q[:, :1, :1], rows.out[:, :1, :1]
    needs = Needs(q=False, k=False, v=False, bias=False, sinks=True)
    dsinks = gradients_of(grads, rows, q, key, value, sinks, settings, needs).sinks
    assert dsinks is not None
    return dsinks


def gradients_of(
    grads: RowGradients,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    settings: Settings,
    needs: Needs,
) -> Gradients:
    """The gradients asked for, of a call with all queries and all keys."""
    results = (grads.dout, grads.dlse, rows.out, rows.statistics)
    inputs = (q, k, v, None, sinks, *(None,) * 3)
    found = iter(torch.ops.lockstep.attention_backward(*results, *inputs, *settings, list(needs)))
    return Gradients._make(next(found) if need else None for need in needs)


def _seen_by(
    k: Tensor, v: Tensor, at: range, settings: Settings
) -> tuple[Tensor, Tensor, Settings]:
    """Keys up to the last that the queries at `at` see, and the window that shows them."""
    length = k.shape[2]
    end = length if settings.reach is None else min(length, at.stop + settings.reach)
    return k[:, :, :end], v[:, :, :end], settings.moved(end - at.stop)
