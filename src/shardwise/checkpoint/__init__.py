"""Checkpoints that any mesh can read."""

from shardwise.checkpoint import dcp  # noqa: F401  # gives DTensor what torch.distributed.checkpoint asks for
from shardwise.checkpoint.background import Saving, wait
from shardwise.checkpoint.models.load import Loaded, load
from shardwise.checkpoint.models.pretrained import load_pretrained, save_pretrained
from shardwise.checkpoint.models.save import save
from shardwise.checkpoint.models.sources import From, KeyMap
from shardwise.checkpoint.steps.resume import load_latest, load_step
from shardwise.checkpoint.steps.save import save_step

__all__ = [
    "From",
    "KeyMap",
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
