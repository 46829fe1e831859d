"""Programs as JSON and back. What a program reaches is written by its name, and found by it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from keyword import iskeyword
from typing import Any

from torch import Tensor, fx

from shardwise.comm import shards_of
from shardwise.errors import SavedProgramError
from shardwise.graph.guards.names import Names
from shardwise.graph.guards.values import PLAIN
from shardwise.graph.program import FromGroup, FromObject, Given, Part, Program, Result
from shardwise.graph.save.values import NO_PROGRAM, Reader, Writer
from shardwise.layout import Mesh

META = ("facts", "line", "layout", "comm", "number", "data", "host", "backward", "constant")
"""What of a node's meta is kept."""
OPS = ("placeholder", "call_function", "output")
"""What nodes are."""


class ProgramWriter:
    """Writes programs, with the tensors that they made of numbers of Python's, and the meshes that they run on."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.values = Writer(self._refer)
        self.constants: list[Tensor] = []
        self.meshes: list[Mesh] = []
        self.objects: dict[str, Tensor] = {}
        """What is reached, by its first name."""

    def write(self, program: Program) -> dict[str, Any]:
        _check_results(program.results)
        return {x.name: self.values.write(getattr(program, x.name)) for x in fields(program)}

    def _refer(self, x: Any) -> dict[str, Any]:
        match x:
            case Part():
                return {"Part": self._part(x)}
            case FromObject(owner=owner, shard=shard):
                return {"object": [self._named(owner), shard]}
            case FromGroup(optimizer, index, name, position):
                return {"group": [self.names.of_optimizer(optimizer), index, name, position]}
            case Mesh():
                return {"mesh": [self.number_of(x), list(x.names)]}
            case Tensor():
                raise SavedProgramError(
                    f"a tensor of shape {list(x.shape)} among the arguments of an op cannot be saved"
                )
        raise SavedProgramError(f"{x!r}, a {type(x).__name__}, is part of the program and cannot be saved")

    def number_of(self, mesh: Mesh) -> int:
        """The number of the whole mesh."""
        if mesh.root not in self.meshes:
            self.meshes.append(mesh.root)
        return self.meshes.index(mesh.root)

    def _named(self, x: Tensor) -> str:
        names = self.names.all_of(x)
        if not names:
            raise SavedProgramError(
                f"the program uses a tensor of shape {list(x.shape)} for which there is no name by which another "
                f"process would find it: keep it in a module, a variable, a list or a dict, or hand it in"
            )
        self.objects[names[0]] = x
        return names[0]

    def _part(self, part: Part) -> dict[str, Any]:
        self.values.nodes = {node: number for number, node in enumerate(part.graph.nodes)}
        inputs = (node for node in part.graph.nodes if node.op == "placeholder")
        sources = [self._source(node, source) for node, source in zip(inputs, part.sources, strict=True)]
        return {
            "nodes": [self._node(node) for node in part.graph.nodes],
            "sources": sources,
            "overwritten": sorted(part.overwritten),
        }

    def _source(self, node: fx.Node, source: Any) -> Any:
        if node.meta.get("constant") and isinstance(source, FromObject):
            self.constants.append(source.tensor)
            return {"constant": len(self.constants) - 1}
        return self.values.write(source)

    def _node(self, node: fx.Node) -> list[Any]:
        target: Any = node.target
        is_called = node.op == "call_function"
        meta = {key: self.values.write(node.meta[key]) for key in META if key in node.meta}
        given = [self.values.write(list(node.args)), self.values.write(dict(node.kwargs))["dict"]]
        return [node.op, node.name, self.values.write(target) if is_called else target, *given, meta]


class ProgramReader:
    """Reads programs. Tensors, optimizers and meshes are found by their names and numbers in this process."""

    def __init__(
        self,
        shared: list[Any],
        constants: Mapping[int, Tensor],
        tensors: Mapping[str, Tensor],
        optimizers: Mapping[str, Any],
        mesh: Callable[[int], Mesh],
    ) -> None:
        self.constants, self.tensors, self.optimizers, self.mesh = constants, tensors, optimizers, mesh
        self.values = Reader(shared, self._find)

    def read(self, written: dict[str, Any]) -> Program:
        return Program(**{key: self.values.read(value) for key, value in written.items()})

    def _find(self, tag: str, value: Any) -> Any:
        match tag:
            case "Part":
                return self._part(value)
            case "object":
                owner = self.tensors[value[0]]
                return FromObject(shards_of(owner)[value[1]], owner, value[1])
            case "constant":
                return FromObject(self.constants[value], self.constants[value], 0)
            case "group":
                return FromGroup(self.optimizers[value[0]], *value[1:])
            case "mesh":
                return self.mesh(value[0])[tuple(value[1])]
        raise SavedProgramError(f"the file has a {tag!r}, which this version does not know")

    def _part(self, written: dict[str, Any]) -> Part:
        graph = fx.Graph()
        self.values.nodes = []
        for op, name, target, args, options, meta in written["nodes"]:
            self.values.nodes.append(self._node(graph, op, name, target, args, options, meta))
        return Part(graph, tuple(self.values.read(written["sources"])), frozenset(written["overwritten"]))

    def _node(self, graph: fx.Graph, op: str, name: str, target: Any, args: Any, options: Any, meta: Any) -> fx.Node:
        read = self.values.read
        kwargs = {key: read(value) for key, value in options}
        _check_names(op, name, target, kwargs)
        called = read(target) if op == "call_function" else target
        node = graph.create_node(op, called, tuple(read(args)), kwargs, name=name)
        node.meta.update({key: read(value) for key, value in meta.items()})
        return node


def _check_results(results: Any) -> None:
    """What a program returns is made of Python's own containers, so that a file need not name a class."""
    if type(results) in (tuple, list, dict):
        for result in results.values() if isinstance(results, dict) else results:
            _check_results(result)
    elif isinstance(results, (tuple, list, dict)) or not isinstance(results, (Result, Given, *PLAIN)):
        raise SavedProgramError(
            f"the program returns a {type(results).__name__}, which cannot be saved: return tensors in tuples, lists "
            f"and dicts"
        )


def _check_names(op: Any, name: Any, target: Any, kwargs: Mapping[Any, Any]) -> None:
    """Graphs run as functions of Python's, in which these stand as they are: they must be names, and nothing else."""
    names = [name, *kwargs, *([target] if op == "placeholder" else [])]
    if op not in OPS or not all(isinstance(x, str) and x.isidentifier() and not iskeyword(x) for x in names):
        raise SavedProgramError(f"{NO_PROGRAM}: a node {name!r} that is a {op!r} of {names[1:]}")
