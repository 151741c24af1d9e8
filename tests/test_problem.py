"""Names of kernels, factors and layouts of a call: what is taken, and what it describes."""

from __future__ import annotations

import pytest
import torch
from good_calls import (
    CALLS,
    DV,
    HKV,
    HQ,
    MAX_PAGES,
    N_PAGES,
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

import lockstep
from lockstep.problem import Options, Tensors, describe


@pytest.mark.parametrize("flag", ["query_invariant", "allow_tf32", "constant_time"])
@pytest.mark.parametrize("arguments", CALLS)
def test_flags_are_flags(arguments, flag):
    with pytest.raises(TypeError, match=rf"^{flag} takes True or False, got int"):
        CALLS[arguments][0](**arguments(), **{flag: 1})


@pytest.mark.parametrize("arguments", CALLS)
def test_unknown_kernel(arguments):
    with pytest.raises(ValueError, match=r"^kernel takes one of .*oracle.* got 'no_such_kernel'"):
        CALLS[arguments][0](**arguments(), kernel="no_such_kernel")


@pytest.mark.parametrize("kernel", [["cpu"], {}, 3, torch.float32])
@pytest.mark.parametrize("arguments", CALLS)
def test_a_kernel_is_given_by_name(arguments, kernel):
    message = r"^kernel takes the name of a kernel or None, got"
    with pytest.raises(TypeError, match=message):
        CALLS[arguments][0](**arguments(), kernel=kernel)
    with pytest.raises(TypeError, match=message):
        lockstep.explain(**dense(), kernel=kernel)


@pytest.mark.parametrize("arguments", CALLS)
def test_unknown_kernel_on_the_meta_device(arguments):
    meta = {name: tensor.to("meta") for name, tensor in arguments().items()}
    with pytest.raises(ValueError, match=r"^kernel takes one of .* got 'no_such_kernel'"):
        CALLS[arguments][0](**meta, kernel="no_such_kernel")


FACTORS = [
    {"scale": 0},
    {"scale": -1.5},
    {"scale": 1e-37},
    {"scale": 1e37},
    {"softcap": 1e-37},
    {"softcap": 1e-30},
    {"softcap": 1e30},
    {"softcap": 1e37, "scale": 1.0},
    {"softcap": 1e-3, "scale": 0},
]


@pytest.mark.parametrize("options", FACTORS, ids=str)
@pytest.mark.parametrize("zero", [False, True])
def test_factors_at_the_ends_of_their_range_give_what_the_oracle_gives(options, zero):
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    q = torch.zeros_like(q) if zero else q
    if not zero and abs(options.get("scale", 0)) > 1e30:
        q = q * 1e-37
    out, lse = lockstep.attention(q, k, v, **options, return_lse=True)
    expected = lockstep.reference.attention(q, k, v, **options, return_lse=True)
    torch.testing.assert_close((out.double(), lse.double()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", CALLS)
def test_the_good_input_that_the_bad_ones_differ_from(arguments):
    for call in CALLS[arguments]:
        assert call(**arguments()).isfinite().all()


def test_operators_refuse_what_the_calls_refuse():
    options = (*Options(window_left=-1), None)
    with pytest.raises(ValueError, match=r"^window takes"):
        torch.ops.lockstep.attention(*dense().values(), *(None,) * 5, *options)


def test_meta_tensors_give_shapes_and_are_checked():
    meta = {name: tensor.to("meta") for name, tensor in dense().items()}
    out, lse = lockstep.attention(**meta, return_lse=True)
    assert out.shape == (B, HQ, SQ, DV)
    assert lse.shape == (B, HQ, SQ)
    with pytest.raises(ValueError, match=r"^v takes"):
        lockstep.attention(meta["q"], meta["k"], meta["v"][:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_dtypes(dtype):
    for arguments, names in [
        (dense(kv_lens=torch.tensor([3, 7])), ["kv_lens"]),
        (varlen(), ["cu_seqlens_q", "cu_seqlens_k"]),
        (paged(), ["page_table", "kv_lens"]),
    ]:
        arguments |= {name: arguments[name].to(dtype) for name in names}
        call = {4: lockstep.attention}.get(len(arguments))
        call = call or (lockstep.attention_varlen if "k" in arguments else lockstep.attention_paged)
        assert call(**arguments).isfinite().all()


def test_problem_of_each_layout():
    problem = describe(Tensors(**dense(sinks=rand(HQ))), Options(causal=True, window_left=3))
    assert (problem.layout, problem.B, problem.Hq, problem.Hkv) == ("dense", B, HQ, HKV)
    assert (problem.Sq, problem.Skv, problem.D, problem.Dv) == (SQ, SKV, D, DV)
    assert (problem.has_sinks, problem.has_kv_lens, problem.bias_shape) == (True, False, None)
    assert problem.window == (3, 0)
    assert problem.scale == D**-0.5

    problem = describe(Tensors(**varlen()), Options(scale=2))
    assert (problem.layout, problem.B, problem.Sq, problem.Skv) == ("varlen", 2, 5, 7)
    assert problem.out_shape == (5, HQ, DV)
    assert isinstance(problem.scale, float)

    arguments = paged()
    tensors = Tensors(
        arguments["q"],
        arguments["k_pages"],
        arguments["v_pages"],
        rand(1, 1, 1, MAX_PAGES * PAGE, dtype=torch.float32),
        page_table=arguments["page_table"],
        kv_lens=arguments["kv_lens"],
    )
    problem = describe(tensors, Options())
    assert (problem.layout, problem.Skv, problem.page_size) == ("paged", MAX_PAGES * PAGE, PAGE)
    assert problem.n_pages == N_PAGES
    assert (problem.bias_shape, problem.bias_dtype) == ((1, 1, 1, 12), torch.float32)
    assert hash(problem) == hash(describe(tensors, Options()))


@pytest.mark.parametrize(
    ("given", "known"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, None), (10**9, None)],
)
def test_bounds_of_queries_are_rounded_so_that_few_problems_differ(given, known):
    problem = describe(Tensors(**varlen_paged()), Options(max_seqlen_q=given))
    assert problem.max_seqlen_q == known
    assert problem.longest_q == (known or problem.Sq)
    assert ("max_seqlen_q" in str(problem)) == (known is not None)


def test_bounds_of_queries_are_of_no_use_without_pages():
    tensors = Tensors(**varlen())
    assert describe(tensors, Options(max_seqlen_q=3)) == describe(tensors, Options())


def test_problem_reads_well():
    problem = describe(Tensors(**dense()), Options(True, 3, 0, softcap=20.0))
    assert str(problem) == (
        "dense B=2 Hq=4 Hkv=2 Sq=5 Skv=7 D=8 Dv=6 float64 on cpu, causal, window=(3, 0), "
        "softcap=20.0"
    )


@pytest.mark.parametrize("arguments", [dense, paged])
def test_secret_lengths_need_constant_time(arguments):
    call = CALLS[arguments][0]
    with pytest.raises(TypeError, match=r"^secret_lengths takes True or False, got int"):
        call(**arguments(), constant_time=True, secret_lengths=1)
    with pytest.raises(
        ValueError, match=r"^secret_lengths takes True only with constant_time=True"
    ):
        call(**arguments(), secret_lengths=True)


def test_secret_lengths_need_lengths():
    options = Options(constant_time=True, secret_lengths=True)
    problem = describe(Tensors(**dense()), options)
    assert (problem.constant_time, problem.secret_lengths) == (True, False)
    assert str(problem).endswith("on cpu, constant_time")
    lens = torch.tensor([0, 7])
    problem = describe(Tensors(**dense(kv_lens=lens)), options)
    assert (problem.constant_time, problem.secret_lengths) == (True, True)
    assert str(problem).endswith(", kv_lens, constant_time, secret_lengths")
