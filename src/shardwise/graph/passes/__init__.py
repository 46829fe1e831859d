"""Passes over captured programs: each makes of a rank's graph one that communicates less, later, or meanwhile."""

from shardwise.graph.passes.pipeline import DEFAULT, PASSES, optimised
from shardwise.graph.passes.report import PassReport, Traffic

__all__ = ["DEFAULT", "PASSES", "PassReport", "Traffic", "optimised"]
