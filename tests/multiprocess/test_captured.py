"""Captured programs on real ranks: they give, bit for bit, what the functions give; ranks that differ all refuse."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from launch import Case
from shardwise.errors import CaptureError, SavedProgramError
from shardwise.parallel import cross_entropy, linear_cross_entropy

sys.path.append(str(Path(__file__).parents[1] / "support"))  # the ranks import this file without pytest's settings
from captured import WIDTH, Made, Net, assert_same, batch, compare, net_on, state_of

R, S = sw.Replicate(), sw.Shard


def made_on(mesh: Any) -> Made:
    net = net_on(mesh, dropout=0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return loss, norm

    return (net, optimizer), step, lambda call: (batch(mesh, call),)


def stepped(rank: int, size: int, shape: tuple[int, int]) -> None:
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    compare(partial(made_on, mesh))


def fully_sharded(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    def made() -> Made:
        torch.manual_seed(0)
        net = nn.Sequential(Net(0.1), Net(0.1))
        for part in (*net, net):
            sw.fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        own = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))  # each rank has a batch of its own
        return (net, optimizer), step, lambda call: (own + call,)

    compare(made)


def with_gradients(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plain, other = (nn.Sequential(net_on(mesh), net_on(mesh)) for _ in range(2))
    for block in other:
        sw.compile(block, backend="fx")
    for call in range(2):
        x = sw.distribute_tensor(torch.full((4, WIDTH), call + 1.0), mesh)
        for net in (plain, other):
            net.zero_grad()
            net(x).square().mean().backward()
        for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def compiled_by_inductor(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    (changed, step, _), (others, again, _) = made_on(mesh), made_on(mesh)
    compiled = sw.compile(again)
    for call in range(3):
        x = sw.distribute_tensor(torch.full((4, WIDTH), call + 1.0), mesh)
        found = []
        for run in (step, compiled):
            torch.manual_seed(call)
            found.append(run(x)[0].full_tensor())
        torch.testing.assert_close(*found)
    for mine, theirs in zip(others[0].parameters(), changed[0].parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach().full_tensor())


def numbers_of_data_by_inductor(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))

    def made() -> Any:
        net = net_on(mesh)
        optimizer = torch.optim.Adafactor(net.parameters(), lr=0.1, weight_decay=0.1)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x / x.abs().max().item()).square().mean()
            loss.backward()
            optimizer.step()
            number = loss.item()
            return number, loss, (round(number, 3), math.floor(number), math.ceil(number), number // 0.25)

        return net, step

    (net, step), (other, again) = made(), made()
    compiled = sw.compile(again)
    for call in range(4):
        x = batch(mesh, call)
        wanted, found = step(x), compiled(x)
        number = found[0]
        assert number == found[1].full_tensor().item() and abs(number - wanted[0]) < 1e-4
        assert found[2] == (pytest.approx(round(number, 3)), math.floor(number), math.ceil(number), number // 0.25)
        assert [*map(type, found[2])] == [float, int, int, float]
    assert len(compiled.programs) == 1
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach().full_tensor(), rtol=1e-4, atol=1e-5)


def saved_and_loaded(rank: int, size: int, shape: tuple[int, int]) -> None:
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    (changed, step, arguments), (others, again, same) = made_on(mesh), made_on(mesh)
    compiled = sw.compile(step, backend="fx")
    for call in range(3):
        for run, given in ((compiled, arguments), (again, same)):
            torch.manual_seed(call)
            run(*given(call))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        compiled.save(folders[0])
        loaded = sw.graph.load(folders[0], again, backend="fx")
        for call in range(3, 5):
            torch.manual_seed(call)
            wanted = compiled(*arguments(call))
            torch.manual_seed(call)
            assert_same(loaded(*same(call)), wanted, f"call {call}, result")
            assert_same(state_of(others), state_of(changed), f"call {call}, state")
        assert len(loaded.runs) == 1

        if rank == 1:
            Path(folders[0], f"rank-{rank:05}.json").unlink()
        said = "rank-00001.json is missing" if rank == 1 else "no saved program serves this call on another rank, whose"
        with pytest.raises(SavedProgramError, match=said):
            sw.graph.load(folders[0], again, backend="fx")(*same(5))
        dist.barrier()


def losses_of_a_head(rank: int, size: int) -> None:
    """Whose rows are sharded along the axis of the classes."""
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, head, target = torch.randn(6, WIDTH), torch.randn(13, WIDTH), torch.arange(6) * 2
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "ignore_index": 4}

    def of_logits(x: Any, head: Any, target: Any) -> Any:
        logits = nn.functional.linear(x.redistribute(placements=[R]), head)
        loss = cross_entropy(logits, target.redistribute(placements=[R]), **options)
        return loss, *torch.autograd.grad(loss, (x, head), retain_graph=True)

    def of_head(x: Any, head: Any, target: Any) -> Any:
        loss = linear_cross_entropy(x, head, target, chunk_size=4, **options)
        return loss, *torch.autograd.grad(loss, (x, head), retain_graph=True)

    given = [sw.distribute_tensor(y, mesh, [S(0)]) for y in (x, head, target)]
    plain = [y.clone().requires_grad_() for y in (x, head)]
    expected = cross_entropy(plain[0] @ plain[1].T, target, **options)
    wanted = expected, *torch.autograd.grad(expected, plain)
    for leaf in given[:2]:
        leaf.requires_grad_()
    for function in (of_logits, of_head):
        compiled = sw.compile(function, backend="fx")
        for _ in range(2):
            for found, other in zip(compiled(*given), wanted, strict=True):
                torch.testing.assert_close(found.full_tensor(), other)


def ranks_that_differ(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.ones(4, WIDTH), mesh, [sw.Shard(0)])

    def differs(x: Any) -> Any:
        return x.sum().full_tensor() if rank else x.full_tensor()

    with pytest.raises(CaptureError, match="the ranks' programs differ in what they communicate"):
        sw.compile(differs, backend="fx")(x)

    def fails(x: Any) -> Any:
        if rank:
            raise KeyError("only here")
        return x.sum()

    with pytest.raises(KeyError if rank else CaptureError, match="only here" if rank else "on another rank"):
        sw.compile(fails, backend="fx")(x)
    assert sw.compile(lambda x: x.sum().full_tensor(), backend="fx")(x) == 4 * WIDTH  # nothing is left over


def ranks_called_apart(rank: int, size: int) -> None:
    """Once there are programs, too: nobody runs one while another rank captures."""
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [S(0)])
    number, whole = 1, x.redistribute(placements=[R])
    compiled = sw.compile(lambda x: (x * number).sum().full_tensor(), backend="fx")
    assert [compiled(x).item() for _ in range(2)] == [28.0] * 2
    with pytest.raises(CaptureError, match="the ranks' programs differ in what they communicate"):
        compiled(whole if rank else x)
    assert compiled(x) == 28
    number = 1 + rank  # what is communicated is the same
    assert compiled(x) == 6 + 2 * 22
    if rank:
        with pytest.raises(TypeError):
            compiled(None)
    else:
        with pytest.raises(CaptureError, match="could not be captured on another rank, whose error says why"):
            compiled(x)
    assert compiled(x) == 6 + 2 * 22
    branches = sw.compile(lambda x, flag: x.full_tensor() if flag else x.sum(), backend="fx")
    branches(x, flag=True), branches(x, flag=False)
    with pytest.raises(CaptureError, match="the ranks' programs differ in what they communicate"):
        branches(x, flag=bool(rank))
    assert torch.equal(branches(x, flag=True), torch.arange(8.0).reshape(4, 2))


CASES = [
    Case("captured-tp-2", 2, stepped, ((1, 2),)),
    Case("captured-dp-2", 2, stepped, ((2, 1),)),
    Case("captured-dp-tp-4", 4, stepped, ((2, 2),)),
    Case("captured-uneven-4", 4, stepped, ((1, 4),)),
    Case("captured-fully-sharded", 2, fully_sharded),
    Case("captured-with-gradients", 2, with_gradients),
    Case("captured-by-inductor", 2, compiled_by_inductor),
    Case("captured-numbers-of-data-by-inductor", 2, numbers_of_data_by_inductor),
    Case("captured-losses-of-a-head", 2, losses_of_a_head),
    Case("captured-ranks-that-differ", 2, ranks_that_differ),
    Case("captured-ranks-called-apart", 2, ranks_called_apart),
    Case("captured-saved-dp-tp-4", 4, saved_and_loaded, ((2, 2),)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_on_ranks(case: Case, on_ranks: Callable[[Case], object]) -> None:
    on_ranks(case)
