"""Keys that begin at `kv_starts`: what lies before changes nothing, not even a bit.

On the CPU, and with TRITON_INTERPRET=1 or a GPU in the Triton kernels too.
"""

from __future__ import annotations

import os

import pytest
import torch
from problems import Case, assert_allowed, draw, draw_douts, run, same_bits

import lockstep
from lockstep import dispatch

STARTS, LENS = torch.tensor([0, 5, 33, 20]), torch.tensor([60, 48, 60, 20])
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (9, 3), "softcap": 5.0},
    "bias": {"bias": torch.randn(4, 1, 7, 60), "sinks": torch.randn(4)},
}
if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter  # noqa: F401

KERNEL = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else None
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])


def drawn(name: str, Sq: int = 7, Hq: int = 4, **more) -> Case:
    # The interpreter takes twice as long for float32, which is cut into terms.
    dtype = torch.float16 if KERNEL and name != "causal" else torch.float32
    return draw(Sq, 60, B=4, Hq=Hq, Hkv=Hq // 2, D=16, kv_starts=STARTS, dtype=dtype, **more)


def moved(case: Case, device: str) -> Case:
    return Case({name: x.to(device) for name, x in case.tensors.items()}, case.options)


def alone(case: Case, b: int) -> Case:
    """Sequence b with its own keys and nothing else."""
    start = int(case.tensors["kv_starts"][b])
    end = int(case.tensors["kv_lens"][b]) if "kv_lens" in case.tensors else 60
    own = {"q": case.tensors["q"][b : b + 1]}
    own |= {name: case.tensors[name][b : b + 1, :, start:end] for name in ("k", "v")}
    if "bias" in case.tensors:
        own["bias"] = case.tensors["bias"][b : b + 1, ..., start:end]
    none = dict.fromkeys(name for name in ("kv_starts", "kv_lens") if name in case.tensors)
    return case.replaced(**own, **none)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("Sq", [1, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients(name, Sq, device):
    options = dict(OPTIONS[name])
    if "bias" in options:
        options["bias"] = options["bias"][:, :, :Sq]
    case = drawn(name, Sq, **options)
    case = case.replaced(kv_lens=LENS) if name != "causal" else case
    douts = draw_douts(case)
    on_device = tuple(x.to(device) for x in douts)
    found = run(moved(case, device), douts=on_device, kernel=KERNEL).items()
    assert_allowed(case, {name: x.cpu() for name, x in found.items()}, douts)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(
    ("name", "lens"), [("causal", None), *((name, LENS) for name in OPTIONS)],
    ids=["causal", *(f"{name}, lengths" for name in OPTIONS)],
)  # fmt: skip
def test_bits_are_those_without_padding(name, lens, device):
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = options["sinks"][:2]
    case = drawn(name, Hq=2, **options)
    case = moved(case if lens is None else case.replaced(kv_lens=lens), device)
    douts = tuple(x.to(device) for x in draw_douts(case))
    garbage = {name: case.tensors[name].clone() for name in ("k", "v")}
    for b, start in enumerate(STARTS.tolist()):
        for x in garbage.values():
            x[b, :, :start] = torch.nan
    kernel = KERNEL or ("triton" if device == "cuda" else None)
    together = run(case.replaced(**garbage), douts=douts, kernel=kernel)
    for b, start in enumerate(STARTS.tolist()):
        own = alone(case, b)
        if not own.tensors["k"].numel():
            continue
        expected = run(own, douts=tuple(x[b : b + 1] for x in douts), kernel=kernel)
        n = own.tensors["k"].shape[2]
        assert same_bits(together.out[b : b + 1], expected.out)
        assert same_bits(together.lse[b : b + 1], expected.lse)
        assert same_bits(together.grads["q"][b : b + 1], expected.grads["q"])
        for name in ("k", "v"):
            grad = together.grads[name][b : b + 1]
            assert same_bits(grad[:, :, start : start + n], expected.grads[name])
            assert not grad[:, :, :start].any()
            assert not grad[:, :, start + n :].any()


def test_kernels_that_do_not_take_it_say_so():
    case = drawn("causal")
    problem, _ = case.pose()
    assert "kv_starts" in str(problem)
    refusals = [kernel.supports(problem) for kernel in dispatch.KERNELS if kernel.name == "cpu"]
    assert KERNEL or refusals == [None]
    expected = lockstep.reference.attention(**case.tensors)
    torch.testing.assert_close(run(case, kernel=KERNEL).out.double(), expected, rtol=0, atol=1e-5)
