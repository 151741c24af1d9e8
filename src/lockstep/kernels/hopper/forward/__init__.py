"""The Hopper forward.

kernel.py          the kernel and its producer
schedule.py        which tile next, and which keys it sees
scheduler.py       the scheduler warp, which tells the others through tile_queue.py
sequence_order.py  packed sequences, longest first
channel.py         tiles between producer and consumers; turns between consumers
program.py         what the warps of a program share
consumer.py        a warpgroup that computes
softmax.py         from scores to weights
second_pass.py     rows that the first pass could not compute, once more
plan.py            tile sizes by head dim
launch.py          from a problem to a launch
"""
