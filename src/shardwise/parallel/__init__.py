"""Parallel modules."""

from shardwise.parallel import optimizers
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.modules import distribute_module

__all__ = ["distribute_module", "loss_parallel", "optimizers"]
