"""Packed sequences, lined up longest first: a small kernel before the forward.

A program that draws a long tile when all others are through keeps the whole launch waiting. So the
sequences with the most keys come first, and the tiles drawn last are short. Only the device knows
the lengths, and it takes microseconds to sort them there.

A line is one tensor of int32:

    [0]                  the tickets drawn so far, beyond the first of every program
    [1 : 1 + B]          for each place in line, how many tiles of a head come before it
    [1 + B : 1 + 2B]     for each place, which sequence stands there
    [1 + 2B :]           for each ticket, the one its program had before (`usher.py`)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.driver import Launcher, launcher_of
from lockstep.problem import Tensors

SEQUENCES, OTHERS = 32, 128  # of a program, and how many of all others it looks at at once


@triton.jit(do_not_specialize=["cu_q_ptr", "cu_kv_ptr", "line_ptr", "B", "block_q"])
def line_up_kernel(
    cu_q_ptr,  # [B + 1]
    cu_kv_ptr,  # [B + 1]
    line_ptr,
    B,
    block_q,
    SEQUENCES: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Everyone counts the sequences in front of it, and their tiles."""
    mine = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    my_keys, _my_tiles = _sizes(cu_q_ptr, cu_kv_ptr, mine, B, block_q)
    place = tl.zeros([SEQUENCES], tl.int32)
    tiles_before = tl.zeros([SEQUENCES], tl.int32)
    for first in range(0, B, OTHERS):
        other = first + tl.arange(0, OTHERS)
        keys, tiles = _sizes(cu_q_ptr, cu_kv_ptr, other, B, block_q)
        longer = keys[None, :] > my_keys[:, None]
        earlier = (keys[None, :] == my_keys[:, None]) & (other[None, :] < mine[:, None])
        before = (longer | earlier).to(tl.int32)  # [SEQUENCES, OTHERS]
        place += tl.sum(before, 1)
        tiles_before += tl.sum(before * tiles[None, :], 1)
    tl.store(line_ptr + 1 + place, tiles_before, mask=mine < B)
    tl.store(line_ptr + 1 + B + place, mine, mask=mine < B)
    if tl.program_id(0) == 0:
        tl.store(line_ptr, 0)


@triton.jit
def _sizes(cu_q_ptr, cu_kv_ptr, sequence, B, block_q):
    """Keys and tiles of queries of sequences; -1 and 0 where there are none."""
    exists = sequence < B
    len_q = tl.load(cu_q_ptr + sequence + 1, mask=exists, other=0)
    len_q -= tl.load(cu_q_ptr + sequence, mask=exists, other=0)
    len_kv = tl.load(cu_kv_ptr + sequence + 1, mask=exists, other=-1)
    len_kv -= tl.load(cu_kv_ptr + sequence, mask=exists, other=0)
    return len_kv.to(tl.int32), tl.cdiv(len_q.to(tl.int32), block_q)


class Line:
    """What lines up the sequences of one problem: calling it returns the line.

    Without `sorts` there are as many programs as tickets, and the line stays empty."""

    def __init__(self, B: int, block_q: int, n_tickets: int, sorts: bool) -> None:
        self.sorts = sorts
        self.size = 1 + 2 * B + n_tickets if sorts else 1
        self.grid = (triton.cdiv(B, SEQUENCES), 1, 1)
        self.numbers = (B, block_q, SEQUENCES, OTHERS)
        self._launcher: Launcher | None = None

    def __call__(self, tensors: Tensors) -> Tensor:
        cu_q, cu_kv = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        assert cu_q is not None
        assert cu_kv is not None
        line = cu_q.new_empty(self.size, dtype=torch.int32)
        if not self.sorts:
            return line
        arguments = (cu_q, cu_kv, line, *self.numbers)
        if self._launcher is None:
            compiled = line_up_kernel[self.grid](*arguments)
            self._launcher = launcher_of(compiled, self.grid, arguments)
            return line
        stream = torch._C._cuda_getCurrentRawStream(cu_q.device.index)
        self._launcher(stream, (cu_q.data_ptr(), cu_kv.data_ptr(), line.data_ptr(), 0))
        return line
