"""From Python functions to one LLVM module per kernel: numba types and lowers, nothing more.

By itself numba optimises each function and generates its machine code, and optimises it again in
every function that calls it. A kernel is made of seventy of them: here they stay what numba
lowered them to until they stand in one module, which is optimised once (``machine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.core.codegen import CodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.typed_passes import (
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

from lockstep.kernels.cpu.compiler import shortcuts

# No reference counting: kernels hold no Python or numba objects, only addresses. No wrappers
# either: parts of a kernel are not called from Python.
OPTIONS = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
# What numba does to a function, less what these have no use for: closures, generators, inlining
# in Python, arrays, and the ends of the lives of variables, at which objects would be released.
PASSES = (
    TranslateByteCode,
    FixupArgs,
    RewriteSemanticConstants,
    DeadBranchPrune,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
    shortcuts.Lowering,
    NoPythonBackend,
)


class _Lowered(CodeLibrary):
    """The IR of one function, and the libraries of those it calls."""

    _finalized = True

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.modules: list[ir.Module] = []
        self.callees: dict[CodeLibrary, None] = {}  # in the order of the calls

    def create_ir_module(self, name: str) -> ir.Module:
        return self._codegen._create_empty_module(name)

    def add_ir_module(self, ir_module: ir.Module) -> None:
        self.modules.append(ir_module)

    def add_linking_library(self, library: CodeLibrary) -> None:
        if library is not rtsys.library:
            self.callees[library] = None

    def everything(self) -> Iterator[CodeLibrary]:
        """This library and all it needs, each once."""
        found: dict[CodeLibrary, None] = {}
        pending: list[CodeLibrary] = [self]
        while pending:
            library = pending.pop()
            if library not in found:
                found[library] = None
                if isinstance(library, _Lowered):
                    pending += library.callees
        return iter(found)

    # numba asks for an address and sets an environment, which only Python callers would use.

    @property
    def codegen(self) -> _Lowered:
        return self

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    def set_env(self, name: str, environment: Any) -> None: ...

    def finalize(self) -> None: ...

    def get_function(self, name: str) -> Any:
        raise NotImplementedError

    @cached_property
    def texts(self) -> list[str]:
        """LLVM's text for it; kernels share many parts."""
        return list(map(str, self.modules))

    def get_llvm_str(self) -> str:
        return "\n".join(self.texts)

    def get_asm_str(self) -> str:
        raise NotImplementedError


class _Pipeline(CompilerBase):
    def __init__(self, typingctx: Any, *args: Any) -> None:
        super().__init__(typingctx, *args)
        self.state.typingctx = shortcuts.Operators(typingctx)
        shortcuts.remember_sizes(self.state.targetctx)

    def define_pipelines(self) -> list[PassManager]:
        state = self.state
        state.library = _Lowered(state.targetctx.codegen(), state.func_id.func_qualname)
        passes = PassManager("lockstep")
        for each in PASSES:
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


class Part(CPUDispatcher):
    """A function that kernels may call; called from Python, it runs as Python."""

    def __init__(self, function: Callable[..., Any], forceinline: bool = False) -> None:
        options = {**OPTIONS, "forceinline": forceinline}
        super().__init__(function, targetoptions=options, pipeline_class=_Pipeline)

    def __call__(self, *args: Any) -> Any:
        return self.py_func(*args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # numba would make one version for each literal; LLVM propagates constants by itself.
        return super().get_call_template([types.unliteral(arg) for arg in args], kws)


class Lowered(NamedTuple):
    """A function of one address and all that it calls: modules as LLVM's text, and its name there.

    The name follows numba's calling convention: a status, pointers to a result and an exception,
    the address.
    """

    texts: list[str]
    name: str

    def module(self, context: Any = None) -> llvm.ModuleRef:
        """All of it as one module of a context, or of LLVM's global one."""
        whole = llvm.parse_assembly("", context)
        for text in self.texts:
            whole.link_in(llvm.parse_assembly(text, context))
        return whole


def lower(function: Callable[[int], None]) -> Lowered:
    """What numba makes of a function of one address."""
    part = Part(function)
    with shortcuts.taken():
        part.compile((types.int64,))
    result = part.overloads[(types.int64,)]
    texts = [text for library in result.library.everything() for text in _texts(library)]
    return Lowered(texts, result.fndesc.llvm_func_name)


def _texts(library: CodeLibrary) -> list[str]:
    if isinstance(library, _Lowered):
        return library.texts
    return [str(library._get_module_for_linking())]
