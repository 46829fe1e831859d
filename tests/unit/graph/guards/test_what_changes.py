"""Whatever Python may read and a program has taken for granted: if it changes, the program serves no more."""

from __future__ import annotations

import argparse
import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.guards  # so that counts of writes are read, as they are with Inductor
from captured import assert_same
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import CaptureError, CaptureWarning, UnreducedGradientError

Story = Callable[[Callable[..., Any]], Iterator[Any]]
"""What a function gives, call by call, while things change; it is handed what captures, or leaves as it is."""


def rows(x: torch.Tensor) -> Any:
    return sw.distribute_tensor(x, sw.simulate((2, 2), ("dp", "tp")), [sw.Shard(0), sw.Replicate()])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return sw.distribute_module(nn.Linear(4, 4), sw.simulate((2, 2), ("dp", "tp")))


def arguments_that_are_one(made: Any) -> Iterator[Any]:
    minus, x, y = made(lambda a, b: a - b), rows(torch.ones(4, 2)), rows(torch.zeros(4, 2))
    yield from (minus(x, x), minus(x, y), minus(y, x))


def arguments_that_become_one(made: Any) -> Iterator[Any]:
    def adds(a: Any, b: Any) -> Any:
        a.add_(1)
        return a + b

    adds, x, y = made(adds), torch.ones(4), torch.zeros(4)
    yield from (adds(x, y), adds(x, x), adds(y, x))


def an_argument_that_is_reached_too(made: Any) -> Iterator[Any]:
    w = torch.ones(4)
    plus = made(lambda x: x * 2 + w)
    yield from (plus(w), plus(torch.zeros(4)), plus(w))


def items_of_lists_and_dicts(made: Any) -> Iterator[Any]:
    settings: dict[str, Any] = {"scale": 2.0, "more": [{"shift": 1.0}]}
    scaled = made(lambda x: x * settings["scale"] + settings["more"][0]["shift"])
    x = torch.ones(3)
    yield scaled(x)
    settings["scale"] = 3.0
    yield scaled(x)
    settings["more"][0]["shift"] = 5.0
    yield scaled(x)
    settings["more"] = [{"shift": 7.0}]
    yield scaled(x)


def methods_that_have_their_object(made: Any) -> Iterator[Any]:
    table = {"scale": 2.0}
    scale_of = table.get
    scaled, x = made(lambda x: x * scale_of("scale")), torch.ones(3)
    yield scaled(x)
    table["scale"] = 3.0
    yield scaled(x)


def lengths_of_lists_and_dicts(made: Any) -> Iterator[Any]:
    kept, named = [torch.ones(3)], {"a": torch.ones(3)}
    total = made(lambda x: x * sum(kept) + sum(named.values()))
    x = torch.ones(3)
    yield total(x)
    kept.append(torch.ones(3))
    yield total(x)
    named["b"] = torch.ones(3)
    yield total(x)
    kept[0] = torch.zeros(3)
    yield total(x)


def attributes_of_objects(made: Any) -> Iterator[Any]:
    class Slotted:
        __slots__ = ("scale",)

    class Settings:
        shift = 1.0

        def moved(self, x: Any) -> Any:
            return x + self.shift * DEEP

    slotted, space, parsed, own = Slotted(), SimpleNamespace(a=1.0), argparse.Namespace(b=1.0), Settings()
    slotted.scale = 1.0
    function = made(lambda x: own.moved(x) * slotted.scale * space.a * parsed.b * Settings.shift)
    x = torch.ones(3)
    yield function(x)
    for kept, name in ((slotted, "scale"), (space, "a"), (parsed, "b"), (own, "shift"), (Settings, "shift")):
        setattr(kept, name, 3.0)
        yield function(x)
    globals()["DEEP"] = 4.0
    yield function(x)
    globals()["DEEP"] = 1.0
    Settings.moved = lambda self, x: x  # type: ignore[method-assign]
    yield function(x)


DEEP = 1.0


def values_of_any_kind(made: Any) -> Iterator[Any]:
    dtype, pair, number = torch.float32, (1, 2.0), 1
    function = made(lambda x: (x * number).to(dtype) * pair[1])
    x = torch.arange(3)
    yield function(x)
    dtype = torch.float64
    yield function(x)
    pair = (1, 3.0)
    yield function(x)
    dtype, pair, number = torch.int64, (1, 1), True
    yield function(x)
    number = 1
    yield function(x)


