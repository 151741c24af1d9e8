"""Counters of the parts of dQ that have been added to a query tile: a part of each key tile whose
loop goes over it."""

from __future__ import annotations

import triton
import triton.language as tl

# Nanoseconds from one look at a counter to the next, where many programs look.
PAUSE = 200


def _spin(comparison: str, then: str, pause: int = 0) -> str:
    """PTX that reads a counter for as long as it compares so with a number."""
    wait = f"@p nanosleep.u32 {pause}; " if pause else ""
    return (
        "{ .reg .pred p; "
        f"AGAIN: ld.acquire.gpu.global.u32 $0, [$1]; setp.{comparison}.u32 p, $0, $2; "
        f"{wait}@p bra AGAIN; {then}}}"
    )


# The copy engine, too, sees what was written before.
_EQUAL = tl.constexpr(_spin("ne", "fence.proxy.async.global; "))
_OR_MORE = tl.constexpr(_spin("lt", "fence.proxy.async.global; "))
_BY_MANY = tl.constexpr(_spin("lt", "", PAUSE))


@triton.jit
def await_count(
    count_ptr, count, OR_MORE: tl.constexpr = False, BY_MANY: tl.constexpr = False
):  # fmt: skip
    """Spin until the counter holds `count`, or, with OR_MORE, at least that; what was written
    before it got there is visible. BY_MANY programs at once: at least that, and not to the copy
    engine."""
    asm: tl.constexpr = _BY_MANY if BY_MANY else (_OR_MORE if OR_MORE else _EQUAL)
    tl.inline_asm_elementwise(
        asm, "=r,l,r", [count_ptr.to(tl.int64), count], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def count_parts(
    q_tile, len_q, len_kv, left, right, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """How many key tiles add to a query tile of a sequence, as `sizes.visible_tiles` has it."""
    diagonal = q_tile * BLOCK_Q + (len_kv - len_q)
    first_key = tl.maximum(diagonal - left, 0)
    last_key = diagonal + (BLOCK_Q - 1) + right
    end = tl.maximum(last_key + BLOCK_KV, 0) // BLOCK_KV
    end = tl.minimum(end, (len_kv + (BLOCK_KV - 1)) // BLOCK_KV)
    n = tl.maximum(end - first_key // BLOCK_KV, 0)
    return tl.where((first_key < len_kv) & (q_tile * BLOCK_Q < len_q), n, 0)
