"""Secrets reach no branch, no loop bound, no exit and no address."""

# ruff: noqa: RET504 - kernels assign to look at what the front end makes of it

from __future__ import annotations

import pytest

from lockstep import simt
from lockstep.simt import Secret, ct, cuda, float32, int32


def leak(kernel, **arguments) -> simt.SecretLeak:
    with pytest.raises(simt.SecretLeak) as caught:
        kernel.typed(**arguments)
    return caught.value


def test_branch_shows_the_chain():
    @simt.kernel
    def branch(x: Secret[float32[:]], out: float32[:]):
        tile = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        tile[t] = x[t]
        y = tile[t] * 2.0
        z = y + 1.0
        if z > 0.0:
            out[t] = 1.0

    error = leak(branch)
    assert "a branch depends on a secret" in str(error)
    assert [what for what, _ in error.chain] == [
        "'x' is a secret parameter",
        "carried into 'tile'",
        "carried into 'y'",
        "carried into 'z'",
    ]
    texts = [loc.text.strip() for _, loc in error.chain]
    assert texts[1:] == ["tile[t] = x[t]", "y = tile[t] * 2.0", "z = y + 1.0"]
    assert error.text.strip() == "if z > 0.0:"
    assert "z = y + 1.0" in str(error)
    assert "^" in str(error)


def test_loop_bound():
    @simt.kernel
    def bound(n: Secret[int32], out: float32[:]):
        for i in range(n):
            out[i] = 0.0

    assert "a loop bound" in str(leak(bound))


def test_while_condition():
    @simt.kernel
    def condition(n: Secret[int32], out: float32[:]):
        i = 0
        while i < n:
            i += 1
        out[0] = 1.0

    assert "a loop condition" in str(leak(condition))


def test_early_exit():
    @simt.kernel
    def leave(n: Secret[int32], out: float32[:]):
        if cuda.threadIdx.x >= n:
            return
        out[0] = 1.0

    assert "an early exit" in str(leak(leave))


@pytest.mark.parametrize("side", ["load", "store", "shuffle", "atomic"])
def test_addresses(side):
    @simt.kernel
    def load(i: Secret[int32], out: float32[:], c: int32[:]):
        out[0] = out[i]

    @simt.kernel
    def store(i: Secret[int32], out: float32[:], c: int32[:]):
        out[i + 1] = 0.0

    @simt.kernel
    def shuffle(i: Secret[int32], out: float32[:], c: int32[:]):
        out[0] = cuda.shfl_sync(0xFFFFFFFF, 1.0, i)

    @simt.kernel
    def atomic(i: Secret[int32], out: float32[:], c: int32[:]):
        cuda.atomic.add(c, i, 1)

    kernel = {"load": load, "store": store, "shuffle": shuffle, "atomic": atomic}[side]
    wanted = "a shuffle's lane" if side == "shuffle" else "an address"
    assert wanted in str(leak(kernel))


def test_short_circuits_count_as_branches():
    @simt.kernel
    def short(x: Secret[float32[:]], out: float32[:]):
        y = x[0] > 0.0 and x[1] > 0.0
        out[0] = float32(int32(y))

    @simt.kernel
    def ternary(x: Secret[float32[:]], out: float32[:]):
        out[0] = 1.0 if x[0] > 0.0 else 0.0

    assert "short circuit" in str(leak(short))
    assert "ct.select" in str(leak(ternary))


def test_a_secret_through_a_loop_that_carries_it_back():
    @simt.kernel
    def carried(x: Secret[float32[:]], out: float32[:], n: int32):
        a = 0.0
        b = 0.0
        for i in range(n):
            if b > 1.0:
                out[i] = 1.0
            b = a
            a = x[i]

    error = leak(carried)
    assert [what for what, _ in error.chain][1:] == ["carried into 'a'", "carried into 'b'"]


def test_device_functions_carry_secrets():
    @simt.device
    def twice(v):
        w = v + v
        return w

    @simt.kernel
    def through(x: Secret, out: float32[:]):
        if twice(x[0]) > 0.0:
            out[0] = 1.0

    assert leak(through, x=float32[:]).chain[-1][0].startswith("carried into")


def test_oblivious_kernels_pass():
    @simt.kernel
    def oblivious(x: Secret[float32[:]], n: Secret[int32], out: float32[:], size: int32):
        best = 0.0
        for i in range(size):
            inside = (i < n) & (x[i] > 0.0)
            best = ct.select(inside, max(best, x[i]), best)
        total = cuda.shfl_xor_sync(0xFFFFFFFF, best, 1)
        any_lane = cuda.any_sync(0xFFFFFFFF, best > 0.0)
        out[cuda.threadIdx.x] = ct.select(any_lane, total, 0.0)

    kernel = oblivious.typed()
    assert kernel.secrets == {"x", "n"}
    assert not kernel.warnings


def test_slow_paths_are_pointed_out():
    @simt.kernel
    def divide(x: Secret[float32[:]], out: float32[:]):
        out[0] = 1.0 / x[0]

    (warning,) = divide.typed().warnings
    assert "slow path" in warning.message
    assert warning.loc.text.strip() == "out[0] = 1.0 / x[0]"


def test_exponentials_of_secrets_are_those_of_constant_time():
    @simt.kernel
    def weight(x: Secret[float32[:]], out: float32[:]):
        out[0] = cuda.exp2(x[0])
        out[1] = ct.exp2(x[0])

    (warning,) = weight.typed().warnings
    assert warning.loc.text.strip() == "out[0] = cuda.exp2(x[0])"


def test_the_shape_of_a_secret_array_is_public():
    @simt.kernel
    def shape(x: Secret[float32[:]], out: float32[:]):
        for i in range(x.shape[0]):
            out[i] = x[i]

    shape.typed()
