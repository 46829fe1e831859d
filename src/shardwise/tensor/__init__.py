"""DTensor: a tensor that is its own shard, and what leads to it and away from it."""

from shardwise.tensor.distribute import distribute_tensor, from_parts
from shardwise.tensor.dtensor import (
    OURS,
    DTensor,
    _rebuild,
    as_layout,
    kernels_see,
    localise,
    wrap,
)
from shardwise.tensor.gradients import gradient_shards, gradient_tensor, observe, settled, within_graph, without_terms
from shardwise.tensor.in_flight import InFlight

__all__ = [
    "OURS",
    "DTensor",
    "InFlight",
    "_rebuild",
    "as_layout",
    "distribute_tensor",
    "from_parts",
    "gradient_shards",
    "gradient_tensor",
    "kernels_see",
    "localise",
    "observe",
    "settled",
    "within_graph",
    "without_terms",
    "wrap",
]
