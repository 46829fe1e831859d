"""Rules for ops of one's own (or better ones for torch's): `register_sharding`, in torch's form and in a notation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked
from shardwise.dispatch import clear_cache
from shardwise.dispatch.trace import OPAQUE, map_tensors
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
    register,
    replicated,
    rule_for,
)
from shardwise.rules.notation import Factor, Factors

Reduction = str | None


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

    - A capital letter is a dim that must be whole: `"bC -> bC"` for a softmax over the last dim.
    - `...` stands for any further dims, counted from the right: `"...C -> ...C"`.
    - `*` is a tensor of any rank that must be whole.
    - `[ij]` is a list of tensors, each of which looks like that.
    - Optional tensors have a term too; it does not count where they are not given.
    - `reduce` names the reduction that is pending on an output without a sharded letter: "sum", "avg", "max", "min",
      "product", or None if such a letter must not be sharded; a mapping says it letter by letter.
    - `linear` names arguments in which the op is linear: each of them, or all of a tuple together, may be pending.
    - `addends` names arguments that are added to a contraction (a bias): where it is split into terms, so are they.
    - What an op writes to (`mutates_args`) must carry a letter for it to be sharded, and ends where it began.

    *A function*, with the signature of torch's experimental `register_sharding`, as a decorator: it takes the op's
    arguments, with a description of each tensor (`shape`, `ndim`, `stride`, `tensor_meta`, and, as it lies now, `mesh`
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
        return lambda function: _register_function(ops, function)
    for one in ops:
        _register(one, _notation_rule(one, rule, reduce, linear, addends))
    return None


def _overloads(op: Any) -> list[Any]:
    """The overloads that an op, a packet of overloads, a custom op, a name, or a list of these stands for."""
    if isinstance(op, (list, tuple, set)):
        return [overload for one in op for overload in _overloads(one)]
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(op, torch.library.CustomOpDef):
        return [op._opoverload]
    if isinstance(op, str) and "::" in op:
        namespace, name = op.split("::")
        return _overloads(getattr(getattr(torch.ops, namespace), name))
    raise TypeError(
        f"register_sharding takes an op such as torch.ops.mylib.op, torch.ops.aten.mul.Tensor, the result of "
        f"torch.library.custom_op or 'mylib::op', not {op!r}"
    )


def _register(op: Any, rule: Rule) -> None:
    """Give one overload a rule; the other overloads of the name keep theirs."""
    if op not in OPAQUE.values() and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    ):
        raise RuleError(f"{op} is made of other ops, which are sharded one by one: give those a rule")
    if op.namespace != "aten":
        rule = Rule(rule.strategies, _plainly)
    register(op._schema.name, rule=_for_overload(op, rule, rule_for(op)))
    clear_cache()


def _plainly(call: Call, ins: Any, outs: Any) -> Local:
    """An op that may be written in Python sees nothing but plain tensors, in what it saves for its backward too."""
    return Local(_Plainly(call.op, tuple(call.kwargs)), [*call.args, *call.kwargs.values()])


class _Plainly:
    """An op, whose last arguments are given by name, on plain tensors."""

    __slots__ = ("names", "op")

    def __init__(self, op: Any, names: tuple[str, ...]) -> None:
        self.op, self.names = op, names

    def __call__(self, *args: Any) -> Any:
        args = map_tensors(args, lambda x: x.as_subclass(Tensor) if type(x) is Ranked and x.requires_grad else x)
        split = len(args) - len(self.names)
        return self.op(*args[:split], **dict(zip(self.names, args[split:], strict=True)))


def _for_overload(op: Any, rule: Rule, otherwise: Rule | None) -> Rule:
    def strategies(call: Call) -> list[Strategy]:
        if call.op is op:
            return rule.strategies(call)
        return otherwise.strategies(call) if otherwise is not None else [replicated(call)]

    def local(call: Call, ins: Any, outs: Any) -> Any:
        chosen = rule if call.op is op else otherwise
        return chosen.local(call, ins, outs) if chosen is not None and chosen.local is not None else None

    return Rule(strategies, local)


# Torch's form


def _register_function(ops: Sequence[Any], function: Callable) -> Callable:
    for op in ops:
        _register(op, Rule(lambda call: _ways_of(function, call)))
    return function


def _ways_of(function: Callable, call: Call) -> list[Strategy]:
    args = [_described(arg) for arg in call.args]
    kwargs = {name: _described(arg) for name, arg in call.kwargs.items()}
    found = [replicated(call)]
    for way in function(*args, **kwargs):
        if not isinstance(way, (list, tuple)) or len(way) != 2:
            raise RuleError(
                f"the rule of {call.op} must give pairs (placements of the outputs, placements of the arguments), "
                f"not {way!r}"
            )
        outs, ins = way
        found.append(Strategy(_placed(ins, call.inputs, call, "input"), _placed(outs, call.outputs, call, "output")))
    return list(dict.fromkeys(found))


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
    if placement.is_replicate():
        return None
    if placement.is_partial():
        return placement if isinstance(placement, Partial) else Partial(placement.reduce_op)
    if not -value.ndim <= placement.dim < value.ndim:
        raise RuleError(f"the rule of {call.op} shards dim {placement.dim} of a tensor with {value.ndim} dims")
    return placement.dim % value.ndim


# The notation


@dataclass(frozen=True, slots=True)
class Term:
    """The letters of one tensor's dims; `rest` is where `...` stands, -1 if it does not."""

    text: str
    letters: tuple[str, ...]
    rest: int
    whole: bool = False

    @staticmethod
    def parse(text: str, notation: str) -> Term:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if inner == "*":
            return Term(text, (), -1, whole=True)
        if not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", inner) or len(set(inner)) < len(inner.replace("..", "")):
            raise RuleError(
                f"{text!r} in {notation!r} is no term: it takes letters, each once, '...' at most once, or '*'"
            )
        before, dots, after = inner.partition("...")
        return Term(text, (*before, *after), len(before) if dots else -1)

    def factors(self, value: Value, where: str) -> list[Factor]:
        """A factor for each dim of a tensor; None for dims that must be whole."""
        if self.whole:
            return [None] * value.ndim
        extra = value.ndim - len(self.letters)
        if extra < 0 or (extra and self.rest < 0):
            raise RuleError(f"{where} has {value.ndim} dims, {list(value.shape)}, but its term is {self.text!r}")
        names: list[Factor] = [None if letter.isupper() else letter for letter in self.letters]
        if self.rest < 0:
            return names
        further: list[Factor] = [f"...{position}" for position in range(extra, 0, -1)]
        return names[: self.rest] + further + names[self.rest :]


