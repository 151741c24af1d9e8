"""The Hopper kernels in constant time, on a GPU: the error rule, and values that are not finite."""

from __future__ import annotations

import pytest
import torch
from hopper_forward_calls import on_hopper
from problems import Case, assert_allowed, draw, draw_douts, draw_varlen, run, same_bits

plan_of = pytest.importorskip("lockstep.kernels.hopper.forward.plan").plan_of

pytestmark = on_hopper
KINDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (150, 20)},
    "wide window": {"window": (500, 30)},
    "lengths": {"causal": True, "kv_lens": torch.tensor([650, 300])},
    "capped": {"causal": True, "softcap": 20.0},
    "sinks": {"window": (100, 0), "sinks": torch.tensor([0.5, -1.0, 3.0, 1.0])},
}


def in_constant_time(case: Case, **more):
    tensors = {name: x.cuda() for name, x in case.tensors.items()}
    options = {**case.options, "constant_time": True}
    return run(Case(tensors, options), kernel="hopper", **more)


def on_cpu(items) -> dict[str, torch.Tensor]:
    return {name: x.cpu() for name, x in dict(items).items()}


@pytest.mark.parametrize(
    ("kind", "D"),
    [(kind, D) for kind in KINDS for D in (64, 128, 192, 256)],
)
def test_error_rule(kind, D):
    dtype = torch.float16 if kind == "window" else torch.bfloat16
    case = draw(700, 650, B=2, Hq=4, Hkv=2, D=D, dtype=dtype, **KINDS[kind])
    assert_allowed(case, on_cpu(in_constant_time(case).items()), kernel="hopper")


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_keys_wider_than_values(kind):
    case = draw(700, 650, B=1, Hq=4, Hkv=2, D=192, Dv=128, dtype=torch.bfloat16, **KINDS[kind])
    assert_allowed(case, on_cpu(in_constant_time(case).items()), kernel="hopper")


@pytest.mark.parametrize("numbers", ["normal, sigma 30", "normal, sigma 1000", "one dominant key"])
@pytest.mark.parametrize("D", [64, 128])
def test_large_scores(numbers, D):
    case = draw(300, 300, D=D, dtype=torch.bfloat16, causal=True, numbers=numbers)
    assert_allowed(case, on_cpu(in_constant_time(case).items()), kernel="hopper")


@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, 0)}], ids=str)
def test_rows_see_values_that_are_not_finite_or_keep_their_bits(D, bad, options):
    """Rows before a bad value keep their bits; rows that see it are not finite, and lse is not
    affected in any."""
    case = draw(400, 400, B=1, Hq=2, Hkv=2, D=D, dtype=torch.bfloat16, **options)
    clean = in_constant_time(case)
    key = 201
    v = case.tensors["v"].clone()
    v[:, 0, key, 5] = bad
    v[:, 0, 399, 7] = -bad
    dirty = in_constant_time(case.replaced(v=v))
    assert same_bits(clean.lse.cpu(), dirty.lse.cpu())
    a, b = clean.out.cpu(), dirty.out.cpu()
    assert same_bits(a[:, 1], b[:, 1])
    assert same_bits(a[:, 0, :key], b[:, 0, :key])
    last = 399 if "causal" in options else key + 71
    assert not b[:, 0, key:last, 5].isfinite().any()
    if "window" in options:
        assert same_bits(a[:, 0, last:399], b[:, 0, last:399])
    assert not b[:, 0, 399, 7].isfinite().any()


def test_a_row_has_its_bits_in_tiles_of_both_heights():
    """Which of them a call has depends on its batch."""
    many = draw(1152, 1000, B=4, Hq=44, Hkv=44, dtype=torch.bfloat16, constant_time=True)
    one = many.replaced(**{name: x[:1, :1] for name, x in many.tensors.items()})
    assert [plan_of(case.pose()[0]).consumers for case in (many, one)] == [3, 2]
    a, b = (in_constant_time(case) for case in (many, one))
    assert same_bits(a.out[:1, :1].cpu(), b.out.cpu())
    assert same_bits(a.lse[:1, :1].cpu(), b.lse.cpu())


@pytest.mark.parametrize(
    ("D", "dtype"), [(64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16)]
)
@pytest.mark.parametrize(("Sq", "Skv"), [(1000, 1000), (300, 1023), (700, 130)])
def test_a_row_has_its_bits_behind_other_tiles(Sq, Skv, D, dtype):
    """One head has a program for each tile; of many, most tiles follow another in the same loop.
    What a value that is not finite does to the rows of its head does not show in the next tile."""
    many = draw(Sq, Skv, B=4, Hq=60, Hkv=60, D=D, dtype=dtype, causal=True)
    v = many.tensors["v"].clone()
    v[1, 7, 100, 3] = float("nan")
    many = many.replaced(v=v)
    every = in_constant_time(many)
    for b, h in [(0, 0), (1, 7), (1, 8), (3, 59)]:
        mine = {name: x[b : b + 1, h : h + 1] for name, x in many.tensors.items()}
        one = in_constant_time(many.replaced(**mine))
        assert same_bits(every.out[b : b + 1, h : h + 1].cpu(), one.out.cpu())
        assert same_bits(every.lse[b : b + 1, h : h + 1].cpu(), one.lse.cpu())
    bad = every.out.isnan().any(-1)
    assert bad.any(-1).nonzero().tolist() == [[1, 7]]


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "lengths", "sinks"])
def test_gradients(D, kind):
    check_gradients(draw(300, 650, B=2, Hq=4, Hkv=2, D=D, dtype=torch.bfloat16, **KINDS[kind]))


@pytest.mark.parametrize("kind", ["full", "causal", "window", "lengths", "sinks", "capped"])
def test_gradients_of_keys_wider_than_values(kind):
    check_gradients(
        draw(300, 650, B=2, Hq=4, Hkv=2, D=192, Dv=128, dtype=torch.bfloat16, **KINDS[kind])
    )


@pytest.mark.parametrize("D", [64, 128, 192])
def test_gradients_of_large_scores(D):
    numbers = "normal, sigma 1000"
    check_gradients(draw(200, 300, D=D, dtype=torch.bfloat16, causal=True, numbers=numbers))


def check_gradients(case: Case) -> None:
    douts = draw_douts(case)
    result = in_constant_time(case, douts=tuple(x.cuda() for x in douts))
    assert_allowed(case, on_cpu(result.items()), douts, "hopper")


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 20)}], ids=str)
def test_packed_sequences(D, options):
    case = draw_varlen([300, 7, 500], [333, 40, 450], D=D, dtype=torch.bfloat16, **options)
    assert_allowed(case, on_cpu(in_constant_time(case).items()), kernel="hopper")
    check_gradients(case)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_values_of_a_packed_neighbour_do_not_show(D, options):
    case = draw_varlen([70, 90, 80], [70, 90, 80], D=D, dtype=torch.bfloat16, **options)
    v = case.tensors["v"].clone()
    v[70:160] = float("nan")
    clean, dirty = (in_constant_time(x).out.cpu() for x in (case, case.replaced(v=v)))
    for mine in (slice(0, 70), slice(160, 240)):
        assert same_bits(clean[mine], dirty[mine])
    assert not dirty[159].isfinite().any()
