"""Query-invariant calls on a Hopper GPU: a row has the same bits in every kernel and call."""

from __future__ import annotations

import pytest
import torch
from problems import Case, Result, assert_allowed, assert_same_bits, draw, paginate, run

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

BF16, F16 = torch.bfloat16, torch.float16
NAN = float("nan")
S = 2100
CASES = {
    "D 128": {"D": 128},
    "D 64": {"D": 64},
    "D 128, fp16": {"D": 128, "dtype": F16},
    "D 64, fp16": {"D": 64, "dtype": F16},
    "window": {"D": 128, "options": {"window": (600, 0)}},
    "window, D 64": {"D": 64, "options": {"window": (150, 0)}},
    "softcap": {"D": 128, "options": {"softcap": 20.0}},
    "a negative scale": {"D": 64, "options": {"scale": -0.1}},
    "sinks": {"D": 128, "options": {"sinks": torch.tensor([0.3, 1.0, -2.0, 5.0])}},
    "sigma 3": {"D": 128, "sigma": 3.0},
    "peaked": {"D": 128, "sigma": 12.0},
    "peaked, D 64": {"D": 64, "sigma": 12.0},
    "peaked, fp16": {"D": 64, "sigma": 12.0, "dtype": F16},
    "huge": {"D": 128, "sigma": 3e4},
    "not finite": {"D": 128, "bad": True},
}


def prefill(D, dtype=BF16, sigma=1.0, bad=False, options=()) -> Case:
    torch.manual_seed(0)
    causal = "window" not in dict(options)
    more = {"causal": causal, "query_invariant": True, **dict(options)}
    case = draw(S, S, B=2, Hq=4, Hkv=2, D=D, dtype=dtype, **more)
    q, k, v = (case.tensors[name] for name in "qkv")
    if bad:
        # No key has so little weight that its product with infinity would be NaN.
        for key, d, value in ((1650, 3, float("nan")), (1000, 5, float("inf")), (700, 7, -1e39)):
            v[:, :, key, d] = value
    return Case({**case.tensors, "q": q * sigma, "k": k * sigma, "v": v}, case.options)


def last_queries(case: Case, n: int, length: int = S) -> Case:
    """The n queries before position `length`, and the keys up to there."""
    t = case.tensors
    few = {"q": t["q"][:, :, length - n : length]}
    few |= {name: t[name][:, :, :length].contiguous() for name in "kv"}
    return Case({**t, **few}, case.options)


def attend(case: Case, kernel: str | None = None) -> Result:
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    result = run(Case(tensors, case.options), kernel=kernel)
    return Result(result.out.cpu(), result.lse.cpu())


def rows_of(result: Result, begin: int, end: int) -> Result:
    return Result(result.out[:, :, begin:end], result.lse[:, :, begin:end])


@pytest.mark.parametrize("name", CASES)
def test_prefill_chunks_and_decode(name):
    case = prefill(**CASES[name])
    whole = attend(case, "hopper")
    if name in ("D 64", "D 128, fp16", "window", "sinks", "peaked", "peaked, D 64", "sigma 3"):
        assert_allowed(case, whole.items(), kernel="hopper")
    for n, length in ((300, S), (70, 1100), (9, 513), (1, S), (1, 512), (1, 40)):
        few = last_queries(case, n, length)
        expected = rows_of(whole, length - n, length)
        # The forward, and programs that share the keys.
        for kernel in ("hopper", "hopper_decode"):
            assert_same_bits(attend(few, kernel), expected)
        if n < 70:
            for page in (16, 48, 256):
                garbage = float("nan") if not CASES[name].get("bad") else 0.0
                assert_same_bits(attend(paginate(few, page, garbage=garbage)), expected)
    few = paginate(last_queries(case, 300), 64)
    for kernel in ("hopper", "hopper_decode"):
        assert_same_bits(attend(few, kernel), rows_of(whole, S - 300, S))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("length", [1000, 1024])
def test_a_short_prompt_has_the_rows_of_a_longer_one(D, length):
    """At D 64 all tiles are in one loop."""
    case = prefill(D, sigma=3.0)
    short = attend(last_queries(case, length, length), "hopper")
    assert_same_bits(short, rows_of(attend(case, "hopper"), 0, length))


def test_a_large_batch_and_one_sequence():
    """Folded by one program in a large batch, and by the second kernel alone."""
    case = last_queries(prefill(128), 1)
    alone = attend(case)
    many = {name: case.tensors[name].repeat(150, 1, 1, 1) for name in "qkv"}
    together = attend(Case(many, case.options))
    for b in (0, 151, 299):
        own = Result(alone.out[b % 2][None], alone.lse[b % 2][None])
        assert_same_bits(Result(together.out[b : b + 1], together.lse[b : b + 1]), own)


@pytest.mark.parametrize("n", [1, 300])
def test_padding_on_the_left(n):
    case = prefill(128)
    few = last_queries(case, n)
    padded = {x: torch.nn.functional.pad(few.tensors[x], (0, 0, 77, 5), value=NAN) for x in "kv"}
    ends = {"kv_starts": torch.tensor([77, 77]), "kv_lens": torch.tensor([S + 77, S + 77])}
    got = attend(Case({**few.tensors, **padded, **ends}, few.options), "hopper_decode")
    assert_same_bits(got, rows_of(attend(case), S - n, S))


def test_packed():
    case = prefill(64)
    whole = attend(case)
    q, k, v = (case.tensors[name][0].transpose(0, 1).cuda() for name in "qkv")
    cu_q = torch.tensor([0, 5, 305], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, S, 2 * S], dtype=torch.int32, device="cuda")
    out = lockstep.attention_varlen(
        torch.cat((q[-5:], q[-300:])), torch.cat((k, k)), torch.cat((v, v)), cu_q, cu_k,
        causal=True, query_invariant=True,
    )  # fmt: skip
    for rows in (out[:5], out[5:]):
        expected = whole.out[0, :, S - len(rows) :].transpose(0, 1)
        assert torch.equal(rows.cpu(), expected)


def test_gradients():
    """Another kernel's backward computes them, from statistics that the decode kernel stores."""
    case = last_queries(prefill(128), 9)
    found = []
    for invariant in (True, False):
        tensors = [case.tensors[name].cuda().requires_grad_() for name in "qkv"]
        out = lockstep.attention(*tensors, causal=True, query_invariant=invariant)
        found.append(torch.autograd.grad(out.float().square().sum(), tensors))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.02 * b.float().norm()
