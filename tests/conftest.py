from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Workers share the cores already. Threads that wait for each other in a loop take most of the time
# of small tensors, so OpenMP has one, and those that a test asks for sleep while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Modules and tests stay to the end. By default, a tenth of the time goes into looking for garbage
# among them, again and again: until all are there, none is looked for.
gc.set_threshold(10_000, 10, 100)
gc.disable()

# Test modules are imported one by one; this lets them share the helpers that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))

# Files that take most of the time of a whole run: kernels in Triton's interpreter, kernels compiled
# for GPUs, problems drawn by the hundred. Elsewhere, slow tests are marked one by one.
SLOW = {
    "test_browser.py",
    "test_build_processes.py",
    "test_compile_apart.py",
    "test_constant_time.py",
    "test_cpu_constant_time.py",
    "test_constant_time_builds.py",
    "test_cpu_forks.py",
    "test_cpu_hypothesis.py",
    "test_cpu_large_scores.py",
    "test_cpu_memory.py",
    "test_exact.py",
    "test_hopper_backward_build.py",
    "test_hopper_backward_loops.py",
    "test_hopper_backward_medium.py",
    "test_hopper_backward_medium_protocol.py",
    "test_hopper_backward_protocol.py",
    "test_hopper_backward_wide.py",
    "test_hopper_backward_wide_protocol.py",
    "test_hopper_build.py",
    "test_hopper_decode_build.py",
    "test_hopper_few_keys_build.py",
    "test_hopper_versions.py",
    "test_metadata_builds.py",
    "test_persistent.py",
    "test_sass.py",
    "test_sdpa_samples.py",
    "test_small_interpreter.py",
    "test_split_kv.py",
    "test_taint.py",
    "test_triton_backward.py",
    "test_triton_backward_builds.py",
    "test_triton_forward_builds.py",
    "test_triton_forward_fits.py",
    "test_triton_interpreter.py",
}
# Files that compile kernels for GPUs, each with the tests of it that `make test` runs, by how their
# names end or, before a star, begin: at least one for each kind of kernel. `make builds`, which CI
# runs too, has all others.
BUILDS = {
    "test_constant_time_builds.py": ("triton: forward for sm_90]", "persistent_mma for sm_90]"),
    "test_hopper_backward_build.py": ("[(64, {'S': 512})]", "test_takes_what_the_forward_takes*"),
    "test_hopper_backward_medium.py": ("[{}]", "test_head_dims_of_each_design*"),
    "test_hopper_backward_wide.py": ("(20, 0)])]", "test_tiles_fit*", "each_other_once"),
    "test_hopper_build.py": ("[128-True-5000]", "_is_found"),
    "test_hopper_decode_arrivals.py": (
        *("test_runs_of_a_head*", "test_one_program_folds*", "_have_room", "test_where_there_is*"),
    ),
    "test_hopper_decode_build.py": ("[128-16-5-1]",),
    "test_hopper_few_keys_build.py": ("of_few_keys", "of_one_block"),
    "test_hopper_groups.py": (
        *("test_every_query*", "test_queries*", "test_a_box*", "test_blocks*", "test_which_calls*"),
        *("test_work*", "test_launch*"),
    ),
    "test_hopper_options.py": ("[one loop]",),
    "test_hopper_versions.py": (),
    "test_hopper_window_plan.py": (
        *("[8-64]", "test_mask_and_heads_decide*", "test_rows_find_their_keys*"),
    ),
    "test_metadata_builds.py": ("[packed decode]", "[64-dtype0]", "_the_loop"),
    "test_triton_backward_builds.py": ("[90-64]", "[80-512]", "hopper[64]", "multiprocessor"),
    "test_triton_forward_builds.py": ("hopper[64]", "[False]", "_are_short", "[reduce_parts]"),
    "test_triton_forward_fits.py": ("[90-256-chunk]", "test_what_a_device_refuses*"),
}
# Folders and files whose tests share what takes long to make: processes, traces, a browser, builds.
TOGETHER = (
    ("tests/distributed/",),
    ("tests/ladder/",),
    ("tests/report/",),
    ("tests/kernels/test_constant_time_builds.py", "tests/kernels/test_hopper_build.py"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test is wanted are not imported: for a first answer, and for builds."""
    name, wanted = collection_path.name, config.option.markexpr
    if wanted == "not slow" and name in SLOW:
        return True
    if wanted == "builds" and name.startswith("test_") and name not in BUILDS:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_gpus(config, items)
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)
    mark_builds(config, items)
    # The largest group, which needs no CPU kernel: meanwhile another worker compiles those.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/ladder/"))


def mark_builds(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises UsageError for a line of BUILDS that has no test, where files are read as a whole."""
    unused = {(file, name) for file, names in BUILDS.items() for name in names}
    for item in items:
        file = item.path.name
        kept = [name for name in BUILDS.get(file, ()) if is_named(item.name, name)]
        unused -= {(file, name) for name in kept}
        if file in BUILDS and not kept:
            item.add_marker(pytest.mark.builds)
            item.add_marker(pytest.mark.slow)
    files = {item.path.name for item in items}
    unused = {(file, name) for file, name in unused if file in files}
    if unused and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"BUILDS in tests/conftest.py names no test: {sorted(unused)}")


def is_named(test: str, ending: str) -> bool:
    return test.startswith(ending[:-1]) if ending.endswith("*") else test.endswith(ending)


def pytest_collection_finish() -> None:
    """From now on garbage is looked for, but not among what there is already."""
    gc.freeze()
    gc.enable()


def leave_out_gpus(config: pytest.Config, items: list[pytest.Item]) -> None:
    """To skip a thousand tests one by one, and to report it, takes seconds."""
    import torch

    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist=loadfile`, with groups of files that one worker takes as a whole."""
    from xdist.scheduler import LoadFileScheduling

    class LoadFoldersAndFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((group[0] for group in TOGETHER if file.startswith(group)), file)

    return LoadFoldersAndFiles(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch  # which the process that only hands out tests does without

    torch.manual_seed(0)
