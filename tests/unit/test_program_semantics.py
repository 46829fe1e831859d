"""What a program means: which writes are seen where, and what gradients come back. Programs that random ones showed to
be wrong, by what was wrong about them. Those that only real ranks show are in tests/multiprocess."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, full
from sweep import mesh_of, normal, place
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.proof.fuzz.leaves import Device

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MESHES = ((2,), (3,), (4,))


def same(program: Callable[[Tensor], Any], x: Tensor, *placements: sw.Placement, mesh: tuple[int, ...] = (2,)) -> None:
    """A program of a leaf gives the same on a DTensor: tensors, or None for gradients that there are none of."""
    expected = program(x.clone().requires_grad_(x.is_floating_point()))
    found = program(place(x.clone(), *placements, mesh=mesh).requires_grad_(x.is_floating_point()))
    for e, f in zip(expected, found, strict=True):
        assert (e is None) == (f is None), f"{f} where torch has {e}"
        if e is not None:
            torch.testing.assert_close(full(f.detach()), e.detach())


# Writes to what torch copies, and to what it does not


def written(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        z = view(y)
        z.mul_(3)
        (y * y).sum().backward()
        return y, z, x.grad  # type: ignore[return-value]

    return program


ROWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[:, 0].contiguous(),
    lambda x: x[:, :, 1].contiguous(),
    lambda x: x[:, :, :1].squeeze(2).contiguous(),
    lambda x: x[:, 0].reshape(-1),
    lambda x: x[:, 0].flatten(),
    lambda x: x[:, 0].ravel(),
    lambda x: x[:, 0, 1].ravel(),
    lambda x: x[:, 1].t().reshape(-1),
    lambda x: x[:, 0].view(x.shape[0], x.shape[2])[1:].reshape(-1),
    lambda x: x[0, :, 1].reshape(2, 2),
    lambda x: x[:, 0].detach().ravel(),
    lambda x: x.flatten(0, 1)[1:3],
    lambda x: x.flatten(0, 1)[:, :1].flatten(),
]


@pytest.mark.parametrize("view", range(len(ROWS)))
def test_rows_of_a_sharded_dim_are_copied_where_torch_copies(view: int) -> None:
    for mesh in MESHES:
        for placement in (S(0), S(1), S(2), P(), R):
            same(written(ROWS[view]), normal(2, 4, 3), placement, mesh=mesh)


def test_strides_of_a_row_are_those_of_one_device() -> None:
    x = normal(2, 4, 3)
    for dim in range(3):
        d = place(x, S(dim))
        for row, expected in ((d[:, 1], x[:, 1]), (d[:, 1].detach(), x[:, 1]), (d[:, 1].t(), x[:, 1].t())):
            assert row.stride() == expected.stride()
            assert row.is_contiguous() == expected.is_contiguous()


def test_whether_a_reshape_is_a_view_is_not_learnt_from_copies() -> None:
    """The first call is of a copy that torch makes, and nobody else sees; the others lie like it but are views."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x.detach().clone(), x.detach().clone()
        y[:, :, 0].reshape(-1).view(2, 2).flatten().mul_(2)
        y[:, 0].reshape(2, 2, 2).flatten(0, 1).mul_(2)
        z.flatten(0, 1)[0].add_(1)
        return y, z

    for placement in (S(0), S(1), S(2)):
        same(program, normal(2, 2, 4), placement, mesh=(4,))


def test_a_list_may_name_a_row_twice() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x.detach().clone()
        row = y[0]
        torch._foreach_add_([row, row], 3)
        return y, row

    for placement in (S(0), S(1)):
        same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_writes_to_a_detached_row_of_a_leaf(placement: sw.Placement) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        x[0].detach().mul_(2)
        x[:, 1].detach().mul_(3)
        (x * x).sum().backward()
        return x, x.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
@pytest.mark.parametrize("view", [lambda x: x[0], lambda x: x[:, 1], lambda x: x.view(-1), lambda x: x.view(-1)[:5]])
def test_writes_to_a_detached_row_that_give_it_a_history(
    view: Callable[[Tensor], Tensor], placement: sw.Placement
) -> None:
    """It has one from then on, but what it was detached from has not."""

    def program(x: Tensor) -> tuple[Any, ...]:
        w = (x.detach()[0, 0] * 2).requires_grad_()
        row = view(x).detach()
        row[1:].mul_(w)
        (x * x).sum().backward()
        row.sum().backward()
        return x, x.grad, row, w.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("view", [lambda v: v[1:], lambda v: v[:, :1], lambda v: v.select(1, 0), lambda v: v[1, ::2]])
