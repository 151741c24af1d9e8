"""Compile what a model will need before it needs it: `lockstep.warm_up`.

A kernel is compiled for head dims, dtype, mask and options, and serves every length and batch. So a
few small calls of each kind need all builds. This process finds out which these are; several others
share them and leave them on disk, from where this one loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from lockstep import api, model_config
from lockstep.build_calls import WORKS, SampleCall, Work, calls_of
from lockstep.build_processes import processes as start_processes
from lockstep.environment import usable_cores
from lockstep.kernels import compiled
from lockstep.kernels.launch_in_c import find_launch
from lockstep.models import MODELS, Layer
from lockstep.problem import DTYPES, any_of

# The most builds for a GPU that a call needs and no call before it.
BUILDS_OF_A_CALL = 4
# Kernels that take longest to compile.
LONGEST = ("backward_kernel", "forward_kernel", "decode_kernel")


class WarmUp(NamedTuple):
    """The result of a warm-up."""

    calls: int
    builds: int
    """Compiled kernels that this process has loaded for these calls."""
    seconds: float


def warm_up(
    model: str | Path | Layer | Iterable[Layer],
    *,
    works: Sequence[Work] = WORKS,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    page: int = 16,
    processes: int | None = None,
    on_build: Callable[[str, int], None] | None = None,
) -> WarmUp:
    """Fills the caches with all builds that a model needs, so that no request waits for a compiler.

    Args:
        model: The name of a model in `lockstep.models.MODELS`, the path of a transformers
            config.json, or one or more `lockstep.models.Layer`.
        works: What the model will do: "prefill", "packed" (prefill of packed sequences), "decode"
            (with chunked prefill and speculative decode, out of pages; one query where keys are
            those of another sequence), "serve" (prompts, chunks and single tokens in one call out
            of pages, as serving engines make it) and "training". An encoder does not decode.
        dtype: float16, bfloat16, float32 or float64; None takes that of the config.json, or
            bfloat16.
        device: None takes the current CUDA device if there is one, else the CPU.
        page: Tokens of a page of the cache.
        processes: How many compile at once; None takes as many as there are cores, or fewer where
            there is not as much to do.
        on_build: Is called with the name of what another process has compiled, a kernel for GPUs or
            all of a call on CPUs, and how many of them there are.

    Returns:
        How many calls were made, how many builds this process has for them, and the seconds it
        took.

    Raises:
        ValueError, TypeError: An argument does not fit; the message names it.
        NotImplementedError: No kernel runs one of the calls; the message has the reason of each.

    Example:
        >>> works = ["prefill", "decode", "training"]
        >>> lockstep.warm_up("Llama 3 8B", works=works)  # doctest: +SKIP
        WarmUp(calls=18, builds=12, seconds=9.89)
    """
    start = perf_counter()
    layers, own_dtype = layers_of(model)
    dtype = own_dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise TypeError(f"dtype takes {any_of(DTYPES)}, got {dtype}")
    where = str(device or default_device())
    on_cpu = torch.device(where).type == "cpu"
    calls = calls_of(layers, works, page, on_cpu)
    if processes is not None and processes < 1:
        raise ValueError(f"processes takes at least 1, got {processes}")
    most = len(calls) * (1 if on_cpu else BUILDS_OF_A_CALL)
    n = min(processes or usable_cores(), most)
    if n > 1:
        _in_processes(calls, dtype, where, n, on_build)
    before = compiled.count()
    for call in calls:
        run(call, dtype, where)
    if torch.device(where).type == "cuda":
        # The second call of a kind compiles its launch, unless that has been done.
        find_launch()
        torch.cuda.synchronize(where)
    return WarmUp(len(calls), compiled.count() - before, round(perf_counter() - start, 2))


def run(call: SampleCall, dtype: torch.dtype, device: str) -> None:
    """Make one call on zeros."""
    layer = call.layer
    options: Any = {
        "causal": layer.causal,
        "window": layer.window,
        "scale": layer.scale,
        "softcap": layer.softcap,
    }

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device, requires_grad=call.backward)

    if layer.sinks:
        options["sinks"] = zeros(layer.Hq)
    if call.layout in ("paged", "ragged"):
        n_pages = -(-call.Skv // call.page)
        k, v = (zeros(n_pages, call.page, layer.Hkv, n) for n in (layer.D, layer.value_dim))
        # All sequences share their pages.
        table = torch.arange(n_pages, dtype=torch.int32, device=device).repeat(call.B, 1)
        lens = torch.full((call.B,), call.Skv, dtype=torch.int32, device=device)
    if call.layout == "paged":
        q = zeros(call.B, layer.Hq, call.Sq, layer.D)
        out = api.attention_paged(q, k, v, table, lens, **options)
    elif call.layout == "ragged":
        q = zeros(call.Sq, layer.Hq, layer.D)
        # All but the first have one query.
        ends = torch.arange(call.B + 1, dtype=torch.int32, device=device)
        ends[1:] += call.Sq - call.B
        options |= {"page_table": table, "kv_lens": lens, "max_seqlen_q": call.max_seqlen_q}
        out = api.attention_varlen(q, k, v, ends, **options)
    elif call.layout == "packed":
        q = zeros(call.Sq, layer.Hq, layer.D)
        k, v = (zeros(call.Skv, layer.Hkv, n) for n in (layer.D, layer.value_dim))
        first = torch.arange(call.B + 1, dtype=torch.int32, device=device)
        ends = first * (call.Sq // call.B)
        ends_k = ends if call.Skv == call.Sq else first * (call.Skv // call.B)
        out = api.attention_varlen(q, k, v, ends, ends_k, **options)
    else:
        q = zeros(call.B, layer.Hq, call.Sq, layer.D)
        k, v = (zeros(call.B, layer.Hkv, call.Skv, n) for n in (layer.D, layer.value_dim))
        out = api.attention(q, k, v, **options)
    if call.backward:
        leaves = [q, k, v, *([options["sinks"]] if layer.sinks else [])]
        # As a training does: with a gradient of its own to begin with, torch imports sympy.
        torch.autograd.grad((out * torch.zeros_like(out)).sum(), leaves)


def layers_of(model: object) -> tuple[list[Layer], torch.dtype]:
    """The layers of a model, and the dtype that a config.json gives, or bfloat16.

    Raises ValueError or TypeError for what is no model.
    """
    if isinstance(model, Layer):
        return [model], torch.bfloat16
    if isinstance(model, Path) or (isinstance(model, str) and model.endswith(".json")):
        layers, dtype = model_config.read(Path(model))
        return list(layers.values()), dtype
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"model takes one of {', '.join(MODELS)}, got {model!r}")
        return list(MODELS[model].values()), torch.bfloat16
    if isinstance(model, Iterable):
        found = list(model)
        if found and all(isinstance(layer, Layer) for layer in found):
            return found, torch.bfloat16
    raise TypeError("model takes the name of a model, a config.json, or one or more Layer")


def default_device() -> str:
    """CUDA if there is a device, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _in_processes(
    calls: list[SampleCall], dtype: torch.dtype, device: str, n: int, on_build: Any
) -> None:
    """Compile in `n` other processes, and load what they leave on disk. What fails there is
    compiled again here, where it raises."""
    on_gpu = torch.device(device).type == "cuda"
    # Where CUDA is at work, it has threads.
    can_copy = on_gpu and not torch.cuda.is_initialized()
    with start_processes(n, get_ready if on_gpu else _idle, can_copy) as others:
        todo = tasks_of(calls, dtype, device)
        for i in others.share([task.elsewhere for task in todo]):
            todo[i].here()
            if on_build is not None:
                on_build(todo[i].name, len(todo))


