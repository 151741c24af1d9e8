"""How a sequence is cut into spans: by its own lengths and heads, wherever it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import Case, Result, assert_same_bits, draw, draw_varlen, run

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton_device import (
    DEVICE,
    INTERPRETED,
    attend,
    forget_calls,
    needs_triton,
    use_multiprocessors,
    use_small_tiles,
)

from lockstep.kernels import sequences
from lockstep.kernels.triton import launch, plan, spans
from lockstep.kernels.triton.groups import Window
from lockstep.problem import AttentionProblem, Tensors, describe, make_options

pytestmark = needs_triton
WINDOWS = [(None, None), (40, 3), (700, 0)]


@pytest.fixture(autouse=True)
def small_and_soon_busy(monkeypatch):
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(plan, "BUSY", 9)


def problem_of(case: Case) -> AttentionProblem:
    return describe(Tensors(**case.tensors), make_options(False, None, None, None))


@triton.jit
def store_spans(
    spans_ptr,
    lens_ptr,
    Hkv,
    left,
    right,
    wanted,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    LEAST_SPAN: tl.constexpr,
):
    i = tl.program_id(0)
    q_len, kv_len = tl.load(lens_ptr + 2 * i), tl.load(lens_ptr + 2 * i + 1)
    window = Window(left if HAS_WINDOW else None, right if HAS_WINDOW else None)
    span = spans.span_of(q_len, kv_len, Hkv, window, wanted, GROUP, LEAST_SPAN)
    tl.store(spans_ptr + i, span)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_host_and_device_agree(window):
    problem = problem_of(draw(1, 1, Hq=4, Hkv=2))
    problem = replace(problem, window_left=window[0], window_right=window[1])
    lens = [(q, kv) for q in (1, 16, 40, 64, 300) for kv in (0, 1, 31, 64, 500, 3000)]
    found = torch.zeros(len(lens), dtype=torch.int32, device=DEVICE)
    reach = (0, 0) if window[0] is None else window
    store_spans[(len(lens),)](
        found, torch.tensor(lens, dtype=torch.int32, device=DEVICE), 2, *reach, plan.BUSY,
        GROUP=2, HAS_WINDOW=window[0] is not None, LEAST_SPAN=plan.LEAST_SPAN,
    )  # fmt: skip
    assert found.tolist() == [plan.span_of(problem, *pair) for pair in lens]
    assert len(set(found.tolist())) >= 3


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("Sq", "Skv"), [(1, 1000), (40, 100), (64, 3000), (300, 5000)])
def test_room_for_every_length(Sq, Skv, window):
    problem = problem_of(draw(Sq, 1, Hq=4, Hkv=2))
    problem = replace(problem, Skv=Skv, window_left=window[0], window_right=window[1])
    n_spans = plan.plan_of(problem, plan.INTERPRETER).n_spans
    for kv_len in range(Skv + 1):
        assert -(-kv_len // plan.span_of(problem, Sq, kv_len)) <= n_spans


def test_many_rows_are_computed_straight():
    long = draw(2000, 700, Hq=4, Hkv=2)
    assert plan.plan_of(problem_of(long), plan.INTERPRETER).n_spans == 1
    strict = replace(problem_of(long), query_invariant=True)
    assert plan.span_of(strict, 2000, 700) == plan.span_of(strict, 1, 700) == plan.LEAST_SPAN


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 3), (9, 9), (16, 1)], ids=str)
@pytest.mark.parametrize("query_invariant", [False, True])
def test_where_no_sequence_is_folded(heads, query_invariant):
    Hq, Hkv = heads
    problem = replace(problem_of(draw(1, 1, Hq=Hq, Hkv=Hkv)), query_invariant=query_invariant)
    folded = False
    for n in range(1, 9 * 64):
        folded |= plan.span_of(problem, n, n) < n
        assert plan._all_straight(replace(problem, Skv=n)) == (not folded)


def test_own_keys_change_no_bit(monkeypatch):
    """One cu_seqlens for queries and keys says that nothing is folded here; two do not."""
    plans = []
    plan_of = plan.plan_of

    def noticed(*args):
        plans.append(plan_of(*args))
        return plans[-1]

    monkeypatch.setattr(launch, "plan_of", noticed)
    forget_calls(monkeypatch)
    lens = [5, 0, 70]
    packed = draw_varlen(lens, lens, Hq=3, Hkv=3, D=16)
    cu_seqlens = packed.tensors["cu_seqlens_q"].to(DEVICE)
    tensors = {name: tensor.to(DEVICE) for name, tensor in packed.tensors.items()}
    results = []
    for of_keys in (cu_seqlens, cu_seqlens.clone()):
        case = Case(tensors | {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": of_keys})
        results.append(run(case, kernel="triton"))
    assert [chosen.n_spans == 1 for chosen in plans] == [True, False]
    assert_same_bits(*results)


def test_packed_sequences_have_the_bits_of_dense_ones(monkeypatch):
    use_multiprocessors(monkeypatch, 1)
    monkeypatch.setattr(plan, "BUSY", 3)
    q_lens, kv_lens = [8, 17], [140, 60]
    packed = draw_varlen(q_lens, kv_lens, Hq=8, Hkv=1, D=16, causal=True)
    lens = zip(q_lens, kv_lens, strict=True)
    counts = [-(-kv // plan.span_of(problem_of(packed), q, kv)) for q, kv in lens]
    assert counts == [2, 1]
    whole, tensors = attend(packed), packed.tensors
    queries = tensors["q"].split(q_lens)
    keys, values = (tensors[name].split(kv_lens) for name in ("k", "v"))
    outs, lses = whole.out.split(q_lens), whole.lse.split(q_lens)
    for *qkv, out, lse in zip(queries, keys, values, outs, lses, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        dense = attend(Case({"q": q, "k": k, "v": v}, packed.options))
        assert_same_bits(dense, Result(out.transpose(0, 1)[None], lse.transpose(0, 1)[None]))


@triton.jit
def store_sequences(found_ptr, cu_seqlens_ptr, B, T, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    slot = tl.program_id(0)
    b, tile, is_good, _, _, _, _ = sequences.find_sequence(
        slot, cu_seqlens_ptr, cu_seqlens_ptr, B, T, T, GROUP, BLOCK_Q
    )
    tl.store(found_ptr + 2 * slot, b)
    tl.store(found_ptr + 2 * slot + 1, tl.where(is_good, tile, -1))


# Around the number of sequences that are looked at together, which is less in the interpreter, and
# twice as many.
@pytest.mark.parametrize(
    ("chunks", "more", "dtype"),
    [
        *((0, more, torch.int32) for more in (1, 9)),
        *((1, more, torch.int32) for more in (-1, 0, 1)),
        (2, 1, torch.int32),
        *((chunks, 1, torch.int64) for chunks in (0, 1)),
    ],
)
def test_every_tile_of_a_packed_batch_has_a_slot(monkeypatch, chunks, more, dtype):
    if INTERPRETED:
        monkeypatch.setattr(sequences, "CHUNK", tl.constexpr(16))
    B = chunks * sequences.CHUNK.value + more
    lens = torch.randint(0, 40, (B,)) * (torch.rand(B) < 20 / B)
    lens[-1] = 33
    starts = [0, *lens.cumsum(0).tolist()]
    group, block_q = 2, 16
    n_slots = starts[-1] * group // block_q + B + 1
    found = torch.full((n_slots, 2), -1, dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.tensor(starts, dtype=dtype, device=DEVICE)
    store_sequences[(n_slots,)](found, cu_seqlens, B, starts[-1], GROUP=group, BLOCK_Q=block_q)
    tiles_of: dict[int, list[int]] = {}
    for b, tile in found.tolist():
        tiles_of.setdefault(b, []).append(tile)
    for b, length in enumerate(lens.tolist()):
        needed = -(-length * group // block_q)
        assert tiles_of.get(b, [])[:needed] == list(range(needed))
