"""What programs cost: their collectives are those of the function itself, and the model is worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import WIDTH, batch, net_on
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.errors import CaptureError, NoDataError
from shardwise.graph.cost.memory import memory_of
from shardwise.graph.program import Facts

R, S = sw.Replicate(), sw.Shard


def made_on(mesh: Any, device: str = "cpu") -> tuple[Any, Any]:
    """A step, and its argument."""
    torch.manual_seed(0)
    with torch.device(device):
        up, down = torch.ones(64, 16), torch.ones(16, 64)
        x = sw.distribute_tensor(torch.ones(32, 16), mesh, [S(0), R])
    params = [nn.Parameter(sw.distribute_tensor(w, mesh, [R, S(dim)])) for dim, w in enumerate((up, down))]
    optimizer = torch.optim.AdamW(params, lr=0.1, foreach=True)

    def step(x: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.linear(F.gelu(F.linear(x, params[0])), params[1]).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss

    return step, x


@pytest.mark.parametrize("port", [sw.simulate, sw.recording])
def test_collectives_are_those_of_the_function(port: Any) -> None:
    step, x = made_on(port((2, 4), ("dp", "tp")), "cpu" if port is sw.simulate else "meta")
    step(x)
    with CommDebugMode() as eager:
        step(x)
    compiled = sw.compile(step, backend="fx", passes=())
    compiled.capture(x)
    forward, backward = ([x for x in compiled.comms() if x.backward is back] for back in (False, True))
    assert forward == [comm for comm in eager.comms if not comm.backward] and len(forward) == 2
    assert [comm.argument for comm in backward] == ["argument 1 (weight)"] * 2  # one after the other, not in a bucket
    assert compiled.price().wire_bytes == sum(comm.wire_bytes for comm in eager.comms)


def test_a_capture_runs_nothing() -> None:
    step, x = made_on(mesh := sw.simulate((2, 4), ("dp", "tp")))
    compiled = sw.compile(step, backend="fx", passes=())
    with pytest.raises(CaptureError, match=r"steps an optimizer that has not stepped yet.*call it once, then capture"):
        compiled.capture(x)
    compiled(x)
    with CommDebugMode() as mode:
        compiled.capture(x)
        compiled.capture(x)
        assert not mode.comms and len(compiled.programs) == 1
        compiled(x)
    assert len(mode.comms) == 4
    compiled.capture(sw.distribute_tensor(torch.ones(64, 16), mesh, [S(0), R]))
    assert len(compiled.programs) == 2
    first, last = compiled.price(program=0), compiled.price()
    assert 2 * sum(first.flops.values()) == sum(last.flops.values())
    with pytest.raises(IndexError, match=r"program 2 of .*step, of which 2 were captured"):
        compiled.price(program=2)


def test_what_only_records_does_not_run() -> None:
    step, x = made_on(sw.recording((64, 16), ("dp", "tp")), "meta")
    compiled = sw.compile(step, backend="fx", passes=())
    said = r"step is captured on a mesh that only records, and there are no data to run it on: capture\(…\) it"
    with pytest.raises(NoDataError, match=said):
        compiled(x)
    compiled.capture(x)
    with pytest.raises(NoDataError, match=said):
        compiled(x)
    assert "dp=64 × tp=16, recorded: rank 0 of 1024, without data" in str(compiled)
    assert "by nothing: its tensors have no data" in str(compiled)


def test_flops_are_those_of_a_rank() -> None:
    step, x = made_on(sw.simulate((2, 4), ("dp", "tp")))
    step(x)
    compiled = sw.compile(step, backend="fx", passes=())
    compiled.capture(x)
    with FlopCounterMode(display=False) as counted:  # the simulator computes for all ranks
        step(x)
    assert compiled.price().flops == {torch.float32: counted.get_total_flops() // 8}
    assert compiled.price().flops[torch.float32] == 5 * 2 * 16 * 16 * 16  # two products forward, three backward


def test_flops_of_attention_and_convolutions() -> None:
    x, w = torch.ones(2, 4, 8, 16, requires_grad=True), torch.ones(8, 8, 3, requires_grad=True)

    def both(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + F.conv1d(x.flatten(0, 1), w).sum()

    with FlopCounterMode(display=False) as counted:  # which leaves out attention on a CPU
        both(x).sum().backward()
    compiled = sw.compile(both, backend="fx")
    compiled.capture(x)
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert sum(compiled.price().flops.values()) == counted.get_total_flops() + (2 + 5) * product


def test_time_is_what_the_model_says() -> None:
    mesh = sw.recording((4, 2), ("dp", "tp"))
    x = sw.distribute_tensor(torch.empty(1024, 512, device="meta"), mesh, [S(0), R])
    w = sw.distribute_tensor(torch.empty(256, 512, device="meta"), mesh, [R, S(0)])

    def both(x: Any) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y.redistribute(placements=[S(0), R]), y.sum(0).redistribute(placements=[R, S(0)])

    compiled = sw.compile(both, backend="fx")
    compiled.capture(x)
    price = compiled.price(flops=1e9, bandwidth={"dp": 1e6, "tp": 1e8}, latency={"dp": 1e-3, "tp": 1e-5})
    gather, reduce = 256 * 128 * 4, 2 * 3 * 128 * 4 // 4
    assert [(own.kind, own.axes, own.ranks, own.count, own.bytes) for own in price.traffic] == [
        ("all_gather", ("tp",), 2, 1, gather),
        ("all_reduce", ("dp",), 4, 1, reduce),
    ]
    waits = [1e-5 + gather / 1e8, 2 * 3 * 1e-3 + reduce / 1e6]
    assert [own.seconds for own in price.traffic] == pytest.approx(waits)
    assert price.flops == {torch.float32: 2 * 256 * 512 * 128}
    assert price.compute_seconds == pytest.approx(2 * 256 * 512 * 128 / 1e9)
    assert price.seconds == pytest.approx(sum(waits) + price.compute_seconds)
    assert price.overlapped_seconds == pytest.approx(max(sum(waits), price.compute_seconds))
    assert price.collectives == 2 and price.wire_bytes == gather + reduce
    same = compiled.price(flops={torch.float32: 1e9}, bandwidth=1e6)
    assert same.compute_seconds == price.compute_seconds and same.comm_seconds == pytest.approx((gather + reduce) / 1e6)


def test_without_speeds_there_are_no_times() -> None:
    step, x = made_on(sw.recording((4, 2), ("dp", "tp")), "meta")
    compiled = sw.compile(step, backend="fx", passes=())
    compiled.capture(x)
    price = compiled.price()
    assert {price.seconds, price.comm_seconds, price.compute_seconds, price.overlapped_seconds} == {None}
    assert price.peak_bytes > 3 * (64 * 16 // 2) * 4 * 2  # parameters, and two states of each
    with pytest.raises(ValueError, match="bandwidth has the axes 'dp', and the program communicates along 'tp'"):
        compiled.price(bandwidth={"dp": 1.0})
    with pytest.raises(ValueError, match=r"flops has no speed for torch.float32, in which the program computes"):
        compiled.price(flops={torch.bfloat16: 1.0})


def test_a_price_is_a_table() -> None:
    step, x = made_on(sw.recording((512, 2), ("dp", "tp")), "meta")
    compiled = sw.compile(step, backend="fx", passes=())
    compiled.capture(x)
    lines = [line.split() for line in str(compiled.price(flops=1e12, bandwidth=1e9, latency=1e-6)).splitlines()]
    assert next(x for x in lines if "tp=2" in x)[:6] == ["│", "all_reduce", "tp=2", "│", "2", "│"]
    assert {"all_reduce", "compute", "all", "one", "memory,"} <= {line[1] for line in lines if line[0] == "│"}


# Memory


def part(ops: Any) -> fx.Graph:
    """A graph of a function of tensors of 1 kB each."""
    graph: fx.Graph = fx.symbolic_trace(ops).graph
    for node in graph.nodes:
        if node.op != "output":
            node.meta["facts"] = Facts((256,), torch.float32, torch.device("cpu"), (1,))
    return graph


aten = torch.ops.aten
MEMORY = [
    (lambda x: aten.sin.default(aten.cos.default(x)), 2),  # the first is let go of behind the second
    (lambda x: aten.sin.default(aten.cos.default(aten.tan.default(x))), 2),
    (lambda x: aten.add.Tensor(aten.cos.default(x), aten.sin.default(x)), 3),
    (lambda x: aten.sin.default(aten.view.default(aten.cos.default(x), [256])), 2),  # views need nothing
    (lambda x: aten.sin_.default(aten.cos.default(x)), 1),  # nor does what is written in place
    (lambda x: aten.sin_.default(x), 0),
    (lambda x: (aten.cos.default(x), aten.sin.default(x), aten.tan.default(x)), 3),  # what comes out is kept
]


@pytest.mark.parametrize(("ops", "most"), MEMORY)
def test_memory_at_its_peak(ops: Any, most: int) -> None:
    found = memory_of(part(ops))
    assert (found.given, found.made, found.peak) == (1024, most * 1024, (1 + most) * 1024)


def test_memory_of_a_module_counts_what_the_backward_pass_needs() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    net = net_on(mesh)
    sw.compile(net, backend="fx")
    net(batch(mesh, 0))
    parameters = sum(p.to_local().numel() for p in net.parameters()) * 4
    memory = sw.graph.programs_of(net).price().memory
    assert memory.given >= parameters + 2 * 4 * WIDTH * 4  # with the input, and the gradient of the result
    assert memory.made > 0 and memory.at is not None


@pytest.mark.slow
def test_a_step_of_24_layers_on_1024_ranks() -> None:
    mesh = sw.recording((128, 8), ("dp", "tp"))

    def weight(*shape: int, dim: int) -> nn.Parameter:
        return nn.Parameter(sw.distribute_tensor(torch.empty(*shape, device="meta"), mesh, [R, S(dim)]))

    layers = [(weight(4096, 1024, dim=0), weight(1024, 4096, dim=1)) for _ in range(24)]
    optimizer = torch.optim.AdamW([w for layer in layers for w in layer], foreach=True)

    def step(x: Any) -> None:
        optimizer.zero_grad()
        for up, down in layers:
            x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, (1024,)), up)), down)
        x.square().mean().backward()
        optimizer.step()

    compiled = sw.compile(step, backend="fx", passes=())
    compiled.capture(sw.distribute_tensor(torch.empty(128 * 512, 1024, device="meta"), mesh, [S(0), R]))
    price = compiled.price(flops=1e15, bandwidth={"dp": 5e10, "tp": 4e11})
    assert sum(price.flops.values()) == (24 * 2 * 3 - 1) * 2 * 512 * 1024 * 512  # the batch needs no gradient
    gradients = next(own for own in price.traffic if own.axes == ("dp",))
    assert gradients.bytes == 24 * 2 * (2 * 127 * (4096 * 1024 // 8 * 4) // 128)
    assert "┌ 2" in str(compiled) and price.seconds
