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
from test_hopper_decode import PROCESSORS, packed, tensors_of

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.decode import launch, plan
from lockstep.kernels.hopper.decode.kernel import decode_kernel
from lockstep.problem import Options, describe


def built_loops(built, pieces=1):
    """Where the innermost loops with both products begin and end; and the waits for the two, of
    which the second may be in pieces."""
    found = []
    scores_wait = SCORES_WAIT.replace("0x1", f"0x{pieces}")
    for scores in (at for at, text in built.instructions if text == scores_wait):
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


@pytest.mark.parametrize(
    ("D", "page", "Sq", "pieces"),
    [(128, 16, 5, 1), (72, 16, 5, 1), (160, 16, 5, 2), (256, 64, 5, 1)],
)
def test_machine_code(D, page, Sq, pieces):
    tensors = tensors_of(D=D, page=page, Sq=Sq)
    problem = describe(tensors, Options(causal=True))
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    shape = plan.plan_of(problem)
    columns = plan.columns_of(D)
    found = count([text for _, text in built.instructions])
    assert "serialized" not in built.report
    # Up to head dim 128 one loop more, for up to 32 rows, of which a thread has one, not two.
    rows_of_thread = [1, 2] if columns == 128 else [2]
    assert plan.few_rows(problem) == (plan.UPPER_ROWS if columns == 128 else 0)
    bodies = []
    for (begin, end), (scores, product) in built_loops(built, pieces):
        body = between(built.instructions, begin, end)
        bodies.append(body)
        # The exponentials of a tile run while the product of the one before is under way, and
        # nothing writes what that product reads.
        weighed = [at for at, text in body if "MUFU.EX2" in text]
        assert all(scores < at < product for at in weighed)
        assert writes_in_flight(body) == []
        usual = count(usual_path(body))
        assert usual["LDL"] + usual["STL"] <= (12 if D == 256 else 0)
    # A thread has a factor of the sums so far for each of its rows.
    exponentials = sorted(count([text for _, text in body])["MUFU.EX2"] for body in bodies)
    assert exponentials == [n * (shape.block_kv // 4 + 1) for n in rows_of_thread]
    # Scores of the first tile and of the others, and the products of pieces of the values.
    products = 2 * ((D + 8) // 16) + pieces * shape.block_kv // 16
    assert found["HGMMA"] == len(bodies) * products
    # Each box of a tile of keys and of one of values.
    assert found["UTMALDG"] == 2 * (columns // plan.COLUMNS) * max(shape.block_kv // page, 1)
    # What a program of an SM takes, with 1 KB that the system takes of each.
    assert shape.programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    # The other consumer has a build of its own where queries are not packed.
    assert found["HMMA"] == 0


@pytest.mark.parametrize(
    ("D", "rows"),
    [(64, 8), (128, 8), (128, 16), (72, 16), (192, 8), (256, 8), (160, 16), (256, 16)],
)
def test_machine_code_of_the_narrow_consumer_alone(D, rows):
    """A warp has a quarter of the keys, a thread one or two rows; the values are the left
    operand."""
    tensors = tensors_of(D=D, page=64, Sq=rows // 4)
    problem = describe(tensors, Options(causal=True))
    assert plan.narrow_rows(problem) == rows
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    found = count([text for _, text in built.instructions])
    assert found["HGMMA"] == 0
    assert built.kernel.metadata.shared <= sizes.SHARED_BYTES
    usual = count(usual_path(single_warp_loop(built)))
    columns, keys = plan.columns_of(D), plan.plan_of(problem).block_kv // 4
    assert usual["HMMA"] == (columns // 16) * (keys // 8 + keys // 16 * (rows // 8))
    assert usual["MUFU.EX2"] == (rows // 8) * (keys // 4 + 1)
    assert usual["LDS"] + usual["STS"] == 0
    assert usual["LDL"] + usual["STL"] <= 4 * (D > 128)
    # What a program of an SM takes, with 1 KB that the system takes of each.
    programs = plan.plan_of(problem).programs
    assert programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024


def test_two_programs_with_both_consumers_fit_on_an_sm():
    """Of packed queries at head dim 64."""
    tensors = packed(tensors_of(D=64))
    problem = describe(tensors, Options(causal=True))
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    assert plan.plan_of(problem).programs == 2
    assert 2 * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024


@pytest.mark.parametrize("D", [64, 128])
def test_packed_sequences_of_few_rows_alone_have_the_narrow_consumer_alone(D):
    tensors = packed(tensors_of(B=64, D=D, page=64))
    problem = describe(tensors, Options(causal=True, max_seqlen_q=2))
    bound = bind(launch.decode_launches(problem, tensors, PROCESSORS), tensors)
    decode = bound["decode_kernel"]
    built = compile_for_hopper(decode_kernel, decode.arguments, **decode.launch.options)
    assert count([text for _, text in built.instructions])["HGMMA"] == 0
    programs = plan.plan_of(problem).programs
    assert programs * (built.kernel.metadata.shared + 1024) <= sizes.SHARED_BYTES + 1024
    listing = bound["list_tiles"]
    built = compile_for_hopper(listing.launch.kernel, listing.arguments, **listing.launch.options)
    # What is NaN is written 16 bytes at a time.
    assert any(text.startswith("STG.E.128") for _, text in built.instructions)


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
