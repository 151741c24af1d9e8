"""The smaller passes of the backward: delta per row, and the gradients of sinks and bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu.arithmetic.block import ROWS, SPAN, carve_block, zeros_for
from lockstep.kernels.cpu.arithmetic.memory import gather_columns
from lockstep.kernels.cpu.arithmetic.merge import MINUS_INF, fill
from lockstep.kernels.cpu.arithmetic.rescore import (
    carve_gradient,
    gradient_at,
    load_keys,
    load_rows,
    score_gradients,
)
from lockstep.kernels.cpu.arithmetic.tiles import ROW, add_vectors, dot_columns
from lockstep.kernels.cpu.arithmetic.wide import CHAIN, tile_bounds
from lockstep.kernels.cpu.call.arguments import argument, enter, take_ticket
from lockstep.kernels.cpu.call.record import of_sequence, row_address, split_row, variants
from lockstep.kernels.cpu.call.tensors import DENSE, Described, address, strided
from lockstep.kernels.cpu.call.threads import parallel
from lockstep.kernels.cpu.compiler import scalar
from lockstep.kernels.cpu.compiler.compile import compiled
from lockstep.kernels.cpu.compiler.vectors import LANES, f32

if TYPE_CHECKING:
    from lockstep.kernels.kernel import Tensors
    from lockstep.problem import AttentionProblem

# Rows whose deltas a thread takes at a time: all LANES divide them.
DELTAS = 96
# Two elements have to be laid out for one multiply-add: that takes as long as this many.
DELTA_WORK = 16
# Sums that a thread rounds before it asks for more.
ROUNDED_AT_ONCE = 4096


@compiled
def _gather_tile(call, tensor, b, h, row, n, rows, to):
    """Rows row … row + n of an output-shaped tensor as columns; the last fills up the lanes."""
    first = of_sequence(call.q_first, b)
    for lane in range(LANES):
        g, q_idx = split_row(call, b, row + min(lane, n - 1))
        address = row_address(tensor, first, b, h * call.G + g, q_idx)
        scalar.store_word(address, rows + 8 * lane)
    gather_columns(call.kind, rows, LANES, call.Dv, to, ROW)


@variants
def run_deltas(call_at):
    def run(arguments):
        """delta = Σ_d dO · O − dlse; a ticket is DELTAS rows of a sequence and KV head.

        Arguments: call, gradient, how many tickets a head has at most.
        """
        call, grad = call_at(argument(arguments, 0)), gradient_at(argument(arguments, 1))
        block = carve_block(enter(arguments), call.D, call.Dv)
        work = carve_gradient(block.end, call.D, call.Dv)
        while True:
            ticket, per_head = take_ticket(arguments), argument(arguments, 2)
            if ticket >= call.B * call.Hkv * per_head:
                return
            head, begin = ticket // per_head, ticket % per_head * DELTAS
            b, h = head // call.Hkv, head % call.Hkv
            rows = call.G * of_sequence(call.q_len, b)
            first = of_sequence(call.q_first, b)
            for row in range(begin, min(begin + DELTAS, rows), LANES):
                n = min(LANES, rows - row)
                _gather_tile(call, call.out, b, h, row, n, block.q_rows, work.dout)
                _gather_tile(call, grad.dout, b, h, row, n, block.q_rows, work.dout_t)
                dot_columns(work.dout, work.dout_t, min(call.Dv, CHAIN), work.delta)
                # Chains as in dP: where one key has all the weight, dP and delta are the same.
                for d in range(CHAIN, call.Dv, CHAIN):
                    at, dims = d * ROW, min(CHAIN, call.Dv - d)
                    dot_columns(work.dout + at, work.dout_t + at, dims, work.m)
                    add_vectors(work.delta, work.m, LANES)
                for lane in range(n):
                    g, q_idx = split_row(call, b, row + lane)
                    head, delta = h * call.G + g, scalar.load(work.delta + 4 * lane)
                    if grad.dlse.address != 0:
                        delta -= scalar.load(row_address(grad.dlse, first, b, head, q_idx))
                    scalar.store(delta, row_address(grad.delta, first, b, head, q_idx))

    return run


def row_deltas(
    problem: AttentionProblem, described: Described, record: np.ndarray, scratch: int
) -> None:
    """Fill the tensor that ``record`` names delta."""
    work = DELTA_WORK * sum(described.q_len) * problem.Hq * problem.Dv
    per_head = -(-max(described.q_len, default=0) * problem.Hq // problem.Hkv // DELTAS)
    arguments = (described.address, address(record), per_head)
    parallel(run_deltas[problem.constant_time], arguments, scratch, work)


@variants
def _run_sinks(call_at):
    def run(arguments):
        """sums [Hq] = −Σ e^(sink − m) / l · delta over all rows of a head, in order, in float64.

        Arguments: call, gradient, sums.
        """
        call, grad = call_at(argument(arguments, 0)), gradient_at(argument(arguments, 1))
        sums = argument(arguments, 2)
        while True:
            head = take_ticket(arguments)
            if head >= call.Hkv * call.G:
                return
            at = sums + 8 * head
            for b in range(call.B):
                first = of_sequence(call.q_first, b)
                for q_idx in range(of_sequence(call.q_len, b)):
                    statistics = row_address(call.statistics, first, b, head, q_idx)
                    m, l = scalar.load(statistics), scalar.load(statistics + 4)
                    delta = scalar.load(row_address(grad.delta, first, b, head, q_idx))
                    sink = scalar.load(call.sinks + 4 * head)
                    share = -scalar.exp(sink - m) / l * delta
                    scalar.add_f64(scalar.pick(sink, MINUS_INF, f32(0.0), share), at)

    return run


@variants
def _run_rounding(call_at):
    def run(arguments):
        """Arguments: sums [n] float64, results [n] float32, n."""
        sums, results, n = argument(arguments, 0), argument(arguments, 1), argument(arguments, 2)
        while True:
            first = ROUNDED_AT_ONCE * take_ticket(arguments)
            if first >= n:
                return
            for i in range(first, min(first + ROUNDED_AT_ONCE, n)):
                scalar.store(scalar.load_f64(sums + 8 * i), results + 4 * i)

    return run


def _rounded(sums: Tensor, dtype: torch.dtype, constant_time: bool) -> Tensor:
    """Contiguous float64 sums in another dtype, by way of float32, whatever torch does to
    subnormal numbers."""
    results = torch.empty(sums.shape, dtype=torch.float32)
    rounding = _run_rounding[constant_time]
    parallel(rounding, (sums.data_ptr(), results.data_ptr(), sums.numel()), 0, sums.numel())
    return results.to(dtype)


def sink_gradient(
    problem: AttentionProblem, tensors: Tensors, described: Described, record: np.ndarray
) -> Tensor:
    """d sinks [Hq], in the dtype of the sinks."""
    sums = np.zeros(tensors.sinks.numel())
    work = sum(described.q_len) * sums.size * 8
    run = _run_sinks[problem.constant_time]
    parallel(run, (described.address, address(record), address(sums)), 0, work)
    return _rounded(torch.from_numpy(sums), tensors.sinks.dtype, problem.constant_time)


@compiled
def _add_to_bias(call, grad, block, work, b, t, n_rows, first, begin, end):
    """Add dS of one tile to the bias elements it came through."""
    length = of_sequence(call.kv_len, b)
    for lane in range(min(LANES, n_rows - t * LANES)):
        i = t * LANES + lane
        head = scalar.load_word(block.q_head + 8 * i)
        q_idx = scalar.load_word(block.q_idx + 8 * i)
        column = of_sequence(call.kv_first, b) + first
        row = row_address(grad.dbias, 0, b, head, q_idx) + column * grad.dbias_col
        for kv in range(begin, min(end, length - first)):
            ds = scalar.load(work.dp + kv * ROW + 4 * lane)
            if grad.dbias_wide:
                scalar.add_f64(ds, row + kv * grad.dbias_col)
            else:
                scalar.add_f32(ds, row + kv * grad.dbias_col)


@compiled
def _head_bias(call, grad, block, work, b, head, q0, q1):
    """dS of queries q0 … q1 of one head, added to the bias gradient."""
    h, g = head // call.G, head % call.G
    offset = g * of_sequence(call.q_len, b)
    for row0 in range(offset + q0, offset + q1, ROWS):
        n_rows = min(ROWS, offset + q1 - row0)
        n_tiles = load_rows(call, grad, block, work, b, h, row0, n_rows)[0]
        length = of_sequence(call.kv_len, b)
        for first in range(0, length, SPAN):
            n = min(SPAN, length - first)
            load_keys(call, block, work, b, h, first, n)
            for t in range(n_tiles):
                begin, end, bounds = tile_bounds(call, block, t, first, n)
                if begin < end:
                    score_gradients(call, block, work, b, t, first, begin, end, bounds, 0, 0)
                    _add_to_bias(call, grad, block, work, b, t, n_rows, first, begin, end)


@variants
def _run_bias(call_at):
    def run(arguments):
        """A ticket is one (batch, head, query block) of the bias; what shares it is added in order.

        Arguments: call, gradient, batch and heads of the bias, query blocks.
        """
        call, grad = call_at(argument(arguments, 0)), gradient_at(argument(arguments, 1))
        B, Hq, n_blocks = argument(arguments, 2), argument(arguments, 3), argument(arguments, 4)
        block = carve_block(enter(arguments), call.D, call.Dv)
        work = carve_gradient(block.end, call.D, call.Dv)
        fill(block.zero_row, zeros_for(call.D, call.Dv), f32(0.0))
        while True:
            ticket = take_ticket(arguments)
            if ticket >= B * Hq * n_blocks:
                return
            bias_b, bias_h = ticket // n_blocks // Hq, ticket // n_blocks % Hq
            q0 = ticket % n_blocks * ROWS
            for b in range(bias_b, call.B, B):
                q1 = of_sequence(call.q_len, b)
                q1 = min(q0 + ROWS, q1) if n_blocks > 1 else q1
                for head in range(bias_h, call.Hkv * call.G, Hq):
                    _head_bias(call, grad, block, work, b, head, q0, q1)

    return run


def bias_gradient(
    problem: AttentionProblem,
    tensors: Tensors,
    described: Described,
    record: np.ndarray,
    scratch: int,
) -> Tensor:
    """d bias in the shape and dtype of the bias; broadcast dims are summed in float64."""
    shape = tensors.bias.shape
    whole = (problem.B, problem.Hq, problem.Sq, problem.Skv)
    exact = shape == whole
    sums = torch.zeros(shape, dtype=torch.float32 if exact else torch.float64)
    expanded = sums.expand(whole)
    record["dbias"] = strided(expanded, DENSE)
    record["dbias_col"] = expanded.stride(3) * expanded.element_size()
    record["dbias_wide"] = not exact
    if 0 in whole:
        return sums.to(tensors.bias.dtype)
    n_blocks = -(-problem.Sq // ROWS) if shape[2] == problem.Sq else 1
    work = problem.B * problem.Hq * problem.Sq * problem.Skv * (problem.D + problem.Dv)
    arguments = (described.address, address(record), shape[0], shape[1], n_blocks)
    parallel(_run_bias[problem.constant_time], arguments, scratch, work)
    dtype = tensors.bias.dtype
    return sums.to(dtype) if exact else _rounded(sums, dtype, problem.constant_time)


KERNELS = (run_deltas, _run_sinks, _run_rounding, _run_bias)
