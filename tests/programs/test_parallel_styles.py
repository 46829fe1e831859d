"""One model, spread in every way of parallelism: the same training, with no plans or parameters left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from compare import check_shards
from meshes import GRID, data
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


class Model(nn.Module):
    """Embedding, normalisation, a block that tensor parallelism splits, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embed": (11, 4), "norm": (4,), "up": (4, 6), "down": (6, 4), "experts": (3, 4, 4), "gate": (4, 3)}
        for name, shape in {**shapes, "head": (4, 11)}.items():
            self.register_parameter(name, nn.Parameter(data(*shape)))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = F.layer_norm(F.embedding(tokens, self.embed), (4,), self.norm)
        x = x + F.gelu(x @ self.up) @ self.down
        experts = torch.einsum("btd,edf->ebtf", x, self.experts)
        x = torch.einsum("bte,ebtf->btf", (x @ self.gate).softmax(-1), experts)
        return F.cross_entropy((x @ self.head).flatten(0, 1), target.flatten(), label_smoothing=0.1)


TENSOR = {"embed": S(0), "up": S(1), "down": S(0), "head": S(1)}


EXPERT = {"experts": S(0), "gate": S(1)}


WAYS: dict[str, tuple[dict[str, list[sw.Placement]], list[sw.Placement]]] = {
    "replicated": ({}, [R, R]),
    "data": ({}, [S(0), S(0)]),
    "sharded data": (
        {name: [S(0), S(0)] for name in ("embed", "norm", "up", "down", "experts", "gate", "head")},
        [S(0), S(0)],
    ),
    "tensor": ({name: [R, p] for name, p in TENSOR.items()}, [R, R]),
    "data and tensor": ({name: [R, p] for name, p in TENSOR.items()}, [S(0), R]),
    "expert": ({name: [p, R] for name, p in EXPERT.items()}, [R, R]),
    "data and expert": ({name: [R, p] for name, p in EXPERT.items()}, [S(0), R]),
    "all": (
        {**{name: [S(0), p] for name, p in TENSOR.items()}, **{name: [S(0), p] for name, p in EXPERT.items()}},
        [S(0), R],
    ),
}


def train(model: nn.Module, steps: int, place: Callable[[Tensor], Tensor], foreach: bool = True) -> list[Tensor]:
    """The norms of the gradients before they are clipped."""
    tokens, norms = torch.arange(15).view(5, 3) % 11, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=foreach)
    for step in range(steps):
        optimizer.zero_grad()
        model(place((tokens + step) % 11), place((tokens * 3 + 1) % 11)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach))
        optimizer.step()
    return norms


def spread(model: nn.Module, way: str) -> nn.Module:
    placements, _ = WAYS[way]
    for name, parameter in list(model.named_parameters()):
        where = placements.get(name, [R, R])
        setattr(model, name, nn.Parameter(sw.distribute_tensor(parameter.detach(), GRID, where)))
    return model


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("way", WAYS)
def test_gradient_norms_do_not_depend_on_the_degree(way: str, foreach: bool) -> None:
    model = Model()
    ours = spread(copy.deepcopy(model), way)
    expected = train(model, 3, lambda x: x)
    found = train(ours, 3, lambda x: sw.distribute_tensor(x, GRID, WAYS[way][1]), foreach)
    torch.testing.assert_close([norm.full_tensor() for norm in found], expected)
    for theirs, parameter in zip(model.parameters(), ours.parameters(), strict=True):
        check_shards(parameter.grad)
        torch.testing.assert_close(parameter.detach().full_tensor(), theirs.detach())


def test_plans_do_not_grow_and_parameters_are_freed() -> None:
    model = spread(Model(), "all")
    place = lambda x: sw.distribute_tensor(x, GRID, WAYS["all"][1])  # noqa: E731
    train(model, 2, place)
    before = sw.cache_info()
    train(model, 4, place)
    after = sw.cache_info()
    assert (after.size, after.misses) == (before.size, before.misses) and after.hits > before.hits
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)
