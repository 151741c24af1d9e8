"""Caches, pages and chunks by the conventions of flash_attn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from definition import close, draw, exact

from lockstep import flash_attn
from lockstep.flash_attn import fa3, fa4

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


def test_the_most_queries_of_a_sequence_are_passed_on_where_there_are_pages():
    """On a CPU, a sequence with more is refused; a tensor is not looked at."""
    q, pages = draw((5, 4, 16), (2, 6, 16, 2, 16))
    ends, key_ends = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 20, 53]).int()
    table, lens = torch.tensor([[3, 0, 0], [5, 1, 2]]).int(), key_ends.diff()

    def all_versions(most):
        yield lambda: flash_attn.flash_attn_varlen_func(
            q, *pages, ends, key_ends, most, 33, block_table=table
        )
        yield lambda: fa3.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=lens, cu_seqlens_q=ends, max_seqlen_q=most, page_table=table
        )
        yield lambda: fa4.flash_attn_varlen_func(
            q, *pages, cu_seqlens_q=ends, max_seqlen_q=most, seqused_k=lens, page_table=table
        )[0]

    for too_few in all_versions(2):
        with pytest.raises(ValueError, match=r"^max_seqlen_q takes"):
            too_few()
    for a, b in zip(all_versions(3), all_versions(torch.tensor(2)), strict=True):
        assert torch.equal(a(), b())
