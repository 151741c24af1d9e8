"""What ranks do in tests. `serve` is what the processes of `worlds` run."""

from __future__ import annotations

import io
import itertools
import os
import runpy
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from data_parallel import data_parallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lockstep

# Imported where ranks are forked from, not by each of them.
import lockstep.kernels.cpu.forward
from lockstep.audit.bits import first_difference
from lockstep.audit.distributed import Case, compare, run_with_gradients
from lockstep.distributed import (
    attention,
    collectives,
    context_parallel_attention,
    context_parallel_attention_varlen,
    gather,
    shard,
    sharded_cache_attention,
    unshard,
)


def bits(cases: list[dict[str, Any]]) -> list[str]:
    """For each case, the first difference between this rank and one process, or nothing."""
    said = []
    for fields in cases:
        case = Case(**{**fields, "dtype": getattr(torch, fields.get("dtype", "float32"))})
        found = compare(case, group())
        said.append("" if found is None else f"{case}, {case.S} tokens: {found}")
    return said


def packed(cases: list[dict[str, Any]]) -> list[str]:
    """Where packed sequences on several ranks differ from one process."""
    said = []
    for case in cases:
        offsets, Hq, Hkv = torch.tensor(case["offsets"]), case["Hq"], case["Hkv"]
        T = int(offsets[-1])
        torch.manual_seed(T)
        sizes = {"q": (T, Hq, 16), "k": (T, Hkv, 16), "v": (T, Hkv, 8), "dout": (T, Hq, 8)}
        whole = {name: torch.randn(size) for name, size in sizes.items()}
        whole |= {"dlse": torch.randn(T, Hq), "sinks": torch.randn(Hq)}
        options = {**case["options"], "query_invariant": True}
        if "window" in options:
            options["window"] = tuple(options["window"])
        alone = partial(lockstep.attention_varlen, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        expected = run_with_gradients(whole, alone, **options)
        together = partial(context_parallel_attention_varlen, cu_seqlens=offsets, mesh=group())
        for method, balanced in itertools.product(case["methods"], (False, True)):

            def mine(name: str, x: Any, balanced: bool = balanced) -> Any:
                return x if name.endswith("sinks") else shard(x, group(), 0, balanced=balanced)

            shards = {name: mine(name, x) for name, x in whole.items()}
            sharing = {"method": method, "balanced": balanced}
            got = run_with_gradients(shards, together, **options, **sharing)
            dist.all_reduce(got["dsinks"])
            found = first_difference({n: mine(n, x) for n, x in expected.items()}, got)
            said += [] if found is None else [f"{method} {balanced} {case}: {found}"]
    wrong = torch.tensor([0, 5 + dist.get_rank()])
    x = torch.randn(4, 2, 16)
    for offsets, expected in ((wrong, "cu_seqlens takes the same"), (wrong[:1], "offsets up to")):
        try:
            context_parallel_attention_varlen(x, x, x, offsets, mesh=group())
            said.append("nothing was said")
        except ValueError as error:
            said += [] if expected in str(error) else [str(error)]
    return said


def planted() -> str:
    """What `compare` says of a rank whose keys come from another order of summation."""
    inner = gather.gradients_of_keys

    def halves(*args: Any) -> Any:
        grads, rows, q, *rest = args
        S = q.shape[2]
        dk, dv = 0, 0
        for part in (slice(0, S // 2), slice(S // 2, S)):
            dout = torch.zeros_like(grads.dout)
            dout[:, :, part] = grads.dout[:, :, part]
            # No row of the other half gives anything.
            found = inner(grads._replace(dout=dout, dlse=None), rows, q, *rest)
            dk, dv = dk + found.dk, dv + found.dv
        return type(found)(dk, dv)

    chosen = halves if dist.get_rank() == 1 else inner
    with mock.patch.object(gather, "gradients_of_keys", chosen):
        return str(compare(Case("gather", False, S=900), group()))


def count(cases: list[dict[str, Any]]) -> list[list[int]]:
    """Bytes that this rank receives in a forward and in its backward."""
    received = 0
    rank = dist.get_rank()

    def counting(name: str, of: Any) -> Any:
        inner = getattr(dist, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal received
            received += of(*args, **options)
            return inner(*args, **options)

        return wrapped

    def of_all_to_all(to: Any, x: Any, bytes_in: list[int], *_: Any, **__: Any) -> int:
        return sum(bytes_in) - bytes_in[rank]

    def of_broadcast(x: Any, group_src: int, **_: Any) -> int:
        return 0 if group_src == rank else x.numel()

    counted = {
        collectives._ALL_GATHER: lambda to, x, *_: to.numel() - x.numel(),
        "all_to_all_single": of_all_to_all,
        "broadcast": of_broadcast,
    }
    # Said at the start of every call.
    agreement = (dist.get_world_size() - 1) * 8 * (1 + len(attention._WORDS))
    found = []
    with mock.patch.multiple(dist, **{n: counting(n, of) for n, of in counted.items()}):
        for method, S, Hq, Hkv, balanced, uses_lse, has_sinks in cases:
            q = torch.randn(2, Hq, S, 16).bfloat16()
            k, v = (torch.randn(2, Hkv, S, D).bfloat16() for D in (16, 8))
            sinks = torch.zeros(Hq, requires_grad=True) if has_sinks else None
            q, k, v = (shard(x, group(), 2, balanced=balanced).requires_grad_() for x in (q, k, v))
            received = 0
            options = {
                "method": method,
                "balanced": balanced,
                "return_lse": uses_lse,
                "sinks": sinks,
            }
            results = context_parallel_attention(q, k, v, mesh=group(), **options)
            forward, received = received - agreement, 0
            sum(x.sum() for x in (results if uses_lse else [results])).backward()
            found.append([forward, received])
    return found


def peaks(methods: list[str], S: int) -> list[int]:
    """Bytes of tensors that a forward and its backward hold at a time, besides their inputs."""

    def step(method: str, S: int) -> None:
        inputs = [x.requires_grad_() for x in drawn[S]]
        out = context_parallel_attention(*inputs, mesh=group(), method=method, causal=True)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    drawn = {n: [shard(torch.randn(1, 4, n, 64), group(), 2) for _ in range(3)] for n in (64, S)}
    found = []
    for method in methods:
        step(method, 64)  # compiles
        with torch.profiler.profile(profile_memory=True) as seen:
            step(method, S)
        events = seen.profiler.kineto_results.events()
        steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        found.append(max(itertools.accumulate(n for _, n in steps)))
    return found


def decode(cases: list[dict[str, Any]]) -> list[str]:
    """What is off in sharded caches: from a whole cache, from pages, or from rank to rank."""
    rank, ranks, page, C = dist.get_rank(), dist.get_world_size(), 16, 64
    said = []
    for case in cases:
        torch.manual_seed(1)
        Sq, lens = case.pop("Sq"), torch.tensor(case.pop("lens"))
        if case.pop("sinks", False):
            case["sinks"] = torch.randn(4)
        if "window" in case:
            case["window"] = tuple(case["window"])
        B = len(lens)
        q = torch.randn(B, 4, Sq, 32)
        k, v = torch.randn(2, B, 2, ranks * C, 32)
        mine = slice(rank * C, (rank + 1) * C)
        out, lse = sharded_cache_attention(
            q, k[:, :, mine], v[:, :, mine], lens, group(), return_lse=True, **case
        )
        expected = lockstep.attention(q, k, v, kv_lens=lens, return_lse=True, **case)
        for name, got, right in zip(("out", "lse"), (out, lse), expected, strict=True):
            if not torch.allclose(got, right, rtol=1e-5, atol=2e-6):
                said.append(f"{case} {name}: {(got - right).abs().max()}")
        # The same keys in pages, in the order of their tokens.
        pages = [x[:, :, mine].transpose(1, 2).reshape(B * C // page, page, 2, 32) for x in (k, v)]
        table = torch.arange(B * C // page).view(B, C // page)
        paged = sharded_cache_attention(q, *pages, lens, group(), page_table=table, **case)
        if not torch.equal(paged, out):
            said.append(f"{case}: pages differ")
        if Sq == 1 and "window" not in case:
            # Blocks of C keys, merged by one process: whatever ranks there are.
            parts = []
            for r in range(ranks):
                block, held = slice(r * C, (r + 1) * C), (lens - r * C).clamp(0, C)
                given = case if r == 0 else {**case, "sinks": None}
                inputs = (q, k[:, :, block], v[:, :, block])
                part = lockstep.attention(*inputs, kv_lens=held, return_lse=True, **given)
                parts.append(part)
            if not torch.equal(out[lens <= C], expected[0][lens <= C]):
                said.append(f"{case}: a sequence on one rank differs from one process")
            if not torch.equal(out, lockstep.merge(parts)[0]):
                said.append(f"{case}: blocks differ")
        everywhere = collectives.all_gather(out, group())
        if not all(torch.equal(x, out) for x in everywhere):
            said.append(f"{case}: ranks differ")
    return said


def inside() -> list[str]:
    """What goes wrong in DTensors, a device mesh, compiled, checkpointed and data-parallel code."""
    said = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.randn(1, 4, 37, 16) for _ in range(3)]
    for x in whole:
        dist.broadcast(x, 0)
    options = {"causal": True, "query_invariant": True}
    expected, expected_lse = lockstep.attention(*whole, **options, return_lse=True)

    shards = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in whole]
    out, lse = context_parallel_attention(*shards, mesh=mesh, return_lse=True, **options)
    if not torch.equal(out.full_tensor(), expected):
        said.append("DTensor: out")
    if not torch.equal(lse.full_tensor(), expected_lse):
        said.append("DTensor: lse")
    leaves = [x.clone().requires_grad_() for x in whole]
    lockstep.attention(*leaves, **options).sin().sum().backward()
    out.sin().sum().backward()
    for name, x, leaf in zip("qkv", shards, leaves, strict=True):
        if not torch.equal(x.grad.full_tensor(), leaf.grad):
            said.append(f"DTensor: d{name}")

    def layer(q: Any, k: Any, v: Any) -> Any:
        return 2 * context_parallel_attention(q + 1, k, v, mesh=mesh, **options)

    def gradients(f: Any) -> list[Any]:
        leaves = [shard(x, mesh, 2).requires_grad_() for x in whole]
        out = f(*leaves)
        out.sin().sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    eager = gradients(layer)
    others = {
        "compiled": torch.compile(layer, backend="eager"),
        "checkpointed": lambda *x: checkpoint(layer, *x, use_reentrant=False),
    }
    for name, f in others.items():
        if not all(map(torch.equal, gradients(f), eager)):
            said.append(name)
    try:
        torch.compile(layer, backend="eager", fullgraph=True)(*(shard(x, mesh, 2) for x in whole))
        said.append("fullgraph did not raise")
    except torch._dynamo.exc.Unsupported as error:
        if "exchanges between ranks are not compiled" not in str(error):
            said.append(str(error))

    said += data_parallel(mesh, whole, options)
    return said


def round_trips(sizes: list[int]) -> bool:
    """Whether `unshard` undoes `shard`, its gradient included."""
    good = True
    for S in sizes:
        for balanced in (False, True):
            x = torch.randn(2, S, 3, generator=torch.Generator().manual_seed(S))
            part = shard(x, group(), 1, balanced=balanced).requires_grad_()
            whole = unshard(part, group(), 1, balanced=balanced)
            whole.backward(x)
            good &= torch.equal(whole, x) and torch.equal(part.grad, part)
            labels = torch.arange(S)
            mine = shard(labels, group(), 0, balanced=balanced)
            good &= torch.equal(unshard(mine, group(), 0, balanced=balanced), labels)
    return good


def refuse(wrong: dict[str, dict[str, Any]]) -> list[str]:
    """What each rank is told, one call after the other, where one rank passes something else.

    `wrong` has by name of the argument what the last rank passes: `{"causal": true}` and so on.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    said = []
    for changes in wrong:
        given: dict[str, Any] = {"shape": [1, 4, 8, 16], "dtype": "float32", "causal": False}
        given |= changes if last else {}
        x = torch.randn(given.pop("shape")).to(getattr(torch, given.pop("dtype")))
        try:
            context_parallel_attention(x, x, x, mesh=group(), **given)
            said.append("")
        except (ValueError, TypeError, NotImplementedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def lose_a_rank(lost: int) -> str:
    """What is said on the ranks that are left."""
    x = torch.randn(1, 4, 8, 16)
    context_parallel_attention(x, x, x, mesh=group())
    if dist.get_rank() == lost:
        os._exit(3)
    try:
        context_parallel_attention(x, x, x, mesh=group())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def script(path: str) -> tuple[int, str]:
    """The status and the output of a script that makes a group of its own: here it has this one."""
    said = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.dict(os.environ, RANK=str(dist.get_rank())),
        redirect_stdout(said),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, said.getvalue()


def group() -> dist.ProcessGroup:
    return dist.group.WORLD


def serve(pipe: Connection, stderr: str) -> None:
    """Runs one job after the other, each as a rank of a group of its own."""
    said = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    # Of gloo and of the interpreter.
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    while True:
        given = pipe.recv()
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{given['folder']}/store",
            rank=given["rank"],
            world_size=given["ranks"],
            timeout=timedelta(seconds=100),
        )
        result = globals()[given["job"]](*given["args"])
        # Without a barrier: another rank may be gone.
        dist.destroy_process_group()
        pipe.send(result)
