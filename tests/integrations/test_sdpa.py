"""Lockstep behind torch's scaled_dot_product_attention: which calls it answers, and with what."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.integrations import sdpa
from lockstep.integrations.sdpa import backward, forward

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="needs torch 2.11"
)
SIZES = [(33, 33), (20, 50), (50, 20), (1, 70)]


@pytest.fixture(autouse=True)
def restored():
    yield
    assert not sdpa.is_active(), "a test left it active"


def draw(Sq=33, Skv=33, Hq=4, Hkv=4, D=64, dtype=torch.float32, grad=True):
    torch.manual_seed(Sq * 1000 + Skv)
    shapes = ((2, Hq, Sq, D), (2, Hkv, Skv, D), (2, Hkv, Skv, D))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def exact(q, k, v, **options):
    """PyTorch's math attention in float64: out, dq, dk, dv for a gradient of ones."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*wide, **options)
    return out, *torch.autograd.grad(out.sum(), wide)


def assert_like_math(tensors, counted, **options):
    with sdpa.active():
        out = F.scaled_dot_product_attention(*tensors, **options)
        grads = torch.autograd.grad(out.sum(), tensors)
    assert len(counted) == 1
    for found, wanted in zip((out, *grads), exact(*tensors, **options), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_causal_mask_begins_in_the_upper_left_corner(sizes, causal, counted):
    assert_like_math(draw(*sizes), counted, is_causal=causal)


@pytest.mark.parametrize("shape", [(33, 33), (2, 1, 33, 33), (2, 4, 33, 33), (1, 1, 1, 33)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks(shape, kind, counted):
    mask = torch.rand(shape) > 0.3 if kind == torch.bool else torch.randn(shape)
    assert_like_math(draw(), counted, attn_mask=mask)


def test_grouped_heads_and_scale(counted):
    assert_like_math(draw(Hq=8, Hkv=2), counted, enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_have_the_bits_of_our_own_call(dtype, counted):
    q, k, v = draw(dtype=dtype)
    with sdpa.active():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, lockstep.attention(q, k, v, causal=True))


def test_inference_mode_and_no_grad(counted):
    q, k, v = draw()
    ours = lockstep.attention(q, k, v)
    counted.clear()
    for mode in (torch.inference_mode, torch.no_grad):
        with sdpa.active(), mode():
            out = F.scaled_dot_product_attention(q, k, v)
        assert torch.equal(out, ours)
        assert not out.requires_grad
    assert len(counted) == 2


def test_the_backward_operator_itself():
    """For callers below autograd, such as torch's own ring attention."""
    q, k, v = draw(20, 50, grad=False)
    dout = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa.active():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        wanted = torch.autograd.grad(out, leaves, dout)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, True)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(dout, q, k, v, out, lse, 0.0, True)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_what_lockstep_does_not_run_goes_to_torch(counted):
    q, k, v = draw(D=16)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def refuse(*args, **kwargs):
        raise NotImplementedError

    plain, _ = op(q, k, v)
    with sdpa.active(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "attention", refuse)
        out, _ = op(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal(out, plain)
    assert all(x.isfinite().all() for x in grads)
    with sdpa.active():
        # PyTorch takes its math implementation for this.
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert dropped.shape == q.shape
    assert not counted


def test_restore_gives_torchs_kernel_back(counted):
    q, k, v = draw()
    before = F.scaled_dot_product_attention(q, k, v)
    sdpa.activate()
    sdpa.activate()
    assert sdpa.is_active()
    sdpa.restore()
    sdpa.restore()
    after = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(before, after)
    assert type(after.grad_fn) is type(before.grad_fn)
    assert not counted


def test_active_gives_back_what_was_active_before():
    removed = []

    class Handle:
        def remove(self):
            removed.append(True)

    torch.nn.attention.register_flash_attention_impl("another", register_fn=Handle)
    torch.nn.attention.activate_flash_attention_impl("another")
    try:
        with sdpa.active():
            assert removed == [True]
        assert torch.nn.attention.current_flash_attention_impl() == "another"
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_multihead_attention_and_a_transformer_layer(counted):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 10, 64)
    causal = nn.Transformer.generate_square_subsequent_mask(10)
    wanted = twin(x, src_mask=causal, is_causal=True)
    wanted.sum().backward()
    with sdpa.active():
        found = layer(x, src_mask=causal, is_causal=True)
        found.sum().backward()
    assert len(counted) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(grad):
    q, k, v = draw(grad=grad)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa.active():
        out = attend(q, k, v)
        wanted = lockstep.attention(q, k, v, causal=True)
    assert torch.equal(out, wanted)
    if grad:
        found = torch.autograd.grad(out.sum(), (q, k, v))
        for a, b in zip(found, torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True):
            assert torch.equal(a, b)


def test_functional_transforms():
    q, k, v = draw(grad=False)
    with sdpa.active(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no vmap rule of its own for the operator
        found = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
        mapped = torch.func.vmap(F.scaled_dot_product_attention)(*(x[None] for x in (q, k, v)))
    wanted = torch.func.grad(lambda q: lockstep.attention(q, k, v).sum())(q)
    assert torch.equal(found, wanted)
    assert torch.equal(mapped[0], lockstep.attention(q, k, v))


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch():
    q, k, v = (torch.randn(8, 4, 65, 64) for _ in range(3))
    with sdpa.active():
        batch = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        alone = F.scaled_dot_product_attention(q[3:4], k[3:4], v[3:4], is_causal=True)
    assert torch.equal(batch[3:4], alone)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def assert_near_math_on_gpu(tensors, **options):
    with sdpa.active():
        out = F.scaled_dot_product_attention(*tensors, **options)
        grads = torch.autograd.grad(out.sum(), tensors)
    tolerance = 2e-5 if out.dtype == torch.float32 else 3e-2
    for found, wanted in zip((out, *grads), exact(*tensors, **options), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 72, 128])
def test_on_a_gpu(D, causal, dtype, counted):
    tensors = [x.detach().cuda().requires_grad_() for x in draw(130, 130, D=D, dtype=dtype)]
    assert_near_math_on_gpu(tensors, is_causal=causal)
    assert len(counted) == 1


@pytest.mark.gpu
@on_gpu
def test_masks_on_a_gpu(counted):
    tensors = [x.detach().cuda().requires_grad_() for x in draw(64, 96, dtype=torch.bfloat16)]
    assert_near_math_on_gpu(tensors, attn_mask=torch.rand(2, 1, 64, 96, device="cuda") > 0.3)
    assert len(counted) == 1


@pytest.mark.gpu
@on_gpu
def test_dropout_on_a_gpu_is_torchs(counted):
    q, k, v = (x.detach().cuda().requires_grad_() for x in draw(64, 64, dtype=torch.bfloat16))
    results = []
    for activated in (False, True):
        torch.manual_seed(7)
        with sdpa.active() if activated else torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert not counted


@pytest.mark.gpu
@on_gpu
def test_packed_sequences_on_a_gpu():
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (torch.randn(100, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ends = torch.tensor([0, 30, 100], device="cuda", dtype=torch.int32)
    with sdpa.active():
        found = varlen_attn(q, k, v, ends, ends, 70, 70)
    assert torch.equal(found, lockstep.attention_varlen(q, k, v, ends, ends))


@pytest.mark.gpu
@on_gpu
def test_gradients_of_packed_sequences_on_a_gpu():
    from torch.nn.attention.varlen import varlen_attn

    tensors = [
        torch.randn(100, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    ends = torch.tensor([0, 30, 100], device="cuda", dtype=torch.int32)
    with sdpa.active():
        out = varlen_attn(*tensors, ends, ends, 70, 70, window_size=(-1, 0))
        found = torch.autograd.grad(out.sum(), tensors)
    out = lockstep.attention_varlen(*tensors, ends, ends, causal=True)
    for a, b in zip(found, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert torch.equal(a, b)


class TestOperatorsOfGpus:
    """The answers to operators that PyTorch has for GPUs alone, given tensors on a CPU."""

    def test_pages_and_slopes(self):
        q, slopes = torch.randn(7, 4, 16), torch.rand(4)
        k, v = torch.randn(2, 6, 8, 2, 16)
        ends = torch.tensor([0, 5, 7], dtype=torch.int32)
        table, lens = torch.tensor([[4, 1], [0, 3]]).int(), torch.tensor([13, 6]).int()
        more = {"seqused_k": lens, "block_table": table, "alibi_slopes": slopes}
        out, lse, *_ = forward.flash_forward(
            *(q, k, v, ends, None, 5, 16, 0.0, True, False), window_size_left=-1, **more
        )
        wanted, wanted_lse = lockstep.attention_varlen(
            *(q, k, v, ends),
            page_table=table,
            kv_lens=lens,
            causal=True,
            alibi_slopes=slopes,
            return_lse=True,
        )
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse.T)
        with pytest.raises(NotImplementedError):
            forward.flash_forward(q, k, v, ends, None, 5, 16, 0.0, True, False, block_table=table)

    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_of_flash_attention(self, packed):
        tensors = [torch.randn(2, 9, 4, 16, requires_grad=True) for _ in range(3)]
        ends = torch.arange(3) * 9 if packed else None
        given = [x.detach().flatten(0, 1) if packed else x.detach() for x in tensors]
        dout = torch.randn_like(given[0])
        found = backward.flash_forward(
            *(dout, *given, None, None, ends, ends, 9, 9, 0.0, True, None, None),
            window_size_left=3,
        )
        out = lockstep.attention(*(x.transpose(1, 2) for x in tensors), window=(3, 0))
        wanted = torch.autograd.grad(out.transpose(1, 2), tensors, dout.view(2, 9, 4, 16))
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.reshape(b.shape), b)

    def test_gradients_of_efficient_attention(self):
        tensors = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]
        bias, dout = torch.randn(9, 9), torch.randn(2, 4, 9, 16)
        given = (dout, *(x.detach() for x in tensors), bias, *(None,) * 4, 0.0)
        *found, none = backward.efficient(*given, [True] * 3 + [False])
        out = lockstep.attention(*tensors, bias=bias)
        assert none is None
        for a, b in zip(found, torch.autograd.grad(out, tensors, dout), strict=True):
            assert torch.equal(a, b)
        with pytest.raises(NotImplementedError):
            backward.efficient(*given, [True] * 4)
