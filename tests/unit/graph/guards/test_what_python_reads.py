"""Where Python may keep what a function reads: if that changes, the program serves no more."""

from __future__ import annotations

import array
import dataclasses
import enum
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from captured import assert_same
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import CaptureError

Story = Callable[[Callable[..., Any]], Iterator[Any]]
"""What a function gives, call by call, while things change; it is handed what captures, or leaves as it is."""

STORIES: dict[str, Story] = {}


def story(told: Story) -> Story:
    STORIES[told.__name__.replace("_", " ")] = told
    return told


def ones() -> torch.Tensor:
    return torch.ones(4)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@story
def values_of_libraries(made: Any) -> Iterator[Any]:
    kept, path = SimpleNamespace(half=Fraction(1, 2), some=Decimal("1.5")), Path("/a")
    number = np.float32(2)
    function = made(lambda x: x * float(number) * float(kept.half) * float(kept.some) * len(str(path)))
    yield function(ones())
    number = np.float32(3)
    yield function(ones())
    kept.half = Fraction(1, 3)
    yield function(ones())
    kept.some = Decimal("2.5")
    yield function(ones())
    path = Path("/abc")
    yield function(ones())


@story
def placements_and_meshes(made: Any) -> Iterator[Any]:
    kept = SimpleNamespace(mesh=sw.simulate((2,), ("tp",)), placements=[sw.Shard(0)])

    def laid_out(x: Any) -> str:
        found = sw.distribute_tensor(x, kept.mesh, kept.placements)
        return f"{found.placements} {found.device_mesh}"

    function, x = made(laid_out), torch.ones(4, 4)
    yield function(x)
    kept.placements[0] = sw.Shard(1)
    yield function(x)
    kept.mesh = sw.simulate((4,), ("dp",))
    yield function(x)


@story
def arrays(made: Any) -> Iterator[Any]:
    numbers, doubles, small = np.array([2.0, 3.0]), array.array("d", [2.0]), bytearray([2])
    function = made(lambda x, given: x * float(numbers[0]) * doubles[0] * small[0] * float(given[0]))
    given = np.array([1.0])
    yield function(ones(), given)
    for kept in (numbers, doubles, small, given):
        kept[0] = 5
        yield function(ones(), given)
    numbers = np.array([7.0])
    yield function(ones(), given)


@story
def attributes_and_parts_of_functions(made: Any) -> Iterator[Any]:
    def scaled(x: Any, by: float = 2.0, *, shift: float = 1.0) -> Any:
        return x * by * scaled.scale + shift  # type: ignore[attr-defined]

    def other(x: Any, by: float = 2.0, *, shift: float = 1.0) -> Any:
        return x - by * shift

    scaled.scale = 2.0  # type: ignore[attr-defined]
    for function in (made(scaled), made(lambda x: scaled(x))):
        yield function(ones())
        scaled.scale += 3.0  # type: ignore[attr-defined]
        yield function(ones())
        scaled.__defaults__ = (7.0,)
        yield function(ones())
        scaled.__kwdefaults__ = {"shift": 5.0}
        yield function(ones())
    wrapped = made(lambda x: other(x))
    yield wrapped(ones())
    other.__code__ = (lambda x, by=2.0, *, shift=1.0: x + by * shift).__code__
    yield wrapped(ones())


@story
def attributes_whose_names_stand_nowhere(made: Any) -> Iterator[Any]:
    class Scales:
        def __init__(self) -> None:
            self.by_0, self.by_1 = 1.0, 2.0

    @dataclasses.dataclass
    class Settings:
        first: float = 2.0
        second: float = 3.0

    names, scales, settings = ["by_0", "by_1"], Scales(), Settings()

    def by_number(x: Any) -> Any:
        return x * getattr(scales, f"by_{1}")

    def by_list(x: Any) -> Any:
        return x * sum(getattr(scales, name) for name in names)

    def by_vars(x: Any) -> Any:
        return x * sum(vars(scales).values())

    def by_dict(x: Any) -> Any:
        return x * sum(scales.__dict__.values())

    def by_fields(x: Any) -> Any:
        return x * sum(dataclasses.asdict(settings).values())

    functions = [made(function) for function in (by_number, by_list, by_vars, by_dict, by_fields)]
    yield [function(ones()) for function in functions]
    scales.by_1, settings.second = 5.0, 7.0
    yield [function(ones()) for function in functions]


@story
def attributes_that_were_not_there(made: Any) -> Iterator[Any]:
    net, weight = linear(), ones()
    function = made(lambda x: net(x) * getattr(net, "scale", 1) * (weight.scale if hasattr(weight, "scale") else 2))
    yield function(ones())
    net.scale = 5.0  # type: ignore[assignment]
    yield function(ones())
    weight.scale = 3.0  # type: ignore[attr-defined]
    yield function(ones())


