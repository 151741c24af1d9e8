"""Limits of hardware that several parts of the package use."""

from __future__ import annotations

SHARED_BYTES = 227 * 1024
"""The shared memory that a thread block may have, on Hopper and its successors in data centres."""
