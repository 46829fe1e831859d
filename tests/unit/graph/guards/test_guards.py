"""When a program serves a call, when another is captured, and when that is given up."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from captured import WIDTH, Net, batch, net_on
from torch import nn

import shardwise as sw
from shardwise.errors import CaptureError, CaptureWarning


def mesh_2x2() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"))


def reasons(compiled: Any) -> list[str]:
    """Why programs were captured, the first first."""
    return [guards.why for guards, _ in reversed(sw.graph.programs_of(compiled).runs)]


SCALE = 2.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.inner = nn.Parameter(torch.ones(WIDTH)), 1.0, Net(dropout=0.5)

    def forward(self, x: Any) -> Any:
        return self.inner(x * self.weight) * self.scale


def test_equal_calls_are_served_by_one_program() -> None:
    mesh = mesh_2x2()
    compiled = sw.compile(lambda x, y: x @ y, backend="fx")
    other = sw.distribute_tensor(torch.randn(WIDTH, 4), mesh)
    for call in range(4):
        compiled(batch(mesh, call), other)
    assert reasons(compiled) == ["the first call"]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows": (lambda mesh: batch(mesh, 0, rows=12), "x: f32[8,8] S(0)@dp is now f32[12,8] S(0)@dp"),
    "layout": (
        lambda mesh: batch(mesh, 0).redistribute(placements=[sw.Replicate()] * 2),
        "x: f32[8,8] S(0)@dp is now f32[8,8] R",
    ),
    "dtype": (lambda mesh: batch(mesh, 0).double(), "x: f32[8,8] S(0)@dp is now f64[8,8] S(0)@dp"),
    "strides": (lambda mesh: batch(mesh, 0).T.contiguous().T, "x: f32[8,8] S(0)@dp with other strides"),
    "gradient": (
        lambda mesh: batch(mesh, 0).requires_grad_(),
        "x: requires_grad of f32[8,8] S(0)@dp: False is now True",
    ),
    "mesh": (lambda mesh: batch(sw.simulate((4, 1), ("dp", "tp")), 0), "x: f32[8,8] S(0)@dp on another mesh"),
    "kind": (lambda mesh: 3.0, "x: f32[8,8] S(0)@dp is now 3.0"),
}


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1)], ids=["simulated", "one rank, at which C++ looks"])
@pytest.mark.parametrize("name", CHANGES)
def test_another_argument(name: str, sizes: tuple[int, int]) -> None:
    mesh = sw.simulate(sizes, ("dp", "tp"))
    compiled = sw.compile(lambda x: x * x, backend="fx")
    make, why = CHANGES[name]
    compiled(batch(mesh, 0))
    compiled(make(mesh))
    compiled(batch(mesh, 1))
    first, second = reasons(compiled)
    assert (first, second) == ("the first call", why)


def test_plain_values_are_part_of_a_program() -> None:
    compiled = sw.compile(lambda x, n, mode: x * n if mode == "times" else x + n, backend="fx")
    x = torch.ones(3)
    assert [compiled(x, n, mode)[0].item() for n, mode in [(2, "times"), (3, "times"), (2, "plus"), (2, "times")]] == [
        2,
        3,
        3,
        2,
    ]
    assert reasons(compiled) == ["the first call", "n: 2 is now 3", "n: 3 is now 2"]


def test_modes_are_part_of_a_program() -> None:
    net = Net()
    compiled = sw.compile(net, backend="fx")
    x = torch.ones(2, WIDTH)
    compiled(x)
    with torch.no_grad():
        compiled(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype is torch.bfloat16
    assert reasons(compiled)[1:] == ["grad mode: True is now False", "grad mode: False is now True"]


def test_settings_of_modules_are_part_of_a_program() -> None:
    net = Scaled()
    compiled = sw.compile(net, backend="fx")
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        compiled(x)
        net.eval()
        first = compiled(x)
        net.scale = 3.0
        assert torch.equal(compiled(x), first * 3)
        net.weight = nn.Parameter(torch.zeros(WIDTH))
        compiled(x)
    assert reasons(compiled)[1:] == [
        "Scaled.training: True is now False",
        "scale: 1.0 is now 3.0",
        "weight is another Parameter",
    ]


def test_globals_and_closures_are_part_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 1.0

    def scaled(x: Any) -> Any:
        return x * SCALE * factor

    compiled = sw.compile(scaled, backend="fx")
    x = torch.ones(2)
    assert compiled(x)[0] == 2.0
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert compiled(x)[0] == 5.0
    factor = 2.0
    assert compiled(x)[0] == 10.0
    assert reasons(compiled)[1] == "SCALE: 2.0 is now 5.0"


def stepping(**options: Any) -> tuple[Any, Any, Any, Any]:
    mesh = mesh_2x2()
    net = net_on(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return mesh, net, optimizer, sw.compile(step, backend="fx")


def test_learning_rates_may_change() -> None:
    mesh, _, optimizer, compiled = stepping()
    for call in range(5):
        optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)
        compiled(batch(mesh, call))
    assert reasons(compiled) == ["the first call"]


def test_other_numbers_of_an_optimizer_are_part_of_a_program() -> None:
    mesh, _, optimizer, compiled = stepping()
    for _ in range(2):
        compiled(batch(mesh, 0))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    compiled(batch(mesh, 0))
    assert reasons(compiled)[1:] == ["optimizer.param_groups[0]['weight_decay']: 0.01 is now 0.5"]


def test_state_that_is_loaded() -> None:
    mesh, net, optimizer, compiled = stepping()
    for call in range(2):
        compiled(batch(mesh, call))
    optimizer.load_state_dict(optimizer.state_dict())
    compiled(batch(mesh, 2))
    assert reasons(compiled)[1:] == ["the state of optimizer is another one"]
    net.load_state_dict(net.state_dict())  # in place
    compiled(batch(mesh, 3))
    assert len(reasons(compiled)) == 2


def test_gradients_that_were_there() -> None:
    """A program that adds to gradients is another one where there are none."""
    mesh = mesh_2x2()
    net = net_on(mesh)

    def add(x: Any) -> None:
        net(x).square().mean().backward()

    compiled = sw.compile(add, backend="fx")
    for _ in range(3):
        compiled(batch(mesh, 0))
    assert reasons(compiled) == ["the first call", "net.up.weight.grad is there already"]
    one = net_on(mesh)
    one(batch(mesh, 0)).square().mean().backward()
    assert torch.equal(net.down.weight.grad.full_tensor(), one.down.weight.grad.full_tensor() * 3)


# What cannot be captured


def test_gradients_that_are_reset_may_be_there_or_not() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        weight.grad = None
        (weight * x).sum().backward()

    compiled = sw.compile(step, backend="fx")
    for call in range(4):
        weight.grad = torch.full((3,), 7.0) if call % 2 else None
        compiled(torch.full((3,), float(call)))
        assert weight.grad is not None and weight.grad.tolist() == [float(call)] * 3
    assert len(compiled.programs) == 1


def test_too_many_programs() -> None:
    compiled = sw.compile(lambda x, n: x * n, backend="fx")
    x = torch.ones(2)
    for n in range(8):
        compiled(x, n)
    with pytest.warns(
        CaptureWarning,
        match=r"8 times, and again something differs \(n: 7 is now 8\): from now on it runs as it is. Hand",
    ):
        assert compiled(x, 8)[0] == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(x, 9)[0] == 9


@dataclass
class Batch:
    x: Any


def test_objects_that_are_made_anew() -> None:
    compiled = sw.compile(lambda batch: batch.x * 2, backend="fx")
    for _ in range(8):
        compiled(Batch(torch.ones(2)))
    with pytest.warns(CaptureWarning, match=r"that are made anew as dicts .* torch\.export\.register_dataclass"):
        assert compiled(Batch(torch.ones(2)))[0] == 2


def branching(x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x


def test_data_that_a_program_depends_on() -> None:
    mesh = mesh_2x2()
    with pytest.raises(
        CaptureError,
        match=rf"depends on the data it computes \(.*test_guards.py, line {branching.__code__.co_firstlineno + 1}\)",
    ):
        sw.compile(branching, backend="fx")(batch(mesh, 0))
    with pytest.warns(CaptureWarning, match="branching runs as it is"):
        sw.compile(branching, backend="fx", fullgraph=False)(batch(mesh, 0))


def dumping(x: Any) -> Any:
    return json.dumps({"largest": x.max().item()})


def test_what_has_no_use_for_tensors_without_data_runs_as_it_is() -> None:
    x = batch(mesh_2x2(), 0)
    with pytest.raises(TypeError, match="not JSON serializable"):
        sw.compile(dumping, backend="fx")(x)
    compiled = sw.compile(dumping, backend="fx", fullgraph=False)
    with pytest.warns(CaptureWarning, match="dumping runs as it is: Object of type SymFloat is not JSON serializable"):
        assert compiled(x) == dumping(x)


def test_an_error_of_the_users_own_gives_nothing_up() -> None:
    def refusing(x: Any, limit: int) -> Any:
        if limit < 0:
            raise ValueError("below nothing")
        return x * limit

    x, compiled = batch(mesh_2x2(), 0), sw.compile(refusing, backend="fx", fullgraph=False)
    with pytest.warns(CaptureWarning), pytest.raises(ValueError, match="below nothing"):
        compiled(x, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x, 2)
    assert len(compiled.programs) == 1


def test_what_was_captured_in_vain_is_as_it_was() -> None:
    mesh = mesh_2x2()
    net = net_on(mesh)
    net(batch(mesh, 0)).sum().backward()
    grads = [p.grad for p in net.parameters()]
    before = [p.detach().clone().full_tensor() for p in net.parameters()]
    state = torch.get_rng_state()

    def failing(x: Any) -> None:
        for param in net.parameters():
            param.detach().mul_(2)
        net(x + torch.randn_like(x)).sum().backward()
        net.zero_grad()
        raise KeyError("halfway")

    with pytest.raises(KeyError, match="halfway"):
        sw.compile(failing, backend="fx")(batch(mesh, 0))
    for param, grad, old in zip(net.parameters(), grads, before, strict=True):
        assert param.grad is grad and torch.equal(param.detach().full_tensor(), old)
        assert param.device_mesh is mesh
    assert torch.equal(torch.get_rng_state(), state)
    net(batch(mesh, 0)).sum().backward()  # and still works


def test_a_scheduler_inside_of_a_program() -> None:
    mesh = mesh_2x2()
    net = net_on(mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: Any) -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        scheduler.step()

    compiled = sw.compile(step, backend="fx")
    compiled(batch(mesh, 0))
    with pytest.raises(CaptureError, match="step the scheduler outside of it"):
        compiled(batch(mesh, 0))
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_tensor_that_was_computed_outside() -> None:
    mesh = mesh_2x2()
    weight = batch(mesh, 0).requires_grad_()
    scaled = weight * 2
    with pytest.raises(CaptureError, match="was computed outside of it and needs a gradient"):
        sw.compile(lambda x: x * scaled, backend="fx")(batch(mesh, 1))


def test_options() -> None:
    with pytest.raises(ValueError, match="layouts, and so programs, are made for sizes"):
        sw.compile(branching, dynamic=True)
    with pytest.raises(ValueError, match="backend is one of 'fx', 'inductor'"):
        sw.compile(branching, backend="eager")
    with pytest.raises(ValueError, match="cuda_graph is True, False or 'auto'; got 'maybe'"):
        sw.compile(branching, cuda_graph="maybe")
    with pytest.raises(TypeError, match="a function or a module is compiled, not a Tensor"):
        sw.compile(torch.ones(3))
    with pytest.raises(TypeError, match="was not given this function"):
        sw.graph.programs_of(branching)


def test_arguments_that_share_memory() -> None:
    """Inductor may write to one of them before it has read the other, so it must know."""

    def adds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        twice = b * 2
        a.add_(1)
        return twice + b

    compiled, reads = sw.compile(adds, backend="fx"), sw.compile(lambda a, b: a + b, backend="fx")
    for function in (adds, compiled, reads):
        function(torch.ones(4), torch.ones(4))
        base = torch.arange(6.0)
        found = function(base[:4], base[2:])
        if function is not reads:
            assert found.tolist() == [7.0, 10.0, 12.0, 15.0]
    assert reasons(compiled) == ["the first call", "other arguments than before share memory"]
    assert reasons(reads) == ["the first call"]


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_gradients_of_another_kind() -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.arange(16.0).view(4, 4)
    compiled = sw.compile(lambda x: (x @ weight).sum().backward(), backend="fx")
    compiled(x)
    compiled(x)
    expected = 1.5 * weight.grad  # type: ignore[operator]
    weight.grad = weight.grad.T.contiguous().T  # type: ignore[union-attr]
    compiled(x)
    assert reasons(compiled)[2:] == ["weight.grad is of another dtype, or has other strides"]
    assert torch.equal(weight.grad, expected)
