"""Parts of a head in Hopper decode: how many there may be, and which kernel folds them."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from test_hopper_decode import PROCESSORS, ceil_div, packed, problem_of, tensors_of

from lockstep.kernels.hopper.decode import launch, plan
from lockstep.kernels.hopper.decode.folding import fold_plan
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.problem import Options, describe


def span_of(keys, wanted, least, block, short=None, most=plan.MOST_SPAN):
    """The keys of a span: `Sizes.tiles_of`."""
    span = ceil_div(keys, wanted)
    span = ceil_div(span, max(ceil_div(span, most), 1))
    if keys > plan.MOST_SPAN and keys * plan.SHORT <= wanted * least:
        least = min(least, short or least)
    return min(max(ceil_div(span, block) * block, least), most)


@pytest.mark.parametrize(("D", "Sq"), [(64, 1), (128, 1), (128, 20), (128, 64), (256, 30)])
def test_no_row_has_more_parts_than_there_is_room_for(D, Sq):
    for Hkv in (1, 2, 8, 64):
        for n in (16, 512, 1024, 2048, 4096, 1 << 16, 1 << 20):
            problem = problem_of(B=1, Hq=Hkv, Hkv=Hkv, n=n, D=D, Sq=Sq)
            wanted, most = plan.spans_wanted(problem), plan.most_spans(problem)
            longest = plan.TALL_SPAN if Sq > plan.NARROW_ROWS else plan.MOST_SPAN
            lengths = {n, n // 2, 3 * n // 4, min(n, 257 * wanted), min(n, 1025 * wanted)}
            for length in lengths | set(range(1, min(n, 9000), 500)):
                least, short = plan.least_span(problem), plan.least_of_short(problem)
                span = span_of(length, wanted, least, 64, short, longest)
                assert ceil_div(length, span) <= most


@pytest.mark.parametrize("left", [None, 0, 700, 5000])
@pytest.mark.parametrize(("D", "group"), [(64, 8), (128, 4), (256, 1)])
@pytest.mark.parametrize("Hkv", [1, 8])
def test_no_packed_sequence_of_few_queries_has_more_parts_than_there_is_room_for(
    Hkv, D, group, left
):
    """Of as many queries as a call says that any has, or fewer."""
    for n, bound in product((700, 16_384, 100_000), (1, 2, 8, 64)):
        tensors = packed(tensors_of(B=2, Hq=group * Hkv, Hkv=Hkv, Sq=1, n=n, D=D))
        options = Options(causal=True, window_left=left, max_seqlen_q=bound)
        problem = describe(tensors, options)
        most, short = plan.most_spans(problem), plan.least_of_short(problem)
        sizes = plan.keys_per_row(problem), plan.LEAST_SPAN, plan.MOST_SPAN
        for tokens in {1, 2, 3, 5, 8, 17, 64} & set(range(bound + 1)):
            rows = min(tokens * group, plan.ROWS)
            wanted = spans_of.fn(Hkv * ceil_div(tokens * group, plan.ROWS), plan.WANTED)
            least = least_of.fn(rows, *sizes)
            most_keys = plan.TALL_SPAN if tokens * group > plan.NARROW_ROWS else plan.MOST_SPAN
            for length in {n, n - 1, n // 2} | set(range(1, min(n, 9000), 500)):
                lo = 0 if left is None else min(max(length - tokens - left, 0), length)
                span = span_of(length - lo, wanted, least, 64, short, most_keys)
                assert ceil_div(length, span) - lo // span <= most


def sizes_of(problem):
    """What follows from the most queries of a sequence, but for room for rows of no sequence."""
    n_programs = plan.programs_of(problem, PROCESSORS)
    n_slots = min(n_programs, plan.tiles_of(problem) * problem.Hkv)
    return {
        "programs": n_programs,
        "parts": (n_slots, plan.most_spans(problem), plan.tile_rows_of(problem)),
        "plan": plan.plan_of(problem),
        "narrow": (plan.narrow_rows(problem), plan.is_narrow(problem), plan.few_rows(problem)),
        "folding": plan.folds_inside(problem, n_programs),
        "fold": fold_plan.fold_plan(problem, n_slots, PROCESSORS),
        "least": plan.least_span(problem),
    }


@pytest.mark.parametrize("n", [592, 2000, 16_384])
@pytest.mark.parametrize(("B", "heads"), [(1, (32, 8)), (4, (8, 8)), (64, (32, 8))])
@pytest.mark.parametrize(
    ("D", "window", "Sq", "bound"),
    [(64, None, 1, 1), (64, 500, 2, 2), (128, None, 1, 0), (128, None, 4, 3), (192, 1000, 4, 4)],
)
def test_packed_sequences_of_few_queries_have_the_plan_of_as_many_of_each(
    B, heads, n, D, window, Sq, bound
):
    """If these are so few that all have the narrow consumer."""
    alike = tensors_of(B=B, Hq=heads[0], Hkv=heads[1], n=n, Sq=Sq, D=D)
    asked = Options(causal=True, window_left=window)
    expected, ragged = describe(alike, asked), packed(alike)
    problem = describe(ragged, asked._replace(max_seqlen_q=bound))
    assert sizes_of(problem) == sizes_of(expected)
    of_alike = launch.decode_launches(expected, alike, PROCESSORS).launches
    launches = launch.decode_launches(problem, ragged, PROCESSORS).launches
    assert [x.name for x in launches] == ["list_tiles", *(x.name for x in of_alike)]


@pytest.mark.parametrize("D", [64, 128])
def test_where_some_sequences_may_have_more_rows_others_keep_the_narrow_consumer(D):
    tensors = packed(tensors_of(B=3, Hq=32, Hkv=8, Sq=8, D=D))
    problem = describe(tensors, Options(causal=True, max_seqlen_q=8))
    without_bound = describe(tensors, Options(causal=True))
    assert plan.narrow_rows(problem) == plan.narrow_rows(without_bound) > 0
    assert not plan.is_narrow(problem)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("Hkv", [1, 3, 8, 20])
def test_no_packed_sequence_has_more_parts_than_there_is_room_for(Hkv, D):
    """Each has the spans of its own tiles of query rows, and is as long as its pages or shorter."""
    group = 8
    for n in (700, 16_384, 17_200, 100_000):
        tensors = tensors_of(B=2, Hq=group * Hkv, Hkv=Hkv, Sq=200, n=n, D=D)
        problem = describe(packed(tensors), Options(causal=True))
        most = plan.most_spans(problem)
        for tokens in (1, 2, 3, 9, 17, 25, 40, 127, 200):
            tiles = ceil_div(tokens * group, plan.ROWS)
            wanted = spans_of.fn(Hkv * tiles, plan.WANTED)
            rows = min(tokens * group, plan.ROWS)
            sizes = plan.keys_per_row(problem), plan.LEAST_SPAN, plan.MOST_SPAN
            least = least_of.fn(rows, *sizes)
            lengths = {n, n - 1, 3 * n // 4, n // 2, min(n, 1025 * wanted), 1}
            for length in lengths | set(range(1, min(n, 9000), 500)):
                most_keys = plan.TALL_SPAN if rows > plan.NARROW_ROWS else plan.MOST_SPAN
                short = plan.least_of_short(problem)
                span = span_of(length, wanted, least, 64, short, most_keys)
                assert ceil_div(length, span) <= most


@pytest.mark.parametrize("D", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17, 30])
def test_a_packed_sequence_has_the_spans_it_has_alone(D, tokens):
    """Spans decide where sums end, and so a row's bits."""
    alone = problem_of(B=1, Hq=10, Hkv=2, n=3000, D=D, Sq=tokens)
    queries = tensors_of(B=2, Hq=10, Hkv=2, Sq=40, n=3000, D=D)
    together = describe(packed(queries), Options(causal=True))
    rows = min(5 * tokens, plan.ROWS)
    sizes = plan.keys_per_row(together), plan.LEAST_SPAN, plan.MOST_SPAN
    least, wanted = least_of.fn(rows, *sizes), plan.spans_wanted(alone)
    assert least == plan.least_span(alone)
    assert plan.most_of_tall(together) == plan.most_of_tall(alone)
    for length in range(1, 3000, 37):
        spans = [
            span_of(length, wanted, least, 64, plan.least_of_short(problem))
            for problem in (together, alone)
        ]
        assert spans[0] == spans[1]


