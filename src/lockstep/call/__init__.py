"""The way of a call to a kernel: operators, what is kept for the next call, transforms."""
