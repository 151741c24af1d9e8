"""Gradients for head dims up to 256: two passes, seven matrix products per pair of tiles.

    call.py      from a problem to launches: `rows.prepare_rows`, then the two kernels
    keys.py      dK and dV, by key tile: four products per tile
    queries.py   dQ, by query tile: three products per tile
    key_loop.py  which key tiles a query tile sees
    tiles.py     tiles of up to 256 columns, and products of them

dK and dV of a key add up query heads in ascending order and the query tiles of each in descending
order, or those of a share (`shares.py`), then shares; dQ of a row adds up key tiles in ascending
order.
Tiles start at multiples of their size, counted in the own sequence. So no bit depends on the batch,
on the GPU or on how a launch happens to run.
"""
