"""The simulator as processes would run: where a step fails, all ranks must fail, and alike.

Ranks of the simulator run one after the other, so the first one that fails ends the step, and whether the others would
have failed too is not seen. As processes they would part: one raises, the others wait for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from shardwise.comm import Ranked, shards_of
from shardwise.comm.ranked import join, pick
from shardwise.dispatch.planning.local_calls import EachRank
from shardwise.dispatch.planning.randomness import RandomCall
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.redistribute import Group

_disabled = torch._C.DisableTorchFunctionSubclass


STOPS = (_StopRecomputationError,)
"""What is raised on purpose: a checkpoint stops when it has recomputed the last tensor that it needs, of any rank."""


class RanksApart(Exception):
    """Some ranks failed, and others did not, or with another error."""


@contextmanager
def ranks_compared() -> Iterator[None]:
    """Inside, a step that fails is run again on every rank, to see whether all of them fail alike."""
    steps: dict[tuple[type, str], Any] = {
        (EachRank, "__call__"): _or_together(EachRank.__call__, lambda step, args: (step.function, step.num_ranks)),
        (RandomCall, "__call__"): _or_together(
            RandomCall.__call__, lambda step, args: (step.function, len(step.streams))
        ),
        (Group, "map"): _or_together(Group.map, lambda group, args: (args[0], len(group.mesh.held)), skip=1),
        (Ranked, "__torch_function__"): classmethod(_function),
    }
    before = {(owner, name): owner.__dict__[name] for owner, name in steps}
    try:
        for (owner, name), step in steps.items():
            setattr(owner, name, step)
        yield
    finally:
        for (owner, name), step in before.items():
            setattr(owner, name, step)


def _or_together(plain: Callable[..., Any], parts: Callable[[Any, tuple], tuple[Callable, int]], skip: int = 0) -> Any:
    """A step that runs a function for each rank; `parts` gives the function, and how many ranks there are."""

    def run(step: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(step, *args, **kwargs)
        except STOPS:
            raise
        except Exception:
            function, num_ranks = parts(step, args)
            return together(function, num_ranks, args[skip:], kwargs)

    return run


_plain_function = Ranked.__dict__["__torch_function__"].__func__


def _function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    try:
        return _plain_function(cls, func, types, args, kwargs)
    except STOPS:
        raise
    except Exception:
        num_ranks = max(len(shards_of(x)) for x in flat_tensors((args, kwargs)))
        return together(func, num_ranks, args, kwargs or {})


def together(function: Callable[..., Any], num_ranks: int, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function on every rank's part of its arguments; raise what all of them raise."""
    results: list[Any] = []
    errors: list[Exception | None] = []
    with _disabled():
        for rank in range(num_ranks):
            try:
                results.append(function(*pick(args, rank), **pick(kwargs, rank)))
                errors.append(None)
            except Exception as error:
                errors.append(error)
        first = errors[0]
        if any(type(error) is not type(first) or str(error) != str(first) for error in errors):
            raise RanksApart("; ".join("no error" if error is None else line(error) for error in errors))
        if first is not None:
            raise first
        return join(results) if num_ranks > 1 else results[0]


def line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
