"""A program with a known best schedule, and how to run it: on which port, at which size, beside plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from ranks import fake_world
from shardwise.debug import CommDebugMode
from shardwise.redistribute.backward import buckets
from wire import Collective, Comparison, Schedule, Small, compare

Split = Mapping[str, int]
"""By which tensor dim each mesh axis splits a tensor; axes left out hold it whole."""

PORTS = ("recording", "simulated", "fake")


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a program and of the mesh it runs on. Heads, hidden width and vocabulary follow from the width."""

    batch: int
    seq: int
    width: int
    tp: int = 1
    dp: int = 1
    layers: int = 2
    """Of programs that have some."""

    @property
    def tokens(self) -> int:
        """Of one data-parallel rank."""
        return self.batch * self.seq // self.dp

    @property
    def head_dim(self) -> int:
        return min(128, self.width // 8)

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def hidden(self) -> int:
        return 4 * self.width

    @property
    def vocab(self) -> int:
        return 4 * self.width

    @property
    def activation(self) -> int:
        """Numbers of the residual stream on one data-parallel rank."""
        return self.tokens * self.width

    @property
    def small(self) -> Small:
        return Small(self.tokens, self.width)

    @property
    def is_large(self) -> bool:
        """Too large for anything but meta shards."""
        return self.batch * self.seq * self.width > 1 << 21 or self.width > 1024

    @property
    def is_tiny(self) -> bool:
        return self.width <= 64

    def __str__(self) -> str:
        mesh = " ".join(f"{name} {ranks}" for name, ranks in (("dp", self.dp), ("tp", self.tp)) if ranks > 1)
        return f"{self.batch}×{self.seq}×{self.width} {mesh}" + (f", {self.layers} layers" if self.layers != 2 else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A plain module, how its parameters and inputs are laid out, and what a person would communicate for it.

    The module's forward takes the inputs and returns the loss; where `trains` is not set it returns the output, and
    there is no backward pass.
    """

    name: str
    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size], tuple[Tensor, ...]]
    schedule: Callable[[Size], Schedule]
    sizes: tuple[Size, ...]
    parameters: Mapping[str, Split] = dataclasses.field(default_factory=dict)
    input_splits: Sequence[Split] = ()
    trains: bool = True
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    needs: str = ""
    """A package that it needs, beyond torch."""
    tolerance: float = 1e-6
    """How far, relative to its norm, a gradient may be from plain torch's: rounding, no more."""

    def split_of(self, name: str) -> Split:
        found = [split for pattern, split in self.parameters.items() if fnmatchcase(name, pattern)]
        return found[-1] if found else {}


# --- Meshes ---


@contextmanager
def mesh_on(port: str, size: Size) -> Iterator[Any]:
    """A mesh of the axes that the size has, on one of the ports."""
    axes = {name: ranks for name, ranks in (("dp", size.dp), ("tp", size.tp)) if ranks > 1}
    shape, names = tuple(axes.values()), tuple(axes)
    if port == "recording":
        yield sw.recording(shape, names)
    elif port == "simulated":
        yield sw.simulate(shape, names)
    else:
        with fake_world(0, size.dp * size.tp):
            yield init_device_mesh("cpu", shape, mesh_dim_names=names)


def axis_names(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names if hasattr(mesh, "mesh_dim_names") else mesh.names)


def placements(split: Split, mesh: Any) -> list[sw.Placement]:
    return [sw.Shard(split[name]) if name in split else sw.Replicate() for name in axis_names(mesh)]


def asked(x: Tensor, **split: int) -> Tensor:
    """`x` in other placements where it is distributed, as a person asks for it in the program; plain tensors pass."""
    return x.redistribute(placements=placements(split, x.device_mesh)) if isinstance(x, sw.DTensor) else x


def lay_out(module: nn.Module, program: Program, mesh: Any) -> None:
    """Distribute every parameter and buffer of a module as the program says; tied ones stay tied."""
    laid: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in laid:
            sharded = sw.distribute_tensor(parameter.detach(), mesh, placements(program.split_of(name), mesh))
            laid[id(parameter)] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, laid[id(parameter)])
    for name, buffer in list(module.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, sw.distribute_tensor(buffer, mesh, placements({}, mesh)))


# --- Running ---


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of a program gave."""

    result: Tensor
    gradients: dict[str, Tensor]
    comm: CommDebugMode

    @property
    def schedule(self) -> Schedule:
        directions: tuple[list[Collective], list[Collective]] = [], []
        for note in self.comm.comms:
            directions[note.backward].append(Collective(note.kind, note.bytes, note.ranks))
        return Schedule(*map(tuple, directions))


def made(program: Program, size: Size, *, device: str) -> tuple[nn.Module, list[Tensor]]:
    """The plain module and its inputs; floating-point inputs want gradients, as they do inside a deeper model."""
    torch.manual_seed(0)
    with torch.device(device):
        module, inputs = program.build(size), program.inputs(size)
    return module, [x.requires_grad_(program.trains and x.is_floating_point()) for x in inputs]


def run_plain(program: Program, size: Size) -> Run:
    module, inputs = made(program, size, device="cpu")
    return run(program, module, inputs)


def run_on(port: str, program: Program, size: Size) -> Run:
    with mesh_on(port, size) as mesh:
        module, inputs = made(program, size, device="meta" if port == "recording" else "cpu")
        lay_out(module, program, mesh)
        splits = [*program.input_splits, *[{}] * len(inputs)]
        laid = [
            sw.distribute_tensor(x.detach(), mesh, placements(split, mesh)).requires_grad_(x.requires_grad)
            for x, split in zip(inputs, splits, strict=False)
        ]
        return run(program, module, laid)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Inside, gradients of parameters are reduced one by one, not in buckets, so that each can be seen."""
    before = buckets.FIRST, buckets.LARGEST
    buckets.FIRST = buckets.LARGEST = 0
    try:
        yield
    finally:
        buckets.FIRST, buckets.LARGEST = before


def run(program: Program, module: nn.Module, inputs: list[Tensor]) -> Run:
    with one_by_one(), CommDebugMode() as comm, program.inside():
        if program.trains:
            result = module(*inputs)
            result.backward()
        else:
            with torch.no_grad():
                result = module(*inputs)
    wants = dict(module.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    gradients = {name: x.grad for name, x in wants.items() if x.grad is not None}
    return Run(result.detach(), gradients, comm)


def judge(program: Program, size: Size, found: Schedule) -> tuple[Comparison, Comparison]:
    """Forward and backward, against the person's."""
    person = program.schedule(size)
    return (
        compare(person.forward, found.forward, size.small, backward=False),
        compare(person.backward, found.backward, size.small, backward=True),
    )
