"""From Python functions to one LLVM module per kernel: numba types and lowers, nothing more.

By itself numba optimises each function and generates its machine code, and optimises it again in
every function that calls it. A kernel is made of seventy of them: here they stay what numba
lowered them to until they stand in one module, which is optimised once (``machine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import errors, types
from numba.core.codegen import CodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.typed_passes import (
    NativeLowering,
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
    NativeLowering,
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

    def get_llvm_str(self) -> str:
        return "\n".join(map(str, self.modules))

    def get_asm_str(self) -> str:
        raise NotImplementedError


class _Operators:
    """numba's typing of calls, which remembers what it found for arithmetic and for parts.

    Finding it takes as long as everything else in type inference: numba asks each NumPy function
    of that name, too, and again for each literal.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        numbers = all(isinstance(arg, (types.Number, types.Boolean)) for arg in args)
        is_operator = numbers and isinstance(func, types.Function)
        if kws or not (is_operator or isinstance(func, types.Dispatcher)):
            return self._context.resolve_function_type(func, args, kws)
        key = func, tuple(types.unliteral(arg) for arg in args)
        if key not in _SIGNATURES:
            _SIGNATURES[key] = self._context.resolve_function_type(*key, kws)
        return _SIGNATURES[key]


_SIGNATURES: dict[Any, Any] = {}


def _remember_sizes(context: Any) -> None:
    """numba asks LLVM for the size of every variable anew, by way of a module of its own."""
    ask = context.get_abi_sizeof

    def size_of(kind: ir.Type) -> int:
        key = str(kind)
        if key not in _SIZES:
            _SIZES[key] = ask(kind)
        return _SIZES[key]

    context.get_abi_sizeof = size_of


_SIZES: dict[str, int] = {}  # in bytes


class _Pipeline(CompilerBase):
    def __init__(self, typingctx: Any, *args: Any) -> None:
        super().__init__(typingctx, *args)
        self.state.typingctx = _Operators(typingctx)
        _remember_sizes(self.state.targetctx)

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


@contextmanager
def _without_colours() -> Iterator[None]:
    """numba tries much that does not fit, and colours a message about it each time."""
    before = errors._termcolor_inst
    names = ("code", "errmsg", "filename", "indicate", "highlight", "reset")
    errors._termcolor_inst = SimpleNamespace(**dict.fromkeys(names, str))
    try:
        yield
    finally:
        errors._termcolor_inst = before


def lower(function: Callable[[int], None]) -> tuple[llvm.ModuleRef, str]:
    """The module of a function of one address and all that it calls, and its name there.

    The name follows numba's calling convention: a status, pointers to a result and an exception,
    the address.
    """
    part = Part(function)
    with _without_colours():
        part.compile((types.int64,))
    result = part.overloads[(types.int64,)]
    whole = llvm.parse_assembly("")
    for library in result.library.everything():
        if isinstance(library, _Lowered):
            for module in library.modules:
                whole.link_in(llvm.parse_assembly(str(module)))
        else:
            whole.link_in(library._get_module_for_linking(), preserve=True)
    return whole, result.fndesc.llvm_func_name
