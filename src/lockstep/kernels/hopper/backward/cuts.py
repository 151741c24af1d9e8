"""Loops that are cut into spans, so that all programs end at about the same time.

Without a mask all loops take as long. 864 of them on 132 SMs take the time of 924: in the last
round 60 SMs have nothing to do. So the loops that are too many for whole rounds are cut, each into
a few spans of query tiles, which different programs take in different rounds. A span leaves its
sums of dk and dv in memory, in fp32 and in the order of registers, and the next one begins with
them. So all sums have the order, and the bits, that they have without a cut; which loops are cut
may depend on the whole call and on the GPU.

A span must not run beside the one before it, and dQ adds up key tiles in ascending order. So loops
are cut that are the last of the first heads: their spans come after all other loops of these heads.
The first span of all of them comes before one of the last rounds, when programs that have none yet
are the first to draw a ticket, the next before the next round, and the last behind all whole loops.
Whatever a span waits for has an earlier ticket.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from lockstep.kernels.hopper.common.accumulator import (
    ROWS,
    accumulator,
    as_registers,
    from_registers,
    zeros,
)
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.hopper.common.pieces import n_pieces, piece_start, piece_width

# What a span costs beside its steps, in steps, and each program of a head more at a time.
SPAN_STEPS = 2
LAG_STEPS = 0.6
# What has to be won, of all steps of a program. Steps of a build that can cut loops may be slower,
# and are where there is one that need not look for the last key.
LEAST_WON, LEAST_WON_WITHOUT_EDGE = 0.01, 0.05
MOST_SPANS = 8
# No ticket is as high.
NEVER = 1 << 30


class Cuts(NamedTuple):
    """Which loops of a launch are cut."""

    heads_at_once: int
    n_cut: int = 0  # loops
    first_cut: int = 0  # their first ticket, if none were cut
    cut_from: int = NEVER  # the ticket of the first span
    spans: int = 1
    span_tiles: int = 0


def plan_cuts(
    n_heads: int,
    kv_tiles: int,
    q_tiles: int,
    group: int,
    programs: int,
    at_once: int,
    least: float = LEAST_WON,
) -> Cuts:
    """The cuts that shorten a launch most, if any do by this `least` part of its steps. Loops are
    over `q_tiles` tiles of `group` query heads; tickets go round `at_once` heads, or half of them
    where there are no others."""
    rounds, n_cut = divmod(n_heads * kv_tiles, programs)
    best, most = Cuts(at_once), least * (rounds + 1) * q_tiles * group
    if n_cut == 0 or n_cut > n_heads * q_tiles * group:
        return best
    for heads in dict.fromkeys((at_once, triton.cdiv(n_heads, 2))):
        first_cut = heads * kv_tiles - n_cut
        if first_cut < 0 or heads > at_once:
            continue
        lag = LAG_STEPS * (programs / heads - programs / at_once)
        most_spans = min(rounds + 1 - triton.cdiv(first_cut, programs), MOST_SPANS)
        for spans in range(2, most_spans + 1):
            span_tiles = triton.cdiv(q_tiles, spans)
            if triton.cdiv(q_tiles, span_tiles) < spans:
                continue
            ends = triton.cdiv(n_cut * spans, programs)  # spans of a program
            won = (q_tiles - ends * span_tiles) * group - ends * SPAN_STEPS - lag
            if won > most:
                cut_from = (rounds - spans + 1) * programs
                best, most = Cuts(heads, n_cut, first_cut, cut_from, spans, span_tiles), won
    return best


@gluon.jit
def find_cut(ticket, sizes):
    """The ticket of the same loop if none were cut; the number of its span, -1 if it is whole, and
    its number among those that are cut."""
    programs = gl.num_programs(0)
    behind = ticket - sizes.cut_from
    span = gl.maximum(behind, 0) // (programs + sizes.n_cut)
    number = behind - span * (programs + sizes.n_cut)
    is_span = (behind >= 0) & (number < sizes.n_cut)
    whole = gl.where(behind < 0, ticket, sizes.cut_from + span * programs + number - sizes.n_cut)
    whole = gl.where(whole < sizes.first_cut, whole, whole + sizes.n_cut)
    ticket = gl.where(is_span, sizes.first_cut + number, whole)
    return ticket, gl.where(is_span, span, -1), number


# The address of a thread of a warpgroup that reads or writes 16 bytes beside its neighbour's. Were
# it computed outside, consumers would keep it in registers, from one loop to the next.
_OWN = (
    "{{ .reg .u32 thread; .reg .u64 own; mov.u32 thread, %tid.x; and.b32 thread, thread, 127; "
    "mad.wide.u32 own, thread, 16, {row}; "
)
_STORE = gl.constexpr(
    _OWN.format(row="$8")
    + "st.global.v4.f32 [own], {$4, $5, $6, $7}; "
    + " ".join(f"mov.u32 ${i}, 0;" for i in range(4))
    + " }"
)
_LOAD = gl.constexpr(_OWN.format(row="$4") + "ld.global.v4.f32 {$0, $1, $2, $3}, [own]; }")


@gluon.jit
def store_sums(block_ptr, pieces, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """A warpgroup: pieces of dk or dv, COLUMNS columns from FIRST on of those of both, for the next
    span."""
    for p in gl.static_range(len(pieces)):
        x = _by_thread(pieces[p])
        rows = _rows(block_ptr + ROWS * (FIRST + piece_start(COLUMNS, p)), x)
        gl.inline_asm_elementwise(
            _STORE, "=r,=r,=r,=r,f,f,f,f,l,l,l,l", [x, rows], gl.int32, is_pure=False, pack=4
        )


@gluon.jit
def load_sums(block_ptr, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """A warpgroup: what `store_sums` has stored."""
    pieces = ()
    for p in gl.static_range(n_pieces(COLUMNS)):
        piece_ptr = block_ptr + ROWS * (FIRST + piece_start(COLUMNS, p))
        pieces = pieces + (_load_piece(piece_ptr, piece_width(COLUMNS, p)),)  # noqa: RUF005
    return pieces


@gluon.jit
def _load_piece(piece_ptr, WIDTH: gl.constexpr):
    """An accumulator [ROWS, WIDTH]."""
    rows = _rows(piece_ptr, _by_thread(zeros(WIDTH)))
    x = gl.inline_asm_elementwise(
        _LOAD, "=f,=f,=f,=f,l,l,l,l", [rows], gl.float32, is_pure=False, pack=4
    )
    return gl.convert_layout(from_registers(x, WIDTH), accumulator(WIDTH), assert_trivial=True)


@gluon.jit
def _by_thread(x):
    """An accumulator [ROWS, n] as [n / 8, 512], in the order of its registers: a row is four of
    each thread."""
    x = as_registers(x)
    return x.reshape([x.shape[0] // 2, 512])


@gluon.jit
def _rows(piece_ptr, x):
    """For each number of x [n, 512], the address of its row."""
    row = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)), 1)
    column = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, x.type.layout)), 0)
    return (piece_ptr + (row * 512 + column * 0)).to(gl.int64)


@gluon.jit
def signal(address):
    """Every thread counts itself, behind what it has stored."""
    gl.inline_asm_elementwise(
        "red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;",
        "=r,l",
        [address],
        gl.int32,
        is_pure=False,
        pack=1,
    )
