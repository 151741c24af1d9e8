"""The Hopper backward.

call.py        what comes before and after the kernels of narrow and of wide heads
rows.py        m, log2 l and delta of each row before the kernels; dQ from its sums behind them
query_loop.py  which query tiles see a key tile
products.py    what warpgroups compute with a tile
nonfinite.py   values that are not finite, and rows that do not see them
narrow/        head dims up to 128: one kernel, five products
wide/          head dims from 129 to 256: two kernels, seven products
"""
