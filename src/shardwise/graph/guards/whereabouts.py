"""What is where: in variables, attributes, lists and dicts, those of modules most of all. A model of 24 layers has some
1,100 places that may change, and they are looked at before every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.graph.guards.groups import of_groups
from shardwise.graph.guards.kinds import changed
from shardwise.graph.guards.places import Attributes
from shardwise.graph.guards.reached import Found, Reached, Sized
from shardwise.graph.guards.unwritten import Unwritten
from shardwise.graph.guards.values import is_library, is_same, is_value

_push, _pop = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


class Whereabouts:
    """What a function finds where, lists and dicts as long as they were, places where it finds nothing, and what
    optimizers keep.

    Dicts of modules and optimizers are only looked into if somebody has written to them."""

    def __init__(
        self, reached: Reached, found: Sequence[Found], lengths: Sequence[Sized], absent: Sequence[Found]
    ) -> None:
        self._states = States(reached)
        modules = reached.modules.values()
        self._found, self._lengths, self._absent = found, lengths, absent
        self._structures = Structure.of_groups(reached), Structure.of_modules(reached)
        in_structure = {id(kept) for x in modules for kept in (x._parameters, x._buffers)}
        found = [*self._states.slots, *(x for x in found if id(x.slot[0]) not in in_structure)]
        own = {id(x.__dict__) for x in modules}
        self._look, self._look_into_modules = (
            _look(
                [x for x in found if (id(x.slot[0]) in own) is are_own],
                [x for x in lengths if (id(x.kept) in own) is are_own],
                [x for x in absent if (id(x.slot[0]) in own) is are_own],
            )
            for are_own in (False, True)
        )
        dicts = [*(x.__dict__ for x in modules), *self._structures[1].now, *self._states.now]
        self._unwritten = Unwritten(dicts)

    def miss(self) -> str | None:
        """What is not where it was, or has another value."""
        groups, modules = self._structures
        try:
            if self._look() and groups.is_unchanged() and not any(modules.empty):
                if self._unwritten.holds() or self._unwritten.looked(self._are_dicts_unchanged):
                    return None
        except (LookupError, AttributeError, ValueError):
            pass
        return (
            self._states.miss()
            or next((said for x in self._found if (said := _difference(x))), None)
            or modules.miss()
            or groups.miss()
            or next((f"{x.name} is longer or shorter" for x in self._lengths if len(x.kept) != x.length), None)
            or next((f"{x.name} is new" for x in self._absent if x.slot[1] in x.slot[0]), None)
        )

    def _are_dicts_unchanged(self) -> bool:
        return self._look_into_modules() and self._structures[1].is_unchanged() and self._states.is_unchanged()


def _look(found: Sequence[Found], lengths: Sequence[Sized], absent: Sequence[Found]) -> Callable[[], bool]:
    sizes = [(x.kept, x.length) for x in lengths]
    return unchanged([x.slot for x in found], [x.value for x in found], sizes, [x.slot for x in absent])


def _difference(found: Found) -> str | None:
    """How a slot differs from what it held."""
    (kept, key), before, name = found
    try:
        now = kept[key]
    except (LookupError, AttributeError, ValueError):
        return f"{name} is not there any more"
    if is_same(before, now):
        return None
    return changed(name, before, now) if is_value(before) else f"{name} is another {type(before).__name__}"


def unchanged(
    slots: Sequence[tuple[Any, Any]],
    values: Sequence[Any],
    lengths: Sequence[tuple[Any, int]] = (),
    absent: Sequence[tuple[Any, Any]] = (),
) -> Callable[[], bool]:
    """A function that says whether every `container[key]` is still the very object that it was, every list as long, and
    whether what was absent still is: one generated expression, which the interpreter specialises. A place that is gone
    raises what it raises.

    >>> x, kept = [1], {"x": None}
    >>> kept["x"] = x
    >>> look = unchanged([(kept, "x")], [x], [(x, 1)], [(kept, "y")])
    >>> look()
    True
    >>> x.append(2)
    >>> look()
    False
    """
    names: dict[int, str] = {}
    namespace: dict[str, Any] = {"len": len, "type": type}

    def name_of(x: Any) -> str:
        name = names.setdefault(id(x), f"x{len(names)}")
        namespace[name] = x
        return name

    def now(container: Any, key: Any) -> str:
        if isinstance(container, Attributes):
            return f"type({name_of(container.of)})" if key == "__class__" else f"{name_of(container.of)}.{key}"
        return f"{name_of(container)}[{name_of(key)}]"

    terms = [f"{now(*slot)} is {name_of(value)}" for slot, value in zip(slots, values, strict=True)]
    terms += [f"len({name_of(kept)}) == {length}" for kept, length in lengths]
    terms += [f"{name_of(key)} not in {name_of(container)}" for container, key in absent]
    if not terms:
        return lambda: True
    locals_ = ", ".join(f"{name}={name}" for name in namespace)
    exec(f"def look({locals_}):\n    return {' and '.join(terms)}", namespace)
    look: Callable[[], bool] = namespace["look"]
    return look


class _ByIdentity(TorchFunctionMode):
    """Tensors are equal if they are the same object."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return False


