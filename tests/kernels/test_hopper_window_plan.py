"""The Hopper forward of narrow windows, without a GPU: who takes a call, sizes, machine code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import compile_for_hopper, count, writes_in_flight
from launch_arguments import bind
from machine_code import between, loops
from problems import unwritten
from shared_places import shared_with_barriers

from lockstep.kernels.hopper.common.gluon_shim import VIEWS_GROW
from lockstep.kernels.hopper.forward import launch
from lockstep.kernels.hopper.forward.narrow_window import plan as window_plan
from lockstep.kernels.hopper.forward.narrow_window.kernel import narrow_window_kernel
from lockstep.options import Options
from lockstep.problem import AttentionProblem, describe

pytestmark = pytest.mark.skipif(not VIEWS_GROW, reason="this Triton has the other kernel")

CAUSAL = {"window_left": 127, "window_right": 0}


def problem(Hq: int = 64, Hkv: int = 8, D: int = 64, **options) -> AttentionProblem:
    return describe(unwritten(500, 600, Hq=Hq, Hkv=Hkv, D=D), Options(**CAUSAL | options))


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, True),
        ({"window_left": 255}, True),
        ({"window_left": 260}, False),
        ({"window_left": 128, "window_right": 128}, True),
        ({"window_left": None}, False),
        ({"Hkv": 64}, False),
        ({"Hkv": 32}, True),
        ({"Hkv": 32, "window_left": 128}, True),
        ({"Hkv": 32, "window_left": 129}, False),
        ({"D": 128}, True),
        ({"D": 128, "Hkv": 32}, False),
        ({"D": 128, "window_left": 200}, False),
        ({"D": 136}, False),
        ({"softcap": 20.0}, False),
        ({"query_invariant": True}, False),
        ({"constant_time": True}, False),
    ],
    ids=str,
)
def test_mask_and_heads_decide(options, takes):
    assert window_plan.has_narrow_window(problem(**options)) == takes


@pytest.mark.parametrize("Hkv", [32, 16, 8])
@pytest.mark.parametrize("window", [(0, 0), (127, 0), (63, 0), (17, 5), (64, 64), (100, 9)])
def test_rows_find_their_keys(Hkv, window):
    """Wherever a chunk begins: in the keys of its tile, and these in shared memory; what is not
    masked, all rows of a tile see."""
    left, right = window
    sizes = window_plan.sizes_of(problem(Hkv=Hkv, window_left=left, window_right=right))
    P = sizes.positions
    for begin in range(3 * sizes.chunk):
        tiles = range(begin // P, (begin + sizes.chunk - 1) // P + 1)
        first = (tiles[0] * P - left) // 16 * 16
        for tile in tiles:
            key = (tile * P - left) // 16 * 16
            assert 0 <= key - first <= sizes.kv_rows - sizes.keys
            for row in range(tile * P, (tile + 1) * P):
                assert 0 <= row - left - key <= sizes.before
                assert sizes.until <= row + right + 1 - key <= sizes.keys


@pytest.mark.parametrize(("Hkv", "D"), [(8, 64), (32, 64), (16, 128)])
def test_machine_code(Hkv, D):
    tensors = unwritten(5000, 5000, Hq=64, Hkv=Hkv, D=D, sinks=torch.empty(64))
    asked = describe(tensors, Options(**CAUSAL))
    sizes = window_plan.sizes_of(asked)
    bound = bind(launch.forward_launches(asked, tensors, 132), tensors)["narrow_window_kernel"]
    built = compile_for_hopper(narrow_window_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    assert "serialized" not in built.report
    assert built.registers <= window_plan.REGISTERS[sizes.programs]
    assert sizes.programs * (built.kernel.metadata.shared + 1024) <= window_plan.SM_BYTES
    all_loops = [between(built.instructions, *ends) for ends in set(loops(built.instructions))]
    products = [loop for loop in all_loops if any("HGMMA" in text for _, text in loop)]
    # The second pass is a loop of its own, and longer; out of line, waits jump back over much else.
    first_pass = min(products, key=len)
    assert not writes_in_flight(first_pass)
    found = count([text for _, text in first_pass])
    assert found["STL"] == 0
    scores = sizes.keys * 64 // 128
    assert scores <= found["MUFU.EX2"] <= scores + 8
