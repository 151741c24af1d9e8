"""Attention out of a KV cache whose tokens are sharded across ranks: decode."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep import dispatch
from lockstep.api import attention, attention_paged, merge
from lockstep.checks import check_types
from lockstep.distributed.agreement import agree, check_equal, word
from lockstep.distributed.collectives import all_gather
from lockstep.distributed.groups import Mesh, group_of, not_compiled
from lockstep.kernels.window import move_window
from lockstep.options import Options, make_options
from lockstep.problem import Tensors, Window, describe

_WORDS = (
    *("batch of q", "heads of q", "tokens of q", "head dim of q"),
    *("tokens of k_shard", "heads of k_shard", "head dim of v_shard"),
    *("dtype of q", "kv_lens", "sinks", "page_table"),
    *Options._fields,
    *("return_lse", "kernel"),
)


@not_compiled
def sharded_cache_attention(
    q: Tensor,
    k_shard: Tensor,
    v_shard: Tensor,
    kv_lens: Tensor,
    mesh: Mesh,
    *,
    page_table: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of queries that every rank has, over a cache that is sharded along its tokens.

    Each rank attends to the keys that it holds; then one all-gather of `(out, lse)`, and `merge` in
    the order of the tokens, on every rank. The same call gives the same bits on the same number of
    ranks; on another number of ranks, parts are rounded elsewhere. For inference: asking for a
    gradient raises NotImplementedError.

    Args:
        q: [B, Hq, Sq, D], the same on every rank. The queries are the last Sq tokens of their
            sequences.
        k_shard: [B, Hkv, C, D]: rank r holds the tokens from `r · C` on, with the same C
            everywhere. With `page_table`, pages [n_pages, page, Hkv, D].
        v_shard: [B, Hkv, C, Dv], or pages.
        kv_lens: [B] int32 or int64: how many keys each whole sequence has, up to `ranks · C`. The
            same on every rank.
        mesh: A DeviceMesh of 1 dim or a process group.
        page_table: [B, max_pages] int32 or int64: the pages of this rank. C is then
            `max_pages · page`.

    The other arguments are those of `lockstep.attention`. With a window, or with a causal mask and
    Sq above 1, sequences run one by one.

    Returns:
        out [B, Hq, Sq, Dv], and with `return_lse` the pair `(out, lse)`: the same on every rank.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not answer.
        ValueError, TypeError: An argument does not fit, or not everywhere the same: on every rank,
            before anything is sent.
        NotImplementedError: A tensor requires a gradient, or every kernel refuses.

    Example:
        >>> out = sharded_cache_attention(q, k_cache, v_cache, kv_lens, mesh)
    """
    group = group_of(mesh)
    tensors = Tensors(q, k_shard, v_shard, None, sinks, kv_lens, page_table=page_table)
    asked = (causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel)
    options, capacity = _agree(tensors, asked, group)
    rank = dist.get_rank(group)
    if rank > 0:
        # A sink is counted once.
        tensors = tensors._replace(sinks=None)
    with torch.no_grad():
        out, lse = _attend(tensors, options, kernel, rank * capacity, capacity)
        parts = _gather(out, lse, group)
        out, lse = merge(parts)
    return (out, lse) if return_lse else out


def _agree(tensors: Tensors, asked: tuple[Any, ...], group: ProcessGroup) -> tuple[Options, int]:
    error: Exception | None = None
    words = dict.fromkeys(_WORDS, 0)
    options, capacity = Options(), 0
    try:
        options, capacity, words = _check(tensors, asked, dist.get_world_size(group))
    except (ValueError, TypeError, NotImplementedError) as raised:
        error = raised
    device = tensors.q.device if isinstance(tensors.q, Tensor) else torch.device("cpu")
    check_equal(words, agree(words, group, device, error))
    return options, capacity


