"""The functions of flash_attn, by their own conventions, against a definition written down here."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from definition import close, draw, exact

import lockstep
from lockstep import flash_attn
from lockstep.flash_attn import bert_padding, fa3, fa4

OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (5, -1)},
    {"window_size": (3, 2)},
    {"causal": True, "window_size": (4, 7)},
    {"softcap": 1.5, "softmax_scale": 0.3},
]


def expected(options):
    names = {"window_size": "window", "softmax_scale": "scale"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS)
def test_dense(options):
    q, k, v = draw((2, 9, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16))
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert probabilities is None
    for b in range(2):
        wanted, wanted_lse = exact(q[b], k[b], v[b], **expected(options))
        close(out[b], wanted)
        close(lse[b], wanted_lse)
    also, also_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert torch.equal(also, out)
    assert torch.equal(also_lse, lse)
    third, third_lse = fa4.flash_attn_func(q, k, v, return_lse=True, **options)
    assert torch.equal(third, out)
    assert torch.equal(third_lse, lse)


@pytest.mark.parametrize("options", OPTIONS)
def test_packed(options):
    q, k, v = draw((15, 4, 16), (30, 2, 16), (30, 2, 16))
    of_q, of_k = torch.tensor([0, 4, 15]).int(), torch.tensor([0, 10, 30]).int()
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, of_q, of_k, 11, 20, return_attn_probs=True, **options
    )
    assert lse.shape == (4, 15)
    for b in range(2):
        mine, keys = slice(of_q[b], of_q[b + 1]), slice(of_k[b], of_k[b + 1])
        wanted, wanted_lse = exact(q[mine], k[keys], v[keys], **expected(options))
        close(out[mine], wanted)
        close(lse[:, mine], wanted_lse)
    also = fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, **options)[0]
    assert torch.equal(also, out)


def test_parts_of_packed_sequences():
    q, k, v = draw((15, 4, 16), (30, 2, 16), (30, 2, 16))
    of_q, of_k = torch.tensor([0, 4, 15]).int(), torch.tensor([0, 10, 30]).int()
    used_q, used_k = torch.tensor([3, 11]).int(), torch.tensor([10, 12]).int()
    out = fa3.flash_attn_varlen_func(
        q, k, v, of_q, of_k, 11, 20, seqused_q=used_q, seqused_k=used_k, causal=True
    )
    for b in range(2):
        mine = slice(of_q[b], of_q[b] + used_q[b])
        keys = slice(of_k[b], of_k[b] + used_k[b])
        close(out[mine], exact(q[mine], k[keys], v[keys], causal=True)[0])
    assert not out[3].any()


def test_tensors_packed_into_one():
    qkv, q, kv = draw((2, 9, 3, 4, 16), (2, 9, 4, 16), (2, 20, 2, 2, 16))
    parts = qkv.unbind(2)
    wanted = flash_attn.flash_attn_func(*parts, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    wanted = flash_attn.flash_attn_func(q, *kv.unbind(2))
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv), wanted)
    ends = torch.tensor([0, 5, 9]).int()
    wanted = flash_attn.flash_attn_varlen_func(*(x[0] for x in parts), ends, ends, 5, 5)
    found = flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], ends, 5)
    assert torch.equal(found, wanted)
    of_k = torch.tensor([0, 5, 20]).int()
    wanted = flash_attn.flash_attn_varlen_func(q[0], *kv[0].unbind(1), ends, of_k, 5, 15)
    found = flash_attn.flash_attn_varlen_kvpacked_func(q[0], kv[0], ends, of_k, 5, 15)
    assert torch.equal(found, wanted)


def test_heads_of_q_k_and_v_in_one_dim():
    (qkv,) = draw((2, 9, 8, 16))
    wanted = fa3.flash_attn_func(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:])
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4), wanted)
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(causal, batch):
    q, k, v = draw((2, 9, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16))
    slopes = torch.rand(2, 4) if batch else torch.rand(4)
    out = flash_attn.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes)
    for b in range(2):
        mine = slopes[b] if batch else slopes
        close(out[b], exact(q[b], k[b], v[b], causal=causal, slopes=mine)[0])
    q_ends, k_ends = (torch.arange(3, dtype=torch.int32) * n for n in (9, 20))
    packed = flash_attn.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), q_ends, k_ends, 9, 20,
        causal=causal, alibi_slopes=slopes,
    )  # fmt: skip
    assert torch.equal(packed.view(out.shape), out)


def test_sinks_and_their_gradient():
    q, k, v = draw((2, 9, 4, 16), (2, 9, 4, 16), (2, 9, 4, 16))
    sink = torch.zeros(4, requires_grad=True)
    out, _ = fa4.flash_attn_func(q, k, v, learnable_sink=sink)
    out.sum().backward()
    assert sink.grad.abs().max() > 0


def test_gradients():
    q, k, v = (x.requires_grad_() for x in draw((2, 9, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16)))
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = torch.autograd.grad(
        sum(exact(q[b], k[b], v[b], causal=True)[0].sum() for b in range(2)), (q, k, v)
    )
    for a, b in zip(found, wanted, strict=True):
        close(a, b.double())


def test_combine():
    q, k, v = draw((2, 5, 4, 16), (2, 30, 4, 16), (2, 30, 4, 16))
    parts = [
        fa3.flash_attn_func(q, k[:, i : i + 10], v[:, i : i + 10], return_attn_probs=True)
        for i in (0, 10, 20)
    ]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    wanted, wanted_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse.transpose(1, 2))


def test_padding_and_back():
    (x,) = draw((3, 6, 5))
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    tokens, indices, offsets, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask])
    assert offsets.tolist() == [0, 6, 8, 12]
    assert longest == 6
    assert used.tolist() == [6, 2, 4]
    back = bert_padding.pad_input(tokens, indices, 3, 6)
    assert torch.equal(back, x * mask[..., None])
    assert torch.equal(bert_padding.index_first_axis(x.flatten(0, 1), indices), tokens)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (flash_attn.flash_attn_func, {"dropout_p": 0.1}),
        (fa3.flash_attn_with_kvcache, {"attention_chunk": 4}),
        (fa3.flash_attn_func, {"q_descale": torch.ones(1)}),
        (fa4.flash_attn_func, {"mask_mod": lambda *_: True}),
        (fa4.flash_attn_func, {"qv": torch.ones(1)}),
    ],
)
def test_what_is_not_there_is_refused_by_name(function, argument):
    (q,) = draw((1, 4, 2, 16))
    with pytest.raises(NotImplementedError, match=next(iter(argument))):
        function(q, q, q, **argument)


def test_hints_change_nothing():
    (q,) = draw((1, 4, 2, 16))
    wanted = lockstep.attention(*(q.transpose(1, 2),) * 3).transpose(1, 2)
    assert torch.equal(flash_attn.flash_attn_func(q, q, q, deterministic=True), wanted)
    assert torch.equal(fa3.flash_attn_func(q, q, q, num_splits=4, pack_gqa=True), wanted)
    assert torch.equal(fa4.flash_attn_func(q, q, q, num_splits=4, deterministic=True)[0], wanted)


def test_imports_of_the_packages_themselves(monkeypatch):
    """A package that was there before comes back, and a submodule that was not goes."""
    earlier = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", earlier)
    flash_attn.activate()
    flash_attn.activate()
    try:
        code = """
import flash_attn
from flash_attn import flash_attn_func
from flash_attn.bert_padding import pad_input
from flash_attn.cute import flash_attn_func as fourth
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn_interface import flash_attn_with_kvcache as third
"""
        names = {}
        exec(code, names)
    finally:
        flash_attn.restore()
    assert names["flash_attn_func"] is flash_attn.flash_attn_func
    assert names["flash_attn"].bert_padding.pad_input is names["pad_input"]
    assert names["third"] is fa3.flash_attn_with_kvcache
    assert names["fourth"] is fa4.flash_attn_func
    assert sys.modules["flash_attn"] is earlier
    assert "flash_attn.bert_padding" not in sys.modules


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "bert_padding", "modules"])
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"lockstep.flash_attn.{name}")
    found = doctest.DocTestFinder().find(module, globs={**vars(module), "torch": torch})
    own = {
        n
        for n, f in inspect.getmembers(module, inspect.isfunction)
        if f.__module__ == module.__name__
    }
    public = {n for n in own if not n.startswith("_")}
    assert {test.name.split(".")[-1] for test in found if test.examples} >= public
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0
