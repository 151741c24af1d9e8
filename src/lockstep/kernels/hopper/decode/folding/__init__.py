"""Parts of spans, folded into results.

arrivals.py     by the program of the first kernel that hands out the last part of a head
fold.py         by a second kernel, where these are many
fold_plan.py    its sizes
units.py        which program of it folds what
part_batches.py how parts come to it, by way of shared memory
parts_in_registers.py  or to registers, as they do in the first kernel
"""
