"""Tiles of the Hopper forward that the heads of a group share: where their rows lie, which keys
they see, which calls have them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from launch_arguments import bind
from problems import unwritten

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import count, writes_in_flight
from schedule_in_python import InPython, as_python
from test_hopper_build import build_for

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.forward import grouped_rows, groups, launch
from lockstep.kernels.hopper.forward.groups import BOX
from lockstep.kernels.hopper.forward.plan import plan_of
from lockstep.problem import Options, Tensors, describe

place, queries, n_rows = (
    as_python(x) for x in (grouped_rows.place, grouped_rows.queries, grouped_rows.n_rows)
)


def problem_of(Sq: int, Skv: int, Hq: int, Hkv: int, options=(), **sizes: int):
    return describe(unwritten(Sq, Skv, Hq=Hq, Hkv=Hkv, **sizes), Options(**dict(options)))


@pytest.mark.parametrize("group", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("n_queries", [1, 8, 70, 71])
def test_every_query_of_every_head_has_one_row(group, n_queries):
    rows = n_rows(n_queries, group)
    places = [place(row, group) for row in range(rows)]
    assert len(set(places)) == rows
    expected = itertools.product(range(n_queries), range(group))
    assert sorted(x for x in places if x[0] < n_queries) == list(expected)
    assert rows < (n_queries + BOX) * group


@pytest.mark.parametrize("group", [2, 3, 5, 8, 12])
def test_queries_of_rows(group):
    for row, n in itertools.product(range(0, 640, 64), (64, 128, 192)):
        found = [place(row + i, group)[0] for i in range(n)]
        first, many = queries(row, n, group)
        assert first == min(found)
        assert first + many - 1 == max(found)


@pytest.mark.parametrize("group", [2, 4, 5, 6, 8, 12])
def test_a_box_of_heads_is_one_of_a_group(group):
    """Its rows are those of the same queries of heads that follow each other."""
    problem = problem_of(40, 2000, 16 * group, 16, {"causal": True}.items(), B=9, D=128)
    heads = groups.heads_of_box(groups.rows_of_group(problem))
    assert heads in (1, 2, 4, 8)
    for row in range(0, 960, heads * BOX):
        query, head = place(row, group)
        for i in range(heads * BOX):
            assert place(row + i, group) == (query + i % BOX, head + i // BOX)
        assert head + heads <= group


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (20, 5)])
@pytest.mark.parametrize("group", [3, 8])
def test_blocks_are_those_that_rows_see(left, right, group):
    """A consumer has every block that one of its rows sees, and those that are not masked are seen
    whole by all."""
    Sq, Skv, block_kv = 90, 300, 64
    schedule = InPython(
        left=left or 0, right=right or 0, HAS_LEFT=left is not None, HAS_RIGHT=right is not None,
        BLOCK_KV=block_kv, HEADS=1, heads_per_kv=group, Sq=Sq,
    )  # fmt: skip
    tile = SimpleNamespace(head=0, len_q=Sq, len_kv=Skv)
    for row in range(0, n_rows(Sq, group), 64):
        begin, end = schedule.blocks(tile, row, 64)
        whole_begin, whole_end = schedule.inner_blocks(tile, row, 64)
        for number in range(row, row + 64):
            if not schedule.exist(tile, number):
                continue
            query, head = schedule.place(tile, number)
            assert (query < Sq, head < group) == (True, True)
            first, behind = schedule.row_bounds(tile, number)
            position = query + Skv - Sq
            assert max(first, 0) == (0 if left is None else max(position - left, 0))
            assert behind == (Skv if right is None else min(position + right + 1, Skv))
            assert begin * block_kv <= max(first, 0)
            assert end * block_kv >= behind
            assert whole_begin * block_kv >= max(first, 0)
            assert whole_end * block_kv <= behind


CAUSAL, FULL = {"causal": True}, {}


@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "Sq", "Skv", "D", "options", "shares"),
    [
        (256, 64, 8, 70, 70, 256, FULL, True),
        (256, 40, 8, 71, 7145, 128, CAUSAL, True),
        (4, 80, 10, 301, 14024, 128, CAUSAL, True),
        (44, 40, 10, 162, 162, 256, FULL, True),
        (256, 8, 1, 85, 455, 128, CAUSAL, True),
        # Chunks of prompts, of narrow heads, too.
        (256, 40, 10, 269, 564, 64, CAUSAL, True),
        (32, 20, 5, 400, 1600, 40, CAUSAL, True),
        (64, 32, 8, 270, 2000, 64, CAUSAL, True),
        (32, 32, 8, 300, 450, 128, CAUSAL, True),
        (32, 16, 4, 300, 450, 256, CAUSAL, True),
        (32, 32, 16, 260, 900, 128, {"causal": True, "softcap": 50.0}, True),
        (32, 16, 8, 300, 900, 256, {"causal": True, "softcap": 50.0}, False),
        # Whole sequences of wide heads, if boxes have several heads.
        (11, 32, 8, 400, 400, 256, CAUSAL, True),
        (3, 32, 8, 783, 783, 256, CAUSAL, True),
        (122, 12, 4, 200, 200, 256, CAUSAL, False),
        (2, 48, 12, 2030, 2030, 256, CAUSAL, False),
        (15, 32, 8, 400, 400, 160, CAUSAL, False),
        (199, 32, 8, 140, 140, 160, CAUSAL, True),
        (43, 32, 8, 300, 300, 160, CAUSAL, False),
        # Also of others, with one loop over the blocks of all tiles.
        (249, 32, 8, 140, 140, 128, CAUSAL, True),
        (60, 32, 4, 200, 200, 128, CAUSAL, True),
        (16, 32, 4, 300, 300, 128, CAUSAL, True),
        (60, 32, 8, 200, 200, 128, CAUSAL, False),
        (12, 32, 4, 370, 370, 128, CAUSAL, False),
        (60, 28, 4, 130, 130, 128, CAUSAL, False),
        (60, 32, 4, 130, 130, 128, {"causal": True, "softcap": 50.0}, False),
        (2, 32, 4, 130, 130, 128, CAUSAL, False),
        # Without a mask, and where keys are few if that saves a good part.
        (256, 40, 10, 79, 614, 64, FULL, True),
        (256, 48, 12, 193, 1137, 64, FULL, True),
        (44, 64, 4, 275, 275, 128, FULL, True),
        (131, 32, 8, 193, 193, 128, FULL, True),
        (2, 32, 8, 193, 193, 128, FULL, False),
        (9, 80, 10, 231, 231, 80, FULL, False),
        (256, 3, 1, 1085, 1085, 40, FULL, False),
        # Low tiles are all that two heads save.
        (256, 64, 32, 205, 4374, 40, CAUSAL, False),
        # They have few more keys than queries.
        (32, 32, 8, 300, 375, 128, CAUSAL, False),
        (106, 20, 5, 783, 783, 160, CAUSAL, False),
        # Half of the last tile of a head is left out.
        (32, 64, 8, 300, 600, 64, CAUSAL, False),
        # Their tiles are short.
        (256, 16, 4, 129, 129, 64, CAUSAL, False),
        (128, 32, 8, 70, 140, 128, CAUSAL, False),
        (256, 16, 2, 179, 179, 256, CAUSAL, False),
        # Their tiles are full.
        (64, 32, 8, 128, 4096, 128, CAUSAL, False),
        (2, 32, 8, 1536, 1536, 128, CAUSAL, False),
        (1, 32, 8, 8192, 8192, 128, CAUSAL, False),
        # Each tile has a program of its own.
        (1, 32, 8, 70, 7000, 128, CAUSAL, False),
        (256, 64, 64, 70, 70, 256, FULL, False),
        # Tiles of few queries see less beside a narrow window; boxes of one head take longer.
        (2, 32, 8, 2070, 2070, 256, {"window_left": 159, "window_right": 0}, True),
        (1, 24, 3, 6723, 6723, 128, {"window_left": 280, "window_right": 0}, True),
        (4, 28, 4, 2048, 2048, 128, {"window_left": 511, "window_right": 0}, False),
        (2, 8, 4, 8192, 8192, 256, {"window_left": 1023, "window_right": 0}, False),
        (256, 64, 8, 70, 70, 256, {"constant_time": True}, False),
        (256, 64, 8, 70, 70, 256, {"query_invariant": True}, False),
    ],
)
def test_which_calls_have_tiles_of_groups(B, Hq, Hkv, Sq, Skv, D, options, shares):
    problem = problem_of(Sq, Skv, Hq, Hkv, options.items(), B=B, D=D)
    assert groups.shares_tiles(problem) == shares
    assert groups.rows_of_group(problem) == (Hq // Hkv if shares else 1)


@pytest.mark.parametrize(
    ("B", "Hkv", "Sq", "Skv", "options", "one_loop"),
    [
        (16, 8, 300, 300, FULL, True),
        (2, 8, 193, 193, FULL, True),  # heads have tiles of their own
        (20, 8, 40, 500, FULL, False),  # each program has few blocks
        (40, 8, 100, 400, CAUSAL, True),
        (16, 8, 300, 1100, FULL, False),  # each tile has many
    ],
)
def test_tiles_of_groups_have_one_loop_if_programs_have_many(B, Hkv, Sq, Skv, options, one_loop):
    problem = problem_of(Sq, Skv, 4 * Hkv, Hkv, options.items(), B=B, D=128)
    assert groups.takes_one_loop(problem) == one_loop


@pytest.mark.parametrize(
    ("S", "Hq", "Hkv", "D", "options", "shares"),
    [
        (82, 12, 3, 256, CAUSAL, True),
        (250, 32, 4, 160, CAUSAL, True),
        (300, 32, 4, 160, CAUSAL, False),
        (82, 16, 8, 256, CAUSAL, False),  # boxes of two heads
        (82, 32, 4, 128, CAUSAL, True),
        (200, 32, 8, 128, CAUSAL, False),  # boxes of four heads have to save more
        (60, 32, 4, 128, CAUSAL, False),  # mostly one block of keys
        (1100, 32, 4, 128, CAUSAL, False),  # no loop over all blocks
        (141, 32, 8, 128, FULL, True),
        (60, 32, 8, 128, FULL, False),  # mostly one block of keys
        (141, 32, 8, 64, FULL, False),
    ],
)
def test_which_packed_sequences_have_tiles_of_groups(S, Hq, Hkv, D, options, shares):
    offsets = torch.arange(0, 101 * S, S, dtype=torch.int32)
    q, k, v = (torch.empty(100 * S, H, D, dtype=torch.bfloat16) for H in (Hq, Hkv, Hkv))
    tensors = Tensors(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert groups.shares_tiles(describe(tensors, Options(**options))) == shares


def test_work_is_that_of_all_tiles():
    """256 sequences of 70 queries: of 8 heads, 8 tiles that are half empty, or 5 of a group."""
    problem = problem_of(70, 70, 64, 8, B=256, D=256)
    plan = plan_of(problem)
    blocks = -(-70 // plan.block_kv) + groups.ENDS
    assert groups.n_tiles(70, 8, plan.block_q) == 5
    apart, shared = (groups.work(problem, 70, 70, n) for n in (1, 8))
    assert apart == pytest.approx(256 * 64 * blocks / 132)
    assert shared == pytest.approx(256 * 8 * 5 * blocks / 132)


@pytest.mark.parametrize(("Hkv", "heads"), [(8, 1), (10, 4), (20, 2), (5, 8)])
def test_launch(Hkv, heads):
    tensors = unwritten(40, 2000, B=64, Hq=40, Hkv=Hkv, D=128)
    problem = describe(tensors, Options(causal=True))
    bound = bind(launch.forward_launches(problem, tensors, 132), tensors)["forward_kernel"]
    arguments = dict(zip(bound.launch.kernel.arg_names, bound.arguments, strict=True))
    assert arguments["HEADS"] == heads
    for name in ("q_desc", "o_desc"):
        assert arguments[name].block_shape == [1, 1, heads, BOX, 64]


def test_machine_code():
    """Boxes leave the loops of consumers as they are."""
    built = build_for(unwritten(71, 2000, B=64, Hq=40, Hkv=8, D=128), {"causal": True}.items())
    assert "serialized" not in built.report
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert len(built.main_loops) == 2
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        assert count([text for _, text in loop])["STL"] == 0
