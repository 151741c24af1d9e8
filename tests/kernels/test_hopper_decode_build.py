"""The Hopper decode kernel without a GPU: what it compiles to."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import (
    PRODUCT_WAIT,
    SCORES_WAIT,
    compile_for_hopper,
    count,
    usual_path,
    writes_in_flight,
)
from launch_arguments import bind
from machine_code import between, loops
from shared_places import shared_with_barriers
from test_hopper_decode import PROCESSORS, tensors_of

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.decode import launch, plan
from lockstep.kernels.hopper.decode.kernel import decode_kernel
from lockstep.problem import Options, describe


def built_loops(built):
    """Where the innermost loops with both products begin and end; and the waits for the two."""
    found = []
    for scores in (at for at, text in built.instructions if text == SCORES_WAIT):
        begin, end = min(
            (x for x in set(loops(built.instructions)) if x[0] < scores < x[1]),
            key=lambda x: x[1] - x[0],
        )
        waits = (at for at, text in built.instructions if text == PRODUCT_WAIT and at > scores)
        found.append(((begin, end), (scores, next(waits))))
    return found


def single_warp_loop(built):
    """The innermost loop with products of single warps."""
    found = sorted(set(loops(built.instructions)), key=lambda x: x[1] - x[0])
    bodies = (between(built.instructions, *x) for x in found)
    return next(body for body in bodies if any(text.startswith("HMMA") for _, text in body))


@pytest.mark.parametrize(("D", "page", "Sq"), [(128, 16, 1), (256, 64, 3)])
def test_machine_code(D, page, Sq):
    tensors = tensors_of(D=D, page=page, Sq=Sq)
    problem = describe(tensors, Options(causal=True))
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    shape = plan.PLANS[D]
    found = count([text for _, text in built.instructions])
    assert "serialized" not in built.report
    # Scores of the first tile and of the others, and the product with the values.
    (((begin, end), (scores, product)),) = built_loops(built)
    assert found["HGMMA"] == 2 * (D // 16) + shape.block_kv // 16
    # The exponentials of a tile run while the product of the one before is under way, and nothing
    # writes what that product reads.
    body = between(built.instructions, begin, end)
    weighed = [at for at, text in body if "MUFU.EX2" in text]
    # A thread has two rows, and for each a factor of the sums so far.
    assert len(weighed) == 2 * (shape.block_kv // 4 + 1)
    assert all(scores < at < product for at in weighed)
    assert writes_in_flight(body) == []
    usual = count(usual_path(body))
    assert usual["LDL"] + usual["STL"] <= (0 if D == 128 else 8)
    # Each box of a tile of keys and of one of values.
    assert found["UTMALDG"] == 2 * (D // plan.COLUMNS) * max(shape.block_kv // page, 1)
    # What a program of an SM takes, with 1 KB that the system takes of each.
    assert shape.programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    usual = count(usual_path(single_warp_loop(built)))
    # A warp has 16 rows and a quarter of the keys, a thread two rows and a quarter of these. At
    # head dim 256 a thread has one of 8 rows, and the values are the left operand.
    keys = shape.block_kv // 4
    products_of_values = (D // 8) * (keys // 16) if D == 128 else (D // 16) * (keys // 16)
    assert usual["HMMA"] == (D // 16) * (keys // 8) + products_of_values
    assert usual["MUFU.EX2"] == (2 if D == 128 else 1) * (keys // 4 + 1)
    # Nothing is exchanged from tile to tile, and little spilled.
    assert usual["LDS"] + usual["STS"] == 0
    assert usual["LDL"] + usual["STL"] <= (0 if D == 128 else 4)


def test_machine_code_of_the_narrow_consumer_alone():
    tensors = tensors_of(D=256, page=64)
    problem = describe(tensors, Options(causal=True))
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    found = count([text for _, text in built.instructions])
    assert found["HGMMA"] == 0
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    # As in a build with both.
    usual = count(usual_path(single_warp_loop(built)))
    assert usual["HMMA"] == 16 * 2 + 16
    assert usual["LDS"] + usual["STS"] == 0


@pytest.mark.parametrize("Sq", [1, 3], ids=["few rows", "more rows"])
def test_machine_code_of_spans(Sq):
    tensors = tensors_of(D=64, Sq=Sq)
    problem = describe(tensors, Options(causal=True, query_invariant=True))
    assert plan.few_rows(problem) == (plan.FEW_ROWS if Sq == 1 else 0)
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    shape = plan.INVARIANT_PLANS[64]
    found = count([text for _, text in built.instructions])
    assert "serialized" not in built.report
    # As above, the scores of the keys that rows begin with, and the last product of a run.
    assert found["HGMMA"] == 3 * (64 // 16) + 2 * (shape.block_kv // 16)
    assert shape.programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    (loop,) = built.addressed_loops
    assert not writes_in_flight(loop)
    usual = count(usual_path(loop))
    # Each weight is one of a thread's 64, and with few rows of 32; two more for each row rescale.
    rows_of_thread = 1 if Sq == 1 else 2
    assert usual["MUFU.EX2"] == rows_of_thread * (shape.block_kv // 4 + 2)
    # Tiles are not cleaned, nor sums rescaled, unless they have to be; nothing is spilled.
    assert usual["LDL"] + usual["STL"] == 0
    assert usual["LDS"] + usual["STS"] == 0
