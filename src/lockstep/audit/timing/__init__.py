"""Constant time, audited: `lockstep audit timing`.

secrets.py   calls, and values of secret tensors that might be told apart
leaks.py     small kernels with a leak each, which the audits have to find
code.py      secrets followed through the machine code of the CPU kernels
clock.py     times of two classes of secrets, compared by Welch's t-test
cli.py       the command
"""
