"""Passes over captured programs: each makes of a rank's graph one that communicates less, later, or meanwhile.

>>> import torch, shardwise as sw
>>> mesh = sw.simulate((2,), ("tp",))
>>> x = sw.distribute_tensor(torch.randn(4, 8), mesh, [sw.Shard(0)])
>>> step = sw.compile(lambda x: x.full_tensor() * 2 + x.full_tensor(), backend="fx")
>>> y = step(x)
>>> for report in step.programs[0].reports:
...     print(report)
tidy: nothing to do
share: 1 collective shared; 2 all_gather, 128 B → 1 all_gather, 64 B
cancel: nothing to do
scatter: nothing to do
narrow: nothing to do
bucket: nothing to do
merge: nothing to do
overlap: nothing to do
in_place: nothing to do
"""

from shardwise.graph.passes.pipeline import DEFAULT, PASSES, optimised
from shardwise.graph.passes.report import PassReport, Traffic

__all__ = ["DEFAULT", "PASSES", "PassReport", "Traffic", "optimised"]