def test_views_of_a_sum_that_was_reduced_before(view: Callable[[Tensor], Tensor]) -> None:
    """They are views of what it came to, and a write to one of them is not."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = x @ x.t()
        positive = v > 0
        view(v).mul_(2)
        view(v).add_(1)
        v[0, :2] = 0.5
        v[positive] += 1
        (v * v).sum().backward()
        return v, x.grad

    for mesh in MESHES:
        same(program, normal(3, 4), S(1), mesh=mesh)


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_writes_to_a_row_of_a_leaf_are_refused_before_anything_is_written(placement: sw.Placement) -> None:
    x = place(normal(4, 4), placement).requires_grad_()
    row, before = x[0], x.detach().clone()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        row.mul_(2)
    assert torch.equal(x, before)
    assert torch.equal(row, before[0])


@pytest.mark.parametrize("change", [Tensor.t_, lambda x: x.unsqueeze_(0), lambda x: x.transpose_(0, 1)])
def test_the_shape_of_a_copied_view_does_not_change_in_place(change: Callable[[Tensor], Any]) -> None:
    x = place(normal(2, 4, 3), S(1))
    with pytest.raises(sw.errors.InPlaceError, match=r"use .*, which gives another view"):
        change(x[:, 0])


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_views_made_and_written_to_where_nothing_is_recorded(placement: sw.Placement) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            v = x[1:]
            v[0] += 1
            v[:, :2] *= 2
        (x * x).sum().backward()
        return x, v, x.grad

    same(program, normal(4, 4), placement)


@pytest.mark.parametrize("view", [lambda x: x[1:3], lambda x: x.view(-1), lambda x: x.t(), lambda x: x[1]])
def test_a_leaf_made_of_shards_is_no_view_of_them(view: Callable[[Tensor], Tensor]) -> None:
    """Autograd looked for the history of views of the leaf in the shards that the user brought."""
    for placement in (S(0), R):
        d = sw.DTensor.from_local(normal(4, 4), mesh_of((2,)), [placement]).requires_grad_()
        x = d.detach().full_tensor().requires_grad_()
        for leaf in (d, x):
            v = view(leaf)
            with torch.no_grad():
                v.mul_(2)
            (v * v).sum().backward()
        assert x.grad is not None and d.grad is not None
        torch.testing.assert_close(d.grad.full_tensor(), x.grad)


# Arguments that do not lie in one piece


NORMS: dict[str, Callable[..., Tensor]] = {
    "group norm": lambda x, scale, shift: F.group_norm(x, 2, scale, shift),
    "batch norm": lambda x, scale, shift: F.batch_norm(x, None, None, scale, shift, training=True),
    "evaluated": lambda x, scale, shift: F.batch_norm(x, scale.detach(), scale.detach().abs(), scale, shift),
    "instance norm": lambda x, scale, shift: F.instance_norm(x, None, None, scale, shift),
    "layer norm": lambda x, scale, shift: F.layer_norm(x, (4,), scale, shift),
    "rms norm": lambda x, scale, shift: F.rms_norm(x, (4,), scale) + shift,
    "convolution": lambda x, scale, shift: F.conv1d(x, scale.view(1, 4, 1).expand(4, 4, 1), shift),
    "linear": lambda x, scale, shift: F.linear(x, scale.expand(4, 4), shift),
}


@pytest.mark.parametrize("name", NORMS)
def test_parameters_with_gaps_between_their_numbers(name: str) -> None:
    """What a network predicts of scale and shift, `film.unbind(1)`, has the other between its numbers."""

    def program(x: Tensor) -> tuple[Any, ...]:
        film = beside(x, normal(4, 2)).requires_grad_()
        y = NORMS[name](x, *film.unbind(1))
        (y * y.cos()).sum().backward()
        return y, x.grad, film.grad

    for placement in (R, S(0), S(1), S(2), P()):
        same(program, normal(4, 4, 4), placement)


# Gradients of what is not a leaf, and of what a loss does not depend on


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cdist": lambda y: torch.cdist(y, y.detach() + 1),
    "cdist of order 3": lambda y: torch.cdist(y, y.detach() + 1, p=3),
    "pdist": F.pdist,
    "dist": lambda y: torch.dist(y, y.detach() + 1),
    "norm": torch.norm,
    "norms": lambda y: torch.stack(torch._foreach_norm([y, 3 * y])),
    "norms of order 3": lambda y: torch._foreach_norm([y, 3 * y], 3)[1],
    "largest": lambda y: torch._foreach_norm([y, 3 * y], float("inf"))[1],
    "product": torch.prod,
    "maximum": torch.amax,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_of_intermediate_results(name: str) -> None:
    """What is pending on a result must be such that its gradient has a layout."""

    def program(x: Tensor) -> tuple[Any, ...]:
        n = NUMBERS[name](x * 2)
        n.retain_grad()
        (found,) = torch.autograd.grad((n**3).sum(), n, retain_graph=True)
        (n**3).sum().backward()
        return n, found, n.grad, x.grad

    for mesh in ((2,), (3,)):
        for placement in (S(0), S(1), P(), R):
            same(program, normal(4, 4), placement, mesh=mesh)


LISTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda a, b: torch._foreach_mul([a, b], 2.0),
    "mul by lists": lambda a, b: torch._foreach_mul([a, b], [b, a.detach()]),
    "addcmul": lambda a, b: torch._foreach_addcmul([a, b], [a, b], [a, b], [2.0, 3.0]),
    "exp": lambda a, b: torch._foreach_exp([a, b]),
    "norm": lambda a, b: torch._foreach_norm([a, b]),
    "maximum": lambda a, b: torch._foreach_maximum([a, b], 0.5),
    "in place": lambda a, b: (torch._foreach_mul_([a, b], 3.0), [a, b])[1],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_call_does_not_join_its_tensors(name: str) -> None:
    """A tensor that the loss does not depend on has no gradient, not one of zeros: optimizers would decay it."""

    def program(x: Tensor) -> tuple[Any, ...]:
        other = (x.detach() + 1).requires_grad_()
        first, _ = LISTS[name](x * 1, other * 1)
        first.sum().backward()
        return first, x.grad, other.grad

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


def test_a_list_call_after_a_collective_does_not_join_its_tensors() -> None:
    x, y = (place(normal(4, 4), S(0)).requires_grad_() for _ in range(2))
    first, _ = torch._foreach_mul([x.redistribute(placements=[R]), y.redistribute(placements=[R])], 2.0)
    first.sum().backward()
    assert x.grad is not None and y.grad is None


@pytest.mark.parametrize("name", [name for name in LISTS if name != "in place"])
def test_a_list_call_is_one_node(name: str) -> None:
    """It runs for all its tensors: what a function in Python computed one of them from gets zeros, and all results are
    part of the graph."""

    def program(x: Tensor) -> tuple[Any, ...]:
        plain = x.detach() + 1
        inner = checkpoint(lambda a: a.exp(), x * 1, use_reentrant=True)
        first, second = LISTS[name](plain, inner)
        second.retain_grad()
        first.sum().backward()
        return first, x.grad, second.grad

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


UNUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.flatten(0, 1),
    "a row": lambda x: x[1],
    "a product": lambda x: x @ x,
    "sorted": lambda x: x.sort(0).values,
    "scanned": lambda x: x.cumsum(0),
    "a norm": lambda x: F.layer_norm(x, (4, 4)),
    "an extremum": lambda x: x.amax(0),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_a_checkpoint_does_not_use_has_no_gradient(name: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        other = (x.detach() + 1).requires_grad_()
        y = checkpoint(lambda a, b: a.sin(), x * 1, UNUSED[name](other), use_reentrant=True)
        y.sum().backward()
        return y, x.grad, other.grad

    for mesh in MESHES:
        for placement in (S(0), S(1), P(), R):
            same(program, normal(4, 4), placement, mesh=mesh)


TWICE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda v, x: torch._foreach_mul_([v, v], 3.0),
    "other numbers": lambda v, x: torch._foreach_mul_([v, v], [3.0, 2.0]),
    "itself": lambda v, x: torch._foreach_mul_([v, v], [v, x]),
    "addcmul": lambda v, x: torch._foreach_addcmul_([v, v], [x, x], [x, x], 3.0),
    "views": lambda v, x: torch._foreach_mul_([v.view(-1), v.t()], 3.0),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_list_may_name_a_tensor_twice(name: str) -> None:
    """What torch makes of it, whose graph of such a write has it only once."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = x * 1
        TWICE[name](v, x)
        (v * v).sum().backward()
        return v, x.grad

    for placement in (S(0), R) if name == "views" else (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


OVERLAPPING: list[Callable[[Tensor], list[Tensor]]] = [
    lambda v: [v.view(-1), v.t()],
    lambda v: [v[:, 0], v[:, 0]],
    lambda v: [v[:, 0], v[:, 1], v.view(-1), v[:, 0]],
    lambda v: [v[:1], v.view(2, 8), v[:, 1:3]],
]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("placement", [S(0), S(1), P(), P("avg"), P("max"), R], ids=str)
def test_views_in_a_list_that_do_not_show_each_others_writes(placement: sw.Placement, recorded: bool) -> None:
    """Here some are copies, and sums are written to by way of what they come to: they are written to in turn."""
    for views in OVERLAPPING:

        def program(x: Tensor) -> tuple[Any, ...]:
            v = x * 1 if recorded else x.detach() * 1
            found = views(v)  # noqa: B023
            torch._foreach_add_(found, 0.5)
            torch._foreach_mul_(found, [x.detach() * 1 for x in found])
            if recorded:
                (v * v).sum().backward()
            return v, x.grad

        same(program, normal(4, 4), placement)


@pytest.mark.parametrize("placement", [S(1), P()], ids=str)
def test_a_tensor_and_its_views_in_a_list_that_torch_differentiates_wrongly(placement: sw.Placement) -> None:
    """In torch's graph the write to the tensor takes the place of those to its views."""
    v = place(normal(4, 4), placement).requires_grad_() * 1
    before = v.detach().clone()
    with pytest.raises(sw.errors.InPlaceError):
        torch._foreach_mul_([v.view(-1), v], 3.0)
    assert torch.equal(v, before)


@pytest.mark.parametrize("recorded", [False, True])
def test_writes_to_the_data_of_a_sum_that_was_reduced_before(recorded: bool) -> None:
    """Autograd's count of writes does not hear of them."""

    def program(x: Tensor) -> tuple[Any, ...]:
        v = (x if recorded else x.detach()) @ x.detach().t()
        before = v.sin()
        v.data.mul_(2)
        after = v.sin()
        data = v.data
        again = v.sin()
        data.add_(1)
        return before, after, again, v.sin()

    same(program, normal(3, 4), S(1))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_can_be_written_to(rows: int, create_graph: bool) -> None:
    """Torch's is no expanded number where its function divides by a count, and on no rank may ours be one."""

    def program(x: Tensor) -> tuple[Any, ...]:
        found = [
            torch.autograd.grad((x * 2).mean(), x, create_graph=create_graph)[0],
            torch.autograd.grad((x * x).view(-1).mean(), x, create_graph=create_graph)[0],
            torch.autograd.grad((y := x * 2).mean(), y, create_graph=create_graph)[0],
            torch.autograd.grad(torch.var_mean(x.repeat(2, 1), 0)[1].sum(), x, create_graph=create_graph)[0],
            torch.autograd.grad(x.mean(0).sum(), x, create_graph=create_graph)[0],
        ]
        for grad in found:
            grad.detach().add_(1)
            grad.detach()[0].mul_(2)
        return tuple(found)

    for mesh in MESHES:
        same(program, normal(rows, 3), S(0), mesh=mesh)


# Terms of products and norms


def terms(x: Tensor, kind: str) -> Tensor:
    if kind == "product":
        return x.prod(0)
    if not isinstance(x, sw.DTensor):
        return x.norm(dim=0)
    return sw.DTensor.from_local(x.to_local().norm(dim=0), x.device_mesh, [P("norm", 2.0)])


TERMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda y, w: y.mul_(-2),
    "fill": lambda y, w: y.fill_(-1.5),
    "another": lambda y, w: y.copy_(w),
    "a part": lambda y, w: y[1:].neg_(),
    "assigned": lambda y, w: y.__setitem__(0, -0.5),
    "by a mask": lambda y, w: y.__setitem__(w > 0, -0.5),
    "through a view": lambda y, w: y.view(3, 1).squeeze().sub_(9),
    "through data": lambda y, w: y.data.sub_(9),
    "after a view": lambda y, w: (y.view(-1), y.sub_(9))[0].mul_(w),
    "list": lambda y, w: torch._foreach_sub_([y, w], 9),
    "list of views": lambda y, w: torch._foreach_sub_([y[:2], y], 9),
    "out": lambda y, w: torch.neg(w, out=y),
    "after a use": lambda y, w: (y + w, y.sub_(9)),
}


