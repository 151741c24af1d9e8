"""The function behind a kernel: its parameters, and its typed form for given arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from . import ir
from .errors import UnsupportedConstruct
from .frontend import build
from .language import Constant, Secret
from .source import FunctionSource
from .types import ArrayType, Scalar, bool_, float32, int32, scalar_named


class KernelFunction:
    """A Python function in the kernel language, which the back ends specialise and launch."""

    def __init__(self, function: Callable):
        self.function = function
        functools.update_wrapper(self, function)
        source = FunctionSource(function)
        self.annotations = self._read_annotations(source)
        self._signature = inspect.signature(function)
        self._typed: dict[Any, ir.Kernel] = {}

    def _read_annotations(self, source: FunctionSource) -> dict[str, Any]:
        arguments = source.tree.args  # type: ignore[attr-defined]
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
            loc = source.locate(source.tree)
            raise UnsupportedConstruct("a kernel takes plain positional parameters", loc)
        found = {}
        for argument in arguments.args:
            annotation = source.annotation(argument.annotation)
            if annotation is bool:
                annotation = bool_
            known = (Scalar, ArrayType, Secret)
            if not (annotation in (None, Constant, Secret) or isinstance(annotation, known)):
                raise UnsupportedConstruct(
                    f"parameter '{argument.arg}' is annotated {annotation!r}; use a type of the "
                    "language such as int32 or float32[:, :], simt.Secret[...] or simt.Constant",
                    source.locate(argument),
                )
            found[argument.arg] = annotation
        return found

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        return tuple(self.annotations)

    def declared(self, name: str) -> Scalar | ArrayType | None:
        """The type a parameter is annotated with; None where the argument decides."""
        annotation = self.annotations[name]
        if isinstance(annotation, Secret):
            annotation = annotation.annotation
        return annotation if isinstance(annotation, (Scalar, ArrayType)) else None

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the specialisation parameters."""
        return tuple(n for n, a in self.annotations.items() if a is Constant)

    @property
    def secrets(self) -> frozenset[str]:
        """Names of the secret parameters."""
        return frozenset(
            n for n, a in self.annotations.items() if a is Secret or isinstance(a, Secret)
        )

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Arguments by name. Raises TypeError as a Python call would."""
        if not kwargs and len(args) == len(self.annotations):  # Signature.bind takes its time
            return dict(zip(self.annotations, args, strict=True))
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__name__}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def typed(self, **arguments: Any) -> ir.Kernel:
        """The checked, typed kernel for these parameters: what the back ends consume.

        Each argument is a type (`float32[:, :]`), a value to take the type from (an array, a
        number), or, for a `Constant`, its value. Annotated parameters may be left out.

        >>> copy.typed(x=float32[:], n=int32, TILE=16)      # doctest: +SKIP

        Raises `UnsupportedConstruct`, `SecretLeak`; TypeError for a missing or mistyped argument.
        """
        types: dict[str, Scalar | ArrayType] = {}
        constants: dict[str, Any] = {}
        unknown = set(arguments) - set(self.annotations)
        if unknown:
            raise TypeError(f"{self.__name__} has no parameter {sorted(unknown)}")
        defaults = inspect.signature(self.function).parameters
        for name, annotation in self.annotations.items():
            given = arguments.get(name, defaults[name].default)
            if annotation is Constant:
                constants[name] = self._constant(name, given)
            else:
                types[name] = self._parameter_type(name, given)
        key = (tuple(types.items()), tuple((n, type(v), v) for n, v in constants.items()))
        if key not in self._typed:
            self._typed[key] = build(self.function, types, constants, self.secrets)
        return self._typed[key]

    def _constant(self, name: str, given: Any) -> Any:
        if given is inspect.Parameter.empty:
            raise TypeError(f"{self.__name__}: constant '{name}' is missing")
        scalar = None if isinstance(given, (bool, int, float, str)) else scalar_named(given)
        if scalar is not None:
            return scalar
        if hasattr(given, "item") and getattr(given, "ndim", 0) == 0:
            given = given.item()
        if not isinstance(given, (bool, int, float, str)):
            raise TypeError(
                f"{self.__name__}: constant '{name}' takes a number, a string or a type, "
                f"got {type(given).__name__}"
            )
        return given

    def _parameter_type(self, name: str, given: Any) -> Scalar | ArrayType:
        declared = self.declared(name)
        if given is inspect.Parameter.empty or given is None:
            if declared is None:
                raise TypeError(f"{self.__name__}: argument '{name}' is missing")
            return declared
        actual = type_of(given)
        if actual is None:
            raise TypeError(
                f"{self.__name__}: '{name}' takes an array or a number, got {type(given).__name__}"
            )
        if declared is None or declared == actual:
            return actual
        number = isinstance(given, int) and not isinstance(given, bool)
        if number and isinstance(declared, Scalar) and declared.kind in ("int", "uint", "float"):
            return declared
        raise TypeError(f"{self.__name__}: '{name}' is declared {declared}, got {actual}")


def type_of(value: Any) -> Scalar | ArrayType | None:
    """The language's type of an argument: a type itself, a number, or an array-like."""
    if isinstance(value, (Scalar, ArrayType)):
        return value
    if isinstance(value, bool):
        return bool_
    if isinstance(value, int):
        return int32
    if isinstance(value, float):
        return float32
    dtype = scalar_named(getattr(value, "dtype", None))
    if dtype is None:
        return None
    return ArrayType(dtype, value.ndim) if getattr(value, "ndim", 0) else dtype
