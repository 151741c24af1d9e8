"""One call: its tensors as a record of addresses, and the threads that run it."""
