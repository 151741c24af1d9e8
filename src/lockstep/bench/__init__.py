"""`lockstep bench`: timings beside PyTorch and other libraries, and the tables made of them."""
