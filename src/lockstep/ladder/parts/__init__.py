"""Pieces that several rungs share: rows in memory, the softmax of a row, the walk over tiles."""
