"""The operators: what torch asks of one, gradients, strides."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import lockstep
from lockstep import numerics, reference
from lockstep.call.vmap_rules import DenseArguments
from lockstep.options import Options

# What runs float32 and bfloat16 differs from machine to machine; float64 is the oracle's.
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
by_dtype = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float64, torch.bfloat16)),
    ],
)
OPTIONS = (*Options(True, 3, 0, 0.4, 30.0), None)
OFFSETS = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 9], dtype=torch.int32)
LENS, STARTS = torch.tensor([3, 7]), torch.tensor([0, 2])
ABSENT = (None,) * len(DenseArguments._fields[3:])


def rand(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def dense(**how):
    q, k, v = rand(2, 4, 5, 8, **how), rand(2, 2, 7, 8, **how), rand(2, 2, 7, 6, **how)
    return q, k, v, rand(1, 4, 5, 7, **how), rand(4, **how), LENS, STARTS, None


def varlen(**how):
    q, k, v = rand(5, 4, 8, **how), rand(9, 2, 8, **how), rand(9, 2, 6, **how)
    return q, k, v, rand(4, **how), *OFFSETS, torch.rand(2, 4)


def paged(**how):
    q, bias = rand(2, 4, 1, 8, **how), rand(1, 1, 1, 8, **how)
    k_pages, v_pages = rand(5, 4, 2, 8, **how), rand(5, 4, 2, 6, **how)
    return (
        q, k_pages, v_pages, torch.tensor([[1, 4], [2, -1]]), torch.tensor([7, 3]), bias,
        rand(4, **how), torch.tensor([5, 0]), None,
    )  # fmt: skip


def varlen_paged(**how):
    _, k, v, table, lens, _, sinks, starts, _ = paged(**how)
    offsets, slopes = torch.tensor([0, 4, 5]), torch.rand(4)
    return rand(5, 4, 8, **how), k, v, offsets, table, lens, sinks, starts, slopes


def check_op(dtype, op, args):
    """All of opcheck for float32; graphs are the same whatever the dtype."""
    without_graphs = ("test_schema", "test_autograd_registration", "test_faketensor")
    every = (*without_graphs, "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=every if dtype == torch.float32 else without_graphs)


@pytest.mark.parametrize("grad", [False, True])
@by_dtype
def test_opcheck_dense(dtype, grad):
    tensors = dense(dtype=dtype, grad=grad)
    check_op(dtype, torch.ops.lockstep.attention.default, (*tensors, *OPTIONS))
    plain = (*tensors[:3], *ABSENT)
    check_op(dtype, torch.ops.lockstep.attention.default, (*plain, *OPTIONS))
    # Tokens first in memory; all but the keys.
    q, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in plain[::2][:2])
    plain = (q.requires_grad_(grad), plain[1], v.requires_grad_(grad), *ABSENT)
    check_op(dtype, torch.ops.lockstep.attention.default, (*plain, *OPTIONS))


@pytest.mark.parametrize("grad", [False, True])
@by_dtype
def test_opcheck_varlen(dtype, grad):
    tensors = varlen(dtype=dtype, grad=grad)
    check_op(dtype, torch.ops.lockstep.attention_varlen.default, (*tensors, *OPTIONS))


@by_dtype
def test_opcheck_paged(dtype):
    tensors = paged(dtype=dtype)
    check_op(dtype, torch.ops.lockstep.attention_paged.default, (*tensors, *OPTIONS))
    tensors = varlen_paged(dtype=dtype)
    bounded = (*Options(True, max_seqlen_q=5), None)
    for options in (OPTIONS, bounded):
        check_op(dtype, torch.ops.lockstep.attention_varlen_paged.default, (*tensors, *options))


@by_dtype
@pytest.mark.parametrize("needs", [[True] * 5, [False, True, False, False, True]])
def test_opcheck_backward(needs, dtype):
    tensors = dense(dtype=dtype)
    out, lse, statistics = torch.ops.lockstep.attention(*tensors, *OPTIONS)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    args = (dout, dlse, out, statistics, *tensors, *OPTIONS, needs)
    check_op(dtype, torch.ops.lockstep.attention_backward.default, args)


@by_dtype
def test_opcheck_varlen_backward(dtype):
    tensors = varlen(dtype=dtype)
    out, _, statistics = torch.ops.lockstep.attention_varlen(*tensors, *OPTIONS)
    needs = [True, True, True, False, True]
    args = (torch.randn_like(out), None, out, statistics, *tensors, *OPTIONS, needs)
    check_op(dtype, torch.ops.lockstep.attention_varlen_backward.default, args)


@pytest.mark.parametrize("grad", [False, True])
@by_dtype
def test_opcheck_merge(dtype, grad):
    lse_dtype = numerics.statistics_dtype(dtype)
    outs = [rand(2, 3, 4, dtype=dtype, grad=grad) for _ in range(3)]
    lses = [rand(2, 3, dtype=lse_dtype, grad=grad) for _ in range(3)]
    check_op(dtype, torch.ops.lockstep.merge.default, (outs, lses))


def inputs(B=2, Hq=4, Hkv=2, Sq=3, Skv=5, D=3, Dv=2):
    return (
        rand(B, Hq, Sq, D, grad=True),
        rand(B, Hkv, Skv, D, grad=True),
        rand(B, Hkv, Skv, Dv, grad=True),
    )


def check_gradients(options, return_lse):
    def f(q, k, v):
        return lockstep.attention(q, k, v, return_lse=return_lse, **options)

    assert gradcheck(f, inputs())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (1, 1)},
        {"window": (2, None), "causal": True},
        {"scale": 1.7},
        {"softcap": 1.2},
        {"kv_lens": torch.tensor([3, 5]), "causal": True},
    ],
    ids=str,
)
def test_gradcheck(options):
    """Gradients through the output and through lse."""
    check_gradients(options, return_lse=True)


# A row without keys has lse -inf, and gradcheck cannot take differences of that.
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (2, None), "causal": True, "softcap": 1.2},
        {"kv_lens": torch.tensor([4, 0])},
        {"kv_lens": torch.tensor([2, 5]), "causal": True},
    ],
    ids=str,
)
def test_gradcheck_of_the_output_alone(options):
    check_gradients(options, return_lse=False)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 4, 1, 5), (3, 5), (5,), (2, 1, 3, 1)])
def test_gradcheck_bias(shape):
    def f(q, k, v, bias):
        return lockstep.attention(q, k, v, bias=bias, causal=True, return_lse=True)

    assert gradcheck(f, (*inputs(), rand(*shape, grad=True)))


def test_gradcheck_sinks():
    def f(q, k, v, sinks):
        return lockstep.attention(
            q, k, v, sinks=sinks, kv_lens=torch.tensor([4, 0]), return_lse=True
        )

    assert gradcheck(f, (*inputs(), rand(4, grad=True)))


@pytest.mark.slow
def test_gradcheck_varlen():
    def f(q, k, v, sinks):
        return lockstep.attention_varlen(
            q, k, v, *OFFSETS, sinks=sinks, causal=True, softcap=2.0, return_lse=True
        )

    q, k, v = rand(5, 4, 3, grad=True), rand(9, 2, 3, grad=True), rand(9, 2, 2, grad=True)
    assert gradcheck(f, (q, k, v, rand(4, grad=True)))


def test_gradient_through_lse_alone():
    q, k, v = inputs()
    _, lse = lockstep.attention(q, k, v, return_lse=True)
    _, expected = reference.attention(q, k, v, return_lse=True)
    grads = torch.autograd.grad(lse.sin().sum(), (q, k, v))
    # v takes no part in lse: autograd calls that None, Lockstep calls it 0.
    expected = torch.autograd.grad(expected.sin().sum(), (q, k, v), materialize_grads=True)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "qv", "ks"])
def test_only_what_requires_grad_gets_one(wanted, dtype):
    shapes = {
        "q": (2, 4, 3, 3),
        "k": (2, 2, 5, 3),
        "v": (2, 2, 5, 2),
        "bias": (3, 5),
        "sinks": (4,),
    }
    tensors = {name: rand(*shape, dtype=dtype) for name, shape in shapes.items()}
    names = [wanted] if wanted in tensors else [n for n in tensors if n[0] in wanted]
    for name in names:
        tensors[name].requires_grad_()
    lockstep.attention(**tensors).square().sum().backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in names)
        assert tensor.grad is None or tensor.grad.shape == tensor.shape


def test_no_sequences_have_zero_gradients():
    q, k, v = inputs(B=0)
    sinks = rand(4, grad=True)
    lockstep.attention(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad.eq(0).all()
    packed, offsets = rand(0, 4, 3, grad=True), torch.tensor([0])
    lockstep.attention_varlen(
        packed, packed, packed, offsets, offsets, sinks=sinks
    ).sum().backward()
    assert packed.grad.shape == packed.shape


@pytest.mark.parametrize("call", ["dense", "varlen"])
def test_second_derivatives_are_refused(call):
    x = rand(1, 2, 3, 4, grad=True) if call == "dense" else rand(3, 2, 4, grad=True)
    offsets = torch.tensor([0, 3])
    out = (
        lockstep.attention(x, x, x)
        if call == "dense"
        else lockstep.attention_varlen(x, x, x, offsets, offsets)
    )
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        grad.sum().backward()


def test_paged_gradients_are_refused():
    q, k, v, table, lens, *_ = paged()
    out = lockstep.attention_paged(q.requires_grad_(), k, v, table, lens)
    with pytest.raises(NotImplementedError, match="attention_paged is for inference"):
        out.sum().backward()
    q, k, v, offsets, table, lens, *_ = varlen_paged()
    out = lockstep.attention_varlen(
        q.requires_grad_(), k, v, offsets, page_table=table, kv_lens=lens
    )
    with pytest.raises(NotImplementedError, match="with a page_table is for inference"):
        out.sum().backward()


def strided(dtype):
    """Tensors equal to a contiguous [2, 2, 6, 8] in all but their strides."""
    x = rand(2, 2, 6, 8, dtype=dtype)
    return {
        "heads last": rand(2, 6, 2, 8, dtype=dtype).transpose(1, 2),
        "rows apart": rand(2, 2, 12, 8, dtype=dtype)[:, :, ::2],
        "rows with a tail": rand(2, 2, 6, 11, dtype=dtype)[..., :8],
        "last dim apart": rand(2, 2, 6, 16, dtype=dtype)[..., ::2],
        "last dim outside": rand(2, 2, 8, 6, dtype=dtype).mT,
        "one head for all": x[:, :1].expand(2, 2, 6, 8),
        "one row for all": x[:, :, :1].expand(2, 2, 6, 8),
        "one number for all": x[..., :1].expand(2, 2, 6, 8),
        "offset": rand(3, 2, 6, 8, dtype=dtype)[1:],
    }


def assert_lies_like(result, x):
    """Tokens first in memory where x has them first, heads first elsewhere; without gaps."""
    tokens_first = x.stride(2) > x.stride(1)
    assert (result.transpose(1, 2) if tokens_first else result).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_lie_as_the_queries_do(dtype):
    q, k, v = (rand(2, 5, 4, 8, dtype=dtype).transpose(1, 2) for _ in range(3))
    out, lse = lockstep.attention(q, k, v, return_lse=True)
    assert_lies_like(out, q)
    assert lse.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).reshape(2, 5, -1).data_ptr() == out.data_ptr()
    same, same_lse = lockstep.attention(*(x.contiguous() for x in (q, k, v)), return_lse=True)
    assert same.is_contiguous()
    assert same_lse.is_contiguous()
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    pages, table = rand(3, 4, 4, 8, dtype=dtype), torch.tensor([[0, 1], [2, 0]])
    assert_lies_like(lockstep.attention_paged(q, pages, pages, table, torch.tensor([7, 5])), q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", strided(torch.float32))
def test_strides_change_nothing(strides, dtype):
    x, y, dout = (
        strided(dtype)[strides],
        rand(2, 2, 6, 8, dtype=dtype),
        rand(2, 2, 8, 6, dtype=dtype),
    )
    for q, k, v in ((x, y, y), (y, x, y), (y, y, x), (x, x, x)):
        results = []
        for tensors in ((q, k, v), tuple(t.contiguous() for t in (q, k, v))):
            leaves = [t.detach().requires_grad_() for t in tensors]
            out = lockstep.attention(*leaves, causal=True)
            assert_lies_like(out, leaves[0])
            grads = torch.autograd.grad(out, leaves, dout.mT)
            for grad, leaf in zip(grads, leaves, strict=True):
                assert_lies_like(grad, leaf)
            results.append((out, *grads))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_a_bias_change_nothing(dtype):
    q, bias = rand(2, 2, 6, 8, dtype=dtype), rand(6, 6, dtype=dtype)
    expected = lockstep.attention(q, q, q, bias=bias.mT.contiguous())
    torch.testing.assert_close(lockstep.attention(q, q, q, bias=bias.mT), expected)
    column = bias[:, :1]
    expected = lockstep.attention(q, q, q, bias=column.expand(2, 2, 6, 6).contiguous())
    torch.testing.assert_close(
        lockstep.attention(q, q, q, bias=column.expand(2, 2, 6, 6)), expected
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_lengths_and_tables_change_nothing(dtype):
    q, k, v, table, lens, *_ = paged(dtype=dtype)
    expected = lockstep.attention_paged(q, k, v, table, lens)
    apart = torch.stack([lens, -lens], dim=1)[:, 0]
    got = lockstep.attention_paged(q, k, v, table.T.contiguous().T, apart)
    torch.testing.assert_close(got, expected)
    spread = torch.tensor([0, 9, 3, 9, 6, 9])[::2]
    x = rand(6, 2, 4, dtype=dtype)
    expected = lockstep.attention_varlen(x, x, x, spread.clone(), spread.clone())
    torch.testing.assert_close(lockstep.attention_varlen(x, x, x, spread, spread), expected)