def _check(
    tensors: Tensors, asked: tuple[Any, ...], ranks: int
) -> tuple[Options, int, dict[str, int]]:
    """The arguments of this rank, checked as far as it can do so alone."""
    *_, return_lse, kernel = asked
    options = make_options(*asked)
    check_types(tensors, tensors.layout)
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise NotImplementedError("sharded_cache_attention is for inference: it has no gradient")
    problem = describe(tensors, options)
    dispatch.select(problem, kernel)
    lens = tensors.kv_lens
    assert lens is not None
    digest = 0
    if lens.device.type == "cpu":
        digest = zlib.crc32(str(lens.tolist()).encode())
        limit = ranks * problem.Skv
        for b, n in enumerate(lens.tolist()):
            if not 0 <= n <= limit:
                raise ValueError(
                    f"kv_lens takes lengths from 0 to {limit}, got {n} for sequence {b}"
                )
    shape = (problem.B, problem.Hq, problem.Sq, problem.D)
    values = (
        *(*shape, problem.Skv, problem.Hkv, problem.Dv, problem.dtype, digest),
        *(tensors.sinks is not None, tensors.page_table is not None),
        *(*options, return_lse, kernel),
    )
    return options, problem.Skv, dict(zip(_WORDS, map(word, values), strict=True))


def _attend(
    tensors: Tensors, options: Options, kernel: str | None, first: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of this rank, which begin at token `first`."""
    lens = tensors.kv_lens
    assert lens is not None
    held = (lens - first).clamp(0, capacity)
    Sq = tensors.q.shape[2]
    reach = 0 if options.causal else options.window_right
    if options.window_left is None and (reach is None or Sq == 1):
        # Every row sees all keys up to its length.
        return _run(tensors._replace(kv_lens=held), None, None, options, kernel)
    rows = [
        _attend_one(_sequence(tensors, b), options, kernel, int(n), int(whole) - first)
        for b, (n, whole) in enumerate(zip(held.tolist(), lens.tolist(), strict=True))
    ]
    outs, lses = zip(*rows, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _sequence(tensors: Tensors, b: int) -> Tensors:
    paged = tensors.page_table is not None
    k, v = (x if paged else x[b : b + 1] for x in (tensors.k, tensors.v))
    pages = None if tensors.page_table is None else tensors.page_table[b : b + 1]
    return tensors._replace(q=tensors.q[b : b + 1], k=k, v=v, page_table=pages)


def _attend_one(
    tensors: Tensors, options: Options, kernel: str | None, held: int, end: int
) -> tuple[Tensor, Tensor]:
    """One sequence, of which this rank holds `held` keys; it ends `end` keys from the first."""
    q = tensors.q
    # The kernels put the last row level with the last key of this rank.
    behind = max(0, end - held)
    reach = 0 if options.causal else options.window_right
    left, right = move_window(options.window_left, reach, -behind)
    Sq = q.shape[2]
    seen = Sq
    if left is not None and left < 0:
        # The last rows see nothing here; the others move up.
        seen = max(0, Sq + left)
        left, right = 0, None if right is None else right + left
    lens = torch.tensor([held if seen else 0], device=q.device)
    cut = tensors._replace(q=q[:, :, :seen], kv_lens=lens)
    out, lse = _run(cut, left, right, options, kernel)
    if seen == Sq:
        return out, lse
    whole_out = out.new_zeros(*q.shape[:3], out.shape[3])
    whole_lse = lse.new_full(q.shape[:3], -torch.inf)
    if tensors.sinks is not None:
        whole_lse[:] = tensors.sinks.to(lse.dtype)[:, None]
    whole_out[:, :, :seen], whole_lse[:, :, :seen] = out, lse
    return whole_out, whole_lse


def _run(
    tensors: Tensors, left: int | None, right: int | None, options: Options, kernel: str | None
) -> tuple[Tensor, Tensor]:
    q, k, v, _, sinks, lens, *_ = tensors
    assert lens is not None
    window = None if left is None and right is None else (left, right)
    given: dict[str, Any] = {
        "window": window,
        "scale": options.scale,
        "softcap": options.softcap,
        "sinks": sinks,
        "query_invariant": options.query_invariant,
        "allow_tf32": options.allow_tf32,
        "kernel": kernel,
    }
    if tensors.page_table is not None:
        return attention_paged(q, k, v, tensors.page_table, lens, return_lse=True, **given)
    return attention(q, k, v, kv_lens=lens, return_lse=True, **given)


def _gather(out: Tensor, lse: Tensor, group: ProcessGroup) -> list[tuple[Tensor, Tensor]]:
    """The parts of all ranks in the order of their tokens, by one exchange."""
    packed = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (lse, out)])
    n = lse.numel() * lse.element_size()
    return [
        (part[n:].view(out.dtype).view(out.shape), part[:n].view(lse.dtype).view(lse.shape))
        for part in all_gather(packed, group)
    ]
