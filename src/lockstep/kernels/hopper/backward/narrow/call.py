"""From a problem of narrow heads to the launches of its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.backward.call import (
    OF_LARGE_SCORES,
    OPTIONS,
    Cut,
    backward_launches,
    bounds_buffer,
    cut_into,
    fit_inputs,
    has_edge,
    kernel_arguments,
    keys_launch,
    loop_arguments,
    map_maker,
    queries_launch,
    rows_launch,
    shares_buffers,
    sinks_buffer,
    sinks_launch,
)
from lockstep.kernels.hopper.backward.cuts import (
    LEAST_WON,
    LEAST_WON_WITHOUT_EDGE,
    Cuts,
    plan_cuts,
)
from lockstep.kernels.hopper.backward.narrow.dq_sums import rest_width
from lockstep.kernels.hopper.backward.narrow.kernel import backward_kernel
from lockstep.kernels.hopper.common.copy_engine import flat_map
from lockstep.kernels.hopper.common.sizes import columns, processors
from lockstep.kernels.kernel import BackwardTensors, Needs, PreparedBackward
from lockstep.kernels.launch import Buffer, Launch
from lockstep.problem import AttentionProblem

BLOCK_KV = 128
# Scores are products over at least so many columns. With 16, which take one instruction, ptxas lost
# the addresses of keys where there is no mask: half of dq was wrong.
LEAST_COLUMNS = 32
# By padded head dim: what leaves room for dK and dV, or for the scores, in 240 registers.
BLOCK_Q = {64: 128, 128: 64}
# By padded head dim, `heads_at_once` without a mask, at least, and with one; without, more heads
# where SHARED_L2_BYTES hold them, and FEW_HEADS where so many would have more than MANY_BYTES.
HEADS_AT_ONCE = {64: 16, 128: 8}
FEW_HEADS = 8
HEADS_AT_ONCE_WITH_MASK = {64: 48, 128: 16}
MOST_HEADS_AT_ONCE = 32
SHARED_L2_BYTES, MANY_BYTES = 32 << 20, 120 << 20
# Up to so many queries, consumers take each step together at D 64, too, but under a causal window.
SHORT_QUERIES = 1024
# Up to so many keys, or keys behind the diagonal, `is_finished_early`.
FEW_KEYS = 256


def cut_of(problem: AttentionProblem) -> Cut:
    is_small = max(problem.D, problem.Dv) <= 64 and not has_small_tiles(problem)
    block_d = 64 if is_small else 128
    return cut_into(problem, block_d, BLOCK_Q[block_d], BLOCK_KV)


def has_small_tiles(problem: AttentionProblem) -> bool:
    """Whether sequences have one key tile and no more queries than the lower tiles of wide heads:
    then narrow ones have these, too, and half the work. All sums have the same order."""
    is_dense = problem.layout != "varlen" and not problem.has_kv_lens
    return is_dense and problem.Sq <= BLOCK_Q[128] and 0 < problem.Skv <= BLOCK_KV


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    cut, fitted = cut_of(problem), fit_inputs(given)
    is_whole = needs.q and has_whole_parts(problem, cut)
    is_finished = needs.q and not is_whole and is_finished_early(problem)
    writes_dq = is_finished and not sees_all_tiles(problem, cut)
    n_programs = min(cut.programs, processors(given.dout.device))
    cuts = cuts_of(problem, cut, n_programs, is_whole)
    of_tiles = Buffer((cut.n_tiles,), torch.int32)
    of_rows = Buffer((cut.n_tiles, 2, cut.block_q), torch.float32)
    # `rows` says what these hold.
    workspace = {
        "stats": of_rows,
        "large": of_rows,
        "sums": None if is_whole else _sums(problem, cut),
        "flags": of_tiles,
        "turn": Buffer((2 * cut.n_tiles,), torch.int32),
        "ticket": Buffer((1,), torch.int32),
        "bounds": bounds_buffer(cut),
        "sink_sums": sinks_buffer(cut, needs),
        **shares_buffers(problem, cut, _columns(problem)),
    }
    names = {"sums": "dq"} if is_whole else {}
    if not is_finished:
        names["dq"] = names.get("sums", "sums")
    if cuts.n_cut:
        workspace["shares"] = Buffer((cuts.n_cut, BLOCK_KV * sum(_columns(problem))), torch.float32)
    if problem.constant_time:
        workspace["stats"] = Buffer((cut.n_tiles, 4, cut.block_q), torch.float32)
        workspace |= dict.fromkeys(OF_LARGE_SCORES)
        # Kernels read log2 l from `stats` if it is not in shared memory; flags may be any pointer.
        names |= dict.fromkeys(OF_LARGE_SCORES, "stats")
    launches = [
        rows_launch(problem, cut, given.q, fitted.dout, workspace, writes_dq),
        Launch(
            backward_kernel,
            (n_programs,),
            pairs_arguments(problem, fitted.k, cut, cuts, is_whole, is_finished),
            maps=pairs_maps(problem, cut, is_whole, is_finished),
            names=names,
            **OPTIONS,
        ),
    ]
    made = ["dk", "dv"]
    if needs.q:
        made.append("dq")
    if needs.q and not is_whole and not is_finished:
        rest = rest_width(columns(problem.D))
        launches.append(queries_launch(problem, cut, given.q, 2, rest))
    if cut.shares is not None:
        launches.append(keys_launch(problem, cut, given, _columns(problem)))
    if needs.sinks:
        launches.append(sinks_launch(problem, cut))
        made.append("dsinks")
    return backward_launches(given, needs, made, workspace, launches)


def is_finished_early(problem: AttentionProblem) -> bool:
    """Whether the last parts of query tiles are made dQ by the loops that have them, which takes
    longer than the products of a step. Under a causal mask each loop has two. Where query heads
    share keys it has two of each, one after the other; and without a mask the last loop of a head
    has all of them, which makes it too long unless others have few steps more."""
    right = problem.window[1]
    is_dense = problem.layout != "varlen" and not problem.has_kv_lens
    are_few = is_dense and problem.Skv <= FEW_KEYS if right is None else right <= FEW_KEYS
    return problem.Hq == problem.Hkv and are_few


def sees_all_tiles(problem: AttentionProblem, cut: Cut) -> bool:
    """Whether every query tile sees a key."""
    left, right = problem.window
    is_dense = problem.layout != "varlen" and not problem.has_kv_lens
    are_seen = right is None or problem.Sq - problem.Skv - right < cut.block_q
    is_window = (left is None or left >= 0) and (right is None or right >= 0)
    return is_dense and problem.Skv > 0 and are_seen and is_window


def has_whole_parts(problem: AttentionProblem, cut: Cut) -> bool:
    """Whether a part of dQ is all of it, and there is one of each query tile: all sequences have
    one key tile, which every query tile sees."""
    right = problem.window[1]
    are_seen = right is None or problem.Sq - problem.Skv - right < cut.block_q
    is_dense = problem.layout != "varlen" and not problem.has_kv_lens
    return is_dense and 0 < problem.Skv <= BLOCK_KV and are_seen


def pairs_arguments(
    problem: AttentionProblem, k: Tensor, cut: Cut, cuts: Cuts, is_whole: bool, is_finished: bool
) -> dict[str, Any]:
    """Numbers and constants of `backward_kernel`."""
    of_loops = loop_arguments(problem, cut)
    if cuts.n_cut:
        of_loops |= {"spans": cuts.spans, "span_tiles": cuts.span_tiles}
    return {
        **kernel_arguments(problem, k, BLOCK_KV, cut.shares is not None or cuts.n_cut > 0),
        **of_loops,
        "heads_at_once": cuts.heads_at_once,
        "n_cut": cuts.n_cut,
        "first_cut": cuts.first_cut,
        "cut_from": cuts.cut_from,
        "D_COLUMNS": _columns(problem)[0],
        "DV_COLUMNS": _columns(problem)[1],
        "TOGETHER": is_together(problem, cut),
        "WHOLE_DQ": is_whole,
        "CUT": cuts.n_cut > 0,
        "FINISHED": is_finished,
    }


def may_cut(problem: AttentionProblem, cut: Cut, is_whole: bool) -> bool:
    """Whether all loops take as long, and some may be cut: at head dims whose sums are one piece,
    and where consumers have registers and steps enough."""
    is_dense = problem.layout != "varlen" and not problem.has_kv_lens
    is_plain = problem.window == (None, None) and problem.softcap is None
    is_one_piece = _columns(problem) == (cut.block_d, cut.block_d)
    is_long = cut.block_q == 64 or not is_together(problem, cut)
    may_share = cut.shares is not None or is_whole or problem.constant_time
    return is_dense and is_plain and is_one_piece and is_long and not may_share


def cuts_of(problem: AttentionProblem, cut: Cut, n_programs: int, is_whole: bool) -> Cuts:
    """Which loops are cut, and how many heads of keys tickets go round."""
    at_once = heads_at_once(problem, cut)
    if not may_cut(problem, cut, is_whole):
        return Cuts(at_once)
    group = problem.Hq // problem.Hkv
    least = LEAST_WON if has_edge(problem, BLOCK_KV) else LEAST_WON_WITHOUT_EDGE
    return plan_cuts(
        cut.n_heads, cut.kv_slots, cut.q_slots, group, n_programs, at_once, least
    )  # fmt: skip


def _columns(problem: AttentionProblem) -> tuple[int, int]:
    """Columns of k and of v that are multiplied."""
    return max(columns(problem.D), LEAST_COLUMNS), columns(problem.Dv)


def is_together(problem: AttentionProblem, cut: Cut) -> bool:
    """Whether consumers take each step together: `narrow`."""
    has_room = problem.softcap is None and not problem.constant_time  # in registers
    # Only the mean length of packed sequences is known.
    length = problem.Sq if cut.packed is None else problem.Sq / cut.packed
    left, right = problem.window
    is_short = length <= SHORT_QUERIES and (left is None or right != 0)
    return cut.block_q == 64 or (is_short and has_room)


def heads_at_once(problem: AttentionProblem, cut: Cut) -> int:
    """How many heads of keys tickets go round. The more, the less programs of one head wait for
    each other, and the less they share of what L2 holds."""
    if problem.window != (None, None):
        return cut.heads_at_once(HEADS_AT_ONCE_WITH_MASK[cut.block_d])
    # Queries and dO in 16 bits, sums of dQ in 32.
    head_bytes = cut.q_slots * cut.block_q * cut.block_d * 8
    fitting = min(SHARED_L2_BYTES // head_bytes, MOST_HEADS_AT_ONCE)
    least = HEADS_AT_ONCE[cut.block_d]
    least = least if least * head_bytes <= MANY_BYTES else FEW_HEADS
    return cut.heads_at_once(max(fitting, least))


def pairs_maps(
    problem: AttentionProblem, cut: Cut, is_whole: bool, is_finished: bool
) -> dict[str, Any]:
    """Functions that make the tensor maps of `backward_kernel`."""
    of_queries = map_maker(problem, cut.block_q, cut.block_d)
    of_sums = partial(flat_map, block=[block_rows(problem), 256])
    of_keys = map_maker(problem, BLOCK_KV, cut.block_d, of_keys=True)
    of_sums = map_maker(problem, 64, 64) if is_whole else of_sums
    return {
        **dict.fromkeys(("q", "dout", "dk", "dv"), of_queries),
        **dict.fromkeys(("k", "v"), of_keys),
        "stats": lambda stats: flat_map(stats.view(-1), [2 * cut.block_q]),
        "sums": of_sums,
        "dq": map_maker(problem, 64, 16) if is_finished else of_sums,
    }


def _sums(problem: AttentionProblem, cut: Cut) -> Buffer:
    """The sums of all tiles of dQ, in rows of 256 numbers."""
    rows = (64 + rest_width(columns(problem.D))) // 4  # of a tile
    return Buffer((rows * cut.n_tiles, 256), torch.float32)


def block_rows(problem: AttentionProblem) -> int:
    """How many of them the copy engine takes at once: a power of two."""
    width = rest_width(columns(problem.D))
    return 32 if width == 64 else width // 4
