"""torch.func: vmap and reverse mode work, forward mode says that it does not."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

import lockstep


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


N, B, HQ, HKV, SQ, SKV, D = 3, 2, 4, 2, 5, 6, 8
SHAPES = {
    "q": (B, HQ, SQ, D), "k": (B, HKV, SKV, D), "v": (B, HKV, SKV, D),
    "bias": (1, HQ, 1, SKV), "sinks": (HQ,),
}  # fmt: skip
LENS = torch.tensor([4, 6])


def f(q, k, v, bias, sinks, kv_lens):
    options = {"bias": bias, "sinks": sinks, "kv_lens": kv_lens, "causal": True}
    out, lse = lockstep.attention(q, k, v, **options, return_lse=True)
    return out, lse


def loss(*args):
    out, lse = f(*args)
    return out.square().sum() + lse[:, :, -1].sum()


def arguments(mapped: dict[str, int], dtype: torch.dtype):
    """Tensors with a mapped dim where `mapped` puts one, and their in_dims."""
    tensors = []
    for name, shape in SHAPES.items():
        shape = list(shape)
        if name in mapped:
            shape.insert(mapped[name], N)
        tensors.append(rand(*shape, dtype=dtype))
    lens = torch.stack([LENS, LENS - 1, LENS - 2], dim=mapped["lens"]) if "lens" in mapped else LENS
    return [*tensors, lens], tuple(mapped.get(name) for name in (*SHAPES, "lens"))


def one_by_one(function, args, in_dims):
    samples = [
        function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
        for i in range(N)
    ]
    if isinstance(samples[0], tuple):
        return tuple(torch.stack(results) for results in zip(*samples, strict=True))
    return torch.stack(samples)


DTYPES = [torch.float64, torch.float32]
MAPPED = [
    {"q": 0},
    {"k": 1},
    {"v": 4},
    {"q": 2, "k": 0, "v": 3},
    {"bias": 0},
    {"bias": 2, "q": 0},
    {"lens": 1},
    {"sinks": 0},
    {"q": 0, "k": 0, "v": 0, "bias": 0, "sinks": 1, "lens": 0},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mapped", MAPPED, ids=str)
def test_vmap(mapped, dtype):
    args, in_dims = arguments(mapped, dtype)
    torch.testing.assert_close(vmap(f, in_dims)(*args), one_by_one(f, args, in_dims))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mapped", MAPPED, ids=str)
def test_vmap_of_grad(mapped, dtype):
    args, in_dims = arguments(mapped, dtype)
    gradient = grad(loss, argnums=(0, 1, 2, 3, 4))
    torch.testing.assert_close(vmap(gradient, in_dims)(*args), one_by_one(gradient, args, in_dims))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mapped", MAPPED, ids=str)
def test_grad_of_vmap_and_backward_through_it(mapped, dtype):
    args, in_dims = arguments(mapped, dtype)

    def total(*args):
        return vmap(loss, in_dims)(*args).sum()

    leaves = [x.requires_grad_() for x in args[:5]]
    expected = torch.autograd.grad(one_by_one(loss, args, in_dims).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(total(*args), leaves), expected)
    args = [x.detach() for x in args]
    torch.testing.assert_close(grad(total, argnums=(0, 1, 2, 3, 4))(*args), expected)


def test_vmap_in_vmap():
    q = rand(2, 3, 1, 2, 4, 8)
    nested = vmap(vmap(lambda q: lockstep.attention(q, q, q)))(q)
    expected = lockstep.attention(*[q.flatten(0, 2)] * 3).unflatten(0, (2, 3, 1))
    torch.testing.assert_close(nested, expected)


def test_jacrev():
    q, k = rand(1, 1, 2, 3), rand(1, 1, 4, 3)
    jacobian = jacrev(lambda q: lockstep.attention(q, k, k))(q)
    expected = torch.autograd.functional.jacobian(lambda q: lockstep.attention(q, k, k), q)
    torch.testing.assert_close(jacobian, expected)


def test_varlen_and_paged():
    x, offsets = rand(N, 6, 2, 4), torch.tensor([[0, 2, 6], [0, 6, 6], [0, 0, 6]])

    def packed(x, offsets):
        return lockstep.attention_varlen(x, x, x, offsets, offsets, causal=True)

    torch.testing.assert_close(vmap(packed)(x, offsets), one_by_one(packed, (x, offsets), (0, 0)))
    gradient = grad(lambda x, offsets: packed(x, offsets).square().sum())
    torch.testing.assert_close(
        vmap(gradient)(x, offsets), one_by_one(gradient, (x, offsets), (0, 0))
    )

    q, pages, table, lens = (
        rand(N, 2, 4, 1, 8),
        rand(5, 4, 2, 8),
        torch.tensor([[0, 2], [4, 1]]),
        LENS,
    )

    def cached(q):
        return lockstep.attention_paged(q, pages, pages, table, lens)

    torch.testing.assert_close(vmap(cached)(q), one_by_one(cached, (q,), (0,)))


def test_merge():
    args = rand(N, 5, 4), rand(N, 5), rand(N, 5, 4), rand(N, 5)

    def f(a, b, c, d):
        return lockstep.merge([(a, b), (c, d)])

    torch.testing.assert_close(vmap(f)(*args), one_by_one(f, args, (0, 0, 0, 0)))
    gradient = grad(lambda *args: f(*args)[0].square().sum(), argnums=(0, 1))
    torch.testing.assert_close(vmap(gradient)(*args), one_by_one(gradient, args, (0, 0, 0, 0)))


def test_second_derivatives_are_refused():
    q = rand(1, 1, 2, 3)
    inner = grad(lambda q: lockstep.attention(q, q, q).square().sum())
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        grad(lambda q: inner(q).sum())(q)


def test_forward_mode_is_refused():
    q = rand(1, 1, 2, 3)
    with pytest.raises(NotImplementedError, match="jvp"):
        jvp(lambda q: lockstep.attention(q, q, q), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        lockstep.attention(forward_ad.make_dual(q, q), q, q)


def test_forward_mode_that_does_not_concern_the_call_is_no_obstacle():
    q = rand(1, 1, 2, 3)
    expected = lockstep.attention(q, q, q)
    with forward_ad.dual_level():
        torch.testing.assert_close(lockstep.attention(q, q, q), expected)
