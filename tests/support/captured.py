"""Programs beside what they were captured of: two equal models, one stepped as it is, one captured, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import shardwise as sw

WIDTH, HIDDEN, ROWS = 8, 16, 8

Made = tuple[Any, Callable[..., Any], Callable[[int], tuple[Any, ...]]]
"""What a step changes (modules, optimizers, tensors), the step, and the arguments of its nth call."""


def state_of(changed: Any) -> list[Tensor]:
    """Everything that a step may have changed."""
    found: list[Tensor] = []
    for x in tree_leaves(changed):
        if isinstance(x, nn.Module):
            found += [*x.parameters(), *x.buffers(), *(p.grad for p in x.parameters() if p.grad is not None)]
        elif isinstance(x, torch.optim.Optimizer):
            found += [y for own in x.state.values() for y in tree_leaves(own) if isinstance(y, Tensor)]
        elif isinstance(x, Tensor):
            found += [x, *([] if x.grad is None else [x.grad])]
    return found


def shards(x: Any) -> list[Tensor]:
    local = x.to_local() if isinstance(x, sw.DTensor) else x
    return [y.detach().as_subclass(Tensor) for y in (local, *local.__dict__.get("_peers", ()))]


def assert_same(found: Any, wanted: Any, where: str) -> None:
    """Equal to the last bit, in equal layouts."""
    found, wanted = tree_leaves(found), tree_leaves(wanted)
    assert len(found) == len(wanted), where
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(y, Tensor):
            assert x == y, f"{where}, {i}: {x} and {y}"
            continue
        assert type(x) is type(y), f"{where}, {i}: {type(x)} and {type(y)}"
        if isinstance(y, sw.DTensor):
            assert x.layout_on_mesh.unreduced is y.layout_on_mesh.unreduced, f"{where}, {i}"
        for a, b in zip(shards(x), shards(y), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), f"{where}, {i}: they differ by {(a - b).abs().max()}"


def compare(make: Callable[[], Made], calls: int = 4, *, programs: int = 1, **options: Any) -> Any:
    """Step two models side by side; returns what was captured. The first call of an optimizer runs as it is."""
    changed, step, arguments = make()
    other, again, same = make()
    options.setdefault("backend", "fx")
    compiled = sw.compile(again, **options)
    for call in range(calls):
        torch.manual_seed(call)
        wanted = step(*arguments(call))
        after = torch.get_rng_state()
        torch.manual_seed(call)
        found = compiled(*same(call))
        assert torch.equal(torch.get_rng_state(), after), f"call {call}: random numbers"
        assert_same(found, wanted, f"call {call}, result")
        assert_same(state_of(other), state_of(changed), f"call {call}, state")
    captured = sw.graph.programs_of(compiled)
    assert len(captured.runs) == programs, [guards.why for guards, _ in captured.runs]
    return captured


class Net(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.norm(nn.functional.gelu(self.up(x)))))


def net_on(mesh: Any, dropout: float = 0.0) -> Net:
    """Columns, rows and the rest of its parameters as tensor parallelism has them along the last axis of a mesh."""
    torch.manual_seed(0)
    net, tp = Net(dropout), mesh.ndim - 1
    along: dict[str, int] = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, param in list(net.named_parameters()):
        owner, own = net.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        places: list[Any] = [sw.Replicate()] * mesh.ndim
        if name in along:
            places[tp] = sw.Shard(along[name])
        setattr(owner, own, nn.Parameter(sw.distribute_tensor(param.detach(), mesh, places)))
    return net


def batch(mesh: Any, number: int, rows: int = ROWS) -> Any:
    """Rows split along the first axis."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
    return sw.distribute_tensor(x, mesh, [sw.Shard(0), *[sw.Replicate()] * (mesh.ndim - 1)])