@story
def globals_that_were_not_there(made: Any) -> Iterator[Any]:
    by_name = made(lambda x: x * globals().get("APPEARING", 1))
    hiding = made(lambda x: x * len([1, 2]))
    for name, value in (("APPEARING", 2.0), ("APPEARING", 3.0), ("len", lambda _: 7)):
        yield by_name(ones()), hiding(ones())
        globals()[name] = value
    yield by_name(ones()), hiding(ones())
    del globals()["APPEARING"], globals()["len"]
    yield by_name(ones()), hiding(ones())


@story
def classes(made: Any) -> Iterator[Any]:
    class Plus:
        by = 1.0

        def moved(self, x: Any) -> Any:
            return x + self.by

    class Inner(Plus):
        pass

    class Minus(Inner):
        def moved(self, x: Any) -> Any:
            return x - self.by

    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1

    class Other(Net):
        def forward(self, x: Any) -> Any:
            return x - 1

    mover, net = Inner(), Net()
    function = made(lambda x: mover.moved(net(x)))
    yield function(ones())
    Inner.by = 3.0  # which hides that of its base
    yield function(ones())
    mover.__class__ = Minus
    yield function(ones())
    net.__class__ = Other
    yield function(ones())


@story
def methods_that_no_code_names(made: Any) -> Iterator[Any]:
    class Number:
        def __init__(self, value: float) -> None:
            self.value, self.items, self.is_on = value, [value], True

        def __float__(self) -> float:
            return self.value

        def __getitem__(self, at: int) -> float:
            return self.items[at]

        def __len__(self) -> int:
            return len(self.items)

        def __bool__(self) -> bool:
            return self.is_on

    class Descriptor:
        kept = 2.0

        def __get__(self, *_: Any) -> float:
            return self.kept

    class Holder:
        described = Descriptor()

    class Items(list):
        scale = 2.0

    number, holder, items = Number(2.0), Holder(), Items([2.0])
    function = made(
        lambda x: x * float(number) * number[0] * len(number) * (1 if number else 2) * holder.described * items.scale
    )
    yield function(ones())
    number.value = 3.0
    yield function(ones())
    number.items[0] = 5.0
    yield function(ones())
    number.items.append(1.0)
    yield function(ones())
    number.is_on = False
    yield function(ones())
    Holder.__dict__["described"].kept = 3.0
    yield function(ones())
    items.scale = 5.0
    yield function(ones())


@story
def the_order_of_modules_and_items(made: Any) -> Iterator[Any]:
    net, by_name = nn.Sequential(linear(), nn.Tanh()), nn.ModuleDict({"a": linear(), "b": nn.Tanh()})
    plain, ordered = {"a": 2.0, "b": 3.0}, OrderedDict(a=2.0, b=3.0)

    def function(x: Any) -> Any:
        x = net(x)
        for module in by_name.values():
            x = module(x)
        for scale in (*plain.values(), *ordered.values()):
            x = x * scale + 1
        return x

    function = made(function)
    yield function(ones())
    net._modules["0"] = net._modules.pop("0")
    yield function(ones())
    by_name["a"] = by_name.pop("a")
    yield function(ones())
    plain["a"] = plain.pop("a")
    yield function(ones())
    ordered.move_to_end("a")
    yield function(ones())


@story
def items_of_long_lists_and_dicts(made: Any) -> Iterator[Any]:
    numbers, tensors, named = [1.0] * 300, [ones() for _ in range(300)], {i: ones() for i in range(300)}
    total = made(lambda x: x * sum(numbers) + sum(tensors) + sum(named.values()))
    yield total(ones())
    numbers[7] = 5.0
    yield total(ones())
    tensors[299] = ones() * 7
    yield total(ones())
    named[0] = ones() * 9
    yield total(ones())

    def adds(x: Any) -> Any:
        torch._foreach_add_(tensors, 1.0)
        return x

    adds = made(adds)
    adds(ones())
    tensors[:] = [torch.zeros(4) for _ in tensors]
    adds(ones())
    yield tensors[0], tensors[299]


@story
def attributes_of_tensors(made: Any) -> Iterator[Any]:
    net = sw.distribute_module(linear(), sw.simulate((2,), ("tp",)))
    for p in net.parameters():
        p.scale = 2.0  # type: ignore[attr-defined]
    function = made(lambda x: x * sum(p.scale for p in net.parameters()) * x.scale)
    x, y = ones(), ones()
    x.scale, y.scale = 2.0, 3.0  # type: ignore[attr-defined]
    yield function(x)
    net.weight.scale = 5.0  # type: ignore[attr-defined]
    yield function(x)
    yield function(y)
    y.scale = 7.0  # type: ignore[attr-defined]
    yield function(y)


STEP = 1.0


@story
def optimizers_of_the_users(made: Any) -> Iterator[Any]:
    class Descent(torch.optim.Optimizer):
        rate = 1.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["seen"] = True
                    p.sub_(p.grad * self.rate * STEP)

    weights = [nn.Parameter(ones()), nn.Parameter(ones())]
    for weight in weights:
        weight.grad = ones()
    optimizer = Descent(weights[:1], {})
    step = made(lambda: optimizer.step())
    for _ in range(2):
        step()
        yield weights
    optimizer.rate = 2.0
    step()
    yield weights
    Descent.rate = 3.0
    del optimizer.rate
    step()
    yield weights
    globals()["STEP"] = 5.0
    step()
    yield weights
    globals()["STEP"] = 1.0
    optimizer.param_groups[0]["params"][0] = weights[1]
    step()
    yield weights
    before = optimizer.step
    optimizer.step = lambda: (weights[1].grad.mul_(2), before())[1]  # type: ignore[union-attr,method-assign]
    step()
    yield weights


