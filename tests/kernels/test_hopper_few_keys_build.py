"""The Hopper forward of few keys without a GPU: what its kernels compile to."""

from __future__ import annotations

import pytest
import torch
from problems import draw_varlen, unwritten

from lockstep.problem import AttentionProblem, Options, Tensors, describe

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import Build, compile_for_hopper, count
from launch_arguments import bind
from machine_code import between, loops
from shared_places import shared_with_barriers

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.forward import launch, plan
from lockstep.kernels.hopper.forward.few_keys import few_keys_kernel
from lockstep.kernels.hopper.forward.kept_keys.kernel import kept_keys_kernel
from lockstep.kernels.hopper.forward.kept_keys.plan import kept_sizes
from lockstep.kernels.hopper.forward.one_block.kernel import one_block_kernel

PROCESSORS = 132


def few_keys(S: int, programs: int) -> Build:
    """The kernel for heads of S keys, which fit on an SM so many times."""
    tensors = unwritten(S, S, B=64, Hq=12, Hkv=12, dtype=torch.float16)
    call = launch.forward_launches(describe(tensors, Options()), tensors, PROCESSORS)
    bound = bind(call, tensors)["few_keys_kernel"]
    built = compile_for_hopper(few_keys_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    # Of each program, the hardware takes a KB more.
    assert programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    return built


@pytest.mark.usefixtures("unlowered")
def test_few_keys_of_more_blocks_fit():
    few_keys(257, programs=2)


@pytest.mark.parametrize(
    ("S", "D", "Dv", "causal"), [(62, 192, 128, True), (157, 72, 72, False), (60, 256, 256, True)]
)
def test_machine_code_of_kept_keys(S, D, Dv, causal):
    """As many programs fit on an SM as plans say, and few registers are spilled in the loop over
    tiles, which is before that of rows that fail."""
    tensors = unwritten(S, S, Hq=8, Hkv=8, D=D, Dv=Dv)
    problem = describe(tensors, Options(causal=causal))
    kept = kept_sizes(problem)
    bound = bind(launch.forward_launches(problem, tensors, PROCESSORS), tensors)["kept_keys_kernel"]
    built = compile_for_hopper(kept_keys_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    assert kept.programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    assert kept.programs * 128 * built.registers <= 65536
    assert "serialized" not in built.report
    bodies = sorted(_loops_with_products(built), key=lambda body: body.total())
    exponentials = (kept.block + kept.rest) // 2 + 4
    first_pass = next(body for body in bodies if body["MUFU.EX2"] == exponentials)
    assert first_pass["STL"] <= 4
    assert first_pass["LDL"] <= 24


def test_machine_code_of_few_keys():
    """Nothing is spilled in the loop over blocks."""
    built = few_keys(197, programs=3)
    assert 3 * 128 * built.registers <= 65536
    assert "serialized" not in built.report
    texts = [text for _, text in built.instructions]
    at = [i for i, text in enumerate(texts) if text.startswith("HGMMA")]
    # Scores of a block and its products with values; and the same for rows that fail, whose values
    # may have to be cleaned and counted.
    scores, products = 4, 8
    assert len(at) == (scores + products) + (scores + 3 * products)
    loop = count(texts[at[0] : at[scores + products - 1]])
    assert loop["MUFU.EX2"] >= 64
    assert loop["LDL"] == loop["STL"] == 0


def one_block(problem: AttentionProblem, tensors: Tensors) -> Build:
    """The kernel for keys of one block, which fits on an SM as many times as plans say."""
    bound = bind(launch.forward_launches(problem, tensors, PROCESSORS), tensors)["one_block_kernel"]
    built = compile_for_hopper(one_block_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    programs, _ = plan.one_block_room(problem)
    assert programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    assert programs * 128 * built.registers <= 65536
    assert "serialized" not in built.report
    return built


def test_machine_code_of_one_block():
    """The program fits on an SM four times. Up to 80 and up to 128 keys have a loop each in one
    build, in which keys are multiplied in steps of 16, those of 80 in two pieces, and nothing is
    spilled."""
    tensors = unwritten(4096, 77, B=2, Hq=10, Hkv=10)
    problem = describe(tensors, Options())
    assert plan.one_block_widths(problem) == (80, 128)
    built = one_block(problem, tensors)
    found = count([text for _, text in built.instructions])
    assert found["LDL"] == found["STL"] == 0
    # Four steps over 64 columns for each piece of the keys, one for 16 values each. Each thread has
    # half of the keys of two rows, and four more exponentials for their statistics.
    each = [(4 * n + keys // 16, keys // 2 + 4) for n, keys in ((2, 80), (1, 128))]
    assert set(each) <= {(x["HGMMA"], x["MUFU.EX2"]) for x in _loops_with_products(built)}
    assert (found["HGMMA"], found["MUFU.EX2"]) == tuple(map(sum, zip(*each, strict=True)))


def _loops_with_products(built):
    """What the loops of a build that have products consist of; also from waits that are repeated
    out of line to the end of a loop."""
    bodies = [between(built.instructions, *loop) for loop in set(loops(built.instructions))]
    found = [count([text for _, text in body]) for body in bodies]
    return [body for body in found if body["HGMMA"]]


def test_machine_code_of_one_block_of_wide_heads():
    """As many programs fit on an SM as plans say, and nothing is spilled; packed, too."""
    dense = unwritten(300, 64, B=64, Hq=16, Hkv=16, D=128)
    lens = [64] * 100
    packed = Tensors(**draw_varlen(lens, lens, Hq=4, Hkv=4, D=80, dtype=torch.bfloat16).tensors)
    for tensors in (dense, packed):
        built = one_block(describe(tensors, Options()), tensors)
        found = count([text for _, text in built.instructions])
        assert found["LDL"] == found["STL"] == 0
        assert found["MUFU.EX2"] == 32 + 4


@pytest.mark.parametrize(("S", "D"), [(128, 64), (42, 80), (100, 128)])
def test_machine_code_of_one_block_under_a_mask(S, D):
    """As many programs fit on an SM as plans say, and few registers are spilled in the loop over
    tiles."""
    tensors = unwritten(S, S, B=64, Hq=16, Hkv=4, D=D)
    problem = describe(tensors, Options(causal=True))
    built = one_block(problem, tensors)
    bodies = _loops_with_products(built)
    for keys in plan.one_block_widths(problem):
        # A second pass may have as many.
        of_width = [body for body in bodies if body["MUFU.EX2"] == keys // 2 + 4]
        assert min(body["STL"] + body["LDL"] for body in of_width) <= 8


def test_machine_code_of_few_keys_under_a_mask():
    """Nothing is spilled in the loop over blocks."""
    tensors = unwritten(256, 256, B=8, Hq=12, Hkv=12)
    problem = describe(tensors, Options(causal=True))
    bound = bind(launch.forward_launches(problem, tensors, PROCESSORS), tensors)["few_keys_kernel"]
    built = compile_for_hopper(few_keys_kernel, bound.arguments, **bound.launch.options)
    assert 3 * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    assert 3 * 128 * built.registers <= 65536
    assert "serialized" not in built.report
    bodies = [between(built.instructions, *loop) for loop in set(loops(built.instructions))]
    found = [count([text for _, text in body]) for body in sorted(bodies, key=len)]
    of_block = next(body for body in found if body["HGMMA"])
    assert of_block["MUFU.EX2"] >= 64
    assert of_block["STL"] == of_block["LDL"] == 0
