"""The Hopper forward.

kernel.py          the kernel and its producer
program.py         what the warps of a program share
schedule.py        which tile is next, and which keys it sees
scheduler.py       the scheduler warp, which tells the other warps through tile_queue.py
sequence_order.py  packed sequences, longest first: a small kernel before this one
consumer.py        a warpgroup that computes
products.py        its products, on their way to the tensor cores and back
span_steps.py      its steps in query-invariant builds
total.py           where these keep the products of spans that have ended
pingpong.py        turns of the consumers at the tensor cores
second_pass.py     rows that the first pass could not compute, once more
failed_tiles.py    which tiles have such rows
plan.py            tile sizes by head dim
launch.py          from a problem to a launch
"""
