"""Which kernel runs what: a table made by asking every kernel's `supports`.

GPU kernels also ask for the device, `amx` for the processor. They are answered as an H100 would,
and a Xeon with AMX, so that the table is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from lockstep.dispatch import KERNELS, refusal
from lockstep.hardware import SHARED_BYTES
from lockstep.kernels import oracle
from lockstep.kernels.kernel import Kernel
from lockstep.problem import AttentionProblem, Options, Tensors, describe

# No device has this number, so nothing that is remembered by number is mistaken for the real one.
_DEVICE = -9
BOTH, FORWARD, NEITHER = "forward, backward", "forward", "–"


def block(_: Path) -> str:
    """The table in Markdown."""
    kernels = [kernel for kernel in KERNELS if kernel is not oracle.KERNEL]
    lines = [
        f"| | {' | '.join(kernel.name for kernel in kernels)} |",
        f"|---|{'---|' * len(kernels)}",
    ]
    with _machine():
        for name, problem in _problems():
            cells = " | ".join(_answer(kernel, problem) for kernel in kernels)
            lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def _answer(kernel: Kernel, problem: AttentionProblem) -> str:
    # A kernel refuses tensors that are not where it runs.
    on_each = (replace(problem, device_type=device) for device in ("cuda", "cpu"))
    for asked in on_each:
        if refusal(kernel, asked) is None:
            is_derivable = asked.has_gradient and refusal(kernel, asked, backward=True) is None
            return BOTH if is_derivable else FORWARD
    return NEITHER


def _problems() -> Iterator[tuple[str, AttentionProblem]]:
    """A problem for each row: bfloat16, 512 tokens, four query heads to a key head, head dim 128,
    unless the row says otherwise."""
    base = _dense()
    for name, dtype in (
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.float32),
        ("float64", torch.float64),
    ):
        yield f"`{name}`", replace(base, dtype=dtype)
    for D, Dv in ((64, 64), (72, 72), (100, 100), (192, 128), (256, 256), (512, 512), (1000, 1000)):
        yield f"D {D}, Dv {Dv}", replace(base, D=D, Dv=Dv, scale=D**-0.5)
    yield "`causal`, `window`", replace(base, causal=True, window_left=100)
    yield "`softcap`", replace(base, softcap=30.0)
    yield "`sinks`", replace(base, has_sinks=True)
    yield "`bias`", replace(base, bias_shape=(1, 1, 512, 512), bias_dtype=torch.bfloat16)
    yield "`kv_lens`", replace(base, has_kv_lens=True)
    yield "`kv_starts`", replace(base, has_kv_starts=True)
    yield "`alibi_slopes`", replace(base, has_alibi_slopes=True)
    yield "one query", replace(base, Sq=1)
    yield "`query_invariant`", replace(base, query_invariant=True)
    yield "`constant_time`", replace(base, constant_time=True)
    yield "`attention_varlen`", _varlen()
    yield "`attention_paged`, 512 queries", replace(_paged(), Sq=512)
    yield "`attention_paged`, one query", _paged()
    yield "`attention_paged`, `kv_starts`", replace(_paged(), has_kv_starts=True)
    yield "`attention_varlen`, `page_table`", replace(_paged(), layout="varlen_paged")


def _dense() -> AttentionProblem:
    q, k = (torch.empty(2, h, 512, 128, dtype=torch.bfloat16, device="meta") for h in (8, 2))
    return describe(Tensors(q, k, k), Options())


def _varlen() -> AttentionProblem:
    q, k = (torch.empty(512, h, 128, dtype=torch.bfloat16, device="meta") for h in (8, 2))
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    return describe(Tensors(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets), Options())


def _paged() -> AttentionProblem:
    q = torch.empty(2, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(20, 16, 2, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(2, 10, dtype=torch.int32, device="meta")
    lens = torch.empty(2, dtype=torch.int32, device="meta")
    return describe(Tensors(q, pages, pages, kv_lens=lens, page_table=table), Options())


@contextmanager
def _machine() -> Iterator[None]:
    """torch.cuda answers as with a Hopper GPU, and nothing is in the way of matrix units."""
    properties = SimpleNamespace(shared_memory_per_block_optin=SHARED_BYTES)
    with (
        mock.patch("torch.cuda.current_device", return_value=_DEVICE),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("lockstep.kernels.cpu.compiler.matrix.refusal", return_value=None),
    ):
        yield
