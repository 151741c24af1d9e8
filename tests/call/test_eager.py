"""Plain eager calls skip torch's dispatcher, unless something has to see them there."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.cache import Cache
from lockstep.call import call_cache, ops
from lockstep.call.eager import can_skip_dispatcher
from lockstep.options import Options


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    return list(torch.randn(3, 1, 2, 5, 8))


def test_a_plain_call_goes_to_the_implementation(qkv, monkeypatch):
    assert can_skip_dispatcher(tuple(qkv))

    def no_dispatcher(*args):
        raise AssertionError("went through the dispatcher")

    monkeypatch.setattr(ops.attention.operator, "op", no_dispatcher)
    assert lockstep.attention(*qkv).shape == (1, 2, 5, 8)


@pytest.mark.parametrize("which", range(3))
def test_a_call_with_a_gradient_is_direct_and_gives_the_same_bits(qkv, which, monkeypatch):
    qkv[which].requires_grad_()
    options = (*Options(causal=True), None)
    dispatched, *_ = torch.ops.lockstep.attention(*qkv, *(None,) * 5, *options)
    monkeypatch.setattr(ops.attention.operator, "op", None)
    direct = lockstep.attention(*qkv, causal=True)
    assert torch.equal(direct, dispatched)
    dout = torch.randn_like(direct)
    grads = [torch.autograd.grad(out, qkv[which], dout)[0] for out in (direct, dispatched)]
    assert torch.equal(*grads)


def test_no_grad_calls_are_direct_and_leave_no_graph(qkv):
    qkv[0].requires_grad_()
    with torch.no_grad():
        assert can_skip_dispatcher(tuple(qkv))
        assert not lockstep.attention(*qkv).requires_grad


def test_a_dispatch_mode_sees_the_operator(qkv):
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        lockstep.attention(*qkv)
    assert torch.ops.lockstep.attention.default in seen


def test_a_function_mode_sees_the_operator(qkv):
    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        lockstep.attention(*qkv)
    assert torch.ops.lockstep.attention.default in seen


def test_a_subclass_sees_the_operator(qkv):
    seen = []

    class Spy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    lockstep.attention(qkv[0].as_subclass(Spy), *qkv[1:])
    assert torch.ops.lockstep.attention.default in seen


def test_the_profiler_sees_the_operator(qkv):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lockstep.attention(*qkv)
    assert "lockstep::attention" in {event.key for event in profile.key_averages()}


def test_a_trace_records_the_operator(qkv):
    traced = torch.jit.trace(lambda q, k, v: lockstep.attention(q, k, v), qkv)
    others = torch.randn(3, 1, 2, 5, 8).unbind()
    assert torch.equal(traced(*others), lockstep.attention(*others))


def test_a_tensor_with_a_pending_sign_is_resolved_first(qkv):
    q = torch.randn(1, 2, 5, 8, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    expected = lockstep.attention(q.resolve_neg().contiguous(), *qkv[1:])
    assert torch.equal(lockstep.attention(q, *qkv[1:]), expected)


def test_meta_tensors_get_shapes_only(qkv):
    out = lockstep.attention(*(x.to("meta") for x in qkv))
    assert out.device.type == "meta"
    assert out.shape == (1, 2, 5, 8)


def test_a_cached_call_still_checks_values(qkv):
    assert lockstep.attention(*qkv, kv_lens=torch.tensor([5])).shape == (1, 2, 5, 8)
    with pytest.raises(ValueError, match="kv_lens"):
        lockstep.attention(*qkv, kv_lens=torch.tensor([6]))


def test_a_cached_call_still_checks_the_bound_of_queries(qkv):
    q = qkv[0][0].transpose(0, 1)
    tokens, offsets = q.shape[0], torch.tensor([0, 1, q.shape[0]])
    for even in (offsets, torch.tensor([0, 2, tokens])):
        out = lockstep.attention_varlen(q, q, q, even, even, max_seqlen_q=tokens - 1)
        assert torch.equal(out, lockstep.attention_varlen(q, q, q, even, even))
    whole = torch.tensor([0, 0, tokens])
    with pytest.raises(ValueError, match=r"^max_seqlen_q takes"):
        lockstep.attention_varlen(q, q, q, whole, whole, max_seqlen_q=tokens - 1)


def test_a_cached_call_still_checks_types(qkv):
    lockstep.attention(*qkv, causal=True)
    with pytest.raises(TypeError, match="causal"):
        lockstep.attention(*qkv, causal=1)


def test_calls_are_forgotten_when_there_are_too_many(qkv, monkeypatch):
    monkeypatch.setattr(call_cache, "_CALLS", Cache(limit=3))
    for n in range(1, 6):
        lockstep.attention(qkv[0], qkv[1][:, :, :n], qkv[2][:, :, :n])
        assert 0 < len(call_cache._CALLS) <= 3
