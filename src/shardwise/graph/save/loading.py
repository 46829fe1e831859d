"""Programs that were saved, bound to a function, and to what it reaches in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import CaptureWarning, SavedProgramError
from shardwise.graph.compile import BRANCHES, Compiled, make_of
from shardwise.graph.guards.call import Call
from shardwise.graph.guards.guards import FIRST, Guards
from shardwise.graph.guards.kinds import kind_of
from shardwise.graph.guards.names import named_tensors
from shardwise.graph.program import Program
from shardwise.graph.run.run import Make, holds
from shardwise.graph.save.files import read
from shardwise.graph.save.needs import argument_said, difference, mesh_said, needs_of, tensor_said
from shardwise.graph.save.programs import ProgramReader
from shardwise.graph.save.values import NO_PROGRAM
from shardwise.layout import Mesh

_disabled = torch._C.DisableTorchFunctionSubclass


def load(
    path: str | Path,
    target: Callable[..., Any],
    *,
    backend: str = "inductor",
    cuda_graph: bool | str = "auto",
    strict: bool = True,
) -> Any:
    """What `shardwise.compile` returns, with programs that were saved in the place of such as are captured.

    They are bound at the first call, by names: parameters and buffers by the paths of their modules, the state of
    optimizers by the names of parameters, meshes by what is on them. All else that a program depends on must be as it
    was: layouts, shapes, plain values, the code of the function. If anything is not, every rank raises
    `SavedProgramError`, which says what; with `strict=False` the call is captured instead.

    Reading a file runs nothing. But a program is code, which may call any op that torch has: load those of people
    whom you trust.

    >>> import tempfile, torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> model = sw.distribute_module(torch.nn.Linear(4, 4), mesh)
    >>> def total(model, x): return model(x).square().sum()
    >>> x = sw.distribute_tensor(torch.ones(2, 4), mesh)
    >>> compiled = sw.compile(total, backend="fx")
    >>> with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    ...     wanted = compiled(model, x)
    ...     compiled.save(folder)
    ...     found = sw.graph.load(folder, total, backend="fx")(model, x)
    >>> torch.equal(found.to_local(), wanted.to_local())
    True
    """
    make = make_of(backend, cuda_graph)
    if isinstance(target, nn.Module):
        target._compiled_call_impl = Loaded(Path(path), target._call_impl, make, strict=strict)
        return target
    return Loaded(Path(path), target, make, strict=strict)


class Loaded(Compiled):
    """A function with programs from a folder."""

    failed_elsewhere = SavedProgramError("no saved program serves this call on another rank, whose error says why")

    def __init__(self, folder: Path, function: Callable[..., Any], backend: Make, *, strict: bool) -> None:
        super().__init__(function, backend, passes=(), fullgraph=True)  # what is saved has been through them
        self.folder, self.strict = folder, strict
        self.origin = f"loaded from {folder}"
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            _ = self.written  # several processes find out together, at the first call

    @cached_property
    def written(self) -> tuple[list[dict[str, Any]], list[Tensor]]:
        return read(self.folder)

    def _find(self, call: Call) -> Program:
        programs, constants = self.written
        why = []
        for number, entry in enumerate(programs):
            try:
                with _reading():
                    return bound(entry, constants, call)
            except SavedProgramError as error:
                why.append(str(error) if len(programs) == 1 else f"program {number + 1}: {error}")
        words = f"no program in {self.folder} serves this call of {self.name}: {'; '.join(why)}"
        if self.strict:
            raise SavedProgramError(words)
        warnings.warn(f"{words}. It is captured instead", CaptureWarning, stacklevel=2)
        return super()._find(call)


@contextmanager
def _reading() -> Iterator[None]:
    """A file whose digest is right may still be one that somebody made otherwise than by saving a program."""
    try:
        yield
    except SavedProgramError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, AssertionError) as error:
        raise SavedProgramError(f"{NO_PROGRAM}: {type(error).__name__}: {error}") from error


def bound(entry: Mapping[str, Any], constants: list[Tensor], call: Call) -> Program:
    """A saved program on what a call reaches, if all is as it was. `constants` are those of all programs."""
    call.lookups.names.update(entry["asked"])
    call = call.with_lookups()
    tensors = named_tensors(call.reached)
    needs = entry["needs"]
    for name in entry["objects"]:
        if name not in tensors:
            raise SavedProgramError(_missing(name, tensors))
        if (now := tensor_said(tensors[name])) != needs[name]:
            raise SavedProgramError(f"{name} was {needs[name]}, and is {now} now")
    _check_arguments(needs, call)
    optimizers = {
        name: call.reached.optimizers[key] for key, name in call.reached.names.items() if key in call.reached.optimizers
    }
    meshes = _Meshes(entry, tensors, call)
    first, last = entry["constants"]
    own = dict(enumerate(constants[first:last]))
    reader = ProgramReader(entry["shared"], own, tensors, optimizers, meshes.root)
    program = reader.read(entry["program"])
    guards = Guards(call, program, FIRST)
    differs = difference(needs, needs_of(guards, {name: tensors[name] for name in entry["objects"]}))
    differs = differs or guards.miss(call.leaves, call.spec)
    if differs is None and not holds(program, call.leaves):
        differs = BRANCHES
    if differs is not None:
        raise SavedProgramError(differs)
    return program


def _missing(name: str, tensors: Mapping[str, Tensor]) -> str:
    kept = name.partition("[")[0].rpartition(".")[0]
    if "[" in name and not any(other.startswith(f"{kept}.") and "[" in other for other in tensors):
        return f"{name} is missing: load the optimizer's state, or take a step, before the program"
    return f"{name} is missing: nothing is called so here"


def _check_arguments(needs: Mapping[str, str], call: Call) -> None:
    here = {"the arguments": str(call.spec)}
    with _disabled():
        here |= {name: argument_said(kind_of(leaf)) for name, leaf in zip(call.names, call.leaves, strict=True)}
    for name, now in here.items():
        if (was := needs.get(name)) != now:
            raise SavedProgramError(f"{name} was {was}, and is {now} now" if was else f"{name} was not there")


class _Meshes:
    """The meshes of a program, by their numbers: those that the tensors are on which were on them."""

    def __init__(self, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], call: Call) -> None:
        self.said: list[str] = entry["meshes"]
        self.call = call
        self.found: dict[int, Mesh] = {}
        placed = [(number, tensors[name]) for name, number in entry["objects"].items()]
        placed += zip(entry["arguments"], call.leaves, strict=True)
        for number, x in placed:
            if number is not None:
                root = x._layout.mesh.root  # type: ignore[attr-defined]
                if self.found.setdefault(number, root) is not root:
                    raise SavedProgramError(f"tensors that were on one mesh {self.said[number]} are on several now")

    def root(self, number: int) -> Mesh:
        if number not in self.found:
            alike = [mesh for mesh in self.call.meshes() if mesh_said(mesh) == self.said[number]]
            if not alike:
                raise SavedProgramError(f"nothing is on a mesh {self.said[number]}, on which the program communicates")
            self.found[number] = alike[0]
        return self.found[number]
