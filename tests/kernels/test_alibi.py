"""ALiBi: `alibi_slopes` of every call, right and with the bits of each sequence alone.

On the CPU, and with TRITON_INTERPRET=1 or a GPU in the Triton kernels too.
"""

from __future__ import annotations

import os

import pytest
import torch
from problems import (
    Case,
    assert_allowed,
    draw,
    draw_douts,
    draw_varlen,
    paginate,
    ragged,
    run,
    same_bits,
)

import lockstep
from lockstep import reference

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
if IN_INTERPRETER:
    import interpreter  # noqa: F401

KERNEL = "triton" if IN_INTERPRETER else None
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])
DEVICES = pytest.mark.parametrize("device", ["cpu", ON_GPU])
SLOPES = {"heads": torch.rand(4), "sequences": torch.rand(2, 4)}
OPTIONS = {
    "causal": {"causal": True, "kv_lens": torch.tensor([70, 33])},
    "window": {"window": (9, 3), "softcap": 5.0, "sinks": torch.randn(4)},
    "starts": {"kv_starts": torch.tensor([0, 21])},
}


def drawn(Sq: int, slopes: str, **more) -> Case:
    return draw(Sq, 70, B=2, Hq=4, Hkv=2, D=16, alibi_slopes=SLOPES[slopes], **more)


def moved(case: Case, device: str) -> Case:
    return Case({name: x.to(device) for name, x in case.tensors.items()}, case.options)


def assert_right(case: Case, device: str) -> None:
    douts = draw_douts(case)
    on_device = tuple(x.to(device) for x in douts)
    kernel = KERNEL or ("triton" if device == "cuda" else None)
    found = run(moved(case, device), douts=on_device, kernel=kernel).items()
    assert_allowed(case, {name: x.cpu() for name, x in found.items()}, douts)


@DEVICES
@pytest.mark.parametrize("Sq", [1, 19])
@pytest.mark.parametrize(
    ("options", "slopes"), [("causal", "sequences"), ("window", "heads"), ("starts", "heads")]
)
def test_results_and_gradients(options, slopes, Sq, device):
    assert_right(drawn(Sq, slopes, **OPTIONS[options]), device)


@DEVICES
@pytest.mark.parametrize("slopes", SLOPES)
def test_packed_sequences(slopes, device):
    case = draw_varlen([5, 12], [40, 12], D=16, causal=True, alibi_slopes=SLOPES[slopes])
    assert_right(case, device)


@DEVICES
@pytest.mark.parametrize("q_lens", [None, [5, 2]], ids=["paged", "ragged"])
def test_pages(q_lens, device):
    """With keys that begin within a page: bits of the sequence without what lies before."""
    starts = torch.tensor([0, 21])
    case = drawn(5, "sequences", causal=True, kv_starts=starts)
    pages = paginate(case, 16)
    pages = ragged(pages, q_lens) if q_lens else pages
    out, _ = pages.call(reference)
    kernel = KERNEL or ("triton" if device == "cuda" else None)
    found = run(moved(pages, device), kernel=kernel).out.cpu()
    torch.testing.assert_close(found.double(), out, rtol=0, atol=1e-5)
    dense = run(moved(case, device), kernel=kernel).out.cpu()
    if q_lens:
        assert same_bits(found[:5].transpose(0, 1), dense[0])
        # Other rows of a sequence may change how its keys are cut, unless it is query-invariant.
        assert kernel or same_bits(found[5:].transpose(0, 1), dense[1, :, 3:])
    else:
        assert same_bits(found, dense)


@pytest.mark.parametrize("Sq", [1, 19])
def test_a_sequence_has_the_bits_it_has_alone(Sq):
    case = drawn(Sq, "sequences", **OPTIONS["causal"])
    douts = draw_douts(case)
    together = run(case, douts=douts, kernel=KERNEL)
    own = {name: x[1:] for name, x in case.tensors.items()}
    n = int(own.pop("kv_lens")[0])
    own |= {name: own[name][:, :, :n] for name in ("k", "v")}
    alone = run(
        case.replaced(**own, kv_lens=None), douts=tuple(x[1:] for x in douts), kernel=KERNEL
    )
    assert same_bits(together.out[1:], alone.out)
    assert same_bits(together.grads["q"][1:], alone.grads["q"])
    for name in ("k", "v"):
        assert same_bits(together.grads[name][1:, :, :n], alone.grads[name])


def test_one_query_has_the_bits_it_has_among_many():
    case = drawn(19, "heads", causal=True, query_invariant=True)
    last = case.replaced(q=case.tensors["q"][:, :, -1:])
    assert same_bits(run(last).out, run(case).out[:, :, -1:])
    constant = case.replaced(query_invariant=None, constant_time=True)
    assert same_bits(run(constant).out, run(case).out)


class TestArguments:
    def test_they_are_what_a_bias_would_be(self):
        case = drawn(19, "heads", causal=True)
        lens = torch.tensor([70, 70])
        bias = reference.alibi(SLOPES["heads"], lens, 19, 70)
        expected = run(case.replaced(alibi_slopes=None, bias=bias)).out
        torch.testing.assert_close(run(case).out, expected, rtol=0, atol=2e-6)

    def test_slopes_have_no_gradient(self):
        q, slopes = torch.randn(1, 4, 3, 16), torch.rand(4, requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"^alibi_slopes takes .* no gradient"):
            lockstep.attention(q, q, q, alibi_slopes=slopes)
        with torch.no_grad():
            lockstep.attention(q, q, q, alibi_slopes=slopes)

    def test_vmap(self):
        q, slopes = torch.randn(3, 2, 4, 5, 16), torch.rand(3, 4)
        expected = torch.stack(
            [lockstep.attention(x, x, x, alibi_slopes=s) for x, s in zip(q, slopes, strict=True)]
        )
        mapped = torch.vmap(lambda x, s: lockstep.attention(x, x, x, alibi_slopes=s))
        assert same_bits(mapped(q, slopes), expected)
        same = torch.vmap(lambda x: lockstep.attention(x, x, x, alibi_slopes=slopes[0]))(q)
        assert same_bits(same[0], expected[0])
