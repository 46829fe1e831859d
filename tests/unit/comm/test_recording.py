"""The recording port: a program on ten thousand ranks, counted without memory."""

import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode


def big_mesh() -> sw.Mesh:
    return sw.recording((125, 80), ("dp", "tp"))


def test_mesh() -> None:
    mesh = big_mesh()
    assert (mesh.size(), mesh.device_type, mesh.held) == (10000, "meta", ((0, 0),))
    assert mesh["tp"].size() == 80


def test_shards_have_rank_zeros_shapes_and_no_memory() -> None:
    x = sw.distribute_tensor(torch.empty(1_000_001, 800, device="meta"), big_mesh(), [Shard(0), Shard(1)])
    assert x.to_local().shape == (8001, 10)
    assert x.to_local().device.type == "meta"
    assert x.redistribute(placements=[Shard(1), Shard(0)]).to_local().shape == (12501, 7)


def test_collectives_of_redistributions() -> None:
    mesh = big_mesh()
    x = sw.distribute_tensor(torch.empty(20000, 1000, device="meta"), mesh, [Shard(0), Shard(0)])
    with CommDebugMode() as comm:
        whole = x.redistribute(placements=[Replicate(), Replicate()])
        x.redistribute(placements=[Shard(0), Shard(1)])
        x.redistribute(placements={0: ("tp", "dp")})
    assert whole.to_local().shape == (20000, 1000)
    assert [(c.kind, c.axes, c.ranks, c.bytes) for c in comm.comms] == [
        ("all_gather", ("dp", "tp"), 10000, 2 * 1000 * 4),
        ("all_to_all", ("tp",), 80, 2 * 1000 * 4),
        ("all_to_all", ("dp", "tp"), 10000, 2 * 1000 * 4),
    ]


def test_pending_sums() -> None:
    mesh = big_mesh()
    local = torch.empty(500, 80, device="meta")
    x = sw.DTensor.from_local(local, mesh, [Partial(), Partial()])
    with CommDebugMode() as comm:
        x.redistribute(placements=[Replicate(), Replicate()])
        x.redistribute(placements=[Shard(0), Replicate()])
        scattered = x.redistribute(placements=[Shard(0), Shard(0)])
    assert scattered.to_local().shape == (1, 80)
    assert [(c.kind, c.axes) for c in comm.comms] == [
        ("all_reduce", ("dp", "tp")),
        ("reduce_scatter", ("dp",)),
        ("all_reduce", ("tp",)),
        ("reduce_scatter", ("dp", "tp")),
    ]


def test_a_megatron_pair_of_layers_forward_and_backward() -> None:
    mesh = big_mesh()

    def parameter(rows: int, columns: int, placement: sw.Placement) -> sw.DTensor:
        made = sw.distribute_tensor(torch.empty(rows, columns, device="meta"), mesh, [Replicate(), placement])
        return made.requires_grad_()

    up, down = parameter(8000, 32000, Shard(1)), parameter(32000, 8000, Shard(0))
    x = sw.distribute_tensor(torch.empty(1000, 8000, device="meta"), mesh, [Shard(0), Replicate()])
    with CommDebugMode() as comm:
        loss = ((x @ up).relu() @ down).redistribute(placements=[Shard(0), Replicate()]).sum()
        loss.backward()
    forward = [(c.kind, c.axes) for c in comm.comms if not c.backward]
    backward = [(c.kind, c.axes) for c in comm.comms if c.backward]
    assert forward[0] == ("all_reduce", ("tp",))
    assert backward == [("all_reduce", ("dp",))] * 2  # one per weight; x needs no gradient
    assert up.grad.to_local().shape == (8000, 400)
    assert down.grad.to_local().shape == (400, 8000)
