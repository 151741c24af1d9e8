"""Query-invariant decode, which has the bits of the query-invariant forward.

consumer.py    the warpgroup that computes
fold.py        the second kernel
first_keys.py  the keys that all weights of a row are relative to
"""
