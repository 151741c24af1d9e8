"""The Hopper forward without a GPU: what it compiles to, what it refuses, what it launches."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from problems import draw, draw_varlen, unwritten

from lockstep.kernels import hopper
from lockstep.kernels.hopper.common import requirements
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
from machine_code import Instructions, target
from shared_places import shared_with_barriers
from unassigned import unassigned_reads

from lockstep.kernels import launch as protocol
from lockstep.kernels.hopper.common import copy_engine, sizes
from lockstep.kernels.hopper.forward import cleaning, launch, plan
from lockstep.kernels.hopper.forward.few_keys import few_keys_kernel
from lockstep.kernels.hopper.forward.kernel import forward_kernel
from lockstep.kernels.hopper.forward.schedule import LONGEST_FIRST, PAIRED
from lockstep.kernels.launch import Launch
from lockstep.simt.taint.code import parse, read_code

PROCESSORS = 132


def problem_of(tensors: dict[str, torch.Tensor], **options):
    return describe(Tensors(**tensors), Options(**options))


def build(D: int, dtype: torch.dtype = torch.bfloat16, options=(), Sq: int = 5000) -> Build:
    """The kernel for a long dense problem."""
    return build_for(unwritten(Sq, 512, D=D, dtype=dtype), options)


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
        scores = body.index(SCORES_WAIT)
        product = len(body) - 1 - body[::-1].index(PRODUCT_WAIT)
        # The exponentials run under the product: after the scores are there, before it is.
        assert count(body[scores:product])["MUFU.EX2"] >= per_thread
        assert found["MUFU.EX2"] - count(body[scores:product])["MUFU.EX2"] == 0
        # Unless the warp votes for it, all jump over what makes up for rounding the largest
        # weights: a maximum of three at a time, and the conversion of two.
        vote = next(i for i, text in enumerate(body) if text.startswith("VOTE"))
        jump = next(i for i in range(vote, len(body)) if target(body[i]))
        end = next(i for i, (at, _) in enumerate(loop) if at == target(body[jump]))
        assert (vote > product) == (D == 64)
        assert count(body[jump:end])["VIMNMX3"] == found["VIMNMX3"] == per_thread // 2 - 2
        assert count(body[jump:end])["F2FP"] == 1
        del body[jump:end]
        product = len(body) - 1 - body[::-1].index(PRODUCT_WAIT)
        # Weights take the registers of those before, which the product reads until then.
        assert count(body[:product])["F2FP"] == 0
        assert count(body[product:])["F2FP"] == per_thread // 2
        assert not found["BSSY"] + found["WARPSYNC"]
    # The first block of a tile runs under the last product of the tile before, where there is
    # room for the queries of both.
    assert len(built.overlaps) == shape.q_stages * shape.consumers
    for overlap in built.overlaps:
        assert not writes_in_flight(overlap)
        body = [text for _, text in overlap]
        under_way = body[body.index(SCORES_WAIT) : body.index(PRODUCT_WAIT)]
        assert count(under_way)["MUFU.EX2"] >= per_thread


@pytest.mark.parametrize("window", [None, 1000])
def test_machine_code_of_softcap(window):
    """A reciprocal for two scores; with a window on the left, whose masks take more registers, one
    for each. Nothing else turns what it is into an exponent than one multiplication."""
    options = {"causal": True, "softcap": 50.0, "window_left": window}
    built = build(128, options=options.items())
    assert "serialized" not in built.report
    shape = plan.PLANS[128]
    per_thread = shape.block_kv * plan.ROWS // 128
    assert len(built.main_loops) == shape.consumers
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        found = count([text for _, text in loop])
        assert found["STL"] + found["LDL"] + found["PRMT"] == 0
        assert found["MUFU.EX2"] == 2 * per_thread
        assert found["MUFU.RCP"] == per_thread // (2 if window is None else 1)
        # A window has its own maximum for rows that have seen no key yet.
        assert found["FFMA"] == per_thread + 2 * (window is not None)


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
        assert products_in(loop) == {64: 10, 128: 4, 32: 4}
        found = count(usual_path(loop))
        # What does not change may be read back once.
        assert (found["STL"], found["LDL"]) <= (0, 1)
        assert found["MUFU.EX2"] == shape.block_kv * plan.ROWS // 128
    # Of keys and of values, in each of two passes; and queries, of each consumer and once more.
    wide = -(-D // 64)
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
    shape = plan.PLANS[D]
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    assert "serialized" not in built.report
    assert len(built.main_loops) == shape.consumers
    per_thread = shape.block_kv * plan.ROWS // 128
    for loop in built.addressed_loops:
        assert not writes_in_flight(loop)
        # Between the ends of spans and away from edges, a step costs what it does elsewhere.
        found = count(usual_path(loop))
        assert found["LDL"] == found["STL"] == 0
        assert found["MUFU.EX2"] == found["FFMA"] == found["FADD"] == per_thread
        # At the end of a span, its 4 sums and its products are added to a total, which is not
        # rescaled; at D 64 it is in shared memory. What rounding changes takes 4 more.
        found = count([text for _, text in loop])
        assert found["FFMA"] == per_thread
        assert found["FADD"] == per_thread + D // 2 + 8
        assert found["LDS"] == found["STS"] == 8 * (D == 64)


@pytest.mark.parametrize(
    ("B", "Hq", "Sq", "Skv", "keeps"),
    [
        (128, 12, 197, 197, True),
        (64, 16, 257, 257, True),
        # Tiles of 64 and of 128 rows have as many.
        (64, 16, 330, 330, False),
        (64, 16, 257, 385, False),
        (64, 16, 100, 100, False),
        # All programs are at work at once, with one tile or with two.
        (8, 12, 197, 197, True),
        (1, 8, 4096, 256, True),
        (32, 12, 197, 197, False),
        # The other kernel has one round.
        (4, 12, 197, 197, False),
    ],
)
def test_which_heads_keep_their_keys(B, Hq, Sq, Skv, keeps):
    tensors = unwritten(Sq, Skv, B=B, Hq=Hq, Hkv=Hq)
    assert plan.keeps_keys(describe(tensors, Options())) == keeps
    assert not plan.keeps_keys(describe(tensors, Options(causal=True)))


def few_keys(S: int, programs: int) -> Build:
    """The kernel for heads of S keys, which fit on an SM so many times."""
    tensors = unwritten(S, S, B=64, Hq=12, Hkv=12)
    call = launch.forward_launches(describe(tensors, Options()), tensors, PROCESSORS)
    bound = bind(call, tensors)["few_keys_kernel"]
    built = compile_for_hopper(few_keys_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    # Of each program, the hardware takes a KB more.
    assert programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    return built


@pytest.mark.usefixtures("unlowered")
def test_few_keys_of_more_blocks_fit():
    few_keys(257, programs=2)


def test_machine_code_of_few_keys():
    """Nothing is spilled in the loop over blocks."""
    built = few_keys(197, programs=3)
    assert 3 * 128 * built.registers <= 65536
    assert "serialized" not in built.report
    texts = [text for _, text in built.instructions]
    at = [i for i, text in enumerate(texts) if text.startswith("HGMMA")]
    # Scores of a block and its products with values; and the same for rows that fail, whose values
    # may have to be cleaned and counted.
    scores, products = 4, 8
    assert len(at) == (scores + products) + (scores + 3 * products)
    loop = count(texts[at[0] : at[scores + products - 1]])
    assert loop["MUFU.EX2"] >= 64
    assert loop["LDL"] == loop["STL"] == 0


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
    # Of each consumer, a loop for blocks that no mask cuts, and one for those that it does.
    assert len(built.main_loops) == 2 * consumers
    for i, loop in enumerate(built.addressed_loops):
        assert not writes_in_flight(loop)
        body = [text for _, text in loop]
        found = count(body)
        assert (found["FSEL"] >= per_thread) == (i % 2 == 1)
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
        # What three consumers have no registers for: few numbers of a row.
        assert found["LDL"] + found["STL"] <= (6 if i % 2 == 0 else 12) * (consumers == 3)


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


PAGES = {"layout": "paged", "page_size": 16, "n_pages": 9, "has_kv_lens": True, "Sq": 128}


def refusal(monkeypatch, capability=(9, 0), **changes):
    monkeypatch.setattr(requirements, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    case = draw(64, 64, dtype=torch.bfloat16)
    problem = problem_of(case.tensors)
    changes = {"device_type": "cuda", **changes}
    return hopper.supports(type(problem)(**{**vars(problem), **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "runs on CUDA"),
        ({"capability": (10, 0)}, "9.0"),
        ({"dtype": torch.float32}, "float32"),
        ({"D": 60}, "D = 60"),
        ({"Dv": 264}, "Dv = 264"),
        ({"layout": "varlen_paged"}, "ragged queries in pages"),
        (PAGES | {"page_size": 24}, "multiples of 16 keys, got 24"),
        (PAGES | {"Sq": 127}, "128 queries or more on pages"),
        (PAGES | {"D": 72}, "D in multiples of 16"),
        (PAGES | {"D": 208}, "or 256, got 208"),
        ({"layout": "varlen_paged", "query_invariant": True}, "ragged queries in pages"),
        ({"bias_shape": (1, 1, 1, 1)}, "bias"),
        ({"softcap": 1e4}, "softcap up to 1024.0, got 10000.0"),
        ({"Sq": 15, "Hq": 4, "Hkv": 4}, "16 queries"),
        ({"Sq": 32, "Hq": 4, "Hkv": 2}, "33 queries"),
        ({"Sq": 64, "Skv": 4096, "Hq": 4, "Hkv": 2}, "65 queries"),
        ({"Skv": 1 << 30}, "rows"),
        ({"Skv": 0, "has_kv_lens": True}, "one key"),
        ({"B": 0, "layout": "varlen"}, "one sequence"),
        ({"query_invariant": True, "D": 96, "Dv": 96}, "head dims 64 and 128"),
        (
            {"query_invariant": True, "constant_time": True, "D": 64, "Dv": 64},
            "query_invariant with constant_time",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(monkeypatch, changes, reason):
    assert reason in refusal(monkeypatch, **changes)


def test_takes_what_it_says(monkeypatch):
    assert refusal(monkeypatch) is None
    assert refusal(monkeypatch, D=256, Dv=128, causal=True, softcap=3.0, has_sinks=True) is None
    assert refusal(monkeypatch, has_kv_lens=True) is None
    assert refusal(monkeypatch, **PAGES) is None
    # `hopper_decode` comes first where it is faster.
    assert refusal(monkeypatch, **PAGES | {"query_invariant": True, "Sq": 1}) is None
    # Whether sequences are packed with others must not decide who runs them.
    assert refusal(monkeypatch, layout="varlen", Sq=1) is None


def test_block_of_keys_follows_the_head_dims_alone():
    for D in plan.PLANS:
        assert plan.PLANS[D].block_kv == plan.SHORT_PLANS[D].block_kv


@pytest.mark.parametrize(
    ("D", "Dv"), [(64, 64), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256)]
)
def test_flags_of_constant_time_fit_beside_keys_and_values(D, Dv):
    """Under a window, every key of a block has a flag in shared memory, in up to eight blocks."""
    q, v = (torch.empty(1, 2, 2000, n, dtype=torch.bfloat16) for n in (D, Dv))
    options = Options(window_left=500, window_right=30, constant_time=True)
    shape = plan.plan_of(describe(Tensors(q, q, v), options))
    D, Dv = plan.padded(D), plan.padded(Dv)
    tiles = shape.stages * shape.block_kv * (D + Dv)
    tiles += shape.block_q * (shape.q_stages * D + min(Dv, shape.out_columns))
    flags = cleaning.PLACES.value * shape.block_kv * 4
    # The rest is barriers and the queue of tiles.
    assert 2 * tiles + flags + 512 <= sizes.SHARED_BYTES


def test_pairs_only_where_they_fill_the_card_and_keys_stay_in_l2():
    assert plan.pays_to_pair(heads=16, n_q_tiles=128, processors=132, head_bytes=8 << 20)
    assert not plan.pays_to_pair(heads=8, n_q_tiles=128, processors=132, head_bytes=16 << 20)
    assert not plan.pays_to_pair(heads=1, n_q_tiles=8, processors=132, head_bytes=1 << 10)


def test_packed_sequences_have_the_tiles_of_their_mean_length():
    q = torch.empty(64, 16, 64, dtype=torch.bfloat16)

    def tiles(n: int, B: int) -> plan.Plan:
        offsets = torch.zeros(B + 1, dtype=torch.int32)
        packed = q[:1].expand(n, 16, 64)
        tensors = Tensors(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        return plan.plan_of(describe(tensors, Options(causal=True)))

    assert tiles(32768, 64) == plan.SHORT_PLANS[64]
    assert tiles(32768, 4) == plan.PLANS[64]


def test_strides_the_copy_engine_does_not_take_are_copied():
    x = torch.randn(2, 3, 40, 64).bfloat16()
    assert copy_engine.fit(x) is x
    assert copy_engine.fit(x.transpose(1, 2)).data_ptr() == x.data_ptr()
    for odd in (x[..., 1:], torch.cat([x, x[..., :1]], -1)[..., :64], x[:, :1].expand_as(x)):
        fitted = copy_engine.fit(odd)
        assert fitted.data_ptr() != odd.data_ptr()
        assert torch.equal(fitted, odd)


def test_ragged_keys_share_the_rows_between_batches():
    k = torch.randn(2, 3, 40, 64).bfloat16()
    assert launch._fit_keys(k, k, share_rows=True) == (k, k)
    heads_last = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert launch._fit_keys(heads_last, heads_last, share_rows=True)[0] is heads_last
    k_, v_ = launch._fit_keys(k, heads_last, share_rows=True)
    assert k_.stride() == v_.stride()


@pytest.mark.parametrize("aligned", [True, False])
def test_later_calls_bring_their_own_addresses(monkeypatch, aligned):
    launched = []
    compiled = SimpleNamespace(metadata=SimpleNamespace(global_scratch_size=0))
    monkeypatch.setattr(Launch, "run", lambda *_: compiled)
    monkeypatch.setattr(protocol, "launcher_of", lambda *_: lambda *given: launched.append(given))
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        monkeypatch.setattr(torch._C, name, lambda *device: -1, raising=False)
    tensors = Tensors(**draw(64, 64, dtype=torch.bfloat16).tensors)
    if not aligned:
        v = tensors.v
        tensors = tensors._replace(v=torch.zeros(v.numel() + 1, dtype=v.dtype)[1:].view_as(v))
    call = launch.forward_launches(describe(tensors, Options()), tensors, PROCESSORS)
    for _ in range(2):
        call(tensors, tensors.addresses())
    others = Tensors(*(x.clone() for x in tensors[:3]))
    out, lse, statistics = call(others, others.addresses())
    ((_, *addresses),) = launched
    bases, pointers = addresses[:4], tuple(addresses[4:])
    of_rows = (lse.data_ptr(), statistics.data_ptr())
    assert pointers == (out.data_ptr(), *of_rows, *[lse.data_ptr()] * 6)
    expected = [x.data_ptr() for x in (*others[:3], out)]
    if aligned:
        assert list(bases) == expected
    else:
        # v goes there as a copy.
        assert [a == b for a, b in zip(bases, expected, strict=True)] == [True, True, False, True]
        assert all(base % 16 == 0 for base in bases)


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


def test_no_batch_decides_the_number_of_consumers_in_constant_time():
    """It is part of a row's bits there."""
    options = Options(constant_time=True)
    few, many = (unwritten(4096, 4096, B=B, Hq=10, Hkv=10) for B in (2, 13))
    heights = [plan.plan_of(describe(x, Options())).block_q for x in (few, many)]
    assert heights == [128, 192]
    assert len({plan.plan_of(describe(x, options)).block_q for x in (few, many)}) == 1
    for lengths in ([300], [300, 9000]):
        packed = torch.empty(sum(lengths), 2, 64, dtype=torch.bfloat16)
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        tensors = Tensors(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        assert plan.plan_of(describe(tensors, options)).block_q == 128


@pytest.mark.parametrize(
    ("B", "S", "D", "constant_time", "order"),
    [
        (4, 1024, 64, True, LONGEST_FIRST),
        (16, 512, 64, True, LONGEST_FIRST),
        (4, 1024, 64, False, PAIRED),
        (4, 1024, 128, True, PAIRED),
        (4, 2048, 64, True, PAIRED),
        # Keys do not fit into L2.
        (16, 1024, 64, True, PAIRED),
    ],
)
def test_few_tiles_of_narrow_heads_are_dealt_singly_in_constant_time(B, S, D, constant_time, order):
    tensors = unwritten(S, S, B=B, Hq=16, Hkv=16, D=D)
    problem = describe(tensors, Options(causal=True, constant_time=constant_time))
    assert launch.Tiling.of(problem, PROCESSORS).order == order.value


@pytest.mark.parametrize("causal", [False, True])
def test_turns_in_constant_time_under_a_mask_alone(causal):
    options = Options(constant_time=True, causal=causal)
    assert plan.plan_of(describe(unwritten(4096, 4096, D=128), options)).pingpong == causal
