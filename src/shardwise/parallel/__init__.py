"""Parallel modules."""

from shardwise.parallel import optimizers
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.modules import distribute_module
from shardwise.redistribute import no_sync

__all__ = ["distribute_module", "loss_parallel", "no_sync", "optimizers"]
