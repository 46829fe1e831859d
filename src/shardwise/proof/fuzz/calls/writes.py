"""Writing in place: to tensors, through views, to copies, to parts."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.proof.fuzz.calls.shapes import cut
from shardwise.proof.fuzz.draw import Draw, Maker, Refused, Var
from shardwise.proof.fuzz.program import Line

VIEWS = """
{x} | {x} | {x} | {x}.detach() | {x}[{i}] | {x}.select({d}, {i}) | {x}.view(-1) | {x}.flatten() | {x}.reshape(-1)
{x}.ravel() | {x}.transpose({d}, -1) | {x}.unbind({d})[0] | {x}.chunk(2, {d})[-1] | {x}.select({d}, {i}).contiguous()
{x}.select({d}, {i}).detach() | {x}.narrow({d}, 0, 1) | {x}.flatten(0, 1)[{i}] | {x}.diagonal() | {x}.T.contiguous()
{x}.select({d}, {i}).reshape(-1) | {x}.select({d}, {i}).flatten() | {x}.select({d}, {i}).ravel() | {x}.data
{x}.unsqueeze({d}) | {x}.squeeze() | {x}.expand_as({x}) | {x}.view_as({x}) | {x}.clone() | {x}.contiguous()
"""
ONTO = """
.add_({c}) | .mul_({c}) | .zero_() | .fill_({c}) | .sub_({y}) | .copy_({y}) | .mul_({y}) | .add_({y}, alpha={c})
.tanh_() | .neg_() | .div_(2) | .sigmoid_() | .square_() | .addcmul_({y}, {y}) | .lerp_({y}, 0.5) | .cumsum_(0)
"""
INDEXED = """
{x}.index_add_({d}, {i}, {s}) | {x}.index_fill_({d}, {i}, 0.5) | {x}.masked_fill_({m}, {c})
{x}.index_put_(({j},), {t}, accumulate=True) | {x}.clamp_(-2, 2)
"""


def write(d: Draw) -> Line:
    target = _target(d)
    onto, number, source = d.way(ONTO), d.number(), d.fit(target.shape, target.dtype)
    refuse_overlap(target.value, source.value)
    return d.maybe_unrecorded(target + onto.format(c=number, y=source))


def _target(d: Draw) -> Var:
    """Something to write to: a tensor, or what a view of it, or a copy, is."""
    x = d.target(1, 2, 3)
    dim = d.dim(x)
    text = d.way(VIEWS).format(x=x, d=dim, i=d.chance.randrange(max(x.shape[dim], 1)))
    if text.endswith(".data") and is_recorded(d, x):
        raise Refused("what a backward pass saved of it would change, or would not, without a word")
    with torch.no_grad():
        return Var.of(text, eval(text, d.run.names))


def is_recorded(d: Draw, x: Var) -> bool:
    """Whether a tensor, or another that shares its memory, is part of the graph or was given to a call that is."""
    values = d.tensors
    storage = x.value.untyped_storage().data_ptr()
    shared = {name for name, y in values.items() if y.untyped_storage().data_ptr() == storage}
    near = shared.union(*({*part.takes, *part.gives} for part in d.parts if shared & part.takes))
    return any(values[name].requires_grad for name in near & values.keys())


def refuse_overlap(target: Tensor, source: Tensor, *, by_index: bool = False) -> None:
    """Raise if a write changes what it has yet to read: what comes of it is torch's own affair. What goes element by
    element may read what it writes, what goes by an index reads it in another place."""
    if target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        written, read = _places(target), _places(source)
        if (by_index or written != read) and not set(written).isdisjoint(read):
            raise Refused("source and target overlap")


def _places(x: Tensor) -> list[int]:
    """Where in its storage the elements of a tensor are."""
    every = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    return every.as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()


def assign(d: Draw) -> Line:
    x = d.target(1, 2, 3)
    cuts = ", ".join(cut(d, size) for size in x.shape[: d.chance.randint(1, x.ndim)])
    with torch.no_grad():
        part = eval(f"{x}[{cuts}]", d.run.names)
    number, source = str(d.number()), d.fit(part.shape, x.dtype)
    refuse_overlap(part, source.value)
    value = d.pick(number, source)
    return d.maybe_unrecorded(f"{x}[{cuts}] {d.pick('=', '=', '+=', '*=')} {value}")


def assign_by_tensor(d: Draw) -> Line:
    x = d.target(1, 2)
    index = d.index(d.pick((), (1,)), x.shape[0])
    places = d.pick(str(index), str(d.mask(x.shape)))
    return d.maybe_unrecorded(f"{x}[{places}] = {d.number()}")


def indexed(d: Draw) -> Line:
    x = d.target(1, 2, 3)
    dim = d.chance.randrange(x.ndim)
    index = d.index((d.size(),), x.shape[dim])
    source = d.fit((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]), x.dtype)
    first = d.index((1,), x.shape[0])
    one = d.fit((1, *x.shape[1:]), x.dtype)
    text = d.way(INDEXED).format(x=x, d=dim, i=index, s=source, m=d.mask(x.shape), c=d.number(), j=first, t=one)
    for read in (source, one):
        if read in text.removeprefix(x):
            refuse_overlap(x.value, read.value, by_index=True)
    return d.maybe_unrecorded(text)


def returned(d: Draw) -> str:
    """The tensor itself, under another name."""
    return d.way("{x}.add_({c}) | {x}.mul_({c}) | {x}[0].mul_({c})").format(x=d.target(1, 2), c=d.number())


CALLS: tuple[Maker, ...] = (*[write] * 7, assign, assign, assign_by_tensor, indexed, returned)