def defaults_and_helpers(made: Any) -> Iterator[Any]:
    net = nn.Dropout(0.5)

    def twice(x: Any) -> Any:
        return x * 2

    def function(x: Any, inner: Any = net) -> Any:
        return helper(inner(x))

    helper = twice
    compiled, x = made(function), torch.ones(30)
    yield compiled(x)
    net.eval()
    yield compiled(x)
    helper = lambda x: x * 3  # noqa: E731
    yield compiled(x)


def settings_of_torchs_modules(made: Any) -> Iterator[Any]:
    net = nn.Sequential(nn.Dropout(0.5), nn.LeakyReLU(0.1))
    compiled, x = made(net), torch.linspace(-1, 1, 30)
    yield compiled(x)
    net[0].p = 0.0
    yield compiled(x)
    net[1].negative_slope = 0.7
    yield compiled(x)
    net[0] = nn.Identity()
    net.append(nn.Tanh())
    yield compiled(x)


def buffers_that_were_none(made: Any) -> Iterator[Any]:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", None)
            self._scale = 1.0

        factor = 1.0

        def forward(self, x: Any) -> Any:
            return (x if self.shift is None else x + self.shift) * self._scale * self.factor

    net = Shifted()
    compiled, x = made(net), torch.ones(3)
    yield compiled(x)
    net.shift = torch.ones(3)
    yield compiled(x)
    net._scale = 2.0
    yield compiled(x)
    net.factor = 3.0  # until now that of the class
    yield compiled(x)


def modules_of_another_dtype(made: Any) -> Iterator[Any]:
    for net in (nn.Linear(4, 4), linear()):
        x = (
            torch.ones(2, 4)
            if isinstance(net.weight, nn.Parameter) and not isinstance(net.weight, sw.DTensor)
            else None
        )
        given = x if x is not None else rows(torch.ones(4, 4))
        compiled = made(lambda x, net=net: net(x.to(net.weight.dtype)))
        with torch.no_grad():
            yield compiled(given)
            net.to(torch.bfloat16)
            yield compiled(given)
            net.double()
            yield compiled(given)


def frozen_parameters(made: Any) -> Iterator[Any]:
    for net, x in ((nn.Linear(4, 4), torch.ones(4, 4)), (linear(), rows(torch.ones(4, 4)))):

        def step(x: Any, net: Any = net) -> Any:
            net.zero_grad()
            net(x).sum().backward()
            return [p.grad for p in net.parameters()]

        compiled = made(step)
        for frozen in (False, True, False):
            net.weight.requires_grad_(not frozen)
            yield compiled(x)


def hooks_of_modules_and_parameters(made: Any) -> Iterator[Any]:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def tripled(parameter: Any) -> None:
        parameter.grad.mul_(3)

    def stopped(*_: Any) -> None:
        net.bias.grad.zero_()

    compiled, x = made(step), rows(torch.ones(4, 4))
    register: list[Callable[[], Any]] = [
        lambda: net.register_forward_hook(lambda module, given, out: out * 2),
        lambda: net.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
        lambda: net.weight.register_hook(lambda grad: grad * 5),
        lambda: net.bias.register_post_accumulate_grad_hook(tripled),
        lambda: optimizer.register_step_pre_hook(stopped),
    ]
    yield compiled(x), [*net.parameters()]
    for one in register:
        handle = one()
        yield compiled(x), [*net.parameters()]
        yield compiled(x), [*net.parameters()]
        handle.remove()
        yield compiled(x), [*net.parameters()]


def what_hooks_name(made: Any) -> Iterator[Any]:
    net, scale = linear(), {"output": 2.0, "grad": 3.0}
    net.register_forward_hook(lambda module, given, out: out * scale["output"])
    net.weight.register_hook(lambda grad: grad * scale["grad"])
    plain = torch.ones(4, requires_grad=True)
    plain.register_hook(lambda grad: grad * scale["grad"])

    def step(x: Any) -> Any:
        net.zero_grad()
        plain.grad = None
        net(x).sum().backward()
        plain.square().sum().backward()
        return [p.grad for p in (*net.parameters(), plain)]

    compiled, x = made(step), rows(torch.ones(4, 4))
    yield compiled(x)
    scale["output"] = 5.0
    yield compiled(x)
    scale["grad"] = 7.0
    yield compiled(x)