@pytest.mark.parametrize("kind", ["product", "norm"])
@pytest.mark.parametrize("name", TERMS)
def test_writes_to_terms_of_products_and_norms(name: str, kind: str) -> None:
    """A norm is not taken apart into terms: it is reduced as soon as it is written to, or seen through a view."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        w = beside(x, torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64))
        y = terms(x.detach(), kind)
        before, view = y.clone(), y.detach()
        TERMS[name](y, w)
        return before, y, view, w

    for mesh in MESHES:
        same(program, normal(4, 3), S(0), mesh=mesh)
    y: Any = terms(place(normal(4, 3), S(0)), kind)
    assert isinstance(y.placements[0], P), "the premise of this test"


@pytest.mark.parametrize("kind", ["product", "norm"])
def test_gradients_through_writes_to_terms(kind: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = terms(x.detach(), kind)
        view = y.unsqueeze(0)
        y.mul_(x[0])
        view[:, 1:].add_(x[1, 1:])
        (view * view).sum().backward()
        return y, x.grad

    same(program, normal(4, 3), S(0))


def test_what_a_list_call_wrote_is_seen_by_its_later_elements() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        v, w = x.detach() * 1, x.detach() * 2
        torch._foreach_add_([v, w], [w, v])
        return v, w

    for placement in (S(0), P(), R):
        same(program, normal(4, 4), placement)


def test_a_leaf_in_a_list_is_refused_before_anything_is_written() -> None:
    leaf = place(normal(4, 4), S(0)).requires_grad_()
    v = leaf * 1
    before = v.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch._foreach_mul_([v, leaf], 3.0)
    assert torch.equal(v, before)


# Hooks, and writes to what has one


def watched(change: Callable[[Tensor], Any], use_before: bool = False) -> Callable[[Tensor], tuple[Any, ...]]:
    def program(x: Tensor) -> tuple[Any, ...]:
        y, seen = x * 1, []
        y.register_hook(lambda grad: seen.append(grad.clone()))
        y.register_hook(lambda grad: 2 * grad)
        before = (y * 5).sum() if use_before else 0
        change(y)
        y.register_hook(lambda grad: seen.append(grad.clone()))
        ((y * y).sum() + before).backward()
        assert len(seen) == 2
        return y, x.grad, *seen

    return program


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda y: y.mul_(3),
    "a row": lambda y: y[0].mul_(3),
    "a column": lambda y: y[:, 1].mul_(3),
    "through a view": lambda y: y.view(-1).mul_(3),
    "assigned": lambda y: y.__setitem__((slice(None), 1), 0.5),
    "in a list": lambda y: torch._foreach_mul_([y], 3.0),
}


@pytest.mark.parametrize("use_before", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_on_what_is_then_written_to(name: str, use_before: bool) -> None:
    """Hooks see the gradient of what was there when they came; those that come after a write, of what was written."""
    for placement in (S(0), S(1), P(), R):
        same(watched(CHANGES[name], use_before), normal(4, 4), placement)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_hook_keeps_nothing_alive(passes: int) -> None:
    class Hook:
        def __call__(self, grad: Tensor) -> None:
            pass

    y, hook = place(normal(4, 4), S(0)).requires_grad_() * 1, Hook()
    y.register_hook(hook)
    for _ in range(passes):
        y.sum().backward()
    kept = weakref.ref(hook)
    del y, hook
    gc.collect()
    assert kept() is None


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda y: y[1],
    "a column": lambda y: y[:, 1],
    "rows": lambda y: y[1:],
    "flat": lambda y: y.view(-1),
    "of flat": lambda y: y.flatten()[3:7],
    "a view of a view": lambda y: y.view(2, 8)[0].view(2, 4),
}
DIRECT = [name for name in PARTS if name != "a view of a view"]
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {"a result": lambda x: x * 1, "a view": lambda x: (x * 1)[:]}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("observer", ["source kept", "view kept", "hook on source", "hook on view", "asked for"])
@pytest.mark.parametrize(
    ("source", "name"), [*(("a result", name) for name in PARTS), *(("a view", name) for name in DIRECT)]
)
def test_gradients_seen_around_a_write_through_a_view(source: str, name: str, observer: str, used: bool) -> None:
    """A view that is written to is what its base becomes: uses of it send their gradient there, and what was hooked to
    it before is left out, also where it had to be a copy."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = SOURCES[source](x)
        part = PARTS[name](y)
        before = (part * 3).sum()
        observed = y if "source" in observer else part
        if "kept" in observer:
            observed.retain_grad()
        elif "hook" in observer:
            observed.register_hook(lambda grad: grad.tanh())
        part.sigmoid_()
        loss = before + (y * y).sum() + ((part * part).sum() if used else 0)
        if observer == "asked for":
            return part, *torch.autograd.grad(loss, [x, y, part], allow_unused=True)
        loss.backward()
        return y, x.grad, observed.grad if "kept" in observer else None

    for placement in (S(0), S(1), P(), R):
        same(program, normal(4, 4), placement)


