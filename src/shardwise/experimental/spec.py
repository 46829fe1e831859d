"""What a sharding rule in torch's form is given for each tensor argument."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.layout import Layout, Placement
from shardwise.rules import Value


class RuleError(ShardwiseError, ValueError):
    """A sharding rule that does not fit its op."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor before it has a layout."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class TensorSpec:
    """A tensor argument as a rule's function sees it: the global tensor, without values, and its layout now.

    A function that lists all ways need not look at `placements`; the cheapest is chosen. Inside functions made of
    several ops a tensor that the op gets from another one has no layout yet, and is described as replicated.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Value) -> None:
        self._value = value

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._value.shape)

    @property
    def ndim(self) -> int:
        return self._value.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self._value.dtype

    @property
    def tensor_meta(self) -> TensorMeta:
        stride = torch.empty(self._value.shape, device="meta").stride()
        return TensorMeta(self.shape, stride, self._value.dtype)

    @property
    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    @property
    def _layout(self) -> Layout:
        layout = self._value.layout
        if layout is None:
            raise RuleError(
                "a sharding rule that is judged by samples lists every way to run its op along one mesh axis, wherever "
                "the tensors are now: mesh and placements are not known to it. Return all ways; the cheapest is chosen"
            )
        return layout

    @property
    def mesh(self) -> Any:
        return self._layout.mesh.origin

    device_mesh = mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._layout.placements

    @property
    def dim_map(self) -> list[int]:
        """For each dim the mesh axis that splits it (the first, where several do), or -1."""
        return [axes[0] if axes else -1 for axes in self._layout.splits]

    @property
    def num_shards_map(self) -> list[int]:
        """For each dim, in how many pieces it is split."""
        return [math.prod(self._layout.mesh.shape[axis] for axis in axes) for axes in self._layout.splits]

    @property
    def num_shards(self) -> int:
        return math.prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        """The mesh axes along which a reduction is pending."""
        return [axis for axis, pending in enumerate(self._layout.pending) if pending is not None]

    def is_replicated(self) -> bool:
        return self._layout.replicated

    def is_sharded(self) -> bool:
        return any(self._layout.splits)

    def __getattr__(self, name: str) -> Any:
        known = sorted(name for name in vars(TensorSpec) if not name.startswith("_"))
        raise AttributeError(f"a tensor in a sharding rule has no {name}, but {', '.join(known)}")

    def __repr__(self) -> str:
        return f"TensorSpec({list(self.shape)}, {self.dtype})"
