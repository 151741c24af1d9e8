"""This machine's LLVM: from a module to machine code, and from machine code to an address."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
from llvmlite.binding import ffi
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


def _create(target: Target) -> Any:
    """LLVM's idea of a machine, for one thread: it changes while it is in use."""
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
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _create(host()))


def generate(module: llvm.ModuleRef, entry: str, target: Target | None = None) -> bytes:
    """Machine code, as an object file, of a module of which only ``entry`` is called.

    For this machine, where no other one is given. Several threads may do so at once, with modules
    of different contexts.
    """
    return _emit(module, entry, target or host(), as_object=True)


def generate_text(module: llvm.ModuleRef, entry: str, target: Target) -> str:
    """The same as assembly."""
    return _emit(module, entry, target, as_object=False).decode()


def _emit(module: llvm.ModuleRef, entry: str, chosen: Target, as_object: bool) -> bytes:
    target = _create(chosen)
    module.triple, module.data_layout = chosen.triple, str(target.target_data)
    _optimise(module, entry, target)
    with ffi.OutputString() as problem:
        emit = _without_lock("LLVMPY_TargetMachineEmitToMemory")
        buffer = emit(target, module, int(as_object), problem)
        if not buffer:
            raise RuntimeError(f"LLVM: {problem}")
    try:
        start = ffi.lib.LLVMPY_GetBufferStart(buffer)
        return ctypes.string_at(start, ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def _optimise(module: llvm.ModuleRef, entry: str, target: Any) -> None:
    parts = [f.name for f in module.functions if not f.is_declaration and f.name != entry]
    for name in parts:
        module.get_function(name).linkage = "linkonce_odr"
    tuning = llvm.create_pipeline_tuning_options(speed_level=OPTIMISATION)
    tuning.loop_vectorization = True
    passes = llvm.create_pass_builder(target, tuning)
    run = _without_lock("LLVMPY_RunNewModulePassManager")
    run(passes.getModulePassManager(), module, passes)
    # What was not inlined, and tables: objects of several kernels hold parts of the same name.
    for part in (*module.functions, *module.global_variables):
        if not part.is_declaration and part.name != entry:
            part.linkage = "internal"


def _without_lock(name: str) -> Any:
    """A function of LLVM's, in which a thread stays for long. llvmlite has one thread at a time in
    LLVM; LLVM itself takes several, if they have nothing in common."""
    function = getattr(ffi.lib, name)
    return getattr(function, "_cfn", function)


def load(code: bytes, entry: str) -> int:
    """The address of ``entry``, good for as long as this process lives."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(entry))
