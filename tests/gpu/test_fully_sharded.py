"""Fully sharded training on a simulated mesh of CUDA shards, against one CUDA device, with shards on the device or in
the CPU's memory. Skipped where there is no such device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharded_models import Model, batch, loss_of, shard

import shardwise as sw
from shardwise.parallel import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]


def mesh() -> Any:
    return sw.simulate((2,), ("dp",), device=DEVICE)


@pytest.mark.parametrize("own", [False, True], ids=["dtensors", "a-batch-per-rank"])
@pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(False)], ids=str)
def test_training_is_that_of_one_device(own: bool, offload: OffloadPolicy) -> None:
    torch.manual_seed(0)
    plain = Model().double().to(DEVICE)
    net = shard(copy.deepcopy(plain), fully_shard, mesh=mesh(), offload_policy=offload)
    rests_on = "cpu" if isinstance(offload, CPUOffloadPolicy) else DEVICE
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, net))
    for _ in range(3):
        data = [x.to(DEVICE) for x in batch()]
        placed = [sw.distribute_tensor(x, mesh(), [sw.Shard(0)]) for x in data]
        for optimizer, loss in (
            (first, lambda data=data: loss_of(plain, *data)),
            (second, lambda placed=placed: loss_of(net, *(x.to_local() if own else x for x in placed))),
        ):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.device.type == p.grad.device.type == rests_on
        for found, right in ((p, q), (p.grad, q.grad)):
            whole = torch.cat([x.detach().cpu() for x in _shards(found)])
            torch.testing.assert_close(whole, right.detach().cpu())


def _shards(x: Any) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return [x.as_subclass(torch.Tensor), *x._peers]


def test_memory_is_given_back() -> None:
    """What a step leaves on the device: shards, gradients and state, and none of what was gathered."""
    net = shard(Model(), fully_shard, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    data = [sw.distribute_tensor(x.to(DEVICE), mesh(), [sw.Shard(0)]) for x in batch()]
    held = []
    for _ in range(3):
        loss_of(net, *data).backward()
        net.zero_grad()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[-2]
    groups = {module._group for module in net.modules() if isinstance(module, FSDPModule)}
    assert not any(x.untyped_storage().size() for g in groups for entry in g.entries for x in entry.wholes)
