"""Fold parts of one row together: the split-KV formula, one row at a time.

    m'  = max(m, m_i)
    acc = acc · e^(m − m') + acc_i · e^(m_i − m')
    l   = l · e^(m − m') + l_i · e^(m_i − m')            out = acc / l,  lse = m + log l

The wide path does the same to LANES rows at once (``tiles.fold_span``), with the same bits. A
finished result (out, lse) is a part with acc = out, m = lse, l = 1; so is a sink, of no value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu.call.arguments import argument, enter, take_ticket
from lockstep.kernels.cpu.call.tensors import KINDS
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled, kernel
from lockstep.kernels.cpu.compiler.simd import Emit, emitter
from lockstep.kernels.cpu.compiler.vectors import F32, WIDTH, f32, i64
from lockstep.numerics import LN2

INF, MINUS_INF = f32(np.inf), f32(-np.inf)
ROWS_PER_TICKET = 64


@emitter(i64, i64, f32)
def fill(e: Emit, address, n, value):
    """n floats of one value."""
    vectors = e.ir.sdiv(n, e.integer(WIDTH))
    values, done = e.splat(value), e.ir.mul(vectors, e.integer(WIDTH))
    with e.loop(vectors) as i:
        e.store(values, e.offset(address, i, 4 * WIDTH))
    with e.loop(e.ir.sub(n, done)) as i:
        e.store(value, e.offset(address, e.ir.add(done, i), 4))


@emitter(i64, i64, i64, f32, f32)
def _fold_vectors(e: Emit, acc, part, n, old, new):
    """acc = acc · old + part · new for n floats, a multiple of WIDTH."""
    weights = e.splat(old), e.splat(new)
    with e.loop(e.ir.sdiv(n, e.integer(WIDTH))) as i:
        at, fresh = e.offset(acc, i, 4 * WIDTH), e.load(e.offset(part, i, 4 * WIDTH))
        e.store(e.fma(e.load(at), weights[0], e.ir.fmul(fresh, weights[1])), at)


@compiled
def fold_row(acc, m, l, D, kind, part, part_m, part_l):
    """Fold a part into (acc, m, l); returns the new m and l. A part at address 0 has no value."""
    if part_l == f32(0.0):
        return m, l
    return fold_zeros_too(acc, m, l, D, kind, part, part_m, part_l)


@compiled
def fold_zeros_too(acc, m, l, D, kind, part, part_m, part_l):
    """The same with the same steps for a part that saw nothing, whose value has to be 0."""
    largest = scalar.maximum(part_m, m)
    base = scalar.pick(largest, MINUS_INF, f32(0.0), largest)
    old = scalar.exp(m - base)
    new = scalar.exp(part_m - base)
    size = 4 if kind == F32 else 2
    done = 0
    if kind == F32 and part != 0:
        done = D // WIDTH * WIDTH
        _fold_vectors(acc, part, done, old, new)
    for d in range(done, D):
        value = scalar.load_element(kind, part + size * d) if part != 0 else f32(0.0)
        at = acc + 4 * d
        scalar.store(scalar.fma(scalar.load(at), old, value * new), at)
    return largest, scalar.fma(l, old, part_l * new)


@compiled
def close_row(acc, l, D, kind, out):
    """Write out = acc / l."""
    total = scalar.pick(l, f32(0.0), f32(1.0), l)
    size = 4 if kind == F32 else 2
    for d in range(D):
        value = scalar.load(acc + 4 * d) / total + f32(0.0)
        scalar.store_element(kind, value, out + size * d)


@compiled
def write_statistics(m, l, lse, statistics):
    """Write lse = m + log l, and (m, l) for the backward unless their address is 0."""
    total = scalar.pick(l, f32(0.0), f32(1.0), l)
    scalar.store(m + scalar.log2(total) * f32(LN2), lse)
    if statistics != 0:
        # A row that sees no key has weights e^(s − ∞) = 0.
        scalar.store(scalar.pick(m, MINUS_INF, INF, m), statistics)
        scalar.store(total, statistics + 4)


@kernel
def _merge_rows(arguments):
    """parts [n_parts, n_rows, D], lses [n_parts, n_rows] → out [n_rows, D], lse [n_rows].

    Arguments: kind, n_parts, n_rows, D, parts, lses, out, lse.
    """
    acc = enter(arguments)
    kind, n_parts = argument(arguments, 0), argument(arguments, 1)
    n_rows, D = argument(arguments, 2), argument(arguments, 3)
    parts, lses = argument(arguments, 4), argument(arguments, 5)
    out, lse = argument(arguments, 6), argument(arguments, 7)
    size = 4 if kind == F32 else 2
    while True:
        first = ROWS_PER_TICKET * take_ticket(arguments)
        if first >= n_rows:
            return
        for row in range(first, min(first + ROWS_PER_TICKET, n_rows)):
            fill(acc, D, f32(0.0))
            m, l = MINUS_INF, f32(0.0)
            for i in range(n_parts):
                at = i * n_rows + row
                part, part_m = parts + size * at * D, scalar.load(lses + 4 * at)
                # What saw no key says nothing, whatever its out holds.
                part_l = f32(0.0) if part_m == MINUS_INF else f32(1.0)
                m, l = fold_row(acc, m, l, D, kind, part, part_m, part_l)
            close_row(acc, l, D, kind, out + size * row * D)
            write_statistics(m, l, lse + 4 * row, 0)


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine partial results (out [..., D], lse [...]) in the order given."""
    parts, part_lses = torch.stack(outs), torch.stack(lses).float()
    out, lse = torch.empty_like(parts[0]), torch.empty_like(part_lses[0])
    sizes = (KINDS[parts.dtype], len(outs), lse.numel(), out.shape[-1])
    tensors = (parts, part_lses, out, lse)
    arguments = (*sizes, *(tensor.data_ptr() for tensor in tensors))
    parallel(_merge_rows, arguments, 4 * out.shape[-1], parts.numel() * 8)
    return out, lse
