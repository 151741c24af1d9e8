"""The products of a consumer, on their way to the tensor cores and back."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, warpgroup_mma_wait
from lockstep.kernels.hopper.common.pieces import (
    await_all,
    issue_products,
    issue_transposed,
    n_pieces,
    scale_all,
)
from lockstep.kernels.hopper.forward.pingpong import await_turn, pass_turn


@gluon.jit
def issue_scores(c: gl.constexpr, program, q, i):
    """Q·Kᵀ of the i-th block on its way to the tensor cores."""
    if program.build.PINGPONG:
        await_turn(c, i)
    return issue_transposed(q, program.k, i, program.schedule.BLOCK_KV)


@gluon.jit
def issue_product(c: gl.constexpr, program, p, acc, i, use_acc=True, alpha=None):
    """P·V of the i-th block behind it; the next consumer may have the tensor cores then. Where acc
    is yet to be rescaled, it is by `alpha`."""
    program.await_values(i)
    if program.build.RESCALES_LATE:
        acc = scale_all(acc, alpha)
    acc = issue_products(p, program.v, i, acc, use_acc)
    if program.build.PINGPONG:
        pass_turn((c + 1) % program.build.CONSUMERS, i)
    return acc


@gluon.jit
def await_product(program, acc, weights, next_block, expected):
    """acc of a product under way, and the weights computed meanwhile.

    ptxas moves the wait above the exponentials unless a block boundary stands between: waiting for
    the next block of K, which is needed next anyway, is one. The weights go through the wait
    because the left operand, which the product reads, gives them its registers."""
    N: gl.constexpr = n_pieces(program.v.COLUMNS)
    program.k.wait(next_block, pred=expected)
    done = warpgroup_mma_wait(0, deps=acc + (weights,))  # noqa: RUF005, Gluon does not unpack
    return done[:N], done[N]


@gluon.jit
def await_product_between(program, acc, weights, scores, next_block, expected):
    """The same with scores of which weights are yet to be computed."""
    N: gl.constexpr = n_pieces(program.v.COLUMNS)
    program.k.wait(next_block, pred=expected)
    done = warpgroup_mma_wait(0, deps=acc + (weights, scores))  # noqa: RUF005
    return done[:N], done[N], done[N + 1]


@gluon.jit
def end_tile(program, tiles, last, p, acc, use_acc, alpha):
    """The product of the last block of a tile by itself: acc, and the first bad key."""
    program.await_values(last)
    if program.build.RESCALES_LATE:
        acc = scale_all(acc, alpha)
    if program.build.SPAN or program.build.ONE_LOOP:
        acc = issue_products(p, program.v, last, acc, use_acc)
    else:
        acc = issue_products(p, program.v, last, acc)
    acc = await_all(acc)
    bad = program.first_bad_key(tiles)
    program.v.release(last)
    return acc, bad
