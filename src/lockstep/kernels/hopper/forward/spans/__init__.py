"""Query-invariant builds of the forward, which sum keys span by span.

steps.py   steps of a consumer through the blocks of a tile
flow.py    all tiles in one loop
total.py   where the products of spans that have ended are kept
"""
