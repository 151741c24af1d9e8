"""Where a rung keeps the matrices of attention, so that a picture shows Q, K, V, S, P, m, l, acc.

Shared arrays are matrices as they are. What lies in registers is spread over threads or warps; for
each kernel that keeps something there, REGISTERS says which element of the matrix each one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

# the part that an array plays, by its name in the kernels; the order is that of the pictures
ROLES = {
    "q_tile": "Q",
    "q_row": "Q",
    "q_part": "Q, 16 columns",
    "k_tile": "K",
    "v_tile": "V",
    "kv_part": "K or V, 16 columns",
    "scores": "S",
    "s_tile": "S",
    "s": "S",
    "weights": "P",
    "p_tile": "P",
    "m": "m",
    "l": "l",
    "sums": "l",
    "acc": "acc",
    "out": "out",
}

Held = Mapping[str, np.ndarray]
Layout = Callable[[Held], np.ndarray]
SIDE = 8  # of the threads of a split_kv block


def _by_thread(name: str, share: int = 1) -> Layout:
    """A value or row of values per thread, `share` neighbours holding the same."""
    return lambda held: held[name][::share]


def _sum_of(name: str, share: int) -> Layout:
    """A value per thread, `share` neighbours holding a part each."""
    return lambda held: held[name].reshape(-1, share).sum(axis=1)


def _fragments(name: str, rows: int, warp_rows: int, warp_cols: int) -> Layout:
    """Accumulator fragments name[0], name[1], ... of every warp, [warps, 16, 16] each: `rows` by
    as many columns as there are. Warps lie side by side along the columns first."""

    def layout(held: Held) -> np.ndarray:
        count = sum(key.startswith(f"{name}[") for key in held)
        parts = np.stack([held[f"{name}[{i}]"] for i in range(count)])
        parts = parts.reshape(rows, count // rows, warp_rows, warp_cols, 16, 16)
        return parts.transpose(2, 0, 4, 3, 1, 5).reshape(warp_rows * rows * 16, -1)

    return layout


def _block_tile_output(held: Held) -> np.ndarray:
    """A lane holds rows lane // 8, + 4, + 8, + 12 of its warp's 16, and W neighbouring columns of
    every 8 W."""
    acc = held["acc"]  # [threads, 4, D / 8]
    threads, _, own = acc.shape
    wide = min(own, 8)
    parts = acc.reshape(threads // 32, 4, 8, 4, own // wide, wide)  # warp, lane, lane, i, g, c
    return parts.transpose(0, 3, 1, 4, 2, 5).reshape(threads // 2, own * 8)


def _split_scores(held: Held) -> np.ndarray:
    """Thread (ty, tx) holds rows ty + 8 i and keys tx + 8 j."""
    s = held["s"]  # [threads, R, R]
    count = s.shape[1]
    parts = s.reshape(SIDE, SIDE, count, count)
    return parts.transpose(2, 0, 3, 1).reshape(SIDE * count, SIDE * count)


def _split_output(held: Held) -> np.ndarray:
    """Thread (ty, tx) holds rows ty + 8 i and columns 16 t + 2 tx, + 1."""
    acc = held["acc"]  # [threads, D / 16, R, 2]
    _, tiles, count, pair = acc.shape
    parts = acc.reshape(SIDE, SIDE, tiles, count, pair)
    return parts.transpose(3, 0, 2, 1, 4).reshape(SIDE * count, -1)


def _split_rows(name: str, total: bool) -> Layout:
    """Rows ty + 8 i: the same in all eight tx, or a part in each."""

    def layout(held: Held) -> np.ndarray:
        values = held[name]  # [threads, R]
        by_row = values.reshape(SIDE, SIDE, -1).transpose(2, 0, 1).reshape(-1, SIDE)
        return by_row.sum(axis=1) if total else by_row[:, 0]

    return layout


BLOCK_TILE_MMA: dict[str, Layout] = {
    "m": _by_thread("m", 2),
    "l": _sum_of("l", 2),
    "acc": _fragments("acc", 1, 4, 1),
}
# kernel -> array or group of fragments -> its matrix
REGISTERS: dict[str, dict[str, Layout]] = {
    "naive_softmax": {"m": _by_thread("m"), "l": _by_thread("l")},
    "row_per_thread": {name: _by_thread(name) for name in ("q_row", "scores", "m", "l", "acc")},
    "warp_mma": {
        "m": _by_thread("m", 4),
        "l": _sum_of("l", 4),
        "acc": _fragments("acc", 1, 4, 2),
    },
    "partial_attention": {
        "s": _split_scores,
        "m": _split_rows("m", False),
        "l": _split_rows("l", True),
        "acc": _split_output,
    },
    "block_tile": {"m": _by_thread("m", 2), "l": _sum_of("l", 2), "acc": _block_tile_output},
    "block_tile_mma": BLOCK_TILE_MMA,
    "persistent_mma": BLOCK_TILE_MMA,
    "partial_attention_mma": BLOCK_TILE_MMA,
}


def matrices(kernel: str, held: Held, spaces: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The contents of a block, as matrices by array name. Registers that no layout places are left
    out."""
    found = {name: held[name] for name in held if spaces[name] != "local"}
    for name, layout in REGISTERS.get(kernel, {}).items():
        if name in held or f"{name}[0]" in held:
            found[name] = layout(held)
    return found
