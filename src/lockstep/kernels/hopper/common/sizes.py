"""Sizes that the hardware sets."""

from __future__ import annotations

ROWS = 64  # of a warpgroup's matrix product: the height of a wgmma
SHARED_BYTES = 227 * 1024  # of shared memory that a program may have on sm_90
