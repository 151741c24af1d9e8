"""Gradients for D from 129 to 192 with Dv up to 128: five matrix products per pair of tiles, as for
narrow heads, but gradients of scores of 32 queries at a time.

    call.py      from a problem to three launches: `rows.py` before and after the kernel
    kernel.py    the kernel and its producer: dK, dV and the sums of dQ
    tiles.py     what its warps share
    consumer.py  the steps of its consumers
    dq_sums.py   the order in which programs add to dQ

The order of all sums is that of narrow heads.
"""
