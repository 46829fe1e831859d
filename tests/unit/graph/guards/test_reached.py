"""What a function reaches, and what it is called there."""

from __future__ import annotations

import functools

import torch
from torch import nn

from shardwise.graph.guards.call import leaf_names
from shardwise.graph.guards.reached import Reached

SCALE = 3


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.every, self.seen = 4, 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.model(x) * SCALE


def names(reached: Reached) -> list[str]:
    return [found.name for found in reached.objects]


def test_what_a_method_reaches() -> None:
    reached = Reached.by(Training().step, [])
    assert names(reached) == [
        *("self.model", "self.model.0.weight", "self.model.1.weight", "self.model.1.bias"),
        *("self.model.1.running_mean", "self.model.1.running_var", "self.model.1.num_batches_tracked"),
        "self.optimizer",
    ]
    assert [(found.name, found.value) for found in reached.values] == [
        *(("self.model.1.eps", 1e-5), ("self.model.1.momentum", 0.1), ("self.model.1.track_running_stats", True)),
        ("SCALE", 3),  # and not `self.every`, which no code names
    ]
    assert list(reached.names.values()) == ["self.model", "self.model.0", "self.model.1", "self.optimizer"]


def test_the_parameters_of_a_module_that_is_called_have_their_own_names() -> None:
    assert names(Reached.by(nn.Linear(2, 2), [])) == ["weight", "bias"]


def test_tensors_in_lists_and_dicts_are_found_where_they_are() -> None:
    kept, named = [torch.ones(1), torch.ones(1)], {"scale": torch.ones(1)}
    reached = Reached.by(lambda: (kept, named), [])
    assert names(reached) == ["kept[0]", "kept[1]", "named['scale']"]
    for (holder, key), value, _ in reached.objects:
        assert holder[key] is value


def test_leaves_are_called_as_the_function_calls_them() -> None:
    def step(model: nn.Module, batch: dict, *rest: int, scale: float) -> None: ...

    args, kwargs = (nn.Linear(2, 2), {"x": 1, "y": [2, 3]}, 4), {"scale": 5.0}
    expected = ["model", "batch['x']", "batch['y'][0]", "batch['y'][1]", "args[2]", "scale"]
    assert leaf_names(step, args, kwargs) == expected
    assert leaf_names(functools.partial(step, None), args[1:2], {}) == ["batch['x']", "batch['y'][0]", "batch['y'][1]"]
    assert leaf_names(nn.Linear(2, 2)._call_impl, (1,), {}) == ["input"]
    assert leaf_names(torch.add, (1, 2), {}) == ["args[0]", "args[1]"]
    assert names(Reached.by(step, args[:1], ["model"])) == ["model.weight", "model.bias"]