def test_rows_picked_by_a_number_in_a_tensor() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        i = beside(x, torch.tensor(1))
        y = x[:, ::2]
        found = y[i], y[:, i], y[i, i], x[::2][i], x[1:][i, 1:], x.t()[1:][i]
        sum((part * part).sum() for part in found).backward()
        return *found, x.grad

    for mesh in MESHES:
        for placement in (S(0), S(1), P(), R):
            same(program, normal(4, 4), placement, mesh=mesh)


# Backward passes one after the other


@pytest.mark.parametrize("kind", ["avg", "max", "min", "sum"])
def test_two_losses_of_a_result_on_which_something_is_pending(kind: str) -> None:
    """The reduction of what is pending is shared by both, but the first pass frees what it saved."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x + 0
        if isinstance(y, sw.DTensor):
            y = y.redistribute(placements=[P(kind)])
        y.cos().sum().backward()
        y.exp().sum().backward()
        return y, x.grad

    for placement in (S(0), P(), R):
        same(program, normal(4, 4), placement)


# Nothing


def _convolution(x: Tensor, **how: Any) -> Tensor:
    weight, bias = beside(x, torch.ones(3, x.shape[1], 2).double()), beside(x, torch.ones(3).double())
    return F.conv1d(x, weight.requires_grad_(), bias.requires_grad_(), **how)


OF_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 2),
    "scaled group norm": lambda x: F.group_norm(x, 2, x.detach().sum((0, 2)), x.detach().sum((0, 2))),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate to a size": lambda x: F.interpolate(x, size=5, mode="linear"),
    "area": lambda x: F.interpolate(x, size=5, mode="area"),
    "convolution": _convolution,
    "padded convolution": lambda x: _convolution(x, padding=1),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6), (2, 4, 0), (0, 4, 0)], ids=str)
@pytest.mark.parametrize("name", OF_NOTHING)
def test_layers_of_nothing(name: str, shape: tuple[int, ...]) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = OF_NOTHING[name](x)
        y.sum().backward()
        return y, x.grad

    x = torch.empty(shape, dtype=torch.float64)
    try:
        program(x.clone().requires_grad_())
    except (RuntimeError, ValueError):
        pytest.skip("torch refuses it")
    for placement in (S(0), S(1), S(2), P(), R):
        same(program, x, placement)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("padding", ["same", 1])
def test_a_convolution_of_no_channels(padding: Any) -> None:
    """Torch gives it no channels, however many filters there are."""

    def program(x: Tensor) -> tuple[Tensor]:
        return (F.conv1d(x.new_zeros(1, 0, 3), x.new_zeros(3, 0, 1), x[1:], padding=padding),)

    same(program, normal(4), S(0))


# Writes to what a gradient does not need


READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, i: F.embedding(i, x),
    "bags": lambda x, i: F.embedding_bag(i.reshape(1, -1), x),
    "the largest of bags": lambda x, i: F.embedding_bag(i.reshape(1, -1), x, mode="max"),
    "the largest": lambda x, i: x.topk(1, 0).values,
}


@pytest.mark.parametrize("name", READ)
def test_what_is_looked_up_may_be_written_to_before_the_gradient_comes(name: str) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = x * 1
        out = READ[name](y, beside(x, torch.tensor([0, 0])))
        with torch.no_grad():
            y.mul_(2)
        (out * out).sum().backward()
        return out, x.grad

    for shape in ((1, 3), (2, 1), (3, 3)):
        for placement in (S(0), S(1), R):
            same(program, normal(*shape), placement, mesh=(4,))


# Views that are written to


@pytest.mark.parametrize("mesh", [(1,), (2,)])
def test_a_hook_on_a_view_whose_source_was_written_to_since(mesh: tuple[int, ...]) -> None:
    """Plain torch dies of it, unless somebody has asked for the view's history in between."""
    x = place(normal(3, 2), S(1), mesh=mesh).requires_grad_()
    y = x * 2
    view = y.t()
    with torch.no_grad():
        y.mul_(3)
    view.register_hook(lambda grad: grad * 2)
    view.sum().backward()
    torch.testing.assert_close(full(x.grad), torch.full_like(normal(3, 2), 4))


