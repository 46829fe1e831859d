"""What torch offers around autograd, as programs: wherever tensors lie, they give what they give on plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import as_tensors
from sweep import mesh_of, normal
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint as checkpoints

import shardwise as sw

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
WAYS: list[tuple[tuple[int, ...], list[sw.Placement]]] = [
    *(((2,), [where]) for where in (R, S(0), S(1), P)),
    ((3,), [S(0)]),
    *(((2, 2), where) for where in ([S(0), S(1)], [S(0), S(0)], [P, S(0)], [R, S(1)])),
]
To = Callable[[Tensor], Any]
Program = Callable[[To], Any]


def everywhere(program: Program) -> None:
    """The results of a program are those on plain tensors, wherever its tensors lie; so is what it refuses."""

    def run(to: To) -> list[Tensor] | Exception:
        torch.manual_seed(0)
        try:
            return as_tensors(program(to))
        except (RuntimeError, TypeError) as error:
            return error

    expected = run(lambda x: x.clone().requires_grad_())
    for shape, where in WAYS:
        found = run(lambda x: sw.distribute_tensor(x, mesh_of(shape), where).requires_grad_())  # noqa: B023
        if isinstance(expected, Exception):
            assert type(found) is type(expected) and str(found) == str(expected), f"{where}: {found!r}"
            continue
        assert isinstance(found, list), f"{where}: {found!r}"
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.detach().full_tensor(), y.detach(), msg=lambda m, where=where: f"{where}: {m}")


X, W = normal(4, 4), normal(5, 4)[:4]
recompute = partial(checkpoints.checkpoint, use_reentrant=False)


# Recomputing, also where others listen for saved tensors


def nested(to: To) -> Any:
    x, w = to(X), to(W)
    outer = recompute(lambda q: recompute(lambda r, k: (r @ k).sin(), q * 2, w) * 2, x)
    outer.square().sum().backward()
    return x.grad, w.grad


def nested_thrice(to: To) -> Any:
    x, w = to(X), to(W)
    recompute(lambda a: recompute(lambda b: recompute(lambda c: (c @ w).sin(), b * 1), a + 1), x).sum().backward()
    return x.grad, w.grad


def nested_twice_differentiated(to: To) -> Any:
    x = to(X)
    y = recompute(lambda q: recompute(lambda r: r.sin() * r, q * q), x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    first.square().sum().backward()
    return first, x.grad


def offloaded(to: To) -> Any:
    x = to(X)
    with save_on_cpu():
        y = recompute(lambda q: (q @ q).sin(), x * 1)
    y.sum().backward()
    return x.grad


def selective(to: To) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        keep = op is torch.ops.aten.mm.default
        return checkpoints.CheckpointPolicy.MUST_SAVE if keep else checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    x = to(X)
    contexts = partial(checkpoints.create_selective_checkpoint_contexts, policy)
    recompute(lambda q: (q @ q).sin(), x, context_fn=contexts).sum().backward()
    return x.grad


def other_arguments(to: To) -> Any:
    x = to(X)
    recompute(
        lambda q, n, parts, scale=1: (q @ q).sin() * n + parts[0] * scale, x * 1, 3, [x], scale=2
    ).sum().backward()
    return x.grad


# Functions that users write


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].exp()


def once(to: To) -> Any:
    x = to(X)
    Exponential.apply(x).square().sum().backward()
    return x.grad


def once_but_twice(to: To) -> Any:
    x = to(X)
    (first,) = torch.autograd.grad((Exponential.apply(x) * x).sum(), x, create_graph=True)
    first.sum().backward()


# Hooks


def hooks_that_raise(to: To) -> Any:
    x = to(X)

    def refuse(grad: Tensor) -> None:
        raise KeyError("refused")

    handle = x.register_hook(refuse)
    with pytest.raises(KeyError, match="refused"), sw.strict():
        x.exp().sum().backward()
    handle.remove()
    x.grad = None
    x.exp().sum().backward()
    return x.grad


# Writes that autograd does not hear of


def used(x: Any) -> tuple[Tensor, ...]:
    """In ways that move what is sharded or pending."""
    return x.sin(), x.softmax(0), x.flatten().sort()[0]


def written_data(to: To) -> Any:
    x = to(X)
    used(x)
    x.data.mul_(2)
    return used(x)


def written_kept_data(to: To) -> Any:
    x = to(X)
    row = x.data[1]
    used(x)
    row.fill_(3.0)
    first = used(x)
    x.data[0, 0] = 9.0
    return first, used(x)


def written_out(to: To) -> Any:
    x = to(X)
    used(x)
    with torch.no_grad():
        torch.mul(x, 3, out=x.data)
    return used(x)


def written_list(to: To) -> Any:
    x = to(X)
    used(x)
    torch._foreach_mul_([x.data], 2.0)
    return used(x)


def replaced_data(to: To) -> Any:
    x = to(X)
    used(x)
    x.data = x.data * 2
    return used(x)


def written_data_within_the_graph(to: To) -> Any:
    x = to(X) * 1
    data = x.data
    used(x)
    data.mul_(2)
    return used(x)


def checked_gradients(to: To) -> Any:
    assert torch.autograd.gradcheck(lambda q: q.sin() * q, (to(X[:2, :2]),))


PROGRAMS: list[Program] = [
    *(nested, nested_thrice, nested_twice_differentiated, offloaded, selective, other_arguments),
    *(once, once_but_twice, hooks_that_raise),
    *(written_data, written_kept_data, written_out, written_list, replaced_data, written_data_within_the_graph),
    checked_gradients,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_programs_around_autograd(program: Program) -> None:
    everywhere(program)


# On a real rank a DTensor is what C++ saves, and what listeners are handed


@pytest.fixture(scope="module")
def one_of_four() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield sw.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    dist.destroy_process_group()


@pytest.mark.parametrize("again", [recompute, partial(checkpoints.checkpoint, use_reentrant=True)], ids=["saved", "re"])
def test_a_rank_recomputes_its_shards(again: Callable, one_of_four: Any) -> None:
    plain = X.clone().requires_grad_()
    x = sw.distribute_tensor(X, one_of_four, [S(0)], src_data_rank=None).requires_grad_()
    w = sw.distribute_tensor(W, one_of_four, src_data_rank=None)
    again(lambda q: (q @ W).sin() * q, plain).square().sum().backward()
    again(lambda q: (q @ w).sin() * q, x).square().sum().backward()
    torch.testing.assert_close(x.grad.to_local(), plain.grad[1:2])


def test_listeners_for_saved_tensors_see_shards(one_of_four: Any) -> None:
    seen: list[Any] = []
    x = sw.distribute_tensor(X, one_of_four, [S(0)], src_data_rank=None).requires_grad_()
    w = nn.Parameter(sw.distribute_tensor(W, one_of_four, [S(0)], src_data_rank=None))
    with saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        (x * w).sin().sum().backward()
    assert [(type(t), t.shape) for t in seen] == [(Tensor, (1, 4))] * 3
    assert sorted(isinstance(t, nn.Parameter) for t in seen) == [False, False, True]


def test_uses_of_a_leaf_share_a_move_until_it_is_written_to() -> None:
    x = sw.distribute_tensor(X, mesh_of((2,)), [P]).requires_grad_()
    with sw.debug.CommDebugMode() as comm:
        x.sin()
        x.cos()
        assert comm.get_comm_counts() == {"all_reduce": 1}
        (x * 2).relu_()  # autograd hears of this
        x.exp()
        before = comm.get_comm_counts()["all_reduce"]
        x.data.add_(1)
        x.sin()
        assert comm.get_comm_counts()["all_reduce"] == before + 1


# One function, other numbers: a plan made for reals is not taken for complex numbers
