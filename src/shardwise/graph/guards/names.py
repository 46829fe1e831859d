"""What the tensors and the numbers that a program is given are called: `model.head.weight`, `optimizer.exp_avg[…]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, optim
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwise.graph.guards.reached import Reached
from shardwise.graph.program import (
    FromArgument,
    FromGradient,
    FromGroup,
    FromHost,
    FromObject,
    FromSaved,
    FromTangent,
    Place,
    Program,
    Source,
)


def named_tensors(reached: Reached) -> dict[str, Tensor]:
    """All tensors that a function reaches, the state of optimizers with them. A tensor may have several names."""
    found = {x.name: x.value for x in reversed(reached.objects) if isinstance(x.value, Tensor)}
    found = dict(reversed(found.items()))  # of two things of one name the first counts
    known = {id(x): name for name, x in reversed(found.items())}
    for key, optimizer in reached.optimizers.items():
        for name, tensor in _kept_by(optimizer, reached.names[key], known):
            found.setdefault(name, tensor)
    return found


def _kept_by(optimizer: optim.Optimizer, name: str, known: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Parameters that nothing else names, tensors among the settings of groups, and the state of each parameter."""
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                known[id(param)] = f"{name}.params[{number}]"
                yield known[id(param)], param
            number += 1
        tensors = {key: value for key, value in group.items() if isinstance(value, Tensor)}
        yield from ((_of_group(name, index, key), value) for key, value in tensors.items())
    for param, state in optimizer.state.items():
        for key, kept in state.items():
            for path, value in tree_flatten_with_path(kept)[0]:
                if isinstance(value, Tensor):
                    yield f"{name}.{key}[{known.get(id(param), '?')}]{keystr(path)}", value


class Names:
    """The names of what a program is given."""

    def __init__(self, program: Program, reached: Reached, leaves: Sequence[str]) -> None:
        self._leaves, self._optimizers = tuple(leaves), reached.names
        places = [place for source in _sources(program) if (place := place_of(source)) is not None]
        owners = {id(place.owner) for place in places if isinstance(place, FromObject)}
        self._tensors: dict[int, list[str]] = {}
        for name, tensor in named_tensors(reached).items():
            if id(tensor) in owners:  # which the program keeps, so that ids stay theirs
                self._tensors.setdefault(id(tensor), []).append(name)

    def leaf(self, number: int) -> str:
        return self._leaves[number] if number < len(self._leaves) else f"argument {number}"

    def all_of(self, x: Any) -> list[str]:
        """The names of a tensor."""
        return self._tensors.get(id(x), [])

    def of_optimizer(self, optimizer: optim.Optimizer) -> str:
        return self._optimizers.get(id(optimizer), "optimizer")

    def of(self, source: Source) -> str:
        """What a person would call an input of a program; "" if it has no name."""
        match source:
            case FromArgument() | FromObject():
                return self.of_place(source)
            case FromGradient(of):
                return f"{self.of_place(of) or 'parameter'}.grad"
            case FromGroup(optimizer, index, name, position):
                found = _of_group(self.of_optimizer(optimizer), index, name)
                return found if position is None else f"{found}[{position}]"
            case FromTangent(number):
                return f"gradient of result {number}"
            case FromHost(number):
                return f"number {number}"
            case FromSaved(number):
                return f"saved {number}"
        raise AssertionError(source)

    def of_place(self, place: Place) -> str:
        if isinstance(place, FromArgument):
            return self.leaf(place.leaf)
        return next(iter(self.all_of(place.owner)), "")


def place_of(source: Source) -> Place | None:
    """Where the tensor is that an input is, or is the gradient of."""
    if isinstance(source, FromGradient):
        return source.of
    return source if isinstance(source, (FromArgument, FromObject)) else None


def _sources(program: Program) -> Iterator[Source]:
    for part in (program.host, *program.ranks, program.conditions):
        yield from part.sources


def _of_group(optimizer: str, index: int, name: str) -> str:
    return f"{optimizer}.param_groups[{index}].{name}" if index else f"{optimizer}.{name}"
