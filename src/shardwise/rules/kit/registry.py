"""The one registry: from op to rule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.kernels import kernels
from shardwise.rules.kit.treatments import treat
from shardwise.rules.kit.types import Call, Local, Rule, Strategy, replicated

_disabled = torch._C.DisableTorchFunctionSubclass
_size = torch._C.TensorBase.size
_rules: dict[str, Rule] = {}
_overloads: dict[Any, Rule] = {}
_homes: dict[str, str] = {}
_found: dict[Any, Rule | None] = {}
_library = torch.library.Library("shardwise", "FRAGMENT")


def register(*names: str, rule: Rule) -> Rule:
    """Give ops of the aten namespace (or `namespace::name`) a rule; in-place variants follow."""
    for name in names:
        full = name if "::" in name else f"aten::{name}"
        _rules[full], _homes[full] = rule, _calling_module()
    _found.clear()
    return rule


def register_overload(op: Any, rule: Rule) -> None:
    """Give one overload a rule; its in-place and `out=` forms follow, and others of its name keep theirs."""
    _overloads[op] = rule
    _homes[op._schema.name] = _calling_module()
    _found.clear()


def homes() -> dict[str, str]:
    """Every op with a rule of its own, and the module that gave it."""
    return dict(_homes)


@contextmanager
def restored() -> Iterator[None]:
    """Afterwards the rules, where they come from, and kernels are what they were before: to try them out."""
    tables: tuple[dict[Any, Any], ...] = (_rules, _overloads, _homes, kernels)
    before = [(known, dict(known)) for known in tables]
    _found.clear()
    try:
        yield
    finally:
        for known, kept in before:
            known.clear()
            known.update(kept)
        _found.clear()


def _calling_module() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    return frame.f_globals["__name__"]


def register_function(
    function: Callable,
    schema: str,
    *,
    rule: Rule,
    before: Callable | None = None,
    meta: Callable | None = None,
    traced_if: Callable[..., bool] | None = None,
    otherwise: Callable | None = None,
) -> Rule:
    """Give a Python function a rule: in traces it is the op `shardwise::{its name}`. The schema lists its parameters,
    and its results where they are not one tensor (`"Tensor x -> (Tensor, Tensor)"`). The op exists on meta tensors
    only, so the rule's `local` must always say what runs instead.

    `before` may do some of the function's work, in ops that are traced, and gives the arguments for the rest. `meta` is
    another function that gives the same results on meta tensors; `traced_if` says which calls are that op, and
    `otherwise` takes the place of the function in those that are not.
    """
    name = function.__name__
    parameters, _, results = schema.partition(" -> ")
    _library.define(f"{name}({parameters}) -> {results or 'Tensor'}")
    _library.impl(name, meta or function, "Meta")
    op = getattr(torch.ops.shardwise, name).default
    treat(op, function=function)

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, Tensor) and arg.is_meta for arg in (*args, *kwargs.values())):
            return function(*args, **kwargs)  # gathered after all
        if traced_if is not None and not traced_if(*args, **kwargs):
            return (otherwise or function)(*args, **kwargs)
        if before is not None:
            args, kwargs = before(*args, **kwargs)
        return op(*args, **kwargs)

    treat(function, traced_as=traced)
    return register(f"shardwise::{name}", rule=rule)


def register_pointwise(rule: Rule) -> None:
    """Give every op that torch tags as element-wise, and that has no rule of its own, this one."""
    _rules["pointwise"] = rule


def rule_for(op: Any) -> Rule | None:
    """The rule of an op, of the op it is the in-place form of, or of its kind (element-wise); None if there is none."""
    try:
        return _found[op]
    except KeyError:
        rule = _found[op] = _look_up(op)
        return rule


def strategies_of(call: Call) -> list[Strategy]:
    """The strategies of a call by its rule; without one, everything is replicated."""
    rule = rule_for(call.op)
    return [replicated(call)] if rule is None else rule.strategies(call)


def _look_up(op: Any) -> Rule | None:
    name = op._schema.name
    of_base = _overloads.get(functional(op)) if _overloads else None
    rule = _overloads.get(op)
    if rule is None and name.endswith("_") and not name.endswith("__") and name not in _rules:
        rule = of_base or _rules.get(name[:-1])
        if rule is not None and torch.Tag.inplace_view not in op.tags:
            rule = _in_place(rule)
    rule = rule or of_base or _rules.get(name)
    if rule is None and _is_pointwise(op):
        rule = _rules["pointwise"]
    if rule is not None and any(argument.is_out for argument in op._schema.arguments):
        return _with_out(rule)
    return rule


def _is_pointwise(op: Any) -> bool:
    """Whether torch tags an op, or the one it is the in-place form of, as element-wise: some in-place forms are not."""
    if torch.Tag.pointwise in op.tags:
        return True
    namespace, name = op._schema.name.split("::")
    base = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base != name else None
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


# In place, and `out=`: the base rule. Where its `local` runs something else than the op, the results are still to be
# written, to the argument itself, or to tensors of the results' layouts


def _in_place(rule: Rule) -> Rule:
    if (base := rule.local) is None:
        return rule

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        found = base(call, ins, outs)
        if found is None or found.function is call.op or len(call.outputs) != 1:
            return found
        return _writing(found, call, outs)

    return Rule(rule.strategies, local)


def _with_out(rule: Rule) -> Rule:
    def strategies(call: Call) -> list[Strategy]:
        return [replace(way, ins=(*way.ins, *way.outs)) for way in rule.strategies(_without_out(call))]

    def local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
        base = _without_out(call)
        found = rule.local(base, ins[: len(base.inputs)], outs) if rule.local is not None else None
        return found and _writing(found, call, outs)

    return Rule(strategies, local)


def _without_out(call: Call) -> Call:
    outs = {argument.name for argument in call.op._schema.arguments if argument.is_out}
    kwargs = {name: value for name, value in call.kwargs.items() if name not in outs}
    return Call(functional(call.op), call.args, kwargs, call.inputs[: len(call.inputs) - len(outs)], call.outputs)


def functional(op: Any) -> Any:
    """The overload that returns its result, of one that writes it to an argument; itself if there is none."""
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    if packet is None:
        return op
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]
    for overload in (getattr(packet, overload) for overload in packet.overloads()):
        if [(argument.name, str(argument.type)) for argument in overload._schema.arguments] == wanted:
            return overload
    return op


def _writing(local: Local, call: Call, outs: Sequence[Layout]) -> Local:
    write = _Writing(local.function, len(outs), any(out.has_empty for out in outs))
    return replace(local, function=write, args=[*local.args, *call.outputs])


class _Writing:
    """A function whose results are written to its last arguments, the old values of which gradients may need."""

    __slots__ = ("function", "num_outs", "has_empty")

    def __init__(self, function: Callable, num_outs: int, has_empty: bool) -> None:
        self.function, self.num_outs, self.has_empty = function, num_outs, has_empty

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, targets = list(args[: -self.num_outs]), args[-self.num_outs :]
        for target in targets:
            if torch.is_grad_enabled() and target.requires_grad:
                given = [target.clone() if arg is target else arg for arg in given]
        results = self.function(*given, **kwargs)
        each = zip(targets, (results,) if isinstance(results, Tensor) else results, strict=True)
        written = tuple(self._write(target, result) for target, result in each)
        return written if self.num_outs > 1 else written[0]

    def _write(self, target: Tensor, result: Tensor) -> Tensor:
        if result is target:
            return target
        if self.has_empty:
            refuse_shared_memory(target)
        return target.copy_(result)


def refuse_shared_memory(x: Tensor) -> None:
    """Refuse to write to elements that share memory, as torch does, also on ranks that hold none of them."""
    if is_expanded(x):
        torch.zeros(()).expand(2).copy_(torch.zeros(2))


def is_expanded(x: Tensor) -> bool:
    """Whether elements of a shard share memory (those of `expand`), or would if it had any. The strides of an empty
    tensor that is no view, or a view of one that already had such strides, mean nothing."""
    with _disabled():
        meaningless = 0 in _size(x) and (not x._is_view() or repeats(x._base))  # type: ignore[arg-type]
        return repeats(x) and not meaningless


def repeats(x: Tensor) -> bool:
    """Whether elements of a shard share memory, as those of `expand` do."""
    return any(n > 1 and not step for n, step in zip(_size(x), x.stride(), strict=True))
