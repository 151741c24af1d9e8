"""The records of a run: counts, the record of a block, and the trace made of them."""
