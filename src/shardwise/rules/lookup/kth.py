"""The k-th smallest element: medians, `kthvalue`, and the mode. The dim they look along must be whole."""

from __future__ import annotations

from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Rule
from shardwise.rules.math.reductions import reduction_ways

register("kthvalue", "median", "nanmedian", "mode", rule=Rule(lambda call: reduction_ways(call, None)))