def optimizers_that_change(made: Any) -> Iterator[Any]:
    first, second = linear(), linear()
    optimizer = torch.optim.AdamW(first.parameters(), lr=torch.tensor(0.1))

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = second(first(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def both(compiled: Any) -> Any:
        return [compiled(rows(torch.ones(4, 4))) for _ in range(3)], [*first.parameters(), *second.parameters()]

    compiled = made(step)
    yield both(compiled)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    yield both(compiled)
    optimizer.param_groups[0]["lr"] = 0.2
    yield both(compiled)
    optimizer.add_param_group({"params": [*second.parameters()], "lr": 0.3})
    yield both(compiled)
    for own in optimizer.state.values():
        own["exp_avg"] = torch.zeros_like(own["exp_avg"])
    yield both(compiled)
    optimizer.state[first.weight] = {}
    yield both(compiled)
    optimizer.state.clear()
    yield both(compiled)


def parameters_that_thaw(made: Any) -> Iterator[Any]:
    net = nn.Sequential(linear(), linear())
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = made(step)
    for call in range(8):
        net[0].requires_grad_(call > 3)
        yield compiled(rows(torch.ones(4, 4))), [*net.parameters()]


def gradients_that_no_sync_has_kept(made: Any) -> Iterator[Any]:
    net = linear()

    def step(x: Any) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    compiled = made(step)
    for call in range(6):
        with sw.parallel.no_sync(enabled=call % 3 != 2):
            loss = compiled(rows(torch.full((4, 4), float(call))))
        if call % 3 == 2:
            yield loss, [p.grad for p in net.parameters()]
            net.zero_grad()


def functions_that_are_kept(made: Any) -> Iterator[Any]:
    """Also such that are torch's."""
    kept = {"activation": torch.relu}
    activated = made(lambda x: kept["activation"](x))
    for activation in (torch.relu, torch.tanh, nn.functional.gelu, torch.relu):
        kept["activation"] = activation
        yield activated(torch.tensor([-1.0, 2.0]))


def what_is_in_a_set(made: Any) -> Iterator[Any]:
    which = {"single"}
    scaled, x = made(lambda x: x * 2 if "double" in which else x), torch.ones(3)
    yield scaled(x)
    which.remove("single")
    which.add("double")
    yield scaled(x)


def a_forward_of_its_own(made: Any) -> Iterator[Any]:
    """A module of torch's gets one, gets another, and loses it; what else is kept on it changes nothing."""
    net = nn.Sequential(linear(), nn.ReLU())
    doubled, x = made(lambda x: net(x) * 2), rows(torch.ones(4, 4))
    yield doubled(x)
    net[0].note = "mine"
    yield doubled(x)
    del net[0].note  # so that there are as many attributes as before
    net[0].forward = lambda x: x + 1
    yield doubled(x)
    net[0].forward = lambda x: x - 1
    yield doubled(x)
    del net[0].forward
    yield doubled(x)


def hooks_of_all_modules(made: Any) -> Iterator[Any]:
    net = linear()
    applied, x = made(lambda x: net(x)), rows(torch.ones(4, 4))
    yield applied(x)
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, out: out * 2)
    try:
        yield applied(x)
    finally:
        hook.remove()
    yield applied(x)


def modes_of_functions(made: Any) -> Iterator[Any]:
    class Smooth(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (torch.tanh if func is torch.relu else func)(*args, **(kwargs or {}))

    applied, x = made(lambda x: torch.relu(x)), torch.ones(3)
    yield applied(x)
    with Smooth():
        yield applied(x)
    yield applied(x)


STORIES: dict[str, Story] = {
    story.__name__.replace("_", " "): story
    for story in (
        *(arguments_that_are_one, arguments_that_become_one, an_argument_that_is_reached_too),
        *(functions_that_are_kept, what_is_in_a_set, a_forward_of_its_own, hooks_of_all_modules, modes_of_functions),
        methods_that_have_their_object,
        *(items_of_lists_and_dicts, lengths_of_lists_and_dicts, attributes_of_objects, values_of_any_kind),
        *(defaults_and_helpers, settings_of_torchs_modules, buffers_that_were_none, modules_of_another_dtype),
        *(
            frozen_parameters,
            hooks_of_modules_and_parameters,
            what_hooks_name,
            optimizers_that_change,
            parameters_that_thaw,
        ),
    )
}


def told(story: Story, made: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    return [[_kept(x) for x in torch.utils._pytree.tree_leaves(found)] for found in story(made)]


def _kept(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", STORIES)
def test_a_program_follows_what_changes(name: str) -> None:
    wanted = told(STORIES[name], lambda function: function)
    found = told(STORIES[name], lambda function: sw.compile(function, backend="fx"))
    assert_same(found, wanted, name)


def test_what_no_sync_keeps_is_reduced_by_who_comes_last() -> None:
    wanted = told(gradients_that_no_sync_has_kept, lambda function: function)
    with pytest.warns(
        CaptureWarning,
        match=r"runs as it is while no_sync\(\), or a fully sharded module, keeps gradients: capture all passes of an",
    ):
        found = told(gradients_that_no_sync_has_kept, lambda function: sw.compile(function, backend="fx"))
    assert_same(found, wanted, "accumulated")


def test_a_program_that_would_keep_gradients() -> None:
    net = linear()

    def step(x: Any) -> None:
        with sw.parallel.no_sync():
            net(x).sum().backward()

    with pytest.raises(UnreducedGradientError, match=r"ends with gradients that no_sync\(\) kept"):
        sw.compile(step, backend="fx")(rows(torch.ones(4, 4)))
    with pytest.warns(CaptureWarning, match="step runs as it is: a program that is captured ends with gradients"):
        sw.compile(step, backend="fx", fullgraph=False)(rows(torch.ones(4, 4)))
    net(rows(torch.ones(4, 4))).sum().backward()
    assert net.bias.grad.full_tensor().tolist() == [8.0] * 4


# What schedulers change


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_schedulers_may_change_any_number(kind: str, foreach: bool) -> None:
    def told_by(made: Any) -> Iterator[Any]:
        net = linear()
        settings = {"weight_decay": 0.1, "foreach": foreach, **({"momentum": 0.9} if kind == "SGD" else {})}
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **settings)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=30)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        compiled = made(step)
        for call in range(14):
            yield compiled(rows(torch.ones(4, 4))), [*net.parameters()]
            scheduler.step()
            if call > 6:
                optimizer.param_groups[0]["weight_decay"] /= 2
        if made is not as_it_is:
            assert len(compiled.programs) == 3, [guards.why for guards, _ in compiled.runs]

    def as_it_is(function: Any) -> Any:
        return function

    found = told(told_by, lambda function: sw.compile(function, backend="fx"))
    assert_same(found, told(told_by, as_it_is), kind)


# What Python does beside


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last, self.seen = 0, None, [1]
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Any, what: str) -> Any:
        if what == "counts":
            self.calls += 1
        elif what == "keeps":
            self.last = x * 2
        elif what == "appends":
            self.seen.append(2)
        elif what == "takes away":
            self.seen.pop()
        elif what == "deletes":
            del self.seen
        elif what == "replaces":
            self.average = self.average * 0.9 + x
        elif what == "draws":
            x = x * random.random()
        return x


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("counts", "calls"),
        ("keeps", "Counting.last"),
        ("appends", "seen"),
        ("takes away", "seen[0]"),
        ("deletes", "seen"),
        ("replaces", "average"),
        ("draws", "the state of Python's random, which it draws from"),
    ],
)
def test_what_only_python_would_do_in_every_run(what: str, name: str) -> None:
    net, average = Counting(), torch.zeros(3)
    net.average = average
    state = random.getstate()
    with pytest.raises(CaptureError) as caught:
        sw.compile(net, backend="fx")(torch.ones(3), what)
    assert str(caught.value) == (
        f"the program changes {name}, which only Python would do in every run: return it, keep it in a tensor that is "
        f"written to in place, or change it outside; what is made once, a cache say, is there if the function ran "
        f"before without shardwise.compile"
    )
    assert (net.calls, net.last, net.seen, random.getstate()) == (0, None, [1], state) and net.average is average
    with pytest.warns(CaptureWarning, match=re.escape(f"Counting runs as it is: the program changes {name}")):
        sw.compile(net, backend="fx", fullgraph=False)(torch.ones(3), what)
    added = {"appends": 1, "takes away": -1, "deletes": -1}.get(what, 0)
    assert net.calls == (what == "counts") and len(getattr(net, "seen", ())) == 1 + added