_by_identity = _ByIdentity()


def equal(dicts: Sequence[Any], kept: Sequence[Any]) -> bool:
    """Whether dicts and lists hold the same modules and tensors: C compares them, by identity first."""
    _push(_by_identity)
    try:
        return dicts == kept
    finally:
        _pop()


class Structure:
    """What dicts hold, as it was: modules and tensors, the same ones."""

    def __init__(self, found: Sequence[tuple[dict, str]]) -> None:
        some = [(kept, name) for kept, name in found if kept]
        self.now: list[dict] = [kept for kept, _ in some]
        self.before = [dict(kept) for kept in self.now]
        self.empty = [kept for kept, _ in found if not kept]
        self.names = [*(name for _, name in some), *(name for kept, name in found if not kept)]

    @staticmethod
    def of_modules(reached: Reached) -> Structure:
        """Which parameters, buffers and inner modules modules have. What torch's modules have none of, they get none
        of."""
        return Structure(
            [
                (kept, f"{reached.names[key]}." if reached.names[key] else "")
                for key, module in reached.modules.items()
                for kept in (module._modules, module._parameters, module._buffers)
                if kept or not is_library(module)
            ]
        )

    @staticmethod
    def of_groups(reached: Reached) -> Structure:
        """How modules are fully sharded."""
        return Structure([(kept, f"{name}: ") for kept, name in of_groups(reached)])

    def is_unchanged(self) -> bool:
        return not any(self.empty) and (not self.now or equal(self.now, self.before))

    def miss(self) -> str | None:
        before_: list[dict] = [*self.before, *({} for _ in self.empty)]
        for now, before, name in zip([*self.now, *self.empty], before_, self.names, strict=True):
            for key in dict.fromkeys((*before, *now)):
                if not isinstance(key, str):
                    return f"{name}gradients are kept, or were before"
                if key not in now or key not in before:
                    return f"{name}{key} is {'not there any more' if key in before else 'new'}"
                if now[key] is not before[key]:
                    return (
                        f"{name}{key} is {'another' if before[key] is not None else 'now a'} {type(now[key]).__name__}"
                    )
        return None


class States:
    """What optimizers keep for each parameter: the dicts, since tensors are read out of these when a program runs."""

    def __init__(self, reached: Reached) -> None:
        self._names = [reached.names[key] for key in reached.optimizers]
        self._optimizers = list(reached.optimizers.values())
        self.now = [optimizer.state for optimizer in self._optimizers]
        self.slots = [Found((x.__dict__, "state"), x.state, "") for x in self._optimizers]
        self._before = [[*state.values()] for state in self.now]

    def is_unchanged(self) -> bool:
        return equal([[*state.values()] for state in self.now], self._before)

    def miss(self) -> str | None:
        for name, optimizer, state, before in zip(self._names, self._optimizers, self.now, self._before, strict=True):
            if optimizer.state is not state or not equal([*state.values()], before):
                return f"the state of {name or 'the optimizer'} is another one"
        return None
