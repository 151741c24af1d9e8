"""The Hopper forward without a GPU: the tiles of a call, their order, and the loops over them."""

from __future__ import annotations

import pytest
import torch
from problems import unwritten

from lockstep.problem import Options, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


from lockstep.kernels.hopper.forward import launch, plan
from lockstep.kernels.hopper.forward.scheduling import tiling
from lockstep.kernels.hopper.forward.scheduling.schedule import BY_HEAD, LONGEST_FIRST, PAIRED
from lockstep.kernels.hopper.forward.scheduling.tiling import Tiling, n_programs

PROCESSORS = 132


@pytest.mark.parametrize(
    ("sizes_of_call", "consumers"),
    [({"B": 2, "Hq": 10, "Hkv": 10}, 2), ({"B": 4, "Hq": 32, "Hkv": 32}, 3)],
    ids=["20 heads", "128 heads"],
)
def test_lower_tiles_where_they_save_rounds(sizes_of_call, consumers):
    """640 tiles of 128 rows take five rounds of 132 programs, 440 of 192 rows take four, which are
    longer; and the choice leaves blocks of keys alone."""
    chosen = plan.plan_of(describe(unwritten(4096, 4096, **sizes_of_call), Options()))
    assert chosen.consumers == consumers
    assert chosen.block_kv == plan.PLANS[64].block_kv


@pytest.mark.parametrize(
    ("B", "S", "D", "constant_time", "order"),
    [
        (4, 1024, 64, True, LONGEST_FIRST),
        (16, 512, 64, True, LONGEST_FIRST),
        (8, 1024, 64, False, PAIRED),
        (8, 1024, 128, True, PAIRED),
        (4, 2048, 64, True, PAIRED),
        # Keys do not fit into L2.
        (16, 1024, 64, True, PAIRED),
    ],
)
def test_few_tiles_of_narrow_heads_are_dealt_singly_in_constant_time(B, S, D, constant_time, order):
    tensors = unwritten(S, S, B=B, Hq=16, Hkv=16, D=D)
    problem = describe(tensors, Options(causal=True, constant_time=constant_time))
    assert Tiling.of(problem, PROCESSORS).order == order.value


def order_of(Sq, Skv, causal=True, **sizes):
    problem = describe(unwritten(Sq, Skv, **sizes), Options(causal=causal))
    return Tiling.of(problem, PROCESSORS).order


def test_pairs_from_two_rounds_on():
    assert order_of(1500, 1500, B=3, Hq=24, Hkv=24, D=128) == PAIRED.value
    assert order_of(1500, 1500, B=2, Hq=20, Hkv=20, D=128) == LONGEST_FIRST.value


def test_tiles_of_a_chunk_go_by_head_if_its_keys_do_not_fit_into_l2():
    assert order_of(134, 9840, B=64, Hq=5, Hkv=5, D=112) == BY_HEAD.value
    assert order_of(134, 9840, B=2, Hq=5, Hkv=5, D=112) == LONGEST_FIRST.value
    assert order_of(4000, 9840, B=64, Hq=5, Hkv=5, D=112) != BY_HEAD.value
    # Also where pairs would fill the rounds.
    assert order_of(205, 4374, B=256, Hq=64, Hkv=32, D=40) == BY_HEAD.value
    assert order_of(300, 450, B=32, Hq=32, Hkv=8, D=128) == PAIRED.value
    # Whole sequences, although the first tile sees most keys.
    assert order_of(140, 140, B=256, Hq=32, Hkv=8, D=128) == PAIRED.value


def test_low_tiles_of_a_chunk_behind_a_window_do_not_go_to_the_same_programs():
    """Of two tiles of a head, the last one has few rows: by head, each second program would have
    nothing else."""

    def order(Sq):
        tensors = unwritten(Sq, 5278, B=39, Hq=25, Hkv=5, D=256)
        problem = describe(tensors, Options(window_left=65, window_right=0))
        return Tiling.of(problem, PROCESSORS).order

    assert order(166) == LONGEST_FIRST.value
    assert order(256) == BY_HEAD.value
    assert order(550) == BY_HEAD.value  # five tiles


@pytest.mark.parametrize(("S", "order"), [(294, LONGEST_FIRST), (400, PAIRED), (600, PAIRED)])
def test_three_tiles_with_a_window_go_singly(S, order):
    tensors = unwritten(S, S, B=123, Hq=24, Hkv=8, D=160)
    problem = describe(tensors, Options(window_left=152, window_right=0))
    assert Tiling.of(problem, PROCESSORS).order == order.value


@pytest.mark.parametrize(
    ("S", "window", "order"),
    [
        (200, None, PAIRED),
        (400, None, LONGEST_FIRST),
        (8192, None, LONGEST_FIRST),
        (400, 150, LONGEST_FIRST),
        (509, 1262, LONGEST_FIRST),
        (5000, 1262, LONGEST_FIRST),
        (8192, 4096, PAIRED),
    ],
)
def test_tiles_with_a_softcap_go_singly(S, window, order):
    left = None if window is None else window - 1
    options = Options(window_left=left, window_right=0, softcap=50.0)
    problem = describe(unwritten(S, S, B=64, Hq=16, Hkv=16, D=128), options)
    assert Tiling.of(problem, PROCESSORS).order == order.value


