"""Checkpoints that any mesh can read."""

from shardwise.checkpoint import dcp  # noqa: F401  # gives DTensor what torch.distributed.checkpoint asks for
from shardwise.checkpoint.background import Saving, wait
from shardwise.checkpoint.load import Loaded, load
from shardwise.checkpoint.pretrained import load_pretrained, save_pretrained
from shardwise.checkpoint.resume import load_latest, load_step
from shardwise.checkpoint.save import save
from shardwise.checkpoint.sources import From
from shardwise.checkpoint.steps import save_step

__all__ = [
    "From",
    "Loaded",
    "Saving",
    "load",
    "load_latest",
    "load_pretrained",
    "load_step",
    "save",
    "save_pretrained",
    "save_step",
    "wait",
]
