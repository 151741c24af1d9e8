"""`lockstep.warm_up`: which builds a model needs, and that the calls make them."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Thread

import pytest
import torch
from ahead_of_time import pretend_h200
from kernel_calls import forget_calls
from typer.testing import CliRunner

import lockstep
from lockstep import build_calls, builds, cli, model_config
from lockstep.bench.models.cases import CASES
from lockstep.kernels import compiled
from lockstep.models import MODELS, Layer

runner = CliRunner()
TINY = Layer(2, 1, 16)


@pytest.fixture
def h200(monkeypatch):
    """A function that says which builds calls would need on an H200: their names, by all that they
    are compiled for."""
    pytest.importorskip("lockstep.kernels.hopper.forward.launch")
    pretend_h200(monkeypatch.setattr)
    forget_calls(monkeypatch)
    # Nothing is launched. Memory that nothing is written to takes no time.
    monkeypatch.setattr(torch, "zeros", torch.empty)
    monkeypatch.setattr(torch, "zeros_like", torch.empty_like)

    def plan(calls):
        with compiled.planning() as planned:
            for call in calls:
                builds.run(call, torch.bfloat16, "cpu")
        return {key: build.name for key, build in planned.items()}

    return plan


def life(h200, model):
    return h200(builds.calls_of(MODELS[model].values(), builds.WORKS))


def others(h200, whole, calls):
    """The names of the builds that calls need besides those in `whole`."""
    return {name for key, name in h200(calls).items() if key not in whole}


def test_one_build_serves_every_length_and_batch(h200):
    layer = MODELS["Llama 3 8B"]["self"]
    calls = [
        builds.SampleCall(layer, "paged", Sq, Skv, page=16)
        for Sq, Skv in ((1, 1000), (1, 100_000), (2, 40_000), (2048, 2048), (77, 9000))
    ]
    calls.append(builds.SampleCall(layer, "paged", 1, 5000, page=16, B=300))
    # Few spans, which programs fold, and more of them.
    few = [(1, 2000, 4), (1, 2000, 5), (2, 2000, 1), (3, 2000, 1), (1, 16000, 7), (1, 900, 16)]
    calls += [builds.SampleCall(layer, "paged", Sq, n, page=16, B=B) for Sq, n, B in few]
    calls += [
        builds.SampleCall(layer, layout, length, length, backward=True)
        for length in (513, 1000, 2048)
        for layout in ("dense", "packed")
    ]
    assert others(h200, life(h200, "Llama 3 8B"), calls) == set()


def _of(n, lengths):
    """n, or the length next to it that there is."""
    least, most = lengths or (1, 1 << 20)
    return [min(max(n, least), most)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-oss", "BERT large", "Whisper large v3"])
def test_builds_of_narrow_heads_serve_every_length(h200, model):
    whole = life(h200, model)
    for layer in MODELS[model].values():
        lengths = (40, 197, 256, 257, 384, 448, 512, 513, 1024, 1025, 1500, 4096, 4097, 16384)
        dense = [
            builds.SampleCall(layer, "dense", n, *_of(n, layer.keys or layer.lengths), B=B)
            for n in lengths
            if [n] == _of(n, layer.lengths)
            for B in (1, 8, 64)
            if n * B <= 1 << 16
        ]
        # Gradients of sequences of one key tile have builds of their own, for when they are needed.
        trained = [replace(call, backward=True) for call in dense if call.B == 1 and call.Skv > 128]
        packed = [
            builds.SampleCall(layer, "packed", n, n, B=B, backward=backward)
            for n in (1000, 16384)
            for B in (1, 2, 100)
            if [n // B] == _of(n // B, layer.lengths) and layer.keys is None
            for backward in (False, True)
        ]
        assert others(h200, whole, [*dense, *trained, *packed]) == set()


@pytest.mark.parametrize(
    ("layer", "is_one"),
    [
        (Layer(4, 4, 64, causal=False), True),
        (Layer(4, 4, 128, causal=False), False),
        (Layer(4, 4, 128), True),
    ],
)
def test_lengths_that_tiles_divide_and_others_may_share_a_backward(h200, layer, is_one):
    even, odd = (h200([builds.SampleCall(layer, "dense", n, n, backward=True)]) for n in (512, 500))
    assert (even.keys() == odd.keys()) == is_one


# A model's builds for prefill, chunks, decode and training; then for packed sequences, too.
BUILDS = {
    "Llama 3 8B": (17, 25),
    "Llama 3 70B TP 8": (17, 25),
    "Qwen 3 0.6B": (15, 23),
    "Qwen 3 30B-A3B": (18, 26),
    "Mistral 7B": (16, 22),
    "Gemma 2 9B": (19, 28),
    "Gemma 2 27B": (20, 29),
    "Gemma 3 4B": (20, 30),
    "Gemma 3 27B": (22, 32),
    "gpt-oss": (23, 36),
    "DeepSeek V3 TP 8": (12, 17),
    "Phi-2": (10, 16),
    "Phi-3 mini": (10, 16),
    "StableLM 2 12B": (15, 22),
    "BERT large": (8, 16),
    "ModernBERT base": (17, 31),
    "ViT-B/16": (4, 10),
    "SigLIP So400m": (4, 10),
    "Qwen 2.5 VL vision": (10, 17),
    "Whisper large v3": (18, 31),
    "SDXL": (15, 24),
    "Flux.1": (7, 13),
    "CogVideoX 2B": (6, 13),
    "Wan 2.1 1.3B": (7, 13),
}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=() if model == "Llama 3 8B" else pytest.mark.slow)
        for model in MODELS
    ],
)
def test_builds_of_a_model(h200, model):
    layers = MODELS[model].values()
    whole = builds.calls_of(layers, ("prefill", "packed", "decode", "training"))
    without_packed = builds.calls_of(layers, ("prefill", "decode", "training"))
    assert set(without_packed) <= set(whole)
    first = h200(without_packed)
    more = h200(call for call in whole if call not in without_packed)
    assert (len(first), len(first | more)) == BUILDS[model]


@pytest.mark.parametrize("model", ["Llama 3 8B", "Llama 3 70B TP 8", "gpt-oss", "Phi-2"])
def test_builds_of_what_is_served_at_once_serve_every_batch(h200, model):
    layers = MODELS[model].values()
    whole = h200(builds.calls_of(layers, ("serve",)))
    sizes = [(1, 1, 500), (1, 100, 9000), (1, 3000, 3000), (7, 7, 100_000), (100, 100, 4096)]
    sizes += [(300, 300, 1000), (2, 20_000, 20_000), (40, 1000, 70_000), (8, 64, 16_384)]
    short = [(1, 100), (1, 9000), (3, 2000), (7, 100_000), (64, 4096), (300, 1000)]
    for layer in layers:
        calls = [builds.SampleCall(layer, "ragged", Sq, n, page=16, B=B) for B, Sq, n in sizes]
        # Where callers say how many queries a sequence has.
        calls += [
            builds.SampleCall(layer, "ragged", B, keys, page=16, B=B, max_seqlen_q=bound)
            for B, n in short
            for keys in _of(n, layer.lengths)
            for bound in (1, 2, 3, 5, 12, 50, 100)
        ]
        assert others(h200, whole, calls) == set()


def test_planned_calls_are_made_in_other_threads():
    build, calls = compiled.Build("x", list, list), []

    def call():
        calls.append(compiled.is_only_planned("key", build))

    with compiled.planning() as planned:
        call()
        call()
        thread = Thread(target=call)
        thread.start()
        thread.join()
    call()
    assert calls == [True, True, False, False]
    assert planned == {"key": build}


def test_the_calls_of_a_life():
    calls = builds.calls_of([TINY])
    assert {call.layout for call in calls} == {"dense", "packed", "paged", "ragged"}
    assert {call.layout for call in calls if call.backward} == {"dense", "packed"}
    assert {call.Sq for call in calls if call.layout == "paged"} == {
        *(1, build_calls.DRAFT, build_calls.LITTLE, build_calls.REST),
        *(build_calls.CHUNK, build_calls.PROMPT),
    }
    assert len(builds.calls_of([TINY, TINY])) == len(calls)
    encoder = replace(TINY, causal=False)
    assert builds.calls_of([encoder], ["decode"]) == []
    itself = replace(encoder, Hq=1)
    assert all(call.Sq == call.Skv for call in builds.calls_of([itself], ["training"]))
    cross = builds.calls_of([replace(itself, cross=True)], ["training"])
    assert any(call.Sq != call.Skv for call in cross)
    on_cpu = builds.calls_of([TINY], on_cpu=True)
    assert {call.Skv for call in on_cpu} <= {build_calls.SHORT, build_calls.LENGTH_ON_CPU}


def test_calls_have_lengths_that_a_model_has():
    layer = Layer(4, 4, 64, causal=False, cross=True, lengths=(10, 448), keys=(1500, 1500))
    for call in builds.calls_of([layer]):
        n = call.B if call.layout == "packed" else 1
        assert 10 <= call.Sq // n <= 448
        assert call.Skv == n * 1500
    assert all(call.Sq > 1 for call in builds.calls_of([layer], ["decode", "prefill"]))
    # One query at a time against the keys of another sequence.
    assert {
        call.Sq for call in builds.calls_of([replace(layer, lengths=(1, 448))], ["decode"])
    } == {1}


def test_cases_of_the_suite_have_lengths_that_their_models_have():
    for case in CASES:
        queries = case.shape.lengths or (1, 1 << 20)
        keys = case.shape.keys or queries
        assert queries[0] <= case.Sq <= queries[1], case
        assert keys[0] <= case.keys <= keys[1], case


@pytest.mark.slow
def test_a_warm_up_makes_every_call_in_this_process_and_in_others():
    told = []
    layer = Layer(2, 1, 16, 8, window=(63, 0), softcap=20.0, sinks=True)
    found = lockstep.warm_up(
        layer, dtype=torch.float32, device="cpu", processes=2, on_build=lambda *of: told.append(of)
    )
    n = len(builds.calls_of([layer], on_cpu=True))
    assert found.calls == n == len(told)
    assert {total for _, total in told} == {n}
    assert found.seconds > 0
    again = lockstep.warm_up(layer, dtype=torch.float32, device="cpu", processes=1)
    assert again.builds == 0


@pytest.mark.parametrize(
    ("model", "options", "error", "said"),
    [
        ("Llama 9", {}, ValueError, "model takes one of Llama 3 8B"),
        (3, {}, TypeError, "model takes the name of a model"),
        ([], {}, TypeError, "model takes the name of a model"),
        (
            TINY,
            {"works": ["play"]},
            ValueError,
            "works takes prefill, packed, decode, serve, training",
        ),
        (TINY, {"page": 0}, ValueError, "page takes at least 1, got 0"),
        (TINY, {"processes": 0}, ValueError, "processes takes at least 1, got 0"),
        (TINY, {"dtype": torch.int8}, TypeError, "dtype takes float16 or bfloat16"),
    ],
)
def test_bad_arguments_are_named(model, options, error, said):
    with pytest.raises(error, match=said):
        lockstep.warm_up(model, device="cpu", **options)


CONFIGS = [
    (
        {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"hidden_size": 4096, "torch_dtype": "float16"},
        {"global": Layer(32, 8, 128)},
    ),
    (
        {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"head_dim": 64, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"], "torch_dtype": "float16"},
        {"local": MODELS["gpt-oss"]["local"], "global": MODELS["gpt-oss"]["global"]},
    ),
    (
        {"model_type": "gemma2", "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"attn_logit_softcapping": 50.0, "torch_dtype": "float16"},
        {name: replace(layer, scale=256**-0.5) for name, layer in MODELS["Gemma 2 9B"].items()},
    ),
    (
        {
            "text_config": {"model_type": "deepseek_v3", "num_attention_heads": 16}
            | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
            | {"dtype": "float16"}
        },
        {"global": MODELS["DeepSeek V3 TP 8"]["self"]},
    ),
    (
        {"model_type": "bert", "num_attention_heads": 16, "hidden_size": 1024}
        | {"max_position_embeddings": 512, "torch_dtype": "float16"},
        {"global": MODELS["BERT large"]["self"]},
    ),
    (
        {"model_type": "llama", "num_attention_heads": 32, "hidden_size": 4096}
        | {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 8.0}}
        | {"torch_dtype": "float16"},
        {"global": Layer(32, 32, 128)},
    ),
]


@pytest.mark.parametrize(("config", "layers"), CONFIGS)
def test_layers_of_a_transformers_config(tmp_path, config, layers):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found, dtype = model_config.read(path)
    assert {name: replace(layer, Dv=layer.value_dim) for name, layer in found.items()} == {
        name: replace(layer, Dv=layer.value_dim) for name, layer in layers.items()
    }
    assert dtype == torch.float16


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is no JSON"), ("[]", "takes a JSON object"), ("{}", "has no num_attention_heads")],
)
def test_a_file_that_is_no_configuration(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    result = runner.invoke(cli.app, ["warm-up", str(path)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "takes a model, or --heads and --head-dim"),
        (["--heads", "8"], "--heads goes with --head-dim"),
        (["Llama 9"], "model takes one of"),
        (["no/config.json"], "No such file"),
        (["--heads", "2", "--head-dim", "8", "--dtype", "banana"], "dtype takes float16"),
        (["--heads", "2", "--head-dim", "8", "--work", "play"], "works takes prefill"),
    ],
)
def test_bad_options_end_with_status_2(options, said):
    result = runner.invoke(cli.app, ["warm-up", *options])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_the_command_says_what_it_did():
    options = ["--heads", "2", "--head-dim", "16", "--dtype", "float32", "--device", "cpu"]
    options += ["--work", "prefill", "--processes", "1"]
    result = runner.invoke(cli.app, ["warm-up", *options, "--json"])
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)) == {"calls", "builds", "seconds"}
    assert "1 kinds of call in" in runner.invoke(cli.app, ["warm-up", *options]).stdout
