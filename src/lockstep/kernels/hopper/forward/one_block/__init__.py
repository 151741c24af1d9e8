"""The forward of heads whose keys are one block.

kernel.py   the kernel
rows.py     its scores, weights and results
shares.py   how many tiles each program has of a dense call
tiles.py    which tiles of queries a program has, and of which heads
"""
