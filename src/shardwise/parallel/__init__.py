"""Parallel modules."""

from shardwise.parallel import optimizers
from shardwise.parallel.fully_sharded import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.modules import distribute_module
from shardwise.redistribute import no_sync

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "distribute_module",
    "fully_shard",
    "loss_parallel",
    "no_sync",
    "optimizers",
    "register_fsdp_forward_method",
]
