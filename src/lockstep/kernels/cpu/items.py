"""How a backward is cut into work for threads: items of a KV head's rows and spans of keys."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from lockstep import forks
from lockstep.kernels.cpu.arithmetic.block import ROWS, SPAN
from lockstep.kernels.cpu.arithmetic.tiles import PIECE
from lockstep.kernels.cpu.call.arguments import record_at
from lockstep.kernels.cpu.call.tensors import Described

if TYPE_CHECKING:
    from lockstep.problem import AttentionProblem

ITEM = np.dtype(
    [(name, np.int64) for name in ("b", "h", "first_row", "last_row", "first_span", "last_span")]
)
ITEM_BYTES = ITEM.itemsize
# Parts of a span: whole pieces.
PARTS = (SPAN // 2, PIECE)
item_at = record_at(ITEM)


def part_of_span(problem: AttentionProblem, longest: int) -> int:
    """How many keys an item has where no sequence has more than one span, and heads are fewer than
    threads; otherwise 0, for whole spans. Sums of dQ go from part to part in order, so that bits do
    not depend on it."""
    threads, heads = forks.threads(), problem.B * problem.Hkv
    if longest > SPAN or heads >= threads:
        return 0
    return next((x for x in PARTS if heads * -(-longest // x) >= threads), PARTS[-1])


def list_items(
    problem: AttentionProblem,
    described: Described,
    by_span: bool,
    by_block: bool,
    width: int = SPAN,
) -> np.ndarray:
    """Whole KV heads, cut by span of keys or by block of rows where asked; the first spans of all
    heads come first. A span is ``width`` keys wide."""
    rows = []
    for b in range(problem.B):
        n_rows = described.q_len[b] * problem.Hq // problem.Hkv
        n_spans = -(-described.kv_len[b] // width)
        for h in range(problem.Hkv):
            blocks = range(0, n_rows, ROWS) if by_block else (0,)
            spans = range(n_spans) if by_span else (0,)
            rows += [
                (
                    b,
                    h,
                    block,
                    min(block + ROWS, n_rows) if by_block else n_rows,
                    span,
                    span + 1 if by_span else n_spans,
                )
                for block in blocks
                for span in spans
            ]
    if by_span:
        rows.sort(key=itemgetter(4))
    return np.array(rows, ITEM)
