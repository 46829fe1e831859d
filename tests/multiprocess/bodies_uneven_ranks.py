"""Programs that ranks may run differently: each is run on plain tensors and on DTensors, and must give the same.

Most of them show ranks that do not do the same: one holds nothing, or its gradient is a constant there, or its shard
does not show how the whole lies. Ranks that communicate differently hang, or break the group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from bodies import Body, R, S, add_body, assert_close, body, doubles, everywhere, held, per_rank

Program = Callable[..., Sequence[Tensor]]
Laying = Sequence[sw.Placement] | Callable[[Tensor, Any], sw.DTensor]
Arguments = tuple[tuple[Tensor, Laying], ...]


@dataclass(frozen=True)
class OnRanks:
    """A program, and its arguments with how they lie on a mesh."""

    function: Program
    arguments: Arguments

    def __call__(self, mesh: Any) -> None:
        expected = self.function(*(x.clone().requires_grad_(x.is_floating_point()) for x, _ in self.arguments))
        laid = [lay(x, mesh) if callable(lay) else sw.distribute_tensor(x, mesh, lay) for x, lay in self.arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sw.errors.FallbackWarning)
            found = self.function(*(x.requires_grad_(x.is_floating_point()) for x in laid))
        for number, (e, f) in enumerate(zip(expected, found, strict=True)):
            assert_close(f, e, f"result {number}")


def program(*shape: int, **arguments: tuple[Tensor, Laying]) -> Callable[[Program], Program]:
    def add(function: Program) -> Program:
        add_program(function.__name__, shape, function, tuple(arguments.values()))
        return function

    return add


def add_program(name: str, shape: tuple[int, ...], function: Program, arguments: Arguments) -> None:
    add_body(name, Body(OnRanks(function, arguments), shape, same_record=False))


def one_and_the_rest(x: Tensor, mesh: Any) -> sw.DTensor:
    """The first rank has one element, the second the others."""
    local = per_rank(mesh, lambda at: x[:1] if at == (0,) else x[1:])
    return sw.DTensor.from_local(local, mesh, [S(0)], run_check=True)


def greatest_on_the_first(x: Tensor, mesh: Any) -> sw.DTensor:
    local = per_rank(mesh, lambda at: x - sum(at))
    return sw.DTensor.from_local(local, mesh, [sw.Partial("max")] * mesh.ndim)


torch.manual_seed(0)


# First derivatives and none


@program(2, x=(torch.ones(3), [R]), y=(torch.ones(3), [S(0)]))
def numbers_before_operators(*tensors: Tensor) -> list[Tensor]:
    """Of functions in Python, what a trace has read is not part of the plan."""
    found = []
    for x in tensors:
        for number in (2.0, 0.25, 3.0):
            found += [number - x, x**number, number**x, x // number, number // x, number % x]
        found += [2.0 - x.half(), 2.0 - x.double(), x.double() ** 0.5]
    return [x.detach() for x in found]


@program(2, 2, x=(doubles(4, 1, 5, 6), [S(1), S(3)]))
def moves_shared_where_some_shards_hide_their_strides(x: Tensor) -> list[Tensor]:
    """On one rank only the product is a part that remembers its strides; there too, both uses of it share a move."""
    y = (x.diagonal(0, 0, -1).unsqueeze(0) * 2).sin()
    y = y * y
    return [y.gather(1, y.argsort(1))]


@program(2, 2, x=(doubles(4, 6), [S(1), S(1)]))
def a_reshape_of_pieces_that_do_not_line_up(x: Tensor) -> list[Tensor]:
    return [x.t().reshape(3, 8)]


@program(2, 2, x=(doubles(3, 1), [R, S(1)]))
def a_write_to_a_view_of_nothing(x: Tensor) -> list[Tensor]:
    """Nothing has strides without a meaning, and so has a view of it; it is not expanded."""
    y = x[..., None] + 0
    y[:, 0] = y[:, 0].clone()
    return [y]


@program(2, x=(doubles(4), [S(0)]))
def a_write_to_windows_of_nothing(x: Tensor) -> list[Tensor]:
    """One rank has all of the slice; the other's windows of nothing lie as the first one's do: not expanded."""
    y = x.detach().clone()
    y[:2].unfold(0, 2, 1).tanh_()
    return [y]


def refused_where_memory_is_shared(write: Callable[[Tensor], Any], x: Tensor) -> None:
    """Torch fills elements that share memory one by one, with a warning; what we write at once it refuses, but of
    nothing. So do ranks that hold nothing."""
    if isinstance(x, sw.DTensor):
        with pytest.raises(RuntimeError, match="single memory location"):
            write(x.expand(3, *x.shape))


@program(2, x=(doubles(4, 1), [S(1)]), index=(torch.tensor([2]), [R]))
def a_recorded_fill_of_elements_that_share_memory(x: Tensor, index: Tensor) -> list[Tensor]:
    refused_where_memory_is_shared(lambda y: y.index_fill_(1, index, 0.5), x * 1)
    return [x.sum()]


@program(2, 2, x=(doubles(4, 1), [sw.Partial(), S(1)]), mask=(torch.tensor([[True]]), [R, R]))
def a_fill_of_pending_elements_that_share_memory(x: Tensor, mask: Tensor) -> list[Tensor]:
    refused_where_memory_is_shared(lambda y: y.masked_fill_(mask, 0.5), x.detach())
    return [x.sum()]


@program(2, x=(doubles(3, 2), [S(0)]), y=(doubles(4), [R]), s=(torch.tensor(1.5).double(), [R]))
def a_number_that_elements_of_a_list_share(x: Tensor, y: Tensor, s: Tensor) -> list[Tensor]:
    """Nothing moves forward, but every rank has a part of the gradient of the number."""
    outs = torch._foreach_mul_([x.clone(), y.clone()], s)
    return [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), [x, y, s])]


@program(2, x=(doubles(4, 1), [S(1)]))
def a_gradient_of_elements_that_share_memory(x: Tensor) -> list[Tensor]:
    """Torch lets them be zeroed, and refuses the backward pass. Where some ranks hold nothing, the write is refused."""
    y = (x * 1).expand(3, 4, 1)
    with pytest.raises(RuntimeError, match="single memory location"):
        y.zero_()
        y.sum().backward()
    with torch.no_grad():
        y.zero_()
    return [x.sum(), y]


# Derivatives of derivatives


@program(2, 2, x=(doubles(3, 6), greatest_on_the_first), w=(doubles(6), [S(0), R]), v=(doubles(6), [R, S(0)]))
def second_order_of_pending_extrema(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    """The gradient is the same constant on all ranks but for which of them it goes to."""
    y = F.pad(x[-1:], (1, 1), mode="replicate")
    (grad,) = torch.autograd.grad((y[:, 1:-1] * w.detach()).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((grad.square() * v.detach()).sum(), x)
    return [grad, again]


@program(2, x=(doubles(3), one_and_the_rest), w=(doubles(3), [R]))
def second_order_where_the_first_rank_needs_no_totals(x: Tensor, w: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad(((x * 0.2 + 1).cumprod(0) * w).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((grad.square() * w).sum(), x)
    return [grad, again]


@program(4, x=(doubles(2, 4, 2), [S(0)]))
def backward_passes_after_one_another_on_nothing(x: Tensor) -> list[Tensor]:
    """Every rank has gradients, those that hold nothing too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True", UserWarning)
        F.scaled_dot_product_attention(x, x, x).sum().backward(create_graph=True)
    first, x.grad = x.grad, None
    first.square().sum().backward()
    second, x.grad = x.grad, None
    (third,) = torch.autograd.grad((x * 0.2 + 1).cumprod(1).sum(), x, create_graph=True)
    third.square().sum().backward()
    return [first, second, third, x.grad]


