"""The claims `batch_invariant` and `query_invariant`: what must not change the bits of a row.

Batch: the other sequences, their lengths, the place among them, the padding after a sequence, and
whether it comes dense, packed or in pages. Query, where a call asks for it: the other queries of
the sequence, so that a whole prefill, its chunks, and one token at a time against the same cache
give the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lockstep.audit import calls
from lockstep.audit.calls import OPTIONS, Batch, Results, Shape, draw
from lockstep.audit.checks import Check, Pair
from lockstep.kernels.kernel import Kernel

# Sizes of a page by the number of queries.
PAGE_SIZES = {1: (16, 64, 256), 64: (64,)}
CHUNKS = (1, 7, 64, 129)
# Calls per option and chunk size; of a longer sequence evenly spaced chunks are taken.
MOST_CHUNKS = 40


def alone_and_in_a_batch(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """One sequence alone, and at every place of a batch of others: prefill, and decode."""
    for option in shape.options:
        batch = draw(replace(shape, B=max(shape.B, 2)), kernel, option)
        others = list(range(1, len(batch.q)))
        decode = batch.last_queries(1).with_lengths([shape.S] * len(batch.q))
        for whole in (batch, decode):
            alone = whole.take([0]).run()
            for place in range(len(others) + 1):
                batched = whole.take([*others[:place], 0, *others[place:]]).run()
                what = f"{option}, Sq {whole.q.shape[2]}, place {place} of {len(others) + 1}"
                yield Pair(what, alone, batched.sequence(place))


def neighbour_length(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """A neighbour grows from 9 to 10 keys, from one tile to the next, and to the full length."""
    for option in shape.options:
        batch = draw(replace(shape, B=2), kernel, option)
        for Sq in (1, shape.S):
            part = batch.last_queries(Sq)
            expected = part.with_lengths([shape.S, 9]).run().sequence(0)
            for n in _lengths(shape):
                got = part.with_lengths([shape.S, n]).run().sequence(0)
                yield Pair(f"{option}, Sq {Sq}, neighbour of {n} keys", expected, got)
        packed = calls.packed(batch, [9, shape.S])[1]
        for n in _lengths(shape):
            got = calls.packed(batch, [n, shape.S])[1]
            yield Pair(f"{option}, packed behind {n} tokens", packed, got)


def _lengths(shape: Shape) -> list[int]:
    return [n for n in (0, 10, 63, 64, 65, 128, 129) if n < shape.S] + [shape.S]


def padding(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """The keys alone, and followed by NaN beyond the length of the sequence."""
    for option in shape.options:
        batch = draw(replace(shape, B=1), kernel, option)
        expected = batch.run()
        for extra in (1, 64, 300):
            k, v = (
                torch.nn.functional.pad(x, (0, 0, 0, extra), value=float("nan"))
                for x in (batch.k, batch.v)
            )
            got = replace(batch, k=k, v=v).with_lengths([shape.S]).run()
            # Only dk and dv are that long.
            got = got.queries(0, shape.S)
            yield Pair(f"{option}, {extra} keys of padding", expected, got)


def packing(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """Each sequence packed with others, and dense alone."""
    for option in shape.options:
        batch = draw(shape, kernel, option)
        lens = [max(1, shape.S - 37 * b) for b in range(shape.B)]
        for b, got in enumerate(calls.packed(batch, lens)):
            own = _first_tokens(batch.take([b]), lens[b]).run()
            yield Pair(f"{option}, sequence {b} of {lens[b]} tokens", own, got)


def pages(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """Keys contiguous, in pages in order, and in shuffled pages."""
    generator = torch.Generator().manual_seed(1)
    for option in shape.options:
        for Sq, sizes in PAGE_SIZES.items():
            batch = draw(shape, kernel, option).last_queries(min(shape.S, Sq))
            batch = batch.with_lengths([shape.S - b % 2 for b in range(shape.B)])
            expected = batch.forward()
            for size in sizes:
                n = shape.B * -(-shape.S // size) + 2
                what = f"{option}, Sq {Sq}, pages of {size}"
                yield Pair(f"{what} in order", expected, calls.paged(batch, size, torch.arange(n)))
                shuffled = calls.paged(batch, size, torch.randperm(n, generator=generator))
                yield Pair(f"{what} shuffled", expected, shuffled)


def chunks(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """All queries of a sequence at once in a batch; in chunks, and one by one, alone."""
    for option in _causal(shape):
        batch, whole = _prefilled(shape, kernel, option)
        for size in CHUNKS:
            for start, end in _chunks(shape.S, size):
                got = batch.queries(start, end).forward()
                what = f"{option}, queries {start} to {end - 1} by themselves"
                yield Pair(what, whole.queries(start, end), got)


def paged_chunks(shape: Shape, kernel: Kernel) -> Iterator[Pair]:
    """All queries at once with a dense cache, and one by one with a paged one."""
    order = torch.arange(-(-shape.S // 64)).flip(0)
    for option in _causal(shape)[:1]:
        batch, whole = _prefilled(shape, kernel, option)
        for start, end in _chunks(shape.S, 1):
            got = calls.paged(batch.queries(start, end), 64, order)
            what = f"{option}, query {start} out of pages"
            yield Pair(what, whole.queries(start, end), got)


def _causal(shape: Shape) -> list[str]:
    """The options under which a row does not see the keys that come after it."""
    return [option for option in shape.options if OPTIONS[option].get("causal")]


def _prefilled(shape: Shape, kernel: Kernel, option: str) -> tuple[Batch, Results]:
    """The first sequence of a batch by itself, and its results in the whole batch."""
    batch = replace(draw(shape, kernel, option), query_invariant=True)
    return batch.take([0]), batch.forward().sequence(0)


def _chunks(S: int, size: int) -> list[tuple[int, int]]:
    every = [(start, min(start + size, S)) for start in range(0, S, size)]
    step = -(-len(every) // MOST_CHUNKS)
    # The last is always among them: it has the longest reduction.
    return every[::-1][::step]


def _first_tokens(batch: Batch, n: int) -> Batch:
    names = ("q", "k", "v", "dout")
    return replace(batch, **{name: getattr(batch, name)[:, :, :n] for name in names})


CHECKS = (
    Check("alone or in a batch, at any place", "batch_invariant", alone_and_in_a_batch),
    Check("a neighbour grows", "batch_invariant", neighbour_length),
    Check("any padding", "batch_invariant", padding),
    Check("packed or dense", "batch_invariant", packing),
    Check("pages, in any order, or contiguous", "batch_invariant", pages),
    Check("prefill, chunks and decode", "query_invariant", chunks),
    Check("prefill and paged decode", "query_invariant", paged_chunks),
)