@dataclass(frozen=True, slots=True)
class Notation:
    """A parsed notation: a term per tensor argument and per output, in the order of the schema."""

    ins: dict[str, Term]
    outs: tuple[Term, ...]


def _parse(op: Any, notation: str) -> Notation:
    left, arrow, right = notation.replace(" ", "").partition("->")
    arguments = [argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)]
    outputs = [returned for returned in op._schema.returns if "Tensor" in str(returned.type)]
    ins = [Term.parse(term, notation) for term in left.split(",")] if left or arguments else []
    outs = [Term.parse(term, notation) for term in right.split(",")] if outputs or right else []
    if not arrow and outputs:
        raise RuleError(f"{notation!r} has no '->', but {op} returns {len(outputs)} tensors")
    for name, terms, schema in (("tensor arguments", ins, arguments), ("results", outs, outputs)):
        if len(terms) != len(schema):
            raise RuleError(f"{notation!r} has {len(terms)} terms for the {len(schema)} {name} of {op._schema}")
    return Notation(dict(zip(arguments, ins, strict=True)), tuple(outs))


def _notation_rule(op: Any, notation: str, reduce: Any, linear: Sequence[Any], addends: Sequence[str]) -> Rule:
    parsed = _parse(op, notation)
    groups = [(group,) if isinstance(group, str) else tuple(group) for group in linear]
    for name in (*addends, *(name for group in groups for name in group)):
        if name not in parsed.ins:
            raise RuleError(f"{name!r} is no tensor argument of {op}: these are {', '.join(parsed.ins)}")
    reductions = reduce if isinstance(reduce, Mapping) else {}
    default = "sum" if isinstance(reduce, Mapping) else reduce

    def strategies(call: Call) -> list[Strategy]:
        where = _positions(call)
        ins: list[list[Factor]] = [[] for _ in call.inputs]
        for name, term in parsed.ins.items():
            for position in where[name]:
                ins[position] = term.factors(call.inputs[position], f"argument {name!r} of {call.op}")
        outs = _output_factors(call, parsed.outs)
        _drop_misfits(ins, outs, call)
        letters = {factor for dims in (*ins, *outs) for factor in dims}
        pending = {letter: _pending(reductions.get(str(letter), default)) for letter in letters}
        together = [frozenset(p for name in group for p in where[name]) for group in groups]
        added = frozenset(position for name in addends for position in where[name])
        factors = Factors(ins, outs, reduce=pending, linear=[group for group in together if group], addends=added)
        return [way for way in factors.strategies() if _writes_its_part(call, way)]

    return Rule(strategies)


def _pending(name: Reduction) -> Partial | None:
    return None if name is None else Partial(name)


def _positions(call: Call) -> dict[str, list[int]]:
    """The positions among a call's inputs that each argument holds: inputs are counted as the call was written."""
    names = [argument.name for argument in call.op._schema.arguments]
    found: dict[str, list[int]] = {name: [] for name in names}
    at = 0
    for name, arg in (*zip(names, call.args), *call.kwargs.items()):
        count = len(flat_values(arg))
        found[name] = list(range(at, at + count))
        at += count
    return found


def _output_factors(call: Call, terms: Sequence[Term]) -> list[list[Factor]]:
    if len(terms) == 1 and terms[0].text.startswith("["):
        terms = [*terms] * len(call.outputs)
    if len(terms) != len(call.outputs):
        raise RuleError(f"{call.op} returned {len(call.outputs)} tensors; its rule has {len(terms)} terms for them")
    pairs = enumerate(zip(terms, call.outputs, strict=True))
    return [term.factors(value, f"result {i} of {call.op}") for i, (term, value) in pairs]


def _drop_misfits(ins: list[list[Factor]], outs: list[list[Factor]], call: Call) -> None:
    """A dim of size one that broadcasts carries no letter; a letter that stands for different sizes is not sharded."""
    dims = [
        (names, d, value.shape[d])
        for names, value in zip((*ins, *outs), (*call.inputs, *call.outputs), strict=True)
        for d in range(len(names))
    ]
    sizes: dict[Factor, set[int]] = {}
    for names, d, size in dims:
        sizes.setdefault(names[d], set()).add(size)
    for names, d, size in dims:
        several = sizes[names[d]]
        if len(several) > 1 and (size == 1 or len(several - {1}) > 1):
            names[d] = None


def _writes_its_part(call: Call, way: Strategy) -> bool:
    """What is written to is sharded with the rest, or pending: a whole tensor cannot take one rank's part."""
    if all(placement is None for placement in way.ins):
        return True
    return all(way.ins[position] is not None for position in call.mutated)
