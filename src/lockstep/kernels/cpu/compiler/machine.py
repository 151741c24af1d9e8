"""This machine's LLVM: from a module to machine code, and from machine code to an address."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
from numba.core.codegen import get_host_cpu_features, initialize_llvm

OPTIMISATION = 3


class Target(NamedTuple):
    """A machine that code is generated for, by LLVM's names."""

    triple: str
    cpu: str
    features: str = ""

    @property
    def architecture(self) -> str:
        return self.triple.split("-")[0]


def triple() -> str:
    """The kind of machine this process runs on, as LLVM names it."""
    initialize_llvm()
    return str(llvm.get_process_triple())


def identity() -> str:
    """All of the machine and of LLVM that machine code depends on."""
    return " ".join((*host(), llvmlite.__version__))


def host() -> Target:
    """The machine this process runs on."""
    return Target(triple(), llvm.get_host_cpu_name(), get_host_cpu_features())


@lru_cache(maxsize=8)
def _target(target: Target) -> Any:
    if target.triple != triple():
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    # The options numba has for code that is run at once.
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=target.features,
        opt=OPTIMISATION,
        reloc="static" if target.architecture.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


@lru_cache(maxsize=1)
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target(host()))


def generate(module: llvm.ModuleRef, entry: str, target: Target | None = None) -> bytes:
    """Machine code, as an object file, of a module of which only ``entry`` is called.

    For this machine, where no other one is given.
    """
    target = target or host()
    _optimise(module, entry, target)
    return bytes(_target(target).emit_object(module))


def generate_text(module: llvm.ModuleRef, entry: str, target: Target) -> str:
    """The same as assembly."""
    _optimise(module, entry, target)
    return str(_target(target).emit_assembly(module))


def _optimise(module: llvm.ModuleRef, entry: str, chosen: Target) -> None:
    target = _target(chosen)
    module.triple, module.data_layout = chosen.triple, str(target.target_data)
    parts = [f.name for f in module.functions if not f.is_declaration and f.name != entry]
    for name in parts:
        module.get_function(name).linkage = "linkonce_odr"
    tuning = llvm.create_pipeline_tuning_options(speed_level=OPTIMISATION)
    tuning.loop_vectorization = True
    passes = llvm.create_pass_builder(target, tuning)
    passes.getModulePassManager().run(module, passes)
    # What was not inlined, and tables: objects of several kernels hold parts of the same name.
    for part in (*module.functions, *module.global_variables):
        if not part.is_declaration and part.name != entry:
            part.linkage = "internal"


def load(code: bytes, entry: str) -> int:
    """The address of ``entry``, good for as long as this process lives."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(entry))
