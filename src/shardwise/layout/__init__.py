"""Values: meshes, placements, layouts. Nothing here communicates."""

from shardwise.layout.layout import Box, Layout, Placements, replicated, unknown_placement
from shardwise.layout.mesh import Mesh, entered_mesh
from shardwise.layout.placement import SUM, Partial, Placement, Replicate, Shard
from shardwise.layout.sizes import chunk_sizes, intervals, offsets

__all__ = [
    "SUM",
    "Box",
    "Layout",
    "Mesh",
    "entered_mesh",
    "Partial",
    "Placement",
    "Placements",
    "Replicate",
    "Shard",
    "chunk_sizes",
    "intervals",
    "offsets",
    "replicated",
    "unknown_placement",
]