@pytest.mark.parametrize("mesh", [(1,), (2,)])
@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
def test_what_a_function_returns_may_be_written_to_though_its_shards_are_views(
    mesh: tuple[int, ...], placement: sw.Placement
) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        out: Any = checkpoint(lambda x: (x * -1.5).max(0).values, x, use_reentrant=True)
        out[0].mul_(2)
        out.sum().backward()
        return out, x.grad

    for shape in ((1, 1), (3, 2)):
        same(program, normal(*shape), placement, mesh=mesh)


@pytest.mark.parametrize("view", [lambda v: v.view_as(v), lambda v: v.view(2, -1), lambda v: v.reshape(2, 3)])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_write_to_a_view_of_the_same_shape_of_what_it_reads(view: Any, mesh: tuple[int, ...]) -> None:
    """Torch takes views for the same if their strides are equal: also those of shards of a single row."""

    def program(x: Tensor) -> tuple[Any, ...]:
        rows = (x * 1)[::2]
        with torch.no_grad():
            view(rows).mul_(rows)
        return (rows,)

    same(program, normal(4, 3), S(0), mesh=mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("hook", [lambda g: g * 2, lambda g: g.tanh(), lambda g: g + 0.5])
def test_a_hook_on_an_average_of_terms_that_differ(hook: Any, mesh: tuple[int, ...]) -> None:
    """Each rank multiplies its gradient by its own term: shares that merely add up to the hook's result are no good."""
    grads = []
    for on in (Device(None), Device(mesh_of(mesh))):
        x = on.leaf((3, 2), torch.float64, [P("avg")], seed=688, grad=True)
        y = torch.mv(x, x[0])
        y.register_hook(hook)
        y.square().sum().backward()
        grads.append(full(x.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_a_write_to_the_data_of_a_view_of_what_was_reduced(kind: str) -> None:
    """Autograd does not hear of such a write, and neither does who keeps what was reduced."""

    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            y = x * 1
            before = y.norm()
            y.flatten().data.div_(2)
            return before, y.square()

    same(program, normal(3, 2), P(kind))


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cummax": lambda x: x.cummax(1).values,
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "roll": lambda x: x.roll(1, 1),
}


@pytest.mark.parametrize("mesh", [(1,), (2,)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks_on_results_of_programs_last_though_these_are_written_to(name: str, mesh: tuple[int, ...]) -> None:
    """They are no views, though they may be parts of what a rank computed."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = PROGRAMS[name](x)
        y.register_hook(lambda grad: grad + 0.5)
        with torch.no_grad():
            y.view_as(y).sigmoid_()
        y.sin().sum().backward()
        return y, x.grad

    if name == "softmax":  # which needs its result for the gradient
        with pytest.raises(RuntimeError, match="inplace operation"):
            program(place(normal(3, 3), S(1), mesh=mesh).requires_grad_())
    else:
        same(program, normal(3, 3), S(1), mesh=mesh)


def test_the_result_of_a_layer_norm_is_contiguous() -> None:
    """So what is flattened of it is a view, and a write to that is seen."""

    def program(x: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            y = F.layer_norm(x.mT, (x.shape[0],))
            y[1].ravel().tanh_()
        return (y,)

    for placement in (S(0), S(1), R):
        same(program, normal(5, 6), placement)


@pytest.mark.parametrize("part", [slice(1, None), slice(0, 1)], ids=str)
def test_a_view_of_what_a_sum_was_reduced_to_is_written_to(part: slice) -> None:
    """After the write its source is pending again, and the view still lies as it did."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y = x.mean(1, keepdim=True) * 2
        y.tanh().sum().backward(retain_graph=True)
        y[part, -1] *= -1.5
        y.sin().sum().backward()
        return y, x.grad

    for rows in (1, 3):
        same(program, normal(rows, 3), S(1))
