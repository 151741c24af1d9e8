"""Parts on their way from memory to the registers of the second kernel: many to shared memory at
once, and from there several at once. Left to itself, the compiler loads one, waits and folds it."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import copy_to_shared, gl, gluon

# Parts that come from shared memory at one time.
LOADED, HALVINGS = gl.constexpr(16), gl.constexpr(4)


@gluon.constexpr_function
def parts_layout(BATCH, ROWS, WARPS):
    """The layout of numbers [ROWS, BATCH] of parts, of which the warps of a row have some each."""
    return gl.BlockedLayout(
        [1, BATCH // (32 * WARPS // ROWS)], [1, 32], [ROWS, WARPS // ROWS], [1, 0]
    )


@gluon.jit
def copy_columns(
    smem, ptr, slot, group, first, count, n_spans, n_rows, column, WIDTH: gl.constexpr
):  # fmt: skip
    """Copy some of the WIDTH numbers of the rows of a group, from part `first` and from number
    `column` on, to shared memory [BATCH, ROWS, ·]; 0 behind the last part."""
    COLUMNS: gl.constexpr = smem.shape[2]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4],
        [128 // COLUMNS, 1, COLUMNS // 4],
        [gl.num_warps() // smem.shape[1], smem.shape[1], 1],
        [2, 1, 0],
    )
    of_parts: gl.constexpr = gl.SliceLayout(2, layout)
    i = gl.expand_dims(first + gl.arange(0, smem.shape[0], gl.SliceLayout(1, of_parts)), 1)
    row = group * smem.shape[1] + gl.arange(0, smem.shape[1], gl.SliceLayout(0, of_parts))
    row = gl.expand_dims(row, 0)
    at = (slot.to(gl.int64) * n_spans + i) * n_rows + row
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    d = column + gl.expand_dims(gl.expand_dims(d, 0), 0)
    mask = gl.expand_dims((i < count) & (row < n_rows), 2) & (d >= 0)
    copy_to_shared(smem, ptr + gl.expand_dims(at * WIDTH, 2) + d, mask=mask)


@gluon.jit
def load_parts(smem, layout: gl.constexpr):
    """Parts in shared memory [LOADED, ROWS, ·], LOADED tensors [ROWS, ·] of a layout, in which a
    thread has one number of each."""
    parts: gl.constexpr = gl.BlockedLayout(
        [LOADED, 1, 1], [1, 1, 32], [1, smem.shape[1], gl.num_warps() // smem.shape[1]], [2, 1, 0]
    )
    x = smem.load(parts).permute((1, 2, 0))
    found = (x.reshape([x.shape[0], x.shape[1], 1, LOADED]),)
    for _ in gl.static_range(HALVINGS):
        more = ()
        for i in gl.static_range(len(found)):
            x = found[i]
            x = x.reshape([x.shape[0], x.shape[1], 2, x.shape[3] // 2]).permute((0, 1, 3, 2))
            lower, upper = x.split()
            lower = lower.reshape([x.shape[0], x.shape[1], 1, x.shape[2]])
            upper = upper.reshape([x.shape[0], x.shape[1], 1, x.shape[2]])
            more = more + (lower, upper)  # noqa: RUF005, Gluon does not unpack
        found = more
    parts = ()
    for i in gl.static_range(LOADED):
        x = found[i].reshape([found[i].shape[0], found[i].shape[1]])
        parts = parts + (gl.convert_layout(x, layout, assert_trivial=True),)  # noqa: RUF005
    return parts


@gluon.jit
def load_numbers(smem, layout: gl.constexpr):
    """Numbers of parts in shared memory [ROWS, LOADED], LOADED tensors [ROWS] of a layout, in which
    a warp has one row."""
    numbers: gl.constexpr = gl.BlockedLayout(
        [1, LOADED], [1, 32], [smem.shape[0], gl.num_warps() // smem.shape[0]], [1, 0]
    )
    found = (smem.load(numbers).reshape([smem.shape[0], 1, LOADED]),)
    for _ in gl.static_range(HALVINGS):
        more = ()
        for i in gl.static_range(len(found)):
            x = found[i].reshape([found[i].shape[0], 2, found[i].shape[2] // 2]).permute((0, 2, 1))
            lower, upper = x.split()
            lower = lower.reshape([x.shape[0], 1, x.shape[1]])
            upper = upper.reshape([x.shape[0], 1, x.shape[1]])
            more = more + (lower, upper)  # noqa: RUF005
        found = more
    all_numbers = ()
    for i in gl.static_range(LOADED):
        x = found[i].reshape([found[i].shape[0]])
        all_numbers = all_numbers + (gl.convert_layout(x, layout),)  # noqa: RUF005
    return all_numbers


@gluon.jit
def store_numbers(smem, x):
    """Numbers x [ROWS, BATCH] of parts to shared memory [BATCH / LOADED, ROWS, LOADED]."""
    N: gl.constexpr = smem.shape[0]
    smem.store(x.reshape([x.shape[0], N, LOADED]).permute((1, 0, 2)))
