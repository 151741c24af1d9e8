"""`lockstep bench gpu`: the GPU kernels beside their peers, all in one run.

Four tables. A cell is a median over calls timed with CUDA events, turned into a rate:

    forward, backward   TFLOP/s, 16,384 tokens in all; causal counts half the products, and a
                        backward counts as 2.5 forwards, however many products a kernel makes
    decode              GB/s of keys and values read; one query against a paged cache
    varlen              TFLOP/s over packed sequences of long-tailed lengths

Every result is compared with float32 attention of a few of its rows before it is timed. A
contender that cannot run a case, or computes something else, has its reason in place of a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.bench.peers import Peer
from lockstep.bench.timing import WrongResult

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.kernels.kernel import Kernel

TOKENS = 16384
DECODE_HEADS, DECODE_KV_HEADS, DECODE_DIM = 32, 8, 128
VARLEN_SEQUENCES, VARLEN_LONGEST = 64, 8192
# Of the largest element: what 16-bit rounding explains.
TOLERANCE = 2e-2
# Milliseconds of warming up and of timing, per cell.
WARM_UP, MEASURE, QUICK_MEASURE = 25, 100, 20
UNITS = {"forward": "TFLOP/s", "backward": "TFLOP/s", "decode": "GB/s", "varlen": "TFLOP/s"}


class NoGpu(RuntimeError):
    """There is no CUDA device, or no kernel for it."""


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    table: str
    S: int
    D: int
    Hq: int
    Hkv: int
    B: int = 1
    causal: bool = False

    @property
    def name(self) -> str:
        if self.table == "decode":
            return f"B {self.B}, {_thousands(self.S)} keys"
        how = ", causal" if self.causal else ""
        if self.table == "varlen":
            return f"{self.B} sequences up to {_thousands(self.S)}, D {self.D}{how}"
        return f"D {self.D}, S {_thousands(self.S)}{how}"


def _thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _prefill_cases() -> Iterator[Case]:
    for table in ("forward", "backward"):
        for D in (64, 128):
            for S in (1024, 4096, 16384):
                for causal in (False, True):
                    H = 2048 // D
                    yield Case(table, S, D, H, H, TOKENS // S, causal)


CASES: tuple[Case, ...] = (
    *_prefill_cases(),
    *(
        Case("decode", S, DECODE_DIM, DECODE_HEADS, DECODE_KV_HEADS, B, causal=True)
        for B in (1, 8, 64)
        for S in (4096, 16384, 65536)
    ),
    *(
        Case("varlen", VARLEN_LONGEST, D, 2048 // D, 2048 // D, VARLEN_SEQUENCES, causal=True)
        for D in (64, 128)
    ),
)


@dataclass
class Row:
    """What one case came to: milliseconds and rates by contender, or why there are none.

    A contender that refuses a case says so before it runs; one that fails, or errs, does not.
    """

    case: Case
    ours: list[str]
    ms: dict[str, float] = field(default_factory=dict)
    rate: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        case = self.case
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
            "ours": self.ours,
            "ms": {name: round(ms, 5) for name, ms in self.ms.items()},
            "rate": {name: round(rate, 1) for name, rate in self.rate.items()},
            "failed": self.failed,
            "refused": self.refused,
        }


def kernels() -> list[Kernel]:
    """The kernels for this GPU.

    Raises:
        NoGpu: There is no CUDA device, or no kernel runs on it.
    """
    import torch

    from lockstep.dispatch import KERNELS
    from lockstep.problem import Options, Tensors, describe

    if not torch.cuda.is_available():
        raise NoGpu("no CUDA device here, or a torch built without CUDA")
    x = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
    problem = describe(Tensors(x, x, x), Options())
    found = [k for k in KERNELS if k.supports(problem) is None]
    if not found:
        raise NoGpu("no kernel of Lockstep runs on this device: lockstep doctor says why")
    return found


def run(case: Case, ours: list[Kernel], peers: list[Peer], *, quick: bool = False) -> Row:
    """Check and time one case with everyone who takes part in it."""
    import torch

    from lockstep.bench.gpu_calls import TABLES

    row = Row(case, [kernel.name for kernel in ours])
    try:
        work, expected, contenders = TABLES[case.table](case, ours, peers)
    except torch.cuda.OutOfMemoryError:
        row.failed = dict.fromkeys(row.ours, "does not fit into memory")
        return row
    for name, prepare in contenders.items():
        try:
            call, rows = prepare()
            _check(rows(call()), expected)
            ms = _milliseconds(call, quick)
        except NotImplementedError as refusal:
            # Not a failure: some kernels are for some problems only.
            row.refused[name] = str(refusal).splitlines()[-1].strip()[:200]
            continue
        except Exception as error:
            # Whatever a library trips over is its cell's, not the run's.
            row.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        row.ms[name] = ms
        row.rate[name] = work / ms
    return row


def _milliseconds(call: Callable[[], Any], quick: bool) -> float:
    from triton.testing import do_bench

    measure = QUICK_MEASURE if quick else MEASURE
    return float(do_bench(call, warmup=WARM_UP, rep=measure, return_mode="median"))


def _check(rows: Tensor, expected: Tensor) -> None:
    error = float((rows.float() - expected).abs().max())
    limit = TOLERANCE * max(1.0, float(expected.abs().max()))
    # `not <=` so that NaN is wrong as well.
    if not error <= limit:
        raise WrongResult(f"differs by {error:.2g}, and rounding explains {limit:.2g}")
