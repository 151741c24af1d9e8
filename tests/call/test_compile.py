"""torch.compile and torch.export: one graph, and no new one for a new length."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import lockstep

LENGTHS = (5, 6, 9, 17, 40)


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


@pytest.fixture
def compiled():
    """Compiles for every call of it anew, and counts the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    yield lambda f: (torch.compile(f, fullgraph=True, backend=counter), counter)
    torch._dynamo.reset()


def test_dense_with_gradients(compiled):
    def f(q, k, v, bias, sinks, lens):
        return lockstep.attention(
            q, k, v, bias=bias, sinks=sinks, kv_lens=lens, causal=True, return_lse=True
        )

    g, counter = compiled(f)
    for S in LENGTHS:
        leaves = [
            rand(2, 4, S, 8, grad=True), rand(2, 2, S + 3, 8, grad=True),
            rand(2, 2, S + 3, 6, grad=True), rand(S, S + 3, grad=True), rand(4, grad=True),
        ]  # fmt: skip
        lens = torch.tensor([S, S + 3])
        out, lse = g(*leaves, lens)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        expected, expected_lse = f(*leaves, lens)
        expected_grads = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), leaves)
        torch.testing.assert_close((out, lse, *grads), (expected, expected_lse, *expected_grads))
    # One for the first length, one for all others.
    assert counter.frame_count == 2


def test_lengths_marked_dynamic_compile_once(compiled):
    g, counter = compiled(lambda q, k, bias: lockstep.attention(q, k, k, bias=bias, causal=True))
    for S in LENGTHS:
        q, k, bias = rand(2, 4, S, 8), rand(2, 4, 2 * S, 8), rand(S, 2 * S)
        for tensor, dim in ((q, 2), (k, 2), (bias, 0), (bias, 1)):
            torch._dynamo.mark_dynamic(tensor, dim)
        g(q, k, bias)
    assert counter.frame_count == 1


def test_varlen(compiled):
    def f(q, k, v, offsets):
        return lockstep.attention_varlen(q, k, v, offsets, offsets, window=(4, 0))

    g, counter = compiled(f)
    for T in LENGTHS:
        q, offsets = rand(T + 6, 4, 8, grad=True), torch.tensor([0, T, T + 6])
        out = g(q, q, q, offsets)
        torch.testing.assert_close(out, f(q, q, q, offsets))
        out.sum().backward()
    assert counter.frame_count == 2


def test_paged(compiled):
    g, counter = compiled(lambda *args: lockstep.attention_paged(*args, causal=True))
    for n in LENGTHS:
        q, pages = rand(2, 4, 1, 8), rand(2 * n, 4, 2, 8)
        table, lens = torch.arange(2 * n).view(2, n), torch.tensor([4 * n, 3])
        expected = lockstep.attention_paged(q, pages, pages, table, lens, causal=True)
        torch.testing.assert_close(g(q, pages, pages, table, lens), expected)
    assert counter.frame_count == 2


def test_a_bound_of_queries(compiled):
    def f(q, pages, n):
        table, lens = torch.tensor([[0, 1], [2, 3]]), torch.tensor([4, 7])
        offsets = torch.tensor([0, 1, 3])  # 2 queries at most
        how = {"page_table": table, "kv_lens": lens, "max_seqlen_q": n}
        return lockstep.attention_varlen(q, pages, pages, offsets, **how)

    g, _ = compiled(f)
    q, pages = rand(3, 4, 8), rand(4, 4, 2, 8)
    for n in (2, 5, 7, 1000, None):
        torch.testing.assert_close(g(q, pages, n), f(q, pages, None))
    with pytest.raises(ValueError, match=r"^max_seqlen_q takes"):
        g(q, pages, 1)


def test_merge(compiled):
    def f(a, b, c, d):
        return lockstep.merge([(a, b), (c, d)])

    g, counter = compiled(f)
    for n in LENGTHS:
        parts = rand(n, 4), rand(n), rand(n, 4), rand(n)
        torch.testing.assert_close(g(*parts), f(*parts))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_inductor():
    q, k, v = (rand(2, 4, 6, 8, grad=True) for _ in range(3))

    def f(q, k, v):
        return (lockstep.attention(q + 1, k, v, causal=True) * 2).square().sum()

    torch._dynamo.reset()
    grads = torch.autograd.grad(torch.compile(f, fullgraph=True)(q, k, v), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad(f(q, k, v), (q, k, v)))


