"""The mesh: named axes of ranks, and the port through which those ranks communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from shardwise.errors import MeshError

before_first: list[Callable[[], None]] = []
"""What is done when the first mesh is made, and only then: a program without one is left alone."""

_entered: ContextVar[tuple[Mesh, ...]] = ContextVar("entered", default=())


def entered_mesh() -> Mesh | None:
    """The mesh of the innermost `with mesh:`, if it is one of ours."""
    entered = _entered.get()
    return entered[-1] if entered else None


class Mesh:
    """Named axes over the ranks of a port; immutable, equal by identity.

    `held` lists, for every rank whose data lives in this process, its coordinate on the axes: one entry under
    torchrun, all of them in the simulator. `origin` is the object users see as `DTensor.device_mesh`.
    """

    __slots__ = (
        *("__weakref__", "_submeshes", "captured", "device_type", "held", "names", "ndim", "origin", "port"),
        *("root_axes", "shape"),
    )

    def __init__(
        self,
        port: Any,
        *,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        root_axes: tuple[int, ...],
        held: tuple[tuple[int, ...], ...],
        device_type: str,
        origin: Any = None,
    ) -> None:
        while before_first:
            before_first.pop()()
        self.port = port
        self.names = names
        self.shape, self.ndim = shape, len(shape)
        self.root_axes = root_axes  # which axes of the port each of ours is
        self.held = held
        self.device_type = device_type
        self.origin = self if origin is None else origin
        self._submeshes: dict[tuple[str, ...], Mesh] = {names: self}
        self.captured: Mesh | None = None  # what stands for it while a program is captured

    @property
    def root(self) -> Mesh:
        """The mesh that this one is a part of, or itself."""
        return next(iter(self._submeshes.values()))

    # The names torch's DeviceMesh gives the same facts.

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self.names

    def size(self, mesh_dim: int | None = None) -> int:
        """Ranks along one axis, or in the whole mesh."""
        if mesh_dim is not None:
            return self.shape[mesh_dim]
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def get_coordinate(self) -> list[int]:
        """The coordinate of the first rank held here."""
        return list(self.held[0])

    def get_rank(self) -> int:
        """The number of the first rank held here, in row-major order of the axes."""
        return self.number(self.held[0])

    def number(self, coordinate: Sequence[int], axes: Sequence[int] | None = None) -> int:
        """The number of the rank at a coordinate in row-major order of the axes, or of some of them."""
        found = 0
        for axis in range(self.ndim) if axes is None else axes:
            found = found * self.shape[axis] + coordinate[axis]
        return found

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """The coordinate of the first held rank along one axis (which may be left out on a 1-axis mesh)."""
        if mesh_dim is None:
            if self.ndim != 1:
                raise MeshError(f"get_local_rank needs an axis on a mesh of {self.ndim} axes: one of {self.names}")
            mesh_dim = 0
        return self.held[0][self.axis(mesh_dim)]

    def axis(self, name: int | str) -> int:
        """The index of an axis given by name or (possibly negative) index."""
        if isinstance(name, int):
            if not -self.ndim <= name < self.ndim:
                raise MeshError(f"mesh axis {name} does not exist: {self} has {self.ndim}")
            return name % self.ndim
        if name not in self.names:
            raise MeshError(f"unknown mesh axis {name!r}: {self} has the axes {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """The submesh of the named axes: `mesh["tp"]`, `mesh["dp", "tp"]`."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        axes = [self.axis(name) for name in wanted]
        if wanted == self.names:
            return self
        if not axes or axes != sorted(set(axes)):
            raise MeshError(
                f"a submesh keeps at least one axis, and their order: asked for {wanted}, {self} has {self.names}"
            )
        if wanted not in self._submeshes:
            self.add_submesh(wanted, None if self.origin is self else self.origin[wanted])
        return self._submeshes[wanted]

    def add_submesh(self, names: tuple[str, ...], origin: Any) -> Mesh:
        """The submesh of some axes, which users see as `origin`; the one there is, if there is one."""
        if names not in self._submeshes:
            axes = [self.axis(name) for name in names]
            made = self._submeshes[names] = Mesh(
                self.port,
                names=names,
                shape=tuple(self.shape[axis] for axis in axes),
                root_axes=tuple(self.root_axes[axis] for axis in axes),
                held=tuple(tuple(coordinate[axis] for axis in axes) for coordinate in self.held),
                device_type=self.device_type,
                origin=origin,
            )
            made._submeshes = self._submeshes  # one object per set of axes, however it is reached
        return self._submeshes[names]

    def is_within(self, other: Mesh) -> bool:
        """Whether the ranks that a rank shares this mesh with all share the other one with it too."""
        return self.port is other.port and set(self.root_axes) <= set(other.root_axes)

    def __enter__(self) -> Mesh:
        """Inside, this is the mesh of calls that are given none."""
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a Mesh is not iterable; its axes are mesh.names")

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={extent}" for name, extent in zip(self.names, self.shape, strict=True))
        return f"Mesh({axes})"

    def __reduce__(self) -> Any:
        return self.port.rebuild_mesh(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self
