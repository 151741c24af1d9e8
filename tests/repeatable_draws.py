"""Draws of hypothesis that depend on a test alone. Import this where a test draws.

By default hypothesis mixes constants into its draws that it finds in the modules imported so far:
so what a test draws, `derandomize` or not, depends on the tests that ran before it.
"""

from __future__ import annotations

from hypothesis.internal.conjecture import providers

# What hypothesis has found before anything is looked at.
providers._get_local_constants = lambda: providers._local_constants
