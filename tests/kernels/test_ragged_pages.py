"""Ragged queries over a paged cache: right, and with the bits of each sequence alone."""

from __future__ import annotations

import pytest
import torch
from problems import (
    Case,
    assert_exact,
    draw,
    paginate,
    ragged,
    run,
    same_bits,
)

from lockstep import reference

Q_LENS, KV_LENS = [5, 0, 1, 40, 17], torch.tensor([70, 3, 300, 40, 0])
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (30, 2), "softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "query_invariant": {"causal": True, "query_invariant": True},
}


def drawn(page_size: int = 16, dtype: torch.dtype = torch.float32, **more) -> Case:
    case = draw(40, 300, B=5, Hq=4, D=32, Dv=16, dtype=dtype, kv_lens=KV_LENS, **more)
    return ragged(paginate(case, page_size, garbage=float("nan")), Q_LENS)


def alone(case: Case, b: int) -> Case:
    """Sequence b by `attention_paged`."""
    start, end = case.tensors["cu_seqlens_q"][b : b + 2].tolist()
    own = {name: case.tensors[name][b : b + 1] for name in ("page_table", "kv_lens")}
    q = case.tensors["q"][start:end].transpose(0, 1)[None]
    return case.replaced(q=q, cu_seqlens_q=None, **own)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    assert_exact(drawn(**OPTIONS[name]))


@pytest.mark.parametrize("bound", [40, 64, 1000])
def test_a_bound_of_queries_changes_no_bit(bound):
    case = drawn(causal=True)
    found, expected = run(Case(case.tensors, {"causal": True, "max_seqlen_q": bound})), run(case)
    assert same_bits(found.out, expected.out)
    assert same_bits(found.lse, expected.lse)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_page_sizes(page_size):
    assert_exact(drawn(page_size, torch.bfloat16, causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sequence_has_the_bits_it_has_alone(dtype):
    case = drawn(dtype=dtype, causal=True)
    together = run(case)
    starts = case.tensors["cu_seqlens_q"][:-1].tolist()
    for b, (start, n) in enumerate(zip(starts, Q_LENS, strict=True)):
        if n:
            own = run(alone(case, b))
            rows = together.out[start : start + n].transpose(0, 1)[None]
            assert same_bits(own.out, rows)
            assert same_bits(own.lse, together.lse[start : start + n].T[None])


def test_pages_may_be_any_view():
    case = drawn(causal=True)
    k, v = (case.tensors[name] for name in "kv")
    expected = run(case)
    # Keys and values side by side, tokens of a head together.
    packed = torch.cat([k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    found = run(case.replaced(k=packed[..., :32], v=packed[..., 32:]))
    assert same_bits(found.out, expected.out)


def test_nothing_to_attend():
    case = drawn()
    empty = case.replaced(
        q=case.tensors["q"][:0],
        cu_seqlens_q=torch.zeros(1).long(),
        page_table=case.tensors["page_table"][:0],
        kv_lens=case.tensors["kv_lens"][:0],
    )
    assert run(empty).out.shape == (0, 4, 16)
    no_keys = case.replaced(kv_lens=torch.zeros(5).long())
    assert not run(no_keys).out.any()


def test_the_oracle_takes_each_sequence_by_itself():
    case = drawn(causal=True)
    out, _ = case.call(reference)
    single, _ = alone(case, 3).call(reference)
    torch.testing.assert_close(out[6:46].transpose(0, 1)[None], single, rtol=1e-12, atol=1e-12)
