"""The state of an optimizer loads into one whose parameters are on another mesh, and steps go on as on one device."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GRID = sw.simulate((2, 2), ("a", "b"))
Place = Callable[[Tensor], Tensor]

PLACES: dict[str, Place] = {
    "one device": lambda w: w.clone(),
    "rows": lambda w: sw.distribute_tensor(w, GRID["a"], [S0]),
    "columns": lambda w: sw.distribute_tensor(w, GRID["a"], [S1]),
    "blocks": lambda w: sw.distribute_tensor(w, GRID, [S0, S1]),
    "replicated": lambda w: sw.distribute_tensor(w, GRID, [R, R]),
    "other ranks": lambda w: sw.distribute_tensor(w, sw.simulate((3,), ("c",)), [S0]),
}
MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, 0.1, foreach=True, amsgrad=True),
    "AdamW, one by one": lambda p: optim.AdamW(p, 0.1, foreach=False),
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Adafactor": lambda p: optim.Adafactor(p, 0.1),  # its state has shapes of its own
    "LBFGS": lambda p: optim.LBFGS(p, 0.1, max_iter=2),  # lists, for all parameters together
    "Muon": lambda p: optim.Muon(p, 0.1),
}


def trained(make: Callable, weight: Tensor, saved: Any = None) -> tuple[Tensor, optim.Optimizer]:
    """A parameter after two steps, from a saved state if there is one."""
    param = nn.Parameter(weight)
    optimizer = make([param])
    if saved is not None:
        optimizer.load_state_dict(saved)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return param.detach(), optimizer


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")  # LBFGS joins all gradients into one vector
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(("rows", "blocks"), ("blocks", "columns"), ("rows", "columns"), ("replicated", "other ranks")),
        *(("one device", "blocks"), ("other ranks", "replicated")),
    ],
)
def test_loading_elsewhere(name: str, source: str, target: str) -> None:
    torch.manual_seed(0)
    make, weight = MAKERS[name], torch.randn(6, 4, dtype=torch.float64)
    middle, before = trained(make, weight.clone())
    expected, right = trained(make, middle.clone(), through_a_file(before.state_dict()))

    _, saved = trained(make, PLACES[source](weight))
    found, optimizer = trained(make, PLACES[target](middle), through_a_file(saved.state_dict()))
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-7, atol=1e-9)
    (state,), (theirs,) = optimizer.state.values(), right.state.values()
    assert state.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, Tensor) and value.dim():
            assert isinstance(state[key], DTensor) and state[key].device_mesh is found.device_mesh
            if value.shape == found.shape:
                assert state[key].placements == found.placements, "no step moves it again"


def test_what_is_where_it_belongs_is_not_touched() -> None:
    _, saved = trained(MAKERS["AdamW"], PLACES["rows"](torch.ones(6, 4)))
    param = nn.Parameter(PLACES["rows"](torch.ones(6, 4)))
    optimizer = MAKERS["AdamW"]([param])
    optimizer.load_state_dict(saved.state_dict())
    before = dict(optimizer.state[param])
    param.grad = torch.ones_like(param)
    with CommDebugMode() as comm:
        optimizer.step()
    assert not comm.comms and all(optimizer.state[param][key] is value for key, value in before.items())


def test_the_saved_state_stays_as_it_was() -> None:
    _, saved = trained(MAKERS["SGD"], torch.ones(6, 4))
    state = saved.state_dict()
    kept = state["state"][0]["momentum_buffer"]
    before = kept.clone()
    trained(MAKERS["SGD"], PLACES["blocks"](torch.ones(6, 4)), state)
    assert type(kept) is Tensor and torch.equal(kept, before)
