"""Calls whose lengths, offsets or page numbers are wrong, and what should come of them.

`Spoiled` is such a call with those of its sequences that are good, each as a call by itself. The
good ones must have the bits that they have alone; every other row of out, lse and the gradients
must be NaN, whatever stood in the memory of the results before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from problems import Case, Result, differing, draw_douts, pose
from torch import Tensor

from lockstep import reference

# Neither NaN nor a likely result: what stands in memory that was never written.
STALE = 77.0
Compute = Callable[[Case, "tuple[Tensor, Tensor] | None"], Result]


@dataclass(frozen=True)
class Sequence:
    """A good one: its queries and keys in the tensors of the call, and the call without others."""

    queries: slice
    keys: slice
    alone: Case
    lost: Tensor | None = None  # [Sq] bool: rows of it that are NaN nevertheless


@dataclass(frozen=True)
class Spoiled:
    case: Case
    good: list[Sequence]
    why: str


def clean(offsets: list[int], T: int) -> tuple[list[int], list[bool]]:
    """Offsets with the largest right one before it for each wrong one, and which are right."""
    found, right = [0], [offsets[0] == 0]
    for offset in offsets[1:]:
        right.append(0 <= offset <= T and offset >= found[-1])
        found.append(offset if right[-1] else found[-1])
    return found, right


def spoil_offsets(draws: random.Random, offsets: list[int], T: int) -> list[int]:
    """One to three of them changed, or all."""
    offsets = list(offsets)
    if draws.random() < 0.1:
        return [draws.randint(-T, 2 * T) for _ in offsets]
    for _ in range(draws.randint(1, 3)):
        i = draws.choice([0, len(offsets) - 1, *range(len(offsets)), *range(len(offsets))])
        offsets[i] = draws.choice(
            [
                -1,
                -(1 << 31),
                T + 1,
                T + 300,
                (1 << 31) - 1,
                0,
                T,
                draws.randint(0, T),
                offsets[i - 1],
            ]
        )
    return offsets


def spoil_varlen(draws: random.Random, case: Case) -> Spoiled:
    names = draws.choice([("q",), ("k",), ("q", "k")])
    tensors, own, right = dict(case.tensors), {}, {}
    for n in ("q", "k"):
        given, T = tensors[f"cu_seqlens_{n}"], tensors[n].shape[0]
        own[n] = spoil_offsets(draws, given.tolist(), T) if n in names else given.tolist()
        _, right[n] = clean(own[n], T)
        tensors[f"cu_seqlens_{n}"] = torch.tensor(own[n], dtype=given.dtype, device=given.device)
    good = []
    for b in range(len(own["q"]) - 1):
        if all(right[n][b] and right[n][b + 1] for n in ("q", "k")):
            rows = {n: slice(*own[n][b : b + 2]) for n in ("q", "k")}
            alone = {"q": tensors["q"][rows["q"]]} | {n: tensors[n][rows["k"]] for n in "kv"}
            for n in ("q", "k"):
                offsets = tensors[f"cu_seqlens_{n}"][b : b + 2]
                alone[f"cu_seqlens_{n}"] = offsets - offsets[0]
            alone |= {n: tensors[n] for n in tensors if n not in alone}
            good.append(Sequence(rows["q"], rows["k"], Case(alone, case.options)))
    return Spoiled(Case(tensors, case.options), good, f"{own}")


def spoil_lengths(draws: random.Random, case: Case) -> Spoiled:
    """Spoils lengths of a dense call, or of one with pages."""
    lens = case.tensors["kv_lens"]
    Skv = pose(case)[0].Skv
    own = lens.tolist()
    for _ in range(draws.randint(1, len(own))):
        wrong = [-1, Skv + 1, Skv + 44, -(1 << 31), (1 << 31) - 1]
        wrong += [(1 << 32) + 1] if lens.dtype == torch.int64 else []
        own[draws.randrange(len(own))] = draws.choice(wrong)
    spoiled = case.replaced(kv_lens=torch.tensor(own, dtype=lens.dtype, device=lens.device))
    good = [_alone(spoiled, b) for b, length in enumerate(own) if 0 <= length <= Skv]
    return Spoiled(spoiled, good, f"kv_lens {own}")


def spoil_starts(draws: random.Random, case: Case) -> Spoiled:
    """First keys of a dense call with lengths, and a length."""
    lens, starts = (case.tensors[name].clone() for name in ("kv_lens", "kv_starts"))
    for _ in range(draws.randint(1, 2)):
        b = draws.randrange(len(starts))
        starts[b] = draws.choice([-1, int(lens[b]) + 1, -(1 << 31), (1 << 31) - 1])
    lens[draws.randrange(len(lens))] = draws.choice([-1, int(lens[0])])
    spoiled = case.replaced(kv_lens=lens, kv_starts=starts)
    Skv = pose(case)[0].Skv
    ranges = zip(starts.tolist(), lens.tolist(), strict=True)
    good = [_alone(spoiled, b) for b, (start, end) in enumerate(ranges) if 0 <= start <= end <= Skv]
    return Spoiled(spoiled, good, f"kv_starts {starts.tolist()} kv_lens {lens.tolist()}")


def spoil_ragged(draws: random.Random, case: Case) -> Spoiled:
    """Offsets of ragged queries over pages, and lengths."""
    given, T = case.tensors["cu_seqlens_q"], case.tensors["q"].shape[0]
    offsets = spoil_offsets(draws, given.tolist(), T)
    _, right = clean(offsets, T)
    lens, Skv = case.tensors["kv_lens"].clone(), pose(case)[0].Skv
    lens[draws.randrange(len(lens))] = draws.choice([-1, Skv + 1, int(lens[0])])
    spoiled = case.replaced(cu_seqlens_q=torch.tensor(offsets, dtype=given.dtype), kv_lens=lens)
    good = []
    for b, length in enumerate(lens.tolist()):
        if right[b] and right[b + 1] and 0 <= length <= Skv:
            rows = slice(*offsets[b : b + 2])
            own = {n: spoiled.tensors[n][b : b + 1] for n in ("page_table", "kv_lens")}
            own |= {"q": spoiled.tensors["q"][rows]}
            own |= {"cu_seqlens_q": torch.tensor([0, rows.stop - rows.start], dtype=given.dtype)}
            good.append(Sequence(rows, slice(0), spoiled.replaced(**own)))
    return Spoiled(spoiled, good, f"{offsets} kv_lens {lens.tolist()}")


def spoil_pages(draws: random.Random, case: Case) -> Spoiled:
    """Rows that see a key on a page that is not there are NaN; others of their sequence are not."""
    problem, _ = pose(case)
    table, lens = case.tensors["page_table"].clone(), case.tensors["kv_lens"]
    is_wrong = torch.zeros_like(table, dtype=torch.bool)
    for _ in range(draws.randint(1, 4)):
        b, i = (draws.randrange(n) for n in table.shape)
        table[b, i] = draws.choice([-1, problem.n_pages, problem.n_pages + 7, (1 << 31) - 1])
        is_wrong[b, i] = True
    # [B, Sq, Skv] and [B, 1, Skv]
    seen = reference.visible(problem, lens, problem.Sq, problem.Skv)[:, 0]
    on_wrong = is_wrong.repeat_interleave(problem.page_size, 1)[:, None]
    lost = (seen & on_wrong).any(-1)
    good = [_alone(case, b, lost[b]) for b in range(problem.B)]
    wrong = [(b, i, int(table[b, i])) for b, i in is_wrong.nonzero().tolist()]
    return Spoiled(case.replaced(page_table=table), good, f"pages {wrong}, kv_lens {lens.tolist()}")


def _alone(case: Case, b: int, lost: Tensor | None = None) -> Sequence:
    """Sequence b of a call that is not packed."""
    own = slice(b, b + 1)
    pooled = ("sinks", "k", "v") if case.layout == "paged" else ("sinks",)
    tensors = {n: x if n in pooled else x[own] for n, x in case.tensors.items()}
    return Sequence(own, own, Case(tensors, case.options), lost)


def check(spoiled: Spoiled, compute: Compute, *, gradients: bool) -> None:
    """`compute` gives the results of a call; with (dout, dlse) also gradients."""
    device = spoiled.case.tensors["q"].device
    douts = tuple(x.to(device) for x in draw_douts(spoiled.case)) if gradients else None
    found = compute(spoiled.case, douts).items()
    # A sum over all rows, good ones or not.
    found.pop("dsinks", None)
    expected = {what: torch.full_like(x, torch.nan) for what, x in found.items()}
    for sequence in spoiled.good:
        mine = None if douts is None else tuple(x[sequence.queries] for x in douts)
        alone = compute(sequence.alone, mine).items()
        for what, x in expected.items():
            rows = sequence.keys if what in ("dk", "dv") else sequence.queries
            x[rows] = alone[what]
            if sequence.lost is not None:
                lost = _along_rows(sequence.lost.to(device), x[rows])
                x[rows].masked_fill_(lost, torch.nan)
    for what, x in found.items():
        n = differing(x, expected[what])
        assert not n, f"{what}: {n} of {x.numel()} elements are not as expected: {spoiled.why}"


def _along_rows(lost: Tensor, x: Tensor) -> Tensor:
    """lost [Sq] as it goes with x [1, Hq, Sq, ...]."""
    return lost.view(1, 1, -1, *(1,) * (x.dim() - 3))
