"""Every kernel on a GPU keeps its claims about bits; one that adds with atomics is caught.

Compiling takes most of the time here. So each shape goes through one set of options, which together
are all, and the tests of a shape come one after another: most of what they need is then compiled.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_calls import forget_calls

from lockstep import dispatch
from lockstep.audit import batch_invariance, determinism
from lockstep.audit.bits import first_difference
from lockstep.audit.calls import Shape, draw
from lockstep.audit.checks import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAIN = Shape(device="cuda", dtype=torch.bfloat16, B=4, Hq=8, Hkv=2, S=777, D=128)
SHAPES = {
    "D128-causal": replace(MAIN, options=("causal",)),
    "D64-plain": replace(MAIN, D=64, S=300, repeats=5, options=("plain",)),
    "D80-window": replace(MAIN, D=80, S=300, dtype=torch.float16, repeats=5, options=("window",)),
    "D256-causal": replace(MAIN, D=256, S=300, repeats=5, options=("causal",)),
    "fp32-window": replace(MAIN, D=32, S=300, dtype=torch.float32, repeats=5, options=("window",)),
}
CHECKS = [
    check
    for check in (*determinism.CHECKS, *batch_invariance.CHECKS)
    if check.refuses(MAIN) is None
]
KERNELS = [kernel for kernel in dispatch.KERNELS if kernel.name not in ("cpu", "oracle")]
by_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)


def held(check, shape, kernel) -> None:
    outcome = run(check, shape, kernel)
    assert outcome.ok, f"{outcome.what}: {outcome.difference}"
    if outcome.skipped is not None:
        pytest.skip(outcome.skipped)


def same(expected, got) -> None:
    difference = first_difference(expected.tensors, got.tensors)
    assert difference is None, str(difference)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("name", SHAPES)
@by_kernel
def test_claims(kernel, name, check):
    held(check, SHAPES[name], kernel)


@by_kernel
def test_a_thousand_repetitions(kernel):
    held(determinism.CHECKS[0], replace(MAIN, repeats=1000, options=("causal",)), kernel)


@by_kernel
@pytest.mark.parametrize("query_invariant", [False, True], ids=["", "query-invariant"])
def test_a_long_cache_decoded_alone_and_in_any_batch(kernel, query_invariant):
    """Long enough that the keys of one sequence are split over many programs."""
    if query_invariant and not kernel.query_invariant:
        pytest.skip("not claimed")
    batch = draw(replace(MAIN, S=9000, B=3), kernel, "causal")
    batch = replace(batch, query_invariant=query_invariant)
    last = batch.last_queries(1)
    alone = last.take([0]).forward()
    if alone.refusals:
        pytest.skip(alone.refusals[0])
    for copies in (2, 40):
        same(alone, last.take([1] * copies + [0]).forward().sequence(copies))
    if query_invariant:
        whole = batch.take([0])
        if (prefill := whole.forward()).refusals:
            # A decode kernel has the bits of the kernel that prefills.
            prefill = replace(whole, kernel=dispatch.candidates("hopper")[0]).forward()
        same(alone, prefill.queries(8999, 9000))


def pretend(monkeypatch, kernel, multiprocessors: int) -> None:
    """The kernel plans for a device of another size."""
    forget_calls(monkeypatch)
    if kernel.name == "hopper":
        from lockstep.kernels.hopper.forward import launch

        monkeypatch.setattr(launch, "processors", lambda _: multiprocessors)
        return
    from lockstep.kernels.triton import launch

    device = launch.device_of(torch.device("cuda", 0))
    other = replace(device, multiprocessors=multiprocessors)
    monkeypatch.setattr(launch, "device_of", lambda _: other)


@by_kernel
@pytest.mark.parametrize("Sq", [1, 2000], ids=["decode", "prefill"])
def test_the_number_of_multiprocessors(kernel, Sq, monkeypatch):
    """One, a few, as many as there are, and more than any GPU has."""
    batch = draw(replace(MAIN, S=2000, B=2), kernel, "causal").last_queries(Sq)
    expected = batch.run()
    if not expected.tensors:
        pytest.skip(expected.refusals[0])
    for number in (1, 7, 100, 1000):
        pretend(monkeypatch, kernel, number)
        same(expected, batch.run())


def test_the_audit_catches_atomics(monkeypatch):
    sys.path.insert(0, str(Path(__file__).parent))
    from atomic_dq import KERNEL

    monkeypatch.setattr(dispatch, "KERNELS", (KERNEL, *dispatch.KERNELS))
    shape = replace(MAIN, dtype=torch.float32, S=2048, D=64, repeats=50, options=("causal",))
    outcome = run(determinism.CHECKS[0], shape, KERNEL)
    assert not outcome.ok, "fifty sums by atomics came out the same"
    assert outcome.difference.tensor == "dq"
    assert outcome.what.startswith("causal")