@program(2, 2, x=(doubles(3), [S(0), S(0)]))
def second_order_of_every_element(x: Tensor) -> list[Tensor]:
    """A pass that begins at a tensor of which each rank has another part, and one of them nothing."""
    y = x.cumsum(0).exp()
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    return [grad, again]


@program(2, x=(doubles(1).to(torch.complex128), [S(0)]), n=(torch.ones(1, dtype=torch.int16), [S(0)]))
def a_column_of_one_element(*tensors: Tensor) -> list[Tensor]:
    """One rank has it, with a stride of its own, and the other nothing."""
    return [torch.stack([x, x], -1)[..., 0] for x in tensors]


class Constant(torch.autograd.Function):
    """A function that has no gradient to give for one of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


@program(2, x=(doubles(3), [R]), w=(doubles(5), [S(0)]))
def second_order_through_a_function_without_a_gradient(x: Tensor, w: Tensor) -> list[Tensor]:
    y = Constant.apply(x, w.exp().sum().sqrt())
    grads = torch.autograd.grad(y.square().sum() + w.square().sum(), [x, w], create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    return [*grads, x.grad, w.grad]


@program(3, table=(doubles(7, 3), [R]), index=(torch.tensor([4, 0, 4, 6]), [S(0)]))
def second_order_of_looking_nothing_up(table: Tensor, index: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad(F.embedding(index, table).exp().sum(), table, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), table)
    return [grad, again]


@program(2, x=(torch.complex(doubles(1, 4), doubles(4, 1).t()), [S(0)]))
def parts_of_complex_numbers_where_a_rank_has_none(x: Tensor) -> list[Tensor]:
    """To both it is a view, and may be written to."""
    x = x * 1
    x.imag.mul_(2)
    torch.view_as_real(x)[..., 0].add_(1)
    return [x]


def cut(x: Tensor) -> Tensor:
    return x.redistribute(placements=[S(0)]) if isinstance(x, sw.DTensor) else x


@program(2, x=(doubles(4, 3), greatest_on_the_first))
def second_order_of_an_extremum_that_is_cut(x: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad(cut(x).pow(3).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    return [grad, again]


@program(2, x=(doubles(4, 3), greatest_on_the_first))
def an_extremum_that_is_cut_in_a_checkpoint(x: Tensor) -> list[Tensor]:
    def inside(x: Tensor) -> Tensor:
        y = x * 1
        z = cut(y).exp()
        y.mul_(2)
        return z.cumsum(0)

    out = checkpoint(inside, x, use_reentrant=False)
    out.sum().backward()
    return [out, x.grad]


@program(2, x=(doubles(1, 5), [S(0)]), y=(doubles(2, 5), [S(0)]))
def every_other_column_of_a_row_that_one_rank_has(x: Tensor, y: Tensor) -> list[Tensor]:
    """What lies how in memory all ranks must agree on."""
    found = []
    for row in (x.detach(), y.detach().narrow(0, 1, 1)):
        part = (row * 1)[:, ::2]
        assert not part.is_contiguous() and part.contiguous() is not part
        whole = part.contiguous()
        part.t_()
        whole.mul_(2)
        found += [part, whole]
    return found


@program(4, x=(doubles(2, 4), [S(0)]))
def writes_to_pairs_of_which_some_ranks_hold_none(x: Tensor) -> list[Tensor]:
    """Ranks that held nothing made a copy of the pairs and refused to write to it; the others wrote."""
    c = torch.complex(x, 2 * x)
    pairs = torch.view_as_real(c)
    pairs.mul_(3)
    c.real.mul_(2)
    c.imag.add_(x)
    (c.abs() ** 2).sum().backward()
    assert x.grad is not None
    return [c, x.grad]


@program(
    4, x=(doubles(2, 3, 4), [S(0)]), w=(doubles(12, 4), [R]), mask=(torch.tensor([[0.0, -1.0], [0.0, 0.0]]), [S(0)])
)
def attention_where_some_ranks_hold_nothing(x: Tensor, w: Tensor, mask: Tensor) -> list[Tensor]:
    out, weights = F.multi_head_attention_forward(
        *(x, x, x, 4, 2, w, None, None, None, False, 0.0, w[:4], None), attn_mask=mask.to(x.dtype), training=True
    )
    assert weights is not None
    ((out * out).sum() + weights.sin().sum()).backward()
    assert x.grad is not None and w.grad is not None
    return [out, weights, x.grad, w.grad]


def attention_of(width: int) -> Program:
    """What `nn.MultiheadAttention` does, with and without its weights."""

    def attend(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        for weights in (False, True):
            out, told = F.multi_head_attention_forward(
                *(x, x, x, width, 2, w, b, None, None, False, 0.0, w[:width], b[:width]), need_weights=weights
            )
            loss = (out * out).sum()
            (loss if told is None else loss + told.sin().sum()).backward()
            results.append(out)
        assert x.grad is not None and w.grad is not None and b.grad is not None
        return [*results, x.grad, w.grad, b.grad]

    return attend


for cut_dim, shape in enumerate(((2, 3, 4), (5, 1, 4), (3, 2, 2))):  # of each, some of three ranks hold nothing
    for weight in (R, S(0), S(1)):
        width = shape[2]
        laid = ((doubles(*shape), [S(cut_dim)]), (doubles(3 * width, width), [weight]), (doubles(3 * width), [S(0)]))
        add_program(f"attention_with_dim_{cut_dim}_cut_and_weights_{weight}", (3,), attention_of(width), laid)


@program(2, x=(doubles(3), [S(0)]))
def a_write_to_a_copy_of_what_a_checkpoint_gives(x: Tensor) -> list[Tensor]:
    """How it lies a rank that holds nothing of it does not see: it forgot, and wrote to a view, the other to a copy."""
    out: Any = checkpoint(lambda x: x.atan()[:2].expand(2, 2), x, use_reentrant=True)
    flat = out.reshape(-1)
    flat.div_(2)
    (out.sum() + flat.sin().sum()).backward()
    assert x.grad is not None
    return [out, flat, x.grad]


@program(2, x=(doubles(3), [S(0)]))
def a_write_to_a_copy_of_what_a_checkpoint_takes(x: Tensor) -> list[Tensor]:
    def inside(part: Tensor) -> Tensor:
        flat = part.reshape(-1)
        flat.mul_(3)
        return flat.sin()

    out: Any = checkpoint(inside, x.atan()[:2].expand(2, 2), use_reentrant=False)
    out.sum().backward()
    assert x.grad is not None
    return [out, x.grad]


@program(2, x=(doubles(3), [S(0)]))
def reshapes_that_copy_what_a_rank_holds_nothing_of(x: Tensor) -> list[Tensor]:
    """One rank made its copy before the move, and so shared no move with the second reshape; the other did."""
    part = x.atan()[:2].expand(2, 2)
    flat = part.reshape(-1)
    flat.mul_(3)
    column = part.reshape(4, 1)
    (flat.sum() + column.sin().sum()).backward()
    assert x.grad is not None
    return [flat, column, x.grad]


def pending(x: Tensor, mesh: Any) -> sw.DTensor:
    return sw.distribute_tensor(x, mesh, [R]).redistribute(placements=[sw.Partial()])


@program(2, x=(doubles(4, 1), pending))
def a_write_to_what_was_reduced_and_scattered(x: Tensor) -> list[Tensor]:
    """Ranks got it as a view, which torch lets nobody write to that a function returned."""
    y = x.redistribute(placements=[S(1)]) if isinstance(x, sw.DTensor) else x.clone()
    y.select(1, 0).mul_(2)
    with torch.no_grad():
        y.ravel().add_(1)
    (y * y).sum().backward()
    assert x.grad is not None
    return [y, x.grad]


# Whether a result is a view, and whether a write is refused, all ranks say alike; none communicates after it


@body(2, same_record=False)
def the_gradient_of_a_gradient_that_is_constant(mesh: Any) -> None:
    x = doubles(2, 2)
    w = sw.distribute_tensor(x, mesh, [R]).requires_grad_()
    (first,) = torch.autograd.grad(F.linear(sw.distribute_tensor(x, mesh, [S(0)]), w).sum(), w, create_graph=True)
    assert_close(first, x.sum(0).expand(2, 2))


@program(2, x=(doubles(4), [S(0)]))
def second_order_of_what_is_joined_twice(x: Tensor) -> list[Tensor]:
    (first,) = torch.autograd.grad(torch.cat([x, x.exp()]).sin().sum(), x, create_graph=True)
    return [*torch.autograd.grad((first**3).sum(), x)]


@body(2, same_record=False)
def writes_to_shared_memory_are_refused_where_a_rank_holds_nothing(mesh: Any) -> None:
    def ones(*shape: int, dim: int) -> sw.DTensor:
        return sw.distribute_tensor(torch.ones(shape), mesh, [S(dim)])

    with pytest.raises(RuntimeError):
        ones(1, 3, dim=0).unsqueeze(0).expand(2, 1, 3).add_(1)
    y = ones(4, 1, dim=1)
    y[2:].copy_(y[:2])
    y[1:].copy_(y[:-1])  # torch refuses these two; of shards so thin what is read is a copy, on all ranks
    y[2:].add_(y[1:3], alpha=2)
    y[1:].mul_(y[1:])
    assert_close(y, torch.tensor([[1.0], [1.0], [9.0], [9.0]]))


@program(2, x=(torch.arange(3.0).view(3, 1), [S(1)]))
def a_write_to_what_was_computed_where_a_rank_holds_nothing(x: Tensor) -> list[Tensor]:
    y = x.detach().t() + 1
    return [y.mul_(2)]


@program(2, x=(torch.arange(12.0).view(3, 4), [S(0)]))
def a_copy_of_what_was_computed(x: Tensor) -> list[Tensor]:
    y = x.detach().t().sin()
    z = y.reshape(-1)
    y.mul_(2)
    return [y, z]


@body(2, same_record=False)
def views_are_views_on_all_ranks_or_on_none(mesh: Any) -> None:
    chunks = torch.arange(9.0).view(3, 3).chunk(2, 1)
    local = per_rank(mesh, lambda at: chunks[at[0]].clone())
    rows = sw.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [S(0)])
    for y in (
        sw.DTensor.from_local(local, mesh, [S(1)], run_check=True),
        F.layer_norm(rows.t(), (3,)),
    ):
        outcome = "right"
        try:
            z = y.flatten()
            y.mul_(2)
            z.to_local()
        except Exception as error:
            outcome = type(error).__name__
        assert len(set(everywhere(dict.fromkeys(held(y), outcome)).values())) == 1
