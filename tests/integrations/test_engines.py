"""The adapters for vLLM and SGLang against stand-ins of their interfaces (`engines.py`)."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engines

import lockstep
from lockstep.integrations import sglang, vllm

HQ, HKV, D, PAGE, PAGES = 4, 2, 16, 4, 24
# By step: how many tokens of each of three requests are computed. Prompts come in chunks, beside
# requests that decode.
STEPS = [[5, 0, 3], [1, 9, 4], [1, 1, 1], [1, 1, 1]]
LAYERS = {
    "plain": {},
    "gpt-oss": {"window": 6, "sinks": torch.linspace(-1, 1, HQ)},
    "gemma": {"softcap": 3.0, "scale": 0.2},
}


class Requests:
    """Three requests with scattered pages, and the tokens of one step after the other."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.lengths = torch.tensor(STEPS).sum(0)
        self.q, self.k, self.v = (
            [torch.randn(int(n), heads, D) for n in self.lengths] for heads in (HQ, HKV, HKV)
        )
        self.table = torch.randperm(PAGES)[: 3 * 6].view(3, 6).int()  # [3, pages]
        self.done = torch.zeros(3, dtype=torch.int64)

    def slot(self, request: int, position: int) -> int:
        return int(self.table[request, position // PAGE]) * PAGE + position % PAGE

    def steps(self):
        """Per step: requests, their counts of tokens, q, k, v of those tokens, and their slots."""
        for counts in STEPS:
            rows = [r for r in range(3) if counts[r]]
            spans = [(r, int(self.done[r]), int(self.done[r]) + counts[r]) for r in rows]
            tensors = [
                torch.cat([x[r][a:b] for r, a, b in spans]) for x in (self.q, self.k, self.v)
            ]
            slots = torch.tensor([self.slot(r, i) for r, a, b in spans for i in range(a, b)])
            self.done += torch.tensor(counts)
            yield rows, torch.tensor([counts[r] for r in rows]), tensors, slots

    def alone(self, request: int, window=None, **options) -> torch.Tensor:
        """[tokens, Hq, D] of a request without others and without pages."""
        q, k, v = (x[request].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        sides = None if window is None else (window - 1, 0)
        out = lockstep.attention(
            q, k, v, causal=True, window=sides, query_invariant=True, **options
        )
        return out[0].transpose(0, 1)


def gather(requests, outputs):
    """The tokens of each request, from (rows, counts, out) of each step."""
    found = [[], [], []]
    for rows, counts, out in outputs:
        for r, part in zip(rows, out.split(counts.tolist()), strict=True):
            found[r].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.fixture
def asked(monkeypatch):
    """The `max_seqlen_q` of the calls that either makes."""
    found = []

    def call(*args, **options):
        found.append(options["max_seqlen_q"])
        return lockstep.attention_varlen(*args, **options)

    for adapter in (vllm, sglang):
        monkeypatch.setattr(adapter, "attention_varlen", call)
    return found


@pytest.fixture
def vllm_backend(monkeypatch):
    registered = engines.install_vllm(monkeypatch)
    vllm._derived.cache_clear()
    vllm.register()
    ((member, path),) = registered.items()
    assert member.name == "CUSTOM"
    module, name = path.rsplit(".", 1)
    yield getattr(import_module(module), name)
    vllm._derived.cache_clear()


@pytest.mark.parametrize("layer", LAYERS)
def test_vllm_gives_each_request_its_bits_alone(layer, vllm_backend, asked):
    options = LAYERS[layer]
    implementation = vllm_backend.get_impl_cls()(
        HQ,
        D,
        options.get("scale", D**-0.5),
        HKV,
        None,
        options.get("window"),
        "auto",
        options.get("softcap", 0.0),
        "decoder",
        None,
        sinks=options.get("sinks"),
    )
    builder = vllm_backend.get_builder_cls()(None, [], None, "cpu")
    # Tokens before heads in memory, heads before tokens in the shape.
    cache = torch.full((PAGES, PAGE, HKV, 2 * D), torch.nan).transpose(1, 2)
    scales = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    requests, outputs = Requests(), []
    for rows, counts, (q, k, v), slots in requests.steps():
        common = SimpleNamespace(
            num_actual_tokens=len(q),
            query_start_loc=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            seq_lens=requests.done[rows].int(),
            block_table_tensor=requests.table[rows],
            slot_mapping=slots,
            causal=True,
            max_query_len=int(counts.max()),
        )
        metadata = builder.build(0, common)
        asked.clear()
        implementation.do_kv_cache_update(scales, k, v, cache, slots)
        # vLLM pads tokens to the sizes of its graphs.
        padded = torch.cat([q, torch.full((3, HQ, D), torch.nan)])
        output = torch.full_like(padded, 7.0)
        out = implementation.forward(scales, padded, k, v, cache, metadata, output)
        assert out is output
        assert (out[len(q) :] == 7.0).all()
        assert asked == [counts.max()]
        outputs.append((rows, counts, out[: len(q)]))
    for r, found in enumerate(gather(requests, outputs)):
        assert torch.equal(found, requests.alone(r, **options))


def test_vllm_is_told_what_the_backend_runs(vllm_backend):
    hopper = SimpleNamespace(major=9, minor=0)
    assert issubclass(vllm_backend, engines.VllmBackend)
    assert vllm_backend.get_name() == "CUSTOM"
    assert vllm_backend.reasons(128, torch.bfloat16, 16, hopper) == []
    assert vllm_backend.reasons(80, torch.float16, 1, hopper) == []
    assert vllm_backend.reasons(576, torch.bfloat16, 16, hopper) == ["head_size"]
    assert vllm_backend.reasons(512, torch.float32, 16, hopper) == ["combination"]
    refused = {"kv_cache_dtype": "fp8", "use_mla": True, "attn_type": "encoder_decoder"}
    assert vllm_backend.reasons(128, torch.bfloat16, 16, hopper, **refused) == [
        "kv_cache_dtype",
        "mla",
        "type",
    ]
    turing = SimpleNamespace(major=7, minor=5)
    assert vllm_backend.reasons(128, torch.float16, 16, turing) == ["capability"]
    builder = vllm_backend.get_builder_cls()
    assert builder._cudagraph_support is engines.AttentionCGSupport.ALWAYS


def test_vllm_refuses_what_would_be_ignored(vllm_backend):
    make = vllm_backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match="chunk_lookback"):
        make(HQ, D, 1.0, HKV, chunk_lookback=3)
    output = torch.ones(2, HQ, D)
    implementation = make(HQ, D, 1.0, HKV)
    assert not implementation.forward(None, output, None, None, None, None, output).any()
    with pytest.raises(NotImplementedError, match="quantised"):
        implementation.forward(None, output, None, None, None, None, output, torch.ones(()))


@pytest.fixture
def make_sglang(monkeypatch):
    registered, arguments = engines.install_sglang(monkeypatch)
    sglang.register()
    sglang.register()
    names = (arguments.ATTENTION_BACKEND_CHOICES, arguments.deterministic, arguments.radix)
    assert all(x == ["triton", "lockstep"] for x in names)

    def make(pool, table, use_mla_backend=False):
        runner = SimpleNamespace(
            use_mla_backend=use_mla_backend,
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            page_size=PAGE,
            model_config=SimpleNamespace(context_len=table.shape[1]),
            server_args=SimpleNamespace(enable_deterministic_inference=True),
        )
        return registered["lockstep"](runner)

    return make


def radix_layer(kind="decoder", window=None, softcap=0.0, scale=D**-0.5, **_):
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HQ,
        tp_k_head_num=HKV,
        tp_v_head_num=HKV,
        qk_head_dim=D,
        v_head_dim=D,
        scaling=scale,
        logit_cap=softcap,
        # Keys before the query's own.
        sliding_window_size=-1 if window is None else window - 1,
        is_cross_attention=False,
        attn_type=SimpleNamespace(value=kind),
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_sglang_gives_each_request_its_bits_alone(layer, make_sglang, asked):
    options = LAYERS[layer]
    requests, outputs = Requests(), []
    # Request r is row r + 1 of the table of slots.
    slots = torch.zeros(5, 24, dtype=torch.int32)
    for r in range(3):
        slots[r + 1] = torch.tensor([requests.slot(r, i) for i in range(24)])
    backend = make_sglang(engines.Pool(PAGES * PAGE, HKV, D), slots)
    assert isinstance(backend, engines.SglangBackend)
    mode = engines.ForwardMode
    for rows, counts, (q, k, v), places in requests.steps():
        batch = SimpleNamespace(
            forward_mode=mode.DECODE if bool((counts == 1).all()) else mode.EXTEND,
            req_pool_indices=torch.tensor(rows) + 1,
            seq_lens=requests.done[rows],
            extend_seq_lens=counts.int(),
            out_cache_loc=places,
        )
        backend.init_forward_metadata(batch)
        sinks = {} if "sinks" not in options else {"sinks": options["sinks"]}
        asked.clear()
        out = backend.forward(q.flatten(1), k, v, radix_layer(**options), batch, **sinks)
        assert asked == [1 if batch.forward_mode is mode.DECODE else None]
        outputs.append((rows, counts, out.view(-1, HQ, D)))
    for r, found in enumerate(gather(requests, outputs)):
        assert torch.equal(found, requests.alone(r, **options))


def test_sglang_refuses_what_would_be_ignored(make_sglang):
    slots, pool = torch.zeros(2, 8, dtype=torch.int32), engines.Pool(8, HKV, D, torch.float16)
    with pytest.raises(ValueError, match="latent"):
        make_sglang(pool, slots, use_mla_backend=True)
    with pytest.raises(ValueError, match="--disable-hybrid-swa-memory"):
        make_sglang(engines.SWAKVPool(), slots)
    backend = make_sglang(pool, slots)
    one = torch.ones(1, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=engines.ForwardMode.TARGET_VERIFY, req_pool_indices=one, seq_lens=one
    )
    with pytest.raises(NotImplementedError, match="speculative"):
        backend.init_forward_metadata(batch)
    batch.forward_mode = engines.ForwardMode.DECODE
    backend.init_forward_metadata(batch)
    q = torch.randn(1, HQ * D)
    with pytest.raises(NotImplementedError, match="bidirectional"):
        backend.forward(q, None, None, radix_layer("decoder_bidirectional"), batch)
    with pytest.raises(NotImplementedError, match="k_rope"):
        backend.forward(q, None, None, radix_layer(), batch, k_rope=q)
    with pytest.raises(NotImplementedError, match="float16"):
        backend.forward(q, None, None, radix_layer(), batch)


def test_entry_points_name_both():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for group, adapter in (("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)):
        entry = f'[project.entry-points."{group}"]\nlockstep = "{adapter.__name__}:register"\n'
        assert entry in text
        with pytest.raises(ImportError):
            adapter.register()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_of_either_follows_its_metadata(vllm_backend, make_sglang):
    """Captured with other lengths and pages than it is replayed with."""
    B, pages = 3, 40
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    cache = torch.randn(pages, PAGE, HKV, 2 * D, **options).transpose(1, 2)
    q = torch.randn(B, HQ, D, **options)
    table = torch.zeros(B, 12, dtype=torch.int32, device="cuda")
    lens = torch.ones(B, dtype=torch.int32, device="cuda")
    offsets = torch.arange(B + 1, dtype=torch.int32, device="cuda")
    implementation = vllm_backend.get_impl_cls()(HQ, D, D**-0.5, HKV)
    metadata = vllm.Metadata(B, offsets, lens, table, True, 1)
    output = torch.empty_like(q)

    pool = engines.Pool(pages * PAGE, HKV, D, torch.bfloat16)
    k, v = (x.reshape(-1, HKV, D) for x in implementation._pages(cache))
    pool.k, pool.v = k.contiguous(), v.contiguous()
    slots = torch.zeros(B, 12 * PAGE, dtype=torch.int32, device="cuda")
    backend = make_sglang(pool, slots)
    batch = SimpleNamespace(
        forward_mode=engines.ForwardMode.DECODE,
        req_pool_indices=torch.arange(B, device="cuda"),
        seq_lens=lens,
    )

    def step():
        backend.init_forward_metadata_in_graph(batch)
        other = backend.forward(q.flatten(1), None, None, radix_layer(), batch)
        return implementation.forward(None, q, None, None, cache, metadata, output), other

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    table.copy_(torch.randperm(pages)[: B * 12].view(B, 12))
    lens.copy_(torch.tensor([7, 33, 48]))
    places = table[:, :, None] * PAGE + torch.arange(PAGE, device="cuda", dtype=torch.int32)
    slots.copy_(places.flatten(1))
    graph.replay()
    wanted = lockstep.attention_paged(
        q[:, :, None], *implementation._pages(cache), table, lens, query_invariant=True
    )[:, :, 0]
    assert torch.equal(captured[0], wanted)
    assert torch.equal(captured[1].view_as(wanted), wanted)
