"""Attention over a sequence that is sharded across ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep import dispatch
from lockstep.call import autocast
from lockstep.checks import check_types
from lockstep.distributed import methods
from lockstep.distributed.agreement import agree, check_equal, sharding_of, word
from lockstep.distributed.call import ShardedCall
from lockstep.distributed.dtensors import are_distributed, is_distributed, like, to_local
from lockstep.distributed.groups import Mesh, group_of, not_compiled
from lockstep.distributed.local import Settings
from lockstep.distributed.methods import Explanation, Method, Sizes
from lockstep.options import make_options, type_of
from lockstep.problem import AttentionProblem, Tensors, Window, describe

# Sizes that differ from rank to rank.
_OF_A_RANK = frozenset({"tokens of q"})


@not_compiled
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    method: str | None = None,
    balanced: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    query_invariant: bool = False,
    allow_tf32: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lockstep.attention` over a sequence whose tokens are sharded across ranks.

    Each rank passes the shard that it holds and gets the rows of its own queries. Every sum is
    made by one rank, in the order of one process: with `query_invariant=True`, results and
    gradients have the bits of `lockstep.attention` on the whole sequence, on any number of ranks
    (docs/distributed.md says where GPUs add a condition). Differentiable in q, k, v and sinks, and
    through lse. All ranks of the group make the call, and all of them run its backward.

    Args:
        q: [B, Hq, S_rank, D]: the queries of this rank, as `shard` gives them. q, k and v may be
            DTensors of placements `[Shard(2)]` instead; then the results are, too.
        k: [B, Hkv, S_rank, D]
        v: [B, Hkv, S_rank, Dv]
        mesh: A DeviceMesh of 1 dim or a process group.
        method: "heads", "gather" or "ring". None chooses; see `explain`.
        balanced: Whether the shards are those of `shard(..., balanced=True)`.
        sinks: [Hq], whole on every rank. Their gradient is partial, as that of any parameter: its
            sum over the ranks has the bits of one process.

    The other arguments are those of `lockstep.attention`. Under torch.compile, the call is a graph
    break.

    Returns:
        out [B, Hq, S_rank, Dv], and with `return_lse` the pair `(out, lse)` with lse
        [B, Hq, S_rank].

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not answer.
        ValueError, TypeError: An argument does not fit, or not everywhere the same: on every rank,
            before anything is sent. The message names the argument and the ranks.
        NotImplementedError: The method or every kernel refuses; the message has the reason.

    Example:
        >>> q, k, v = (shard(x, mesh, 2) for x in (q, k, v))
        >>> out = context_parallel_attention(q, k, v, mesh=mesh, causal=True)
    """
    group = group_of(mesh)
    tensors = Tensors(q, k, v, None, sinks)
    options = (causal, window, scale, softcap, query_invariant, allow_tf32, return_lse, kernel)
    asked = Asked(options, method, balanced)
    tensors, found, call = agree_on_call(tensors, asked, group, partial(_to_local, asked, mesh))
    out, lse = found.run(call, tensors.q, tensors.k, tensors.v, tensors.sinks)
    if is_distributed(q):
        out, lse = like(out, q), like(lse, q) if return_lse else lse
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    query_invariant: bool = False,
    kernel: str | None = None,
) -> Explanation:
    """Says which method a call with `method=None` would run, and why. Sends and runs nothing.

    Takes the shards that the call takes, and those of its options that the choice goes by.

    Returns:
        An `Explanation` with `method`, `reasons` and `sizes`. Print it to read it.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: `mesh` is not a group with this process, or an option does not fit.
        NotImplementedError: Every kernel refuses; the message has the reasons.

    Example:
        >>> print(lockstep.distributed.explain(q, k, v, mesh=mesh))
    """
    group = group_of(mesh)
    tensors = autocast.cast(Tensors(q, k, v))
    check_types(tensors, "dense")
    options = make_options(False, None, None, None, query_invariant, kernel=kernel)
    problem = describe(tensors, options)
    return methods.choose(_sizes(problem, kernel, dist.get_world_size(group)))


class Asked(NamedTuple):
    """The options of a call, as a caller passes them: nothing is checked yet."""

    options: tuple[Any, ...]  # as `make_options` takes them
    method: Any
    balanced: Any


