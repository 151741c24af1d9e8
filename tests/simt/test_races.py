"""Races, planted and found: at the right line, with the thread and the other one.

The line that must be reported carries `# !`, the other access `# ?`.
"""

from __future__ import annotations

import numpy as np
from simt_support import marked, only_hazard

from lockstep import simt
from lockstep.simt import Constant, cuda, float32, int32


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


# Races in shared memory


def test_read_of_what_another_warp_wrote():
    @simt.kernel
    def neighbour(out: float32[:]):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = float32(t)  # ?
        out[t] = tile[63 - t]  # !

    hazard = only_hazard(neighbour[1, 64](zeros(64)))
    assert hazard.kind == "race"
    assert hazard.loc.line == marked(neighbour)
    assert hazard.other_loc.line == marked(neighbour, "# ?")
    assert hazard.other_thread == (63 - hazard.thread[0], 0, 0)


def test_write_over_what_another_warp_still_reads():
    @simt.kernel
    def overwrite(out: float32[:]):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = 1.0
        cuda.syncthreads()
        out[t] = tile[63 - t]  # ?
        tile[t] = 2.0  # !

    hazard = only_hazard(overwrite[1, 64](zeros(64)))
    assert hazard.kind == "race"
    assert hazard.loc.line == marked(overwrite)
    assert hazard.other_loc.line == marked(overwrite, "# ?")
    assert hazard.other_thread == (63, 0, 0)


def test_two_warps_write_one_element():
    @simt.kernel
    def collide(out: float32[:]):
        tile = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        if t < 32:
            tile[t] = 1.0  # ?
        else:
            tile[t - 32] = 2.0  # !
        cuda.syncthreads()
        out[t] = tile[t % 32]

    hazard = only_hazard(collide[1, 64](zeros(64)))
    assert (hazard.kind, hazard.loc.line) == ("race", marked(collide))
    assert hazard.other_loc.line == marked(collide, "# ?")
    assert (hazard.thread, hazard.other_thread) == ((32, 0, 0), (0, 0, 0))


def test_one_statement_writes_one_element_with_different_values():
    @simt.kernel
    def together(out: float32[:], SAME: Constant):
        tile = cuda.shared.array(1, float32)
        t = cuda.threadIdx.x
        if SAME:
            tile[0] = 1.0
        else:
            tile[0] = float32(t)  # !
        cuda.syncthreads()
        out[t] = tile[0]

    hazard = only_hazard(together[1, 64](zeros(64), False))
    assert (hazard.kind, hazard.loc.line) == ("race", marked(together))
    assert not together[1, 64](zeros(64), True).hazards


def test_lanes_of_one_warp_need_a_syncwarp():
    @simt.kernel
    def exchange(out: float32[:], SYNC: Constant):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = float32(t)
        if SYNC:
            cuda.syncwarp()
        out[t] = tile[t ^ 1]  # !

    hazard = only_hazard(exchange[1, 64](zeros(64), False))
    assert (hazard.kind, hazard.loc.line) == ("race", marked(exchange))
    assert not exchange[1, 64](zeros(64), True).hazards


def test_syncwarp_does_not_order_warps():
    @simt.kernel
    def across(out: float32[:]):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = float32(t)
        cuda.syncwarp()
        out[t] = tile[t ^ 32]  # !

    assert only_hazard(across[1, 64](zeros(64))).loc.line == marked(across)


def test_a_race_in_one_block_only():
    @simt.kernel
    def some_blocks(out: float32[:, :]):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = float32(t)
        if cuda.blockIdx.x != 3:
            cuda.syncthreads()
        out[cuda.blockIdx.x, t] = tile[63 - t]  # !

    hazard = only_hazard(some_blocks[5, 64](zeros(5, 64)))
    assert hazard.block == (3, 0, 0)
    assert hazard.loc.line == marked(some_blocks)


def test_in_place_tree_without_its_barrier():
    @simt.kernel
    def tree(x: float32[:], out: float32[:], SYNC: Constant):
        part = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        part[t] = x[t]
        cuda.syncthreads()
        step = 64
        while step > 0:
            if t < step:
                part[t] += part[t + step]  # !
            if SYNC:
                cuda.syncthreads()
            step //= 2
        if t == 0:
            out[0] = part[0]

    trace = tree[1, 128](zeros(128), zeros(1), False)
    assert {(h.kind, h.loc.line) for h in trace.hazards} == {("race", marked(tree))}
    assert not tree[1, 128](zeros(128), zeros(1), True).hazards


# Races in global memory


def test_blocks_that_write_one_element():
    @simt.kernel
    def clash(out: float32[:]):
        out[cuda.threadIdx.x] = float32(cuda.blockIdx.x)  # !

    hazard = only_hazard(clash[3, 32](zeros(32)))
    assert (hazard.kind, hazard.loc.line) == ("race between blocks", marked(clash))
    assert hazard.block != hazard.other_block


def test_block_that_reads_what_another_writes():
    @simt.kernel
    def shift(x: float32[:], n: int32):
        i = cuda.grid(1)
        if i + 1 < n:
            x[i] = x[i + 1]  # !

    trace = shift[4, 32](zeros(128), 128)
    kinds = {h.kind for h in trace.hazards}
    assert "race between blocks" in kinds
    assert {h.loc.line for h in trace.hazards} == {marked(shift)}


def test_global_race_across_batches_of_blocks():
    from lockstep.simt.machine import run

    @simt.kernel
    def clash(out: float32[:]):
        out[cuda.threadIdx.x] = float32(cuda.blockIdx.x)

    out = zeros(32)
    arguments = {"out": out}
    typed = clash.typed(**arguments)
    trace = run(typed, (8, 1, 1), (32, 1, 1), 0, arguments, lanes_per_batch=32)
    assert only_hazard(trace).other_block == (0, 0, 0)


def test_global_race_within_a_block():
    @simt.kernel
    def local(x: float32[:], SYNC: Constant):
        t = cuda.threadIdx.x
        x[t] = 1.0
        if SYNC:
            cuda.syncthreads()
        y = x[63 - t]  # !
        if SYNC:
            cuda.syncthreads()
        x[t] = y

    trace = local[1, 64](zeros(64), False)
    assert ("race", marked(local)) in {(h.kind, h.loc.line) for h in trace.hazards}
    assert not local[1, 64](zeros(64), True).hazards


def test_two_names_for_one_array():
    @simt.kernel
    def alias(x: float32[:], y: float32[:]):
        t = cuda.threadIdx.x
        y[t] = x[63 - t]  # !

    memory = zeros(64)
    trace = alias[1, 64](memory, memory)
    assert {h.loc.line for h in trace.hazards} == {marked(alias)}
    assert not alias[1, 64](zeros(64), memory).hazards


def test_atomics_do_not_race_among_themselves():
    @simt.kernel
    def count(hits: int32[:], out: int32[:], PLAIN: Constant):
        cuda.atomic.add(hits, 0, 1)  # ?
        if PLAIN:
            out[cuda.grid(1)] = hits[0]  # !

    hits = zeros(1, dtype="int32")
    assert not count[4, 64](hits, zeros(256, dtype="int32"), False).hazards
    assert hits[0] == 256
    trace = count[4, 64](zeros(1, dtype="int32"), zeros(256, dtype="int32"), True)
    hazard = only_hazard(trace)
    assert hazard.loc.line == marked(count)
    assert hazard.other_loc.line == marked(count, "# ?")
