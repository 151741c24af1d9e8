"""Decode on Hopper without a GPU: which program has which spans, and refusals."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import as_plain, make_plain

from lockstep import dispatch
from lockstep.kernels import hopper
from lockstep.kernels.hopper import decode
from lockstep.kernels.hopper.common import requirements, sizes
from lockstep.kernels.hopper.common.gluon_shim import VIEWS_GROW
from lockstep.kernels.hopper.decode import launch, plan, producer, schedule
from lockstep.kernels.hopper.decode.runs import Run
from lockstep.kernels.hopper.forward.ragged_pages import has_long_sequences
from lockstep.problem import AttentionProblem, Options, Tensors, describe

PROCESSORS = 132


def tensors_of(B=2, Hq=8, Hkv=2, Sq=1, D=128, page=16, n=4096, dtype=torch.bfloat16) -> Tensors:
    pages = torch.randn(3, page, Hkv, D, dtype=dtype)
    lens, table = (
        torch.full((B,), n, dtype=torch.int32),
        torch.zeros(B, n // page, dtype=torch.int32),
    )
    q = torch.randn(B, Hq, Sq, D, dtype=dtype)
    return Tensors(q, pages, pages.clone(), kv_lens=lens, page_table=table)


def packed(tensors: Tensors) -> Tensors:
    """The same queries, those of all sequences one behind the other."""
    B, H, Sq, D = tensors.q.shape
    offsets = torch.arange(B + 1, dtype=torch.int32) * Sq
    return tensors._replace(q=tensors.q.transpose(1, 2).reshape(-1, H, D), cu_seqlens_q=offsets)


def problem_of(**given) -> AttentionProblem:
    return describe(tensors_of(**given), Options(causal=True))


class Pointer:
    """To numbers of a tensor."""

    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor, at

    def __add__(self, offset):
        return Pointer(self.tensor, self.at + offset)


def load(pointer, mask=None, other=0):
    at = torch.as_tensor(pointer.at)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
    return torch.where(inside, pointer.tensor[torch.where(inside, at, 0)], other)


def store(pointer, value):
    pointer.tensor[pointer.at] = value


def ceil_div(a, b):
    return -(-a // b)


def integer(n):
    return torch.tensor(n, dtype=torch.int64)


def plain_gluon(program, n_programs):
    """Gluon's functions on tensors of torch."""
    return SimpleNamespace(
        where=torch.where,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        cdiv=lambda a, b: (a + b - 1) // b,
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        arange=lambda a, b, layout: torch.arange(a, b),
        associative_scan=lambda x, axis, add: x.cumsum(axis),
        BlockedLayout=lambda *layout: None,
        num_warps=lambda: 1,
        program_id=lambda axis: integer(program),
        num_programs=lambda axis: n_programs,
        load=load,
        store=store,
        constexpr=lambda x: x,
        int32=torch.int32,
        int64=torch.int64,
    )


