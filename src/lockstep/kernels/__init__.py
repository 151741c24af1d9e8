"""The kernels. Each lives in one place and describes itself with a `kernel.Kernel`."""
