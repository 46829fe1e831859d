"""Parallel modules."""

from shardwise.parallel import optimizers
from shardwise.parallel.api import parallelize_module
from shardwise.parallel.clipping import clip_grad_norm_
from shardwise.parallel.fully_sharded import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.parallel.fused_loss import fuse_loss
from shardwise.parallel.linear_loss import LinearCrossEntropy, linear_cross_entropy
from shardwise.parallel.loss import cross_entropy, loss_parallel
from shardwise.parallel.modules import distribute_module
from shardwise.parallel.sharded_init import init_on
from shardwise.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shardwise.redistribute import no_sync

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DataParallelMeshDims",
    "FSDPModule",
    "LinearCrossEntropy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "clip_grad_norm_",
    "cross_entropy",
    "distribute_module",
    "fully_shard",
    "fuse_loss",
    "init_on",
    "linear_cross_entropy",
    "loss_parallel",
    "no_sync",
    "optimizers",
    "parallelize_module",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
