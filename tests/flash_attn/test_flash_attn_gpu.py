"""flash_attn_with_kvcache on a GPU: packed against one by one, in graphs, caches that are full."""

from __future__ import annotations

import pytest
import torch

from lockstep.flash_attn import fa3, flash_attn_with_kvcache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, ROOM = 16, 160


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def pairs_of(ends):
    return list(zip(ends.tolist(), ends.tolist()[1:], strict=False))


@pytest.mark.parametrize("paged", [False, True])
def test_packed_queries_over_a_cache(paged):
    """As sequence by sequence, new keys and all; a captured graph gives the same bits."""
    torch.manual_seed(0)
    lens, ends, new_ends = ints(70, 0, 122), ints(0, 1, 4, 6), ints(0, 2, 5, 7)
    q, k, v = draw(6, 4, 64), draw(7, 2, 64), draw(7, 2, 64)
    angle = torch.arange(400, device="cuda")[:, None] * 0.7 ** torch.arange(8, device="cuda")
    options = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "causal": True}
    options["return_softmax_lse"] = True
    caches = draw(2, 3, ROOM, 2, 64)
    held, given = caches.clone(), {}
    if paged:
        given["page_table"] = table = torch.randperm(30, device="cuda").view(3, -1).int()
        held = torch.empty(2, 30, PAGE, 2, 64, device="cuda", dtype=torch.bfloat16)
        held[:, table.long()] = caches.view(2, 3, -1, PAGE, 2, 64)
    before = held.clone()
    given |= {"cache_seqlens": lens, "cu_seqlens_q": ends, "cu_seqlens_k_new": new_ends}

    def call():
        return fa3.flash_attn_with_kvcache(q, *held, k, v, **given, **options)

    out, lse = call()
    for b, ((i, j), (c, d)) in enumerate(zip(pairs_of(ends), pairs_of(new_ends), strict=True)):
        wanted, wanted_lse = fa3.flash_attn_with_kvcache(
            q[None, i:j],
            *caches[:, b : b + 1],
            k[None, c:d],
            v[None, c:d],
            cache_seqlens=lens[b : b + 1],
            **options,
        )
        torch.testing.assert_close(out[i:j], wanted[0], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse[:, i:j], wanted_lse[0], rtol=1e-3, atol=1e-3)
    found = held[:, table.long()].view(2, 3, ROOM, 2, 64) if paged else held
    assert torch.equal(found, caches)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    held.copy_(before)
    graph.replay()
    assert torch.equal(captured[0], out)
    assert torch.equal(captured[1], lse)
    found = held[:, table.long()].view(2, 3, ROOM, 2, 64) if paged else held
    assert torch.equal(found, caches)


@pytest.mark.parametrize("rows", [(0, -1, 1), (-1, 0, 1)])
def test_a_page_that_is_not_there_and_a_full_cache(rows):
    """Both make their own sequences NaN; the other one is right, and nothing else is written."""
    torch.manual_seed(0)
    q, new = draw(3, 1, 4, 64), draw(3, 1, 2, 64)
    pages = torch.zeros(2, 4, PAGE, 2, 64, device="cuda", dtype=torch.bfloat16)
    table = ints(*rows)[:, None].contiguous()
    out = flash_attn_with_kvcache(
        q, *pages, new, new, cache_seqlens=ints(0, 0, PAGE), block_table=table
    )
    b = rows.index(0)
    assert torch.equal(pages[:, 0, 0], new[b].expand(2, -1, -1))
    assert not pages[:, 0, 1:].any()
    assert not pages[:, 1:].any()
    # One key, whose weight is 1: its value.
    assert torch.equal(out[b, 0], new[b, 0].repeat_interleave(2, 0))
    assert out[1 - b].isnan().all()
    assert out[2].isnan().all()


def test_queries_see_the_keys_of_their_own_chunk():
    """As chunks by themselves, gradients too."""
    torch.manual_seed(0)
    inputs = [draw(2, 300, heads, 64).requires_grad_() for heads in (4, 2, 2)]
    out = fa3.flash_attn_func(*inputs, causal=True, attention_chunk=100)
    parts = [
        fa3.flash_attn_func(*(x[:, i : i + 100] for x in inputs), causal=True)
        for i in (0, 100, 200)
    ]
    wanted = torch.cat(parts, 1)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=1e-2)
    dout = draw(2, 300, 4, 64)
    found = torch.autograd.grad(out, inputs, dout)
    for gradient, by_itself in zip(found, torch.autograd.grad(wanted, inputs, dout), strict=True):
        torch.testing.assert_close(gradient, by_itself, rtol=5e-2, atol=5e-2)
