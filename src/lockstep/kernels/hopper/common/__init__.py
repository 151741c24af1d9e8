"""Functions that the kernels of the Hopper path share.

gluon_shim.py      Gluon's names, whatever the version of Triton
requirements.py    the GPU, the packages and the dtypes that all of them need
sizes.py           sizes that the hardware sets
accumulator.py     accumulators of a warpgroup: layout, registers, products
scores.py          units of scores, and their cap
softmax.py         from scores to weights, and from sums to results
capped_weights.py  the same weights under a cap
pieces.py          columns that are no power of two, cut into pieces that are
finite_words.py    which of two 16-bit numbers in a word are finite
thread_numbers.py  numbers that each of the threads which share a row has
exact_weights.py   large weights that are multiplied without being rounded
exact_spans.py     the same in spans
rescale.py         products times factors that are mostly 1
query_invariance.py  which query-invariant calls the kernels take, and the size of spans
spans.py           what such calls do at the ends of spans
shared_memory.py   tiles, numbers and barriers in shared memory
ring.py            rings of tiles between a producer and consumers
mailbox.py         numbers that one warp sends to others
named_barriers.py  the hardware's barriers, by number
copy_engine.py     tensor maps
tensor_maps.py     rows in tensor maps, and tiles that the copy engine loads or stores box by box
pages.py           keys and values in pages
division.py        divisions in few instructions
"""
