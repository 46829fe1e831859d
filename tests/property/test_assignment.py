"""`x[index] = value` with indices, values and layouts drawn at random: value and gradients are those of one device."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from compare import check_shards
from hypothesis import given, note, settings
from hypothesis import strategies as st
from layouts import laid_out, random_layout
from sweep import mesh_of
from torch import Tensor

import shardwise as sw

MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)]


def reals(shape: Any, chance: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def random_item(shape: tuple[int, ...], chance: random.Random) -> tuple[Any, int]:
    """An item of an index, and how many dims it stands for. Numbers in a tensor name no place twice: it would take one
    of two values, torch does not say which."""
    size = shape[0]
    match chance.randrange(9):
        case 0:
            return chance.randint(-size, size - 1), 1
        case 1 | 2:
            ends = [chance.choice([None, chance.randint(-size - 1, size + 1)]) for _ in range(2)]
            return slice(*ends, chance.choice([None, 1, 2, 3])), 1
        case 3:
            places = chance.sample(range(size), chance.randint(0, size))
            return torch.tensor(places, dtype=torch.long) - size * chance.randrange(2), 1
        case 4:
            return [chance.random() < 0.5 for _ in range(size)], 1
        case 5:
            dims = chance.randint(1, len(shape))
            return reals(shape[:dims], chance) > 0, dims
        case 6:
            return torch.tensor(chance.randint(-size, size - 1)), 1
        case 7:
            return chance.choice([None, True, torch.tensor(True)]), 0
    return slice(None), 1


def random_index(shape: tuple[int, ...], chance: random.Random) -> tuple[Any, ...]:
    items, dim = [], 0
    while dim < len(shape) and len(items) < 4:
        item, dims = random_item(shape[dim:], chance)
        items.append(item)
        dim += dims
    return (*items, ...) if chance.random() < 0.3 else tuple(items)


def random_value(shape: torch.Size, chance: random.Random) -> Any:
    """A number, or a tensor that broadcasts to the part."""
    if chance.random() < 0.2:
        return chance.choice([2.5, 3, True])
    sizes = [1 if chance.random() < 0.2 else size for size in shape]
    return reals(chance.choice([[], sizes, [1, *sizes], [1] * len(sizes)]), chance)


def view_of(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A tensor of its own with the value of `x`, and a view of it that looks like `x`."""
    if kind == "transposed":
        own = (x * 1).mT.contiguous()
        return own, own.mT
    if kind == "a part":
        own = torch.cat([x[:1], x, x[:1]])
        return own, own[1:-1]
    own = x * 1
    return own, own


@settings(max_examples=250)
@given(st.randoms(use_true_random=False))
def test_any_part_may_be_set(chance: random.Random) -> None:
    shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(2, 3)))
    mesh, x = mesh_of(chance.choice(MESHES)), reals(shape, chance).requires_grad_()
    index, kind = random_index(shape, chance), chance.choice(["whole", "transposed", "a part"])
    try:
        value = random_value(x[index].shape, chance)
    except IndexError:  # indices that do not go together
        return
    d = laid_out(x, random_layout(chance, mesh, shape, pending=chance.choice([(), (), ("sum", "avg")])))
    dist_index = tuple(laid_out(i, random_layout(chance, mesh, i.shape)) if isinstance(i, Tensor) else i for i in index)
    v, w = value, value
    if isinstance(value, Tensor):
        v = value.requires_grad_()
        w = laid_out(v, random_layout(chance, mesh, v.shape, pending=("sum", "avg", "max", "min")))
    note(f"{d._layout} {kind} [{index}] = {w._layout if isinstance(w, sw.DTensor) else w}")
    expected, view = view_of(x, kind)
    view[index] = v
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.errors.FallbackWarning)
        found, view = view_of(d, kind)
        try:
            view[dist_index] = w
        except sw.errors.InPlaceError:
            assert d._layout.has_pending
            return
    check_shards(found)
    torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
    weights = reals(expected.shape, chance)
    (expected * weights).sum().backward()
    (found * sw.distribute_tensor(weights, mesh)).sum().backward()
    for plain, dist in ((x, d), (v, w)):
        if isinstance(plain, Tensor):
            check_shards(dist.grad)
            torch.testing.assert_close(dist.grad.full_tensor(), plain.grad)