class Replacing(torch.optim.SGD):
    """Which keeps something new in every step."""

    def __init__(self, params: Any, kept: Any) -> None:
        super().__init__(params, lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = self.state[p].get("last", 0) + self.kept


@pytest.mark.parametrize("kept", [1, torch.ones(())])
def test_state_of_an_optimizer_that_is_replaced(kept: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = Replacing([weight], kept)
    step = sw.compile(lambda: optimizer.step(), backend="fx")
    step()  # which makes it
    with pytest.raises(CaptureError, match="the program changes 'last' in the state of an optimizer, which only"):
        step()
    assert optimizer.state[weight]["last"] == 1 and weight.tolist() == [torch.tensor(1.0).sub(0.1).item()] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.pop("y"),
        lambda batch: batch.update(loss=batch["x"] * 2),
        lambda batch: batch.update(x=batch["x"] * 2),
        lambda batch: batch["more"].append(batch["x"]),
        lambda batch: batch["more"].clear(),
    ],
)
def test_lists_and_dicts_that_it_is_handed(change: Callable[[Any], Any]) -> None:
    batch = {"x": torch.ones(3), "y": torch.ones(3), "more": [torch.ones(3)]}
    before = {**batch, "more": [*batch["more"]]}
    with pytest.raises(CaptureError, match=r"changes a list or a dict that it is handed, .* change a copy of it, dict"):
        sw.compile(lambda batch: (change(batch), batch["x"] + 1), backend="fx")(batch)
    assert batch.keys() == before.keys() and all(batch[key] is before[key] for key in "xy")
    assert [*map(id, batch["more"])] == [*map(id, before["more"])]
    step = sw.compile(lambda batch: change({**batch, "more": [*batch["more"]]}) is None, backend="fx")
    assert step(batch) == (change(before) is None)


