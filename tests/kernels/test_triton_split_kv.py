"""Split-KV: right, and the same bits as a call that is not split."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Case, Result, assert_same_bits, draw, draw_varlen, paginate, same_bits

pytest.importorskip("triton")
from triton_device import (
    GPU,
    attend,
    check,
    needs_triton,
    use_multiprocessors,
    use_small_tiles,
)

import lockstep
from lockstep.kernels.triton.forward import attend as attend_kernel
from lockstep.kernels.triton.split_kv import merge

pytestmark = needs_triton
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def split_and_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, Result]:
    results = []
    for multiprocessors in (1000, 1):
        use_multiprocessors(monkeypatch, multiprocessors)
        results.append(attend(case))
    return results[0], results[1]


@pytest.mark.usefixtures("small_tiles")
class TestSmall:
    @pytest.mark.parametrize(
        "options",
        [
            {"causal": True},
            {"window": (40, 3)},
            {"softcap": 5.0, "sinks": torch.tensor([0.5, -math.inf])},
            {"bias": torch.linspace(-1, 1, 100)},
            {"scale": -0.3},
        ],
        ids=str,
    )
    def test_options(self, options, monkeypatch):
        use_multiprocessors(monkeypatch, 1000)
        check(draw(2, 100, D=16, **options))

    @pytest.mark.parametrize("dtype", HALF)
    def test_splitting_changes_no_bit(self, dtype, monkeypatch):
        kv_lens = torch.tensor([100, 0, 33])
        case = draw(2, 100, B=3, D=16, dtype=dtype, causal=True, kv_lens=kv_lens)
        assert_same_bits(*split_and_whole(case, monkeypatch))

    def test_varlen(self, monkeypatch):
        case = draw_varlen([1, 0, 3, 2], [70, 7, 40, 0], Hq=2, Hkv=1, D=16, causal=True)
        assert_same_bits(*split_and_whole(case, monkeypatch))
        check(case)

    def test_garbage(self, monkeypatch):
        dense = draw(2, 70, B=2, D=16, causal=True, kv_lens=torch.tensor([70, 41]))
        paged = paginate(dense, 16, garbage=math.nan)
        paged.tensors["v"][paged.tensors["page_table"][0, 69 // 16], 69 % 16] = math.inf
        split, whole = split_and_whole(paged, monkeypatch)
        assert_same_bits(split, whole)
        assert split.out[1].isfinite().all()
        assert split.out[0, :, 0].isfinite().all()  # the row before the last key
        assert not split.out[0, :, 1].isfinite().any()

    def test_rows_that_see_nothing(self, monkeypatch):
        use_multiprocessors(monkeypatch, 1000)
        result = attend(draw(40, 36, Hq=1, Hkv=1, D=16, window=(0, 0)))
        assert result.out[:, :, :4].eq(0).all()
        assert result.lse[:, :, :4].eq(-math.inf).all()
        assert result.lse[:, :, 4:].isfinite().all()

    def test_one_row_or_many(self):
        case = draw(20, 100, Hq=4, D=16, causal=True, query_invariant=True)
        whole = attend(case)
        for q_idx in (0, 7, 19):
            cut = {n: case.tensors[n][:, :, : 81 + q_idx] for n in ("k", "v")}
            row = slice(q_idx, q_idx + 1)
            alone = attend(case.replaced(q=case.tensors["q"][:, :, row], **cut))
            assert_same_bits(alone, Result(whole.out[:, :, row], whole.lse[:, :, row]))

    def test_merged_parts_are_the_whole(self):
        """They differ by the rounding of their lse, which parts within a call do not have."""
        case = draw(2, 100, D=16, query_invariant=True)
        cuts = [
            {n: case.tensors[n][:, :, i : i + 32] for n in ("k", "v")} for i in range(0, 100, 32)
        ]
        parts = [attend(case.replaced(**cut)) for cut in cuts]
        device = "cuda" if GPU else "cpu"
        outs, lses = ([getattr(p, n).to(device) for p in parts] for n in ("out", "lse"))
        out, lse = merge(outs, lses)
        whole = attend(case)
        torch.testing.assert_close(out.cpu(), whole.out, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(lse.cpu(), whole.lse, atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
class TestOnAGpu:
    """The real tiles."""

    @pytest.mark.parametrize(
        ("D", "dtype"),
        [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16), (80, torch.float32)],
    )
    @pytest.mark.parametrize("Sq", [1, 5, 40])
    def test_splitting_changes_no_bit(self, Sq, D, dtype, monkeypatch):
        kv_lens = torch.tensor([3000, 0, 1537, 31])
        case = draw(Sq, 3000, B=4, Hq=8, Hkv=2, D=D, dtype=dtype, causal=True, kv_lens=kv_lens)
        assert_same_bits(*split_and_whole(case, monkeypatch))
        check(case)

    @pytest.mark.parametrize(
        ("options", "D", "dtype"),
        [
            ({}, 64, torch.bfloat16),
            ({}, 128, torch.bfloat16),
            ({}, 256, torch.float16),
            ({}, 128, torch.float32),
            ({"window": (700, 0)}, 128, torch.float16),
            ({"softcap": 5.0, "scale": -0.1}, 64, torch.float16),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("size", [1, 3, 17, 100])
    def test_prefill_is_chunks_is_decode(self, size, options, D, dtype):
        Sq, Skv = 300, 1700
        case = draw(Sq, Skv, Hq=8, Hkv=2, D=D, dtype=dtype, causal=True, **options)
        case = case.replaced(query_invariant=True)
        whole = attend(case)
        for first in (0, 123, Sq - size):
            chunk = slice(first, first + size)
            seen = Skv - Sq + chunk.stop
            cut = {n: case.tensors[n][:, :, :seen] for n in ("k", "v")}
            part = attend(case.replaced(q=case.tensors["q"][:, :, chunk], **cut))
            assert_same_bits(part, Result(whole.out[:, :, chunk], whole.lse[:, :, chunk]))

    @pytest.mark.parametrize("D", [64, 128])
    def test_packed_sequences_have_the_bits_of_dense_ones(self, D):
        q_lens, kv_lens = [1, 2100, 300], [5000, 2100, 3000]
        packed = draw_varlen(q_lens, kv_lens, Hq=8, D=D, dtype=torch.bfloat16, causal=True)
        whole = attend(packed)
        q, out, lse = (x.split(q_lens) for x in (packed.tensors["q"], whole.out, whole.lse))
        k, v = (packed.tensors[name].split(kv_lens) for name in ("k", "v"))
        for b in range(3):
            alone = {n: x[b].transpose(0, 1)[None] for n, x in {"q": q, "k": k, "v": v}.items()}
            dense = attend(Case(alone, packed.options))
            mine = Result(out[b].transpose(0, 1)[None], lse[b].transpose(0, 1)[None])
            assert_same_bits(dense, mine)

    def test_neighbours(self):
        case = draw(1, 9000, B=5, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16, causal=True)
        lens = torch.tensor([9000, 9, 4096, 700, 9000])
        whole = attend(case.replaced(kv_lens=lens))
        for b in range(5):
            alone = case.replaced(
                **{n: case.tensors[n][b : b + 1] for n in ("q", "k", "v")}, kv_lens=lens[b : b + 1]
            )
            result = attend(alone)
            assert same_bits(result.out[0], whole.out[b])
        lens[1] = 10
        again = attend(case.replaced(kv_lens=lens))
        others = [0, 2, 3, 4]
        assert same_bits(again.out[others], whole.out[others])

    def test_one_build_for_all_lengths_and_batches(self):
        (kernels, *_), before = attend_kernel.device_caches[torch.cuda.current_device()], None
        for B, Skv in ((2, 3000), (1, 5001), (3, 777)):
            case = draw(1, Skv, B=B, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16, causal=True)
            tensors = {n: t.cuda() for n, t in case.tensors.items()}
            torch.cuda.set_sync_debug_mode("error")
            try:
                Case(tensors, case.options).call(lockstep, kernel="triton")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            before = before or len(kernels)
            assert len(kernels) == before

    def test_captured_in_a_graph(self):
        case = draw(1, 5000, B=2, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16)
        tensors = {n: t.cuda() for n, t in case.tensors.items()}
        moved = Case(tensors, case.options)
        eager = moved.call(lockstep, kernel="triton")[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = moved.call(lockstep, kernel="triton")[0]
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(captured.cpu(), eager.cpu())
