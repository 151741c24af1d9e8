"""The Hopper forward of narrow windows of grouped heads.

kernel.py   the kernel
chunk.py    which queries and keys a program has, and their way to shared memory
memory.py   how they lie there
tiles.py    scores, weights, sums and results of its tiles
plan.py     which calls it takes, sizes of its tiles
launch.py   its launch
"""
