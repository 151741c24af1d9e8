"""The constant-time build of the CPU kernel: the bits of the ordinary one, whatever the values."""

from __future__ import annotations

import pytest
import torch

import lockstep

NAN, INF = float("nan"), float("inf")
SHAPES = {"decode": (1, 300, 64, 64), "few": (5, 70, 16, 24), "many": (150, 270, 32, 40)}
OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (40, 3), "softcap": 5.0}}
EXTRAS = ("none", "bias", "sinks", "lengths", "secret lengths")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(shape: str, extra: str, poisoned: bool) -> dict[str, torch.Tensor]:
    Sq, Skv, D, Dv = SHAPES[shape]
    tensors = {"q": rand(2, 4, Sq, D), "k": rand(2, 2, Skv, D), "v": rand(2, 2, Skv, Dv)}
    if poisoned:
        tensors["q"][0, 1, 0], tensors["k"][1, 0, Skv - 1] = INF, NAN
        tensors["v"][0, 0, Skv // 2, 3], tensors["v"][0, 1, Skv - 1, 1] = NAN, INF
        # Beyond the second length, where there is one.
        tensors["v"][1, :, Skv // 3 :] = NAN
    if extra == "bias":
        tensors["bias"] = rand(Sq, Skv)
        tensors["bias"][:, ::7] = -INF
    elif extra == "sinks":
        tensors["sinks"] = rand(4)
    elif "lengths" in extra:
        tensors["kv_lens"] = torch.tensor([Skv, Skv // 3])
    return tensors


def results(tensors: dict[str, torch.Tensor], **options) -> list[torch.Tensor]:
    """out, lse and the gradients."""
    leaves = {
        name: x.clone().requires_grad_() if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    out, lse = lockstep.attention(**leaves, **options, return_lse=True)
    loss = (out * rand(*out.shape, seed=1)).sum() + lse.nan_to_num(0, 0, 0).sum()
    wanted = [x for x in leaves.values() if x.requires_grad]
    return [out, lse, *torch.autograd.grad(loss, wanted)]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("poisoned", [False, True], ids=["finite", "not-finite"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_ordinary_build(shape, option, extra, poisoned):
    tensors, options = inputs(shape, extra, poisoned), OPTIONS[option]
    asked = {"constant_time": True, "secret_lengths": extra == "secret lengths"}
    assert_same(results(tensors, **options, **asked), results(tensors, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_and_paged_calls(dtype):
    q, k, v = rand(3, 90, 2, 16).to(dtype)
    offsets = torch.tensor([0, 20, 21, 90])
    calls = [lambda **o: lockstep.attention_varlen(q, k, v, offsets, offsets, causal=True, **o)]
    pages, table = rand(2, 10, 16, 2, 16).to(dtype), torch.tensor([[3, 7, 0], [1, -1, 99]])
    pages[:, 0] = NAN
    lens = torch.tensor([30, 9])
    calls.append(
        lambda **o: lockstep.attention_paged(rand(2, 4, 1, 16).to(dtype), *pages, table, lens, **o)
    )
    for call in calls:
        assert torch.equal(call(constant_time=True), call(kernel="cpu"))
    secret = calls[1](constant_time=True, secret_lengths=True)
    assert torch.equal(secret, calls[1](kernel="cpu"))
    assert not secret.isnan().any()


def test_subnormal_numbers_count_as_zero():
    q, k = rand(2, 1, 1, 20, 8)
    v = torch.full((1, 1, 20, 8), 1e-40)
    assert lockstep.attention(q, k, v).min() > 0
    assert lockstep.attention(q, k, v, constant_time=True).count_nonzero() == 0


def test_how_the_caller_treats_subnormal_numbers_is_left_alone():
    q, tiny = rand(1, 1, 20, 8), torch.tensor([1e-40])
    lockstep.attention(q, q, q, constant_time=True)
    assert (tiny * 0.5).item() > 0


def test_pages_are_needed_where_lengths_are_secret():
    none = torch.zeros(0, 16, 1, 8)
    arguments = (rand(1, 1, 1, 8), none, none, torch.zeros(1, 2, dtype=torch.int64))
    lens = torch.tensor([0])
    assert lockstep.attention_paged(*arguments, lens, constant_time=True).count_nonzero() == 0
    with pytest.raises(NotImplementedError, match="cpu: takes at least one page"):
        lockstep.attention_paged(*arguments, lens, constant_time=True, secret_lengths=True)
