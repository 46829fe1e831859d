"""What a type checker must refuse: each marked line is an error of the kind that it names, and nothing else is."""

from __future__ import annotations

import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm.functional import traceable
from shardwise.experimental import register_kernel
from shardwise.parallel import no_sync
from shardwise.rules import AxisPlacement

mesh = sw.simulate((2,), ("tp",))
net = torch.nn.Linear(2, 2)
x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])

sw.Shard("0")  # expect: arg-type
sw.Partial(1)  # expect: arg-type
sw.simulate(2, ("tp",))  # expect: arg-type
sw.distribute_tensor([1.0, 2.0], mesh, [sw.Shard(0)])  # expect: arg-type
sw.distribute_tensor(torch.ones(4), "tp", [sw.Shard(0)])  # expect: arg-type
sw.distribute_tensor(torch.ones(4), mesh, [0])  # expect: list-item
sw.distribute_tensor(torch.ones(4), mesh, sw.Shard(0))  # expect: arg-type
sw.DTensor.from_local(torch.ones(4), mesh, placement=[sw.Shard(0)])  # expect: call-arg
sw.zeros(4, device_mesh=mesh, placements=["S(0)"])  # expect: list-item
x.redistribute(placements=[None])  # expect: list-item
x.redistribute(mesh, [sw.Replicate()], async_op="yes")  # expect: arg-type
local: sw.DTensor = x.to_local()  # expect: assignment
first: sw.Shard = x.placements[0]  # expect: assignment
x.placements = (sw.Replicate(),)  # expect: misc
sw.distribute_module(x, mesh)  # expect: arg-type
no_sync(True)  # expect: call-arg
sw.strict(moves=[1])  # expect: arg-type
register_kernel("silu", "cpu")  # expect: arg-type
register_kernel(torch.relu, torch.device("cpu"))  # expect: arg-type
traceable("tp")  # expect: arg-type
checkpoint.save({"x": x}, "folder")  # expect: arg-type
checkpoint.save(net, "folder", max_shard_size=1e9)  # expect: arg-type
checkpoint.load(net, "folder", keys=["x"])  # expect: arg-type
checkpoint.load(net, "folder", keys={"weight": ["q", "k"]})  # expect: dict-item
checkpoint.From("x", make=len)  # expect: arg-type
checkpoint.From("q", ["k"])  # expect: arg-type
checkpoint.save_step("run", step="3", model=net)  # expect: arg-type
going_on: int = checkpoint.load_latest("run", model=net)  # expect: assignment
along: AxisPlacement = "S(0)"  # expect: assignment
