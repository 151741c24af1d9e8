"""A call like an earlier one is recognized as such, and no other is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from kernel_calls import forget_calls

import lockstep
from lockstep import dispatch
from lockstep.cache import Cache
from lockstep.call import call_cache
from lockstep.problem import Options, Tensors


def find(tensors: Tensors, causal: bool = False, kernel: str | None = None) -> Any:
    return call_cache.lookup_of_options(Options(causal), kernel).find(tensors)


def guards() -> call_cache.Guards:
    """Those of the latest call."""
    return call_cache.lookup_of_options(Options(), None).latest


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x, requires_grad=x.requires_grad)


@pytest.fixture
def tensors() -> Tensors:
    return Tensors(*torch.randn(3, 2, 4, 5, 8).unbind())


@pytest.fixture
def entry(tensors, monkeypatch):
    """What runs calls like that with `tensors`."""
    forget_calls(monkeypatch)
    entry, *_ = call_cache.find_or_prepare(lambda *_: print, tensors, Options(), None)
    assert entry.run is print
    for _ in range(2):
        assert find(tensors)[0] is entry
    return entry


def test_torch_s_guards_work():
    assert call_cache._HAS_GUARDS


def test_a_call_like_another_is_recognized(tensors, entry):
    others = Tensors(*map(like, tensors[:3]))
    assert guards()(others) == (entry, others.addresses(), False)
    assert find(others) == (entry, others.addresses(), False)


def test_one_tensor_may_come_twice(tensors, entry):
    q = tensors.q
    wanted = [q.data_ptr()] * 3 + [0] * (len(Tensors._fields) - 3)
    assert guards()(Tensors(q, q, q)) is None
    # By the key, then by guards of one tensor.
    for _ in range(2):
        assert find(Tensors(q, q, q))[1] == wanted
    assert guards()(Tensors(q, q, q))[1] == wanted
    assert guards()(Tensors(q, q, like(q))) is None
    assert guards()(tensors) is None


def shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.randn(x.numel() + n)[n:].view_as(x)


CHANGES = {
    "shape": lambda k: torch.randn(2, 4, 6, 8),
    "dims": lambda k: k[0],
    "strides": lambda k: torch.randn(2, 5, 4, 8).transpose(1, 2),
    "dtype": lambda k: k.double(),
    "device": lambda k: k.to("meta"),
    "alignment": lambda k: shifted(k, 1),
    "pending sign": torch._neg_view,
    "subclass": lambda k: k.as_subclass(type("Mine", (torch.Tensor,), {})),
    "absent": lambda k: None,
    "no tensor": lambda k: 3,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("by", ["guards", "key"])
def test_a_change_is_noticed(tensors, entry, change, by, monkeypatch):
    others = tensors._replace(k=CHANGES[change](tensors.k))
    if by == "key":
        monkeypatch.setattr(call_cache, "_LOOKUPS", Cache(limit=10))
    else:
        assert guards()(others) is None
    assert find(others) is None


@pytest.mark.parametrize("field", Tensors._fields[3:])
def test_another_tensor_is_noticed(tensors, entry, field):
    others = tensors._replace(**{field: torch.zeros(4)})
    assert guards()(others) is None
    assert find(others) is None


def test_offsets_of_their_own_are_noticed(tensors, entry):
    q, k, v = (x.flatten(0, 1) for x in tensors[:3])
    offsets, others = torch.tensor([0, 3, 8]), torch.tensor([0, 3, 8])
    for cu_seqlens_k in (offsets, others) * 3:
        given = Tensors(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=cu_seqlens_k)
        shared = cu_seqlens_k is offsets
        entry, *_ = call_cache.find_or_prepare(
            lambda *_, shared=shared: shared, given, Options(), None
        )
        assert entry.run is shared
        assert find(given)[0] is entry


def test_other_options_and_kernels_are_noticed(tensors, entry, monkeypatch):
    assert find(tensors, causal=True) is None
    assert find(tensors, kernel="cpu") is None
    monkeypatch.setattr(dispatch, "KERNELS", dispatch.KERNELS[1:])
    assert find(tensors) is None


def test_a_gradient_is_noticed(tensors, entry):
    wanting = tensors._replace(v=like(tensors.v).requires_grad_())
    for given, wants in ((tensors, False), (wanting, True)) * 3:
        assert find(given)[2] is wants


def test_no_gradient_is_lost_between_modes(tensors):
    wanting = tensors._replace(v=like(tensors.v).requires_grad_())
    for given in (tensors, wanting, wanting, tensors, wanting):
        for enabled in (True, False, True, True, False, False, True):
            with torch.set_grad_enabled(enabled):
                out = lockstep.attention(*given[:3])
            assert out.requires_grad is (enabled and given is wanting)
    with torch.inference_mode():
        assert lockstep.attention(*wanting[:3]).is_inference()
    assert lockstep.attention(*wanting[:3]).requires_grad


def test_calls_are_recognized_in_either_mode(tensors, entry, monkeypatch):
    """Guards tell inference mode and gradients apart, and each has guards of its own."""
    wanting = tensors._replace(v=like(tensors.v).requires_grad_())
    written = []
    write = call_cache._write_guards
    monkeypatch.setattr(
        call_cache, "_write_guards", lambda *given: written.append(given) or write(*given)
    )
    for _ in range(3):
        for given in (tensors, wanting):
            for inference in (False, True):
                with torch.inference_mode(inference):
                    assert find(given)[0] is entry
                    assert guards()(given)[0] is entry
    assert len(written) <= 3


def test_tensors_are_not_kept(tensors, entry):
    q = torch.randn(2, 4, 7, 8)
    seen = weakref.ref(q)
    for _ in range(3):
        lockstep.attention(q, *tensors[1:3])
    del q
    assert seen() is None


def test_without_guards_the_key_does(tensors, monkeypatch):
    forget_calls(monkeypatch)
    monkeypatch.setattr(call_cache, "_HAS_GUARDS", False)
    expected = lockstep.attention(*tensors[:3])
    for _ in range(3):
        assert torch.equal(lockstep.attention(*tensors[:3]), expected)
    assert len(call_cache._CALLS) == 1
    assert not any(lookup.latest(tensors) for lookup in call_cache._LOOKUPS.values())


WRONG = {
    "k": [torch.randn(2, 4, 5, 9), torch.randn(2, 3, 5, 8), torch.zeros(2, 4, 5, 8).long(), None],
    "v": [torch.randn(2, 4, 6, 8), torch.randn(4, 5, 8), torch.randn(2, 4, 5, 8).half(), "v"],
    "bias": [torch.zeros(3), torch.zeros(5).long()],
    "kv_lens": [torch.tensor([6, 1]), torch.tensor([1.0, 1.0])],
    "causal": [1],
    "scale": [True, float("nan")],
    "softcap": [0.0],
    "window": [(1,), (True, 0)],
    "kernel": ["nobody"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(n, v, id=f"{n}-{i}") for n, vs in WRONG.items() for i, v in enumerate(vs)],
)
def test_errors_are_those_of_a_first_call(tensors, name, value):
    """After calls that differ in one argument, which is right there."""

    def call() -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            lockstep.attention(**{**right, name: value})
        return f"{caught.type}: {caught.value}"

    right = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "causal": True, "scale": 1.0}
    first = call()
    for _ in range(3):
        lockstep.attention(**right)
    assert call() == first


def test_a_window_is_that_of_an_earlier_call_if_its_types_are(tensors):
    for _ in range(3):
        expected = lockstep.attention(*tensors[:3], window=(1, 0))
    assert torch.equal(lockstep.attention(*tensors[:3], window=[1, 0]), expected)
    for wrong in ((True, 0), (1, 0.0), [1, False], (1, 0, 0), range(1, -1, -1)):
        with pytest.raises((TypeError, ValueError), match="window takes"):
            lockstep.attention(*tensors[:3], window=wrong)
