"""Values that are checked before a kernel runs: on a CPU always, elsewhere on request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep import checks
from lockstep.call import prepare
from lockstep.kernels.kernel import BackwardTensors, Kernel
from lockstep.problem import Options, Tensors, describe

X = torch.zeros(2, 1, 4, 8)
PACKED = torch.zeros(8, 1, 8)
PAGES = torch.zeros(3, 2, 1, 8)
OFFSETS = torch.tensor([0, 3, 8])
WRONG = {
    "kv_lens": (Tensors(X, X, X, kv_lens=torch.tensor([4, 5])), "kv_lens .* got 5 .* sequence 1"),
    "offset": (
        Tensors(*[PACKED] * 3, cu_seqlens_q=OFFSETS, cu_seqlens_k=torch.tensor([0, 9, 8])),
        "cu_seqlens_k .* got 9 then 8 at index 2, where sequence 1 ends",
    ),
    "first offset": (
        Tensors(*[PACKED] * 3, cu_seqlens_q=OFFSETS + 1, cu_seqlens_k=OFFSETS),
        "cu_seqlens_q .* start at 0, got .* sequence 0",
    ),
    "last offset": (
        Tensors(*[PACKED] * 3, cu_seqlens_q=OFFSETS[:2], cu_seqlens_k=OFFSETS[:2]),
        "cu_seqlens_q .* end at Tq = 8, got 3 .* last sequence",
    ),
    "page": (
        Tensors(
            X,
            PAGES,
            PAGES,
            kv_lens=torch.tensor([4, 2]),
            page_table=torch.tensor([[0, 1], [3, -1]]),
        ),
        "page_table .* 3 pages, got 3 for page 0 of sequence 1",
    ),
}


@pytest.fixture
def elsewhere(monkeypatch) -> list[str]:
    """Calls pose problems of another device, and a kernel notes that it ran."""
    ran: list[str] = []

    def note(kind: str):
        return lambda *_: lambda *_: ran.append(kind)

    kernel = Kernel("toy", lambda _: None, note("forward"), note("backward"), True, True, True)
    monkeypatch.setattr(
        prepare,
        "_select",
        lambda tensors, options, *_, **__: (
            replace(describe(tensors, options), device_type="cuda"),
            kernel,
        ),
    )
    return ran


def call_and_derive(tensors: Tensors) -> None:
    q = tensors.q
    given = BackwardTensors(*tensors, q, q[..., 0].contiguous(), q, None)
    prepare.prepare(tensors, Options(), None)(tensors, tensors.addresses())
    prepare.prepare_backward(given, Options(), None, None)(given, [])


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_device_is_not_waited_for(elsewhere, monkeypatch, case, value):
    monkeypatch.delenv("LOCKSTEP_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCKSTEP_CHECK", value)
    monkeypatch.setattr(prepare, "check_values", None)
    call_and_derive(WRONG[case][0])
    assert elsewhere == ["forward", "backward"]


@pytest.mark.parametrize("case", WRONG)
def test_a_call_raises_on_request(elsewhere, monkeypatch, case):
    monkeypatch.setenv("LOCKSTEP_CHECK", "1")
    tensors, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call_and_derive(tensors)
    assert not elsewhere


@pytest.mark.parametrize("case", ["kv_lens", "page"])
def test_secret_lengths_are_checked(case):
    tensors, message = WRONG[case]
    problem = describe(tensors, Options(constant_time=True, secret_lengths=True))
    with pytest.raises(ValueError, match=message):
        checks.check_values(problem, tensors)


def test_secret_lengths_in_range_are_not_read(monkeypatch):
    lens = torch.tensor([0, 7, 3])
    tensors = Tensors(*torch.randn(3, 3, 1, 7, 4), kv_lens=lens)
    monkeypatch.setattr(checks, "_check_lengths", None)
    checks.check_values(
        describe(tensors, Options(constant_time=True, secret_lengths=True)), tensors
    )


def test_on_a_cpu_values_are_checked_in_any_case(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_CHECK", raising=False)
    problem = describe(WRONG["kv_lens"][0], Options())
    assert checks.are_values_checked(problem)
