"""User-written autograd functions, and the hooks of modules, which are made of them: both sides see DTensors."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from compare import check_grad
from meshes import data
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))
over_layouts = pytest.mark.parametrize("placements", [(R, R), (S0, R), (S1, S0), (P, S1)], ids=str)


class Cube(torch.autograd.Function):
    """k · x³; it checks what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x, None)
        ctx.k, ctx.kind = k, type(x)
        return k * x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, nothing = ctx.saved_tensors
        assert type(x) is type(g) is ctx.kind and x.shape == g.shape and nothing is None
        assert ctx.needs_input_grad == (True, False)
        return 3 * ctx.k * x**2 * g, None


class Historian(torch.autograd.Function):
    """x², which tells whether what it saved is part of a graph when the gradient comes."""

    told: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Historian.told.append((x.requires_grad, x.is_leaf))
        return 2 * x.detach() * g


class Product(torch.autograd.Function):
    """x @ y and the sum of x, in the newer style."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return x @ y * scale, x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g @ y.transpose(0, 1) * ctx.scale + h, x.transpose(0, 1) @ g * ctx.scale, None


class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class SplitSign(torch.autograd.Function):
    """|x| and the sign of x, of which only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        ctx.sign = sign
        return x.abs(), sign

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, none: None) -> Tensor | None:
        assert none is None
        return None if g is None else g * ctx.sign


@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_forward_backward_and_double_backward(placements: tuple) -> None:
    x = data(6, 4)
    for inner in (False, True):  # on a leaf, and on a result
        a, d = x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()
        for t in (a, d):
            y = Cube.apply(t * 1.0 if inner else t, 2.0)
            (g,) = torch.autograd.grad(y.sum(), t, create_graph=True)
            ((g * g).sum() + y.sum()).backward()
        assert isinstance(y, DTensor)
        check_grad(d, a)


@over_layouts
def test_several_results_and_the_newer_style(placements: tuple) -> None:
    x, w = data(6, 4), data(4, 3)
    a, d = x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()
    b, e = w.clone().requires_grad_(), sw.distribute_tensor(w, MESH, [S0, S1]).requires_grad_()
    for t, v in ((a, b), (d, e)):
        product, total = Product.apply(t, v)
        (product.pow(2).sum() + 3 * total).backward()
    check_grad(d, a)
    check_grad(e, b)


@over_layouts
def test_writing_to_the_argument(placements: tuple) -> None:
    x = data(6, 4)
    a, d = x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()
    for t in (a, d):
        y = t.clone()
        assert DoubleInPlace.apply(y) is y
        y.pow(2).sum().backward()
    check_grad(d, a)


@over_layouts
def test_results_without_gradient(placements: tuple) -> None:
    x = data(6, 4)
    a, d = x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()
    for t in (a, d):
        size, sign = SplitSign.apply(t)
        assert size.requires_grad and not sign.requires_grad
        (size * sign).sum().backward()
    check_grad(d, a)


def test_arguments_that_come_back_as_they_are() -> None:
    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            ctx.mark_non_differentiable(y)
            return x, y

        @staticmethod
        def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
            return g * 2, None

    x = data(6, 4)
    d, e = (sw.distribute_tensor(x, MESH, [P, S0]) for _ in range(2))
    d.requires_grad_()
    first, second = Pass.apply(d, e)
    assert first is not d and first.placements == (P, S0) and torch.equal(first.full_tensor(), x)
    assert first.requires_grad and not second.requires_grad and not any(p.requires_grad for p in second._peers)
    (first * second).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), 2 * x)


def test_plain_tensors_are_none_of_our_business() -> None:
    x = data(3).requires_grad_()
    y = Cube.apply(x, 2.0)
    assert type(y) is Tensor and type(y.grad_fn).__name__ == "CubeBackward"
    y.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach() ** 2)
    with torch.no_grad():
        assert type(Cube.apply(sw.ones(4, device_mesh=MESH), 1.0)) is DTensor


def test_a_wrong_number_of_gradients() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, g

    d = sw.distribute_tensor(data(4), MESH, [S0, R]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected 1, got 2\)"):
        Wrong.apply(d).sum().backward()


def test_a_plain_gradient_is_refused() -> None:
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g.full_tensor()

    d = sw.distribute_tensor(data(4), MESH, [S0, R]).requires_grad_()
    with pytest.raises(sw.errors.MixedTensorError, match="a gradient that backward returned must be a DTensor"):
        Plain.apply(d).sum().backward()


@over_layouts
def test_module_hooks(placements: tuple) -> None:
    """Forward, backward and pre-backward hooks of modules see DTensors, whole, and may replace gradients."""
    plain = nn.Linear(4, 6, dtype=torch.float64)
    layer = nn.Linear(4, 6, dtype=torch.float64)
    layer.load_state_dict(plain.state_dict())
    layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight, MESH, [S0, S1]))
    sw.distribute_module(layer, MESH)
    x = data(5, 4)
    a, d = x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, placements).requires_grad_()
    seen: dict[bool, list[Tensor]] = {False: [], True: []}
    for module, t in ((plain, a), (layer, d)):
        grads = seen[module is layer]
        module.register_forward_pre_hook(lambda m, inputs, grads=grads: grads.append(inputs[0]))
        module.register_forward_hook(lambda m, inputs, output, grads=grads: grads.append(output))
        module.register_full_backward_pre_hook(lambda m, out, grads=grads: (grads.append(out[0]), (out[0] * 2,))[1])
        module.register_full_backward_hook(
            lambda m, inp, out, grads=grads: (grads.extend((inp[0], out[0])), (inp[0] * 3,))[1]
        )
        module(t).pow(2).sum().backward()
    assert len(seen[False]) == len(seen[True]) == 5
    for right, found in zip(seen[False], seen[True], strict=True):
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), right)
    check_grad(d, a)
    check_grad(layer.weight, plain.weight)


@over_layouts
@pytest.mark.parametrize("leaf", [True, False])
def test_what_was_saved_still_has_its_history(placements: Any, leaf: bool) -> None:
    """A sum that was pending then, and is reduced since, too."""
    Historian.told.clear()
    whole = data(4, 4)
    for x in (whole, sw.distribute_tensor(whole, MESH, [R, R]).redistribute(placements=placements)):
        x = x.detach().requires_grad_()
        y = x if leaf else x + x
        out = Historian.apply(y)
        (out.sum() + y.relu().sum()).backward()
    on_one_device, on_the_mesh = Historian.told
    assert on_the_mesh == on_one_device == (True, leaf)
