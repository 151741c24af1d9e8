"""The shares of programs in all tiles of a dense call."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shares(NamedTuple):
    """Which tiles programs have, in units of `unit` tiles. `each` has so many units, and the first
    `rest` programs one more. From a program's first unit to that of the next it is `distance`, one
    more for the first `further` programs. From keys to those that come next, it is `step` KV heads
    and `step_b` sequences."""

    unit: Any
    each: Any
    rest: Any
    distance: Any
    further: Any
    step: Any
    step_b: Any

    @staticmethod
    def of(tiles_of_keys: int, keys: int, Hkv: int, programs: int, uneven: float) -> Shares:
        """Keys are dealt out, unless some program would have more than `uneven` times as many tiles
        as it has to have."""
        fewest = -(-keys * tiles_of_keys // programs)
        if keys >= programs and -(-keys // programs) * tiles_of_keys <= uneven * fewest:
            return Shares.dealt(tiles_of_keys, keys, Hkv, programs)
        return Shares.in_a_row(keys * tiles_of_keys, programs)

    @staticmethod
    def in_a_row(tiles: int, programs: int) -> Shares:
        """Each program has tiles one after the other, and all about as many."""
        each, rest = divmod(tiles, programs)
        return Shares(1, each, rest, each, rest, 1, 0)

    @staticmethod
    def dealt(tiles_of_keys: int, keys: int, Hkv: int, programs: int) -> Shares:
        """Each program has all tiles of every so-many-th keys, so that programs have neighbours at
        the same time, which lie beside each other in memory."""
        each, rest = divmod(keys, programs)
        step_b, step = divmod(programs, Hkv)
        return Shares(tiles_of_keys, each, rest, 1, 0, step, step_b)
