"""transformers with attn_implementation="lockstep": small models of many kinds against eager."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

import tiny_models
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import CompileConfig

import lockstep
from lockstep import padded
from lockstep.integrations import transformers as integration
from lockstep.integrations.transformers import masks
from lockstep.integrations.transformers.lazy_mask import LazyMask, plan_of

SIDES = [None, "left", "right"]


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def assert_close_to_eager(model, given):
    model.set_attn_implementation("eager")
    wanted, wanted_grads = tiny_models.output_and_gradients(model, given)
    model.set_attn_implementation("lockstep")
    found, grads = tiny_models.output_and_gradients(model, given)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert grads.keys() == wanted_grads.keys()
    largest = max(float(x.abs().max()) for x in wanted_grads.values())
    for name, grad in grads.items():
        assert (grad - wanted_grads[name]).abs().max() <= 2e-6 * largest, name


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", [*tiny_models.DECODERS, *tiny_models.ENCODERS, "t5"])
def test_logits_and_gradients_are_those_of_eager(name, side):
    assert_close_to_eager(tiny_models.make(name), tiny_models.inputs_of(name, side))


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_models_without_padding(name):
    assert_close_to_eager(tiny_models.make(name), tiny_models.inputs_of(name))


def generate(model, given, **options):
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gpt_oss"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3", "gemma2", "gemma3", "mistral")
        ),
    ],
)
def test_generate_is_that_of_eager(name, side, cache):
    given = tiny_models.inputs_of(name, side, S=10)
    assert_generates_as_eager(name, given, cache_implementation=cache)


def assert_generates_as_eager(name, given, **options):
    model = tiny_models.make(name)
    wanted = generate(model, given, disable_compile=True, **options)
    model.set_attn_implementation("lockstep")
    found = generate(model, given, disable_compile=True, **options)
    for a, b in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.sequences, wanted.sequences)


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_caches_that_wait_in_host_memory(cache, monkeypatch):
    """transformers moves them by CUDA streams, which here do nothing: all memory is the host's."""
    stream = MagicMock()
    for owner, name in ((torch, "Stream"), (torch.cuda, "Stream"), (torch.cuda, "default_stream")):
        monkeypatch.setattr(owner, name, lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    given = tiny_models.inputs_of("gemma3", "left", S=10)
    assert_generates_as_eager("gemma3", given, max_new_tokens=5, cache_implementation=cache)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 2, "cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
    ],
    ids=str,
)
def test_other_ways_to_generate(options):
    given = tiny_models.inputs_of("gemma3", "left", S=10)
    assert_generates_as_eager("gemma3", given, max_new_tokens=5, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_an_encoder(cache):
    given = tiny_models.inputs_of("t5", "right")
    del given["decoder_input_ids"]
    assert_generates_as_eager("t5", given, cache_implementation=cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_chunked_prefill_over_a_cache(name):
    model = tiny_models.make(name, "lockstep")
    given = tiny_models.inputs_of(name)
    whole = model(**given).logits
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=32)):
        parts = [
            model(ids, past_key_values=cache).logits
            for ids in given["input_ids"].split([7, 1, 5, 7], 1)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences(name):
    """By position_ids or by cu_seq_lens: each sequence as it would be alone."""
    model = tiny_models.make(name, "lockstep")
    ids = tiny_models.inputs_of(name, B=1)["input_ids"]
    lengths = [3, 12, 5]
    wanted = torch.cat([model(x).logits for x in ids.split(lengths, 1)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    by_positions = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(by_positions, wanted, rtol=1e-5, atol=1e-5)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    lens = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    most = {"max_length_q": 12, "max_length_k": 12}
    by_offsets = model(ids, position_ids=positions, use_cache=False, **lens, **most).logits
    torch.testing.assert_close(by_offsets, wanted, rtol=1e-5, atol=1e-5)


def test_attention_outputs_have_the_same_bits_alone_and_in_a_batch():
    """Whatever the padding. Projections of other sizes need not be: they are given the same."""
    torch.manual_seed(0)
    attend = AttentionInterface()["lockstep"]
    B, S, lengths = 8, 40, [40, 31, 1, 17, 33, 40, 2, 25]
    q, k, v = (torch.randn(B, S, h, 16).transpose(1, 2) for h in (4, 2, 2))
    mask = torch.arange(S) >= S - torch.tensor(lengths)[:, None]
    module = torch.nn.Module()
    for sinks in (None, torch.randn(4)):
        plan = masks.make_mask(B, S, S, attention_mask=mask)
        batch, _ = attend(module, q, k, v, plan, s_aux=sinks)
        for b, n in enumerate(lengths):
            mine = (x[b : b + 1, :, S - n :] for x in (q, k, v))
            alone, _ = attend(module, *mine, None, s_aux=sinks)
            assert torch.equal(alone[0], batch[b, S - n :])


@pytest.mark.parametrize("n", [1, 2])
def test_a_contiguous_cache_is_not_copied(n, monkeypatch):
    """Keys of a cache [B, H, S, D] go to the kernel where they lie; one token has kv_starts."""
    seen = []
    original = padded.attention_varlen
    monkeypatch.setattr(
        padded, "attention_varlen", lambda *a, **b: (seen.append(a), original(*a, **b))[1]
    )
    q, k, v = (torch.randn(3, 4, length, 16) for length in (n, 50, 50))
    mask = torch.arange(50) >= torch.tensor([0, 20, 49])[:, None]
    plan = masks.make_mask(3, n, 50, q_offset=50 - n, attention_mask=mask)
    out, _ = AttentionInterface()["lockstep"](torch.nn.Module(), q, k, v, plan)
    moved = [[x.data_ptr() for x in given[1:3]] for given in seen]
    assert moved == ([] if n == 1 else [[k.data_ptr(), v.data_ptr()]])
    bias = torch.where(mask, 0.0, -torch.inf)[:, None, None]
    wanted = lockstep.attention(q, k, v, bias=bias, causal=True).transpose(1, 2)
    torch.testing.assert_close(out, wanted)


@pytest.mark.slow
def test_a_static_cache_with_a_compiled_step():
    """The mask is made outside of what is compiled, and goes in as an argument."""
    given = tiny_models.inputs_of("llama", "left", S=10)
    model = tiny_models.make("llama", "lockstep")
    wanted = generate(model, given, cache_implementation="static", disable_compile=True)
    compile_config = CompileConfig(backend="aot_eager", fullgraph=True)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    found = generate(model, given, cache_implementation="static", compile_config=compile_config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert torch.equal(found.sequences, wanted.sequences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "derives"),
    [
        ("llama", None, True),
        ("gemma2", "left", False),
        ("gpt_oss", None, True),
        ("t5", "left", False),
    ],
)
def test_compiled_in_one_graph(name, side, derives):
    model = tiny_models.make(name, "lockstep")
    if name == "gpt_oss":
        # The default goes by how many tokens an expert gets, which no compiler knows.
        model.set_experts_implementation("batched_mm")
    given = tiny_models.inputs_of(name, side)
    wanted = tiny_models.output_of(model, given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(derives):
        found = tiny_models.output_of(compiled, {**given, "use_cache": False})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_would_be_ignored_raises():
    attend = AttentionInterface()["lockstep"]
    q = torch.randn(1, 2, 4, 16)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        attend(module, q, q, q, None, dropout=0.1)
    with pytest.raises(ValueError, match="output_attentions=True"):
        attend(module, q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match=r"alibi=a tensor \[2\]"):
        attend(module, q, q, q, None, alibi=torch.ones(2))
    out, weights = attend(module, q, q, q, None, output_attentions=False, alibi=None)
    assert out.shape == (1, 4, 2, 16)
    assert weights is None


def test_chosen_keys():
    attend = AttentionInterface()["lockstep"]
    q = torch.randn(2, 2, 6, 16)
    indices = torch.rand(2, 6, 6).argsort(-1)[..., :3].int()
    is_chosen = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(2, indices.long(), True)[:, None]
    shift = torch.randn(2, 1, 6, 6)
    for mask, bias in (
        (None, torch.zeros(6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)),
        (shift, shift),
    ):
        wanted = lockstep.attention(q, q, q, bias=bias + torch.where(is_chosen, 0.0, -torch.inf))
        out, _ = attend(torch.nn.Module(), q, q, q, mask, indices=indices)
        assert torch.equal(out, wanted.transpose(1, 2))


def test_masks_of_numbers_and_booleans():
    attend = AttentionInterface()["lockstep"]
    q = torch.randn(2, 2, 6, 16)
    mask = torch.rand(2, 1, 6, 6) > 0.4
    bias = torch.where(mask, 0.0, -torch.inf)
    wanted = lockstep.attention(q, q, q, bias=bias).transpose(1, 2)
    for given in (mask, bias):
        assert torch.equal(attend(torch.nn.Module(), q, q, q, given)[0], wanted)


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "full": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "full window": masking_utils.sliding_window_bidirectional_mask_function(5),
}
CUSTOM = {
    "or": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 2),
    "and": masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k > 1),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.long)),
}


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("sizes", [(12, 12, 0, 0), (1, 12, 11, 0), (4, 12, 8, 0), (3, 20, 9, 0)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_plan_says_what_the_boolean_mask_says(pattern, sizes, side):
    """For every row that is not padding."""
    q_length, kv_length, q_offset, kv_offset = sizes
    if "full" in pattern and q_offset:
        pytest.skip("caches are causal")
    total = q_offset + q_length
    padding = tiny_models.padding(side, 3, total)
    padding = None if padding is None else padding.bool()
    given = {
        "batch_size": 3,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": PATTERNS[pattern],
        "attention_mask": padding,
    }
    made = masks.make_mask(**given)
    assert plan_of(made).seen is None
    wanted = masking_utils.eager_mask(**given)
    assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
    rows = torch.ones(3, q_length, dtype=torch.bool)
    if padding is not None:
        rows = padding[:, q_offset:]
    assert torch.equal((made + 0)[:, 0][rows], wanted[:, 0][rows])


@pytest.mark.parametrize("pattern", CUSTOM)
def test_other_masks_stay_masks(pattern):
    given = {"batch_size": 3, "q_length": 12, "kv_length": 12, "mask_function": CUSTOM[pattern]}
    given["use_vmap"] = pattern != "chunks"
    made = masks.make_mask(**given)
    assert plan_of(made).seen is not None
    assert torch.equal(made, masking_utils.eager_mask(**given))


def test_padding_with_holes_stays_a_mask():
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, 3] = False
    made = masks.make_mask(2, 8, 8, attention_mask=padding)
    assert torch.equal(made, masking_utils.eager_mask(2, 8, 8, attention_mask=padding))


def test_packed_sequences_as_a_mask():
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    pattern = masking_utils.and_masks(
        PATTERNS["causal"], masking_utils.packed_sequence_mask_function(numbers)
    )
    given = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": pattern}
    made = masks.make_mask(**given)
    assert plan_of(made).offsets.tolist() == [0, 3, 5, 6, 7, 12]
    assert torch.equal(made, masking_utils.eager_mask(**given))


def test_a_mask_moves_without_being_built():
    made = masks.make_mask(2, 6, 6, dtype=torch.bfloat16)
    moved = made.to("meta")
    assert isinstance(moved, LazyMask)
    assert (moved.device.type, moved.dtype, moved.shape) == ("meta", torch.bfloat16, made.shape)
    assert type(made.float()) is torch.Tensor
    assert "causal=True" in repr(made)


@pytest.mark.parametrize("side", [None, "left"])
def test_models_that_compute_with_their_mask(side):
    """Doge adds to it, DeepSeek V3.2 chooses keys by it, Bloom has no attention but its own."""
    for name in tiny_models.MASK_USERS:
        model = tiny_models.make(name)
        given = tiny_models.inputs_of(name, side)
        wanted = tiny_models.output_of(model, given)
        found = tiny_models.output_of(tiny_models.make(name, "lockstep"), given)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_goes_through_checkpoints():
    given = tiny_models.inputs_of("llama", "left")
    model = tiny_models.make("llama", "lockstep").train()
    wanted, wanted_grads = tiny_models.output_and_gradients(model, given)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found, grads = tiny_models.output_and_gradients(model, {**given, "use_cache": False})
        assert torch.equal(found, wanted)
        for name, grad in grads.items():
            assert torch.equal(grad, wanted_grads[name]), name


def test_both_are_registered():
    assert "lockstep" in AttentionInterface()
    assert "lockstep" in AttentionMaskInterface()
