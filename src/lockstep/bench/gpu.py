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

from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.bench.contender import Contender
from lockstep.bench.gpu_calls import TABLES
from lockstep.bench.gpu_cases import UNITS, Case
from lockstep.bench.gpu_check import expect, largest_error
from lockstep.bench.gpu_timing import ROUNDS, take_host_turns, take_turns
from lockstep.bench.row import Row

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Kernel


class NoGpu(RuntimeError):
    """There is no CUDA device, or no kernel for it."""


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
    page_table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    prefill = Tensors(x, x, x)
    pages = x.transpose(1, 2)  # [n_pages, page, Hkv, D]
    decode = Tensors(x[:, :, :1], pages, pages, page_table=page_table, kv_lens=page_table[0])
    problems = [describe(tensors, Options()) for tensors in (prefill, decode)]
    found = [k for k in KERNELS if any(k.supports(problem) is None for problem in problems)]
    if not found:
        raise NoGpu("no kernel of Lockstep runs on this device: lockstep doctor says why")
    return found


def run(case: Case, contenders: list[Contender], *, rounds: int = ROUNDS) -> Row:
    """Check every contender of one case, then time those with a right result in turns.

    Raises:
        DeviceLost: A contender broke the CUDA context.
    """
    import torch

    row = Row(_facts(case))
    try:
        work = TABLES[case.table](case)
        expected = expect(work.pieces, causal=case.causal, backward=case.table == "backward")
    except torch.OutOfMemoryError:
        row.kinds = {contender.name: contender.kind for contender in contenders}
        row.refused = dict.fromkeys(row.kinds, "the case does not fit into memory")
        return row
    row.chosen, row.amount = work.chosen, work.amount

    def check(result: Any) -> float:
        return largest_error(work.pick(result), expected)

    calls = {}
    for contender in contenders:
        prepare = partial(work.prepare, contender)
        checked = None if contender.kind == "bound" else check
        call = row.admit(contender.name, contender.kind, prepare, checked)
        if call is not None:
            calls[contender.name] = call
    timed = take_host_turns if case.table in ("host", "host_decode") else take_turns
    with torch.no_grad():
        row.timings = timed(calls, rounds)
    return row


def _facts(case: Case) -> dict[str, Any]:
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
    }
