"""Who runs what: the order, the refusals, and names that never fall back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lockstep
from lockstep import dispatch, numerics
from lockstep.kernels import oracle
from lockstep.kernels.kernel import Merge
from lockstep.problem import Options, Tensors, describe


def problem(dtype: torch.dtype = torch.float64):
    q = torch.randn(1, 2, 3, 4).to(dtype)
    return describe(Tensors(q, q, q), Options())


def kernel(name: str, refusal: str | None = None, **changes):
    return dataclasses.replace(oracle.KERNEL, name=name, supports=lambda _: refusal, **changes)


@pytest.fixture
def three_kernels(monkeypatch):
    kernels = kernel("first", "not today"), kernel("second"), kernel("third", prepare_backward=None)
    monkeypatch.setattr(dispatch, "KERNELS", kernels)
    return kernels


def test_the_oracle_runs_float64_and_nothing_else():
    assert dispatch.select(problem(), "oracle").name == "oracle"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with pytest.raises(NotImplementedError, match="oracle: takes float64, got"):
            dispatch.select(problem(dtype), "oracle")


def test_names_are_distinct():
    names = [kernel.name for kernel in dispatch.KERNELS]
    assert len(set(names)) == len(names)


def test_the_first_that_supports_the_problem_runs(three_kernels):
    assert dispatch.select(problem()).name == "second"


def test_a_named_kernel_never_falls_back(three_kernels):
    assert dispatch.select(problem(), "third").name == "third"
    with pytest.raises(NotImplementedError, match=r"^no kernel runs dense .*\n  first: not today$"):
        dispatch.select(problem(), "first")


@pytest.mark.parametrize("claim", ["query_invariant", "constant_time"])
def test_a_call_that_asks_for_a_claim_goes_to_a_kernel_that_makes_it(monkeypatch, claim):
    kernels = kernel("plain"), kernel("strict", **{claim: True})
    monkeypatch.setattr(dispatch, "KERNELS", kernels)
    strict = dataclasses.replace(problem(), **{claim: True})
    assert dispatch.select(problem()).name == "plain"
    assert dispatch.select(strict).name == "strict"
    assert dispatch.select(strict, backward=True).name == "strict"
    assert dispatch.explain(strict).refusals == {"plain": f"does not promise {claim}"}
    with pytest.raises(NotImplementedError, match=f"plain: does not promise {claim}"):
        dispatch.select(strict, "plain")


def test_a_backward_needs_a_kernel_that_has_one(three_kernels):
    assert dispatch.select(problem(), backward=True).name == "second"
    with pytest.raises(NotImplementedError, match="third: has no backward"):
        dispatch.select(problem(), "third", backward=True)


def test_a_kernel_may_refuse_the_backward_alone(monkeypatch):
    kernels = kernel("first", supports_backward=lambda _: "only there"), kernel("second")
    monkeypatch.setattr(dispatch, "KERNELS", kernels)
    assert dispatch.select(problem()).name == "first"
    assert dispatch.select(problem(), backward=True).name == "second"
    with pytest.raises(NotImplementedError, match="first: only there"):
        dispatch.select(problem(), "first", backward=True)


def test_where_all_refuse_every_reason_is_given(monkeypatch):
    kernels = kernel("first", "not today"), kernel("second", "nor tomorrow")
    monkeypatch.setattr(dispatch, "KERNELS", kernels)
    with pytest.raises(NotImplementedError, match=r"first: not today\n  second: nor tomorrow$"):
        dispatch.select(problem())


def test_unknown_name_lists_the_known(three_kernels):
    for choose in (dispatch.select, dispatch.explain):
        with pytest.raises(ValueError, match=r"^kernel takes .* first, second, third, .*'hal'$"):
            choose(problem(), "hal")


def test_explanation(three_kernels):
    explanation = dispatch.explain(problem())
    assert explanation.kernel == "second"
    assert explanation.refusals == {"first": "not today"}
    assert str(explanation) == (
        "dense B=1 Hq=2 Hkv=2 Sq=3 Skv=3 D=4 Dv=4 float64 on cpu\n"
        "  first   refuses: not today\n"
        "  second  runs\n"
        "  third   could run, after second"
    )
    by_name = dispatch.explain(problem(), "first")
    assert by_name.kernel is None
    assert "third   could run" in str(by_name)


def test_calls_run_what_explain_names(three_kernels, monkeypatch):
    ran = []
    spy = dataclasses.replace(
        three_kernels[1],
        prepare=lambda *args: ran.append("second") or oracle.KERNEL.prepare(*args),
    )
    monkeypatch.setattr(dispatch, "KERNELS", (three_kernels[0], spy))
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    assert lockstep.explain(q, q, q).kernel == "second"
    lockstep.attention(q, q, q)
    assert ran == ["second"]


def test_explain_covers_every_layout():
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    offsets = torch.tensor([0, 2, 6])
    packed = lockstep.explain(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert (packed.kernel, packed.problem.layout) == ("oracle", "varlen")

    q, pages = torch.randn(2, 4, 1, 8).double(), torch.randn(3, 4, 2, 8).double()
    table, lens = torch.tensor([[0], [2]]), torch.tensor([3, 4])
    cached = lockstep.explain(q, pages, pages, page_table=table, kv_lens=lens, causal=True)
    assert (cached.kernel, cached.problem.layout) == ("oracle", "paged")
    assert "paged" in str(cached)

    tokens = torch.randn(6, 4, 8).double()
    more = {"page_table": table, "kv_lens": lens, "cu_seqlens_q": offsets}
    ragged = lockstep.explain(tokens, pages, pages, **more)
    assert (ragged.kernel, ragged.problem.layout) == ("oracle", "varlen_paged")
    with pytest.raises(ValueError, match=r"^cu_seqlens_k is not an argument of varlen_paged"):
        lockstep.explain(tokens, pages, pages, **more, cu_seqlens_k=offsets)
    with pytest.raises(ValueError, match=r"^bias is not an argument of varlen attention"):
        lockstep.explain(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets, bias=x)
    with pytest.raises(ValueError, match=r"^window takes"):
        lockstep.explain(q, q, q, window=(-1, 0))


def test_explain_does_not_run_anything():
    q = torch.empty(1, 1, 2**40, 64, dtype=torch.float64, device="meta")
    assert lockstep.explain(q, q, q).problem.Sq == 2**40


def test_kernels_claim_and_describe_themselves():
    for each in dispatch.KERNELS:
        assert each.name.isidentifier()
        assert isinstance(each.supports(problem(torch.float32)), str | None)
        for claim in (each.deterministic, each.batch_invariant, each.constant_time):
            assert isinstance(claim, bool)


def test_merge_is_that_of_the_first_kernel_that_takes_the_parts(monkeypatch):
    ran = []

    def merging(name: str, dtype: torch.dtype):
        def run(outs, lses):
            ran.append(name)
            return numerics.merge(outs, lses)

        return dataclasses.replace(kernel(name), merge=Merge(lambda part: part.dtype == dtype, run))

    without = dataclasses.replace(kernel("none"), merge=None)
    kernels = (without, merging("single", torch.float32), merging("half", torch.float16))
    monkeypatch.setattr(dispatch, "KERNELS", (*kernels, oracle.KERNEL))
    for dtype in (torch.float16, torch.float32, torch.float64):
        out, lse = torch.randn(2, 3, 4).to(dtype), torch.randn(2, 3)
        lockstep.merge([(out, lse.double() if dtype == torch.float64 else lse)])
    assert ran == ["half", "single"]
