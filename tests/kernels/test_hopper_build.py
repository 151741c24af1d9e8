"""The Hopper forward without a GPU: what it compiles to."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise

import pytest
import torch
from problems import draw_varlen, unwritten

from lockstep.problem import Options, Tensors, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import (
    PRODUCT_WAIT,
    SCORES_WAIT,
    Build,
    compile_for_hopper,
    count,
    usual_path,
    writes_in_flight,
)
from launch_arguments import bind
from machine_code import Instructions
from shared_places import shared_with_barriers
from unassigned import unassigned_reads

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.common.capped_weights import TIERS
from lockstep.kernels.hopper.forward import launch, plan
from lockstep.kernels.hopper.forward.kernel import forward_kernel
from lockstep.kernels.hopper.forward.scheduling.part_rule import most_parts
from lockstep.simt.taint.code import parse, read_code

PROCESSORS = 132


def build(D: int, dtype: torch.dtype = torch.bfloat16, options=(), Sq: int = 5000) -> Build:
    """The kernel for a long dense problem."""
    return build_for(unwritten(Sq, 2048, D=D, dtype=dtype), options)


def build_for(tensors: Tensors, options=()) -> Build:
    problem = describe(tensors, Options(**dict(options)))
    call = launch.forward_launches(problem, tensors, PROCESSORS)
    bound = bind(call, tensors)["forward_kernel"]
    return compile_for_hopper(forward_kernel, bound.arguments, **bound.launch.options)


# At D 64 without a mask, fewer queries have lower tiles.
@pytest.mark.parametrize(
    ("D", "causal", "Sq"), [(64, False, 50_000), (128, True, 5000), (256, False, 5000)]
)
def test_machine_code(D, causal, Sq):
    built = build(D, options={"causal": causal}, Sq=Sq)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    shape = plan.PLANS[D]
    at_launch, of_consumer, of_producer = plan.REGISTERS[shape.consumers]
    assert built.registers == at_launch
    for registers in (of_consumer, of_producer):
        assert f"USETMAXREG.DEALLOC.CTAPOOL {registers:#x}" in dict(built.instructions).values()
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert "serialized" not in built.report
    assert len(built.main_loops) == shape.consumers
    per_thread = shape.block_kv * plan.ROWS // 128
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        body = [text for _, text in loop]
        found = count(body)
        # Weights stay two to a register.
        assert found["PRMT"] == 0
        # Nothing is spilled. What does not change, the scale, may be read back once where
        # accumulators take half of all registers.
        assert found["STL"] == 0
        assert found["LDL"] <= (D == 256)
        usual = usual_path(loop)
        scores = usual.index(SCORES_WAIT)
        product = len(usual) - 1 - usual[::-1].index(PRODUCT_WAIT)
        # The exponentials run under the product: after the scores are there, before it is.
        assert count(usual[scores:product])["MUFU.EX2"] == per_thread == count(usual)["MUFU.EX2"]
        # Weights take the registers of those before, which the product reads until then.
        assert count(usual[product:])["F2FP"] == per_thread // 2 == count(usual)["F2FP"]
        # Unless the warp votes for it, all jump over what makes large weights exact: a maximum of
        # three at a time, and factors.
        vote = next(i for i, text in enumerate(usual) if text.startswith("VOTE"))
        assert (vote > product) == (D == 64)
        assert count(usual)["VIMNMX3"] == count(usual)["FMUL"] == 0
        assert found["VIMNMX3"] == per_thread // 2 - 2
        assert found["FMUL"] >= D * plan.ROWS // 128
        assert not found["BSSY"] + found["WARPSYNC"]
    # The first block of a tile runs under the last product of the tile before, where there is
    # room for the queries of both.
    assert len(built.overlaps) == shape.q_stages * shape.consumers
    for overlap in built.overlaps:
        assert not writes_in_flight(overlap)
        body = [text for _, text in overlap]
        under_way = body[body.index(SCORES_WAIT) : body.index(PRODUCT_WAIT)]
        assert count(under_way)["MUFU.EX2"] >= per_thread


def count_in_one_loop(loop):
    """The instructions of a loop over all tiles, in which nothing is spilled or waits for lanes."""
    assert not writes_in_flight(loop)
    found = count([text for _, text in loop])
    assert not found["STL"] + found["PRMT"] + found["BSSY"] + found["WARPSYNC"]
    assert found["LDL"] <= 1
    return found


@pytest.mark.parametrize(
    ("D", "causal", "keys", "heads"),
    [
        (64, True, 512, 1),
        (128, True, 512, 1),
        (128, False, 512, 1),
        # Tiles that 8 heads share.
        (64, False, 330, 8),
        (128, True, 330, 8),
        (128, False, 330, 8),
    ],
)
def test_machine_code_of_one_loop(D, causal, keys, heads):
    """Blocks of a tile take the way of a loop for one tile. Their exponentials run under the
    product of the block before, also those of a tile's first block, by the same code."""
    built = build_for(unwritten(keys, keys, B=16, Hq=8 * heads, Hkv=8, D=D), {"causal": causal})
    assert "serialized" not in built.report
    assert len(built.addressed_loops) == len(built.overlaps) == 2
    for loop in built.addressed_loops:
        found = count_in_one_loop(loop)
        usual = usual_path(loop)
        scores = usual.index(SCORES_WAIT)
        product = usual.index(PRODUCT_WAIT)
        assert count(usual[scores:product])["MUFU.EX2"] == 64 == count(usual)["MUFU.EX2"]
        assert count(usual[product:])["F2FP"] == 32 == count(usual)["F2FP"]
        # Neither a maximum nor what makes large weights exact.
        assert not count(usual)["FMNMX"] + count(usual)["VIMNMX3"] + count(usual)["FMUL"]
        assert found["FMNMX"] > 60


