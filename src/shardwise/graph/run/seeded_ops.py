"""Ops that draw from streams of their own, as ops that compilers take as they are. They write to nothing: what the op
itself writes to is given back."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.nodes import Seeded

_CPU_STATE, _OTHER_STATE = torch.default_generator.get_state().numel(), 16
"""Bytes of the state of a generator."""

_library = torch.library.Library("shardwise_seeded", "DEF")


@lru_cache(maxsize=1024)
def seeded_op(seeded: Seeded) -> Callable[..., Any]:
    """An op of ours that is given the seed, or a state, as a tensor before the arguments of the op that draws."""
    name = f"{seeded.op._schema.name.split('::')[-1]}_{seeded.op._overloadname}_{int(seeded.goes_on)}"
    packet = getattr(torch.ops.shardwise_seeded, name, None)
    op = _defined(name, seeded) if packet is None else packet.default

    def run(start: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = op(start, seeded.stream, *args, **kwargs)
        results, state = (found[:-1], found[-1]) if seeded.goes_on else (_as_tuple(found), None)
        if seeded.op._schema.is_mutable:
            results = (args[0].copy_(results[0]),)
        out = results[0] if len(results) == 1 else tuple(results)
        return (out, state) if seeded.goes_on else out

    return run


def _defined(name: str, seeded: Seeded) -> Any:
    op, goes_on = seeded.op, seeded.goes_on
    arguments, results = re.sub(r"\(\w+!?\)", "", str(op._schema).split("(", 1)[1]).rsplit(") -> ", 1)
    results = f"({results.strip('()')}, Tensor)" if goes_on else results
    _library.define(f"{name}(Tensor start, int stream, {arguments}) -> {results}")

    def run(start: Tensor, stream: int, *args: Any, **kwargs: Any) -> Any:
        found = Seeded(op, stream, goes_on)(start if start.dim() else int(start), *_own(op, args), **kwargs)
        return (*_as_tuple(found[0]), found[1]) if goes_on else found

    def run_without_data(start: Tensor, stream: int, *args: Any, **kwargs: Any) -> Any:
        found = op(*_own(op, args), **kwargs)
        if not goes_on:
            return found
        on_cpu = next((x.device.type == "cpu" for x in args if isinstance(x, Tensor)), True)
        return *_as_tuple(found), torch.empty(_CPU_STATE if on_cpu else _OTHER_STATE, dtype=torch.uint8)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise_seeded::{name}", run_without_data, lib=_library)
    return getattr(torch.ops.shardwise_seeded, name).default


def _own(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an op that may write to the first."""
    return (args[0].clone(), *args[1:]) if op._schema.is_mutable else args


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)
