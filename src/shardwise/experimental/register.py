"""Rules for ops of one's own (or better ones for torch's): `register_sharding`, in torch's form and in a notation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from shardwise.comm import Ranked
from shardwise.comm.faked import plain_alias
from shardwise.dispatch import clear_cache
from shardwise.dispatch.planning.trace import map_tensors
from shardwise.experimental.notation import Reduction, notation_rule
from shardwise.experimental.spec import RuleError, TensorSpec
from shardwise.layout import Partial
from shardwise.rules import (
    AxisPlacement,
    Call,
    Local,
    Rule,
    Strategy,
    Value,
    flat_values,
    replicated,
)
from shardwise.rules.kit.registry import register_overload
from shardwise.rules.kit.treatments import composite_ops

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def register_sharding(
    op: Any,
    *,
    rule: str,
    reduce: Reduction | Mapping[str, Reduction] = "sum",
    linear: Sequence[str | Sequence[str]] = (),
    addends: Sequence[str] = (),
) -> None: ...
@overload
def register_sharding(op: Any) -> Callable[[_F], _F]: ...
def register_sharding(
    op: Any,
    *,
    rule: str | None = None,
    reduce: Reduction | Mapping[str, Reduction] = "sum",
    linear: Sequence[str | Sequence[str]] = (),
    addends: Sequence[str] = (),
) -> Any:
    """Say how an op, or each of a list of ops, may run on shards. Plans made before are forgotten.

    *A notation*, as in einsum: one term per tensor argument in the order of the op's schema, one letter per dim.
    Sharding a letter shards every dim that carries it; an output without it is then a pending reduction.

    >>> import torch, shardwise as sw
    >>> from shardwise.experimental import register_sharding
    >>> @torch.library.custom_op("doc::scaled_mm", mutates_args=())
    ... def scaled_mm(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    ...     return (x @ w) * scale
    >>> _ = scaled_mm.register_fake(lambda x, w, scale: x @ w)
    >>> register_sharding(scaled_mm, rule="ik, kj, j -> ij", linear=["x", "w"])
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> x = sw.distribute_tensor(torch.ones(4, 6), mesh, [sw.Shard(1)])
    >>> w = sw.distribute_tensor(torch.ones(6, 2), mesh, [sw.Shard(0)])
    >>> scaled_mm(x, w, scale=sw.distribute_tensor(torch.ones(2), mesh)).placements
    (Partial('sum'),)

    - A capital letter is a dim that must not be sharded: `"bC -> bC"` for a softmax over the last dim.
    - `...` stands for any further dims, counted from the right: `"...C -> ...C"`.
    - `*` is a tensor of any rank that must be replicated.
    - `[ij]` is a list of tensors, each of which looks like that.
    - Optional tensors have a term too; it does not count where they are not given.
    - `reduce` names the reduction that is pending on an output without a sharded letter: "sum", "avg", "max", "min",
      "product", or None if such a letter must not be sharded; a mapping says it letter by letter.
    - `linear` names arguments in which the op is linear: each of them, or all of a tuple together, may be pending.
    - `addends` names arguments that are added to a contraction (a bias): where it is split into terms, so are they.
    - What an op writes to (`mutates_args`) must carry a letter for it to be sharded, and ends where it began.

    *A function*, with the signature of torch's experimental `register_sharding`, as a decorator: it takes the op's
    arguments, with a description of each tensor (`shape`, `ndim`, `stride`, `tensor_meta`, and, as it is now, `mesh`
    and `placements`), and returns the ways along one mesh axis as pairs (placements of the outputs, placements of the
    arguments; None for what is no tensor).

    >>> @register_sharding(torch.ops.doc.scaled_mm.default)
    ... def _(x, w, scale):
    ...     return [([sw.Shard(0)], [sw.Shard(0), sw.Replicate(), sw.Replicate()])]

    Everything replicated is always a way. The op needs a fake implementation (`register_fake`). It runs on the shards
    with its own arguments, and where a dim is shorter than its axis some shards are empty. `shardwise.verify`, and the
    command of that name, judge a rule by samples.
    """
    ops = _overloads(op)
    if rule is None:
        if reduce != "sum" or linear or addends:
            raise RuleError("reduce, linear and addends belong to a notation: give it as rule=")
        return lambda function: _register_function(ops, function)
    _register({one: notation_rule(one, rule, reduce, linear, addends) for one in ops})
    return None


def _overloads(op: Any) -> list[Any]:
    """The overloads that an op, a packet of overloads, a custom op, a name, or a list of these stands for."""
    if isinstance(op, (list, tuple)):
        return [overload for one in op for overload in _overloads(one)]
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(op, torch.library.CustomOpDef):
        return [op._opoverload]
    if isinstance(op, str) and "::" in op:
        return _overloads(_named(op))
    raise TypeError(
        f"register_sharding takes an op such as torch.ops.mylib.op, torch.ops.aten.mul.Tensor, the result of "
        f"torch.library.custom_op or 'mylib::op', not {op!r}"
    )


def _named(text: str) -> Any:
    """The op `mylib::op`, or its overload `mylib::op.name`."""
    namespace, _, name = text.partition("::")
    found: Any = getattr(torch.ops, namespace)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise RuleError(f"there is no op {text}: import the library that defines it first") from None
    return found


def _register(rules: Mapping[Any, Rule]) -> None:
    """Give overloads their rules, all or none; other overloads of the same names keep theirs."""
    for op in rules:
        if op not in composite_ops() and torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "CompositeImplicitAutograd"
        ):
            raise RuleError(f"{op} is made of other ops, which are sharded one by one: give those a rule")
    for op, rule in rules.items():
        takes_out = any(argument.is_out for argument in op._schema.arguments)  # the registry sees to that
        runs_as_itself = op.namespace != "aten" and not takes_out
        local = _as_itself if runs_as_itself else None if takes_out else rule.local
        register_overload(op, Rule(rule.strategies, local))
    clear_cache()


def _as_itself(call: Call, ins: Any, outs: Any) -> Local:
    """An op that may be written in Python sees nothing but plain tensors, in what it saves for its backward too."""
    return Local(_AsItself(call.op, tuple(call.kwargs)), [*call.args, *call.kwargs.values()])


class _AsItself:
    """An op, whose last arguments are given by name, on plain tensors."""

    __slots__ = ("names", "op")

    def __init__(self, op: Any, names: tuple[str, ...]) -> None:
        self.op, self.names = op, names

    def __call__(self, *args: Any) -> Any:
        args = map_tensors(args, lambda x: plain_alias(x) if type(x) is Ranked else x)
        split = len(args) - len(self.names)
        return self.op(*args[:split], **dict(zip(self.names, args[split:], strict=True)))


# Torch's form


def _register_function(ops: Sequence[Any], function: Callable) -> Callable:
    if not callable(function):
        raise RuleError(f"a sharding rule is a function of the op's arguments, or a notation, not {function!r}")
    # It may look at dtypes and floats, so that what follows from it does not hold for others: `_as_itself` says so.
    rule = Rule(lambda call: _ways_of(function, call), _as_itself)
    _register(dict.fromkeys(ops, rule))
    return function


def _ways_of(function: Callable, call: Call) -> list[Strategy]:
    args = [_described(arg) for arg in call.args]
    kwargs = {name: _described(arg) for name, arg in call.kwargs.items()}
    _check_signature(function, call, args, kwargs)
    ways = function(*args, **kwargs)
    if not isinstance(ways, Iterable) or isinstance(ways, (str, Mapping)):
        raise RuleError(f"the rule of {call.op} must give a list of ways to run it, not {ways!r}")
    found = [replicated(call)]
    for way in ways:
        if not isinstance(way, (list, tuple)) or len(way) != 2:
            raise RuleError(
                f"the rule of {call.op} must give pairs (placements of the outputs, placements of the arguments), "
                f"not {way!r}"
            )
        outs, ins = way
        _check_positions(ins, call)
        found.append(Strategy(_placed(ins, call.inputs, call, "input"), _placed(outs, call.outputs, call, "output")))
    return list(dict.fromkeys(found))


def _check_signature(function: Callable, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # it has no signature to look at
        return
    except TypeError as error:
        raise RuleError(f"the rule of {call.op} must take the arguments of {call.op._schema}: {error}") from None


def _check_positions(given: Any, call: Call) -> None:
    """Where a way lists all arguments, tensors or not, each placement stands where a tensor does. (In a way that leaves
    out what is no tensor, or lists a list's tensors one by one, that cannot be seen.)"""
    arguments = call.bound.values()
    if not isinstance(given, (list, tuple)) or len(given) != len(arguments):
        return
    if any(isinstance(item, (list, tuple)) for item in given) or any(
        isinstance(arg, (list, tuple)) and flat_values(arg) for arg in arguments
    ):
        return
    for name, arg, placement in zip(call.bound, arguments, given, strict=True):
        if isinstance(arg, Value) != (placement is not None):
            what = "a tensor" if isinstance(arg, Value) else "no tensor"
            raise RuleError(f"the rule of {call.op} gives {placement} for {name!r}, which is {what}: {list(given)}")


def _described(arg: Any) -> Any:
    if isinstance(arg, Value):
        return TensorSpec(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(map(_described, arg)) if flat_values(arg) else arg
    return arg


def _placed(given: Any, values: Sequence[Value], call: Call, what: str) -> tuple[AxisPlacement, ...]:
    flat = [placement for placement in _flat(given) if placement is not None]
    if len(flat) != len(values):
        raise RuleError(
            f"the rule of {call.op} gives {len(flat)} placements for {len(values)} {what} tensors: {given}. It takes "
            f"one per tensor, and None for each argument that is none"
        )
    return tuple(_along_axis(p, value, call) for p, value in zip(flat, values, strict=True))


def _flat(tree: Any) -> list[Any]:
    return [leaf for item in tree for leaf in _flat(item)] if isinstance(tree, (list, tuple)) else [tree]


def _along_axis(placement: Any, value: Value, call: Call) -> AxisPlacement:
    """A placement, ours or torch's, as rules say it."""
    if not (hasattr(placement, "is_replicate") and hasattr(placement, "is_partial")):
        raise RuleError(f"the rule of {call.op} gives {placement!r}, which is no placement such as Shard(0)")
    if placement.is_replicate():
        return None
    if placement.is_partial():
        return placement if isinstance(placement, Partial) else _pending_of(placement)
    if not -value.ndim <= placement.dim < value.ndim:
        raise RuleError(f"the rule of {call.op} shards dim {placement.dim} of a tensor with {value.ndim} dims")
    return placement.dim % value.ndim


def _pending_of(placement: Any) -> Partial:
    order = getattr(placement, "norm_type", None)  # torch's norms are sums of powers
    return Partial(placement.reduce_op) if order is None else Partial("norm", float(order))
