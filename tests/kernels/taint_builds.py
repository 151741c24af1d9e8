"""Kernels as machine code, and the leaks in it: which parameters are public, by name."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import create_function_from_signature

from lockstep.simt.taint import Leak, find_leaks

# Metadata, and what kernels count with: none of it holds secrets. `kv_lens` is not among them.
PUBLIC = [
    "cu_q",
    "cu_kv",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "bounds",
    "sequence_order",
    "ticket",
    "turn",
]
_LENGTHS = ("kv_lens",)


def leaks_of(kernel: Any, secret_lengths: bool = False) -> list[Leak]:
    """Leaks in a kernel that Triton compiled."""
    names = parameters_of(kernel)
    public = {f"{name}_ptr" for name in (*PUBLIC, *(() if secret_lengths else _LENGTHS))}
    return find_leaks(kernel.asm["cubin"], {i for i, name in enumerate(names) if name in public})


def parameters_of(kernel: Any) -> list[str]:
    """The names of the parameters of the machine code; a tensor map has more of them behind it."""
    found = []
    for name, kind in kernel.src.signature.items():
        if kind == "constexpr":
            continue
        found.append(name)
        if str(kind).startswith("tensordesc"):
            rank = str(kind).partition("[")[2].partition("]")[0].count(",") + 1
            found += [f"{name} size"] * rank + [f"{name} stride"] * rank
    return found


def compile_bound(bound: Any, capability: int) -> Any:
    """A launch with its arguments, compiled for a GPU that is not here."""
    function, arguments, options = bound.launch.kernel, bound.arguments, bound.launch.options
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound_arguments, specialization, chosen = bind(*arguments, **options)
    chosen, signature, constants, attributes = function._pack_args(
        backend, dict(options), bound_arguments, specialization, chosen
    )
    source_of = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    source = source_of(function, signature, constants, attributes)
    return triton.compile(source, target=target, options=chosen.__dict__)
