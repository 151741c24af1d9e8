"""The forward of heads whose keys stay in shared memory.

kernel.py   the kernel
head.py     where keys, values and rows of a program's tiles are
rows.py     weights, sums and results of rows
plan.py     which calls it runs, and the sizes of their blocks and tiles
launch.py   the launch of `kernel.py`
"""
