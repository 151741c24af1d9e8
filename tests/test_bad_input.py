"""Every bad input is refused before anything runs, by an error that names the argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from good_calls import (
    CALLS,
    DV,
    HKV,
    HQ,
    MAX_PAGES,
    N_PAGES,
    OFFSETS,
    PAGE,
    SKV,
    SQ,
    B,
    D,
    dense,
    paged,
    rand,
    varlen,
    varlen_paged,
)

from lockstep.problem import Options

BAD = [
    # rank
    (dense, {"q": rand(HQ, SQ, D)}, ValueError, r"^q takes .*\[B, Hq, Sq, D\], got 3 dims"),
    (dense, {"k": rand(1, B, HKV, SKV, D)}, ValueError, "^k takes .* got 5 dims"),
    (dense, {"v": rand(DV)}, ValueError, "^v takes .* got 1 dims"),
    (
        dense,
        {"kv_lens": torch.ones(B, 1, dtype=torch.int32)},
        ValueError,
        "^kv_lens takes .* got 2 dims",
    ),
    (dense, {"sinks": rand(1, HQ)}, ValueError, "^sinks takes .* got 2 dims"),
    (dense, {"bias": rand(1, B, HQ, SQ, SKV)}, ValueError, "^bias takes .* got 5 dims"),
    (varlen, {"q": rand(1, 5, HQ, D)}, ValueError, r"^q takes .*\[Tq, Hq, D\], got 4 dims"),
    (varlen, {"cu_seqlens_q": torch.tensor(0)}, ValueError, "^cu_seqlens_q takes .* got 0 dims"),
    (paged, {"k_pages": rand(N_PAGES, PAGE, D)}, ValueError, "^k_pages takes .* got 3 dims"),
    (paged, {"page_table": torch.tensor([3, 1])}, ValueError, "^page_table takes .* got 1 dims"),
    # sizes
    (dense, {"k": rand(B + 1, HKV, SKV, D)}, ValueError, "^k takes .* with B = 2"),
    (dense, {"k": rand(B, HKV, SKV, D + 1)}, ValueError, "^k takes .* with D = 8"),
    (dense, {"v": rand(B, HKV, SKV + 1, DV)}, ValueError, "^v takes .* with Skv = 7"),
    (dense, {"v": rand(B, HQ, SKV, DV)}, ValueError, "^v takes .* with Hkv = 2"),
    (dense, {"sinks": rand(HKV)}, ValueError, "^sinks takes .* with Hq = 4"),
    (dense, {"kv_lens": torch.tensor([7])}, ValueError, "^kv_lens takes .* with B = 2"),
    (dense, {"bias": rand(SQ, SKV + 1)}, ValueError, "^bias takes .* with Skv = 7"),
    (dense, {"bias": rand(HKV, SQ, SKV)}, ValueError, "^bias takes .* with Hq = 4"),
    (dense, {"q": rand(B, 3, SQ, D)}, ValueError, "^q takes .* multiple .* Hq = 3 and Hkv = 2"),
    (dense, {"q": rand(B, 0, SQ, D)}, ValueError, "^q takes .* Hq at least 1"),
    (
        dense,
        {"k": rand(B, 0, SKV, D), "v": rand(B, 0, SKV, D)},
        ValueError,
        "^k takes .* Hkv at least 1",
    ),
    (
        dense,
        {"q": rand(B, HQ, SQ, 0), "k": rand(B, HKV, SKV, 0)},
        ValueError,
        "^q takes .* D at least 1",
    ),
    (dense, {"v": rand(B, HKV, SKV, 0)}, ValueError, "^v takes .* Dv at least 1"),
    (varlen, {"cu_seqlens_k": torch.tensor([0, 7])}, ValueError, r"^cu_seqlens_k takes .* B \+ 1"),
    (varlen, {"q": rand(5, 3, D)}, ValueError, "^q takes .* multiple"),
    (paged, {"v_pages": rand(N_PAGES, PAGE + 1, HKV, DV)}, ValueError, "^v_pages takes .* page"),
    (paged, {"v_pages": rand(N_PAGES - 1, PAGE, HKV, DV)}, ValueError, "^v_pages takes .* n_pages"),
    (paged, {"page_table": torch.zeros(3, 3).long()}, ValueError, "^page_table takes .* B = 2"),
    (varlen_paged, {"page_table": torch.zeros(3, 3).long()}, ValueError, "^page_table .* B = 2"),
    (varlen_paged, {"kv_lens": torch.tensor([9])}, ValueError, "^kv_lens takes .* B = 2"),
    (paged, {"bias": rand(SQ, MAX_PAGES * PAGE - 1)}, ValueError, "^bias takes .* Skv = 12"),
    (
        paged,
        {"k_pages": rand(N_PAGES, 0, HKV, D), "v_pages": rand(N_PAGES, 0, HKV, D)},
        ValueError,
        "^k_pages takes .* page at least 1",
    ),
    # dtypes and types
    (dense, {"k": rand(B, HKV, SKV, D, dtype=torch.float16)}, TypeError, "^k takes float64"),
    (dense, {"v": rand(B, HKV, SKV, DV, dtype=torch.float32)}, TypeError, "^v takes float64"),
    (dense, {"q": torch.ones(B, HQ, SQ, D, dtype=torch.int32)}, TypeError, "^q takes float16 or"),
    (dense, {"q": torch.ones(B, HQ, SQ, D, dtype=torch.complex64)}, TypeError, "^q takes float16"),
    (dense, {"bias": rand(SQ, SKV) > 0}, TypeError, "^bias takes float64 or float32 .* got bool"),
    (dense, {"sinks": rand(HQ, dtype=torch.float16)}, TypeError, "^sinks takes float64 or float32"),
    (dense, {"kv_lens": torch.tensor([3.0, 4.0])}, TypeError, "^kv_lens takes int32 or int64"),
    (varlen, {"cu_seqlens_q": torch.tensor([0.0, 5.0])}, TypeError, "^cu_seqlens_q takes int32"),
    (paged, {"page_table": torch.zeros(2, 3)}, TypeError, "^page_table takes int32 or int64"),
    (
        paged,
        {"v_pages": rand(9, 4, 2, 6, dtype=torch.float32)},
        TypeError,
        "^v_pages takes float64",
    ),
    (dense, {"q": np.zeros((B, HQ, SQ, D))}, TypeError, "^q takes .* got numpy.ndarray"),
    (dense, {"v": None}, TypeError, "^v takes a torch.Tensor, got None"),
    (dense, {"kv_lens": [3, 4]}, TypeError, "^kv_lens takes a torch.Tensor, got list"),
    (paged, {"kv_lens": None}, TypeError, "^kv_lens takes a torch.Tensor, got None"),
    (varlen_paged, {"kv_lens": None}, TypeError, "^kv_lens takes a torch.Tensor, got None"),
    (varlen_paged, {"cu_seqlens_q": None}, TypeError, "^cu_seqlens_q takes a torch.Tensor"),
    (varlen_paged, {"cu_seqlens_k": OFFSETS}, ValueError, "^cu_seqlens_k is not an argument"),
    (varlen, {"kv_lens": torch.tensor([3, 4])}, ValueError, "^kv_lens is not an argument"),
    (varlen, {"cu_seqlens_k": None}, TypeError, "^cu_seqlens_k takes a torch.Tensor, got None"),
    (paged, {"k_pages": None}, TypeError, "^k_pages takes a torch.Tensor, got None"),
    (varlen, {"cu_seqlens_k": None}, TypeError, "^cu_seqlens_k takes a torch.Tensor, got None"),
    (
        varlen,
        {"cu_seqlens_q": None, "cu_seqlens_k": None},
        TypeError,
        "^cu_seqlens_q takes a torch.Tensor, got None",
    ),
    (paged, {"page_table": None}, TypeError, "^page_table takes a torch.Tensor, got None"),
    # devices
    (dense, {"k": rand(B, HKV, SKV, D).to("meta")}, ValueError, "^k takes the device of q, cpu"),
    (dense, {"kv_lens": torch.ones(B, device="meta").int()}, ValueError, "^kv_lens takes the dev"),
    (dense, {"q": rand(B, HQ, SQ, D).to("meta")}, ValueError, "^k takes the device of q, meta"),
    (varlen, {"cu_seqlens_q": torch.ones(3, device="meta").int()}, ValueError, "^cu_seqlens_q tak"),
    # lengths
    (dense, {"kv_lens": torch.tensor([3, -1])}, ValueError, "^kv_lens takes 0 to Skv = 7, got -1"),
    (dense, {"kv_lens": torch.tensor([8, 3])}, ValueError, "^kv_lens takes .* got 8 at index 0"),
    (dense, {"kv_starts": torch.tensor([-1, 3])}, ValueError, "^kv_starts takes 0 to Skv .* -1 at"),
    (
        dense,
        {"kv_lens": torch.tensor([3, 7]), "kv_starts": torch.tensor([4, 3])},
        ValueError,
        "^kv_starts takes 0 to kv_lens = 3, got 4 at index 0, for sequence 0",
    ),
    (dense, {"kv_starts": torch.tensor([1.0, 2.0])}, TypeError, "^kv_starts takes int32 or int64"),
    (paged, {"kv_lens": torch.tensor([13, 3])}, ValueError, "^kv_lens takes 0 to Skv = 12"),
    (varlen_paged, {"kv_lens": torch.tensor([13, 3])}, ValueError, "^kv_lens takes 0 to Skv = 12"),
    (varlen_paged, {"cu_seqlens_q": torch.tensor([0, 2, 4])}, ValueError, "^cu_seqlens_q .* Tq"),
    # offsets
    (varlen, {"cu_seqlens_q": torch.tensor([1, 2, 5])}, ValueError, "^cu_seqlens_q .* start at 0"),
    (varlen, {"cu_seqlens_k": torch.tensor([0, 9, 7])}, ValueError, "^cu_seqlens_k .* 9 then 7"),
    (varlen, {"cu_seqlens_q": torch.tensor([0, 2, 4])}, ValueError, "^cu_seqlens_q .* Tq = 5"),
    (varlen, {"cu_seqlens_k": torch.tensor([0, 2, 8])}, ValueError, "^cu_seqlens_k .* Tk = 7"),
    (
        varlen,
        {"cu_seqlens_q": torch.zeros(0).int(), "cu_seqlens_k": torch.zeros(0).int()},
        ValueError,
        r"^cu_seqlens_q takes .* with B \+ 1 at least 1, got \[0\]",
    ),
    # pages
    (paged, {"page_table": torch.tensor([[3, 1, 9], [0, 2, -1]])}, ValueError, "^page_table .* 9 "),
    (
        paged,
        {"page_table": torch.tensor([[3, 1, 8], [0, -2, 0]])},
        ValueError,
        "^page_table .* -2 ",
    ),
    # a bound of queries: there are 2 and 3
    (varlen, {"max_seqlen_q": 2}, ValueError, "^max_seqlen_q takes .* 2 with 3 .* sequence 1"),
    (
        varlen_paged,
        {"max_seqlen_q": 0},
        ValueError,
        "^max_seqlen_q takes .* 0 with 2 .* sequence 0",
    ),
    (varlen, {"max_seqlen_q": -1}, ValueError, "^max_seqlen_q takes 0 or more, or None, got -1"),
    (varlen_paged, {"max_seqlen_q": 10**30}, ValueError, "^max_seqlen_q takes .* a larger one"),
    (varlen, {"max_seqlen_q": True}, TypeError, "^max_seqlen_q takes an integer .* got bool"),
    (varlen_paged, {"max_seqlen_q": 3.0}, TypeError, "^max_seqlen_q takes an integer .* float"),
    (
        varlen_paged,
        {"max_seqlen_q": 2, "cu_seqlens_q": torch.tensor([0, 9, 5])},
        ValueError,
        "^cu_seqlens_q takes offsets that never decrease",
    ),
    # options
    (dense, {"window": (-1, 0)}, ValueError, r"^window takes .* got \(-1, 0\)"),
    (dense, {"window": (None, -3)}, ValueError, r"^window takes .* got \(None, -3\)"),
    (dense, {"window": (4, 1), "causal": True}, ValueError, "^window takes 0 or None on its right"),
    (dense, {"window": (1, 2, 3)}, ValueError, "^window takes .left, right., got 3"),
    (dense, {"window": 3}, TypeError, "^window takes .left, right. or None, got int"),
    (dense, {"window": (1.5, 0)}, TypeError, "^window takes integers .* float for its left"),
    (dense, {"window": (0, True)}, TypeError, "^window takes integers .* bool for its right"),
    (dense, {"scale": math.nan}, ValueError, "^scale takes a finite number"),
    (dense, {"scale": math.inf}, ValueError, "^scale takes a finite number"),
    (dense, {"scale": "1"}, TypeError, "^scale takes a number or None, got str"),
    (dense, {"softcap": 0.0}, ValueError, "^softcap takes a finite number above 0"),
    (dense, {"softcap": -3.0}, ValueError, "^softcap takes"),
    (dense, {"softcap": math.nan}, ValueError, "^softcap takes"),
    (dense, {"softcap": rand(1)}, TypeError, "^softcap takes a number or None, got Tensor"),
    (dense, {"causal": 1}, TypeError, "^causal takes True or False, got int"),
    (dense, {"causal": np.True_}, TypeError, "^causal takes True or False, got numpy.bool"),
    (dense, {"scale": np.float32(1)}, TypeError, "^scale takes a number or None, got numpy.float"),
    (varlen, {"window": (4, 1), "causal": True}, ValueError, "^window takes 0 or None"),
    (paged, {"scale": math.nan}, ValueError, "^scale takes a finite number"),
    # what float32 does not hold, or holds in part
    (dense, {"scale": 10**400}, ValueError, "^scale takes a finite number .* larger integer"),
    (dense, {"scale": -(10**400)}, ValueError, "^scale takes a finite number"),
    (varlen, {"softcap": 10**400}, ValueError, "^softcap takes a finite number"),
    (dense, {"softcap": math.inf}, ValueError, "^softcap takes a finite number"),
    (dense, {"scale": 1e39}, ValueError, r"^scale takes .* size 1e-37 to 1e\+37, got 1e\+39"),
    (dense, {"scale": -3e38}, ValueError, "^scale takes"),
    (dense, {"scale": 1e-40}, ValueError, "^scale takes"),
    (dense, {"softcap": 3e38}, ValueError, r"^softcap takes .* 1e-37 to 1e\+37, got 3e\+38"),
    (paged, {"softcap": 1e-40}, ValueError, "^softcap takes"),
    (dense, {"softcap": 1e30, "scale": 1e-9}, ValueError, "^softcap takes .* scale / softcap"),
    (dense, {"softcap": 1e-30, "scale": 1e9}, ValueError, "^softcap takes .* scale / softcap"),
    (dense, {"window": (10**30, 0)}, ValueError, "^window takes distances up to .* its left"),
    # flags
    (dense, {"return_lse": "no"}, TypeError, "^return_lse takes True or False, got str"),
    (varlen, {"return_lse": 0}, TypeError, "^return_lse takes True or False, got int"),
    (paged, {"return_lse": None}, TypeError, "^return_lse takes True or False, got NoneType"),
]


@pytest.mark.parametrize(("arguments", "changes", "error", "message"), BAD)
def test_bad_input(arguments, changes, error, message):
    for call in CALLS[arguments]:
        with pytest.raises(error, match=message):
            call(**arguments(**changes))


def test_offsets_of_no_sequence_are_refused_without_a_look_at_values():
    # As on a GPU, where nothing looks at them: B would be -1.
    on_meta = {name: x.to("meta") for name, x in varlen().items()}
    nothing = torch.zeros(0, dtype=torch.int32, device="meta")
    for call in CALLS[varlen]:
        with pytest.raises(ValueError, match=r"^cu_seqlens_q takes"):
            call(**on_meta | {"cu_seqlens_q": nothing, "cu_seqlens_k": nothing})


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(x))


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x], layout=torch.jagged)


WITHOUT_STRIDES = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "_mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": nested,
    "nested, jagged": jagged,
}


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*beta state")
@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
@pytest.mark.parametrize("arguments", CALLS)
def test_tensors_without_strides_are_refused_by_name(arguments, kind):
    right = arguments(sinks=rand(HQ))
    if arguments not in (varlen, varlen_paged):
        right |= {"bias": rand(B, HQ, SQ, SKV if arguments is dense else MAX_PAGES * PAGE)}
    if arguments is dense:
        right |= {"kv_lens": torch.tensor([3, 7])}
    for name, tensor in right.items():
        wrong = right | {name: WITHOUT_STRIDES[kind](tensor)}
        found = kind.split(",")[0]
        for call in CALLS[arguments]:
            with pytest.raises(TypeError, match=rf"^{name} takes a strided tensor, got .*{found}"):
                call(**wrong)
        # The right call before, and gradients wanted: no other way leads past the check.
        single = {n: x.float() if x.is_floating_point() else x for n, x in right.items()}
        CALLS[arguments][0](**single)
        if not single[name].is_floating_point() or kind != "sparse_coo":
            continue
        wrong = single | {name: single[name].to_sparse().requires_grad_()}
        with pytest.raises(TypeError, match=rf"^{name} takes a strided tensor"):
            CALLS[arguments][0](**wrong)


def test_operators_refuse_tensors_without_strides():
    q, k, v = dense().values()
    options = (*Options(), None)
    with pytest.raises(TypeError, match=r"^k takes a strided tensor, got one of layout sparse_coo"):
        torch.ops.lockstep.attention(q, k.to_sparse(), v, *(None,) * 5, *options)
