"""The Hopper forward.

kernel.py          the kernel and its producer
program.py         what the warps of a program share
sending.py         what the producer sends of a tile
scheduling/        which tile is next, and which keys it sees
consumer.py        a warpgroup that computes
products.py        its products, on their way to the tensor cores and back
stores.py          its results, on their way to memory
key_parts.py       results of tiles whose keys several programs share
steps.py           its steps through the blocks of a tile
flow.py            all tiles in one loop, for calls with few keys
spans/             steps and loops of query-invariant builds
skipping.py        blocks that pass a consumer by
weights.py         weights and maxima of scores, capped late or not
pingpong.py        turns of the consumers at the tensor cores
second_pass.py     rows that the first pass could not compute, once more
constant_time.py   the softmax of constant-time builds
constant_time_flow.py   `flow.py` with that softmax
cleaning.py        values that are not finite, in these builds
few_keys.py        another kernel, for heads with few keys
one_block/         and one for heads whose keys are one block
kept_keys/         and one for wide heads with few keys, which stay in shared memory
narrow_window/     and one for narrow windows of grouped heads
aligned_rows.py    keys and values copied to rows that begin with a sector
page_rule.py       which sequences in pages are this kernel's, and which decode's
ragged_pages.py    long sequences of ragged queries in pages, in calls of decode
idle_windows.py    windows that hide no key
groups.py          which calls have tiles that the heads of a group share
grouped_rows.py    rows of such tiles
plan.py            tile sizes by head dim
shapes.py          tensor maps without their tensors
launch.py          from a problem to a launch
"""
