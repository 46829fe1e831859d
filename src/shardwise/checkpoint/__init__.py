"""Checkpoints that any mesh can read."""

from shardwise.checkpoint import dcp  # noqa: F401  # gives DTensor what torch.distributed.checkpoint asks for