def agree_on_call(
    tensors: Tensors, asked: Asked, group: ProcessGroup, to_dense: Callable[[Tensors], Tensors]
) -> tuple[Tensors, Method, ShardedCall]:
    """The call that all ranks make, with dense shards, which `to_dense` makes of the tensors.

    Raises on every rank if it is not the same, or if `to_dense` raises on one of them.
    """
    error: Exception | None = None
    words = dict.fromkeys(_WORDS, 0)
    try:
        tensors, settings, found = _check(to_dense(tensors), asked, dist.get_world_size(group))
        words = _words(tensors, settings, found, asked)
    except (ValueError, TypeError, NotImplementedError) as raised:
        error = raised
    device = tensors.q.device if isinstance(tensors.q, Tensor) else torch.device("cpu")
    table = agree(words, group, device, error)
    check_equal(words, table, _OF_A_RANK)
    place = _WORDS.index("tokens of q")
    sharding = sharding_of("q", [row[place] for row in table], asked.balanced)
    return tensors, found, ShardedCall(group, sharding, settings, uses_lse=asked.options[-2])


def _to_local(asked: Asked, mesh: Mesh, tensors: Tensors) -> Tensors:
    if not are_distributed(tensors):
        return tensors
    if asked.balanced:
        raise ValueError("balanced takes False with DTensors, whose shards are contiguous")
    return to_local(tensors, mesh)


def _check(tensors: Tensors, asked: Asked, ranks: int) -> tuple[Tensors, Settings, Method]:
    """The arguments of this rank, checked as far as it can do so alone."""
    if not isinstance(asked.balanced, bool):
        raise TypeError(f"balanced takes True or False, got {type_of(asked.balanced)}")
    if asked.method is not None and not isinstance(asked.method, str):
        raise TypeError(f"method takes a name or None, got {type_of(asked.method)}")
    options = make_options(*asked.options)
    kernel = asked.options[-1]
    check_types(tensors, "dense")
    tensors = autocast.cast(tensors)
    problem = describe(tensors, options)
    if problem.Sq != problem.Skv:
        raise ValueError(
            f"k takes as many tokens as q, {problem.Sq}, got {problem.Skv}: both are shards of one "
            "sequence"
        )
    dispatch.select(problem, kernel, backward=any(_wants_gradients(tensors)))
    found = methods.find(asked.method, _sizes(problem, kernel, ranks))
    return tensors, Settings(*options, kernel), found


def _sizes(problem: AttentionProblem, kernel: str | None, ranks: int) -> Sizes:
    found, carrying = dispatch.select(problem, kernel), dispatch.select_carry(problem, kernel)
    name = None if carrying is None else carrying.name
    return Sizes(problem.Hq, problem.Hkv, ranks, found.name, name, problem.query_invariant)


_OPTIONS = (*Settings._fields, "method", "balanced", "return_lse")
_SHAPES = (
    "batch of q",
    "heads of q",
    "tokens of q",
    "head dim of q",
    "heads of k",
    "head dim of v",
)
_KINDS = ("dtype of q", "device of q", "dtype of sinks")
_GRADIENTS = tuple(f"requires_grad of {name}" for name in ("q", "k", "v", "sinks"))
_WORDS = (*_SHAPES, *_KINDS, *_GRADIENTS, *_OPTIONS)


def _words(tensors: Tensors, settings: Settings, found: Method, asked: Asked) -> dict[str, int]:
    q, k, v, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
    kinds = (q.dtype, q.device.type, None if sinks is None else sinks.dtype)
    options = (*settings, found.name, asked.balanced, asked.options[-2])
    values = (*q.shape, k.shape[1], v.shape[3], *kinds, *_wants_gradients(tensors), *options)
    return dict(zip(_WORDS, map(word, values), strict=True))


def _wants_gradients(tensors: Tensors) -> tuple[bool, ...]:
    if not torch.is_grad_enabled():
        return (False,) * 4
    given = (tensors.q, tensors.k, tensors.v, tensors.sinks)
    return tuple(x is not None and x.requires_grad for x in given)