class Task(NamedTuple):
    """What there is to do for calls: in another process, and then in this one."""

    name: str
    elsewhere: Callable[[], object]
    here: Callable[[], object]


def tasks_of(calls: list[SampleCall], dtype: torch.dtype, device: str) -> list[Task]:
    """The tasks of these calls: on GPUs these are the builds, on CPUs the calls."""
    if torch.device(device).type == "cpu":
        return [Task(call.name, partial(run, call, dtype, device), _idle) for call in calls]
    with torch.autograd.set_multithreading_enabled(False), compiled.planning() as planned:
        for call in calls:
            run(call, dtype, device)
    # What takes long begins first; the others fill what is left of it.
    longest_first = sorted(planned.values(), key=_place)
    with torch.cuda.device(device):
        builds = [Task(build.name, build.apart(), build.load) for build in longest_first]
    return [*builds, Task("launch", find_launch, find_launch)]


def _place(build: compiled.Build) -> int:
    """The place of a build among those that take long to compile."""
    is_among = build.name in LONGEST
    return LONGEST.index(build.name) if is_among else len(LONGEST) + (not build.is_long)


def get_ready() -> None:
    """Import what compiling for a Hopper GPU takes, and work out what all builds have in common."""
    from triton.runtime.cache import triton_key

    from lockstep.kernels.hopper.backward.narrow import call  # noqa: F401
    from lockstep.kernels.hopper.decode import launch  # noqa: F401
    from lockstep.kernels.hopper.forward import launch as forward  # noqa: F401

    triton_key()


def _idle() -> None:
    pass
