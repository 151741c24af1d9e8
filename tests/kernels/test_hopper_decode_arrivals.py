"""Who folds the parts of a head in decode: the program that hands out the last of them."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import Crew, make_plain
from hopper_build import compile_for_hopper
from launch_arguments import bind
from shared_places import shared_with_barriers
from test_hopper_decode import problem_of, runs_of, tensors_of

from lockstep.kernels.hopper.decode import launch, plan
from lockstep.kernels.hopper.decode.folding import arrivals
from lockstep.kernels.hopper.decode.kernel import decode_kernel
from lockstep.problem import Options, describe

MARK, BITS = launch.MARK, plan.COUNT_BITS


@pytest.mark.parametrize(
    ("lens", "heads", "left", "team"),
    [
        ([4096] * 3, 2, None, 2),
        ([1000, 0, 40_000, 7, 512, 513, 65_536, -1, 300], 4, None, 2),
        ([9000, 20, 30_000], 1, 3000, 1),
        ([50, 700] * 150, 1, None, 1),
    ],
)
def test_runs_of_a_head_that_is_cut_know_its_spans(monkeypatch, lens, heads, left, team):
    found, marked = runs_of(
        monkeypatch, lens, heads, 7 * team, left, team=team, waves=2, inside=True
    )
    heads_of: dict = {}
    for runs, ready in zip(found, marked, strict=True):
        cut = [run for run in runs if run[9] >= 0]
        # Counters are made ready for these and no others.
        assert ready == [run[9] for run in cut]
        for run in cut:
            heads_of.setdefault((run[1], run[2]), []).append(run)
    assert heads_of
    for cut in heads_of.values():
        # All agree on the slot, on how many spans there are, and where the first part is.
        ((_slot, n_spans, first_part),) = {(run[9], run[11], run[12]) for run in cut}
        # Each has some, and together they have all.
        spans = sorted(x for run in cut for x in range(run[7], run[7] + run[10]))
        assert spans == list(range(n_spans))
        # What the first program has folded is one part, at its last span.
        (first,) = (run for run in cut if run[7] == 0)
        assert first_part == first[10] - 1
        assert len(cut) > 1
    slots = [cut[0][9] for cut in heads_of.values()]
    assert len(set(slots)) == len(slots)


class Memory:
    """Counters that programs change one at a time; at each step another program may run."""

    def __init__(self, crew, content):
        self.crew, self.content = crew, content

    def load(self, at, volatile):
        assert volatile
        self.crew.pause()
        return self.content[at]

    def store(self, at, value):
        self.crew.pause()
        self.content[at] = value

    def atomic_cas(self, at, expected, value, sem, scope):
        assert scope == "gpu"
        self.crew.pause()
        if self.content[at] == expected:
            self.content[at] = value

    def atomic_add(self, at, n, sem, scope):
        assert (sem, scope) == ("acq_rel", "gpu")
        self.crew.pause()
        found = self.content[at]
        self.content[at] = found + n
        return Number(found)


class Number(int):
    """A number of Gluon."""

    def to(self, _dtype):
        return Number(self)

    def __add__(self, other):
        return Number(int(self) + other)

    def __sub__(self, other):
        return Number(int(self) - other)


@pytest.mark.parametrize("seed", range(30))
def test_one_program_folds_each_head_when_all_parts_are_there(monkeypatch, seed):
    """Whatever counters hold before, and again with what they hold then."""
    draws = random.Random(seed)
    rubbish = [0, -1, MARK << BITS, draws.randrange(-(1 << 63), 1 << 63), (MARK - 1) << BITS | 3]
    content = draws.choices(rubbish, k=3)
    for _ in range(2):
        crew = Crew(draws.randrange(1 << 30))
        memory = Memory(crew, content)
        handed_out: list = [set() for _ in content]
        folded: list = []
        runs = []
        for slot in range(len(content)):
            cuts = sorted({0, 9, *draws.sample(range(1, 9), 3)})
            runs += [(slot, begin, end) for begin, end in pairwise(cuts)]

        def fold_group(rows, sizes, run, first, DV, folded=folded, handed_out=handed_out):
            assert handed_out[run.slot] == set(range(run.n_spans))
            folded.append((int(run.slot), first))
            return None, None, None

        gl = SimpleNamespace(
            load=memory.load, store=memory.store, minimum=min, int64=None, int32=None,
            atomic_cas=memory.atomic_cas, atomic_add=memory.atomic_add,
        )  # fmt: skip
        constants = {"gl": gl, "COUNT_BITS": BITS, "GROUP": 4, "await_warps": lambda: None}
        make_plain(monkeypatch, (arrivals,), constants)
        monkeypatch.setattr(arrivals, "fold_group", fold_group)
        rows = SimpleNamespace(
            arrivals_ptr=0, mark=MARK, n_rows=6, group=2, store_results=lambda *given: None
        )

        def program(own, rows=rows, handed_out=handed_out):
            for slot, _begin, _end in own:
                arrivals.mark_arrivals(rows, slot)
            for slot, begin, end in own:
                handed_out[slot] |= set(range(begin, end))
                run = SimpleNamespace(slot=Number(slot), n_own=Number(end - begin), n_spans=9)
                run.n_q = 3
                arrivals.fold_if_last(rows, None, run, 128, False)

        draws.shuffle(runs)
        crew.run(*(lambda own=runs[i::4], go=program: go(own) for i in range(4)))
        # Once each, both groups of rows.
        assert sorted(folded) == [(slot, first) for slot in range(3) for first in (0, 4)]
        assert content == [MARK << BITS] * 3


def test_counters_have_room():
    # Of one type whatever is drawn, and with its spans a positive number of 64 bits.
    assert 1 << 31 < MARK < 1 << (63 - BITS)
    longest = problem_of(n=1 << 24, Hkv=1, Hq=1)
    assert plan.most_spans(longest) < 1 << BITS


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"B": 64}, {}, True),
        ({"B": 8}, {}, False),  # more than two programs to a head
        ({"B": 64, "Sq": 2}, {}, True),
        ({"B": 64, "Sq": 3}, {}, False),  # 12 rows
        ({"B": 64, "Sq": 8}, {}, False),
        ({"B": 64, "Sq": 16}, {}, False),
        # Long-tailed lengths may make one head as long as its table, with 16 rows, or with 4.
        ({"B": 64, "Hkv": 1, "Sq": 2, "n": 50_000}, {}, False),
        ({"B": 64, "n": 60_000}, {}, True),
        ({"B": 64, "D": 64}, {}, False),
        ({"B": 64, "D": 64, "Sq": 3}, {}, False),
        ({"B": 64, "D": 64}, {"window_left": 127}, True),
        ({"B": 64, "D": 256}, {}, True),
        ({"B": 64}, {"query_invariant": True}, True),
        ({"B": 64, "Sq": 3}, {"query_invariant": True}, False),
        ({"B": 64, "D": 64}, {"query_invariant": True}, False),
    ],
)
def test_where_there_is_no_second_kernel(sizes, options, expected):
    tensors = tensors_of(**{"Hq": 8, "Hkv": 2} | sizes)
    problem = describe(tensors, Options(causal=True, **options))
    call = launch.decode_launches(problem, tensors, 132)
    kernels = [x.name for x in call.launches]
    folding = "fold_spans" if problem.query_invariant else "fold_slots"
    assert kernels == ["decode_kernel", *([] if expected else [folding])]
    assert call.launches[0]._arguments["INSIDE"] == expected


def test_machine_code():
    tensors = tensors_of(B=64, Hq=32, Hkv=8)
    call = launch.decode_launches(describe(tensors, Options(causal=True)), tensors, 132)
    bound = bind(call, tensors)["decode_kernel"]
    built = compile_for_hopper(decode_kernel, bound.arguments, **bound.launch.options)
    assert not shared_with_barriers(built.kernel.asm["ttgir"])
    texts = [text for _, text in built.instructions]
    # A counter is made one in one place, and added to in another.
    (cas,) = (i for i, text in enumerate(texts) if text.startswith("ATOMG.E.CAS.64.STRONG.GPU"))
    (add,) = (i for i, text in enumerate(texts) if text.startswith("ATOMG.E.ADD.64.STRONG.GPU"))
    assert cas < add
    # What other warps have stored comes before, and what is loaded then is not from L1.
    assert "MEMBAR.ALL.GPU" in texts[add - 6 : add]
    assert any(text.startswith("BAR.SYNC") for text in texts[add - 40 : add])
    assert texts[add + 1] == "CCTL.IVALL"
    # Both tensor maps are fetched before a tile is.
    assert sum(text.startswith("UTMACCTL.PF") for text in texts) == 2
