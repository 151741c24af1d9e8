"""Gradients for head dims up to 128: five matrix products per pair of tiles.

    call.py        from a problem to launches: `rows.py` before and after the kernel
    kernel.py      the kernel and its producer: dK, dV and the sums of dQ
    tile_queue.py  how a program's warps learn of the next key tile
    tiles.py       what its warps share
    steps.py       what both schedules of its consumers share
    together.py    consumers that take each step together: head dims above 64, and short loops
    apart.py       consumers that run apart: head dims up to 64
    dq_sums.py     the order in which programs add to dQ
    add_parts.py   warps that add to it
    last_part.py   sums that come back and leave as dQ

dQ of a row adds up key tiles in ascending order; dK and dV of a key add up query tiles in
descending order, for each of them, or each bunch of them under a window, the query heads that share
the key in ascending order; where queries are shared out (`shares.py`), shares follow each other. A
loop that is cut (`cuts.py`) has the order it has in one piece.
Tiles start at multiples of their size, counted in the own sequence. So no bit depends on the batch,
on the GPU or on how a launch happens to run.
"""
