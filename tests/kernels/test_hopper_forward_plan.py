"""The Hopper forward without a GPU: what it refuses, how calls are planned, what they launch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems import draw, draw_varlen, unwritten

from lockstep.kernels import hopper
from lockstep.kernels.hopper.common import requirements
from lockstep.problem import Options, Tensors, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


from lockstep.kernels import launch as protocol
from lockstep.kernels.hopper.common import copy_engine, sizes
from lockstep.kernels.hopper.forward import launch, plan
from lockstep.kernels.hopper.forward.kept_keys.plan import kept_sizes
from lockstep.kernels.hopper.forward.scheduling import tiling
from lockstep.kernels.launch import Launch

PROCESSORS = 132


def problem_of(tensors: dict[str, torch.Tensor], **options):
    return describe(Tensors(**tensors), Options(**options))


@pytest.mark.parametrize(
    ("B", "Hq", "Sq", "Skv", "keeps"),
    [
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
    assert not plan.keeps_keys(describe(tensors, Options(window_left=50)))
    assert plan.keeps_keys(describe(tensors, Options(causal=True))) == keeps


@pytest.mark.parametrize(
    ("S", "keys", "keeps"),
    [
        (197, 197, True),
        (257, 257, True),
        # Tiles of 64 and of 128 rows have as many.
        (330, 330, False),
        (257, 385, False),
        (100, 100, False),
    ],
)
def test_many_heads_keep_their_keys_in_fp16(S, keys, keeps):
    """In bf16 one loop is as fast, and so it is under a mask."""
    sizes = {"B": 64, "Hq": 16, "Hkv": 16}
    tensors = unwritten(S, keys, dtype=torch.float16, **sizes)
    assert plan.keeps_keys(describe(tensors, Options())) == keeps
    assert not plan.keeps_keys(describe(tensors, Options(causal=True)))
    assert not plan.keeps_keys(describe(unwritten(S, keys, **sizes), Options()))
    # But not where tiles of 64 rows have fewer rows.
    assert plan.keeps_keys(describe(unwritten(160, 160, **sizes), Options()))


@pytest.mark.parametrize(
    ("D", "Skv", "keys"),
    [(64, 77, 80), (128, 77, 128), (80, 64, 64), (128, 112, 128), (128, 113, 0), (64, 129, 0)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_one_block(D, Skv, causal, keys):
    problem = describe(unwritten(300, Skv, D=D), Options(causal=causal))
    keys = 128 if causal and keys == 80 else keys
    assert plan.one_block_keys(problem) == keys
    assert plan.has_one_block(problem) == (keys > 0)


@pytest.mark.parametrize(
    ("D", "Dv", "Skv", "causal", "sizes"),
    [
        # Wide heads with one block of keys.
        (192, 128, 62, True, (128, 0, 2)),
        (192, 128, 129, False, None),
        (160, 160, 128, True, (128, 0, 2)),
        (192, 192, 64, True, (64, 0, 3)),
        (256, 256, 64, False, (64, 0, 2)),
        (256, 256, 65, True, None),
        # Rows that begin between sectors, without a mask.
        (72, 72, 157, False, (128, 64, 2)),
        (88, 88, 192, False, (128, 64, 2)),
        (72, 72, 193, False, None),
        (72, 72, 157, True, None),
        (80, 80, 157, False, None),
        (128, 128, 150, False, None),
    ],
)
def test_keys_that_stay(D, Dv, Skv, causal, sizes):
    problem = describe(unwritten(300, Skv, Hq=24, Hkv=2, D=D, Dv=Dv), Options(causal=causal))
    kept = kept_sizes(problem)
    assert (kept and (kept.block, kept.rest, kept.programs)) == sizes
    if kept:
        # Twelve heads of a group share their keys.
        assert kept.heads == 4
        assert kept.tiles_of_heads(problem) == 19


@pytest.mark.parametrize(
    ("Skv", "left", "right", "fits"),
    [
        (100, None, 7, True),
        # Rows have a running maximum, unless a window is wide.
        (60, 59, 0, False),
        (60, 100, None, False),
        (100, 300, 0, False),
        (100, 4000, 0, True),
    ],
)
def test_one_block_under_a_window(Skv, left, right, fits):
    options = Options(window_left=left, window_right=right)
    assert plan.has_one_block(describe(unwritten(90, Skv), options)) == fits


@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "S", "programs"),
    [(1, 4, 4, 1000, 64), (256, 40, 10, 42, 396), (207, 28, 4, 92, 264), (100, 6, 2, 60, 7)],
)
def test_every_tile_has_a_program(B, Hq, Hkv, S, programs):
    """And one only, whether keys are dealt out or not."""
    problem = describe(unwritten(S, S, B=B, Hq=Hq, Hkv=Hkv), Options())
    shares = plan.one_block_shares(problem, programs)
    n_q_tiles = -(-S // 64)
    of_keys = n_q_tiles * Hq // Hkv
    found = []
    for program in range(programs):
        first = (program * shares.distance + min(program, shares.further)) * shares.unit
        batch, kv_head, tile = first // of_keys // Hkv, first // of_keys % Hkv, first % of_keys
        for _ in range((shares.each + (program < shares.rest)) * shares.unit):
            found.append((batch, kv_head, tile))
            tile += 1
            if tile == of_keys:
                tile, kv_head, batch = 0, kv_head + shares.step, batch + shares.step_b
                if kv_head >= Hkv:
                    kv_head, batch = kv_head - Hkv, batch + 1
    assert sorted(found) == [
        (b, h, tile) for b in range(B) for h in range(Hkv) for tile in range(of_keys)
    ]


@pytest.mark.parametrize(
    ("B", "Hq", "S", "programs"), [(2, 10, 4096, 528), (1, 4, 1000, 64), (64, 16, 100, 528)]
)
def test_programs_with_one_block(B, Hq, S, programs):
    """As many as are at work at once, or as there are tiles."""
    tensors = unwritten(S, 77, B=B, Hq=Hq, Hkv=Hq)
    call = launch.forward_launches(describe(tensors, Options()), tensors, PROCESSORS)
    assert call.launches[0].grid[0] == programs


@pytest.mark.parametrize(("mean", "keys"), [(64, 64), (65, 128), (128, 128), (129, 0)])
def test_keys_of_one_block_in_packed_sequences(mean, keys):
    """The mean decides, and the kernel for all calls has the other sequences."""
    lens = [mean - 9, mean + 9] * 20
    problem = describe(Tensors(**draw_varlen(lens, lens, dtype=torch.bfloat16).tensors), Options())
    assert plan.one_block_keys(problem) == keys
    assert not plan.has_one_block(problem)


PAGES = {"layout": "paged", "page_size": 16, "n_pages": 9, "has_kv_lens": True, "Sq": 128, "Hq": 32}


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
        (PAGES | {"Sq": 24}, "25 queries or more of so many heads on pages"),
        (PAGES | {"Hq": 8, "Sq": 96}, "97 queries or more of so many heads on pages"),
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
    """Under a window, every key of a block in shared memory has a flag there."""
    q, v = (torch.empty(1, 2, 2000, n, dtype=torch.bfloat16) for n in (D, Dv))
    options = Options(window_left=500, window_right=30, constant_time=True)
    shape = plan.plan_of(describe(Tensors(q, q, v), options))
    D, Dv = plan.padded(D), plan.padded(Dv)
    tiles = shape.stages * shape.block_kv * (D + Dv)
    tiles += shape.block_q * (shape.q_stages * D + min(Dv, shape.out_columns))
    flags = shape.stages * shape.block_kv * 4
    # The rest is barriers and the queue of tiles.
    assert 2 * tiles + flags + 512 <= sizes.SHARED_BYTES


@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"window_left": 4095, "window_right": 0}, True),
        ({"window_left": 3071, "window_right": 0}, False),
        ({"window_left": 4095}, False),
        ({"window_left": 100, "query_invariant": True}, True),
        ({"constant_time": True}, False),
    ],
    ids=str,
)
def test_maxima_run_in_rows_that_may_see_little_of_their_first_block(options, fixed):
    tensors = unwritten(5000, 5000, D=128)
    assert plan.fixes_maximum(describe(tensors, Options(**options))) == fixed
    half = tensors._replace(**{x: getattr(tensors, x).half() for x in ("q", "k", "v")})
    assert not plan.fixes_maximum(describe(half, Options(**options)))


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (72, 72), (128, 128), (192, 128)])
@pytest.mark.parametrize(
    ("options", "block_kv"),
    [
        ({"window_left": 500, "window_right": 100}, 64),
        ({"window_left": 600, "window_right": 100}, 128),
        ({"window_left": 500}, 128),
        ({"window_left": 500, "window_right": 100, "query_invariant": True}, 128),
    ],
    ids=str,
)
def test_windows_of_some_hundred_keys_have_blocks_of_64(D, Dv, options, block_kv):
    shape = plan.plan_of(describe(unwritten(5000, 5000, D=D, Dv=Dv), Options(**options)))
    assert shape.block_kv == block_kv
    D, Dv = plan.padded(D), plan.padded(Dv)
    tiles = shape.stages * shape.block_kv * (D + Dv)
    tiles += shape.block_q * (shape.q_stages * D + min(Dv, shape.out_columns))
    assert 2 * tiles + 512 <= sizes.SHARED_BYTES


@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window_left": 4095}], ids=str)
@pytest.mark.parametrize(
    ("D", "Dv"), [(40, 40), (64, 64), (80, 80), (128, 128), (160, 160), (192, 128), (256, 256)]
)
def test_softcaps_have_blocks_of_64(D, Dv, options):
    """Wider ones would have more code than the cache of instructions holds."""
    capped = Options(**options, softcap=50.0)
    shape = plan.plan_of(describe(unwritten(5000, 5000, D=D, Dv=Dv), capped))
    assert (shape.block_kv, shape.consumers) == (64, 2)
    for strict in ("query_invariant", "constant_time"):
        as_ever = plan.plan_of(
            describe(unwritten(5000, 5000, D=D, Dv=Dv), Options(**options, **{strict: True}))
        )
        same = describe(unwritten(5000, 5000, D=D, Dv=Dv), capped._replace(**{strict: True}))
        assert plan.plan_of(same) == as_ever


def test_pairs_only_where_they_fill_the_card_and_keys_stay_in_l2():
    assert tiling.pays_to_pair(heads=16, n_q_tiles=128, processors=132, head_bytes=8 << 20)
    assert not tiling.pays_to_pair(heads=8, n_q_tiles=128, processors=132, head_bytes=16 << 20)
    assert not tiling.pays_to_pair(heads=1, n_q_tiles=8, processors=132, head_bytes=1 << 10)


def test_packed_sequences_have_the_tiles_of_their_mean_length():
    q = torch.empty(64, 16, 64, dtype=torch.bfloat16)

    def tiles(n: int, B: int) -> plan.Plan:
        offsets = torch.zeros(B + 1, dtype=torch.int32)
        packed = q[:1].expand(n, 16, 64)
        tensors = Tensors(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        return plan.plan_of(describe(tensors, Options(causal=True)))

    assert tiles(32768, 16) == plan.SHORT_PLANS[64]
    assert tiles(32768, 64) == replace(plan.SHORT_PLANS[64], one_loop=True)
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
    tensors = Tensors(**draw(64, 300, dtype=torch.bfloat16).tensors)
    if not aligned:
        v = tensors.v
        tensors = tensors._replace(v=torch.zeros(v.numel() + 1, dtype=v.dtype)[1:].view_as(v))
    call = launch.forward_launches(describe(tensors, Options(causal=True)), tensors, PROCESSORS)
    for _ in range(2):
        call(tensors, tensors.addresses())
    others = Tensors(*(x.clone() for x in tensors[:3]))
    out, lse, statistics = call(others, others.addresses())
    ((_, *addresses),) = launched
    bases, pointers = addresses[:4], tuple(addresses[4:])
    of_rows = (lse.data_ptr(), statistics.data_ptr())
    assert pointers == (out.data_ptr(), *of_rows, *[lse.data_ptr()] * 9)
    expected = [x.data_ptr() for x in (*others[:3], out)]
    if aligned:
        assert list(bases) == expected
    else:
        # v goes there as a copy.
        assert [a == b for a, b in zip(bases, expected, strict=True)] == [True, True, False, True]
        assert all(base % 16 == 0 for base in bases)
