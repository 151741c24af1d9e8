"""Lockstep as a kernel of the Hugging Face hub, loaded by `kernels` from a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("kernels.variants")  # `kernels` alone may be a folder of tests
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

import kernels
import tiny_models
from kernels import variants
from kernels._rust import Metadata
from kernels.validate import default_metadata_validators
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import lockstep
from lockstep.cli import app
from lockstep.integrations import hub

NAME = "someone/lockstep-flash-attn2"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "lockstep-flash-attn2"
    for backend in hub.BACKENDS:
        hub.write_layout(folder, backend)
    return folder


@pytest.fixture
def offline(repository, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={repository}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
def test_the_hub_takes_metadata_and_folders(repository):
    for backend in hub.BACKENDS:
        folder = repository / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(folder / "metadata.json")
        assert metadata.python_depends == []
        for validator in default_metadata_validators():
            validator.validate_metadata(metadata=metadata, variant=folder.name)
    found = variants.get_variants_local(repository / "build")
    assert {x.variant_str for x in found} == {"torch-cuda", "torch-cpu"}


def test_a_loaded_kernel_is_a_package_of_its_own(offline):
    kernel = kernels.get_kernel(NAME, version=1)
    assert kernel.__name__ != "lockstep"
    assert kernel.attention is not lockstep.attention
    # float64 runs on the oracle, which needs nothing but PyTorch.
    q, k, v = torch.randn(3, 2, 9, 4, 16, dtype=torch.float64).requires_grad_()
    sinks = torch.randn(4, dtype=torch.float64)
    out = kernel.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    wanted = lockstep.attention(*heads, causal=True, sinks=sinks).transpose(1, 2)
    assert torch.equal(out, wanted)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq, torch.autograd.grad(wanted.sum(), q)[0])


@pytest.mark.slow
def test_without_numba_and_lockstep_it_is_imported_all_the_same(repository):
    """The GPU kernels too. What needs numba says so."""
    program = f"""
import importlib.abc, importlib.util, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite", "lockstep", "rich", "typer"):
            raise ModuleNotFoundError(name)
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "numba" else find_spec(name, *a)
sys.meta_path.insert(0, Missing())
folder = {str(repository / "build" / "torch-cuda")!r}
spec = importlib.util.spec_from_file_location("hub", folder + "/__init__.py")
hub = sys.modules["hub"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)
import torch
if find_spec("triton") is not None:
    import hub.kernels.triton.forward, hub.kernels.triton.split_kv, hub.kernels.triton.backward
    import hub.kernels.hopper.forward.launch, hub.kernels.hopper.backward
q = torch.randn(1, 2, 4, 16)
print(hub.explain(q, q, q).refusals["cpu"])
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "needs the package numba, which is not installed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continuous_batching_is_generate(name, offline):
    prompts = [[*range(5, 16)], [7, 8], [20, 21, 22, 23]]
    options = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model = tiny_models.make(name).double()
    wanted = [
        model.generate(torch.tensor([ids]), generation_config=options)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    model.set_attn_implementation(NAME)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    found = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=sizes
    )
    assert [x.generated_tokens for x in found.values()] == wanted


@pytest.mark.slow
def test_the_command(tmp_path):
    run = CliRunner().invoke(app, ["hub-layout", str(tmp_path), "--json"])
    facts = json.loads(run.stdout)
    assert facts["folder"] == str(tmp_path / "build" / "torch-cuda")
    assert len(list((tmp_path / "build" / "torch-cuda").rglob("*.py"))) == facts["files"]
    again = CliRunner().invoke(app, ["hub-layout", str(tmp_path)])
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    unknown = CliRunner().invoke(app, ["hub-layout", str(tmp_path), "--backend", "metal"])
    assert unknown.exit_code == 2
    assert "--backend takes one of cuda, cpu" in unknown.stderr
