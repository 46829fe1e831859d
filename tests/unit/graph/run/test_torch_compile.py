"""torch.compile around DTensors: what touches them runs as it is, and torch says what to call instead."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch, shardwise as sw
x = sw.distribute_tensor(torch.randn(4, 4), sw.simulate((2,), ("tp",)), [sw.Shard(0)])
try:
    torch.compile(lambda x: torch.relu(x) + 1, fullgraph=True, backend="eager")(x)
except Exception as error:
    print(error)
"""


def test_a_whole_graph_is_refused_with_the_call_that_makes_one() -> None:
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "shardwise's DTensors, which torch.compile cannot trace: shardwise.compile captures such" in found.stdout
