"""Whole steps: captured once, and then run without Python's part in them."""

from shardwise.graph.capture.capture import capture
from shardwise.graph.compile import compile, programs_of
from shardwise.graph.program import Program
from shardwise.graph.save.loading import load

__all__ = ["Program", "capture", "compile", "load", "programs_of"]
