"""Settings of the caller's thread for floating-point numbers change no bit."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
import torch
from problems import same_bits

import lockstep
from lockstep.kernels.cpu.compiler.entry import entry_of

# Values, gradients and statistics that are subnormal, or become so on the way.
TINY = 1e-38


@pytest.fixture
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def _draw() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v, bias and sinks; gradients of out and lse. What is drawn depends on the mode, too."""
    q, k, v, dout = torch.randn(4, 1, 4, 140, 64)
    bias, sinks = torch.randn(1, 4, 140, 140), torch.randn(4)
    inputs = [x.requires_grad_() for x in (q, k, v * TINY, bias, sinks)]
    return inputs, [dout, torch.randn(1, 4, 140) * TINY]


def _everything(inputs: list[torch.Tensor], douts: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v, bias, sinks = inputs
    out, lse = lockstep.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    grads = torch.autograd.grad((out, lse), inputs, douts)
    merged = lockstep.merge([(out.detach(), lse.detach())] * 2)
    return [out.detach(), lse.detach(), *grads, *merged]


def test_flushing_changes_no_bit_on_any_number_of_threads(flushing):
    threads = torch.get_num_threads()
    drawn = _draw()
    expected = _everything(*drawn)
    assert any(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any() for x in expected)
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for on in (True, False):
                torch.set_flush_denormal(on)
                found = _everything(*drawn)
                torch.set_flush_denormal(False)
                for i, (x, y) in enumerate(zip(found, expected, strict=True)):
                    assert same_bits(x, y), (n, on, i)
    finally:
        torch.set_num_threads(threads)


def test_the_callers_setting_stays(flushing):
    x = torch.randn(1, 1, 20, 16)
    tiny = torch.tensor([1e-39])
    for on in (True, False):
        torch.set_flush_denormal(on)
        lockstep.attention(x, x, x)
        flushes = (tiny * 1.0 == 0).item()
        torch.set_flush_denormal(False)
        assert flushes is on


@pytest.mark.parametrize(
    ("triple", "sets", "reads"),
    [
        ("aarch64-unknown-linux-gnu", "fpcr, ", ", fpcr"),
        ("arm64-apple-darwin", "fpcr, ", ", fpcr"),
        ("x86_64-unknown-linux-gnu", "ldmxcsr", "stmxcsr"),
        ("x86_64-apple-darwin", "ldmxcsr", "stmxcsr"),
    ],
)
def test_every_machine_sets_the_mode_before_the_kernel_and_restores_it(triple, sets, reads):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple).create_target_machine(opt=3, codemodel="small")
    module = llvm.parse_assembly(entry_of("kernel", "body", triple))
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    lines = [line.lower() for line in target.emit_assembly(module).splitlines()]

    def places(what: str) -> list[int]:
        return [i for i, line in enumerate(lines) if what in line]

    # ARM writes the register first and reads it last: `msr fpcr, x0`, `mrs x0, fpcr`.
    (read,), (before, after) = places(reads), places(sets)
    calls = [i for i in places("inside") if lines[i].split()[0] in ("bl", "call", "callq")]
    assert len(calls) == 1
    assert read < before < calls[0] < after
