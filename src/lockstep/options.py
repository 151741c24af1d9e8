"""The options of a call: types, values, and the messages for wrong ones."""

from __future__ import annotations

from typing import NamedTuple

# scale, softcap and their quotient, where not 0: float32 holds them, and a few times as much.
LEAST_FACTOR, MOST_FACTOR = 1e-37, 1e37
_FACTORS = f"{LEAST_FACTOR} to {MOST_FACTOR}"
# Types of an option that may be left out.
_NUMBER, _NAME = frozenset({float, type(None)}), frozenset({str, type(None)})
# The largest side of a window, and bound of queries, that an operator of torch takes.
MAX_REACH = (1 << 63) - 1
# Bounds of the queries of a sequence that kernels make use of.
BOUNDS = (1, 2, 4, 8, 16, 32, 64)
Window = tuple[int | None, int | None]


class Options(NamedTuple):
    """The options of a call."""

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    query_invariant: bool = False
    allow_tf32: bool = False
    constant_time: bool = False
    secret_lengths: bool = False
    max_seqlen_q: int | None = None


def make_options(
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    constant_time: bool = False,
    secret_lengths: bool = False,
    max_seqlen_q: int | None = None,
) -> Options:
    """Checks the types of a caller's options; `describe` checks their values.

    `return_lse` and `kernel` are checked only. Raises TypeError, and ValueError for a window that
    is not a pair and for numbers beyond all bounds.
    """
    if (
        window is None
        and max_seqlen_q is None
        and type(causal) is bool
        and type(query_invariant) is bool
        and type(allow_tf32) is bool
        and type(return_lse) is bool
        and constant_time is False
        and secret_lengths is False
        and type(scale) in _NUMBER
        and type(softcap) in _NUMBER
        and type(kernel) in _NAME
    ):
        return Options(causal, None, None, scale, softcap, query_invariant, allow_tf32)
    flags = {
        "causal": causal,
        "query_invariant": query_invariant,
        "allow_tf32": allow_tf32,
        "return_lse": return_lse,
        "constant_time": constant_time,
        "secret_lengths": secret_lengths,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} takes True or False, got {type_of(flag)}")
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel takes the name of a kernel or None, got {type_of(kernel)}")
    scale, softcap = _number("scale", scale), _number("softcap", softcap)
    left, right = (None, None) if window is None else _sides(window)
    return Options(
        causal,
        left,
        right,
        scale,
        softcap,
        query_invariant,
        allow_tf32,
        constant_time,
        secret_lengths,
        _bound(max_seqlen_q),
    )


def rounded_bound(max_seqlen_q: int | None) -> int | None:
    """The bound that kernels know: the next of BOUNDS, so that all bounds need few builds and few
    prepared calls; None beyond the last of them."""
    if max_seqlen_q is not None:
        for bound in BOUNDS:
            if max_seqlen_q <= bound:
                return bound
    return None


def _bound(max_seqlen_q: int | None) -> int | None:
    if max_seqlen_q is None:
        return None
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, int):
        raise TypeError(f"max_seqlen_q takes an integer or None, got {type_of(max_seqlen_q)}")
    if max_seqlen_q > MAX_REACH:
        raise ValueError(f"max_seqlen_q takes an integer up to {MAX_REACH}, got a larger one")
    return max_seqlen_q


def _number(name: str, number: float | None) -> float | None:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} takes a number or None, got {type_of(number)}")
    if isinstance(number, int) and abs(number) > MOST_FACTOR:
        # It may be one that no float holds.
        raise ValueError(f"{name} takes a finite number of size {_FACTORS}, got a larger integer")
    return float(number)


def _sides(window: Window) -> Window:
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window takes (left, right) or None, got {type_of(window)}")
    if len(window) != 2:
        raise ValueError(f"window takes (left, right), got {len(window)} entries")
    for side, reach in zip(("left", "right"), window, strict=True):
        if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int)):
            raise TypeError(f"window takes integers or None, got {type_of(reach)} for its {side}")
        if reach is not None and abs(reach) > MAX_REACH:
            raise ValueError(f"window takes distances up to {MAX_REACH}, got more for its {side}")
    return window[0], window[1]


def check_options(options: Options) -> None:
    """Checks the window, the bound of queries, and options that need another one. Raises
    ValueError."""
    causal, left, right = options.causal, options.window_left, options.window_right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"window takes distances of 0 or more, or None, got ({left}, {right})")
    if causal and right is not None and right > 0:
        raise ValueError(
            f"window takes 0 or None on its right with causal=True, got {right}: causal hides the "
            "keys there"
        )
    if options.max_seqlen_q is not None and options.max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q takes 0 or more, or None, got {options.max_seqlen_q}")
    if options.secret_lengths and not options.constant_time:
        raise ValueError("secret_lengths takes True only with constant_time=True")


def check_factors(scale: float, softcap: float | None) -> None:
    """Checks what kernels multiply scores by, in float32, where an infinite factor would turn a
    score of 0 into NaN. Raises ValueError."""
    if not (scale == 0 or _is_factor(scale)):
        raise ValueError(
            f"scale takes a finite number or None: 0, or of size {_FACTORS}, got {scale}"
        )
    if softcap is None:
        return
    if not (softcap > 0 and _is_factor(softcap)):
        raise ValueError(
            f"softcap takes a finite number above 0 or None: of size {_FACTORS}, got {softcap}"
        )
    if not (scale == 0 or _is_factor(scale / softcap)):
        raise ValueError(
            f"softcap takes a number such that scale / softcap is of size {_FACTORS}, got "
            f"{softcap} with a scale of {scale}"
        )


def _is_factor(x: float) -> bool:
    return LEAST_FACTOR <= abs(x) <= MOST_FACTOR


def type_of(value: object) -> str:
    """The name of a value's type, with that of the library it is from: numpy's bool is not ours."""
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library in ("builtins", "torch") else f"{library}.{kind.__name__}"
