"""Audits: each claim in a kernel's descriptor, tested on this machine and these shapes."""