def runs_of(
    monkeypatch, lens, heads, n_programs, left=None, Skv=1 << 16, team=1, waves=1, whole=0, Sq=1,
    group=1, inside=False, least=plan.LEAST_SPAN,
):  # fmt: skip
    """The messages of all programs, and what they note about slots; if they fold what they cut
    themselves, the slots whose counters each makes ready."""
    lens = torch.tensor(lens)
    slots = torch.full((n_programs, 3), -9)
    found, marked = [], []
    constants = {
        name: getattr(schedule, name).value
        for name in ("MOST_SPAN", "SPAN_COST", "FEW", "MANY", "ROWS", "SHORT", "TALL_ROWS")
    }
    Sizes, PlainRun = as_plain(schedule.Sizes), as_plain(Run)
    for program in range(n_programs):
        plain = {"gl": plain_gluon(program, n_programs), **constants}
        plain |= {"divide": lambda a, b: a // b, "divide_up": ceil_div}
        ready: list = []
        plain["mark_arrivals"] = lambda rows, slot, ready=ready: ready.append(int(slot))
        plain["Run"] = PlainRun
        make_plain(monkeypatch, (schedule, producer), plain)
        q_tiles = ceil_div(Sq * group, sizes.ROWS)
        wanted = max(1, plan.WANTED // (heads * q_tiles))
        numbers = (len(lens) * q_tiles, heads, Sq, Skv, left or 0, 0, wanted, least)
        numbers = (*numbers, plan.LEAST_SPAN, plan.TALL_SPAN, team, waves, q_tiles, group, whole)
        numbers = tuple(map(integer, numbers))
        made = Sizes((Pointer(lens), None), numbers, left is not None, True, False, False, 64)
        sent: list = []
        runs: list = []
        keys = SimpleNamespace(send=lambda i, desc, places, head, sent=sent: sent.append(int(i)))
        values = SimpleNamespace(send=lambda *given: None)
        cache = SimpleNamespace(places_of=lambda *given: None)
        queue = SimpleNamespace(
            post=lambda n, x, runs=runs: runs.append([int(y) for y in x]), INSIDE=inside
        )
        slots_ptr = Pointer(slots.view(-1))
        # How many messages there are when a run's queries have to be asked for: its own, too.
        asked: list = []
        queries = SimpleNamespace(
            ORDER="asked for first",
            await_first=lambda n, runs=runs, asked=asked: asked.append(len(runs) - int(n)),
        )
        loads = (keys, values, None, None, cache)
        producer.produce(made, queue, loads, slots_ptr, None, queries, False, False)
        assert runs.pop() == [0]
        assert asked == [1] * len(runs)
        assert sent == list(range(sum(run[5] - run[4] for run in runs)))
        found.append(runs)
        marked.append(ready)
    return found, marked if inside else slots


@pytest.mark.parametrize(
    ("lens", "heads", "left", "team"),
    [
        ([4096] * 3, 2, None, 2),
        ([4096] * 3, 2, None, 1),
        ([100_0, 0, 40_000, 7, 512, 513, 65_536, -1, 300], 4, None, 2),
        ([9000, 20, 30_000], 1, 3000, 1),
        ([50] * 40, 1, None, 1),
        ([50, 700] * 50, 1, None, 1),
        ([50, 700] * 150, 1, None, 1),
    ],
)
def test_every_span_has_one_program(monkeypatch, lens, heads, left, team):
    n_programs = 7 * team
    found, slots = runs_of(monkeypatch, lens, heads, n_programs, left, team=team, waves=2)
    tiles, spans, slot_of = defaultdict(list), defaultdict(list), defaultdict(set)
    folded = {}
    for runs in found:
        for _, b, head, q_tile, begin, end, span, first, kv_len, slot in runs:
            assert q_tile == 0
            assert kv_len == lens[b]
            tiles[b, head] += range(begin, end)
            n_spans = max(1, -(-end // span) - begin // span)
            spans[b, head] += range(first, first + n_spans)
            slot_of[b, head].add(slot)
            if first == 0:
                folded[b, head] = n_spans
    assert tiles.keys() == {(b, head) for b in range(len(lens)) for head in range(heads)}
    for (b, _head), seen in tiles.items():
        n = max(lens[b], 0)
        assert sorted(seen) == list(
            range(0 if left is None else max(n - 1 - left, 0) // 64, -(-n // 64))
        )
    whole: set = set()
    for pair, numbers in spans.items():
        assert sorted(numbers) == list(range(len(numbers)))
        # All runs of a pair agree where its parts are, and no other pair has them there.
        (slot,) = slot_of[pair]
        if slot < 0:
            whole.add(-1 - slot)
        else:
            number = pair[0] * heads + pair[1]
            assert slots[slot].tolist() == [number, folded[pair] - 1, len(numbers)]
    cut = {slot for (slot,) in slot_of.values() if slot >= 0}
    n_slots = min(n_programs, len(lens) * heads)
    assert {i for i in range(n_slots) if slots[i, 0] >= 0} == cut
    assert {i for i in range(n_slots) if slots[i, 0] == -1} == set(range(n_slots)) - cut
    assert whole <= set(range(n_slots))
    work = [
        sum(run[5] - run[4] + ceil_div(run[5], run[6]) - run[4] // run[6] for run in runs)
        for runs in found
    ]
    # Evenly, but for one span at either end.
    assert max(work) - min(work) <= 2 * (plan.MOST_SPAN // 64 + plan.SPAN_COST)


@pytest.mark.parametrize("n", [16_900, 17_200, 20_847, 34_500, 41_000, 65_536])
@pytest.mark.parametrize(("heads", "team"), [(8, 4), (4, 4), (1, 1)])
def test_a_long_sequence_alone_is_shared_evenly(monkeypatch, n, heads, team):
    n = n * 8 // heads
    found, _slots = runs_of(monkeypatch, [n], heads, 132, Skv=n, team=team)
    tiles = [sum(run[5] - run[4] for run in runs) for runs in found]
    assert max(tiles) <= 1.4 * n / 64 * heads / 132


@pytest.mark.parametrize(
    ("n", "Sq", "span"),
    [
        (1024, 20, 1024),  # one
        (1025, 20, 512),  # short, of a tall tile
        (5000, 20, 512),
        (8000, 20, 1024),  # not short
        (5000, 4, 512),  # of few rows, whatever its length
        (32_000, 4, 1024),
        (32_000, 20, 2048),
        (60_000, 20, 1920),
        (60_000, 4, 960),
    ],
)
def test_spans_follow_the_length_and_the_rows_of_a_sequence(monkeypatch, n, Sq, span):
    found, _slots = runs_of(monkeypatch, [n], 8, 132, Sq=Sq, team=4, least=1024 if Sq > 16 else 512)
    assert {run[6] * 64 for runs in found for run in runs} == {span}


def test_tiles_of_a_sequence_have_the_keys_that_their_rows_see(monkeypatch):
    lens, Sq, group, left = [5000, 300], 50, 3, 700
    found, _slots = runs_of(monkeypatch, lens, 2, 14, left, Sq=Sq, group=group)
    tiles = defaultdict(list)
    for runs in found:
        for _, b, head, q_tile, begin, end, *_ in runs:
            tiles[b, head, q_tile] += range(begin, end)
    assert len(tiles) == len(lens) * 2 * 3
    for (b, _head, q_tile), seen in tiles.items():
        # The first and the last query of the tile.
        first, last = q_tile * 64 // group, (min(q_tile * 64 + 64, Sq * group) - 1) // group
        begin = max(first + lens[b] - Sq - left, 0)
        assert sorted(seen) == list(range(begin // 64, (last + lens[b] - Sq) // 64 + 1))


def test_a_head_may_be_one_programs(monkeypatch):
    lens, heads = [100_0, 0, 40_000, 7, 65_536], 2
    found, slots = runs_of(monkeypatch, lens, heads, 7, whole=1)
    seen = [(b, head, slot < 0) for runs in found for _, b, head, *_, slot in runs]
    assert sorted(seen) == [(b, head, True) for b in range(len(lens)) for head in range(heads)]
    assert (slots[:, 0] < 0).all()


@pytest.mark.parametrize(
    ("n", "B", "heads", "team", "expected"),
    [
        (4096, 16, 2, 2, True),  # a head for all but one of the teams
        (4096, 34, 4, 2, True),  # four heads for each
        (4096, 64, 4, 2, False),  # seven or eight
        (9000, 9, 2, 2, False),  # half of the teams would have nothing to do
        (9000, 20, 2, 2, False),  # some would have twice as much as others
        (3000, 170, 2, 2, True),  # more sequences than are looked at together
    ],
)
def test_equal_heads_are_not_cut_if_all_have_their_share(monkeypatch, n, B, heads, team, expected):
    lens = [n - 20 * (b % 3) for b in range(B)]
    found, slots = runs_of(monkeypatch, lens, heads, 34, team=team)
    seen = sorted((b, head) for runs in found for _, b, head, *_ in runs)
    assert (len(seen) == B * heads) == expected
    assert set(seen) == {(b, head) for b in range(B) for head in range(heads)}
    assert (slots[: B * heads, 0] < 0).all() == expected
    if expected:
        assert max(map(len, found)) == ceil_div(B * heads, 34)


@pytest.mark.parametrize(
    ("B", "Hkv", "n", "D", "expected"),
    [
        (16, 8, 8192, 128, 128),  # a head for each
        (16, 4, 8192, 128, 128),  # two programs for each head
        (37, 3, 3001, 128, 126),  # a head for nearly all
        (1, 8, 4096, 128, 132),
        (33, 16, 2048, 128, 132),  # 4 or 5 heads for each
        (3, 8, 33000, 128, 132),
        (16, 8, 8192, 64, 256),
        (7, 2, 9000, 64, 264),
        (16, 7, 5000, 128, 126),  # teams of 7, where 132 programs would be teams of 1
        (3, 5, 9000, 64, 260),
        (2, 10, 9000, 128, 132),  # teams of 2
        # Teams of 5 have a quarter of the heads: whole heads, or as many programs for each.
        (6, 20, 33051, 128, 120),
        (12, 20, 9000, 128, 120),
        (2, 20, 9000, 128, 120),
        (7, 20, 33051, 128, 132),
    ],
)
def test_programs_share_heads_evenly(B, Hkv, n, D, expected):
    problem = problem_of(B=B, Hq=Hkv, Hkv=Hkv, n=n, D=D)
    n_programs = plan.programs_of(problem, PROCESSORS)
    assert n_programs == expected
    assert n_programs % (plan.team_of(problem, n_programs) * plan.plan_of(problem).programs) == 0


@pytest.mark.parametrize(
    ("D", "rows", "expected"),
    [
        (64, 4, 8),
        (64, 12, 0),
        (128, 4, 8),
        (128, 16, 16),
        (128, 20, 0),
        (160, 8, 8),
        (192, 12, 16),
        (256, 16, 16),
        (256, 20, 0),
    ],
)
def test_rows_of_single_warps(D, rows, expected):
    """Builds have one consumer, unless queries are packed."""
    problem = problem_of(D=D, Hq=8, Hkv=2, Sq=rows // 4)
    assert plan.narrow_rows(problem) == expected
    assert plan.is_narrow(problem) == (expected > 0)


def test_results_lie_in_memory_as_the_queries_do():
    given = tensors_of(D=64, page=16)
    B, H, _, D = given.q.shape
    heads_first = torch.randn(B, H, 3, D).bfloat16()
    for q in (heads_first, heads_first.transpose(1, 2).contiguous().transpose(1, 2)):
        tensors = given._replace(q=q)
        problem = describe(tensors, Options(causal=True))
        call = launch.decode_launches(problem, tensors, PROCESSORS)
        out, lse = (call._new_results[name]() for name in ("out", "lse"))
        assert out.stride() == q.stride()
        # The kernels write a row of out where it is among the rows of lse.
        assert [stride // D for stride in out.stride()[:3]] == list(lse.stride())
        for kernel in call.launches:
            rows = tuple(kernel._arguments[f"rows_{dim}"] for dim in "bhs")
            assert rows == lse.stride()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"D": 36}, "takes head dims that are multiples of 8 up to 256, got D = 36 and Dv = 36"),
        ({"D": 264}, "takes head dims that are multiples of 8 up to 256, got D = 264 and Dv = 264"),
        ({"D": 72}, None),
        ({"page": 8}, "takes pages of multiples of 16 keys, got 8"),
        ({"page": 256, "Hkv": 8}, None),
        ({"Sq": 96}, None),
        ({"Sq": 97}, "takes up to 96 queries of so many heads, got 97"),
        ({"Sq": 24, "Hq": 32}, None),
        ({"Sq": 25, "Hq": 32}, "takes up to 24 queries of so many heads, got 25"),
        ({}, None),
    ],
)
def test_what_it_refuses(monkeypatch, given, reason):
    monkeypatch.setattr(decode, "refusal_of_device", lambda problem: None)
    assert decode.supports(problem_of(**given)) == reason


@pytest.mark.skipif(not VIEWS_GROW, reason="this Triton has no views that grow")
def test_it_leaves_narrow_windows_to_the_kernel_for_them(monkeypatch):
    for module in (decode, hopper):
        monkeypatch.setattr(module, "refusal_of_device", lambda problem: None)
    one = replace(problem_of(D=64, Sq=1), window_left=127)
    assert "windows this narrow" in decode.supports(one)
    assert hopper.supports(one) is None
    assert decode.supports(replace(one, window_left=500)) is None


@pytest.mark.parametrize(("Hq", "least"), [(8, 97), (32, 25)])
def test_neither_batch_nor_table_decides_what_runs_a_sequence_in_pages(monkeypatch, Hq, least):
    monkeypatch.setattr(decode, "refusal_of_device", lambda problem: None)
    monkeypatch.setattr(hopper, "refusal_of_device", lambda problem: None)
    one = problem_of(B=1, Hq=Hq, Sq=least)
    for B, Skv in ((1, 16), (300, 4096), (300, 1 << 17), (4000, 1 << 20)):
        long, short = (replace(one, B=B, Sq=Sq, Skv=Skv) for Sq in (least, least - 1))
        assert (decode.supports(long) is None, hopper.supports(long) is None) == (False, True)
        assert (decode.supports(short) is None, hopper.supports(short) is None) == (True, False)
        ragged = replace(one, layout="varlen_paged", B=B, Sq=B * least, Skv=Skv)
        assert has_long_sequences(ragged)
        assert decode.supports(ragged) is None


@pytest.mark.parametrize(
    ("B", "Sq", "Skv", "expected"),
    [
        (1, 1, 1000, "hopper_decode"),
        (1, 64, 16384, "hopper_decode"),
        (4, 16, 16384, "hopper_decode"),
        (4, 128, 16384, "hopper"),
        (1, 512, 16384, "hopper"),
        (256, 1, 1000, "hopper_decode"),
        # Parts of so many spans would take too much memory, and few programs would have work.
        (1, 64, 1 << 20, "hopper"),
    ],
)
@pytest.mark.parametrize("page", [None, 16])
def test_few_queries_are_split(monkeypatch, B, Sq, Skv, expected, page):
    """With query_invariant both kernels have the same bits, and the sizes of a call choose."""
    for package in (decode, hopper):
        monkeypatch.setattr(package, "refusal_of_device", lambda problem: None)
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    q = torch.empty(B, 32, Sq, 128, **meta)
    kv = torch.empty(B, 8, Skv, 128, **meta)
    tensors = Tensors(q, kv, kv)
    if page is not None:
        pages = torch.empty(B * -(-Skv // page), page, 8, 128, **meta)
        ints = {"dtype": torch.int32, "device": "meta"}
        table, lens = torch.empty(B, -(-Skv // page), **ints), torch.empty(B, **ints)
        tensors = Tensors(q, pages, pages, page_table=table, kv_lens=lens)
    problem = describe(tensors, Options(causal=True, query_invariant=True))
    assert dispatch.select(problem).name == expected


@pytest.mark.parametrize(
    ("Sq", "Skv", "given", "takers"),
    [
        (1, 4096, (), {"hopper_decode"}),
        (1, 4095, (), set()),
        (2, 4096, (), set()),
        (65, 4096, (), {"hopper"}),
        # The longest sequence must not decide what runs the others.
        (1, 4096, ("kv_lens",), set()),
        (1, 4096, ("kv_starts",), set()),
    ],
)
def test_keys_in_one_tensor(monkeypatch, Sq, Skv, given, takers):
    for package in (decode, hopper):
        monkeypatch.setattr(package, "refusal_of_device", lambda problem: None)
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    q, kv = torch.empty(3, 32, Sq, 128, **meta), torch.empty(3, 8, Skv, 128, **meta)
    numbers = {name: torch.empty(3, dtype=torch.int32, device="meta") for name in given}
    problem = describe(Tensors(q, kv, kv, **numbers), Options(causal=True))
    kernels = (decode.KERNEL, hopper.KERNEL)
    assert {x.name for x in kernels if dispatch.refusal(x, problem) is None} == takers


def test_it_needs_a_hopper_gpu():
    assert "runs on CUDA devices" in requirements.refusal_of_device(problem_of())
