"""Sums whose terms share no rows: experts on the ranks compute row by row, and nothing is communicated between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import compare, full
from sweep import mesh_of, normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
TOKENS, WIDTH, HIDDEN = 7, 8, 16
ROWS = 2 * TOKENS
ENDS = {2: (5, 14), 3: (4, 4, 14), 5: (2, 3, 9, 9, 14)}
MESHES = ((2,), (3,), (4,), (2, 2))

Parts = tuple[Tensor, ...]


def products(x: Tensor, up: Tensor, down: Tensor, ends: Tensor, rows: Tensor, inside: Callable[..., Any]) -> Any:
    """Experts as models write them: rows in the order of experts, gate and value in one."""
    hidden = F.grouped_mm((x * 1)[rows], up, offs=ends)
    return F.grouped_mm(inside(hidden), down, offs=ends)


def gated(hidden: Tensor) -> Tensor:
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


WAYS = [[R, R], [S(0), R], [R, S(0)], [S(1), S(0)], [R, S(1)], [S(0), S(1)], [S(0), S(0)], [P(), R], [P(), P()]]


@pytest.mark.parametrize("rows", WAYS, ids=str)
def test_products_of_rows_and_matrices_however_they_lie(rows: list[Any]) -> None:
    ends, mesh = torch.tensor([7, 7, 50], dtype=torch.int32), sw.simulate((2, 3), ("dp", "tp"))
    tensors = [torch.randint(-3, 4, shape).float() for shape in ((50, 32), (3, 32, 48))]

    def product(x: Tensor, matrices: Tensor) -> Tensor:
        offs = sw.distribute_tensor(ends, mesh, [R, R]) if isinstance(x, sw.DTensor) else ends
        return F.grouped_mm(x, matrices, offs=offs) * 1

    for matrices in (*WAYS, [S(2), S(0)]):
        compare(product, tensors, mesh, [rows, matrices], atol=1e-3, rtol=1e-5)


def of_each(experts: int) -> list[Tensor]:
    up, down = normal(experts, WIDTH, 2 * HIDDEN).float() / 4, normal(experts, HIDDEN, WIDTH).float() / 4
    ends, rows = torch.tensor(ENDS[experts], dtype=torch.int32), torch.randperm(ROWS) // 2
    return [normal(TOKENS, WIDTH).float(), up, down, ends, rows]


def laid(tensors: list[Tensor], mesh: tuple[int, ...]) -> list[Tensor]:
    """Experts on the first axis."""
    others = [R] * (len(mesh) - 1)
    placed = [[S(0) if t.dim() == 3 else R, *others] for t in tensors]
    return [sw.distribute_tensor(t.clone(), mesh_of(mesh), where) for t, where in zip(tensors, placed, strict=True)]


def ran(program: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """What a program returns, and the gradients of its leaves."""
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = program(*leaves)
    results = [out] if isinstance(out, Tensor) else list(out)
    return [t.detach() for t in (*results, *(t.grad for t in leaves[:3]))]


def same(program: Callable[..., Any], mesh: tuple[int, ...] = (2,), experts: int = 5) -> CommDebugMode:
    """A program gives what it gives on one device."""
    tensors = of_each(experts)
    expected = ran(program, [t.clone() for t in tensors])
    given = laid(tensors, mesh)
    with CommDebugMode() as seen:
        got = ran(program, given)
    torch.testing.assert_close([full(t) for t in got], expected, atol=1e-4, rtol=1e-4)
    return seen


def trained(inside: Callable[..., Any] = gated) -> Callable[..., Any]:
    def program(*tensors: Tensor) -> Tensor:
        out = products(*tensors, inside)
        out.sin().sum().backward()
        return out

    return program


@pytest.mark.parametrize("experts", ENDS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_only_the_result_and_the_gradient_of_tokens_are_reduced(mesh: tuple[int, ...], experts: int) -> None:
    """Also with fewer experts than ranks, and with experts that have no rows. The gradient is that of the tokens, not
    of the rows that were found, of which there are more."""
    seen = same(trained(), mesh, experts)
    assert [(c.kind, str(c.source).split(" ")[0], c.backward) for c in seen.comms if c.bytes > 100] == [
        ("all_reduce", f"[{ROWS},{WIDTH}]", False),
        ("all_reduce", f"[{TOKENS},{WIDTH}]", True),
    ]


INSIDE: dict[str, Callable[[Tensor], Any]] = {
    "gelu": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh"),
    "relu": lambda h: h.chunk(2, 1)[1].relu().tanh(),
    "times two": lambda h: h.chunk(2, dim=1)[0] * 2,
}


@pytest.mark.parametrize("name", INSIDE)
def test_functions_of_rows(name: str) -> None:
    assert len(same(trained(INSIDE[name])).comms) == 2


def written(h: Tensor) -> Tensor:
    gate = F.silu(h.chunk(2, dim=-1)[0])
    gate += 1
    return gate * 2


def written_unseen(h: Tensor) -> Tensor:
    gate = h.chunk(2, dim=-1)[0] * 1
    gate.data.add_(1)
    return gate.relu()


def of_others(h: Tensor) -> Tensor:
    """Of which some rows are of other ranks."""
    gate, value = h.chunk(2, dim=-1)
    return gate * value.flip(0)


ELSEWHERE: dict[str, Callable[[Tensor], Any]] = {
    "not nothing of zeros": lambda h: h.chunk(2, dim=-1)[0].cos(),
    "by a number": lambda h: h.chunk(2, dim=-1)[0] * 0.5,
    "halves of rows": lambda h: torch.cat(h.chunk(2, dim=0)).chunk(2, dim=1)[0],
    "in place": lambda h: F.relu(h.chunk(2, dim=-1)[0] * 1, inplace=True),
    "written to": written,
    "written to unseen": written_unseen,
    "of others": of_others,
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_needs_the_whole_has_it(name: str, mesh: tuple[int, ...]) -> None:
    same(trained(ELSEWHERE[name]), mesh)


def test_rows_that_are_divided_otherwise() -> None:
    def program(x: Tensor, up: Tensor, down: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
        others = (ends - 1).clamp(0) + (ends == ROWS)
        a, b = (F.grouped_mm(x[rows], up, offs=offs).chunk(2, -1)[0] for offs in (ends, others.int()))
        out = F.grouped_mm(a.relu() * b.relu(), down, offs=others.int())
        (out * out).sum().backward()
        return out

    same(program)


def test_ends_that_are_written_to() -> None:
    def program(x: Tensor, up: Tensor, down: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
        hidden = gated(F.grouped_mm(x[rows], up, offs=ends * 1))
        again = ends * 1
        first = gated(F.grouped_mm(x[rows], up.detach(), offs=again)).detach()
        again[0] += 1
        out = F.grouped_mm(first, down, offs=again) + F.grouped_mm(hidden, down, offs=ends)
        (out * out).sum().backward()
        return out

    same(program)


# Whoever looks at the gradient of something in between


def hooked(h: Tensor) -> Tensor:
    gate, value = h.chunk(2, dim=-1)
    act = F.silu(gate)
    act.register_hook(lambda grad: grad.clamp(-1, 1) + 0.25)
    return act * value


def test_a_hook_sees_the_whole_gradient() -> None:
    same(trained(hooked), (3,))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_that_are_kept_or_asked_for(mesh: tuple[int, ...]) -> None:
    """Also if they are only asked for once it was used, and of what was used in both ways."""

    def program(*tensors: Tensor) -> Parts:
        kept: list[Tensor] = []

        def inside(h: Tensor) -> Tensor:
            gate, value = h.chunk(2, dim=-1)
            act = F.silu(gate)
            out = act * value
            act.retain_grad()
            kept.extend((h, act, gate, value))
            return out

        out = products(*tensors, inside)
        loss = (out * out).sum() + (kept[1] * 3).sum() + kept[1].cos().sum()
        asked = torch.autograd.grad(loss, [kept[0], kept[2]], retain_graph=True)
        loss.backward()
        assert kept[1].grad is not None
        return out, *asked, kept[1].grad

    same(program, mesh)


def test_the_gradient_of_rows_that_were_found() -> None:
    def program(x: Tensor, up: Tensor, down: Tensor, ends: Tensor, rows: Tensor) -> Parts:
        found = (x * 1)[rows]
        out = F.grouped_mm(gated(F.grouped_mm(found, up, offs=ends)), down, offs=ends)
        found.retain_grad()
        (out.sin().sum() + found.sum()).backward()
        return out, found.grad

    same(program, (3,))


def test_an_index_that_is_written_to_is_missed() -> None:
    def program(x: Tensor, up: Tensor, ends: Tensor, rows: Tensor) -> None:
        index = rows * 1
        out = F.grouped_mm((x * 1)[index], up, offs=ends)
        index.zero_()
        out.sin().sum().backward()

    x, up, _, ends, rows = of_each(5)
    for tensors in ([x, up, ends, rows], laid([x, up, ends, rows], (2,))):
        tensors[0].requires_grad_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program(*tensors)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_of_gradients(mesh: tuple[int, ...]) -> None:
    def program(x: Tensor, up: Tensor, down: Tensor, ends: Tensor, rows: Tensor) -> Parts:
        kept: list[Tensor] = []

        def inside(h: Tensor) -> Tensor:
            kept.append(h)
            return gated(h)

        out = products(x, up, down, ends, rows, inside)
        first = torch.autograd.grad(out.sin().sum(), [x, up, kept[0]], create_graph=True)
        sum((grad * grad).sum() for grad in first).backward()
        return out, *first

    same(program, mesh)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool) -> None:
    def program(*tensors: Tensor) -> Tensor:
        out = products(*tensors, lambda h: checkpoint(gated, h, use_reentrant=reentrant))
        whole = checkpoint(lambda *given: products(*given, gated), *tensors, use_reentrant=reentrant)
        (out * whole).sum().backward()
        return out

    same(program, (3,))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph(mode: Any) -> None:
    tensors = of_each(5)
    with mode():
        expected = products(*tensors, gated)
        given = laid(tensors, (2,))
        with CommDebugMode() as seen:
            got = products(*given, gated)
    assert got.placements == (P(),)
    assert seen.get_total_counts() == (0 if mode is torch.no_grad else 2)
    torch.testing.assert_close(full(got), expected, atol=1e-4, rtol=1e-5)


def test_nothing_moves_that_a_strict_program_forbids() -> None:
    with sw.strict(moves="1"):
        out = products(*laid(of_each(5), (2,)), gated)
    assert out.placements == (P(),)
