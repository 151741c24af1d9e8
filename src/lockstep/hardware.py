"""What hardware allows, where several parts of the package count with it."""

from __future__ import annotations

SHARED_BYTES = 227 * 1024
"""The shared memory that a thread block may have, on Hopper and its successors in data centres."""
