"""Tiles of the Hopper forward: their order, and the warp that hands them out.

schedule.py        which tile is next, and which keys it sees
pairs.py           its orders that have pairs of tiles
tile.py            where a tile lies
packed_sequences.py  which packed sequence has a tile
scheduler.py       the scheduler warp, which determines the next tile
tile_queue.py      how it tells the other warps
failed_tiles.py    which tiles have rows that need a second pass
sequence_order.py  packed sequences, longest first: a small kernel before the forward
tiling.py          how many tiles there are, and in which order
part_rule.py       how many parts the keys of a tile have
tile_parts.py      which part of its keys a tile has
part_memory.py     where the results of parts go
"""
