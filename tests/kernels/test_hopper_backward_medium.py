"""The Hopper backward for head dims from 129 to 192 and values of up to 128, compiled for sm_90
without a GPU. On a GPU it is tested with the others, in `test_hopper_backward.py`."""

from __future__ import annotations

from unittest.mock import patch

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import Build, compile_for_hopper, count, writes_in_flight
from launch_arguments import bind
from machine_code import Instructions, between, loops
from problems import unwritten
from shared_places import shared_with_barriers
from test_hopper_backward_build import partition_barriers

from lockstep.kernels.hopper import KERNEL
from lockstep.kernels.hopper.backward.medium import call as medium
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.problem import Options, describe

NEEDS = Needs(True, True, True, False, False)
# S, dP, dV, dK and dQ of a warpgroup: instructions over 16 columns, rows or keys each.
PRODUCTS = 12 + 2 * 8 + 2 * 2 + 2 * 4 + 2 * 8


def compiled(**options) -> Build:
    """The backward kernel as a call with these options would launch it."""
    tensors = unwritten(512, 512, B=2, D=192, Dv=128)
    problem = describe(tensors, Options(**options))
    saved = BackwardTensors(*tensors, tensors.v, tensors.v[..., :2].float(), tensors.v, None)
    with patch.object(medium, "processors", lambda _: 132):
        call = KERNEL.prepare_backward(problem, saved, NEEDS)
    launch, arguments = bind(call, saved)["medium_kernel"]
    return compile_for_hopper(launch.kernel, arguments, **launch.options)


@pytest.fixture(scope="module", params=[{}, {"causal": True, "softcap": 3.0}], ids=str)
def build(request):
    return compiled(**request.param)


@pytest.fixture(scope="module")
def consumer_loops(build) -> list[Instructions]:
    """The loops over query tiles, one for each warpgroup."""
    found: list[tuple[int, int, Instructions]] = []
    for begin, end in sorted(set(loops(build.instructions)), key=lambda loop: loop[1] - loop[0]):
        body = between(build.instructions, begin, end)
        names = count([text for _, text in body])
        apart = all(end < b or e < begin for b, e, _ in found)
        if apart and names["HGMMA"] == PRODUCTS and names["MUFU.EX2"]:
            found.append((begin, end, body))
    return [body for *_, body in found]


def test_products_are_neither_serialized_nor_interrupted_by_spills(build, consumer_loops):
    assert "serialized" not in build.report
    assert build.registers == 168
    assert len(consumer_loops) == 2
    for body in consumer_loops:
        # A few scalars are kept in local memory; the smallest matrix would be 16 registers.
        assert count([text for _, text in body])["STL"] <= 8


def test_no_operand_is_overwritten_under_a_product(consumer_loops):
    assert not any(writes_in_flight(body) for body in consumer_loops)


def test_no_step_gathers_the_lanes_of_a_warp(consumer_loops):
    for loop in consumer_loops:
        assert not any(text.startswith(("BSSY", "WARPSYNC")) for _, text in loop)


def test_barriers_have_numbers_and_memory_of_their_own(build):
    assert max(partition_barriers(build)) < FIRST_FREE.value
    assert not shared_with_barriers(build.kernel.asm["ttgir"])


def test_no_float_is_added_by_threads(build):
    """Only the copy engine adds, when it is a program's turn."""
    names = [text.split()[0] for _, text in build.instructions]
    assert any(name.startswith("UTMAREDG") for name in names)
    assert not any(name.startswith(("RED.", "REDG", "ATOM")) and ".F32" in name for name in names)


@pytest.mark.parametrize(
    ("D", "Dv", "kernels"),
    [
        (128, 128, {"backward_kernel"}),
        (136, 8, {"medium_kernel"}),
        (192, 128, {"medium_kernel"}),
        (192, 136, {"keys_kernel", "queries_kernel"}),
        (200, 128, {"keys_kernel", "queries_kernel"}),
        (128, 136, {"keys_kernel", "queries_kernel"}),
    ],
)
def test_head_dims_of_each_design(D, Dv, kernels):
    tensors = unwritten(64, 64, D=D, Dv=Dv)
    saved = BackwardTensors(*tensors, tensors.v, tensors.v[..., :2].float(), tensors.v, None)
    with (
        patch.object(medium, "processors", lambda _: 132),
        patch("lockstep.kernels.hopper.backward.narrow.call.processors", lambda _: 132),
    ):
        call = KERNEL.prepare_backward(describe(tensors, Options()), saved, NEEDS)
    names = {launch.name for launch in call.launches}
    assert names - {"prepare_rows", "finish_queries"} == kernels
