"""A rung of the ladder: kernels, the launches that make up one attention call, and a plan.

A rung is one file in `rungs/`. It ends in a `RUNG` that says how to turn a problem and tensors into
launches, and what the same launches amount to in closed form; everything else here works on that:

>>> from lockstep.ladder import Problem, find, run_on_machine          # doctest: +SKIP
>>> out, traces = run_on_machine(find("small_tile"), Problem(B=1, H=2, S=111, D=32))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.numerics import LOG2E
from lockstep.simt import Kernel
from lockstep.simt.types import SHARED_ALIGNMENT, WARP_SIZE

if TYPE_CHECKING:
    import torch

    from lockstep.simt.machine import Trace

DTYPES = ("float16", "bfloat16")
HEAD_DIMS = (32, 64, 128)
BYTES = 2  # of an element of q, k, v and out
MAX_ELEMENTS = (1 << 31) - 1  # of a tensor


@dataclass(frozen=True)
class Problem:
    """One call: B sequences of S tokens, H heads of D dims, queries and keys of the same length.

    `length` is for constant-time rungs alone: only the first `length` keys count (all of S where it
    is None), and what a kernel does must not depend on it.
    """

    B: int
    H: int
    S: int
    D: int
    causal: bool = False
    dtype: str = "float16"
    length: int | None = None
    kv_heads: int | None = None  # heads of keys and values, each for as many of H; None: H

    def __post_init__(self) -> None:
        for name in ("B", "H", "S"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, takes 1 or more")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.H % self.kv_heads):
            raise ValueError(f"kv_heads is {self.kv_heads}, takes a divisor of H = {self.H}")
        if self.D not in HEAD_DIMS:
            raise ValueError(f"D is {self.D}, takes one of {', '.join(map(str, HEAD_DIMS))}")
        if self.rows * self.D > MAX_ELEMENTS:
            raise ValueError(
                f"B · H · S · D is {self.rows * self.D}, takes up to {MAX_ELEMENTS}: an index is "
                "an int32"
            )
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype!r}, takes {' or '.join(DTYPES)}")
        if self.length is not None and not 0 <= self.length <= self.S:
            raise ValueError(f"length is {self.length}, takes 0 to S = {self.S}")

    @property
    def scale(self) -> float:
        return self.D**-0.5

    @property
    def heads(self) -> int:
        """Independent attentions: B · H."""
        return self.B * self.H

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return 1 if self.kv_heads is None else self.H // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of q and out as the kernels see them: B · H · S; k and v have 1 / group of that."""
        return self.B * self.H * self.S

    @property
    def keys(self) -> int:
        """The number of keys that count."""
        return self.S if self.length is None else self.length

    def draw(self, seed: int = 0, device: str = "cpu") -> Tensors:
        """Random q [B, H, S, D], k and v [B, kv_heads, S, D], and an output full of NaN."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        shape = (self.B, self.H, self.S, self.D)
        dtype = getattr(torch, self.dtype)
        keys = (self.B, self.H // self.group, self.S, self.D)
        q, k, v = (torch.randn(n, generator=generator).to(dtype) for n in (shape, keys, keys))
        out = torch.full(shape, float("nan"), dtype=dtype)
        return Tensors(*(x.to(device) for x in (q, k, v, out)))

    def __str__(self) -> str:
        text = f"B{self.B} H{self.H} S{self.S} D{self.D} {self.dtype}"
        text += f" Hkv{self.kv_heads}" * (self.kv_heads is not None)
        return text + " causal" * self.causal + f" length {self.length}" * (self.length is not None)


class Tensors(NamedTuple):
    """q and out, contiguous [B, H, S, D], and k and v, [B, kv_heads, S, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    def as_rows(self) -> Tensors:
        """The same memory as [B · H · S, D]."""
        return Tensors(*(x.view(-1, x.shape[-1]) for x in self))


def usual_arguments(problem: Problem, tensors: Tensors) -> dict[str, Any]:
    """The parameters that the kernels of most rungs have in common, by name."""
    return {
        **tensors._asdict(),
        "seq": problem.S,
        "scale_log2": problem.scale * LOG2E,
        "D": problem.D,
        "CAUSAL": problem.causal,
        "DTYPE": tensors.q.dtype,
    }


@dataclass(frozen=True)
class Launch:
    """One kernel of a call."""

    kernel: Kernel
    grid: tuple[int, ...]
    block: int
    arguments: dict[str, Any]
    dynamic_bytes: int = 0


@dataclass(frozen=True)
class PhasePlan:
    """A `simt.phase` of a kernel: how its work falls to the threads of a block, on a full tile."""

    name: str
    items: int  # independent pieces of work in one visit of a block
    threads: int  # of the block that may take one
    steps: int = 1  # of one item, one after the other
    visits: int = 1  # by the block that comes here most often

    @property
    def rounds(self) -> int:
        """Items that the busiest thread takes in one visit."""
        return -(-self.items // self.threads)

    @property
    def depth(self) -> int:
        """Steps one after the other, over all visits."""
        return self.rounds * self.steps * self.visits

    def utilisation(self, block: int) -> float:
        """The share of the block's threads that are busy, over the rounds of one visit."""
        return self.items / (self.rounds * block)


@dataclass(frozen=True)
class LaunchPlan:
    """A launch in closed form. Totals are over the whole grid, and the trace must agree."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    shared_bytes: int  # static and dynamic
    phases: tuple[PhasePlan, ...]
    iterations: int  # KV tiles that the block with most of them walks over
    barriers: int  # of all blocks: a block at a barrier counts once
    load_bytes: int  # that lanes ask of global memory
    store_bytes: int
    # that this moves, 32 bytes each; None where the alignment of odd rows decides
    load_sectors: int | None
    store_sectors: int | None
    warp_barriers: int = 0  # of all warps at `syncwarp`
    mma: int = 0  # m16n16k16 products, of all warps
    workspace: int = 0  # elements of global memory beside q, k, v and out, float32

    @property
    def blocks(self) -> int:
        total = 1
        for size in self.grid:
            total *= size
        return total

    @property
    def warps(self) -> int:
        return -(-self.block // WARP_SIZE)


@dataclass(frozen=True)
class Rung:
    """One rung. `launches(problem, tensors, **options)` gets tensors as rows [B·H·S, D];
    `plans(problem, **options)` gives one `LaunchPlan` per launch, in the same order."""

    name: str
    summary: str  # what is new here, in a few words
    launches: Callable[..., list[Launch]] = field(repr=False)
    plans: Callable[..., list[LaunchPlan]] = field(repr=False)
    constant_time: bool = False
    grouped_heads: bool = False  # whether heads of queries may share heads of keys
    across_heads: bool = False  # whether one block may work for several heads
    # option -> the values it takes, the default first
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # options of each row that tables show; one row with the defaults where there are none
    variants: tuple[Mapping[str, Any], ...] = ({},)
    # what is new in each of them, where that is more than `summary` says
    summaries: tuple[str, ...] = ()
    # why a problem cannot be run, or None
    refuses: Callable[..., str | None] = field(default=lambda problem, **options: None, repr=False)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def choose(self, **options: Any) -> Rung:
        """This rung with options set. Raises ValueError for one it does not have or take."""
        for name, value in options.items():
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise ValueError(f"{self.name} has no option '{name}'; it has {known}")
            if value not in self.options[name]:
                takes = ", ".join(map(repr, self.options[name]))
                raise ValueError(f"{name} is {value!r}, {self.name} takes {takes}")
        return replace(self, chosen={**self.chosen, **options})

    @property
    def settings(self) -> dict[str, Any]:
        """Every option with its value."""
        return {name: values[0] for name, values in self.options.items()} | dict(self.chosen)

    @property
    def title(self) -> str:
        """The name with the options chosen: `small_tile (tree)`."""
        chosen = ", ".join(
            value if isinstance(value, str) else f"{name} {value}"
            for name, value in self.chosen.items()
        )
        return f"{self.name} ({chosen})" if chosen else self.name

    @property
    def what_is_new(self) -> str:
        """The idea in a few words: of the variant chosen where there are several, or of the
        rung."""
        for variant, words in zip(self.variants, self.summaries, strict=False):
            if replace(self, chosen=variant).settings == self.settings:
                return words
        return self.summary

    def refusal(self, problem: Problem) -> str | None:
        """Why this rung cannot run `problem`; None if it can."""
        if problem.length is not None and not self.constant_time:
            return f"{self.name} is not constant-time and takes no length of its own"
        if problem.group > 1 and not self.grouped_heads:
            return f"{self.name} takes as many heads of keys as of queries"
        return self.refuses(problem, **self.settings)

    def steps(self) -> tuple[Rung, ...]:
        """The rows of this rung in tables: one per variant."""
        return tuple(self.choose(**variant) for variant in self.variants)


def shared_layout(*arrays: int) -> int:
    """Bytes of shared memory that arrays of these sizes in bytes take, one after the other.

    >>> shared_layout(100, 32)
    160
    """
    unit = SHARED_ALIGNMENT
    return sum(-(-size // unit) * unit for size in arrays)


def launches_of(rung: Rung, problem: Problem, tensors: Tensors) -> list[Launch]:
    """The launches of one call. Raises ValueError where the rung refuses the problem."""
    refusal = rung.refusal(problem)
    if refusal:
        raise ValueError(refusal)
    return rung.launches(problem, tensors.as_rows(), **rung.settings)


def plans_of(rung: Rung, problem: Problem) -> list[LaunchPlan]:
    """The launches of one call in closed form. Raises ValueError where the rung refuses it."""
    refusal = rung.refusal(problem)
    if refusal:
        raise ValueError(refusal)
    return rung.plans(problem, **rung.settings)


def run_on_machine(
    rung: Rung,
    problem: Problem,
    tensors: Tensors | None = None,
    progress: Callable[[int, int], None] | None = None,
    record: int | None = None,
) -> tuple[torch.Tensor, list[Trace]]:
    """The output [B, H, S, D] and one trace per launch, from the lockstep machine.

    Tensors are drawn where none are given. `progress(done, all)` counts blocks of one launch.
    The traces have recordings of block `record`, where one is given.

    Raises ValueError where the rung refuses the problem.
    """
    tensors = tensors or problem.draw()
    traces = [
        launch.kernel[launch.grid, launch.block, launch.dynamic_bytes].trace(
            **launch.arguments, progress=progress, record=record
        )
        for launch in launches_of(rung, problem, tensors)
    ]
    return tensors.out, traces


def run_on_gpu(rung: Rung, problem: Problem, tensors: Tensors | None = None) -> torch.Tensor:
    """The output [B, H, S, D] from the GPU that the tensors are on (drawn there if not given).

    Returns at once, like every launch. Raises ValueError where the rung refuses the problem.
    """
    tensors = tensors or problem.draw(device="cuda")
    for launch in launches_of(rung, problem, tensors):
        launch.kernel[launch.grid, launch.block, launch.dynamic_bytes](**launch.arguments)
    return tensors.out
