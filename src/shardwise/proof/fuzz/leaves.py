"""Where a program's data comes from: tensors that follow from a seed, on one device or laid out on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import as_mesh, ranked
from shardwise.layout import Layout, Partial, Placement
from shardwise.proof.kit.placing import shards_of_whole
from shardwise.tensor import DTensor, distribute_tensor


class Device:
    """What makes a program's leaves: on one device without a mesh, else on the mesh. The values are the same.

    >>> import shardwise as sw
    >>> Device(None).leaf((2, 3), torch.float64, seed=1).equal(
    ...     Device(sw.simulate((2,))).leaf((2, 3), torch.float64, [sw.Partial("max")], seed=1).full_tensor())
    True
    """

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = None if mesh is None else as_mesh(mesh)

    def leaf(
        self, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement] = (), *, seed: int, **local: Any
    ) -> Tensor:
        """A leaf of the graph: numbers of either sign."""
        return self._placed(values(shape, dtype, seed), placements, seed, **local)

    def index(
        self, shape: Sequence[int], high: int, placements: Sequence[Placement] = (), *, seed: int, **local: Any
    ) -> Tensor:
        """Integers from 0 to below `high`."""
        whole = torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
        return self._placed(whole, placements, seed, **local)

    def _placed(
        self,
        whole: Tensor,
        placements: Sequence[Placement],
        seed: int,
        *,
        sizes: Sequence[int] | None = None,
        local: bool = False,
    ) -> Tensor:
        """`sizes`: how many rows each rank brings of the one dim that is sharded; `local`: the ranks bring their shards
        themselves."""
        if self.mesh is None:
            return whole
        if sizes is None and not local and not any(isinstance(p, Partial) for p in placements):
            return distribute_tensor(whole, self.mesh, list(placements))
        layout = Layout.of(self.mesh, whole.shape, list(placements))
        if sizes is not None:
            rows = [tuple(sizes) if axes else None for axes in layout.splits]
            layout = Layout(self.mesh, whole.shape, layout.splits, layout.pending, rows)
        shards = shards_of_whole(whole, layout, seed + 1)
        assert shards is not None
        brought = ranked(shards) if len(shards) > 1 else shards[0]
        shape = list(whole.shape)
        return DTensor.from_local(brought, self.mesh, list(placements), run_check=sizes is not None, shape=shape)

    def redistribute(self, x: Tensor, placements: Sequence[Placement]) -> Tensor:
        """A copy in other placements. It is contiguous, as what is moved need not have the strides of its source."""
        if not isinstance(x, DTensor) or x.placements == tuple(placements):
            return x.clone(memory_format=torch.contiguous_format)
        return x.redistribute(placements=list(placements)).contiguous()


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of about 1, of either sign, none near 0: what comes of them is far from overflow and from ties."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.6
    if dtype.is_complex:
        return torch.complex(_numbers(shape, generator), _numbers(shape, generator)).to(dtype)
    if dtype.is_floating_point:
        return _numbers(shape, generator).to(dtype)
    return torch.randint(-3, 4, shape, generator=generator, dtype=dtype)


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    size = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.2 + 0.3
    return torch.where(torch.rand(shape, generator=generator) < 0.5, size, -size)
