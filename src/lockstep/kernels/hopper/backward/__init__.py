"""The Hopper backward.

call.py        what comes before and after the kernels
rows.py        statistics of each row, before the kernels; dQ from its sums, after them
sinks.py       the gradient of sinks
groups.py      what launches take together
turns.py       how many parts of dQ a query tile has, and waiting for them
sizes.py       sizes and masks of a launch; which tiles see each other
query_loop.py  key tiles, and the loop over the query tiles that see one
shares.py      queries that are shared out among several loops, and the sum of their dK and dV
cuts.py        loops in spans that go on with the same sums, where the last round is uneven
scores.py      from raw products to weights and to gradients of scores
nonfinite.py   values that are not finite, and rows that do not see them
narrow/        head dims up to 128: one kernel, five products
medium/        D from 129 to 192 with Dv up to 128: one kernel, five products
wide/          other head dims up to 256: two kernels, seven products
"""
