"""The record of one block: times and places worked out by hand, counts as without it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from lockstep import simt
from lockstep.simt import Constant, cuda, float32
from lockstep.simt.machine.records.recording import WAITING


@simt.kernel
def lopsided(out: float32[:], STEP: Constant):
    tile = cuda.shared.array(2048, float32)
    tid = cuda.threadIdx.x
    with simt.phase("fill"):
        for i in range(tid, 2048, 64):
            tile[i] = float32(i)
        cuda.syncthreads()
    with simt.phase("alone"):
        if tid == 0:
            for i in range(50):
                tile[i] = 2.0
        cuda.syncthreads()
    with simt.phase("write"):
        out[cuda.blockIdx.x * 64 + tid] = tile[tid % 32 * STEP]


def recorded(step: int = 1, block: int = 1):
    return lopsided[3, 64].trace(np.zeros(192, np.float32), step, record=block)


def test_counts_are_those_of_a_run_without_a_record():
    plain = lopsided[3, 64].trace(np.zeros(192, np.float32), 4)
    with_record = recorded(4)
    assert plain.recording is None
    first, second = plain.to_json(), with_record.to_json()
    assert first.pop("seconds") > 0
    assert second.pop("seconds") > 0
    assert first == second


def test_time_is_the_depth_and_ends_at_the_same_time_for_all_warps_at_a_barrier():
    trace = recorded()
    recording = trace.recording
    assert recording.length == trace.depth[1]
    assert len(recording.barriers) == 2
    assert [p for p in recording.phases if p] == ["fill", "alone", "write"]
    for warp in (0, 1):
        mine = [s for s in recording.spans if s.warp == warp]
        assert all(a.end == b.start for a, b in pairwise(mine))
        assert mine[-1].end == recording.length
    waits = [s for s in recording.spans if s.phase == WAITING]
    assert [s.warp for s in waits] == [1]  # warp 0 has the thread that works alone
    assert waits[0].end == recording.barriers[1]


def test_activity_shows_the_thread_that_works_alone():
    recording = recorded().recording
    busy = recording.activity(recording.length)  # a bin per step
    assert busy.shape == (64, recording.length)
    assert busy.max() == pytest.approx(1)
    assert busy[0].sum() == pytest.approx(recording.length)  # it never waits
    alone = busy[0] - busy[1] > 0.5
    assert 50 * 2 <= alone.sum() <= recording.barriers[1] - recording.barriers[0]
    assert busy[1:32, alone].max() == 0


def test_phases_of_warps_by_bin():
    recording = recorded().recording
    phase, busy = recording.warp_activity(recording.length)  # a bin per step
    assert phase.shape == busy.shape == (2, recording.length)
    assert busy[0].min() == pytest.approx(1)
    alone = phase[0] == recording.phases.index("alone")
    waits = phase[1] == WAITING
    assert waits.any()
    assert alone[waits].all()
    assert busy[1][waits].max() == 0
    whole, share = recording.warp_activity(1)
    assert share[1, 0] == pytest.approx(1 - waits.mean())
    assert [recording.phases[i] for i in whole[:, 0]] == ["alone", "fill"]


@pytest.mark.parametrize(("step", "wavefronts"), [(1, 1), (2, 2), (32, 32), (33, 1)])
def test_the_worst_access_of_a_site(step, wavefronts):
    patterns = recorded(step).recording.patterns
    load = next(p for p in patterns if p.site.kind == "load" and p.site.space == "shared")
    assert (load.transactions, load.ideal) == (wavefronts, 1)
    assert load.addresses == [4 * step * lane for lane in range(32)]
    store = next(p for p in patterns if p.site.kind == "store" and p.site.space == "global")
    assert (store.transactions, store.ideal, store.size) == (4, 4, 4)


def test_lanes_that_are_not_there_have_no_address():
    alone = [p for p in recorded().recording.patterns if p.site.phase == "alone"]
    assert len(alone) == 1
    assert sum(a is not None for a in alone[0].addresses) == 1


def test_snapshots_hold_what_was_written_and_omit_what_did_not_change():
    snapshots = recorded().recording.snapshots
    assert [s.phase for s in snapshots] == ["fill", "alone", "write"]
    tile = snapshots[0].arrays["tile"]
    np.testing.assert_array_equal(tile, np.arange(2048))
    assert (snapshots[1].arrays["tile"][:50] == 2).all()
    assert "tile" not in snapshots[2].arrays


def test_a_block_that_is_not_there():
    with pytest.raises(ValueError, match=r"record is 3, takes 0 to 2: there are 3 blocks"):
        recorded(block=3)
