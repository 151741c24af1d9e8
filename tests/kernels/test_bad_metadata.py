"""Lengths, offsets and page numbers that are wrong and live on the device: sequences that have some
are NaN, all others have the bits they have alone, and no kernel touches what it was not given.

In Triton's interpreter every access is checked (`bounds`). On a GPU inputs lie between NaN, which a
row that read too far would show; `memcheck.py` runs such calls under compute-sanitizer.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import triton.language as tl
from bad_metadata import (
    STALE,
    Spoiled,
    check,
    clean,
    spoil_lengths,
    spoil_offsets,
    spoil_pages,
    spoil_ragged,
    spoil_starts,
    spoil_varlen,
)
from hopper_cases import DV
from problems import (
    Case,
    Result,
    assert_same_bits,
    differing,
    draw,
    draw_varlen,
    paginate,
    pose,
    ragged,
    run,
    statistics_of,
    supporting,
)

pytest.importorskip("triton")
from triton_device import (
    GPU,
    INTERPRETED,
    attend,
    forget_calls,
    use_multiprocessors,
    use_small_tiles,
)

from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.triton import backward, launch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]


@pytest.fixture
def stale_memory(monkeypatch):
    """New tensors hold what stood there before."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(STALE))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(STALE))


def dtype_of(seed: int) -> torch.dtype:
    """Both: float32, which is cut into terms, takes the interpreter twice as long."""
    return F16 if seed % 3 else F32


def interpret(case: Case, douts: tuple[torch.Tensor, torch.Tensor] | None) -> Result:
    """The Triton kernels; a call would not let such numbers through on a CPU."""
    from bounds import checked

    problem, tensors = pose(case)
    with checked():
        out, lse, statistics = launch.prepare(problem, tensors)(tensors, tensors.addresses())
        if douts is None:
            return Result(out, lse)
        needs = Needs(True, True, True, tensors.bias is not None, tensors.sinks is not None)
        saved = BackwardTensors(*tensors, out, statistics, *douts)
        grads = backward.prepare_backward(problem, saved, needs)(saved, saved.addresses())
    return Result(out, lse, {n: x for n, x in grads._asdict().items() if x is not None})