def transformed():
    """Functions made by torch.func, with their arguments."""
    q, k, v, bias, sinks = (
        rand(2, 4, 5, 8), rand(2, 2, 7, 8), rand(2, 2, 7, 6), rand(5, 7), rand(4)
    )  # fmt: skip
    packed, offsets, lens = rand(9, 4, 8), torch.tensor([0, 4, 9]), torch.tensor([3, 7])
    parts = rand(5, 4), rand(5), rand(5, 4), rand(5)

    def dense(q, k, v, bias, sinks):
        out, lse = lockstep.attention(
            q, k, v, bias=bias, sinks=sinks, kv_lens=lens, causal=True, return_lse=True
        )
        return out.square().sum() + lse[:, :, -1].sum()

    def alone(q):
        return lockstep.attention(q, q, q).square().sum()

    def varlen(x):
        out, lse = lockstep.attention_varlen(x, x, x, offsets, offsets, return_lse=True)
        return out.square().sum() + lse.sum()

    def merge(a, b, c, d):
        out, lse = lockstep.merge([(a, b), (c, d)])
        return out.square().sum() + lse.sum()

    samples = rand(3, 2, 4, 5, 8)
    return {
        "q": (grad(alone), (q,)),
        "all": (grad(dense, argnums=(0, 1, 2, 3, 4)), (q, k, v, bias, sinks)),
        "with its value": (grad_and_value(alone), (q,)),
        "varlen": (grad(varlen), (packed,)),
        "merge": (grad(merge, argnums=(0, 1, 2, 3)), parts),
        "vmap": (vmap(alone), (samples,)),
        "vmap of grad": (vmap(grad(alone)), (samples,)),
        "grad of vmap": (grad(lambda x: vmap(alone)(x).sum()), (samples,)),
        "vmap of grad of varlen": (vmap(grad(varlen)), (rand(3, 9, 4, 8),)),
        "vjp": (lambda q: vjp(alone, q)[1](q.new_ones(()))[0], (q,)),
    }


# A graph that has no breaks is the same where it might have some: that is tried with two.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fullgraph", "dtype"),
    [
        *((name, True, torch.float32) for name in transformed()),
        # By another kernel.
        *((name, True, torch.float64) for name in ("all", "varlen", "merge", "vmap of grad")),
        *product(["all", "vmap of grad"], [False], [torch.float32]),
    ],
)
def test_transforms_inside(name, fullgraph, dtype):
    function, args = transformed()[name]
    if dtype == torch.float32:
        args = tuple(x.float() for x in args)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "varlen"])
def test_transforms_inside_inductor(name):
    function, args = transformed()[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*args), function(*args))


def test_forward_mode_is_refused_while_compiling(compiled):
    g, _ = compiled(lambda q: jvp(lambda q: lockstep.attention(q, q, q), (q,), (q,)))
    with pytest.raises(Exception, match="has no forward-mode derivative"):
        g(rand(1, 2, 3, 4))


def test_second_derivatives_are_refused_while_compiling(compiled):
    inner = grad(lambda q: lockstep.attention(q, q, q).square().sum())
    g, _ = compiled(grad(lambda q: inner(q).sum()))
    with pytest.raises(Exception, match="has no second derivative"):
        g(rand(1, 2, 3, 4))


def test_an_unknown_kernel_is_named_while_compiling(compiled):
    g, _ = compiled(lambda q: lockstep.attention(q, q, q, kernel="abacus"))
    with pytest.raises(Exception, match=r"kernel takes one of .* got 'abacus'"):
        g(rand(1, 2, 3, 4))


@pytest.mark.slow
def test_a_scale_may_follow_from_a_length(compiled):
    def f(q):
        return lockstep.attention(q, q, q, scale=q.shape[2] ** -0.5, window=(q.shape[2] // 2, 0))

    g, _ = compiled(f)
    for S in LENGTHS:
        q = rand(1, 2, S, 8)
        torch.testing.assert_close(g(q), f(q))


def test_bad_input_is_named_while_compiling(compiled):
    g, _ = compiled(lambda q: lockstep.attention(q, q, q, window=(-1, 0)))
    with pytest.raises(Exception, match="window takes distances of 0 or more"):
        g(rand(1, 2, 3, 4))


def test_export_keeps_lengths_symbolic():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return lockstep.attention(q, k, v, causal=True)

    Sq, Skv = torch.export.Dim("Sq"), torch.export.Dim("Skv")
    q, k, v = rand(2, 4, 5, 8), rand(2, 2, 7, 8), rand(2, 2, 7, 8)
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({2: Sq}, {2: Skv}, {2: Skv}))
    longer = rand(2, 4, 11, 8), rand(2, 2, 30, 8), rand(2, 2, 30, 8)
    torch.testing.assert_close(program.module()(*longer), Model()(*longer))
