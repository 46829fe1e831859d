"""Any checkpoint as one thing, whichever format it has: what is in it, and how each part of it is read and checked."""

from shardwise.checkpoint.catalogue.find import found_in, open_checkpoint
from shardwise.checkpoint.catalogue.items import Catalogue, Check, Item

__all__ = ["Catalogue", "Check", "Item", "found_in", "open_checkpoint"]
