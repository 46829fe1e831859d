"""What Python changes beside tensors while a function is captured: runs of the program would not do it again, so it is
undone, and said."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

from shardwise.errors import CaptureError
from shardwise.graph.guards.groups import of_groups
from shardwise.graph.guards.iterators import may_be_taken
from shardwise.graph.guards.places import Attributes, Cell
from shardwise.graph.guards.reached import Found, Reached
from shardwise.graph.guards.values import is_same


class MakesState(CaptureError):
    """An optimizer would make state of tensors without data: the call is to run as it is."""


class Before:
    """What a function reaches, as it was before it ran."""

    def __init__(self, reached: Reached) -> None:
        for name in reached.taken:
            raise may_be_taken(name)
        modules = [(module, reached.names[key]) for key, module in reached.modules.items()]
        self._holders = [(kept, dict(kept), name) for kept, name in reached.holders]
        self._holders += [
            (kept, dict(kept), name)
            for module, name in modules
            for kept in (module._modules, module._parameters, module._buffers)
        ]
        self._holders += [(kept, dict(kept), name) for kept, name in of_groups(reached)]
        self._slots = [
            x for x in (*reached.values, *reached.others, *reached.objects, *reached.iterators) if _is_settable(x)
        ]
        self._containers = [(x.kept, copy(x.kept), x.name) for x in reached.lengths if _is_plain(x.kept)]
        self._streams = [(stream, _state_of(stream), name) for stream, name in (*_global_streams(), *reached.streams)]
        self._states = [
            (optimizer.state, dict(optimizer.state), {key: dict(own) for key, own in optimizer.state.items()})
            for optimizer in reached.optimizers.values()
        ]

    def put_back(self) -> None:
        """Undo what was changed, and raise what is to be said of it."""
        restored = [_restored(kept, before, own) for kept, before, own in self._states]
        changed = [*self._changed()]
        is_made = any(made for made, _ in restored)
        if not is_made:
            changed += [f"{key!r} in the state of an optimizer" for _, replaced in restored for key in replaced]
        if changed:
            raise CaptureError(
                f"the program changes {changed[0]}, which only Python would do in every run: return it, keep it in a "
                f"tensor that is written to in place, or change it outside; what is made once, a cache say, is there "
                f"if the function ran before without shardwise.compile"
            )
        if is_made:
            raise MakesState("the program makes state of an optimizer")

    def _changed(self) -> Iterator[str]:
        for stream, state, name in self._streams:
            if repr(_state_of(stream)) != repr(state):
                _set_state(stream, state)
                yield f"the state of {name}, which it draws from"
        for found in self._slots:
            (kept, key), before, name = found
            if not is_same(before, _now(kept, key)):
                with suppress(IndexError):  # of a list that is shorter now, and filled again below
                    kept[key] = before
                yield name
        for kept, items, name in self._containers:
            if len(kept) != len(items):
                _refill(kept, items)
                yield name
        for kept, attributes, name in self._holders:
            for key in _differing(kept, attributes):
                _set(kept, attributes, key)
                said = key if isinstance(key, str) else "gradients that are kept"
                yield f"{name}.{said}" if name else said


def _global_streams() -> Iterator[tuple[Any, str]]:
    yield random, "Python's random"
    if "numpy.random" in sys.modules:
        yield sys.modules["numpy.random"].mtrand._rand, "numpy's random"


def _state_of(stream: Any) -> Any:
    """Where one of Python's or of numpy's streams of random numbers is."""
    if hasattr(stream, "bit_generator"):
        return stream.bit_generator.state
    return stream.getstate() if hasattr(stream, "getstate") else stream.get_state(legacy=False)


def _set_state(stream: Any, state: Any) -> None:
    if hasattr(stream, "bit_generator"):
        stream.bit_generator.state = state
    else:
        (stream.setstate if hasattr(stream, "setstate") else stream.set_state)(state)


def _differing(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> list[Any]:
    keys = dict.fromkeys((*before, *now))
    return [key for key in keys if key != "training" and not is_same(before.get(key, _NONE), now.get(key, _NONE))]


_NONE = object()


def _now(kept: Any, key: Any) -> Any:
    """What is in a place, if anything is."""
    try:
        return kept[key]
    except (LookupError, AttributeError, ValueError):
        return _NONE


def _set(kept: dict[Any, Any], before: Mapping[Any, Any], key: Any) -> None:
    if key in before:
        kept[key] = before[key]
    else:
        del kept[key]


def _restored(state: Any, before: dict[Any, Any], own: dict[Any, dict[str, Any]]) -> tuple[bool, list[str]]:
    """Put back the state of an optimizer: whether some of it was made, and names of what was replaced."""
    made, replaced = False, []
    for param in [param for param in state if param not in before]:
        made |= bool(state[param])
        del state[param]
    for param, kept in before.items():
        for key in _differing(kept, own[param]):
            if own[param].get(key) is None:
                made = True
            else:
                replaced.append(key)
            _set(kept, own[param], key)
    return made, replaced


def _is_settable(found: Found) -> bool:
    kept, _ = found.slot
    return isinstance(kept, (dict, list, Cell, Attributes))


def _is_plain(kept: Any) -> bool:
    """Whether it can be filled again."""
    return type(kept) in _REFILL


_REFILL: dict[type, Callable[[Any, Any], None]] = {
    list: lambda kept, items: kept.extend(items),
    deque: lambda kept, items: kept.extend(items),
    dict: lambda kept, items: kept.update(items),
    set: lambda kept, items: kept.update(items),
}


def _refill(kept: Any, items: Any) -> None:
    kept.clear()
    _REFILL[type(kept)](kept, items)
