"""Constant time, audited: `lockstep audit timing`.

secrets.py       calls, and values of secret tensors that might be told apart
leaks.py, gpu_leaks.py   small kernels with a leak each, which the audits have to find
subjects.py      what is audited on a GPU
code.py          secrets followed through the machine code of the CPU kernels, with state.py,
                 aarch64.py, x86_64.py and x86_operands.py
gpu_code.py, triton_code.py, hopper_code.py   the same for GPU kernels, cross-compiled
replay.py, memcheck.py   CPU kernels as programs of their own, under Valgrind
counters.py      what a GPU executes and accesses, by Nsight Compute
cpu_counters.py  what CPU kernels execute and access, by Valgrind
clock.py, gpu_clock.py   times of classes of secrets, compared by Welch's t-test
cpu_layers.py, gpu_layers.py, outcome.py   all of it, layer by layer
cli.py           the command
"""
