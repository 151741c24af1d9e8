from __future__ import annotations

from worlds import results_of, run_world


def test_dtensors_meshes_compilers_checkpoints_and_ddp():
    """Shards of 19 and 18 tokens, for 37 is odd."""
    for rank, said in enumerate(results_of(run_world(2, "inside"))):
        assert said == [], f"rank {rank}"
