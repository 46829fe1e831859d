"""Views, copies, and tensors put together."""

from __future__ import annotations

import math

from shardwise.proof.fuzz.draw import Draw, Var
from shardwise.proof.fuzz.program import show

ANY = """
{x}.transpose({d}, {e}) | {x}.select({d}, {i}) | {x}.narrow({d}, {i}, 1) | {x}.unbind({d}) | {x}.flatten()
{x}.chunk(2, {d}) | {x}.split(1, {d}) | torch.tensor_split({x}, 2, {d}) | {x}.movedim({d}, {e}) | {x}.mT
{x}.unsqueeze({d}) | {x}.squeeze({d}) | {x}.squeeze() | {x}.reshape(-1) | {x}.view(-1) | {x}.ravel()
{x}.flip({d}) | {x}.roll(1, {d}) | {x}.contiguous() | {x}.clone() | {x}.view_as({x}) | {x}.expand_as({x})
{x}.repeat_interleave(2, {d}) | F.pad({x}, (1, 0)) | {x}.expand(2, *{x}.shape) | {x}.diagonal(dim1={d}, dim2={e})
{x}.unfold({d}, 1, 1) | {x}.swapaxes({d}, {e}).contiguous() | {x}.T | {x}.tril() | {x}[..., None]
"""


def view(d: Draw) -> str:
    x = d.tensor(1, 2, 3, 4)
    dim = d.dim(x)
    index = d.chance.randrange(max(x.shape[dim], 1))
    return d.way(ANY).format(x=x, d=dim, e=d.dim(x), i=index)


def reshape(d: Draw) -> str:
    x = d.tensor(1, 2, 3, 4)
    way = d.pick("view", "reshape", "reshape")
    return f"{x}.{way}({', '.join(map(str, _shape(d, x)))})"


def _shape(d: Draw, x: Var) -> tuple[int, ...]:
    """Another shape of as many elements."""
    left = math.prod(x.shape)
    sizes: list[int] = []
    if not left:
        return d.pick((0,), (0, d.size()), (d.size(), 0, d.size()))
    while left > 1 and len(sizes) < 3:
        sizes.append(d.pick(*(n for n in range(1, left + 1) if left % n == 0)))
        left //= sizes[-1]
    return (*sizes, left)


def merge(d: Draw) -> str:
    x = d.tensor(2, 3, 4)
    first = d.chance.randrange(x.ndim - 1)
    return f"{x}.flatten({first}, {d.chance.randrange(first + 1, x.ndim)})"


def unmerge(d: Draw) -> str:
    x = d.tensor(1, 2, 3, fits=lambda v: max(v.shape) > 1)
    dim = d.dim(x)
    size = x.shape[dim]
    part = d.pick(*(n for n in range(1, size + 1) if size % n == 0))
    return f"{x}.unflatten({dim}, ({part}, -1))"


def slices(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    return f"{x}[{', '.join(cut(d, size) for size in x.shape[: d.chance.randint(1, x.ndim)])}]"


def cut(d: Draw, size: int) -> str:
    """Something that may stand in brackets, for one dim."""
    at = d.chance.randrange(max(size, 1))
    return d.pick(":", ":", f"{at}:", f":{at + 1}", "::2", "1::2", str(at), f"{-at - 1}", "-1:")


def permute(d: Draw) -> str:
    x = d.tensor(2, 3, 4)
    order = d.chance.sample(range(x.ndim), x.ndim)
    return f"{x}.permute({', '.join(map(str, order))}){d.pick('', '', '.contiguous()')}"


def cat(d: Draw) -> str:
    x = d.tensor(1, 2, 3)
    dim = d.dim(x)
    shape = list(x.shape)
    shape[dim] = d.size()
    y = d.fit(shape, x.dtype)
    way = d.way("torch.cat([{x}, {y}], {d}) | torch.cat([{y}, {x}, {x}], {d}) | torch.concat(({x}, {y}), {d})")
    return way.format(x=x, y=y, d=dim)


def stack(d: Draw) -> str:
    x = d.tensor(0, 1, 2)
    y = d.fit(x.shape, x.dtype)
    return d.way("torch.stack([{x}, {y}]) | torch.stack([{x}, {y}, {x}], -1) | torch.vstack([{x}, {y}])").format(
        x=x, y=y
    )


def fresh(d: Draw) -> str:
    x = d.tensor(0, 1, 2, 3)
    way = d.way("torch.zeros_like({x}) | torch.ones_like({x}) * {x} | torch.full_like({x}, {c}) | {x}.new_zeros(2, 3)")
    return way.format(x=x, c=d.number())


def redistribute(d: Draw) -> str:
    x = d.tensor(0, 1, 2, 3)
    return f"on.redistribute({x}, [{', '.join(map(show, d.placements(x.ndim, x.dtype)))}])"


VIEWS = (*[view] * 6, reshape, reshape, merge, unmerge, *[slices] * 4, permute)
JOINS = (cat, cat, stack, fresh)
