"""The functions of flash_attn, by their own conventions, against a definition written down here."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
import sys
import types

import pytest
import torch

import lockstep
from lockstep import flash_attn
from lockstep.flash_attn import bert_padding, fa3, fa4


def exact(
    q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, start=0, end=None
):
    """out [Sq, Hq, D] and lse [Hq, Sq] of one sequence, in float64."""
    q, k, v = (x.double() for x in (q, k[start:end], v[start:end]))
    (Sq, Hq, D), (Skv, Hkv) = q.shape, k.shape[:2]
    k, v = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    here, there = torch.arange(Sq)[:, None] + Skv - Sq, torch.arange(Skv)
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * (here - there).abs()
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(Sq, Skv, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= there >= here - left
    if right is not None and right >= 0:
        seen &= there <= here + right
    s = s.masked_fill(~seen, -math.inf)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def draw(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


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


LENS = torch.tensor([7, 0, 12]).int()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_takes_up_new_keys(paged, n, causal):
    (q,) = draw((3, max(n, 1), 4, 16))
    k_new, v_new = torch.randn(2, 3, n, 2, 16)
    caches = torch.randn(2, 3, 20, 2, 16)
    lens = LENS if n else LENS + 1
    wanted_cache = caches.clone()
    for b in range(3):
        for wanted, new in zip(wanted_cache, (k_new, v_new), strict=True):
            wanted[b, lens[b] : lens[b] + n] = new[b]
    new = (k_new, v_new) if n else (None, None)
    if paged:
        table = torch.randperm(15).view(3, 5).int()
        pages = torch.empty(2, 15, 4, 2, 16)
        pages[:, table.long()] = caches.view(2, 3, 5, 4, 2, 16)
        out = flash_attn.flash_attn_with_kvcache(
            q, *pages, *new, cache_seqlens=lens, block_table=table, causal=causal
        )
        found = pages[:, table.long()].view(2, 3, 20, 2, 16)
    else:
        out = flash_attn.flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=lens, causal=causal
        )
        found = caches
    assert torch.equal(found, wanted_cache)
    for b in range(3):
        k, v = wanted_cache[:, b]
        close(out[b], exact(q[b], k, v, causal=causal, end=int(lens[b]) + n)[0])


def test_rows_of_a_cache_and_left_padding():
    q, k_cache, v_cache = draw((3, 2, 4, 16), (5, 20, 2, 16), (5, 20, 2, 16))
    rows, pads = torch.tensor([4, 0, 2]), torch.tensor([3, 0, 7]).int()
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=LENS + 1,
        cache_batch_idx=rows,
        cache_leftpad=pads,
        causal=True,
        return_softmax_lse=True,
    )
    for b in range(3):
        limits = {"start": int(pads[b]), "end": int(LENS[b]) + 1}
        wanted, wanted_lse = exact(q[b], k_cache[rows[b]], v_cache[rows[b]], causal=True, **limits)
        close(out[b], wanted)
        close(lse[b], wanted_lse)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 8])
def test_rotary_embeddings(pairs, interleaved):
    """Turning both sides changes scores by the difference of positions alone."""
    q, k = draw((3, 2, 4, 16), (3, 2, 2, 16))
    caches = torch.zeros(2, 3, 20, 2, 16)
    angle = torch.arange(40)[:, None] * 0.7 ** torch.arange(pairs)
    turned = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    out = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        k,
        cache_seqlens=LENS,
        causal=True,
        rotary_interleaved=interleaved,
        **turned,
    )
    assert out.isfinite().all()

    def turn(x, position):
        a, b = (
            (x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2])
            if interleaved
            else (x[..., :pairs], x[..., pairs : 2 * pairs])
        )
        z = torch.complex(a, b) * torch.polar(torch.ones(pairs), angle[position])
        both = torch.stack([z.real, z.imag], -1).flatten(-2)
        both = both if interleaved else torch.cat([z.real, z.imag], -1)
        return torch.cat([both, x[..., 2 * pairs :]], -1)

    for b in range(3):
        for i in range(2):
            position = int(LENS[b]) + i
            close(caches[0, b, position], turn(k[b, i], position).double())
        queries = torch.stack([turn(q[b, i], int(LENS[b]) + i) for i in range(2)])
        limits = {"causal": True, "end": int(LENS[b]) + 2}
        close(out[b], exact(queries, caches[0, b], caches[1, b], **limits)[0])


def test_what_does_not_fit_a_cache_raises():
    q, new, cache = draw((2, 1, 4, 16), (2, 3, 2, 16), (2, 5, 2, 16))
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 4"):
        flash_attn.flash_attn_with_kvcache(
            q, cache, cache.clone(), new, new, cache_seqlens=torch.tensor([0, 4])
        )
    with pytest.raises(ValueError, match="room for 5"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache.repeat(1, 2, 1, 1), cache)
    with pytest.raises(ValueError, match="k and v"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, new)


def test_a_page_that_is_not_there_takes_no_key_from_another_sequence():
    """Page -1 must not stand for the first one, which the other sequence writes to."""
    q, new = draw((2, 1, 4, 16), (2, 1, 2, 16))
    for rows in ([0, -1], [-1, 0]):
        pages = torch.zeros(2, 3, 4, 2, 16)
        table = torch.tensor(rows)[:, None].int()
        with pytest.raises(ValueError, match="page_table takes"):
            flash_attn.flash_attn_with_kvcache(
                q, *pages, new, new, cache_seqlens=torch.tensor([0, 0]).int(), block_table=table
            )
        b = rows.index(0)
        assert torch.equal(pages[:, 0, 0], new[b].expand(2, -1, -1, -1).flatten(1, 2))
        assert not pages[:, 1:].any()


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


def test_packed_queries_over_pages():
    pages = torch.randn(2, 9, 16, 2, 32)
    k, v = pages
    table = torch.tensor([[4, 0, 7], [1, 8, -1]], dtype=torch.int32)
    ends, key_ends = torch.tensor([0, 3, 13]).int(), torch.tensor([0, 40, 60]).int()
    q = torch.randn(13, 4, 32)
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, ends, key_ends, 10, 40, causal=True, block_table=table
    )
    for b, (rows, n) in enumerate(((slice(0, 3), 40), (slice(3, 13), 20))):
        own = [x[table[b, : -(-n // 16)].long()].flatten(0, 1)[None, :n] for x in pages]
        expected = flash_attn.flash_attn_func(q[None, rows], *own, causal=True)
        assert torch.equal(out[rows], expected[0])


@pytest.mark.parametrize("causal", [False, True])
def test_queries_see_the_keys_of_their_own_chunk(causal):
    """The last query stands at the last key, wherever the chunks end."""
    chunk, window, ends, key_ends = (
        4,
        (2, -1),
        torch.tensor([0, 3, 3, 13]),
        torch.tensor([0, 9, 11, 21]),
    )
    q, k, v = draw((13, 4, 16), (21, 2, 16), (21, 2, 16))
    options = {"attention_chunk": chunk, "causal": causal, "return_attn_probs": True}
    out, lse = fa3.flash_attn_varlen_func(q, k, v, ends.int(), key_ends.int(), 10, 10, **options)
    narrow = fa3.flash_attn_varlen_func(
        q, k, v, ends.int(), key_ends.int(), 10, 10, window_size=window, **options
    )[0]
    for (a, b), (c, d) in zip(pairs_of(ends), pairs_of(key_ends), strict=True):
        for i in range(a, b):
            at = i - b + d - c  # the position of the key beside it
            first = at // chunk * chunk
            last = at + 1 if causal else min(first + chunk, d - c)
            keys, values = k[c:d], v[c:d]
            wanted, wanted_lse = exact(q[i : i + 1], keys[first:last], values[first:last])
            close(out[i], wanted[0])
            close(lse[:, i], wanted_lse[:, 0])
            left = max(first, at - window[0])
            close(narrow[i], exact(q[i : i + 1], keys[left:last], values[left:last])[0][0])
    same = fa3.flash_attn_func(q[None, 3:], k[None, 11:], v[None, 11:], **options)
    assert torch.equal(same[0][0], out[3:])
    assert torch.equal(same[1][0], lse[:, 3:])


def pairs_of(ends):
    return list(zip(ends.tolist(), ends.tolist()[1:], strict=False))


@pytest.mark.parametrize("paged", [False, True])
def test_packed_queries_over_a_cache(paged):
    """As with queries of equal number, sequence by sequence, new keys and all."""
    q, k, v = draw((6, 4, 16), (7, 2, 16), (7, 2, 16))
    ends, new_ends = torch.tensor([0, 1, 4, 6]).int(), torch.tensor([0, 2, 5, 7]).int()
    angle = torch.arange(40)[:, None] * 0.7 ** torch.arange(8)
    options = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "causal": True}
    caches = torch.randn(2, 3, 20, 2, 16)
    held, given = caches.clone(), {}
    if paged:
        given["page_table"] = table = torch.randperm(15).view(3, 5).int()
        held = torch.empty(2, 15, 4, 2, 16)
        held[:, table.long()] = caches.view(2, 3, 5, 4, 2, 16)
    out, lse = fa3.flash_attn_with_kvcache(
        q,
        *held,
        k,
        v,
        cache_seqlens=LENS,
        cu_seqlens_q=ends,
        cu_seqlens_k_new=new_ends,
        max_seqlen_q=3,
        rotary_seqlens=LENS + 5,
        return_softmax_lse=True,
        **given,
        **options,
    )
    for b, ((i, j), (c, d)) in enumerate(zip(pairs_of(ends), pairs_of(new_ends), strict=True)):
        wanted, wanted_lse = fa3.flash_attn_with_kvcache(
            q[None, i:j],
            *caches[:, b : b + 1],
            k[None, c:d],
            v[None, c:d],
            cache_seqlens=LENS[b : b + 1],
            rotary_seqlens=LENS[b : b + 1] + 5,
            return_softmax_lse=True,
            **options,
        )
        torch.testing.assert_close(out[i:j], wanted[0])
        torch.testing.assert_close(lse[:, i:j], wanted_lse[0])
    found = held[:, table.long()].view(2, 3, 20, 2, 16) if paged else held
    assert torch.equal(found, caches)


def test_pages_of_the_fourth_version():
    q, pages = draw((5, 4, 16), (2, 6, 16, 2, 16))
    ends, lens = torch.tensor([0, 2, 5]).int(), torch.tensor([20, 33]).int()
    table = torch.tensor([[3, 0, 0], [5, 1, 2]]).int()
    out, _ = fa4.flash_attn_varlen_func(
        q, *pages, cu_seqlens_q=ends, seqused_k=lens, page_table=table, causal=True
    )
    key_ends = torch.tensor([0, 20, 53]).int()
    wanted = flash_attn.flash_attn_varlen_func(
        q, *pages, ends, key_ends, 3, 33, causal=True, block_table=table
    )
    assert torch.equal(out, wanted)
    with pytest.raises(ValueError, match="seqused_k"):
        fa4.flash_attn_varlen_func(q, *pages, cu_seqlens_q=ends, page_table=table)
