"""Styles by the names that Hugging Face's models have in their plans (`model._tp_plan`).

There, a name says how a layer's weights are sharded, and which tensors its ranks exchange around it. Here the second
follows from the first: what such a model computes with are DTensors, and plain tensors that it makes or is given are
taken as replicated. So most names are one fact: the dim of a weight that is sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from shardwise.comm import AnyMesh, as_mesh
from shardwise.dispatch import implicit_replication
from shardwise.dispatch.interop.compiled import run_as_it_is
from shardwise.dispatch.modes import replicates_implicitly
from shardwise.errors import MeshError, PlanError
from shardwise.layout import Mesh, Placement, Replicate, Shard
from shardwise.parallel.boundary import brought, to_local
from shardwise.parallel.fully_sharded.layouts import is_at_rest
from shardwise.parallel.modules import check_no_parametrizations, place, place_rest
from shardwise.parallel.parts import check_replicated
from shardwise.parallel.style import ParallelStyle
from shardwise.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Meaning:
    """The dim of a weight that is sharded, whether vectors (biases) are, and what input and output are brought to."""

    dim: int | None = None
    vectors: bool = False
    input: Placement | None = None
    output: Placement | None = None

    def placement(self, parameter: Tensor) -> Placement:
        if self.dim is None or (parameter.dim() < 2 and not self.vectors):
            return Replicate()
        return Shard(self.dim % parameter.dim() if parameter.dim() > 1 else 0)


COLUMNS, ROWS, WHOLE = Meaning(-2, vectors=True), Meaning(-1), Meaning(output=Replicate())
WHOLE_COLUMNS, WHOLE_ROWS = replace(COLUMNS, output=Replicate()), replace(ROWS, output=Replicate())
MEANINGS: Mapping[str, Meaning] = {
    **dict.fromkeys(("colwise", "local_colwise", "packed_colwise"), COLUMNS),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output", "embedding_rowwise"), WHOLE_COLUMNS),
    **dict.fromkeys(("local_rowwise", "packed_rowwise", "local_packed_rowwise"), ROWS),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_colwise"), WHOLE_ROWS),
    "grouped_gemm": Meaning(0, vectors=True),
    **dict.fromkeys(("gather", "all_reduce", "moe_tp_experts", "ep_dispatch_experts"), WHOLE),
    "sequence_parallel": Meaning(input=Shard(1), output=Shard(1)),
    **dict.fromkeys(
        ("replicate", "replicated_with_grad_allreduce", "local", "local_params", "mla_kv_a_proj"), Meaning()
    ),
    **dict.fromkeys(("moe_identity_expert", "ep_router"), Meaning()),
}


class NamedStyle(ParallelStyle):
    """A style by its name, for a module's own parameters, or for one of them."""

    def __init__(self, name: str, path: str, parameter: str | None = None) -> None:
        if name not in MEANINGS:
            raise PlanError(
                f"the plan's style {name!r} for {path!r} is unknown; known are {', '.join(sorted(MEANINGS))}"
            )
        self.name, self.meaning, self.parameter = name, MEANINGS[name], parameter

    def __repr__(self) -> str:
        return repr(self.name)

    def _parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        own = dict(module.named_parameters(recurse=False))
        return own if self.parameter is None else {self.parameter: own[self.parameter]}

    def _check(self, path: str, module: nn.Module, device_mesh: AnyMesh) -> None:
        mesh = as_mesh(device_mesh)
        if mesh.ndim != 1:
            raise MeshError(
                f"{path}: {self.name!r} takes a mesh of one axis, such as mesh[{mesh.names[-1]!r}], not {mesh}"
            )
        check_no_parametrizations(
            path or "the model", repr(self.name), module, () if self.meaning.dim is None else None
        )
        for name, tensor in self._parameters(module).items():
            if isinstance(tensor, DTensor) and not is_at_rest(module, tensor, mesh):
                raise PlanError(
                    f"{path}.{name} is a DTensor already, {tensor.layout_on_mesh}; {self.name!r} shards plain ones"
                )

    def _apply(self, module: nn.Module, device_mesh: AnyMesh) -> nn.Module:
        for name, plain in self._parameters(module).items():
            place(plain, [(module, name)], device_mesh, [self.meaning.placement(plain)], self.src_data_rank)
        where = as_mesh(device_mesh), self.path
        if self.parameter is None and self.meaning.input is not None:
            module.register_forward_pre_hook(functools.partial(_bring_input, self.meaning.input, *where))
        if self.parameter is None and self.meaning.output is not None:
            module.register_forward_hook(functools.partial(_bring_output, self.meaning.output, *where))
        return module


def _bring_input(placement: Placement, mesh: Mesh, path: str, module: nn.Module, inputs: tuple) -> tuple:
    return _brought(inputs[0], placement, mesh, path), *inputs[1:]


def _bring_output(placement: Placement, mesh: Mesh, path: str, module: nn.Module, inputs: Any, output: Any) -> Any:
    return _brought(output, placement, mesh, path)


def _brought(x: Any, placement: Placement, mesh: Mesh, path: str) -> Any:
    return brought(x, mesh, path, (placement,), (placement,)) if isinstance(x, DTensor) else x


# The model around


def replicate_inside(module: nn.Module, device_mesh: AnyMesh, src_data_rank: int | None) -> None:
    """Make a model with some DTensors one that is called with plain tensors, and answers with plain ones.

    What it has beside is replicated; plain tensors inside are taken so; outputs are replicated, unless it is called
    with DTensors. Its class is one of the same name, derived from its own: hooks do not go around `generate`.
    """
    place_rest(module, device_mesh, src_data_rank=src_data_rank)
    cls: Any = type(module)
    module.__class__ = _replicating(cls)
    module._replicated_on = as_mesh(device_mesh)  # type: ignore[assignment]


_METHODS = ("forward", "generate", "init_weights")
"""In which of a model's methods plain tensors are replicated ones."""


@functools.cache
def _replicating(cls: Any) -> Any:
    methods = {name: _inside(getattr(cls, name)) for name in _METHODS if hasattr(cls, name)}
    facts = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": _reduce}
    return type(cls.__name__, (cls,), {**methods, **facts})


def _inside(method: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    @functools.wraps(method)
    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not replicates_implicitly():  # else a model around it has compared its own
            check_replicated(type(self).__name__, self._replicated_on, args, kwargs)
        with implicit_replication():
            output = method(self, *args, **kwargs)
        asked = any(isinstance(x, DTensor) for x in (*args, *kwargs.values()))
        return output if asked else _plain(output, self)

    return inside


def _plain(output: Any, module: nn.Module) -> Any:
    """An output with plain tensors in the place of DTensors. What is neither a list nor a dict (a cache) is left."""
    if isinstance(output, DTensor):
        return to_local(output.redistribute(placements=[Replicate()] * output._layout.mesh.ndim), module)
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _plain(value, module)
        return output
    if type(output) in (list, tuple):
        return type(output)(_plain(value, module) for value in output)
    return output


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """A class that has another's name is not found by it."""
    _, _, *rest = cast(tuple, nn.Module.__reduce_ex__(self, protocol))
    return _again, (type(self).__bases__[0],), *rest


def _again(cls: Any) -> nn.Module:
    return object.__new__(_replicating(cls))
