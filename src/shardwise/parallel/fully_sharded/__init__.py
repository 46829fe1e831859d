"""Fully sharded data parallelism: parameters rest as shards, and are whole only while their module runs."""

from shardwise.parallel.fully_sharded.api import fully_shard
from shardwise.parallel.fully_sharded.layouts import DataParallelMeshDims
from shardwise.parallel.fully_sharded.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.parallel.fully_sharded.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
