"""Ops that are written in Python, in programs that are given DTensors: these would tell them the shape of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from shardwise.comm.faked import is_faked, plain_alias
from shardwise.graph.program import Part

_Run = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]


def given_shards(run: _Run, parts: Sequence[Part]) -> _Run:
    """What runs parts, with plain tensors for those inputs that such ops look at."""
    looked_at = [_looked_at(part) for part in parts]
    if not any(looked_at):
        return run

    def run_on_shards(inputs: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        given = [list(own) for own in inputs]
        for own, numbers in zip(given, looked_at, strict=True):
            for number in numbers:
                own[number] = _plain(own[number])
        return run(given)

    return run_on_shards


def _looked_at(part: Part) -> list[int]:
    """The inputs that an op in Python is given."""
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    return [number for number, node in enumerate(inputs) if any(map(_is_in_python, node.users))]


def _is_in_python(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace != "aten"


def _plain(x: Any) -> Any:
    return plain_alias(x) if isinstance(x, Tensor) and x.__class__ is not Tensor and not is_faked(x) else x
