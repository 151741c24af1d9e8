"""The merge of partial results is the attention over all keys."""

from __future__ import annotations

import math

import pytest
import torch

import lockstep
from lockstep import numerics, reference

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def parts_of(q, k, v, sizes):
    pieces = zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)
    return [reference.attention(q, k, v, return_lse=True) for k, v in pieces]


def in_dtype(parts, dtype):
    lse_dtype = numerics.statistics_dtype(dtype)
    return [(out.to(dtype), lse.to(lse_dtype)) for out, lse in parts]


def test_constants():
    assert pytest.approx(math.e, abs=1e-15) == 2.0**numerics.LOG2E
    assert pytest.approx(1.0, abs=1e-15) == numerics.LOG2E * numerics.LN2


@pytest.mark.parametrize("sizes", [[16], [1, 15], [5, 0, 11], [4, 4, 4, 4], [0, 0, 16, 0]])
def test_merge_of_spans_is_the_whole(sizes):
    q, k, v = torch.randn(3, 2, 3, 16, 8, dtype=torch.float64)
    merged = lockstep.merge(parts_of(q, k, v, sizes))
    torch.testing.assert_close(merged, reference.attention(q, k, v, return_lse=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes(dtype):
    q, k, v = torch.randn(3, 2, 3, 16, 8, dtype=torch.float64)
    out, lse = lockstep.merge(in_dtype(parts_of(q, k, v, [7, 9]), dtype))
    expected, expected_lse = reference.attention(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, numerics.statistics_dtype(dtype))
    tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    assert (out.double() - expected).abs().max() <= tolerance
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_comes_back_bit_for_bit(dtype):
    out, lse = torch.randn(5, 4, 8).to(dtype), torch.randn(5, 4)
    [part] = in_dtype([(out, lse)], dtype)
    merged = lockstep.merge([part])
    assert torch.equal(merged[0], part[0])
    assert torch.equal(merged[1], part[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_that_saw_no_key_do_not_count(dtype):
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    empty = torch.full((2, 3, 8), math.nan), torch.full((2, 3), -math.inf)
    part, nothing = in_dtype([(out, lse), empty], dtype)
    for parts in ([part, nothing], [nothing, part], [nothing, part, nothing]):
        merged = lockstep.merge(parts)
        assert torch.equal(merged[0], part[0])
        assert torch.equal(merged[1], part[1])
    merged = lockstep.merge([nothing, nothing])
    assert merged[0].eq(0).all()
    assert merged[1].eq(-math.inf).all()


def test_lse_far_apart_and_far_from_zero():
    outs = [torch.full((1, 2), x) for x in (1.0, 2.0, 3.0)]
    lses = [torch.tensor([x]) for x in (-1e4, 1e4, 1e4)]
    out, lse = lockstep.merge(list(zip(outs, lses, strict=True)))
    assert out.tolist() == [[2.5, 2.5]]
    assert lse.item() == pytest.approx(1e4 + math.log(2))


def test_a_nan_reaches_its_own_row_only():
    out, lse = torch.zeros(3, 2), torch.zeros(3)
    lse[1] = math.nan
    merged, merged_lse = lockstep.merge([(out, lse), (out, torch.zeros(3))])
    assert merged.isnan().any(-1).tolist() == [False, True, False]
    assert merged_lse.isnan().tolist() == [False, True, False]


def test_strides_do_not_matter():
    parts = [(torch.randn(8, 3, 4).mT, torch.randn(4, 8).T) for _ in range(2)]
    expected = lockstep.merge([(out.contiguous(), lse.contiguous()) for out, lse in parts])
    merged = lockstep.merge(parts)
    assert torch.equal(merged[0], expected[0])
    assert torch.equal(merged[1], expected[1])


def test_gradients_of_every_order():
    def f(out_a, lse_a, out_b, lse_b):
        return lockstep.merge([(out_a, lse_a), (out_b, lse_b)])

    parts = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2), (3,)) * 2]
    assert torch.autograd.gradcheck(f, parts)
    assert torch.autograd.gradgradcheck(f, parts)


def test_empty_parts_get_no_gradient():
    out, lse = torch.randn(3, 2, requires_grad=True), torch.randn(3, requires_grad=True)
    empty_out = torch.full((3, 2), math.nan, requires_grad=True)
    empty_lse = torch.full((3,), -math.inf, requires_grad=True)
    merged, _ = lockstep.merge([(out, lse), (empty_out, empty_lse)])
    merged.sum().backward()
    assert empty_out.grad.eq(0).all()
    assert empty_lse.grad.eq(0).all()
    torch.testing.assert_close(out.grad, torch.ones(3, 2))


OUT, LSE = torch.zeros(3, 2), torch.zeros(3)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "at least one"),
        ([OUT], TypeError, "pairs, got Tensor at index 0"),
        ([(OUT, LSE), (OUT, None)], TypeError, "tensors, got NoneType for lse at index 1"),
        (None, TypeError, "a sequence of .* pairs, got NoneType"),
        (3, TypeError, "a sequence of .* pairs, got int"),
        (OUT, TypeError, "a sequence of .* pairs, got Tensor"),
        (torch.tensor(1.0), TypeError, "a sequence of .* pairs, got Tensor"),
        ("ab", TypeError, "pairs, got str at index 0"),
        ({"out": OUT}, TypeError, "pairs, got str at index 0"),
        ([(OUT, LSE, LSE)], TypeError, "pairs, got 3 entries at index 0"),
        ([(OUT.numpy(), LSE)], TypeError, "tensors, got numpy.ndarray for out at index 0"),
        ([(OUT, LSE), (OUT[:2], LSE)], ValueError, "one shape and dtype.* at index 1"),
        ([(OUT, LSE), (OUT.half(), LSE)], ValueError, "one shape and dtype.* at index 1"),
        ([(OUT, LSE[:2])], ValueError, r"an lse of shape \[3\].* at index 0"),
        ([(OUT, LSE.double())], ValueError, "float32 for its out, got .* float64 at index 0"),
        ([(OUT.int(), LSE)], TypeError, "float16 or .* got int32"),
        ([(OUT, LSE), (OUT, LSE.to("meta"))], ValueError, "one device.* at index 1"),
    ],
)
def test_parts_that_do_not_fit(parts, error, message):
    with pytest.raises(error, match=f"^parts takes .*{message}"):
        lockstep.merge(parts)


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("kind", ["sparse_coo", "_mkldnn", "nested"])
def test_parts_without_strides_are_refused(kind):
    change = {
        "sparse_coo": torch.Tensor.to_sparse,
        "_mkldnn": torch.Tensor.to_mkldnn,
        "nested": lambda x: torch.nested.nested_tensor([x, x]),
    }[kind]
    for i, name in enumerate(("out", "lse")):
        wrong = [OUT, LSE]
        wrong[i] = change(wrong[i])
        message = rf"^{name} of parts\[1\] takes a strided tensor, got .*{kind}"
        with pytest.raises(TypeError, match=message):
            lockstep.merge([(OUT, LSE), tuple(wrong)])


def test_zeros_without_memory_are_merged():
    out, lse = torch.randn(3, 2), torch.randn(3)
    zeros = torch._efficientzerotensor((3, 2)), torch._efficientzerotensor((3,))
    got = lockstep.merge([(out, lse), zeros])
    expected = lockstep.merge([(out, lse), (torch.zeros(3, 2), torch.zeros(3))])
    assert all(map(torch.equal, got, expected))


def test_autocast_changes_no_part():
    out, lse = torch.randn(3, 2), torch.randn(3)
    expected = lockstep.merge([(out, lse), (out, lse)])
    with torch.autocast("cpu"):
        got = lockstep.merge([(out, lse), (out, lse)])
        with pytest.raises(TypeError, match=r"^parts takes out of dtype .* got int64"):
            lockstep.merge([(OUT.long(), LSE)])
        with pytest.raises(ValueError, match=r"^parts takes an lse .* got .* float64"):
            lockstep.merge([(OUT, LSE.double())])
    assert all(map(torch.equal, got, expected))
