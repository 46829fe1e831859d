"""A program: leaves and lines of torch code on a mesh. It is its own text: what is printed is what runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.comm import shards_of
from shardwise.dispatch.aliasing.copied_views import StaleView, renew
from shardwise.layout import Partial, Placement, Replicate, Shard
from shardwise.proof.fuzz.leaves import Device

HEADER = """import torch, shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.proof.fuzz.leaves import Device
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint"""

NAME = re.compile(r"\b[xvo]\d+\b")
"""Names that programs give: x0 a leaf, v0 a result, o0 an optimizer."""


@dataclass(frozen=True)
class Line:
    """A statement, and the names it gives."""

    text: str
    gives: tuple[str, ...] = ()

    @property
    def takes(self) -> set[str]:
        """The names it uses."""
        return set(NAME.findall(self.text)) - set(self.gives)


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program begins with."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    seed: int
    high: int | None = None
    sizes: tuple[int, ...] | None = None
    local: bool = False
    grad: bool = False

    @property
    def gives(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def takes(self) -> set[str]:
        return set()

    @property
    def text(self) -> str:
        made = f"leaf({self.shape}, {self.dtype}" if self.high is None else f"index({self.shape}, {self.high}"
        options = {"sizes": self.sizes, "local": self.local}
        said = "".join(f", {name}={value}" for name, value in options.items() if value not in (None, False))
        where = ", ".join(map(show, self.placements))
        return f"{self.name} = on.{made}, [{where}], seed={self.seed}{said}){'.requires_grad_()' if self.grad else ''}"


Part = Line | Leaf


def show(placement: Placement) -> str:
    """A placement as it is written."""
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else repr(placement)


@dataclass(frozen=True)
class Program:
    """A mesh, and what runs on it."""

    mesh: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The program as one could paste it."""
        return f"{HEADER}\n\n{self.body}"

    @property
    def body(self) -> str:
        """The program without what it imports."""
        first = f"on = Device(sw.simulate({self.mesh}))  # Device(None): one device"
        return "\n".join([first, *(part.text for part in self.parts)])

    def without(self, index: int) -> Program:
        """Without a part, and all that needs what it gives."""
        gone: set[str] = set()
        kept = []
        for i, part in enumerate(self.parts):
            if i == index or part.takes & gone:
                gone |= set(part.gives)
            else:
                kept.append(part)
        return replace(self, parts=tuple(kept))

    def with_part(self, index: int, part: Part) -> Program:
        return replace(self, parts=(*self.parts[:index], part, *self.parts[index + 1 :]))

    def in_double_precision(self) -> Program:
        """The same program where rounding cannot be what differs."""
        return replace(self, parts=tuple(map(_in_double_precision, self.parts)))

    @property
    def has_single_precision(self) -> bool:
        return any("float32" in part.text for part in self.parts)


def _in_double_precision(part: Part) -> Part:
    if isinstance(part, Line):
        return replace(part, text=part.text.replace("float32", "float64"))
    return replace(part, dtype=torch.float64) if part.dtype == torch.float32 else part


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, text, "exec")


def look_back(x: Tensor) -> None:
    """Ask for the history of a tensor, as anyone may. Torch then brings that of a view up to date, by which it loses
    or keeps a gradient; and a hook on a view that is not up to date kills the process. Some views have no history, once
    what they are views of was written to. A stale view whose gradient somebody waits for is renewed by that; others
    are left to their next use."""
    with torch._C.DisableTorchFunctionSubclass():
        is_watched = x.retains_grad or x._backward_hooks
    if isinstance(x, StaleView) and is_watched:
        renew(x)
    if not isinstance(x, StaleView):
        with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError):
            for shard in shards_of(x):
                shard.grad_fn  # noqa: B018


class Run:
    """A program that is being run: its names."""

    def __init__(self, mesh: Any = None) -> None:
        self.names: dict[str, Any] = {
            **{"torch": torch, "F": F, "checkpoint": checkpoint, "on": Device(mesh)},
            **{"Partial": Partial, "Replicate": Replicate, "Shard": Shard},
        }

    def do(self, part: Part) -> None:
        for _, x in self.tensors(list(self.names)):
            look_back(x)
        exec(_compiled(part.text), self.names)

    def value(self, name: str) -> Any:
        return self.names[name]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Those of some names that are tensors."""
        for name in names:
            value = self.names.get(name)
            if isinstance(value, Tensor):
                yield name, value
