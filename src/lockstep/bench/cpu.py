"""`lockstep bench cpu`: the CPU path against PyTorch's scaled_dot_product_attention.

A case is one shape with the speed it should reach. Speed is the time of what it is held against
divided by ours, both medians from one run: 2.0 is twice as fast. 16-bit cases are held against
our own fp32, because PyTorch's 16-bit speed on a CPU says more about the CPU than about us; its
time is shown all the same. Those that matrix units run are held against PyTorch, which uses them
too. Beside it stands what share of the cores' multiply-adds a case reaches (`kernels/cpu/roof.py`):
its matrix products alone count. Those of matrix units are no multiply-adds of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.bench.timing import Timings, WrongResult, interleave
from lockstep.output import formats

if TYPE_CHECKING:
    from torch import Tensor

Run = Callable[..., tuple["Tensor", ...]]

# The contenders; the second is Lockstep again, on the same inputs in fp32.
LOCKSTEP, LOCKSTEP_FP32, SDPA = "lockstep", "fp32", "SDPA"
DTYPES = ("fp32", "bf16", "fp16")
# The kernel that multiplies with matrix units.
MATRIX = "amx"
# The oracle holds all scores of the rows that are checked.
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Case:
    """One row of the speed table: a problem, and how fast it should be against what."""

    name: str
    against: str
    at_least: float
    aim: float
    Hq: int
    Hkv: int
    Sq: int
    Skv: int
    D: int
    dtype: str = "fp32"
    causal: bool = False
    window: tuple[int, int] | None = None
    backward: bool = False

    @property
    def operations(self) -> int:
        """The number of operations in matrix products, over the pairs of queries and keys that the
        mask leaves: two products in a forward, and five more in a backward."""
        pairs = self.Sq * self.Skv
        if self.causal:
            pairs = self.Sq * (self.Sq + 1) // 2
        elif self.window is not None:
            left, right = self.window
            pairs = sum(min(q, left) + 1 + min(self.Sq - 1 - q, right) for q in range(self.Sq))
        return 2 * (7 if self.backward else 2) * self.Hq * pairs * self.D

    @property
    def shape(self) -> str:
        """The sizes, as shown in a table. Where the lengths differ, there is one query."""
        heads = f"H{self.Hq}" if self.Hq == self.Hkv else f"H{self.Hq}/{self.Hkv}"
        length = f"S{self.Skv}" if self.Sq == self.Skv else f"Skv{self.Skv}"
        return f"{heads} {length} D{self.D}"


def _forward_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for D in (64, 128):
            for causal in (False, True):
                against, at_least, aim = (
                    (SDPA, 1.0, 1.3) if dtype == "fp32" else (LOCKSTEP_FP32, 1 / 1.3, 1 / 1.1)
                )
                name = f"{dtype} {'causal' if causal else 'forward'}"
                yield Case(name, against, at_least, aim, 8, 8, 2048, 2048, D, dtype, causal=causal)


def _training_cases() -> Iterator[Case]:
    for D in (64, 128):
        for causal in (False, True):
            name = f"{'causal' if causal else 'fp32'} fwd + bwd"
            yield Case(name, SDPA, 0.8, 1.2, 8, 8, 1024, 1024, D, causal=causal, backward=True)


CASES: tuple[Case, ...] = (
    *_forward_cases(),
    Case("bf16 decode", SDPA, 1.0, 1.3, 8, 2, 1, 16384, 64, "bf16"),
    Case("bf16 decode", SDPA, 1.0, 1.3, 32, 8, 1, 16384, 128, "bf16"),
    Case("decode, grouped", SDPA, 2.0, 4.0, 8, 2, 1, 16384, 64),
    Case("decode, one head", SDPA, 1.3, 1.8, 1, 1, 1, 65536, 64),
    # PyTorch has no window: it gets the same rule as a boolean mask.
    Case("window (256, 0)", SDPA, 8.0, 20.0, 1, 1, 8192, 8192, 64, window=(256, 0)),
    *_training_cases(),
)


@dataclass(frozen=True)
class Row:
    """The results of one case."""

    case: Case
    kernel: str | None
    timings: Timings

    @property
    def speed(self) -> float:
        """Times as fast as what the case is held against."""
        return self.timings.speed(LOCKSTEP, self.case.against)

    def as_json(self) -> dict[str, Any]:
        """One entry of `rows` in a results file. Times are milliseconds, medians over rounds."""
        case, timings = self.case, self.timings
        return {
            "case": case.name,
            "shape": case.shape,
            "dtype": case.dtype,
            "kernel": self.kernel,
            "ms": {
                name: round(self.timings.median(name) * 1e3, 4) for name in self.timings.seconds
            },
            "rounds": len(timings.seconds[LOCKSTEP]),
            "against": case.against,
            "speed": round(self.speed, 3),
            "gflops": round(case.operations / timings.median(LOCKSTEP) / 1e9, 2),
            "at_least": round(case.at_least, 3),
            "aim": round(case.aim, 3),
        }


def share_of_roof(row: dict[str, Any], roof: float) -> str:
    """What share of the roof, in GFLOP/s, the matrix products of an entry of `rows` have; a dash
    for those of matrix units."""
    return "–" if row.get("kernel") == MATRIX else f"{row['gflops'] / roof:.0%}"


def run(case: Case, rounds: int) -> Row:
    """Check one case by the error rule, then time it against what the kernel that runs it is held
    against.

    Raises:
        WrongResult: A result is further off than the rule allows.
    """
    import lockstep

    q, k, v = _inputs(case)
    _check(case, q, k, v)
    kernel = lockstep.explain(q, k, v, causal=case.causal, window=case.window).kernel
    if kernel == MATRIX:
        case = replace(case, against=SDPA, at_least=1.0, aim=1.3)
    return Row(case, kernel, interleave(contenders(case, q, k, v), rounds))


def contenders(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """The calls to time against each other, by name."""
    ours, theirs = _ours(case), _sdpa(case)
    timed: dict[str, Callable[[], object]] = {
        LOCKSTEP: partial(ours, q, k, v),
        SDPA: partial(theirs, q, k, v),
    }
    if case.against == LOCKSTEP_FP32:
        timed[LOCKSTEP_FP32] = partial(ours, q.float(), k.float(), v.float())
    return timed


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, formats.DTYPES[case.dtype])

    def normal(H: int, S: int) -> Tensor:
        return torch.randn(1, H, S, case.D, generator=generator).to(dtype)

    return normal(case.Hq, case.Sq), normal(case.Hkv, case.Skv), normal(case.Hkv, case.Skv)


def _ours(case: Case) -> Run:
    import lockstep

    return _timed_part(case, partial(lockstep.attention, causal=case.causal, window=case.window))


def _sdpa(case: Case) -> Run:
    from torch.nn.functional import scaled_dot_product_attention

    mask = None if case.window is None else _window_mask(case.Sq, *case.window)
    attention = partial(
        scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=case.causal,
        enable_gqa=case.Hq != case.Hkv,
    )
    return _timed_part(case, attention)


def _timed_part(case: Case, attention: Callable[..., Tensor]) -> Run:
    """Forward alone without autograd, or forward and backward with a gradient of ones."""
    import torch

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attention(*inputs),)

    def forward_backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attention(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return forward_backward if case.backward else forward


def _window_mask(S: int, left: int, right: int) -> Tensor:
    import torch

    q_idx, kv_idx = torch.arange(S)[:, None], torch.arange(S)
    return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)  # [S, S] bool


def _check(case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The error rule for one head: its last queries, or all of them where gradients are timed."""
    import torch

    from lockstep.error_rule import error, expect
    from lockstep.problem import Tensors, describe, make_options

    rows = case.Sq if case.backward else CHECKED_ROWS
    head = Tensors(q[:, :1, -rows:], k[:, :1], v[:, :1])
    problem = describe(head, make_options(case.causal, case.window, None, None))
    results = [x[:, :1, -rows:] for x in _ours(case)(q, k, v)]
    if case.backward:
        rules = expect(problem, head, torch.ones_like(head.q))
        expected = [rules[name] for name in ("dq", "dk", "dv")]
    else:
        expected = [expect(problem, head)["out"]]
    for result, rule in zip(results, expected, strict=True):
        if rule.share(result) > 1:
            raise WrongResult(
                f"{case.name}, {case.shape}: off by {error(result, rule.exact):.2g}, rounding "
                f"explains {rule.allowed:.2g}"
            )
