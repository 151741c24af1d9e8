"""What the front end refuses, and what its messages say."""

from __future__ import annotations

import importlib.util

import pytest

from lockstep import simt
from lockstep.simt import cuda, float32, int32

# A body, which is one line of a kernel, and what the message says.
REFUSED = [
    ("y = [1, 2]", "a list"),
    ("y = x", "must be indexed"),
    ("y = x[0] / 2 if n else n", "types float32 and int32"),
    ("y = n / 2", "float64"),
    ("y = n + x[0]", "cast one of them"),
    ("y = n + u[0]", "int32 and uint32"),
    ("y = float(n)", "64 bits"),
    ("y = 2 ** n", r"\*\*"),
    ("y = 5_000_000_000", "32 bits"),
    ("y = 1e39", "float32"),
    ("y = 0 < n < 5", "chained"),
    ("y = undefined", "unknown name"),
    ("y = print(n)", "cannot call"),
    ("y = cuda.no_such_function(n)", "no 'no_such_function'"),
    ("y = 'text'", "str literal"),
    ("y = x[0:2]", "slices"),
    ("y = h[0]", "2 dimension"),
    ("y = x[0.5]", "index must be int32"),
    ("y = x[0] if x else 1.0", "must be indexed"),
    ("a, b = 1, 2", "a tuple"),
    ("a = b = 1", "chained assignment"),
    ("h[0, 0] = x[0]", "must be float16"),
    ("x[0] = h.shape", "shape"),
    ("n = 1.5", "must be int32"),
    ("n @= 2", "@"),
    ("for i in x: pass", r"range"),
    ("for i in range(0, n, n): pass", "sign of this step"),
    ("for i in range(n): i = 2", "its own loop"),
    ("while x[0]: pass", "bool_ or an integer"),
    ("with open('f'): pass", "simt.phase"),
    ("try: pass\n    except Exception: pass", "try"),
    ("def inner(): pass", "nested function"),
    ("import os", "import"),
    ("assert n > 0", "assert"),
    ("return n", "returns nothing"),
    ("n + 1", "no effect"),
    ("cuda.popc(n)", "not used"),
    ("cuda.syncthreads(1)", "too many"),
    ("y = cuda.syncthreads()", "no value"),
    ("cuda.atomic.add(x, 0, 1.0)", "order of float additions"),
    ("y = cuda.vload(x, 0, 3)", "4, 8 or 16 bytes"),
    ("y = cuda.bitcast(h[0, 0], uint32)", "bits of float16"),
    ("y = cuda.shared.array(n, float32)", "compile time"),
    ("y = wmma.load_a(h, (0, 0))", "give ld"),
    ("y = wmma.load_a(x, 0, 16)", "float16 or bfloat16"),
    ("y = lambda: 1", "lambda"),
    ("y = x[0] and 1", "bool_ or an integer"),
    ("y = math.gamma(x[0])", "not part of the language"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[b for b, _ in REFUSED])
def test_outside_the_language(body, message, tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(
        "import math\n"
        "from lockstep import simt\n"
        "from lockstep.simt import *\n"
        "from lockstep.simt import cuda, wmma\n"
        "@simt.kernel\n"
        "def k(x: float32[:], h: float16[:, :], u: uint32[:], n: int32):\n"
        f"    {body}\n"
    )
    spec = importlib.util.spec_from_file_location("refused", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(simt.UnsupportedConstruct, match=message) as caught:
        module.k.typed()
    assert caught.value.filename == str(path)
    assert caught.value.lineno in (7, 8)
    assert "^" in str(caught.value)


def test_loop_variable_after_its_loop_is_refused():
    @simt.kernel
    def late(x: float32[:], n: int32):
        for i in range(n):
            x[i] = 0.0
        x[i] = 1.0

    with pytest.raises(simt.UnsupportedConstruct, match="after its loop"):
        late.typed()


def test_recursion_and_late_returns_are_refused():
    @simt.device
    def again(v):
        return again(v)

    @simt.device
    def early(v, n):
        for _ in range(n):
            return v
        return v

    @simt.kernel
    def call_again(x: float32[:]):
        x[0] = again(1.0)

    @simt.kernel
    def call_early(x: float32[:]):
        x[0] = early(1.0, 3)

    with pytest.raises(simt.UnsupportedConstruct, match="calls itself"):
        call_again.typed()
    with pytest.raises(simt.UnsupportedConstruct, match="returns at its end"):
        call_early.typed()


@simt.kernel
def set_first(x: float32[:]):
    x[0] = 1.0


def test_names_outside_a_kernel_do_nothing():
    with pytest.raises(TypeError, match="only inside"):
        cuda.syncthreads()
    with pytest.raises(TypeError, match="inside a kernel"):
        float32(1.0)
    with pytest.raises(TypeError, match="launch configuration"):
        set_first(1)
