"""What the front end accepts, and how it types it. `test_frontend_refusals.py` has the rest."""

# ruff: noqa: F841, SIM108 - kernels assign to look at what the front end makes of it

from __future__ import annotations

import inspect
import math

import pytest

from lockstep import simt
from lockstep.simt import bfloat16, bool_, ct, cuda, float16, float32, int32, ir, uint32, wmma
from lockstep.simt.ir import Uniformity

TILE = 16


def statements(kernel: ir.Kernel, kind: type) -> list:
    return [s for s in ir.walk(kernel.body) if isinstance(s, kind)]


def value_of(kernel: ir.Kernel, name: str) -> ir.Expr:
    """What the first assignment to `name` assigns."""
    return next(s.value for s in statements(kernel, ir.Assign) if s.target == name)


def line_of(function: simt.Kernel, text: str) -> int:
    """Number of the source line that contains `text`."""
    lines, first = inspect.getsourcelines(function.function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# Typing


@simt.kernel
def scale(x: float32[:], y: float16[:, :], n: int32, a: float32):
    """Doc."""
    i = cuda.grid(1)  # [grid]
    row = i // TILE
    # guard the tail
    if i < n:
        x[i] = a * y[row, i % TILE] + 1


def test_types_constants_and_comments_are_kept():
    kernel = scale.typed()
    assert kernel.name == "scale"
    assert kernel.doc == "Doc."
    assert [(p.name, str(p.type)) for p in kernel.parameters] == [
        ("x", "float32[:]"),
        ("y", "float16[:, :]"),
        ("n", "int32"),
        ("a", "float32"),
    ]
    assert kernel.constants == {"TILE": TILE}
    assert sorted(text for _, text in kernel.source.comments.values()) == [
        "[grid]",
        "guard the tail",
    ]
    store = statements(kernel, ir.Store)[0]
    assert store.value.type == float32
    product = store.value.left
    assert isinstance(product.right, ir.Cast)
    assert product.right.implicit
    assert product.right.operand.type == float16
    assert isinstance(store.value.right, ir.Literal)
    assert store.value.right.const == 1.0
    assert kernel.arrays["x"].written
    assert not kernel.arrays["y"].written


def test_locations_point_at_the_file():
    store = statements(scale.typed(), ir.Store)[0]
    assert store.loc.file == __file__
    assert store.loc.line == line_of(scale, "x[i] = a *")
    assert store.loc.text[store.loc.column - 1 :].startswith("x[i] = a *")


def test_types_follow_the_arguments_where_nothing_is_declared():
    @simt.kernel
    def fill(x, value, TYPE: simt.Constant):
        x[0] = TYPE(value)

    kernel = fill.typed(x=bfloat16[:], value=1.5, TYPE=bfloat16)
    assert kernel.arrays["x"].dtype == bfloat16
    assert kernel.variables["value"] == float32
    with pytest.raises(TypeError, match="'value' is missing"):
        fill.typed(x=float16[:], TYPE=float16)
    with pytest.raises(TypeError, match="constant 'TYPE' is missing"):
        fill.typed(x=float16[:], value=1)


def test_declared_types_are_enforced():
    with pytest.raises(TypeError, match=r"'x' is declared float32\[:\], got float16\[:\]"):
        scale.typed(x=float16[:])
    with pytest.raises(TypeError, match="no parameter"):
        scale.typed(z=1)


def test_constants_prune_branches_and_fold():
    @simt.kernel
    def pick(x: float32[:], CAUSAL: simt.Constant, D: simt.Constant):
        tile = cuda.shared.array((D + 1, 2 * D), float32)
        if CAUSAL:
            tile[0, 0] = x[0]
        else:
            x.no_such_thing()

    kernel = pick.typed(CAUSAL=True, D=8)
    assert kernel.arrays["tile"].shape == (9, 16)
    assert not statements(kernel, ir.If)
    assert len(statements(kernel, ir.Store)) == 1
    with pytest.raises(simt.UnsupportedConstruct):
        pick.typed(CAUSAL=False, D=8)
    assert pick.typed(CAUSAL=True, D=8) is kernel


def test_literals_fit_their_neighbours():
    @simt.kernel
    def mix(x: float32[:], u: uint32[:]):
        a = x[0] * 2
        b = u[0] & 0xFF
        c = max(x[0], -math.inf)
        d = 0xFFFFFFFF
        e = 1.0 / TILE

    kernel = mix.typed()
    assert kernel.variables == {"a": float32, "b": uint32, "c": float32, "d": uint32, "e": float32}
    assert value_of(kernel, "e").const == 0.0625


def test_device_functions_are_inlined_under_fresh_names():
    @simt.device
    def clamp(v, low, high):
        if v < low:
            return low
        return min(v, high)

    @simt.device
    def put(array, i, v):
        w = v + 1.0
        array[i] = w

    @simt.kernel
    def use(x: float32[:]):
        w = clamp(x[0], 0.0, 1.0)
        put(x, 1, clamp(w, 0.25, 0.5))

    kernel = use.typed()
    inlined = statements(kernel, ir.Inlined)
    assert [s.function for s in inlined] == ["clamp", "clamp", "put"]
    assert inlined[0].result != inlined[1].result
    assert {"w", "w_2"} <= set(kernel.variables)
    assert set(kernel.device_sources) == {"clamp", "put"}


def test_scopes_say_where_c_can_declare():
    @simt.kernel
    def loops(x: float32[:], n: int32):
        total = 0.0
        for i in range(n):
            y = x[i]
            if y > 0.0:
                last = y
                total += y
            with simt.phase("work"):
                z = y * 2.0
            total += z
        if n > 0:
            late = total
        else:
            late = 0.0
        x[0] = late

    kernel = loops.typed()
    declared = {s.target for s in statements(kernel, ir.Assign) if s.declares}
    assert declared == {"total", "y", "z", "last"}
    assert kernel.hoisted == ("late",)
    assert statements(kernel, ir.For)[0].declares
    assert {s.phase for s in statements(kernel, ir.Assign) if s.target == "z"} == {"work"}


def test_reads_that_may_find_nothing_are_marked():
    @simt.kernel
    def sometimes(x: float32[:], n: int32):
        if n > 0:
            y = 1.0
        z = 2.0
        x[0] = y + z

    store = statements(sometimes.typed(), ir.Store)[0]
    marks = {e.name: e.maybe_unassigned for e in ir.expressions(store) if isinstance(e, ir.Var)}
    assert marks == {"y": True, "z": False}


def test_uniformity():
    @simt.kernel
    def levels(x: float32[:], n: int32):
        tile = cuda.shared.array(32, float32)
        grid = n * 2 + cuda.gridDim.x
        block = cuda.blockIdx.x * grid
        warp = cuda.warpid + block
        thread = cuda.threadIdx.x
        vote = cuda.any_sync(0xFFFFFFFF, thread == 0)
        shared = tile[grid]
        loaded = x[grid]
        joined = 0
        if thread < 4:
            inside = 7
            joined = inside
        trips = 0
        while True:
            if x[thread] > 0.0:
                break
            trips += 1
        after = trips

    kernel = levels.typed()
    level = {s.target: s.value.uniformity for s in statements(kernel, ir.Assign)}
    assert level["grid"] == Uniformity.GRID
    assert level["block"] == Uniformity.BLOCK
    assert level["warp"] == Uniformity.WARP
    assert level["thread"] == Uniformity.THREAD
    assert level["vote"] == Uniformity.WARP
    assert level["shared"] == Uniformity.BLOCK
    assert level["loaded"] == Uniformity.GRID
    assert level["inside"] == Uniformity.GRID
    assert level["after"] == Uniformity.THREAD  # lanes leave the loop at different times


def test_nonnegative_integers():
    @simt.kernel
    def signs(x: int32[:], n: int32):
        i = cuda.threadIdx.x // 32
        j = n // 2
        k = i - 1
        m = k % 8
        for r in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            x[r] = max(k, 0)
        for r in range(7, -1, -1):
            x[r] = 0

    kernel = signs.typed()
    nonneg = {s.target: s.value.nonneg for s in statements(kernel, ir.Assign)}
    assert nonneg == {"i": True, "j": False, "k": False, "m": True}
    assert all(s.index[0].nonneg for s in statements(kernel, ir.Store))


def test_warning_for_a_barrier_under_a_thread_condition():
    @simt.kernel
    def risky(x: float32[:]):
        if cuda.blockIdx.x > 0:
            cuda.syncthreads()
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()

    warnings = risky.typed().warnings
    assert [w.loc.line for w in warnings] == [line_of(risky, "if cuda.threadIdx.x < 16") + 1]


def test_everything_in_the_language_lowers():
    @simt.kernel
    def all_of_it(x: float32[:], h: float16[:, :], c: int32[:], u: uint32[:]):
        tile = cuda.shared.array((16, 24), float16)
        out = cuda.shared.array((16, 16), float32)
        more = cuda.shared.array(0, float32, offset=64)
        regs = cuda.local.array(4, float32)
        accs = cuda.local.array(2, wmma.accumulator)
        t = cuda.threadIdx.x
        regs[t % 4] = cuda.rsqrt(x[t])
        more[t] = regs[0]
        v = cuda.vload(x, 4 * t, 4)
        cuda.vstore(x, 4 * t, cuda.vec(v.x, v[1], v.z, 0.0))
        cuda.memcpy_async(tile, (0, 8 * t), h, (0, 8 * t), 8)
        cuda.pipeline_commit()
        cuda.pipeline_wait_prior(0)
        cuda.syncthreads()
        a = wmma.load_a(tile, (0, 0))
        b = wmma.load_b(tile, (0, 0), layout="col")
        accs[0] = wmma.mma_sync(a, b, wmma.fill(0.0))
        accs[1] = max(accs[0] * 0.5 + 1.0, accs[0])
        wmma.store(out, (0, 0), accs[1])
        cuda.syncwarp()
        old = cuda.atomic.add(c, 0, 1)
        cuda.atomic.cas(u, 0, 0, 5)
        bits = cuda.ballot_sync(0xFFFFFFFF, t > old)
        count = cuda.popc(bits)
        moved = cuda.shfl_xor_sync(0xFFFFFFFF, x[t], 1)
        picked = ct.select(moved > 0.0, moved, 0.0)
        mask = ct.mask(picked > 0.0) & cuda.bitcast(picked, uint32)
        flag = bool_(mask) and not (count == 3 or t < 2)
        size = h.shape[1]
        n = 0
        while n < size:
            n += 1
            if n == 3:
                continue
            if flag:
                break
        u[n] = mask

    kernel = all_of_it.typed()
    assert kernel.arrays["more"].dynamic
    assert kernel.arrays["more"].offset.const == 64
    assert kernel.variables["a"].layout == "row"
    assert kernel.variables["b"].layout == "col"
