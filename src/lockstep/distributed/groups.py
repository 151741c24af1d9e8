"""Process groups: from what a caller passes as `mesh`, to ranks that answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Mesh = DeviceMesh | ProcessGroup
Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Makes calls of a function graph breaks under torch.compile, which says why."""
    why = "lockstep.distributed: exchanges between ranks are not compiled"
    found: Function = torch.compiler.disable(function, reason=why)  # type: ignore[no-untyped-call]
    return found


def group_of(mesh: Mesh) -> ProcessGroup:
    """The process group of a 1-D mesh, or the group itself.

    Raises RuntimeError where torch.distributed is not initialised, TypeError and ValueError for
    what is not a group, a mesh of several dims, or a group without this process.
    """
    if not dist.is_available():
        raise RuntimeError("mesh takes a process group, and this torch is built without them")
    if not dist.is_initialized():
        raise RuntimeError(
            "mesh takes a process group, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() first, under torchrun for instance"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh takes a mesh of 1 dim, got {mesh.ndim}: pick one, as in mesh['context']"
            )
        group: ProcessGroup = mesh.get_group()
    elif isinstance(mesh, ProcessGroup):
        group = mesh
    else:
        raise TypeError(f"mesh takes a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("mesh takes a group that this process is a member of")
    return group


def moves_host_memory(group: ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on `device` have to pass through host memory: gloo moves nothing else."""
    return device.type != "cpu" and dist.get_backend(group) == "gloo"
