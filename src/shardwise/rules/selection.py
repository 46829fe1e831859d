"""The k-th smallest element: medians, `kthvalue`, and the mode. The dim they look along must be whole."""

from __future__ import annotations

from shardwise.rules.reductions import reduction_ways
from shardwise.rules.registry import register
from shardwise.rules.types import Rule

register("kthvalue", "median", "nanmedian", "mode", rule=Rule(lambda call: reduction_ways(call, None)))
