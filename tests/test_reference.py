"""The oracle against PyTorch, against sums done by hand, and against garbage."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lockstep import reference

NAN, INF = math.nan, math.inf


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_hand(scores, values, sink=None):
    """softmax and log-sum-exp of a few numbers, in Python floats."""
    weights = [math.exp(s) for s in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink))
    return sum(w * v for w, v in zip(weights, values, strict=True)) / total, math.log(total)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("D", "Dv"), [(8, 8), (5, 3)])
def test_plain_attention_is_pytorchs(causal, Hq, Hkv, D, Dv):
    q, k, v = rand(2, Hq, 9, D), rand(2, Hkv, 9, D), rand(2, Hkv, 9, Dv)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(reference.attention(q, k, v, causal=causal), expected)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 1, 7), (5, 7), (2, 1, 5, 1), (7,), ()])
def test_bias_broadcasts_as_pytorchs_mask_does(shape):
    q, k, v, bias = rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 4, 7, 8), rand(*shape)
    mask = bias.expand(2, 4, 5, 7)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(reference.attention(q, k, v, bias=bias, scale=0.3), expected)


def test_lse_is_the_logarithm_of_the_denominator():
    q, k, v = rand(1, 2, 3, 4), rand(1, 2, 6, 4), rand(1, 2, 6, 4)
    _, lse = reference.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT * 0.5, dim=-1))


def test_results_are_float64_whatever_comes_in():
    q = rand(1, 1, 2, 4).to(torch.float16)
    out, lse = reference.attention(q, q, q, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64


# One query dim, so that the scores are the keys themselves when q = 1 and scale = 1.
KEYS, VALUES = [0.1, -0.4, 0.7, 0.3, 0.2], [1.0, 2.0, 4.0, 8.0, 16.0]
K, V = tensor(KEYS).view(1, 1, 5, 1), tensor(VALUES).view(1, 1, 5, 1)


def ones(Sq: int) -> torch.Tensor:
    return torch.ones(1, 1, Sq, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "Sq", "seen"),
    [
        ({"causal": True}, 5, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
        ({"causal": True}, 2, [(0, 4), (0, 5)]),
        ({"causal": True}, 7, [None, None, (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
        ({"window": (1, 0)}, 5, [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5)]),
        ({"window": (1, 1)}, 3, [(1, 4), (2, 5), (3, 5)]),
        ({"window": (0, 2)}, 5, [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]),
        ({"window": (None, 1)}, 5, [(0, 2), (0, 3), (0, 4), (0, 5), (0, 5)]),
        ({"window": (2, None)}, 5, [(0, 5), (0, 5), (0, 5), (1, 5), (2, 5)]),
        ({"window": (1, None), "causal": True}, 3, [(1, 3), (2, 4), (3, 5)]),
        ({"window": (2**63 - 1, 0)}, 2, [(0, 4), (0, 5)]),
        ({"window": (0, 2**63 - 1)}, 2, [(3, 5), (4, 5)]),
        ({"window": (0, 0)}, 8, [None, None, None, (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        ({"kv_lens": torch.tensor([3])}, 1, [(0, 3)]),
        ({"kv_lens": torch.tensor([3]), "causal": True}, 2, [(0, 2), (0, 3)]),
        ({"kv_lens": torch.tensor([3]), "window": (0, 1)}, 2, [(1, 3), (2, 3)]),
        ({"kv_lens": torch.tensor([1]), "causal": True}, 3, [None, None, (0, 1)]),
        ({"kv_lens": torch.tensor([0])}, 2, [None, None]),
    ],
)
def test_which_keys_a_row_sees(options, Sq, seen):
    out, lse = reference.attention(ones(Sq), K, V, scale=1.0, return_lse=True, **options)
    for row, keys in enumerate(seen):
        expected = (
            (0.0, -INF) if keys is None else by_hand(KEYS[slice(*keys)], VALUES[slice(*keys)])
        )
        assert (out[0, 0, row, 0].item(), lse[0, 0, row].item()) == pytest.approx(expected)


def test_softcap_comes_before_the_bias():
    bias = tensor([0.0, 3.0, 0.0, -INF, 0.5])
    out, lse = reference.attention(
        ones(1), K, V, scale=2.0, softcap=0.6, bias=bias, return_lse=True
    )
    capped = [0.6 * math.tanh(2.0 * key / 0.6) for key in KEYS]
    kept = [0, 1, 2, 4]
    expected = by_hand([capped[i] + bias[i].item() for i in kept], [VALUES[i] for i in kept])
    assert (out.item(), lse.item()) == pytest.approx(expected)


def test_sinks_take_part_in_the_denominator_only():
    k, v = K.expand(1, 2, 5, 1), V.expand(1, 2, 5, 1)
    q, sinks = ones(1).expand(1, 2, 1, 1), tensor([0.9, -INF])
    out, lse = reference.attention(q, k, v, scale=1.0, sinks=sinks, return_lse=True)
    for head, sink in enumerate(sinks.tolist()):
        expected = by_hand(KEYS, VALUES, sink)
        assert (out[0, head].item(), lse[0, head].item()) == pytest.approx(expected)


def test_a_row_that_sees_only_its_sink():
    sinks, lens = tensor([0.9]), torch.tensor([0])
    out, lse = reference.attention(ones(2), K, V, sinks=sinks, kv_lens=lens, return_lse=True)
    assert out.eq(0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 0.9))


@pytest.mark.parametrize("sinks", [[-INF, 0.3], [-INF, -INF]], ids=str)
@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
def test_a_sink_of_minus_inf_is_none_whatever_rows_hold(layout, sinks):
    """The first of two sequences has no key, the second one that is NaN and that some rows see."""
    q, keys = rand(2, 2, 3, 4), [rand(2, 2, 4, 4) for _ in "kv"]
    keys[0][1, :, 2] = NAN
    lens, sinks = torch.tensor([0, 4]), tensor(sinks).requires_grad_()
    options = {"causal": True, "sinks": sinks, "return_lse": True}
    if layout == "dense":
        out, lse = reference.attention(q, *keys, kv_lens=lens, **options)
    elif layout == "paged":
        pages, table = [x.transpose(1, 2) for x in keys], torch.tensor([[0], [1]])
        out, lse = reference.attention_paged(q, *pages, table, lens, **options)
    else:
        packed = [q.transpose(1, 2).flatten(0, 1), *(x[1].transpose(0, 1) for x in keys)]
        offsets = torch.tensor([0, 3, 6]), torch.tensor([0, 0, 4])
        out, lse = reference.attention_varlen(*packed, *offsets, **options)
    assert out.isnan().any()
    assert out.eq(0).any()
    (grad,) = torch.autograd.grad((out, lse), sinks, (torch.ones_like(out), torch.ones_like(lse)))
    assert grad[sinks == -INF].eq(0).all()
    assert grad[sinks != -INF].isnan().all()


def test_huge_and_infinite_logits():
    k = tensor([1e200, 1e200, -INF]).view(1, 1, 3, 1)
    v = tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1)
    out, lse = reference.attention(ones(1), k, v, scale=1.0, return_lse=True)
    assert (out.item(), lse.item()) == (2.0, 1e200)
    only_hidden = k[:, :, 2:], v[:, :, 2:]
    out, lse = reference.attention(ones(1), *only_hidden, scale=1.0, return_lse=True)
    assert (out.item(), lse.item()) == (0.0, -INF)


def test_varlen_is_dense_sequence_by_sequence():
    lens_q, lens_k = [3, 0, 5, 1], [4, 2, 0, 6]
    q, k, v, sinks = rand(9, 4, 5), rand(12, 2, 5), rand(12, 2, 3), rand(4)
    offsets = [torch.tensor([0, *x]).cumsum(0) for x in (lens_q, lens_k)]
    options = {"causal": True, "window": (2, None), "sinks": sinks, "return_lse": True}
    out, lse = reference.attention_varlen(q, k, v, *offsets, **options)
    assert out.shape == (9, 4, 3)
    pieces = zip(
        *(x.split(n) for x, n in ((q, lens_q), (k, lens_k), (v, lens_k), (out, lens_q))),
        lse.split(lens_q),
        strict=True,
    )
    for q, k, v, out, lse in pieces:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        expected = reference.attention(q, k, v, **options)
        torch.testing.assert_close(out.transpose(0, 1)[None], expected[0])
        torch.testing.assert_close(lse.transpose(0, 1)[None], expected[1])


def test_paged_is_dense_with_its_keys_gathered():
    B, page, max_pages = 3, 4, 3
    q, bias, sinks = rand(B, 4, 2, 5), rand(B, 1, 2, page * max_pages), rand(4)
    k_pages, v_pages = rand(8, page, 2, 5), rand(8, page, 2, 3)
    page_table = torch.tensor([[7, 0, 3], [5, 5, -1], [-9, 99, 99]])
    lens = torch.tensor([11, 6, 0])
    options = {"causal": True, "bias": bias, "sinks": sinks, "return_lse": True}
    out, lse = reference.attention_paged(q, k_pages, v_pages, page_table, lens, **options)
    in_range = page_table.clamp(0, 7)
    k, v = (x[in_range].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))
    expected = reference.attention(q, k, v, kv_lens=lens, **options)
    torch.testing.assert_close((out, lse), expected)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_garbage_out_of_sight_leaks_into_nothing(garbage):
    lens = torch.tensor([4, 6])
    clean = [rand(2, 2, 3, 4), rand(2, 2, 6, 4), rand(2, 2, 6, 5), rand(2, 2, 3, 6)]
    clean[3][0, 1, :, 2] = -INF
    dirty = [x.clone() for x in clean]
    for x in dirty[1:3]:
        x[0, :, 4:] = garbage  # beyond the length
        x[0, 1, 2] = garbage  # behind a bias of -inf
    dirty[3][0, :, :, 4:] = garbage
    dirty[3][1, :, 0, 4:] = garbage  # behind the causal mask
    results = []
    for tensors in (clean, dirty):
        q, k, v, bias = tensors = [x.requires_grad_() for x in tensors]
        out, lse = reference.attention(
            q, k, v, bias=bias, causal=True, kv_lens=lens, return_lse=True
        )
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), tensors)
        results.append((out, lse, *grads))
    torch.testing.assert_close(results[1], results[0])
    assert all(x.isfinite().all() for x in results[1])


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_other(where):
    clean = {"q": rand(1, 1, 5, 4), "k": rand(1, 1, 5, 4), "v": rand(1, 1, 5, 4)}
    dirty = {name: x.clone() for name, x in clean.items()}
    dirty[where][0, 0, 3, 1] = NAN
    # Row i sees keys i - 1 and i: key 3 is seen by rows 3 and 4.
    rows = [3] if where == "q" else [3, 4]
    others = [row for row in range(5) if row not in rows]
    results = []
    for tensors in (clean, dirty):
        for x in tensors.values():
            x.requires_grad_()
        out, lse = reference.attention(**tensors, window=(1, 0), return_lse=True)
        # Only the other rows are asked for: what reaches them may not be touched by the NaN.
        loss = out[0, 0, others].square().sum() + lse[0, 0, others].sum()
        results.append((out, lse, *torch.autograd.grad(loss, list(tensors.values()))))
    (out, lse, *grads), (expected, expected_lse, *expected_grads) = reversed(results)
    assert out[0, 0, rows].isnan().any(-1).all()
    assert lse[0, 0, rows].isnan().all() == (where != "v")
    torch.testing.assert_close(out[0, 0, others], expected[0, 0, others])
    torch.testing.assert_close(lse[0, 0, others], expected_lse[0, 0, others])
    # No row in question sees keys 0 and 1.
    for grad, expected_grad, clean in zip(
        grads, expected_grads, (others, [0, 1], [0, 1]), strict=True
    ):
        torch.testing.assert_close(grad[0, 0, clean], expected_grad[0, 0, clean])


def test_gradients_by_autograd_are_right_with_every_option():
    tensors = [rand(2, 4, 3, 3), rand(2, 2, 5, 3), rand(2, 2, 5, 2), rand(1, 4, 3, 5), rand(4)]
    tensors[3][0, 1, 1, 2] = -INF
    hidden = tensors[3] == -INF
    lens = torch.tensor([4, 0])

    def f(q, k, v, bias, sinks):
        return reference.attention(
            q,
            k,
            v,
            bias=bias.masked_fill(hidden, -INF),
            sinks=sinks,
            kv_lens=lens,
            window=(2, 1),
            softcap=1.5,
            return_lse=True,
        )

    tensors[3] = tensors[3].masked_fill(hidden, 0.0)
    assert torch.autograd.gradcheck(f, [x.requires_grad_() for x in tensors])


@pytest.mark.parametrize(("B", "Sq", "Skv"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_empty_dims(B, Sq, Skv):
    q, k, v = rand(B, 4, Sq, 8), rand(B, 2, Skv, 8), rand(B, 2, Skv, 6)
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (B, 4, Sq, 6)
    assert out.eq(0).all()
    assert lse.eq(-INF).all()


def test_no_sequences_at_all():
    none, offsets = rand(0, 4, 8), torch.tensor([0])
    assert reference.attention_varlen(none, none, none, offsets, offsets).shape == (0, 4, 8)
