"""The bytes that ranks receive are those of the closed forms, to the byte."""

from __future__ import annotations

import pytest
from worlds import results_of, run_world

from lockstep.distributed.traffic import Shape, held, received

# Heads that divide evenly, unevenly and not at all among the ranks; lengths that do not.
CASES = [
    (method, S, Hq, Hkv, balanced, uses_lse, has_sinks)
    for method in ("heads", "gather", "ring")
    for S, Hq, Hkv, balanced, uses_lse, has_sinks in (
        (48, 6, 3, False, False, False),
        (61, 8, 2, True, True, True),
        (100, 4, 1, False, False, True),
    )
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_closed_forms(ranks):
    for rank, found in enumerate(results_of(run_world(ranks, "count", CASES))):
        for case, counted in zip(CASES, found, strict=True):
            method, S, Hq, Hkv, balanced, uses_lse, has_sinks = case
            shape = Shape(2, Hq, Hkv, S, 16, 8, 2, ranks, balanced, uses_lse, has_sinks)
            assert tuple(counted) == received(method, shape, rank), f"{case} on rank {rank}"


def test_docs_have_the_closed_forms_of_even_shards():
    P, B, Hq, Hkv, S, D, Dv, e = 4, 2, 16, 8, 1024, 64, 32, 2
    shape = Shape(B, Hq, Hkv, S, D, Dv, e, P)
    keys, rows = (P - 1) / P * B * S * Hkv * e, (P - 1) / P * B * S * Hq * e
    m_l = (P - 1) / P * B * S * Hq * 8
    gather, ring = keys * (D + Dv), keys * (D + Dv)
    assert received("gather", shape, 0) == (gather, gather + rows * (D + 2 * Dv) + m_l)
    assert received("ring", shape, 0) == (ring, ring + rows * (D + Dv) + 1.5 * m_l)
    each_way = (rows + keys) * (D + Dv) / P
    assert received("heads", shape, 0) == (each_way, each_way)


def test_memory_of_ring_and_heads_shrinks_with_the_ranks():
    for method, shrinks in (("heads", True), ("ring", True), ("gather", False)):
        at = [held(method, Shape(1, 32, 32, 1 << 20, 128, 128, 2, P)) for P in (8, 16)]
        assert (at[0].forward == 2 * at[1].forward) is shrinks
        assert (at[0].backward == 2 * at[1].backward) is shrinks
