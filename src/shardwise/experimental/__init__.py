"""Names that may still change."""

from shardwise.dispatch import implicit_replication
from shardwise.experimental.context_parallel import context_parallel, context_parallel_unshard
from shardwise.experimental.kernels import register_kernel
from shardwise.experimental.local_map import local_map
from shardwise.experimental.register import RuleError, register_sharding

__all__ = [
    "RuleError",
    "context_parallel",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "register_kernel",
    "register_sharding",
]
