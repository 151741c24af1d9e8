"""The audits pass what keeps its claims, and catch every kind of kernel that does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_calls import backward as run_backward
from kernel_calls import forward as run_forward
from kernel_calls import preparing, preparing_backward

from lockstep import dispatch
from lockstep.audit import batch_invariance, determinism
from lockstep.audit.calls import Shape
from lockstep.audit.checks import audit, run
from lockstep.kernels import cpu

CHECKS = (*determinism.CHECKS, *batch_invariance.CHECKS)
SMALL = Shape(B=3, Hq=4, Hkv=2, S=70, D=16, repeats=3)
by_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


def nudged(x: torch.Tensor) -> torch.Tensor:
    """One element moved by its last bit."""
    x = x.clone()
    flat = x.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf, dtype=x.dtype))
    return x


_TURNS = itertools.count()


def _by_turns(problem, tensors):
    """Another answer every other time."""
    out, *rest = run_forward(cpu.KERNEL, problem, tensors)
    return (nudged(out), *rest) if next(_TURNS) % 2 else (out, *rest)


def _by_threads(problem, tensors):
    out, *rest = run_forward(cpu.KERNEL, problem, tensors)
    return (nudged(out), *rest) if torch.get_num_threads() == 3 else (out, *rest)


def _by_batch(problem, tensors):
    out, *rest = run_forward(cpu.KERNEL, problem, tensors)
    return (torch.stack([*map(nudged, out)]), *rest) if problem.B > 1 else (out, *rest)


def _by_layout(layout):
    def forward(problem, tensors):
        out, lse, statistics = run_forward(cpu.KERNEL, problem, tensors)
        return out, nudged(lse) if problem.layout == layout else lse, statistics

    return forward


def _by_keys(problem, tensors):
    """As a split chosen by the longest neighbour would."""
    out, *rest = run_forward(cpu.KERNEL, problem, tensors)
    longest = int(tensors.kv_lens.max()) if tensors.kv_lens is not None else problem.Skv
    total = int(tensors.kv_lens.sum()) if tensors.kv_lens is not None else 0
    changed = torch.stack([*map(nudged, out)])
    return (changed, *rest) if total > longest + 9 else (out, *rest)


def _by_padding(problem, tensors):
    out, *rest = run_forward(cpu.KERNEL, problem, tensors)
    return (nudged(out), *rest) if problem.Skv > SMALL.S + 200 else (out, *rest)


def _by_queries(problem, tensors):
    """A token decoded by itself, whatever the batch."""
    out, *rest = run_forward(cpu.KERNEL, problem, tensors)
    decoded = problem.Sq == 1 < problem.Skv
    return (torch.stack([*map(nudged, out)]), *rest) if decoded else (out, *rest)


FAULTS = {
    "the same call again": _by_turns,
    "any number of threads": _by_threads,
    "alone or in a batch, at any place": _by_batch,
    "a neighbour grows": _by_keys,
    "any padding": _by_padding,
    "packed or dense": _by_layout("varlen"),
    "pages, in any order, or contiguous": _by_layout("paged"),
    "prefill, chunks and decode": _by_queries,
    "prefill and paged decode": _by_layout("paged"),
}


def faulty(monkeypatch, **changes):
    """A kernel that dispatch knows, in place of the last one made here."""
    kernel = replace(cpu.KERNEL, name="faulty", **changes)
    others = (other for other in dispatch.KERNELS if other.name != kernel.name)
    monkeypatch.setattr(dispatch, "KERNELS", (*others, kernel))
    return kernel


@by_check
def test_the_cpu_keeps_what_it_claims(check):
    outcome = run(check, SMALL, cpu.KERNEL)
    assert outcome.ok, f"{outcome.what}: {outcome.difference}"
    assert (outcome.comparisons > 0) == (outcome.skipped is None)


@by_check
def test_every_check_catches_a_kernel_that_breaks_it(check, monkeypatch):
    if check.refuses(SMALL) is not None:
        pytest.skip("needs a GPU")
    outcome = run(check, SMALL, faulty(monkeypatch, prepare=preparing(FAULTS[check.name])))
    assert not outcome.ok
    assert outcome.difference.tensor in ("out", "lse")


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_gradients_are_compared(tensor, monkeypatch):
    turns = itertools.count()

    def backward(*args):
        grads = run_backward(cpu.KERNEL, *args)
        field = tensor[1]
        changed = nudged(getattr(grads, field)) if next(turns) % 2 else getattr(grads, field)
        return grads._replace(**{field: changed})

    outcome = run(
        determinism.CHECKS[0],
        SMALL,
        faulty(monkeypatch, prepare_backward=preparing_backward(backward)),
    )
    assert outcome.difference.tensor == tensor


def test_without_a_backward_the_forward_is_audited(monkeypatch):
    kernel = faulty(monkeypatch, prepare_backward=None)
    assert all(outcome.ok for outcome in audit(CHECKS, SMALL, [kernel]))


def test_what_is_not_claimed_is_not_held_against_a_kernel(monkeypatch):
    kernel = faulty(monkeypatch, prepare=preparing(_by_queries), query_invariant=False)
    outcomes = list(audit(CHECKS, SMALL, [kernel]))
    assert all(outcome.ok for outcome in outcomes)
    assert [o.skipped for o in outcomes if o.claim == "query_invariant"] == ["not claimed"] * 2


def choosy(monkeypatch, **changes):
    """A kernel that takes neither pages nor few queries."""

    def supports(problem):
        if problem.layout == "paged":
            return "takes no pages"
        return "takes 16 queries or more" if problem.Sq < 16 else cpu.KERNEL.supports(problem)

    return faulty(monkeypatch, supports=supports, **changes)


def named(start):
    (check,) = (check for check in CHECKS if check.name.startswith(start))
    return check


def test_a_check_that_a_kernel_refuses_is_skipped_with_its_reason(monkeypatch):
    outcome = run(named("pages"), SMALL, choosy(monkeypatch))
    assert outcome.ok
    assert outcome.skipped == "takes 16 queries or more; takes no pages"
    assert outcome.comparisons == 0


def test_calls_that_a_kernel_refuses_are_left_out_and_the_rest_is_compared(monkeypatch):
    check = named("a neighbour grows")
    outcome = run(check, SMALL, choosy(monkeypatch))
    assert outcome.skipped is None
    assert outcome.left_out == ("takes 16 queries or more",)
    assert 0 < outcome.comparisons < run(check, SMALL, cpu.KERNEL).comparisons
    assert not run(check, SMALL, choosy(monkeypatch, prepare=preparing(_by_keys))).ok


def test_gradients_that_a_kernel_refuses_are_left_out_and_the_forward_is_compared(monkeypatch):
    def refuses_long_ones(problem):
        return "takes up to 64 keys" if problem.Skv > 64 else None

    kernel = faulty(monkeypatch, supports_backward=refuses_long_ones)
    outcome = run(named("the same call"), SMALL, kernel)
    assert outcome.ok
    assert outcome.left_out == ("no gradients: takes up to 64 keys",)
    assert outcome.comparisons == run(named("the same call"), SMALL, cpu.KERNEL).comparisons
    kernel = faulty(monkeypatch, supports_backward=refuses_long_ones, prepare=preparing(_by_turns))
    assert not run(named("the same call"), SMALL, kernel).ok


def test_calls_ask_for_query_invariance_only_where_it_is_checked(monkeypatch):
    asked = set()

    def forward(problem, tensors):
        asked.add(problem.query_invariant)
        return run_forward(cpu.KERNEL, problem, tensors)

    kernel = faulty(monkeypatch, prepare=preparing(forward))
    for check in CHECKS:
        if check.refuses(SMALL) is None:
            asked.clear()
            run(check, SMALL, kernel)
            assert asked == {check.claim == "query_invariant"}, check.name


def test_an_audit_stops_at_the_first_difference(monkeypatch):
    kernel = faulty(monkeypatch, prepare=preparing(_by_batch))
    outcomes = list(audit(CHECKS, SMALL, [kernel, cpu.KERNEL]))
    assert [outcome.ok for outcome in outcomes] == [True, True, True, True, False]


@pytest.mark.parametrize(
    "wrong", [{"B": 0}, {"S": 3}, {"Hq": 3, "Hkv": 2}, {"repeats": 0}, {"options": ("casual",)}]
)
def test_sizes_that_make_no_call_are_refused(wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"{name} takes"):
        Shape(**wrong)
