"""The Hopper forward.

kernel.py          the kernel and its producer
program.py         what the warps of a program share
schedule.py        which tile is next, and which keys it sees
scheduler.py       the scheduler warp, which determines the next tile
tile_queue.py      how it tells the other warps
sequence_order.py  packed sequences, longest first: a small kernel before this one
consumer.py        a warpgroup that computes
products.py        its products, on their way to the tensor cores and back
steps.py           its steps through the blocks of a tile
flow.py            all tiles in one loop, for causal calls with few keys
span_steps.py      the same in query-invariant builds
total.py           where these keep the products of spans that have ended
pingpong.py        turns of the consumers at the tensor cores
second_pass.py     rows that the first pass could not compute, once more
failed_tiles.py    which tiles have such rows
constant_time.py   the softmax of constant-time builds
cleaning.py        values that are not finite, in these builds
few_keys.py        another kernel, for heads with few keys
one_block.py       and one for heads whose keys are one block
narrow_window.py   and one for narrow windows of grouped heads
window_chunk.py    which queries and keys a program of it has, and their way to shared memory
window_memory.py   how they lie there
window_tiles.py    scores, weights, sums and results of its tiles
window_plan.py     which calls it takes, sizes of its tiles
window_launch.py   and its launch
plan.py            tile sizes by head dim
tiling.py          how many tiles there are, and in which order
shapes.py          tensor maps without their tensors
launch.py          from a problem to a launch
"""