@story
def arguments_with_hooks(made: Any) -> Iterator[Any]:
    def back(x: Any) -> None:
        (x * 2).sum().backward()

    back = made(back)
    for factor in (None, 10.0, None):
        x = ones().requires_grad_()
        if factor is not None:
            x.register_hook(lambda grad: grad * 10.0)
        back(x)
        yield x.grad


@story
def arguments_that_are_leaves(made: Any) -> Iterator[Any]:
    function, x = made(lambda x: x * (2 if x.is_leaf else 3)), ones().requires_grad_()
    yield from (function(x), function(x * 1), function(x))


@story
def zeros_with_a_sign_and_lazy_conjugates(made: Any) -> Iterator[Any]:
    divided, real = made(lambda x, by: x / by), made(lambda x: torch.view_as_real(x.resolve_conj()))
    x = torch.tensor([1 + 2j, 3 - 1j])
    yield divided(ones(), 0.0), real(x)
    yield divided(ones(), -0.0), real(x.conj())


VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=2.0)


class Kept:
    scale = 2.0


@story
def what_is_kept_outside_of_the_program(made: Any) -> Iterator[Any]:
    module = ModuleType("settings_of_this_test")
    module.SCALE = 2.0  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    os.environ["SCALE_OF_THIS_TEST"] = "2"
    kept = Kept()
    referred = weakref.ref(kept)

    def function(x: Any) -> Any:
        import settings_of_this_test  # type: ignore[import-not-found]

        x = x * settings_of_this_test.SCALE * float(os.environ["SCALE_OF_THIS_TEST"])
        return x * VARIABLE.get() * referred().scale  # type: ignore[union-attr]

    function = made(function)
    yield function(ones())
    module.SCALE = 3.0  # type: ignore[attr-defined]
    yield function(ones())
    os.environ["SCALE_OF_THIS_TEST"] = "5"
    yield function(ones())
    token = VARIABLE.set(7.0)
    yield function(ones())
    VARIABLE.reset(token)
    kept.scale = 11.0
    yield function(ones())
    del os.environ["SCALE_OF_THIS_TEST"], sys.modules[module.__name__]


@story
def attributes_of_enums_and_of_torchs_modules(made: Any) -> Iterator[Any]:
    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.scale = 2.0  # type: ignore[attr-defined]
    kind, net = Kind.ONE, nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0)
    for p in net.parameters():
        nn.init.normal_(p)
    function, x = made(lambda x: net(x) * kind.scale), torch.arange(8.0).view(2, 4)  # type: ignore[attr-defined]
    yield function(x)
    Kind.ONE.scale = 3.0  # type: ignore[attr-defined]
    yield function(x)
    net.activation = F.gelu
    yield function(x)


def told(story: Story, made: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    return [[_kept(x) for x in torch.utils._pytree.tree_leaves(found)] for found in story(made)]


def _kept(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", STORIES)
def test_a_program_follows_what_changes(name: str) -> None:
    eager = told(STORIES[name], lambda function: function)
    assert_same(told(STORIES[name], lambda function: sw.compile(function, backend="fx")), eager, name)


def test_counters_that_a_function_only_writes_make_no_other_program() -> None:
    """What it does not read may change: names of what is only set do not count."""

    class Trainer:
        def __init__(self) -> None:
            self.seen, self.scale = 0, 2.0

        def step(self, x: Any) -> Any:
            return x * self.scale

    trainer = Trainer()
    step = sw.compile(trainer.step, backend="fx")
    for _ in range(4):
        step(ones())
        trainer.seen += 1
    assert len(sw.graph.programs_of(step).runs) == 1


def test_a_backward_pass_ends_at_the_arguments() -> None:
    """It left gradients without data where the arguments had been computed from."""
    weight = sw.distribute_tensor(ones(), sw.simulate((2,), ("tp",)), [sw.Shard(0)]).requires_grad_()
    back = sw.compile(lambda x: (x * 2).sum().backward(), backend="fx")
    with pytest.raises(CaptureError, match=r"hand in x.detach\(\).requires_grad_\(\), or return the loss"):
        back(weight * 1)
    assert weight.grad is None
    leaf = weight.detach().requires_grad_()
    back(leaf)
    assert leaf.grad.full_tensor().tolist() == [2.0] * 4  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match="on to what an argument was computed from"):
        back(weight * 1)  # which the program for a leaf does not serve
    grad = sw.compile(lambda x: torch.autograd.grad((x * 2).sum(), x)[0], backend="fx")
    assert grad(weight * 1).full_tensor().tolist() == [2.0] * 4
