"""The checks of `lockstep audit exact`, each of one kernel on one problem.

Each check takes a call, the gradients that come into its backward (None: forward alone) and the
name of a kernel. It raises `Broken` with what is wrong, or returns each result's error as a share
of what the error rule allows; a check of something else returns an empty dict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import lockstep
from lockstep import reference
from lockstep.audit import sequences
from lockstep.audit.bad_metadata import corruptions
from lockstep.audit.bits import first_difference
from lockstep.audit.cases import Case, Douts, run
from lockstep.audit.peak import peak
from lockstep.error_rule import error, expect
from lockstep.kernels.kernel import Kernel

Shares = dict[str, float]


class Broken(Exception):
    """A promise that a kernel does not keep on one problem."""


def exact(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """The error rule for every result, written into memory full of NaN; inputs stay as they are."""
    before = {name: x.clone() for name, x in case.tensors.items()}
    with poisoned():
        found = run(case, douts=douts, kernel=kernel).items()
    _same(before, case.tensors, "the call wrote to its inputs")
    problem, tensors = case.pose()
    shares = {}
    for name, expected in expect(problem, tensors, *(douts or ())).items():
        # A bias of fewer dims has leading ones in a problem.
        result = found[name].reshape(expected.exact.shape)
        shares[name] = expected.share(result)
        if not shares[name] <= 1:
            raise Broken(
                f"{name} is off by {error(result, expected.exact):.3g}, {shares[name]:.3g} times "
                f"what the error rule allows: {expected.factor:g} × {expected.math:.3g}, the error "
                f"of math attention, + {expected.floor:.3g}"
            )
    return shares


def leaks(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """NaN and infinities where no row reads, and in all other sequences, change no bit."""
    clean = run(case, douts=douts, kernel=kernel)
    spoiled = sequences.with_garbage(case)
    if spoiled is not None:
        got = run(spoiled, douts=douts, kernel=kernel)
        _same(clean.items(), got.items(), "garbage that no row sees changes a result")
    for b in range(min(sequences.count(case), 2)):
        spoiled = _spoil_others(case, b)
        got = run(spoiled, douts=douts, kernel=kernel)
        what = f"NaN in every other sequence changes sequence {b}"
        _same(sequences.share(case, clean, b), sequences.share(case, got, b), what)
    return {}


def repeats(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """The same call again gives the same bits."""
    first = run(case, douts=douts, kernel=kernel).items()
    _same(first, run(case, douts=douts, kernel=kernel).items(), "a second call differs")
    return {}


def neighbours(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """A sequence has the same bits alone and among the others."""
    together = run(case, douts=douts, kernel=kernel)
    for b in range(min(sequences.count(case), 2)):
        own, own_douts = sequences.alone(case, douts, b)
        if not (own.tensors["q"].numel() and own.tensors["k"].numel()):
            continue
        result = sequences.share(own, run(own, douts=own_douts, kernel=kernel), 0)
        _same(result, sequences.share(case, together, b), f"sequence {b} differs when alone")
    return {}


def propagation(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """NaN in a key, NaN or infinity in a value reach the rows that see it, and no other row."""
    clean = run(case, kernel=kernel).items()
    for name, value in (("k", math.nan), ("v", math.nan), ("v", math.inf)):
        got = run(_spoil_key(case, name, value), kernel=kernel).items()
        for what, reached in _reached(case, name).items():
            result = got[what]
            if bool(result[reached].isfinite().any()):
                raise Broken(f"{value} in {name} does not reach {what} of a row that sees it")
            why = f"{value} in {name} changes {what} of a row that does not see it"
            _same({what: clean[what][~reached]}, {what: result[~reached]}, why)
    return {}


def metadata(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """A length, offset or page out of range: an error that names it; or, on a device that checks in
    the kernel, NaN for that sequence (of a page: for the rows that see it) and the same bits for
    the others."""
    for name, bad, where in corruptions(case):
        if case.tensors["q"].device.type == "cpu":
            _refused(bad, kernel, name)
            continue
        clean, got = run(case, kernel=kernel), run(bad, kernel=kernel)
        if name == "page_table":
            spoiled = _with_nan(clean.items(), _reached_by_page(case, where))
            _same(spoiled, got.items(), f"a wrong page of sequence {where} is not NaN to its rows")
            continue
        for b in range(sequences.count(case)):
            expected = sequences.share(case, clean, b)
            if b == where:
                expected = {what: torch.full_like(x, math.nan) for what, x in expected.items()}
            elif name.startswith("cu_seqlens") and b == where + 1:
                continue  # Its first offset is the wrong one.
            what = f"{name} out of range for sequence {where} changes sequence {b}"
            _same(expected, sequences.share(case, got, b), what)
    return {}


def memory(case: Case, douts: Douts | None, kernel: str) -> Shares:
    """Forward and backward take memory for their results and little more, no matrix of scores."""
    run(case, douts=douts, kernel=kernel)
    found = peak(lambda: run(case, douts=douts, kernel=kernel), case.tensors["q"].device)
    tensors = sum(x.numel() * 4 for x in case.tensors.values())
    allowed = 64 * 2**20 + 20 * tensors
    if found > allowed:
        raise Broken(
            f"the call takes {found / 2**20:.0f} MiB, of which {allowed / 2**20:.0f} MiB would be "
            f"linear in its length"
        )
    return {}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that PyTorch allocates here holds NaN, so that an element never written shows."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def checks(kernel: Kernel, *, long: bool) -> tuple[str, ...]:
    """Names of the checks for a kernel, by its claims; `long` problems are for one check alone."""
    if long:
        return ("memory",)
    claimed = {"repeats": kernel.deterministic, "neighbours": kernel.batch_invariant}
    names = ("exact", "leaks", "repeats", "neighbours", "propagation", "metadata")
    return tuple(name for name in names if claimed.get(name, True))


def _same(expected: dict[str, Tensor], got: dict[str, Tensor], what: str) -> None:
    floating = {n: x for n, x in expected.items() if x.is_floating_point()}
    for name, x in expected.items():
        if name not in floating and not torch.equal(x, got[name]):
            raise Broken(f"{what}: {name}")
    difference = first_difference(floating, {name: got[name] for name in floating})
    if difference is not None:
        raise Broken(f"{what}: {difference}")


def _spoil_key(case: Case, name: str, value: float) -> Case:
    """One key spoiled, in the middle of the first sequence or of packed tokens; or a whole page."""
    x = case.tensors[name].clone()
    if case.layout == "dense":
        x[0, 0, x.shape[2] // 2] = value
    elif case.layout == "varlen":
        x[len(x) // 2] = value
    else:
        x[int(case.tensors["page_table"][0, 0])] = value
    return case.replaced(**{name: x})


def _reached(case: Case, name: str) -> dict[str, Tensor]:
    """The rows of out and lse that see the spoiled key, by the oracle: bool [..., Hq, rows]."""
    return _nan_rows(_spoil_key(_one_column(case), name, math.nan))


def _reached_by_page(case: Case, b: int) -> dict[str, Tensor]:
    """The rows of out and lse that see the first page of a sequence, by the oracle, to which that
    page is one of NaN."""
    case = _one_column(case)
    k, v = (
        torch.cat([case.tensors[name], torch.full_like(case.tensors[name][:1], math.nan)])
        for name in ("k", "v")
    )
    table = case.tensors["page_table"].clone()
    table[b, sequences.first_page(case, b)] = len(k) - 1
    return _nan_rows(case.replaced(k=k, v=v, page_table=table))


def _one_column(case: Case) -> Case:
    """One column of q, k and v: enough where all of a key is spoiled."""
    return case.replaced(**{name: case.tensors[name][..., :1] for name in ("q", "k", "v")})


def _nan_rows(case: Case) -> dict[str, Tensor]:
    """The rows [..., Hq, rows] of a call of one column in which the oracle has NaN."""
    with torch.no_grad():
        out, lse = reference.evaluate(*case.pose())
    return {"out": out.squeeze(-1).isnan(), "lse": lse.isnan()}


def _with_nan(results: dict[str, Tensor], rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results with NaN in these rows: bool [..., Hq, rows]."""
    spoiled = {}
    for name, mask in rows.items():
        x = results[name]
        spoiled[name] = x.masked_fill(
            mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), math.nan
        )
    return spoiled


def _spoil_others(case: Case, b: int) -> Case:
    """NaN in the queries, keys and values of every sequence but b."""
    changes = {}
    for name in ("q", "k", "v"):
        # Several sequences may share a page: of pages, all are its own.
        x, part = case.tensors[name], sequences.tokens(case, b)[name != "q"]
        spoiled = torch.full_like(x, math.nan)
        spoiled[part] = x[part]
        changes[name] = spoiled
    return case.replaced(**changes)


def _refused(bad: Case, kernel: str, name: str) -> None:
    try:
        bad.call(lockstep, kernel=kernel)
    except ValueError as refusal:
        if str(refusal).startswith(f"{name} "):
            return
        raise Broken(f"{name} out of range raises ValueError: {refusal}") from None
    raise Broken(f"{name} out of range raises nothing")
