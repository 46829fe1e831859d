"""Programs on tensors without data: as much is recorded as the simulator records, and nothing is held."""

from __future__ import annotations

import resource

import pytest
import torch
import torch.nn.functional as F
from recorded import MEGATRON, PROGRAMS, Block, lay, recorded
from torch import nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.errors import NoDataError

R, S = sw.Replicate(), sw.Shard
AXES = ("dp", "tp")


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_much_is_recorded_as_in_the_simulator(name: str, shape: tuple[int, int]) -> None:
    simulated = recorded(name, sw.simulate(shape, AXES))
    assert recorded(name, sw.recording(shape, AXES)) == simulated
    assert simulated and all(ranks > 1 for _, _, ranks, _, _ in simulated)


def test_bytes_are_those_of_the_shard() -> None:
    mesh = sw.recording((4, 8), AXES)
    weight = sw.distribute_tensor(torch.empty(64, 32, device="meta"), mesh, [R, S(0)]).requires_grad_()
    x = sw.distribute_tensor(torch.empty(16, 32, device="meta"), mesh, [S(0), R])
    with CommDebugMode() as comm:
        (x @ weight.mT).sum().backward()
    assert [(c.kind, c.axes, c.bytes) for c in comm.comms if c.backward] == [("all_reduce", ("dp",), 8 * 32 * 4)]
    assert weight.grad.shape == (64, 32) and weight.grad.to_local().shape == (8, 32)
    assert weight.grad is weight.grad


def test_a_block_of_seven_billions_on_a_thousand_ranks() -> None:
    mesh = sw.recording((128, 8), AXES)
    with torch.device("meta"):
        model = lay(Block(4096, 32).to(torch.bfloat16), mesh, *MEGATRON)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = sw.distribute_tensor(torch.empty(128, 4096, 4096, dtype=torch.bfloat16, device="meta"), mesh, [S(0), R])
    with CommDebugMode() as comm:
        model(x.requires_grad_()).square().mean().backward()
    assert {c.ranks for c in comm.comms} <= {8, 128, 1024}
    assert [p.grad.to_local().shape for p in model.q.parameters()] == [(512, 4096), (512,)]
    reduced = [c.bytes for c in comm.comms if "dp" in c.axes and c.backward]
    assert sum(reduced) == sum(p.grad.to_local().nbytes for p in model.parameters())
    assert 1 < len(reduced) < len(list(model.parameters()))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 100e6  # one weight has 134 MB


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize(
    "use",
    [
        *(lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: float(x.mean()), lambda x: x.tolist()),
        *(torch.nonzero, lambda x: x[x > 0], torch.unique, lambda x: x.masked_select(x > 0), lambda x: x.numpy()),
        *(lambda x: x.cpu(), lambda x: torch.equal(x, x), lambda x: x[x[0, 0].long()]),
    ],
)
def test_what_needs_data_says_so(use: object) -> None:
    x = sw.distribute_tensor(torch.empty(8, 4, device="meta"), sw.recording((2,), ("tp",)), [S(0)])
    with pytest.raises(NoDataError, match="depends on data, and these tensors have none"):
        use(x)  # type: ignore[operator]


def test_gradients_are_added_up_and_looked_at_between() -> None:
    mesh = sw.recording((4,), ("tp",))
    model = sw.distribute_module(nn.Linear(6, 5, device="meta"), mesh)
    weight = nn.Parameter(model.weight.detach().redistribute(placements=[S(0)]))
    for _ in range(2):
        F.linear(sw.distribute_tensor(torch.empty(3, 6, device="meta"), mesh), weight).sum().backward()
        assert weight.grad.shape == (5, 6) and weight.grad.to_local().shape == (2, 6)
    weight.grad = torch.zeros_like(weight)
    F.linear(sw.distribute_tensor(torch.empty(3, 6, device="meta"), mesh), weight).sum().backward()
    assert weight.grad.to_local().shape == (2, 6)