@pytest.mark.parametrize("D", [64, 128])
def test_machine_code_of_one_loop_in_constant_time(D):
    """Each block takes a maximum and is rescaled, by the same code in all of a tile."""
    built = build_for(unwritten(512, 512, D=D), {"causal": True, "constant_time": True})
    assert "serialized" not in built.report
    assert not unassigned_reads(read_code(built.kernel.asm["cubin"]))
    assert len(built.addressed_loops) == len(built.overlaps) == 2
    for loop in built.addressed_loops:
        count_in_one_loop(loop)
        usual = usual_path(loop)
        assert 64 <= count(usual)["FMNMX"] <= 72
        assert count(usual)["MUFU.EX2"] == 66
        assert D // 2 <= count(usual)["FMUL"] <= D // 2 + 2
        scores, product = usual.index(SCORES_WAIT), usual.index(PRODUCT_WAIT)
        assert count(usual[scores:product])["MUFU.EX2"] >= 32
        assert count(usual[product:])["F2FP"] == 32 == count(usual)["F2FP"]


@pytest.mark.parametrize("left", [300, 4000])
def test_machine_code_of_windows(left):
    """A running maximum takes one more exponential for each of a thread's rows, and a vote."""
    built = build(128, options={"window_left": left, "window_right": 0})
    narrow = left < plan.NARROW
    shape = plan.NARROW_PLANS[128] if narrow else plan.PLANS[128]
    assert len(built.main_loops) == shape.consumers
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        assert not {"STL", "LDL"} & count([text for _, text in loop]).keys()
        found = count(usual_path(loop))
        assert found["MUFU.EX2"] == shape.block_kv * plan.ROWS // 128 + (2 if narrow else 0)
        assert found["VOTE"] + found["VOTEU"] == 1


def test_machine_code_of_softcap():
    """Scores of both tiers have one exponential each, between the terms of their polynomials, and
    no reciprocal."""
    options = {"causal": True, "softcap": 50.0, "window_left": 4000}
    built = build_for(unwritten(5000, 5000, D=128), options.items())
    assert "serialized" not in built.report
    shape = plan.NARROW_PLANS[128]
    per_thread = shape.block_kv * plan.ROWS // 128
    assert len(built.main_loops) == shape.consumers
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        body = [text for _, text in loop]
        assert not {"STL", "LDL", "PRMT"} & count(body).keys()
        jumps = [0, *(i for i, text in enumerate(body) if "BRA" in text), len(body)]
        parts = [body[i:j] for i, j in pairwise(jumps)]
        found = [
            next(p for p in parts if count(p)["FFMA"] == len(terms) * per_thread)
            for terms, _end in TIERS
        ]
        for part in found:
            assert count(part)["MUFU.EX2"] == per_thread
            assert count(part)["MUFU.RCP"] == 0
            # And the sums; nowhere does that unit have many of them before it.
            assert count(part)["FADD"] == per_thread - 2
            names = [text.split()[0] for text in part]
            runs = [len(list(run)) for name, run in groupby(names) if name == "MUFU.EX2"]
            assert max(runs) <= 4


