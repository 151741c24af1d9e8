"""The Hopper backward for head dims above 128, without a GPU: its machine code, and which keys the
programs of dQ loop over. On a GPU it is tested with the others, in `test_hopper_backward.py`."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from crew import as_plain, make_plain
from hopper_build import Build, compile_for_hopper, count, writes_in_flight
from launch_arguments import bind
from machine_code import Instructions, between, loops
from shared_places import shared_with_barriers

from lockstep.kernels.hopper.backward import sizes
from lockstep.kernels.hopper.backward.wide import call as wide
from lockstep.kernels.hopper.backward.wide import key_loop
from lockstep.kernels.hopper.backward.wide.key_loop import KeyLoop
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.window import limit_of
from lockstep.problem import Options, Tensors, describe

BLOCK_Q, BLOCK_KV = wide.BLOCK_Q, wide.BLOCK


def compiled(which: str, D: int, Dv: int, **options: bool) -> Build:
    """A kernel as a call with these options would launch it."""
    q, v = (torch.empty(2, 4, 512, d, dtype=torch.bfloat16) for d in (D, Dv))
    tensors = Tensors(q, q, v)
    problem = describe(tensors, Options(**options))
    saved = BackwardTensors(*tensors, v, v[..., :2].float(), v, None)
    call = wide.prepare_backward(problem, saved, Needs(True, True, True, False, False))
    launch, arguments = bind(call, saved)[f"{which}_kernel"]
    return compile_for_hopper(launch.kernel, arguments, **launch.options)


# Of each loop, one per warpgroup: HGMMA instructions and exponentials. A product over the head dim
# takes one of 16 columns each, of 200 as of 256; one over 64 rows takes four.
@pytest.fixture(
    scope="module",
    params=[
        ("keys", 256, 256, False, [(20, 32), (20, 0)]),
        ("keys", 200, 128, True, [(20, 32), (12, 0)]),
        ("queries", 256, 256, True, [(36, 32), (36, 32)]),
        ("queries", 200, 128, False, [(28, 32), (28, 32)]),
    ],
    ids=str,
)
def case(request):
    which, D, Dv, causal, expected = request.param
    return compiled(which, D, Dv, causal=causal), expected


def loop_counts(body: Instructions) -> tuple[int, int]:
    names = count([text for _, text in body])
    return names["HGMMA"], names["MUFU.EX2"]


def consumer_loops(build: Build, expected: list[tuple[int, int]]) -> list[Instructions]:
    """For each of these counts the shortest loop that has them, apart from those before: a wait
    that is not over at once jumps away and back, which looks like another loop."""
    found: list[tuple[int, int, Instructions]] = []
    spans = sorted(set(loops(build.instructions)), key=lambda loop: loop[1] - loop[0])
    for counts in expected:
        for begin, end in spans:
            body = between(build.instructions, begin, end)
            apart = all(end < b or e < begin for b, e, _ in found)
            if apart and loop_counts(body) == counts:
                found.append((begin, end, body))
                break
    return [body for *_, body in found]


def test_machine_code(case):
    build, expected = case
    assert "serialized" not in build.report
    assert build.registers == 168
    bodies = consumer_loops(build, expected)
    assert len(bodies) == len(expected)
    for body in bodies:
        # A few addresses are kept in local memory; the smallest matrix would be 16 registers.
        assert count([text for _, text in body])["STL"] < 16
        assert not writes_in_flight(body)


def test_no_barrier_shares_its_memory(case):
    assert not shared_with_barriers(case[0].kernel.asm["ttgir"])


def test_no_atomics(case):
    names = [text.split()[0] for _, text in case[0].instructions]
    assert not any(name.startswith(("RED.", "REDG", "ATOM", "UTMAREDG")) for name in names)


@pytest.mark.parametrize(("D", "Dv"), [(136, 136), (192, 128), (256, 256), (256, 8), (64, 200)])
def test_tiles_fit_in_shared_memory(D, Dv):
    q, v = (torch.empty(1, 1, 64, d, dtype=torch.bfloat16) for d in (D, Dv))
    problem = describe(Tensors(q, q, v), Options())
    nd, ndv = wide._chunks(problem).values()
    k_stages, v_stages = wide._stages(problem).values()
    assert k_stages >= 2
    assert v_stages >= 1
    chunks = 2 * (nd + ndv) + k_stages * nd + v_stages * ndv
    # Statistics and barriers need little.
    assert chunks * BLOCK_KV * 64 * 2 + 1024 <= wide.SHARED_BYTES


class PlainLoop(SimpleNamespace):
    """`KeyLoop` with numbers for tensors."""

    def __init__(self, tiles, bounds, sizes):
        names = ("BLOCK_KV", "HAS_LEFT", "HAS_RIGHT", "HAS_EDGE")
        super().__init__(**{name: getattr(sizes, name) for name in names})
        self.first_tile, self.n_steps = tiles
        self.low, self.high, self.room = bounds

    def sees(self, r: int, c: int, t: int) -> bool:
        """As `hide` has it, for query r of the program and key c of its t-th tile."""
        key = c + t * self.BLOCK_KV
        is_seen = not self.HAS_EDGE or key < self.room
        if self.HAS_LEFT:
            is_seen = is_seen and r + self.low <= key
        if self.HAS_RIGHT:
            is_seen = is_seen and r + self.high >= key
        return is_seen


def test_programs_of_dq_visit_every_pair_that_sees_each_other_once(monkeypatch):
    plain = SimpleNamespace(
        where=lambda condition, a, b: a if condition else b,
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        constexpr=lambda x: x,
    )
    plain = {"gl": plain, "BLOCK_Q": BLOCK_Q, "ROWS": BLOCK_KV, "KeyLoop": PlainLoop}
    plain["QueryTile"] = lambda place, lengths, layout: place
    make_plain(monkeypatch, (key_loop, sizes), plain)
    Sizes = as_plain(sizes.Sizes)
    draws = random.Random(0)
    for _ in range(60):
        left, right = (draws.choice([None, 0, draws.randrange(300)]) for _ in range(2))
        Sq, Skv = draws.randrange(1, 400), draws.randrange(1, 400)
        visible = {
            (q, k)
            for q in range(Sq)
            for k in range(Skv)
            if (left is None or k >= q + Skv - Sq - left)
            and (right is None or k <= q + Skv - Sq + right)
        }
        seen: set[tuple[int, int]] = set()
        reach = limit_of(left), limit_of(right)
        given = Sizes(
            (1, 1, 1, 1, Sq, Skv, *reach, 0), None, None, "dense", left is not None,
            right is not None, right is None or right > 0, BLOCK_Q, BLOCK_KV,
        )  # fmt: skip
        for slot in range(-(-Sq // BLOCK_Q)):
            (*_, q_idx, _), loop = key_loop.assign_queries(slot, 0, given)
            rows = range(min(BLOCK_Q, Sq - q_idx))
            for t in range(loop.n_steps):
                first_key = (loop.first_tile + t) * BLOCK_KV
                pairs = {
                    (q_idx + r, first_key + c)
                    for r in rows
                    for c in range(BLOCK_KV)
                    if loop.sees(r, c, t)
                }
                assert not pairs & seen
                seen |= pairs
                if not KeyLoop.cuts.fn(loop, t):
                    assert len(pairs) == len(rows) * BLOCK_KV
        assert seen == visible
