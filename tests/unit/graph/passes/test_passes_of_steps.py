"""Passes over train steps: bit for bit the step, with fewer collectives that go on meanwhile, in less memory."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Made, Net, batch, compare, net_on
from optimised import kinds, sharded_weights, stepped
from torch import fx, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.graph.draft.draft import in_backward
from shardwise.graph.nodes import Start, collective_of
from shardwise.graph.passes import DEFAULT
from shardwise.graph.passes.bucket import PRODUCTS
from shardwise.redistribute.backward import buckets

GPT = runpy.run_path(str(Path(__file__).parents[4] / "examples" / "gpt.py"), run_name="gpt")


def replicated(dp: int) -> Made:
    """Data parallelism of two nets, one behind the other."""
    mesh = sw.simulate((dp,), ("dp",))
    torch.manual_seed(0)
    return stepped(sw.distribute_module(nn.Sequential(Net(), Net()), mesh), lambda call: batch(mesh, call))


def program_of(make: Callable[[], Made], passes: Any, calls: int = 3) -> sw.graph.Program:
    """The program of a step, which gives what the step gives. No pass but those on request may communicate more."""
    (program,) = compare(make, calls, passes=passes).programs
    for report in program.reports:
        less = report.before.bytes >= report.after.bytes and report.before.collectives >= report.after.collectives
        assert less or report.name not in DEFAULT, str(report)
    return program


# Buckets


def test_gradients_are_reduced_together() -> None:
    before, after = program_of(lambda: replicated(3), ()), program_of(lambda: replicated(3), "default")
    assert kinds(before).count("all_reduce") == len(list(nn.Sequential(Net(), Net()).parameters()))
    assert len(kinds(after)) == 1


@pytest.mark.parametrize("largest", [400, 1000, 2000])
def test_there_is_a_bucket_for_so_many_bytes(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LARGEST", largest)
    program = program_of(lambda: replicated(2), ("tidy", "bucket"))
    total = 4 * sum(p.numel() for p in nn.Sequential(Net(), Net()).parameters())
    assert 1 < len(gradients(program)) <= math.ceil(total / largest)


def test_what_fills_a_bucket_alone_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LARGEST", 400)
    program = program_of(lambda: replicated(2), ("tidy", "bucket"))
    cats = [node for node in program.ranks[0].graph.nodes if node.target is torch.ops.aten.cat.default]
    parts: list[Any] = [part for node in cats for part in node.args[0]]
    copied = [4 * math.prod(part.meta["facts"].shape) for part in parts]
    large = [4 * p.numel() for p in nn.Sequential(Net(), Net()).parameters() if 4 * p.numel() >= 400]
    assert large and copied and max(copied) < 400 and len(gradients(program)) == len(large) + len(cats)


def gradients(program: sw.graph.Program) -> list[fx.Node]:
    nodes = program.ranks[0].graph.nodes
    return [node for node in nodes if in_backward(node) and collective_of(node) is not None]


def test_a_norm_of_gradients_waits_for_buckets() -> None:
    def clipped() -> Made:
        (net, optimizer), _, arguments = replicated(2)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return norm

        return (net, optimizer), step, arguments

    program_of(clipped, "default")


# Overlap


def gpt_on(dp: int, shard: int, tp: int) -> Made:
    """The step of examples/gpt.py."""
    mesh = sw.simulate((dp, shard, tp), ("dp", "shard", "tp"))
    rows = [sw.Shard(0), sw.Shard(0), sw.Replicate()]
    torch.manual_seed(0)
    model = GPT["parallelize"](GPT["GPT"](), mesh)
    data = GPT["batches"](4)
    positions = sw.distribute_tensor(torch.arange(GPT["TOKENS"]).expand(GPT["BATCH"], -1), mesh, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(tokens: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        with sw.parallel.loss_parallel():
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    def arguments(call: int) -> tuple[Any, ...]:
        own = data[call]
        return tuple(sw.distribute_tensor(x, mesh, rows) for x in (own[:, :-1].clone(), own[:, 1:].clone()))

    return (model, optimizer), step, arguments


def late(program: sw.graph.Program) -> list[bool]:
    """Of each reduction of gradients along the axes of data, whether it starts behind the last product."""
    nodes = list(program.ranks[0].graph.nodes)
    last = max(i for i, node in enumerate(nodes) if in_backward(node) and node.target in PRODUCTS)
    along_data = [node for node in gradients(program) if "tp" not in collective_of(node).axis_names]  # type: ignore[union-attr]
    return [not isinstance(node.target, Start) or nodes.index(node) > last for node in along_data]


def test_all_buckets_but_the_last_are_on_their_way_before_the_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LARGEST", 600)
    assert late(program_of(lambda: replicated(2), "default")) == [False, False, False, True]


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_gpt(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings have their gradients last of all, so that the bucket with these is late as well."""
    monkeypatch.setattr(buckets, "LARGEST", 60_000)
    program = program_of(lambda: gpt_on(*shape), "default", calls=2)
    assert not any(report.left_out for report in program.reports)
    found = late(program)
    assert len(found) > 2 and not any(found[:-2])


def test_ranks_with_other_shards_communicate_alike() -> None:
    """Sixteen columns on three ranks."""
    program = program_of(stepped_uneven, "default")
    assert not any(report.left_out for report in program.reports)
    assert kinds(program, 0) == kinds(program, 1) == kinds(program, 2)


def stepped_uneven() -> Made:
    mesh = sw.simulate((1, 3), ("dp", "tp"))
    return stepped(net_on(mesh), lambda call: batch(mesh, call))


# On request


def kept(program: sw.graph.Program) -> int:
    """Bytes of what is gathered that the forward pass keeps for the backward pass."""
    nodes = program.ranks[0].graph.nodes
    gathers = [node for node in nodes if getattr(collective_of(node), "kind", "") == "all_gather"]
    return sum(
        piece.meta["facts"].bytes
        for node in gathers
        if not in_backward(node) and _is_used_in_backward(node)
        for piece in node.users
    )


def _is_used_in_backward(node: fx.Node) -> bool:
    """Whether a tensor, or what is a form of it, is used in the backward pass."""
    names = ("getitem", "cat", "t", "view", "wait")
    forms = [user for user in node.users if getattr(user.target, "__name__", "").split(".")[0] in names]
    others = [user for user in node.users if user not in forms]
    return any(in_backward(user) for user in others) or any(map(_is_used_in_backward, forms))


@pytest.mark.parametrize("size", [2, 3])
def test_weights_are_gathered_again(size: int) -> None:
    before = program_of(lambda: sharded_weights(sw.simulate((size,), ("dp",))), ("tidy",))
    after = program_of(lambda: sharded_weights(sw.simulate((size,), ("dp",))), ("tidy", "gather_again"))
    assert kinds(before).count("all_gather") == 3
    assert (
        kinds(after).count("all_gather") == 4
    )  # the first layer's is not needed again; the last one's would be at once
    assert kept(after) < kept(before)
    together = program_of(lambda: sharded_weights(sw.simulate((size,), ("dp",))), [*DEFAULT, "gather_again"])
    assert kinds(together).count("all_gather") == 2  # one for all layers, and one for the backward pass


def test_what_is_used_first_is_kept() -> None:
    """One layer: it would be gathered again at once."""
    mesh = sw.simulate((2,), ("dp",))
    found = kinds(program_of(lambda: sharded_weights(mesh, layers=1), ("tidy", "gather_again")))
    assert found.count("all_gather") == 1