def test_what_a_method_does_to_its_object() -> None:
    seen = [1]
    add = seen.append
    with pytest.raises(CaptureError, match="the program changes add, which only Python would do in every run"):
        sw.compile(lambda x: (add(2), x), backend="fx")(torch.ones(3))
    assert seen == [1]


@pytest.mark.parametrize("stream", [random.Random(0), np.random.default_rng(0), np.random], ids=["own", "rng", "numpy"])
def test_random_numbers_that_are_not_torch_s(stream: Any) -> None:
    name = "numpy's random" if stream is np.random else "stream"
    ahead = copy.deepcopy(stream) if stream is not np.random else None
    with pytest.raises(CaptureError, match=f"the program changes the state of {name}, which it draws from"):
        sw.compile(lambda x: x * stream.random(), backend="fx")(torch.ones(3))
    assert ahead is None or ahead.random() == stream.random()


def made_by(items: list[int]) -> Iterator[int]:
    yield from items


@pytest.mark.parametrize("kind", [iter, made_by, enumerate, lambda items: iter(DataLoader(items))])
def test_iterators(kind: Callable[[Any], Any]) -> None:
    """Whether they are gone through cannot be seen afterwards, nor undone."""
    batches = kind([3, 4])
    wanted = next(kind([3, 4]))

    def takes(x: Any) -> Any:
        return x, next(batches)

    said = (
        "the program takes the next item of batches in .*, which only Python would do in every run: take items outside"
    )
    with pytest.raises(CaptureError, match=said):
        sw.compile(takes, backend="fx")(torch.ones(3))
    with pytest.warns(CaptureWarning, match=said):
        _, found = sw.compile(takes, backend="fx", fullgraph=False)(torch.ones(3))
    assert found == wanted


def test_files_are_no_such_iterators(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        sw.compile(lambda x: (log.write("captured"), x)[1], backend="fx")(torch.ones(3))
    assert (tmp_path / "log").read_text() == "captured"


def test_a_program_does_not_seed() -> None:
    def seeds(x: Any) -> Any:
        torch.manual_seed(3)
        return x + torch.rand(3)

    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="the program seeds torch's generator, which only Python would do in every"):
        sw.compile(seeds, backend="fx")(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_results_that_hold_what_every_run_makes_anew() -> None:
    def yields(x: Any) -> Any:
        yield x

    for function, kind in ((yields, "generator"), (lambda x: SimpleNamespace(x=x * 2), "SimpleNamespace")):
        with pytest.raises(
            CaptureError, match=f"returns a {kind}, in which there are tensors that every run makes anew"
        ):
            sw.compile(function, backend="fx")(torch.ones(3))


def test_a_backward_pass_of_its_own_with_a_result_that_had_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: Any) -> Any:
        loss = (x * weight).sum()
        loss.backward()
        grad, weight.grad = weight.grad, None
        return loss, grad

    compiled = sw.compile(step, backend="fx")
    for number in (2.0, 3.0):
        loss, grad = compiled(torch.full((3,), number))
        assert (loss.item(), grad.tolist()) == (3 * number, [number] * 3) and weight.grad is None


def test_recurrent_layers_keep_what_the_backward_pass_needs() -> None:
    def told_by(made: Any) -> Iterator[Any]:
        torch.manual_seed(0)
        net = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.2)
        compiled = made(net)
        for _ in range(3):
            net.zero_grad()
            compiled(torch.randn(3, 5, 4))[0].square().mean().backward()
            yield [p.grad for p in net.parameters()]

    found = told(told_by, lambda function: sw.compile(function, backend="fx"))
    assert_same(found, told(told_by, lambda function: function), "LSTM")