@interpreted
@pytest.mark.usefixtures("stale_memory")
class TestInterpreted:
    @pytest.fixture(autouse=True)
    def _tiles(self, monkeypatch):
        use_small_tiles(monkeypatch)

    @pytest.mark.parametrize("seed", range(6))
    def test_offsets(self, seed):
        draws = random.Random(seed)
        q_lens, kv_lens = ([draws.choice((0, 1, 7, 20, 33)) for _ in range(4)] for _ in range(2))
        options = {"causal": True} if seed % 2 else {"sinks": torch.randn(2)}
        heads = {"Hq": 2, "Hkv": 1 + seed // 2 % 2, "D": 16, "dtype": dtype_of(seed)}
        case = draw_varlen([*q_lens, 3], [*kv_lens, 5], **heads, **options)
        dtype = (torch.int32, torch.int64)[seed % 2]
        for n in ("q", "k"):
            case = case.replaced(**{f"cu_seqlens_{n}": case.tensors[f"cu_seqlens_{n}"].to(dtype)})
        check(spoil_varlen(draws, case), interpret, gradients=True)

    @pytest.mark.parametrize("seed", range(4))
    def test_offsets_of_split_sequences(self, seed, monkeypatch):
        use_multiprocessors(monkeypatch, 1000)
        draws = random.Random(seed)
        sizes = {"Hkv": 1, "D": 16, "dtype": dtype_of(seed)}
        case = draw_varlen([1, 2, 1], [90, 33, 150], **sizes, query_invariant=True)
        check(spoil_varlen(draws, case), interpret, gradients=False)

    @pytest.mark.parametrize("seed", range(4))
    def test_lengths(self, seed):
        lens = torch.tensor([0, 41, 30, 7], dtype=(torch.int32, torch.int64)[seed % 2])
        more = {"bias": torch.randn(4, 1, 9, 41)} if seed == 3 else {"causal": True}
        sizes = {"B": 4, "Hkv": 1, "D": 16, "dtype": dtype_of(seed)}
        case = draw(9, 41, **sizes, kv_lens=lens, **more)
        check(spoil_lengths(random.Random(seed), case), interpret, gradients=True)

    @pytest.mark.parametrize("seed", range(3))
    def test_starts(self, seed):
        lens, starts = torch.tensor([12, 41, 30, 33]), torch.tensor([12, 0, 7, 17])
        more = {"bias": torch.randn(4, 1, 9, 41)} if seed == 2 else {"causal": True}
        sizes = {"B": 4, "Hkv": 1, "D": 16, "dtype": dtype_of(seed)}
        case = draw(9, 41, **sizes, kv_lens=lens, kv_starts=starts, **more)
        check(spoil_starts(random.Random(seed), case), interpret, gradients=True)
        if seed == 0:
            pages = paginate(case, 8, garbage=float("nan"))
            check(spoil_starts(random.Random(seed), pages), interpret, gradients=False)

    @pytest.mark.parametrize("multiprocessors", [1, 1000])
    @pytest.mark.parametrize("page_size", [8, 16])
    @pytest.mark.parametrize("spoil", [spoil_lengths, spoil_pages])
    def test_pages(self, spoil, page_size, multiprocessors, monkeypatch):
        use_multiprocessors(monkeypatch, multiprocessors)
        Sq, options = (1, {}) if multiprocessors > 1 else (9, {"causal": True})
        sizes = {"B": 3, "Hkv": 1, "D": 16, "dtype": F16 if page_size == 8 else F32}
        case = draw(Sq, 70, **sizes, kv_lens=torch.tensor([70, 1, 47]), **options)
        case = paginate(case.replaced(query_invariant=True), page_size, garbage=float("nan"))
        check(spoil(random.Random(page_size), case), interpret, gradients=False)

    @pytest.mark.parametrize("seed", range(4))
    def test_ragged_pages(self, seed, monkeypatch):
        use_multiprocessors(monkeypatch, (1, 1000)[seed % 2])
        lens = torch.tensor([70, 0, 20, 33])
        sizes = {"B": 4, "Hq": 2, "Hkv": 1 + seed // 2, "D": 16, "dtype": dtype_of(seed)}
        case = draw(20, 70, **sizes, kv_lens=lens, causal=True)
        case = ragged(paginate(case, 16, garbage=float("nan")), [1, 3, 20, 7])
        check(spoil_ragged(random.Random(seed), case), interpret, gradients=False)

    def test_pages_that_a_bias_or_a_window_hides(self):
        bias = torch.zeros(2, 1, 1, 64)
        bias[..., 16:32] = -torch.inf
        case = draw(1, 64, B=2, Hkv=1, D=16, kv_lens=torch.tensor([64, 60]))
        paged = paginate(case, 16)
        table = paged.tensors["page_table"].clone()
        table[0, 1] = -3
        for hidden in ({"bias": bias}, {"window": (20, 0)}):
            spoiled = paged.replaced(page_table=table, **hidden)
            result, expected = (interpret(x, None) for x in (spoiled, paged.replaced(**hidden)))
            assert torch.equal(result.out, expected.out)
            assert torch.equal(result.lse, expected.lse)

    @pytest.mark.parametrize("page", [8, 16], ids=["pages of a tile", "tiles of a page"])
    def test_no_pages_at_all(self, page):
        case = paginate(draw(1, 20, B=2, D=16, kv_lens=torch.tensor([20, 0])), page)
        none = {n: case.tensors[n][:0] for n in ("k", "v")}
        result = interpret(case.replaced(**none), None)
        assert result.out[0].isnan().all()
        assert result.lse[0].isnan().all()
        assert (result.out[1] == 0).all()

    def test_rows_without_any_sequence(self):
        case = draw_varlen([5, 3], [4, 4], D=16)
        none = torch.zeros(1, dtype=torch.int32)
        result = interpret(case.replaced(cu_seqlens_q=none, cu_seqlens_k=none), None)
        assert result.out.isnan().all()
        assert result.lse.isnan().all()

    @pytest.mark.parametrize("seed", range(4))
    def test_what_the_hopper_backward_goes_by(self, seed):
        """Its short launches: bounds and statistics before, dq after."""
        from bounds import checked

        from lockstep.kernels.hopper.backward import shares
        from lockstep.kernels.hopper.backward.rows import finish_queries, prepare_rows

        # Few loops are shared out, and short ones, and more where the last round is uneven.
        rule = shares.ShareRule(3, 12, 1, 2, 8, 1, 5, 99, 99)
        draws = random.Random(seed)
        spoiled = spoil_varlen(draws, draw_varlen([130, 0, 70, 64], [9, 8, 30, 1], Hq=1, Hkv=1))
        T, Tk = 264, 48
        offsets = [spoiled.case.tensors[f"cu_seqlens_{n}"].tolist() for n in ("q", "k")]
        (q, q_right), (k, k_right) = (clean(x, t) for x, t in zip(offsets, (T, Tk), strict=True))
        right = [a and b for a, b in zip(q_right, k_right, strict=True)]
        good = [int(a and b) for a, b in pairwise(right)]
        n_slots = T // 64 + 5
        result = interpret(spoiled.case, None)
        out = result.out.to(BF16).view(T, -1)
        statistics = statistics_of(pose(spoiled.case)[0], result.lse.view(T))
        large, flags = torch.full((n_slots, 2, 64), STALE), torch.full((n_slots,), 7)
        bounds, plan = (torch.full((n, 6), -7, dtype=torch.int32) for n in (3, 6))
        stats, turn = torch.full((n_slots, 2, 64), STALE), torch.full((2 * n_slots,), 7)
        cu = [torch.tensor(x) for x in offsets]
        rows = (0, 1, 1, 1, 4, T, Tk, n_slots)
        with checked(), pytest.MonkeyPatch.context() as patch:
            # In a kernel, of each number by itself; the interpreter would have those of Python.
            patch.setattr(shares, "min", lambda a, b: tl.minimum(a, b), raising=False)
            patch.setattr(shares, "max", lambda a, b: tl.maximum(a, b), raising=False)
            early_dq = torch.full((T, 64), STALE, dtype=BF16)
            prepare_rows[(n_slots,)](
                out, out, statistics, None, stats, large, flags.int(), turn.int(),
                turn[:1].int(), bounds, plan, early_dq, *cu, None, None, None, 0, 8, 8, *rows, 2,
                3, *rule,
                0, 0, 1.0, 0.0, ALIGN=8, D=64, DV=64, BLOCK_D=64, BLOCK_Q=64, BLOCK_KV=16,
                MAY_SEE_SINKS_ALONE=False, EARLY=False,
            )  # fmt: skip
            dq = torch.full((T, 64), STALE, dtype=BF16)
            sums = torch.zeros(n_slots, 2, 4096)
            finish_queries[(2 * n_slots,)](
                sums, dq, None, *cu, None, *rows, 0, 0, 1.0, D=64, REST=64, BLOCK_Q=64, BLOCK_KV=64,
                PARTS=2, TURNS=1, EARLY=False,
            )  # fmt: skip
        assert bounds.tolist() == [[*q, T], [*k, Tk], [*good, 0, -7]]
        # How queries are shared out in each sequence, those that no other one owns included.
        slots, several = [0], [0]
        ends = zip(pairwise([*q, T]), pairwise([*k, Tk]), strict=True)
        lengths = [
            (q_end - q_start, k_end - k_start) for (q_start, q_end), (k_start, k_end) in ends
        ]
        for b, (len_q, len_k) in enumerate(lengths):
            heads, span_tiles, by_heads, spans = shares.divide_queries.fn(
                -(-len_q // 64), -(-len_k // 16), 2, 3, rule
            )
            n = by_heads * spans
            assert plan[2:, b].tolist() == [heads, span_tiles, spans, n]
            slots.append(slots[-1] + -(-len_k // 16) * n)
            several.append(several[-1] + -(-len_k // 16) * n * (n > 1))
        assert plan[:2].tolist() == [slots, several]
        expected = torch.full((T, 64), torch.nan, dtype=BF16)
        for sequence in spoiled.good:
            expected[sequence.queries] = 0
        assert not differing(dq, expected)
        # The first launch has written the same where no key is seen.
        is_written = (early_dq != STALE).all(1)
        assert not differing(early_dq[is_written], expected[is_written])
        assert (early_dq[~is_written] == STALE).all()
        assert is_written[expected.isnan().all(1)].all()
        # Rows of bad sequences are marked; those of no sequence look like rows that see no key.
        marked = (stats[:, 0] < -1e38).sum()
        assert marked == sum(b - a for a, b, x in zip(q, q[1:], good, strict=False) if not x)

    def test_numbers_with_strides(self):
        """Which are not wrong at all, but do not lie side by side."""
        sinks, wide = torch.randn(4), torch.tensor([[9, -1], [3, -1], [0, -1]])
        dense = draw(5, 9, B=3, Hq=4, D=16, kv_lens=wide[:, 0], sinks=sinks.repeat(2, 1).t()[:, 0])
        paged = paginate(dense.replaced(kv_lens=torch.tensor([9, 3, 0])), 4)
        table = paged.tensors["page_table"]
        paged = paged.replaced(page_table=table.t().contiguous().t(), kv_lens=wide[:, 0])
        packed = draw_varlen([5, 4], [2, 7], D=16)
        offsets = {n: x for n, x in packed.tensors.items() if n.startswith("cu_")}
        offsets = {n: torch.stack([x, x + 100], 1)[:, 0] for n, x in offsets.items()}
        for case in (dense, paged, packed.replaced(**offsets)):
            plain = {n: x.contiguous() for n, x in case.tensors.items()}
            assert_same_bits(attend(case), attend(Case(plain, case.options)))

    def test_sinks_do_not_sum_over_rows_behind_the_last_sequence(self):
        case = draw_varlen([5, 3, 6], [4, 4, 2], D=16, sinks=torch.randn(4))
        douts = torch.randn(14, 4, 16), torch.randn(14, 4)
        padded = {n: case.tensors[n][:3] for n in ("cu_seqlens_q", "cu_seqlens_k")}
        whole = {n: case.tensors[n][:8] for n in ("q", "k", "v")}
        result = interpret(case.replaced(**padded), douts)
        expected = interpret(case.replaced(**padded, **whole), (douts[0][:8], douts[1][:8]))
        assert torch.equal(result.grads["sinks"], expected.grads["sinks"])


def between_nan(x: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with 4 KB of NaN, or of the largest integer, on either side."""
    n = 4096 // x.element_size()
    guard = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    memory = torch.full((x.numel() + 2 * n,), guard, dtype=x.dtype, device="cuda")
    return memory[n:-n].view(x.shape).copy_(x)


def on_gpu_between_nan(spoiled: Spoiled) -> Spoiled:
    case = spoiled.case
    guarded = {n: between_nan(x) for n, x in case.tensors.items()}
    return Spoiled(Case(guarded, case.options), spoiled.good, spoiled.why)


class OnGpu:
    """A kernel on memory that holds something from before."""

    def __init__(self, kernel: str, derives: bool) -> None:
        self.kernel, self.derives = kernel, derives

    def __call__(self, case: Case, douts: tuple[torch.Tensor, torch.Tensor] | None) -> Result:
        tensors = {n: x if x.is_cuda else x.cuda() for n, x in case.tensors.items()}
        q, k, v = (tensors[n] for n in "qkv")
        stale = [torch.full_like(x, STALE) for x in (q, k, v, q[..., :1].float(), v) for _ in "12"]
        torch.cuda.synchronize()
        del stale
        given = None if douts is None else tuple(x.cuda() for x in douts)
        if 0 in (*q.shape, *k.shape):
            return self.nothing(q, k, v)
        return run(Case(tensors, case.options), douts=given, kernel=self.kernel)

    def nothing(self, *qkv: torch.Tensor) -> Result:
        """A sequence without queries or keys, which not every kernel takes alone."""
        q, k, v = (torch.zeros_like(x) for x in qkv)
        lse = torch.full(q.shape[:-1], -torch.inf, device="cuda")
        return Result(q[..., : v.shape[-1]], lse, {"q": q, "k": k, "v": v} if self.derives else {})


def check_on_gpu(spoiled: Spoiled, *, gradients: bool) -> None:
    spoiled = on_gpu_between_nan(spoiled)
    kernels = supporting(spoiled.case, backward=gradients)
    assert kernels
    for kernel in kernels:
        check(spoiled, OnGpu(kernel.name, gradients), gradients=gradients)


@pytest.mark.parametrize(
    ("D", "Hq", "q_lens"),
    [
        *((64, 4, (263, 1, 0, 130, 500)), (64, 16, (700, 63, 1300, 0, 64))),
        *((192, 4, (263, 1, 0, 130, 500)), (256, 4, (200, 90, 300))),
    ],
    ids=["a tile to a program", "longest first", "D 192", "D 256"],
)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("_", [pytest.param(0, marks=on_gpu, id="gpu")])
def test_offsets(D, Hq, q_lens, seed, _):
    draws = random.Random(seed)
    kv_lens = [draws.choice((n, n, 2 * n, 17)) for n in q_lens]
    case = draw_varlen(
        list(q_lens), kv_lens, Hq=Hq, Hkv=Hq // 2, D=D, Dv=DV[D], dtype=BF16, causal=True
    )
    for n in ("q", "k"):
        offsets = case.tensors[f"cu_seqlens_{n}"].int()
        case = case.replaced(**{f"cu_seqlens_{n}": offsets})
    check_on_gpu(spoil_varlen(draws, case), gradients=True)


@pytest.mark.parametrize("D", [128, 192, 256])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("_", [pytest.param(0, marks=on_gpu, id="gpu")])
def test_lengths(D, seed, _):
    lens = torch.tensor([0, 300, 256, 7])
    case = draw(140, 300, B=4, Hq=2, D=D, Dv=DV[D], dtype=BF16, kv_lens=lens, causal=True)
    check_on_gpu(spoil_lengths(random.Random(seed), case), gradients=True)


@pytest.mark.parametrize("Sq", [1, 140])
@pytest.mark.parametrize("_", [pytest.param(0, marks=on_gpu, id="gpu")])
def test_starts(Sq, _):
    lens, starts = torch.tensor([200, 300, 256, 9]), torch.tensor([77, 0, 256, 3])
    case = draw(Sq, 300, B=4, Hq=2, dtype=BF16, kv_lens=lens, kv_starts=starts, causal=True)
    for seed in range(3):
        check_on_gpu(spoil_starts(random.Random(seed), case), gradients=True)
        pages = paginate(case, 64, garbage=float("nan"))
        check_on_gpu(spoil_starts(random.Random(seed), pages), gradients=False)


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("spoil", [spoil_lengths, spoil_pages])
@pytest.mark.parametrize("Sq", [1, 40])
@pytest.mark.parametrize("_", [pytest.param(0, marks=on_gpu, id="gpu")])
def test_pages(page_size, spoil, Sq, _):
    lens = torch.tensor([3001, 1, 700, 2048])
    case = draw(Sq, 3001, B=4, Hq=8, D=64, dtype=BF16, kv_lens=lens, causal=True)
    case = paginate(case, page_size, garbage=float("nan"))
    for seed in range(4):
        check_on_gpu(spoil(random.Random(seed), case), gradients=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("_", [pytest.param(0, marks=on_gpu, id="gpu")])
def test_ragged_pages(seed, _):
    lens = torch.tensor([3001, 1, 700, 2048])
    case = draw(300, 3001, B=4, Hq=8, D=64, dtype=BF16, kv_lens=lens, causal=True)
    case = ragged(paginate(case, 16, garbage=float("nan")), [1, 5, 300, 64])
    check_on_gpu(spoil_ragged(random.Random(seed), case), gradients=False)


@pytest.mark.parametrize("_", [pytest.param(0, marks=on_gpu, id="gpu")])
def test_a_call_raises_instead_on_request(monkeypatch, _):
    monkeypatch.setenv("LOCKSTEP_CHECK", "1")
    forget_calls(monkeypatch)
    case = draw(20, 30, B=2, dtype=BF16, kv_lens=torch.tensor([30, 31]))
    case = Case({n: x.cuda() for n, x in case.tensors.items()})
    with pytest.raises(ValueError, match=r"kv_lens takes 0 to Skv = 30, got 31 .* sequence 1"):
        run(case)


def test_drawn_offsets_are_wrong():
    """Most of them: a fuzz of good ones would show nothing."""
    draws = random.Random(0)
    drawn = [spoil_offsets(draws, [0, 5, 5, 20, 31], 31) for _ in range(200)]
    wrong = [x for x in drawn if x[0] != 0 or x != sorted(x) or x[-1] > 31]
    assert len(wrong) > 150
