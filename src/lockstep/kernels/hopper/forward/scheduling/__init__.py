"""Tiles of the Hopper forward: their order, and the warp that hands them out.

schedule.py        which tile is next, and which keys it sees
tile.py            where a tile lies
packed_sequences.py  which packed sequence has a tile
scheduler.py       the scheduler warp, which determines the next tile
tile_queue.py      how it tells the other warps
failed_tiles.py    which tiles have rows that need a second pass
sequence_order.py  packed sequences, longest first: a small kernel before the forward
tiling.py          how many tiles there are, and in which order
"""
