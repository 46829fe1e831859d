"""Parallel modules."""

from shardwise.parallel import optimizers
from shardwise.parallel.api import parallelize_module
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.modules import distribute_module
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
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "distribute_module",
    "loss_parallel",
    "no_sync",
    "optimizers",
    "parallelize_module",
]
