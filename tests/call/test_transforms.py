"""torch.func: vmap and reverse mode work, forward mode says that it does not."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

import lockstep
from lockstep import numerics
from lockstep.options import Options


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_derivatives_are_refused(dtype):
    q, offsets = rand(1, 1, 2, 3, dtype=dtype), torch.tensor([0, 2])
    packed = q[0].transpose(0, 1)
    calls = [
        (q, lambda q: lockstep.attention(q, q, q).square().sum()),
        (packed, lambda x: lockstep.attention_varlen(x, x, x, offsets, offsets).square().sum()),
    ]
    for x, call in calls:
        inner = grad(call)
        outer = grad(lambda x, inner=inner: inner(x).sum())
        for function, given in ((outer, x), (vmap(outer), torch.stack([x, x]))):
            with pytest.raises(NotImplementedError, match="has no second derivative"):
                function(given)
        leaf = x.detach().requires_grad_()
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            inner(leaf).sum().backward()


def test_a_gradient_inside_a_gradient_that_does_not_derive_it():
    q, other = rand(1, 1, 2, 3), rand(1, 1, 2, 3)
    inner = grad(lambda q: lockstep.attention(q, q, q).square().sum())
    torch.testing.assert_close(grad(lambda x: (inner(other) * x).sum())(q), inner(other))


def test_gradients_of_merge_of_every_order():
    parts = rand(5, 4), rand(5), rand(5, 4), rand(5)

    def f(*parts):
        out, lse = lockstep.merge([parts[:2], parts[2:]])
        return out.square().sum() + lse.sum()

    def g(*parts):
        out, lse = numerics.merge(parts[::2], parts[1::2])
        return out.square().sum() + lse.sum()

    def twice(f):
        return grad(lambda *x: grad(f)(*x).square().sum(), argnums=(0, 1, 2, 3))

    torch.testing.assert_close(twice(f)(*parts), twice(g)(*parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_mode_is_refused(dtype):
    q, pages = rand(1, 1, 2, 3, dtype=dtype), rand(2, 4, 1, 3, dtype=dtype)
    packed, offsets = rand(4, 2, 3, dtype=dtype), torch.tensor([0, 4])
    table, lens = torch.tensor([[1]]), torch.tensor([3])
    calls = [
        (q, lambda q: lockstep.attention(q, q.detach(), q)),
        (packed, lambda x: lockstep.attention_varlen(x, x, x, offsets, offsets)),
        (q, lambda q: lockstep.attention_paged(q, pages, pages, table, lens)),
    ]
    message = "has no forward-mode derivative"
    for x, call in calls:
        with pytest.raises(NotImplementedError, match=message):
            jvp(call, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
            call(forward_ad.make_dual(x, x))
        # A tangent of zeros has no memory.
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
            call(forward_ad.make_dual(x, torch._efficientzerotensor(x.shape, dtype=dtype)))


def test_merge_has_a_forward_mode_derivative():
    parts = rand(5, 4), rand(5), rand(5, 4), rand(5)

    def f(*parts):
        return lockstep.merge([parts[:2], parts[2:]])

    _, tangents = jvp(f, parts, parts)
    step = 1e-6
    ahead, behind = (f(*(x * (1 + sign * step) for x in parts)) for sign in (1, -1))
    expected = tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))
    torch.testing.assert_close(tangents, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_may_be_asked_for_when_the_transform_is_over(dtype):
    q, offsets = rand(1, 2, 5, 8, dtype=dtype), torch.tensor([0, 2, 5])
    packed = q[0].transpose(0, 1)
    calls = [
        (q, lambda q: lockstep.attention(q, q, q)),
        (packed, lambda x: lockstep.attention_varlen(x, x, x, offsets, offsets)),
        (q, lambda q: lockstep.merge([(q, q[..., 0].to(q.dtype))] * 2)[0]),
    ]
    for x, call in calls:
        out, derive = vjp(call, x)
        leaf = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(call(leaf), leaf, torch.ones_like(out))
        for _ in range(2):
            assert torch.equal(derive(torch.ones_like(out))[0], expected)


def test_operators_take_part_in_transforms():
    q = rand(1, 2, 5, 8)
    options = (*(None,) * 5, *Options(causal=True), None)
    of_operator = grad(lambda q: torch.ops.lockstep.attention(q, q, q, *options)[0].square().sum())
    of_call = grad(lambda q: lockstep.attention(q, q, q, causal=True).square().sum())
    assert torch.equal(of_operator(q), of_call(q))


def test_several_gradients_at_a_time_are_refused_by_name():
    q = rand(1, 2, 5, 8, dtype=torch.float32).requires_grad_()
    out = lockstep.attention(q, q, q)
    with pytest.raises(RuntimeError, match="lockstep::attention_backward"):
        torch.autograd.grad(out, q, rand(3, *out.shape, dtype=q.dtype), is_grads_batched=True)


WRONG_SAMPLES = [
    {"k": (1, HKV, SKV, D), "v": (1, HKV, SKV, D)},
    {"v": (1, HKV, SKV, D)},
    {"q": (1, HQ, SQ, D)},
    {"q": (N * B, HQ, SQ, D)},
    {"bias": (N, HQ, 1, SKV)},
    {"k": (B, HKV, 1, D)},
]


@pytest.mark.parametrize("shapes", WRONG_SAMPLES, ids=str)
@pytest.mark.parametrize("mapped", [("q", "k", "v"), ("k",), ("q",), ("bias",)], ids=str)
def test_samples_that_do_not_fit_raise_what_they_raise_alone(shapes, mapped):
    sample = [rand(*shapes.get(name, shape)) for name, shape in SHAPES.items()] + [None]
    with pytest.raises(ValueError, match=" takes ") as alone:
        f(*sample)
    in_dims = tuple(0 if name in mapped else None for name in (*SHAPES, "lens"))
    args = [x if d is None else torch.stack([x] * N) for x, d in zip(sample, in_dims, strict=True)]
    with pytest.raises(ValueError, match=" takes ") as together:
        vmap(f, in_dims)(*args)
    assert str(together.value) == str(alone.value)


def test_lengths_of_a_sample_are_as_many_as_its_sequences():
    args, _ = arguments({"q": 0}, torch.float64)
    wrong = torch.tensor([[3], [4], [5]])
    with pytest.raises(ValueError, match=r"^kv_lens takes shape \[B\] with B = 2, got \[1\]"):
        vmap(f, (0, None, None, None, None, 0))(*args[:5], wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_samples(dtype):
    x, offsets = rand(0, 6, 2, 4, dtype=dtype), torch.tensor([0, 2, 6])

    def packed(x, offsets):
        return lockstep.attention_varlen(x, x, x, offsets, offsets, return_lse=True)

    out, lse = vmap(packed, (0, None))(x, offsets)
    assert (out.shape, out.dtype, lse.shape) == ((0, 6, 2, 4), dtype, (0, 6, 2))
    dx = vmap(grad(lambda x: packed(x, offsets)[0].sum()))(x)
    assert (dx.shape, dx.dtype) == (x.shape, dtype)
    with pytest.raises(ValueError, match=r"^q takes shape \[Tq, Hq, D\]"):
        vmap(packed, (0, None))(x[..., 0], offsets)

    q, pages = rand(0, 2, 4, 1, 8, dtype=dtype), rand(5, 4, 2, 8, dtype=dtype)
    out = vmap(lambda q: lockstep.attention_paged(q, pages, pages, LENS[:, None], LENS - 3))(q)
    assert out.shape == q.shape

    for mapped in ({"q": 0}, {"sinks": 0}, {"bias": 0}):
        args, in_dims = arguments(mapped, dtype)
        args = [a if d is None else a[:0] for a, d in zip(args, in_dims, strict=True)]
        out, lse = vmap(f, in_dims)(*args)
        assert (out.shape, lse.shape) == ((0, B, HQ, SQ, D), (0, B, HQ, SQ))
        grads = vmap(grad(loss, argnums=(0, 1, 2, 3, 4)), in_dims)(*args)
        assert [g.shape for g in grads] == [(0, *shape) for shape in SHAPES.values()]

    parts = rand(0, 5, 4, dtype=dtype), rand(0, 5, dtype=dtype)
    out, lse = vmap(lambda out, lse: lockstep.merge([(out, lse)] * 2))(*parts)
    assert (out.shape, lse.shape) == ((0, 5, 4), (0, 5))


def test_merge_of_samples_that_do_not_fit():
    def f(a, b, c, d):
        return lockstep.merge([(a, b), (c, d)])

    with pytest.raises(ValueError, match=r"^parts takes"):
        vmap(f)(rand(N, 5, 4), rand(N, 5), rand(N, 1, 4), rand(N, 1))


def test_forward_mode_that_does_not_concern_the_call_is_no_obstacle():
    q = rand(1, 1, 2, 3)
    expected = lockstep.attention(q, q, q)
    with forward_ad.dual_level():
        torch.testing.assert_close(lockstep.attention(q, q, q), expected)