@pytest.mark.parametrize(
    "D", [80, *(pytest.param(D, marks=pytest.mark.slow) for D in (64, 128, 256))]
)
def test_products_of_tiles_with_parts_of_their_keys_find_their_operands(D):
    """Both passes: ptxas left a descriptor that two branches need to one of them."""
    B, Hkv, page, keys = 2, 2, 16, 16_384
    pages = torch.empty(64, page, Hkv, D, dtype=torch.bfloat16)
    table = torch.empty(B, keys // page, dtype=torch.int32)
    lens = torch.empty(B, dtype=torch.int32)
    q = torch.empty(B, 8, 512, D, dtype=torch.bfloat16)
    tensors = Tensors(q, pages, pages, page_table=table, kv_lens=lens)
    assert most_parts(describe(tensors, Options(causal=True))) == 4
    built = build_for(tensors, {"causal": True})
    assert "serialized" not in built.report


def test_machine_code_of_pages():
    """Consumers do what they do without pages, and the producer loads box after box."""
    B, Hkv, page, D = 2, 2, 16, 160
    pages = torch.empty(64, page, Hkv, D, dtype=torch.bfloat16)
    q = torch.empty(B, 2 * Hkv, 512, D, dtype=torch.bfloat16)
    table, lens = torch.empty(B, 32, dtype=torch.int32), torch.empty(B, dtype=torch.int32)
    tensors = Tensors(q, pages, pages, page_table=table, kv_lens=lens)
    built = build_for(tensors, {"causal": True}.items())
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert "serialized" not in built.report
    shape = plan.plan_of(describe(tensors, Options(causal=True)))
    assert len(built.main_loops) == shape.consumers
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        assert products_in(loop) == {128: 10 + 8, 32: 8}
        found = count(usual_path(loop))
        # What does not change may be read back.
        assert (found["STL"], found["LDL"]) <= (0, 3)
        assert found["MUFU.EX2"] == shape.block_kv * plan.ROWS // 128
    # Of keys and of values, in each of two passes; and queries, of each consumer and once more.
    wide = -(-D // 32)
    loads = count([text for _, text in built.instructions])["UTMALDG"]
    assert loads == 2 * 2 * (shape.block_kv // page) * wide + (shape.consumers + 1) * wide


def products_in(loop: Instructions) -> dict[int, int]:
    """For each width of a wgmma of 16-bit factors, how many there are."""
    names = [text.split()[0] for _, text in loop if text.startswith("HGMMA")]
    assert all(name.endswith("x16.F32.BF16") for name in names)
    return Counter(int(name.split("x")[1]) for name in names)


@pytest.mark.parametrize("D", [64, 128])
def test_machine_code_of_spans(D):
    options = {"causal": True, "query_invariant": True}
    built = build_for(unwritten(5000, 4096, D=D), options.items())
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    shape = plan.SHORT_PLANS[D]
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert "serialized" not in built.report
    assert len(built.main_loops) == shape.consumers
    per_thread = shape.block_kv * plan.ROWS // 128
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        # Between the ends of spans and away from edges, a step costs what it does elsewhere.
        found = count(usual_path(loop))
        assert found["LDL"] == found["STL"] == 0
        assert found["MUFU.EX2"] == found["FADD"] == per_thread
        # At D 64 the right half of a block waits for a weight of the left one.
        assert found["FFMA"] == per_thread + (2 if D == 64 else 0)
        # One vote on large weights, and no factors without them.
        assert found["VOTE"] == 1
        assert found["FMUL"] == found["VIMNMX3"] == 0
        # At the end of a span its products are added to a total, which is not rescaled, and of
        # which at D 128 64 columns are in shared memory.
        rare = count([text for _, text in loop]) - found
        assert rare["MUFU.EX2"] == 2
        assert D // 2 <= rare["FADD"] <= D // 2 + 24
        assert rare["LDS"] == rare["STS"] == (8 if D == 128 else 0)


def test_machine_code_of_spans_in_one_loop():
    """As without spans, but for the larger of two bars; a maximum is that of a row's first keys."""
    built = build_for(unwritten(512, 512, D=64), {"causal": True, "query_invariant": True})
    assert "serialized" not in built.report
    assert len(built.addressed_loops) == len(built.overlaps) == 2
    for loop in built.addressed_loops:
        found = count_in_one_loop(loop)
        usual = usual_path(loop)
        product = usual.index(PRODUCT_WAIT)
        under_way = usual[usual.index(SCORES_WAIT) : product]
        assert count(under_way)["MUFU.EX2"] == 64 == count(usual)["MUFU.EX2"]
        assert count(usual[product:])["F2FP"] == 32 == count(usual)["F2FP"]
        assert count(usual)["FMNMX"] == 2
        assert not count(usual)["VIMNMX3"] + count(usual)["FMUL"]
        assert 15 < found["FMNMX"] < 60


def test_machine_code_between_tile_widths():
    """Products have as many columns as a head dim has, in multiples of 16: for each width of a
    wgmma, how many there are in a step. Packed sequences do what others do; D 160 is in pages."""
    lens = [300] * 40
    tensors = Tensors(**draw_varlen(lens, lens, D=184, dtype=torch.bfloat16).tensors)
    tensors = tensors._replace(v=tensors.v[..., :40].contiguous())
    built = build_for(tensors, {"causal": True})
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert "serialized" not in built.report
    assert len(built.main_loops) == 2
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        body = [text for _, text in loop]
        assert products_in(loop) == {128: 12, 32: 8, 16: 8}
        assert count(body)["STL"] == count(body)["LDL"] == 0
    # Of packed sequences, only the scheduler warp draws tickets.
    drawn = count([text for _, text in built.instructions])
    assert drawn["ATOMG"] + drawn["ATOM"] == 1


def test_a_register_written_under_a_product_is_found():
    """The defect that once made NaN: weights over those the product before still reads."""
    texts = [
        "WARPGROUP.ARRIVE",
        "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0",
        "BRA 0x40",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "F2FP.BF16.F32.PACK_AB R89, R12, R13",
        "BRA 0x0",
    ]
    loop = [(16 * i, text) for i, text in enumerate(texts)]
    # Only on the path that jumps over the wait.
    assert writes_in_flight(loop) == ["0x40: F2FP.BF16.F32.PACK_AB R89, R12, R13"]
    loop[2] = (0x20, "NOP")
    assert not writes_in_flight(loop)


@pytest.mark.parametrize(("D", "causal", "consumers"), [(64, True, 3), (128, False, 2)])
def test_machine_code_in_constant_time(D, causal, consumers):
    """One pass and running maxima: every block is rescaled, and no mark is ever read."""
    built = build(D, options={"causal": causal, "constant_time": True})
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    assert "serialized" not in built.report
    assert not unassigned_reads(read_code(built.kernel.asm["cubin"]))
    assert count([text for _, text in built.instructions])["LDG"] == 0
    per_thread = 128 * plan.ROWS // 128
    assert len(built.main_loops) == consumers
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        body = [text for _, text in loop]
        found = count(body)
        # Values are cleaned by other warps.
        assert found["STS"] == found["HSET2"] == 0
        # Scores are masked, and blocks that no mask cuts jump over that; weights are where the
        # next product reads them, and few registers are copied.
        assert found["FSEL"] == per_thread
        unmasked = count(usual_path(loop))
        assert unmasked["FSEL"] == 0
        assert unmasked["MUFU.EX2"] >= per_thread
        assert unmasked["IMAD"] + unmasked["MOV"] <= 16
        assert found["FMNMX"] >= per_thread
        assert found["FMUL"] >= D // 2
        # The exponentials run under the product; of two consumers, half of them do, and weights are
        # rounded while the others are computed.
        scores, product = body.index(SCORES_WAIT), body.index(PRODUCT_WAIT)
        under_way = count(body[scores:product])
        assert under_way["MUFU.EX2"] >= per_thread // (1 if consumers == 3 else 2)
        assert under_way["F2FP"] == 0
        if consumers == 2:
            last = len(body) - 1 - [text.split()[0] for text in body[::-1]].index("MUFU.EX2")
            assert count(body[product:last])["F2FP"] >= per_thread // 4
        assert found["LDL"] == found["STL"] == 0


def test_a_read_of_what_was_not_written_is_found():
    """What ptxas made of two loops with the same queries: the second reads what was computed for
    the first, which may not run."""
    text = """
        /*0000*/                   UMOV UR4, 0x1 ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3 UR8, UR4, 0x2, URZ ;
.L_x_1:
        /*0030*/                   UIADD3 UR9, UR8, 0x2, URZ ;
        /*0040*/                   EXIT ;
"""
    assert unassigned_reads(parse(text)) == ["0x30: UIADD3 UR9, UR8, 0x2, URZ: UR8"]
    assert not unassigned_reads(parse(text.replace("@P0 BRA `(.L_x_1)", "NOP")))
