"""What fully sharded training communicates, when, and what it holds meanwhile."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from sharded_models import NUM_BLOCKS, Model, batch, loss_of, shard
from torch import nn

import shardwise as sw
from shardwise.comm import shards_of
from shardwise.comm.simulated import SimulatedPort
from shardwise.debug import CommDebugMode
from shardwise.parallel import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardwise.parallel.fully_sharded.group import Group

MESH = sw.simulate((2,), ("dp",))
WAYS = pytest.mark.parametrize("own", [False, True], ids=["dtensors", "a-batch-per-rank"])


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    return shard(Model(), fully_shard, mesh=MESH, **options)


def loss_on(net: Any, own: bool) -> Any:
    data = [sw.distribute_tensor(x, MESH, [sw.Shard(0)]) for x in batch()]
    return loss_of(net, *(x.to_local() if own else x for x in data))


def bytes_of(net: nn.Module) -> list[int]:
    """Of each group's shards on the first rank: the blocks', then the rest."""
    sizes = [sum(map(shard_bytes, block.parameters())) for block in net.blocks]
    return [*sizes, sum(map(shard_bytes, net.parameters())) - sum(sizes)]


def shard_bytes(param: Any) -> int:
    return math.prod(param.layout_on_mesh.held_shapes[0]) * param.element_size()


# --- ZeRO-3's schedule ---


@WAYS
@pytest.mark.parametrize("freed", [None, True, False])
def test_bytes_and_counts_are_those_of_the_schedule(own: bool, freed: bool | None) -> None:
    """Each group is gathered once forward and, where it was freed, once more backward; then reduced once."""
    net = sharded(reshard_after_forward=freed)
    *blocks, rest = bytes_of(net)
    for _ in range(2):
        with CommDebugMode() as comms:
            loss_on(net, own).backward()
        found = {
            (kind, backward): sum(
                c.bytes
                for c in comms.comms
                if (c.kind, c.backward, c.function) == (kind, backward, "fully_shard") and c.axes == ("dp",)
            )
            for kind, backward in (("all_gather", False), ("all_gather", True), ("reduce_scatter", True))
        }
        again = {None: sum(blocks), True: sum(blocks) + rest, False: 0}[freed]
        whole = sum(p.numel() * p.element_size() for p in net.parameters())
        assert found == {
            ("all_gather", False): sum(blocks) + rest,
            ("all_gather", True): again,
            ("reduce_scatter", True): whole,
        }
        counts = [c.kind for c in comms.comms if c.function == "fully_shard"]
        num_groups = NUM_BLOCKS + 1
        assert counts.count("reduce_scatter") == num_groups
        assert counts.count("all_gather") == num_groups + {None: NUM_BLOCKS, True: num_groups, False: 0}[freed]


def test_half_precision_halves_the_gathers() -> None:
    net = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with CommDebugMode() as comms:
        loss_on(net, True).backward()
    gathered = sum(c.bytes for c in comms.comms if c.kind == "all_gather" and not c.backward)
    assert gathered == sum(bytes_of(net)) // 2


def test_everyone_is_told_what_collectives_are_for() -> None:
    net = sharded()
    with CommDebugMode() as comms:
        loss_on(net, True).backward()
    found = [c for c in comms.comms if c.function == "fully_shard"]
    assert {c.why for c in found} == {"parameters gathered", "gradients reduced"} and len(found) == len(comms.comms) - 2
    assert all(c.file == __file__ or c.file.endswith("sharded_models.py") for c in found)


# --- In which order ---


class _Trace:
    """What happened, in order: modules that compute, forward and backward, and collectives that start."""

    def __init__(self, net: Any) -> None:
        self.events: list[str] = []
        groups = {
            module._group: name or "root" for name, module in net.named_modules() if isinstance(module, FSDPModule)
        }
        self.names = {group: name.replace("blocks.", "") for group, name in groups.items()}
        for i, block in enumerate(net.blocks):
            block.down.register_forward_hook(lambda m, args, out, i=i: self.see(out, i))

    def see(self, out: Any, i: int) -> None:
        self.events.append(f"forward {i}")
        if out.requires_grad:
            out.register_hook(lambda grad: self.events.append(f"backward {i}"))


@contextmanager
def traced(net: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    trace = _Trace(net)
    start_gather, wait, reduce = Group._start, Group.gather, SimulatedPort.start_reduce_scatter

    def started(self: Group, *args: Any) -> Any:
        trace.events.append(f"start {trace.names[self]}")
        return start_gather(self, *args)

    def reduced(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace.events.append("reduce")
        return reduce(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Group, "_start", started)
        patch.setattr(SimulatedPort, "start_reduce_scatter", reduced)
        yield trace.events
    assert wait is Group.gather


def test_the_next_module_is_gathered_before_this_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded()
    loss_on(net, False).backward()  # the order is learned
    with traced(net, monkeypatch) as events:
        loss = loss_on(net, False)
        assert events == ["start root", "start 0", "start 1", "forward 0", "start 2", "forward 1", "forward 2"]
        events.clear()
        loss.backward()
    assert events == [
        *("start 2", "start 1", "backward 2", "reduce"),
        *("start 0", "backward 1", "reduce"),
        *("backward 0", "reduce", "reduce"),
    ]


def test_modules_to_prefetch_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded()
    net.set_modules_to_forward_prefetch(list(net.blocks[:2]))
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[2]])
    for block in net.blocks[1:]:
        block.set_modules_to_forward_prefetch([])
    net.blocks[2].set_modules_to_backward_prefetch(list(net.blocks[:2]))
    with traced(net, monkeypatch) as events:
        loss = loss_on(net, True)
        assert events == ["start root", "start 0", "start 1", "start 2", "forward 0", "forward 1", "forward 2"]
        events.clear()
        loss.backward()
    assert [e for e in events if e.startswith("start")] == ["start 2", "start 0", "start 1"]


def test_embeddings_need_not_be_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    for module in net:
        fully_shard(module, mesh=MESH)
    fully_shard(net, mesh=MESH)
    net[0].set_unshard_in_backward(False)
    with CommDebugMode() as comms:
        loss_on(net, True).backward()
    assert [c.kind for c in comms.comms if c.backward] == ["all_gather", "reduce_scatter", "reduce_scatter"]


# --- What is held ---


def held_bytes(net: nn.Module) -> int:
    """Of gathered parameters, of one rank."""
    groups = {module._group for module in net.modules() if isinstance(module, FSDPModule)}
    return sum(entry.wholes[0].untyped_storage().size() for g in groups for entry in g.entries if entry.wholes)


@WAYS
@pytest.mark.parametrize("freed", [True, None])
def test_at_most_two_modules_are_gathered(own: bool, freed: bool | None) -> None:
    """One that computes, and one that was started; and the outermost, whose parameters are used around the blocks."""
    net = sharded(reshard_after_forward=freed)
    whole = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in net.blocks]
    rest = sum(p.numel() * p.element_size() for p in net.parameters()) - sum(whole)
    peaks: list[int] = []

    def look(*_: Any) -> None:
        pending = [b._group for b in net.blocks if b._group._pending is not None]
        under_way = sum(p.numel() * p.element_size() for g in pending for e in g.entries for p in [e.param])
        peaks.append(held_bytes(net) + under_way)

    for block in net.blocks:
        for module in (block.up, block.down):
            module.register_forward_hook(look)
            module.register_forward_hook(lambda m, args, out: out.register_hook(look) and None)
    for _ in range(2):
        loss = loss_on(net, own)
        assert held_bytes(net) == (0 if freed else rest)
        loss.backward()
        assert held_bytes(net) == 0
    assert len(peaks) >= 2 * 4 * NUM_BLOCKS and max(peaks) == 2 * max(whole) + rest
    with torch._C.DisableTorchFunctionSubclass():
        for p in net.parameters():
            assert shards_of(p)[0].untyped_storage().size() == shard_bytes(p)


def test_nobody_keeps_whole_parameters() -> None:
    net = Model()
    before = [weakref.ref(p) for p in net.parameters()]
    shard(net, fully_shard, mesh=MESH)
    gc.collect()
    assert all(found() is None for found in before)


def test_a_graph_that_is_not_used_holds_no_parameters() -> None:
    net = sharded(reshard_after_forward=True)
    losses = [loss_on(net, own) for own in (False, True)]
    assert held_bytes(net) == 0
    del losses


def test_a_step_leaves_nothing_behind() -> None:
    """Neither graphs nor tensors: two steps hold what one does."""
    net = sharded()
    counts = []
    for _ in range(4):
        loss_on(net, False).backward()
        net.zero_grad()
        gc.collect()
        counts.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
    assert counts[-1] == counts[-2]


def test_the_same_on_a_mesh_without_data() -> None:
    """What it would communicate among 64 ranks."""
    mesh = sw.recording((64,), ("dp",))
    with torch.device("meta"):
        net = shard(Model(), partial(fully_shard, mesh=mesh))
        data = [sw.distribute_tensor(x.to("meta").repeat(8, 1), mesh, [sw.Shard(0)]) for x in batch()]
    with CommDebugMode() as comms:
        loss_of(net, *data).backward()
    counts = [c.kind for c in comms.comms if c.function == "fully_shard"]
    assert counts.count("all_gather") == 2 * NUM_BLOCKS + 1 and counts.count("reduce_scatter") == NUM_BLOCKS + 1


def test_a_copy_of_the_plain_model_is_untouched() -> None:
    plain = Model()
    before = copy.deepcopy(plain.state_dict())
    shard(copy.deepcopy(plain), fully_shard, mesh=MESH)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), before.values(), strict=True))