@pytest.mark.parametrize(("left", "right"), [(0, 0), (72, 0), (511, 0), (1023, 0), (4000, None)])
def test_no_row_of_a_window_has_more_parts_than_there_is_room_for(left, right):
    for Hkv, n, Sq in ((1, 70000, 1), (20, 13000, 8), (8, 600, 3), (2, 5000, 127)):
        options = Options(window_left=left, window_right=right)
        problem = describe(tensors_of(Hq=Hkv, Hkv=Hkv, n=n, Sq=Sq, D=64), options)
        wanted, most = plan.spans_wanted(problem), plan.most_spans(problem)
        for length in range(0, n + 1, max(1, n // 997)):
            lo = min(max(length - Sq - left, 0), length)
            span = span_of(length - lo, wanted, plan.least_span(problem), 128)
            assert ceil_div(length, span) - lo // span <= most


@pytest.mark.parametrize(
    ("n", "Sq", "D", "options", "parts", "launches"),
    [
        (512, 1, 128, {}, 1, 1),
        (1024, 2, 128, {}, 2, 1),  # two spans of 512 keys, of two programs at most
        (1024, 4, 128, {}, 2, 2),  # of 16 rows
        (1040, 4, 128, {}, 3, 2),  # 16 rows
        (2048, 1, 128, {}, 4, 1),  # few spans of few rows
        (2064, 1, 128, {}, 5, 2),
        (1024, 8, 128, {}, 1, 1),  # one of 1,024 keys, for 32 rows
        (1024, 8, 64, {}, 2, 2),
        (1024, 1, 64, {}, 2, 1),
        (2064, 1, 64, {}, 5, 2),
        (512, 1, 128, {"window_left": 100}, 2, 1),  # it may begin within a span
        (90000, 1, 128, {"window_left": 100}, 2, 1),
        (90000, 1, 128, {"window_left": 1000}, 3, 1),
        (90000, 4, 128, {"window_left": 1000}, 3, 2),
    ],
)
def test_there_is_no_second_kernel_where_a_head_has_few_parts(n, Sq, D, options, parts, launches):
    tensors = tensors_of(n=n, Sq=Sq, D=D)
    problem = describe(tensors, Options(causal=True, **options))
    assert plan.most_spans(problem) == parts
    assert len(launch.decode_launches(problem, tensors, PROCESSORS).launches) == launches


@pytest.mark.parametrize(
    ("B", "heads", "n", "D", "programs", "launches"),
    [
        (1, 8, 1000, 64, 128, 1),  # one program to an SM
        (4, 8, 2000, 64, 128, 1),
        (5, 8, 2000, 64, 264, 2),  # more spans than SMs
        (1, 3, 2000, 64, 126, 1),  # whole teams
        (1, 5, 600, 64, 120, 1),
        (4, 8, 2000, 128, 128, 1),
        (5, 8, 2000, 128, 132, 2),
        (1, 1, 2000, 128, 132, 2),  # one head
    ],
)
def test_few_spans_have_few_programs_and_no_second_kernel(B, heads, n, D, programs, launches):
    tensors = tensors_of(B=B, Hq=4 * heads, Hkv=heads, n=n, D=D)
    problem = describe(tensors, Options(causal=True))
    assert plan.programs_of(problem, PROCESSORS) == programs
    assert len(launch.decode_launches(problem, tensors, PROCESSORS).launches) == launches


@pytest.mark.parametrize(
    ("B", "heads", "Sq", "n", "expected"),
    [
        (2, (32, 8), 16, 9008, True),  # 64 rows: 1,024 small units
        (2, (32, 8), 1, 9008, False),
        (1, (32, 8), 2, 16384, False),  # 8 rows: 256 of them
        (6, (32, 8), 4, 3008, False),  # 16 rows: 768
        (6, (32, 8), 5, 3008, True),  # 20 rows: 960, of tall tiles
        (9, (32, 8), 4, 3008, True),  # 16 rows: 1,152
        (1, (8, 1), 64, 1 << 17, False),  # 512, and rows have 64 parts
    ],
)
def test_parts_are_folded_in_registers_where_units_would_be_many(B, heads, Sq, n, expected):
    problem = problem_of(B=B, Hq=heads[0], Hkv=heads[1], Sq=Sq, n=n)
    n_slots = min(plan.programs_of(problem, PROCESSORS), plan.tiles_of(problem) * problem.Hkv)
    assert (fold_plan.fold_plan(problem, n_slots, PROCESSORS).batches == 0) == expected