@pytest.mark.parametrize(
    ("S", "D", "causal", "programs"),
    [(193, 128, False, 131), (193, 64, False, 132), (300, 128, False, 132), (193, 128, True, 132)],
)
def test_two_tiles_of_a_head_are_not_the_same_programs_for_all_heads(S, D, causal, programs):
    problem = describe(unwritten(S, S, B=64, Hq=32, Hkv=32, D=D), Options(causal=causal))
    assert n_programs(problem, Tiling.of(problem, PROCESSORS), PROCESSORS) == programs


@pytest.mark.parametrize(("S", "turns"), [(400, True), (512, False), (490, False), (700, True)])
def test_pairs_take_turns_if_some_are_shorter(S, turns):
    problem = describe(unwritten(S, S, B=64, Hq=32, Hkv=32, D=128), Options(causal=True))
    found = Tiling.of(problem, PROCESSORS)
    assert found.order == PAIRED.value
    assert (found.turn > 0) == turns


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"causal": True}, True),
        ({"causal": True, "softcap": 30.0}, True),
        ({}, True),
        ({"causal": True, "window_left": 300}, False),
        ({"causal": True, "constant_time": True}, False),
        ({"causal": True, "query_invariant": True}, False),
    ],
    ids=str,
)
def test_tiles_of_equal_sequences_are_split(options, splits):
    tensors = unwritten(1024, 1024, Hq=8, Hkv=8, D=128)
    call = launch.forward_launches(describe(tensors, Options(**options)), tensors, PROCESSORS)
    (found,) = call.launches
    assert found._arguments["SPLIT"] == splits
    # 64 tiles of 128 rows.
    assert found.grid == (128 if splits else 64, 1, 1)


@pytest.mark.parametrize(
    ("D", "keys", "splits"), [(64, 4096, False), (72, 4096, True), (128, 768, False)]
)
def test_tiles_without_a_mask_are_split_if_they_are_wide_and_long(D, keys, splits):
    assert tiling.splits_tiles(describe(unwritten(1024, keys, D=D), Options())) == splits


@pytest.mark.parametrize("causal", [False, True])
def test_turns_in_constant_time_under_a_mask_alone(causal):
    options = Options(constant_time=True, causal=causal)
    assert plan.plan_of(describe(unwritten(4096, 4096, D=128), options)).pingpong == causal


@pytest.mark.parametrize(
    ("keys", "options", "one_loop"),
    [
        (768, {}, True),
        (769, {}, False),
        (1024, {"causal": True}, True),
        (1025, {"causal": True}, False),
        (512, {"window_left": 300}, False),
        (512, {"query_invariant": True}, False),
        (512, {"constant_time": True}, False),
        (1024, {"constant_time": True, "causal": True}, True),
        (1025, {"constant_time": True, "causal": True}, False),
        (512, {"causal": True, "softcap": 30.0}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("D", [64, 128])
def test_short_tiles_have_one_loop(D, keys, options, one_loop):
    problem = describe(unwritten(keys, keys, D=D), Options(**options))
    assert plan.plan_of(problem).one_loop == one_loop


@pytest.mark.parametrize(
    ("D", "keys", "causal", "one_loop"),
    [
        (64, 1024, True, True),
        (64, 1025, True, False),
        (64, 512, False, False),
        (128, 512, True, False),
    ],
)
def test_one_loop_with_spans_is_for_narrow_heads_under_a_mask(D, keys, causal, one_loop):
    options = Options(causal=causal, query_invariant=True)
    assert plan.plan_of(describe(unwritten(keys, keys, D=D), options)).one_loop == one_loop


def test_one_loop_is_for_calls_without_lengths_in_bf16():
    lens = {"kv_lens": torch.zeros(1, dtype=torch.int32)}
    tensors = unwritten(512, 512, D=128)
    causal = Options(causal=True)
    assert plan.plan_of(describe(tensors, causal)).one_loop
    assert not plan.plan_of(describe(tensors._replace(**lens), causal)).one_loop
    assert not plan.plan_of(describe(unwritten(512, 512, D=160), causal)).one_loop
    fp16 = unwritten(512, 512, D=128, dtype=torch.float16)
    assert not plan.plan_of(describe(fp16, causal)).one_loop


@pytest.mark.parametrize(("Sq", "consumers"), [(700, 2), (20000, 3)])
def test_one_loop_without_a_mask_is_for_two_consumers(Sq, consumers):
    found = plan.plan_of(describe(unwritten(Sq, 700), Options()))
    assert (found.consumers, found.one_loop) == (consumers, consumers == 2)


def test_one_loop_in_constant_time_is_for_two_consumers():
    in_constant_time = Options(causal=True, constant_time=True)
    for Sq, dtype in ((512, torch.bfloat16), (512, torch.float16), (5000, torch.bfloat16)):
        found = plan.plan_of(describe(unwritten(Sq, 512, D=64, dtype=dtype), in_constant_time))
        assert found.one_loop == (found.consumers == 2) == (Sq == 512)


@pytest.mark.parametrize(("n_q_tiles", "pairs"), [(3, False), (4, True), (7, True)])
def test_tiles_in_the_middle_do_not_go_to_the_same_programs(n_q_tiles, pairs):
    assert tiling.pays_to_pair(1320, n_q_tiles, 132, 1000) == pairs
