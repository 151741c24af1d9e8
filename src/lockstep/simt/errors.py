"""Errors before a kernel runs, and after it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ir import Location


class SimtError(Exception):
    """Base of everything `lockstep.simt` raises on its own account."""


class UnsupportedConstruct(SimtError, SyntaxError):
    """The source steps outside the SIMT language.

    A `SyntaxError`, so that Python itself prints the file, the line and a caret.
    """

    def __init__(self, message: str, loc: Location | None = None):
        details: tuple = ()
        if loc is not None:
            span = (loc.line, loc.column, loc.text + "\n", loc.end_line, loc.end_column)
            details = ((loc.file, *span),)
        super().__init__(message, *details)
        self.loc = loc

    def __str__(self) -> str:
        if self.loc is None:
            return str(self.msg)
        return f"{self.msg}\n{self.loc.caret()}"


class SecretLeak(UnsupportedConstruct):
    """A branch, loop bound, early exit or address depends on a secret value.

    `chain` lists the steps that carried the secret there, the secret parameter first.
    """

    def __init__(self, message: str, loc: Location, chain: tuple[tuple[str, Location], ...]):
        self.chain = chain
        steps = "\n".join(
            f"  {where.file}:{where.line}: {what}\n    {where.text.strip()}"
            for what, where in chain
        )
        super().__init__(f"{message}; the secret came this way:\n{steps}\nand leaks here:", loc)


class HazardError(SimtError):
    """Raised by `Trace.check` when the machine saw a hazard."""
