"""The common part of the backwards of narrow, medium and wide heads, before and after their
kernels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.finish_gradients import gradients_from
from lockstep.kernels.hopper.backward.rows import finish_queries, prepare_rows
from lockstep.kernels.hopper.backward.shares import Shares, finish_keys, rule_of, shares_of
from lockstep.kernels.hopper.backward.sinks import sum_sinks
from lockstep.kernels.hopper.common.copy_engine import (
    ALIGNMENT,
    batch_rows,
    copy,
    fit,
    strides_of,
    tensor_map,
)
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.launch import Buffer, Launch, Launches
from lockstep.kernels.window import limit_of
from lockstep.memory_order import strides_like
from lockstep.problem import AttentionProblem

# What kernels call the offsets of packed sequences.
OFFSETS = {"cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_k"}
# What kernels of pairs are compiled with: registers of a thread when a program starts, which its
# partitions then share out anew, and that they start before the last kernel has ended.
OPTIONS = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
# Regions of the workspace that not all designs have.
OF_LARGE_SCORES = ("large", "flags")
OF_ORDER = ("turn", "ticket")
# What `prepare_rows` computes the gradient of sinks with.
OF_SINKS = ("sinks", "sink_sums")
# Head dims up to which it costs nothing to look for the end of the keys.
NARROW = 64
# Tiles that `sum_sinks` adds up at once.
SINK_TILES = 512


Workspace = dict[str, Buffer | None]


@dataclass(frozen=True)
class Cut:
    """How a problem is cut into tiles. A slot is a place for a tile of one head; packed sequences
    may own one too many each, and there is one for rows that none of them owns. Where queries are
    shared out, each share has a slot for keys."""

    block_d: int
    block_q: int
    block_kv: int
    q_slots: int
    kv_slots: int
    sequences: int  # that have heads and slots of their own: all of them, or 1 if packed
    Hq: int
    Hkv: int
    packed: int | None  # how many sequences are
    shares: Shares | None

    @property
    def n_tiles(self) -> int:
        """Slots for queries of all heads."""
        return self.q_slots * self.sequences * self.Hq

    @property
    def n_heads(self) -> int:
        """Heads of keys."""
        return self.sequences * self.Hkv

    @property
    def programs(self) -> int:
        return self.kv_slots * self.n_heads

    @property
    def n_shares(self) -> int:
        """Shares that may be one of several, of all heads."""
        return 0 if self.shares is None else self.shares.capacity * self.n_heads

    def heads_at_once(self, most: int) -> int:
        """How many heads of keys tickets go round: at most so many, or as have so many shares, and
        about as many in the last round, whose programs would wait for each other."""
        if self.shares is not None:
            most = max(most // self.shares.n_shares, 1)
        rounds = triton.cdiv(self.n_heads, most)
        return triton.cdiv(self.n_heads, max(rounds, 1))


def slots_of(problem: AttentionProblem, S: int, block: int) -> int:
    """Places for tiles of `block` rows in a head of `S` rows."""
    return S // block + problem.B + 1 if problem.layout == "varlen" else triton.cdiv(S, block)


def cut_into(
    problem: AttentionProblem, block_d: int, block_q: int, block_kv: int, may_share: bool = True
) -> Cut:
    q_slots = slots_of(problem, problem.Sq, block_q)
    kv_slots = slots_of(problem, problem.Skv, block_kv)
    shares = shares_of(problem, kv_slots, block_q, block_kv) if may_share else None
    if shares is not None:
        kv_slots = shares.slots
    packed = problem.B if problem.layout == "varlen" else None
    sequences = problem.B if packed is None else 1
    Hq, Hkv = problem.Hq, problem.Hkv
    return Cut(
        block_d, block_q, block_kv, q_slots, kv_slots, sequences, Hq, Hkv, packed, shares
    )  # fmt: skip


def backward_launches(
    given: BackwardTensors,
    needs: Needs,
    made: Collection[str],
    workspace: Workspace,
    launches: list[Launch],
) -> Launches:
    """The launches that compute the gradients of one problem with inputs of given strides and
    alignment.

    `made` are the gradients that the kernels write: dq, dk, dv, dsinks.
    """
    results = {
        name: Buffer.like(x, tuple(x.shape), x.dtype) if name in made else None
        for name, x in (("dq", given.q), ("dk", given.k), ("dv", given.v))
    }
    if "dsinks" in made:
        assert given.sinks is not None
        results["dsinks"] = Buffer(tuple(given.sinks.shape), given.sinks.dtype)
    return Launches(
        given.q.device,
        BackwardTensors._fields,
        results,
        workspace,
        launches,
        fit=None if all(map(is_, fit_inputs(given), given)) else fit_inputs,
        finish=gradients_from([name for name, x in results.items() if x is not None], needs),
    )


def rows_launch(
    problem: AttentionProblem,
    cut: Cut,
    q: Tensor,
    dout: Tensor,
    workspace: Workspace,
    writes_dq: bool = False,
    **options: int,
) -> Launch:
    """The launch of `prepare_rows`, which `writes_dq` of tiles that see no key."""
    dout_strides = strides_of(dout, problem.layout == "varlen")
    absent = _absent(workspace, (*OF_LARGE_SCORES, *OF_ORDER, "plan"))
    # A mask may leave a row its sink alone.
    may_see_sinks_alone = problem.has_sinks and problem.window != (None, None)
    if "plan" in absent and not may_see_sinks_alone and not writes_dq:
        absent.append("kv_lens")
    if not writes_dq:
        absent.append("dq")
    if workspace.get("sink_sums") is None:
        absent += OF_SINKS
    # As a kernel gets it.
    unit = torch.tensor(problem.score_unit, dtype=torch.float32).item()
    by_dim = zip(("stride_ob", "stride_oh", "stride_os"), dout_strides, strict=True)
    return Launch(
        prepare_rows,
        (cut.n_tiles,),
        {
            **{name: stride // ALIGNMENT for name, stride in by_dim},
            **row_arguments(problem, cut, q),
            **rule_of(problem, cut.block_q, cut.block_kv)._asdict(),
            "Hkv": problem.Hkv,
            "heads_per_kv": problem.Hq // problem.Hkv,
            **window_arguments(problem),
            "unit": unit,
            "unit_rest": problem.score_unit - unit,
            "ALIGN": ALIGNMENT,
            "D": problem.D if writes_dq else 0,
            "DV": problem.Dv,
            "BLOCK_D": 64 if problem.Dv <= 64 else cut.block_d,
            "BLOCK_Q": cut.block_q,
            "BLOCK_KV": cut.block_kv,
            "MAY_SEE_SINKS_ALONE": may_see_sinks_alone,
            "EARLY": True,
        },
        names=OFFSETS,
        absent=absent,
        **options,
    )


def queries_launch(
    problem: AttentionProblem, cut: Cut, q: Tensor, parts: int, rest: int = 64, turns: int = 1
) -> Launch:
    """The launch of `finish_queries`; the last part of a tile of dQ has `rest` columns, and a key
    tile increments a counter so many `turns`."""
    arguments = {
        **row_arguments(problem, cut, q),
        **window_arguments(problem),
        "scale": problem.scale,
        "D": problem.D,
        "REST": rest,
        "BLOCK_Q": cut.block_q,
        "BLOCK_KV": cut.block_kv,
        "PARTS": parts,
        "TURNS": turns,
        "EARLY": True,
    }
    grid = (cut.n_tiles * parts,)
    return Launch(finish_queries, grid, arguments, names=OFFSETS, launch_pdl=True)


def shares_buffers(
    problem: AttentionProblem, cut: Cut, columns: tuple[int, int]
) -> dict[str, Buffer | None]:
    """dk and dv of all shares, of so many columns, if there may be any; and the plan of sequences
    whose lengths the host does not know: `rows`."""
    if cut.shares is None:
        return {"shares": None, "plan": None}
    is_known = problem.layout != "varlen" and not problem.has_kv_lens
    return {
        "shares": Buffer((cut.n_shares, cut.block_kv * sum(columns)), torch.float32),
        "plan": None if is_known else Buffer((6 * (problem.B + 2),), torch.int32),
    }


def keys_launch(
    problem: AttentionProblem, cut: Cut, given: BackwardTensors, columns: tuple[int, int]
) -> Launch:
    """The launch of `finish_keys`; shares have so many columns of dk and of dv."""
    shape = (problem.B, problem.Hkv, problem.Skv)
    is_packed = problem.layout == "varlen"
    strides = {
        f"stride_{name}{dim}": stride
        for name, x in (("k", given.k), ("v", given.v))
        for dim, stride in zip(
            "bhs", (0, 1, problem.Hkv) if is_packed else strides_like(x, shape), strict=True
        )
    }
    arguments = {
        **strides,
        "Hkv": problem.Hkv,
        "B": problem.B,
        "Skv": problem.Skv,
        "kv_slots": cut.kv_slots,
        "n_shares": cut.shares.n_shares if cut.shares else 1,
        "scale": problem.scale,
        "D": problem.D,
        "DV": problem.Dv,
        "D_COLUMNS": columns[0],
        "DV_COLUMNS": columns[1],
        "BLOCK_KV": cut.block_kv,
        "MASKED": problem.window != (None, None),
    }
    grid = (cut.n_shares, cut.block_kv // 32)
    num_warps = 4 if max(columns) <= 128 else 8
    return Launch(finish_keys, grid, arguments, num_warps=num_warps, launch_pdl=True)


def loop_arguments(problem: AttentionProblem, cut: Cut) -> dict[str, int]:
    """Numbers and constants of kernels whose programs own keys, and may share queries out."""
    shares = cut.shares or Shares(0, 0, 0, 0, 0, 0)
    return {
        "kv_slots": cut.kv_slots,
        "q_slots": cut.q_slots,
        "n_heads": cut.n_heads,
        "Hkv": problem.Hkv,
        "heads_per_kv": problem.Hq // problem.Hkv,
        "share_heads": shares.heads,
        "span_tiles": shares.span_tiles,
        "spans": shares.spans,
        "n_shares": shares.n_shares,
        "SHARED": cut.shares is not None,
    }


def sinks_buffer(cut: Cut, needs: Needs) -> Buffer | None:
    """What query tiles have for the gradient of sinks, if it is wanted."""
    return Buffer((cut.n_tiles,), torch.float64) if needs.sinks else None


def sinks_launch(problem: AttentionProblem, cut: Cut) -> Launch:
    """The launch of `sum_sinks`."""
    arguments = {
        "n_tiles": cut.sequences * cut.q_slots,
        "H": problem.Hq,
        "q_slots": cut.q_slots,
        "TILES": SINK_TILES,
    }
    return Launch(sum_sinks, (problem.Hq,), arguments, launch_pdl=True)


def _absent(workspace: Workspace, names: Collection[str]) -> list[str]:
    """Those regions that this workspace does not have."""
    return [name for name in names if workspace.get(name) is None]


def fit_inputs(given: BackwardTensors) -> BackwardTensors:
    """The inputs as the copy engine takes them; with kv_lens, k and v have as many rows to a
    sequence."""
    q, k, v, dout = fit(given.q), fit(given.k), fit(given.v), fit(given.dout)
    if given.kv_lens is not None and (not batch_rows(k) or batch_rows(k) != batch_rows(v)):
        k, v = copy(k), copy(v)
    return given._replace(q=q, k=k, v=v, dout=dout)


def row_arguments(problem: AttentionProblem, cut: Cut, q: Tensor) -> dict[str, int]:
    """Strides of rows that lie as q does, and sizes, as `rows` takes them."""
    Hq, Sq = problem.Hq, problem.Sq
    by_row = (0, 1, Hq) if problem.layout == "varlen" else strides_like(q, problem.lse_shape)
    strides = dict(zip(("stride_rb", "stride_rh", "stride_rs"), by_row, strict=True))
    sizes = {"H": Hq, "B": problem.B, "Sq": Sq, "Skv": problem.Skv, "q_slots": cut.q_slots}
    return strides | sizes


def bounds_buffer(cut: Cut) -> Buffer | None:
    """Where packed sequences begin: `rows`."""
    return None if cut.packed is None else Buffer((3 * (cut.packed + 2),), torch.int32)


def map_maker(problem: AttentionProblem, rows: int, width: int, of_keys: bool = False) -> Any:
    """A function that makes tensor maps with tiles [rows, width], clipped to the rows of a sequence
    if these are packed, and with `of_keys` also if they have lengths."""
    packed = problem.layout == "varlen"
    clipped = packed or (of_keys and problem.has_kv_lens)
    return partial(tensor_map, block=[1, 1, 1, rows, width], packed=packed, clipped=clipped)


def kernel_arguments(
    problem: AttentionProblem, k: Tensor, block_kv: int, serves_all: bool = False
) -> dict[str, Any]:
    """Numbers and constants that all kernels of pairs take, head dims and tiles aside."""
    layout = "kv_lens" if problem.has_kv_lens else "dense"
    left, right = problem.window
    return {
        "scale": problem.scale,
        "unit": problem.score_unit,
        "softcap": problem.softcap or 0.0,
        "B": problem.B,
        "Sq": problem.Sq,
        "Skv": problem.Skv,
        **window_arguments(problem),
        "kv_batch_rows": batch_rows(k) if problem.has_kv_lens else 0,
        "LAYOUT": "varlen" if problem.layout == "varlen" else layout,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "HAS_EDGE": has_edge(problem, block_kv, serves_all),
        "CAPPED": problem.softcap is not None,
        "HIDES_SCORES": problem.has_raw_scores,
        "CONSTANT_TIME": problem.constant_time,
    }


def has_edge(problem: AttentionProblem, block_kv: int, serves_all: bool = False) -> bool:
    """Whether the last key tile of a sequence has to be cut short. A causal mask does it by itself:
    no query sees keys beyond its own position, which is not beyond the last key. Without a mask,
    one build serves all lengths of narrow heads, of queries that are shared out, and of loops that
    are cut; others of wider heads are slower where it looks for the end."""
    if problem.layout == "varlen" or problem.has_kv_lens:
        return True
    left, right = problem.window
    is_narrow = max(problem.D, problem.Dv) <= NARROW
    if left is None and right is None and (is_narrow or serves_all):
        return True
    return problem.Skv % block_kv != 0 and (right is None or right > 0)


def window_arguments(problem: AttentionProblem) -> dict[str, int]:
    """Keys seen left and right of the diagonal."""
    left, right = problem.window
    return {"left": limit_of(left), "right": limit_of(right)}
