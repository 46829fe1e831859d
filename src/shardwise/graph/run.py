"""Running a program: its inputs are gathered, the graph runs on shards, and what it leaves is put where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from shardwise.comm import ranked, shards_of
from shardwise.graph.program import FromArgument, FromGradient, FromGroup, FromObject, Given, Place, Program, Result, Source
from shardwise.tensor import wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]

Leaves = Sequence[Any]
"""What a call is given, without its structure."""


def by_fx(graph: fx.Graph) -> Callable[..., Any]:
    """Node by node, as torch runs them: bit for bit what the program does without being captured."""
    return fx.GraphModule(nn.Module(), graph).forward


class Run:
    """A program that is ready to run, by whatever way its graph is run."""

    def __init__(self, program: Program, graph: Callable[..., Any]) -> None:
        self.program = program
        self.graph = graph
        self._inputs = [_reader(source) for source in program.sources]

    def __call__(self, leaves: Leaves) -> Any:
        with _disabled(), torch.no_grad():
            outputs = self.graph(*[read(leaves) for read in self._inputs])
            for gradient in self.program.gradients:
                grad = None if gradient.output is None else outputs[gradient.output]
                _set_grad(_shard_at(gradient.of, leaves), grad)
            return _returned(self.program.results, outputs, leaves)


def _reader(source: Source) -> Callable[[Leaves], Any]:
    match source:
        case FromArgument(leaf, 0):
            return lambda leaves: leaves[leaf]
        case FromArgument(leaf, shard):
            return lambda leaves: leaves[leaf].__dict__["_peers"][shard - 1]
        case FromObject(tensor):
            return lambda leaves: tensor
        case FromGradient(of):
            return lambda leaves: _get_grad(_shard_at(of, leaves))
        case FromGroup(optimizer, index, name):
            return lambda leaves: optimizer.param_groups[index][name]


def _shard_at(place: Place, leaves: Leaves) -> Tensor:
    return place.tensor if isinstance(place, FromObject) else shards_of(leaves[place.leaf])[place.shard]


def _returned(results: Any, outputs: Sequence[Any], leaves: Leaves) -> Any:
    def given(result: Given) -> Tensor:
        place = result.place
        return leaves[place.leaf] if isinstance(place, FromArgument) else place.tensor

    def made(result: Result) -> Any:
        shards = [outputs[number] for number in result.shards]
        if not isinstance(shards[0], Tensor):
            return shards[0]
        local = shards[0] if len(shards) == 1 else ranked(shards)
        return local if result.layout is None else wrap(local, result.layout)

    return tree_map_only(Given, given, tree_map_only(Result, made, results))
