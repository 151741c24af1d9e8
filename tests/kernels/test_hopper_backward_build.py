"""The Hopper backward compiled for sm_90 without a GPU: registers, products, overlap."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import compile_for_hopper, count, writes_in_flight
from launch_arguments import bind
from machine_code import Instructions, between, loops
from operand_addresses import lost_operands
from shared_places import shared_with_barriers

from lockstep.kernels.hopper import supports_backward
from lockstep.kernels.hopper.backward.narrow import call as narrow
from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.problem import Tensors, describe, make_options

# Causal ones are among those with a softcap, in constant time and for other versions of Triton.
BUILDS = [
    (64, {}),
    (64, {"S": 512}),
    (128, {"window": (100, 30)}),
    # Queries are shared out.
    (128, {"Hkv": 1, "causal": True}),
    # Loops are cut.
    (128, {"S": 2200}),
]


def compiled(D: int, S: int = 4096, Hkv: int = 8, **options):
    """The backward kernel as a call with these options would launch it."""
    x, k = (torch.empty(2, H, S, D, dtype=torch.bfloat16) for H in (8, Hkv))
    names = ("causal", "window", "scale", "softcap")
    given = make_options(*({"causal": False, **options}.get(name) for name in names))
    problem = describe(Tensors(x, k, k), given)
    saved = BackwardTensors(*Tensors(x, k, k), x, x[..., :2].float(), x, None)
    with patch.object(narrow, "processors", lambda _: 132):
        call = narrow.prepare_backward(problem, saved, Needs(True, True, True, False, False))
    launch, arguments = bind(call, saved)["backward_kernel"]
    return compile_for_hopper(launch.kernel, arguments, **launch.options)


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def build(request):
    D, options = request.param
    return compiled(D, **options)


@pytest.fixture(scope="module")
def consumer_loops(build) -> list[Instructions]:
    """The loops over query tiles, one for each warpgroup.

    A wait that is not over at once jumps away and back, which looks like a longer loop.
    """
    found = []
    for begin, end in loops(build.instructions):
        body = between(build.instructions, begin, end)
        names = count([text for _, text in body])
        if names["HGMMA"] == 32 and names["MUFU.EX2"]:
            found.append((begin, end, body))
    innermost: list[tuple[int, int, Instructions]] = []
    for begin, end, body in sorted(found, key=lambda loop: len(loop[2])):
        if all(end < b or e < begin for b, e, _ in innermost):
            innermost.append((begin, end, body))
    return [body for *_, body in innermost]


def test_products_are_neither_serialized_nor_interrupted_by_spills(build, consumer_loops):
    assert "serialized" not in build.report
    assert build.registers == 168
    # Of each warpgroup, one for loops with large scores and one for others of such calls, and one
    # for calls that have none.
    assert len(consumer_loops) == 6
    for body in consumer_loops:
        found = count([text for _, text in body])
        # A few scalars are kept in local memory; the smallest matrix would be 16 registers. The
        # loop for large scores, which loads what they need from global memory, may have it slow.
        assert found["STL"] <= (24 if found["LDG"] else 8)


def test_no_operand_is_overwritten_under_a_product(consumer_loops):
    assert not any(writes_in_flight(body) for body in consumer_loops)


def test_five_products_and_the_work_under_them(build, consumer_loops, request):
    is_apart = request.node.callspec.params["build"] == (64, {})
    for loop in consumer_loops:
        body = [text for _, text in loop]
        marks = [t for t in body if t.startswith(("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"))]
        kinds = "".join("w" if "DEPBAR" in mark else "p" for mark in marks)
        exponentials = [i for i, t in enumerate(body) if t.startswith("MUFU.EX2")]
        waits = [i for i, t in enumerate(body) if "DEPBAR" in t]
        products = [i for i, t in enumerate(body) if t.startswith("HGMMA")]
        # One for each score of a thread, and scores are what the first product makes.
        width = int(body[products[0]].split()[0].split("x")[1])
        assert len(exponentials) == width // 2
        if not is_apart:
            # Together: S, dP | dV, dV | dQ, dK. S is there and dP under way.
            assert kinds == "ppwppwppww"
            begin, end = waits[0], waits[1]
        else:
            # Apart: dP, dV, dV | dQ, dK | S. Each waits while the next is already under way.
            assert kinds == "pppwppwpw"
            begin, end = products[0], waits[0]
        assert all(begin < i < end for i in exponentials)
        # One half of dV waits for half of the weights, the other half for all.
        sums = [i for i in products if begin < i < end][-width // 16 :]
        assert sum(i < sums[0] for i in exponentials) >= len(exponentials) // 2
        assert exponentials[-1] > sums[0]
        assert exponentials[-1] < sums[len(sums) // 2]


def test_shared_memory_is_fenced_once_a_step(consumer_loops):
    for loop in consumer_loops:
        assert sum("FENCE.VIEW.ASYNC" in text for _, text in loop) == 1


def test_no_step_gathers_the_lanes_of_a_warp(consumer_loops):
    """As all loops would if one warp took a branch that its lanes might not agree on."""
    for loop in consumer_loops:
        assert not any(text.startswith(("BSSY", "WARPSYNC")) for _, text in loop)


def test_no_warp_waits_for_others_before_ds_is_stored(consumer_loops):
    """The other warpgroup waits for it: what there is to wait for has been waited for before."""
    for loop in consumer_loops:
        names = [text.split()[0] for _, text in loop]
        stored = next(i for i, name in enumerate(names) if name.startswith("STSM"))
        since_dp = names[:stored][::-1]
        since_dp = since_dp[: next(i for i, name in enumerate(since_dp) if "DEPBAR" in name)]
        assert not any(name.startswith("BAR.SYNC") for name in since_dp)


def partition_barriers(build) -> set[int]:
    """Numbers of the barriers that Triton uses: of all threads, or of four warps."""
    barriers = [t.split()[1:] for _, t in build.instructions if t.startswith("BAR.SYNC")]
    return {int(words[0].rstrip(","), 16) for words in barriers if words[1:] in ([], ["0x80"])}


def test_barriers_have_numbers_of_their_own(build):
    taken = partition_barriers(build)
    assert taken
    assert max(taken) < FIRST_FREE.value


def test_no_barrier_shares_its_memory(build):
    assert not shared_with_barriers(build.kernel.asm["ttgir"])


def test_dq_leaves_through_the_copy_engine(build, request):
    text = [text for _, text in build.instructions]
    _, options = request.node.callspec.params["build"]
    # By two warps, for every other part each; calls with large scores have code of their own. Under
    # a mask the last part of a tile is another one: sums come back, and leave as dQ.
    n_kinds = 2 if "window" in options else 1
    assert sum(t.startswith("UTMAREDG") for t in text) == 2 * 2 * n_kinds
    # The other atomics draw the first ticket and the next, count turns and, of consumers that cut
    # loops, signals: integers.
    signals = 2 if options == {"S": 2200} else 0
    atomics = [t.split()[0] for t in text if t.startswith(("RED.", "REDG", "ATOM"))]
    assert len(atomics) == 2 * (4 + signals)
    assert not any("F32" in name or "F16" in name for name in atomics)


def test_dq_of_one_key_tile_is_stored_and_never_added():
    build = compiled(128, S=96)
    names = count([text for _, text in build.instructions])
    # Two halves by two warps; dk and dv, two tiles of two halves each, in the loop and behind the
    # last one. Calls with large scores have code of their own.
    assert names["UTMAREDG"] == 0
    assert names["UTMASTG"] == 2 * (2 * 2 + 2 * 2 * 4)
    assert "serialized" not in build.report
    assert not shared_with_barriers(build.kernel.asm["ttgir"])
    assert lost_operands(build.kernel.asm["cubin"]) == []


def test_a_build_with_a_softcap_is_not_serialized():
    assert "serialized" not in compiled(128, causal=True, softcap=5.0).report


def describe_call(D: int, Dv: int, S: int = 32):
    q, v = (torch.empty(1, 2, S, d, dtype=torch.bfloat16) for d in (D, Dv))
    return describe(Tensors(q, q, v), make_options(False, None, None, None))


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (96, 40), (8, 256)])
def test_takes_what_the_forward_takes_if_it_is_not_empty(D, Dv):
    assert supports_backward(describe_call(D, Dv)) is None
    assert "at least one query and one key" in supports_backward(describe_call(D, Dv, S=0))


@pytest.mark.slow
def test_products_of_narrow_heads_find_their_operands():
    # Nothing else has noticed that they did not.
    assert lost_operands(compiled(16).kernel.asm["cubin"]) == []
