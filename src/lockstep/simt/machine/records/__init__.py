"""What a run leaves behind: counts, the record of a block, and the trace made of them."""
