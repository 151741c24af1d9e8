"""`lockstep bench gpu`: the GPU kernels beside their peers, all in one run, bf16.

Seven tables, each cell a median over rounds in which all contenders take turns:

    forward, backward   TFLOP/s, 16,384 tokens in all; causal counts half the products, and a
                        backward counts as 2.5 forwards, however many products a kernel makes
    small               µs of two forwards too small to fill a large GPU
    decode              GB/s of keys and values read; one query against a paged cache
    varlen              TFLOP/s over packed sequences of long-tailed lengths
    host, host_decode   µs of the host for one call, over before the device is: a short forward, and
                        a query against a paged cache that is split

Every result is checked by the error rule before it is timed (`gpu_check`). A contender that cannot
run a case, or computes something else, has its reason in place of a figure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.bench.contender import Contender
from lockstep.bench.gpu_calls import TABLES, Work
from lockstep.bench.gpu_cases import UNITS, Case
from lockstep.bench.gpu_check import expect, largest_error
from lockstep.bench.gpu_timing import ROUNDS, take_host_turns, take_turns
from lockstep.bench.timing import Timings

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Kernel


class NoGpu(RuntimeError):
    """There is no CUDA device, or no kernel for it."""


class DeviceLost(RuntimeError):
    """The CUDA context is broken: nothing more can run in this process."""


@dataclass
class Row:
    """The results of one case.

    A contender that refuses a case raises NotImplementedError before it runs; one that fails raises
    anything else, or computes a wrong result.
    """

    case: Case
    chosen: str | None = None
    amount: float = 0.0
    kinds: dict[str, str] = field(default_factory=dict)
    timings: Timings = field(default_factory=lambda: Timings({}))
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[str]:
        """Names of the contenders of this kind, with a time or without."""
        return [name for name, found in self.kinds.items() if found == kind]

    @property
    def best_peer(self) -> str | None:
        timed = [name for name in self.of_kind("peer") if name in self.timings.seconds]
        return min(timed, key=self.timings.median, default=None)

    def as_json(self) -> dict[str, Any]:
        case, timings, best = self.case, self.timings, self.best_peer
        ms = {name: timings.median(name) * 1e3 for name in timings.seconds}
        ours = [name for name in self.of_kind("ours") if name in ms]
        return {
            "table": case.table,
            "case": case.name,
            "unit": UNITS[case.table],
            "B": case.B,
            "Hq": case.Hq,
            "Hkv": case.Hkv,
            "S": case.S,
            "D": case.D,
            "causal": case.causal,
            "dtype": "bf16",
            "ours": self.of_kind("ours"),
            "peers": self.of_kind("peer"),
            "chosen": self.chosen,
            "best_peer": best,
            "ms": {name: round(time, 5) for name, time in ms.items()},
            "rate": {name: round(self._rate(time), 1) for name, time in ms.items()},
            "speed": {name: round(timings.speed(name, best), 3) for name in ours if best},
            "error": {name: round(error, 3) for name, error in self.errors.items()},
            "failed": self.failed,
            "refused": self.refused,
        }

    def _rate(self, ms: float) -> float:
        return ms * 1e3 if UNITS[self.case.table] == "µs" else self.amount / ms


def kernels() -> list[Kernel]:
    """The kernels for this GPU.

    Raises:
        NoGpu: There is no CUDA device, or no kernel runs on it.
    """
    import torch

    from lockstep.dispatch import KERNELS
    from lockstep.problem import Options, Tensors, describe

    if not torch.cuda.is_available():
        raise NoGpu(
            "no CUDA device here, or a torch built without CUDA; the CPU has a benchmark of its "
            "own: lockstep bench cpu"
        )
    x = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
    problem = describe(Tensors(x, x, x), Options())
    found = [k for k in KERNELS if k.supports(problem) is None]
    if not found:
        raise NoGpu("no kernel of Lockstep runs on this device: lockstep doctor says why")
    return found


def run(case: Case, contenders: list[Contender], *, rounds: int = ROUNDS) -> Row:
    """Check every contender of one case, then time those with a right result in turns.

    Raises:
        DeviceLost: A contender broke the CUDA context.
    """
    import torch

    row = Row(case)
    try:
        work = TABLES[case.table](case)
        expected = expect(work.pieces, causal=case.causal, backward=case.table == "backward")
    except torch.OutOfMemoryError:
        row.kinds = {contender.name: contender.kind for contender in contenders}
        row.refused = dict.fromkeys(row.kinds, "the case does not fit into memory")
        return row
    row.chosen, row.amount = work.chosen, work.amount
    calls = {}
    for contender in contenders:
        call = _checked(row, work, contender, expected)
        if call is not None:
            calls[contender.name] = call
    timed = take_host_turns if case.table in ("host", "host_decode") else take_turns
    with torch.no_grad():
        row.timings = timed(calls, rounds)
    return row


def _checked(row: Row, work: Work, contender: Contender, expected: list[Any]) -> Any:
    """The call to time; None where there is none, and then `row` has the reason, unless the
    contender does not take part in this table."""
    import torch

    name = contender.name
    try:
        with torch.no_grad():
            call = work.prepare(contender)
            if call is None:
                return None
            row.kinds[name] = contender.kind
            result = call()
            if contender.kind != "bound":
                row.errors[name] = largest_error(work.pick(result), expected)
    except NotImplementedError as refusal:
        # Not a failure: some kernels are for some problems only.
        row.kinds[name] = contender.kind
        row.refused[name] = str(refusal).splitlines()[-1].strip()[:200]
        return None
    except Exception as error:
        # An error of one library ends its own cell, not the run.
        row.kinds[name] = contender.kind
        row.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        _check_device(f"{name} in {row.case.table}: {row.case.name}")
        return None
    return call


def _check_device(after: str) -> None:
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"CUDA stopped working after {after}: {error}") from error
