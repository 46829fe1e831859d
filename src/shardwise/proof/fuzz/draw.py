"""Drawing a program: calls are drawn one by one and run on one device, and those that torch refuses are drawn again."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.proof.fuzz.program import Leaf, Line, Part, Program, Run

MESHES: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 2), (3,))
SIZES = (1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
FLOATS = (torch.float64, torch.float32)
DTYPES = (*[torch.float64] * 22, torch.float32, torch.int64, torch.bool, torch.complex128)

LARGEST = 1e3
"""Results with larger numbers are not kept: in what is computed from them, rounding would be seen."""
MOST = 300
"""Elements of a result."""
GAP = 1e-5
"""How far apart numbers must be for a choice between them to be the same after rounding."""
CHANGES = re.compile(r"_\(|grad\(")
"""Expressions that change more than their result: the memory or the graph of what there is."""

WATCHES = re.compile(r"\.register_hook\(|\.retain_grad\(")
"""Statements after which somebody is told the gradient of a tensor."""

OWN_FORMULA = re.compile("Norm|Logsumexp|Logcumsumexp|Std")
"""Nodes whose gradient torch writes in terms of their results."""


class Refused(Exception):
    """A call that torch does not take, or whose result would not be of use."""


class Var(str):
    """A name, or an expression, with what it is on one device."""

    value: Tensor

    @staticmethod
    def of(text: str, value: Tensor) -> Var:
        made = Var(text)
        made.value = value
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        return self.value.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype


Maker = Callable[["Draw"], "str | Line"]
"""Draws a call: an expression whose results get names, or a statement."""


def mesh_of(seed: int, number: int) -> tuple[int, ...]:
    """The mesh of a program, known before it is drawn."""
    return random.Random(f"mesh {seed}:{number}").choice(MESHES)


class Draw:
    """A program in the making."""

    def __init__(self, seed: int, number: int) -> None:
        self.chance = random.Random(f"{seed}:{number}")
        self.mesh = mesh_of(seed, number)
        self.sizes = [self.chance.choice(SIZES) for _ in range(3)]
        if self.chance.random() < 0.04:
            self.sizes[0] = 0
        self.parts: list[Part] = []
        self.run = Run()
        self.count = 0
        self.inner: list[Var] | None = None  # inside a function, its arguments
        self.changed = False  # whether the call that is being drawn has changed what there was before

    # Names

    @property
    def pool(self) -> list[Var]:
        """What calls may take: tensors, later ones last."""
        if self.inner is not None:
            return self.inner
        return [Var.of(name, value) for name, value in self.tensors.items()]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All there are, by name."""
        return dict(self.run.tensors([name for part in self.parts for name in part.gives]))

    def name(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def some(self, fits: Callable[[Var], Any]) -> Var | None:
        """A tensor that fits; later ones are likelier."""
        fitting = [x for x in self.pool if fits(x)]
        return self.chance.choices(fitting, [i * i + 3 for i in range(len(fitting))])[0] if fitting else None

    def tensor(self, *dims: int, fits: Callable[[Var], Any] = lambda x: True) -> Var:
        """A tensor of floats with so many dims (by default, at least one) for which more may be asked."""
        wanted = dims or (1, 2, 3, 4)
        found = self.some(lambda x: x.dtype in FLOATS and x.ndim in wanted and fits(x))
        if found is None or (self.chance.random() < 0.1 and self.inner is None):
            found = self.leaf(self.shape(self.chance.choice(wanted)))
        return found

    def fit(self, shape: Sequence[int], dtype: torch.dtype = torch.float64, *, new: float = 0.2) -> Var:
        """A tensor of a shape: one there is, or a new leaf."""
        found = self.some(lambda x: x.shape == tuple(shape) and x.dtype == dtype)
        if found is None or self.chance.random() < new:
            return self.leaf(shape, dtype)
        return found

    def target(self, *dims: int) -> Var:
        """A tensor to write to: not an expanded one, of whose elements torch promises nothing, nor a gradient in memory
        that autograd chose, which may be another's, or repeated."""
        x = self.tensor(*dims)
        if any(size > 1 and not step for size, step in zip(x.shape, x.value.stride(), strict=True)):
            raise Refused("an expanded tensor")
        gradients = [name for part in self.parts if "autograd.grad(" in part.text for name in part.gives]
        memory = x.value.untyped_storage()._cdata
        same = [g for _, g in self.run.tensors(gradients) if g.untyped_storage()._cdata == memory]
        if len(same) > 1 or not all(g.is_contiguous() for g in same):
            raise Refused("where a gradient is in memory is not defined")
        return x

    # Leaves

    def shape(self, num_dims: int) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(num_dims))

    def size(self) -> int:
        return self.chance.choice(self.sizes) if self.chance.random() < 0.7 else self.chance.choice(SIZES)

    def leaf(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float64, *, high: int | None = None, grad: bool = True
    ) -> Var:
        """A new leaf, in any layout."""
        if high is not None and high < 1:
            raise Refused("no number is below it")
        placements = self.placements(len(shape), dtype)
        made = Leaf(
            *(self.name("x"), tuple(shape), dtype, placements, self.chance.randrange(1000)),
            high=high,
            sizes=self.uneven(shape, placements),
            local=self.chance.random() < 0.2,
            grad=dtype in FLOATS and (grad and self.chance.random() < 0.7),
        )
        self.parts.append(made)
        self.run.do(made)
        return Var.of(made.name, self.run.value(made.name))

    def index(self, shape: Sequence[int], high: int) -> Var:
        """Integers from 0 to below `high`."""
        return self.leaf(shape, torch.int64, high=high)

    def mask(self, shape: Sequence[int]) -> Var:
        return self.fit(shape, torch.bool)

    def placements(self, num_dims: int, dtype: torch.dtype = torch.float64) -> tuple[Placement, ...]:
        """One for each axis; what is pending is the same on all of them."""
        pending = self.chance.choice(_PENDING[dtype])
        ways: list[Any] = [Replicate()] * 2 + [Shard(dim) for dim in range(num_dims)] * 2
        ways += [] if pending is None else [Partial(pending)]
        return tuple(self.chance.choice(ways) for _ in self.mesh)

    def uneven(self, shape: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...] | None:
        """Now and then: how many rows each rank brings of the dim that one axis shards."""
        cut = [(axis, p.dim) for axis, p in enumerate(placements) if isinstance(p, Shard)]
        if len(cut) != 1 or self.chance.random() > 0.12:
            return None
        axis, dim = cut[0]
        ends = sorted(self.chance.randint(0, shape[dim]) for _ in range(self.mesh[axis] - 1))
        return tuple(b - a for a, b in zip([0, *ends], [*ends, shape[dim]], strict=True))

    # Numbers

    def dim(self, x: Var) -> int:
        if not x.ndim:
            raise Refused("it has no dims")
        dim = self.chance.randrange(x.ndim)
        return dim - x.ndim if self.chance.random() < 0.2 else dim

    def pick(self, *things: Any) -> Any:
        return self.chance.choice(things)

    def way(self, ways: str) -> str:
        """One of several ways to write a call, set apart by bars and lines."""
        return self.chance.choice(re.split(r" \| |\n", ways.strip()))

    def maybe_unrecorded(self, text: str) -> Line:
        return Line(f"with torch.no_grad(): {text}" if self.likely(0.5) else text)

    def likely(self, share: float) -> bool:
        return self.chance.random() < share

    def number(self) -> float:
        return self.chance.choice((-1.5, -0.5, 0.5, 0.75, 1.25, 2.0))

    # Adding to the program

    def add(self, make: Maker) -> bool:
        """Draw a call and add it, with the leaves it asks for; false if torch, or we, do not want it."""
        kept, self.changed = len(self.parts), False
        try:
            self._add(make)
            self._forget_unused(kept)
        except Exception:  # whatever torch raises for a call that does not fit
            del self.parts[kept:]
            if self.changed:
                self._again()
            return False
        return True

    def _add(self, make: Maker) -> None:
        made = make(self)
        if isinstance(made, str):
            self._give(made)
            return
        self.parts.append(made)
        self.changed = True
        self.run.do(made)
        self._check(list(self.tensors))
        self._check_hidden_views()

    def _forget_unused(self, kept: int) -> None:
        """Drop leaves that were asked for and then not taken."""
        used = self.parts[-1].takes
        self.parts[kept:-1] = [part for part in self.parts[kept:-1] if used & set(part.gives)]

    def _give(self, text: str) -> None:
        """Run an expression, and name what it gives."""
        self.changed |= CHANGES.search(text) is not None
        value = eval(text, self.run.names)
        several = isinstance(value, (tuple, list))
        values = list(value) if several else [value]
        if not 0 < len(values) <= 8:
            raise Refused("too many results")
        if "autograd.grad(" in text:
            self._check_apart(values)
            self._check_wanted(text, values)
        names = [self.name() for _ in values]
        left = ", ".join(names) + ("," if several and len(names) == 1 else "")
        self.parts.append(Line(f"{left} = {text}", tuple(names)))
        self.run.names.update(zip(names, values, strict=True))
        self._check(names)
        if self.changed:
            self._check_hidden_views()

    def _check(self, names: Sequence[str]) -> None:
        for _, x in self.run.tensors(names):
            check_numbers(x)
            if (x.is_leaf or x.retains_grad) and x.grad is not None:
                check_numbers(x.grad)

    def _check_apart(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise where torch hands out the same memory for several gradients: a write to one would reach the others."""
        retained = [x.grad for x in self.tensors.values() if x.is_leaf or x.retains_grad]
        new, old = (
            [x.untyped_storage().data_ptr() for x in found if x is not None and x.numel()]
            for found in (gradients, retained)
        )
        if len(set(new)) < len(new) or set(new) & set(old):
            raise Refused("gradients that share memory")

    def _check_wanted(self, text: str, gradients: Sequence[Tensor | None]) -> None:
        """Raise where a gradient is not strided as a tensor made like its own: torch promises nothing, and where shards
        do not show the strides of a gradient it is given those. What `contiguous` makes of it depends on them. And
        where a result of the same node (`unbind`) retains its gradient: it is kept then, though nobody asked for it."""
        wanted = eval(text[text.index("[") : text.index("]") + 1], self.run.names)
        for x, grad in zip(wanted, gradients, strict=True):
            steps = () if grad is None else zip(grad.stride(), torch.empty_like(x).stride(), x.shape, strict=True)
            if any(a != b and size > 1 for a, b, size in steps):
                raise Refused("a gradient of other strides")
        nodes = {x.grad_fn for x in wanted if x.grad_fn is not None}
        asked = set(map(id, wanted))
        if any(x.retains_grad and x.grad_fn in nodes and id(x) not in asked for x in self.tensors.values()):
            raise Refused("a gradient that is kept for another's sake")

    def _check_hidden_views(self) -> None:
        """Raise where torch's own way of computing something decides which gradients there are. `F.linear` of several
        rows is a view of what it computed. Written to in another view, that has a history in which the result, and
        whoever watches its gradient, has no part; a result that is no view has. A second pass goes through some results
        only because torch's formula for their gradient is written with them."""
        twice = any("create_graph" in part.text for part in self.parts)
        named = {id(x) for x in self.tensors.values()}
        watched = [name for part in self.parts if WATCHES.search(part.text) for name in part.takes]
        for _, x in self.run.tensors(watched):
            base = x._base
            if base is not None and id(base) not in named and type(base.grad_fn).__name__ == "CopySlices":
                raise Refused("a hidden view")
            if twice and OWN_FORMULA.search(type(x.grad_fn).__name__):
                raise Refused("a result in the formula for its gradient")

    def _again(self) -> None:
        """Run what is left, as if what was removed had never been run."""
        self.run = Run()
        for part in self.parts:
            self.run.do(part)

    def program(self) -> Program:
        return Program(self.mesh, tuple(self.parts))


_PENDING: dict[torch.dtype, tuple[str | None, ...]] = {
    torch.float64: ("sum", "sum", "avg", "max", "min"),
    torch.float32: ("sum", "avg", "max", "min"),
    torch.int64: (None, None, "sum", "max"),
    torch.complex128: (None, "sum", "avg"),
    torch.bool: (None,),
}


def check_numbers(x: Tensor) -> None:
    """Raise unless a result is small, in both ways, and finite."""
    if x.numel() > MOST or x.dim() > 5:
        raise Refused("too large")
    if x.numel() and not x.dtype == torch.bool and not float(x.detach().abs().max()) <= LARGEST:  # nor NaN
        raise Refused("numbers too large")


def apart(x: Var, dim: int | None = None) -> Var:
    """The tensor, if no two numbers of it (along a dim) are so near that rounding could change their order."""
    values = x.value.detach()
    ordered = (values.flatten() if dim is None or not x.ndim else values.movedim(dim, -1)).sort(-1).values
    if ordered.shape[-1] > 1 and ordered.numel() and not float(ordered.diff(dim=-1).min()) > GAP:
        raise Refused("a tie")
    return x


def off(x: Var, *points: float) -> Var:
    """The tensor, if no number of it is so near to these that rounding could change on which side it is."""
    for point in points or (0.0,):
        if x.value.numel() and not float((x.value.detach() - point).abs().min()) > GAP:
            raise Refused("a tie")
    return x
