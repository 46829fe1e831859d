"""Checkpoints that any mesh can read."""

from shardwise.checkpoint.load import Loaded, load
from shardwise.checkpoint.save import save
from shardwise.checkpoint.sources import From

__all__ = ["From", "Loaded", "load", "save"]
