"""Ports: where a program runs and how its ranks exchange data."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.port import Port
from shardwise.comm.process_group import ProcessGroupPort, mesh_of
from shardwise.comm.ranked import PerRank, Ranked, per_rank, ranked, shards_of
from shardwise.comm.recording import RecordingPort, rebuild_recording, recording
from shardwise.comm.simulated import SimulatedPort, rebuild_simulated, simulate
from shardwise.errors import MeshError
from shardwise.layout import Mesh

__all__ = [
    "PerRank",
    "Port",
    "ProcessGroupPort",
    "Ranked",
    "RecordingPort",
    "SimulatedPort",
    "as_mesh",
    "mesh_of",
    "per_rank",
    "ranked",
    "recording",
    "shards_of",
    "simulate",
]


def as_mesh(mesh: Any) -> Mesh:
    """Our mesh for whatever the user passed: one of ours, or torch's DeviceMesh."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh)
    raise MeshError(f"expected a mesh from shardwise.simulate or a torch DeviceMesh, got {type(mesh).__name__}")


# What torch.load(weights_only=True) may call to make a mesh again.
torch.serialization.add_safe_globals([DeviceMesh, mesh_of, rebuild_recording, rebuild_simulated])
