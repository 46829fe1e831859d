"""The notation of rules for ops of one's own: a term per tensor, a letter per dim, as in einsum.

`register_sharding` says what it means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.experimental.spec import RuleError
from shardwise.layout import Partial
from shardwise.rules import Call, Rule, Strategy, Value, flat_values
from shardwise.rules.kit.notation import Factor, Factors

Reduction = str | None


@dataclass(frozen=True, slots=True)
class Term:
    """The letters of one tensor's dims; `rest` is where `...` stands, -1 if it does not; `replicated` for any dims."""

    text: str
    letters: tuple[str, ...]
    rest: int
    replicated: bool = False

    @staticmethod
    def parse(text: str, notation: str) -> Term:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if inner == "*":
            return Term(text, (), -1, replicated=True)
        if not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", inner) or len(set(inner)) < len(inner.replace("..", "")):
            raise RuleError(
                f"{text!r} in {notation!r} is no term: it takes letters, each once, '...' at most once, or '*'"
            )
        before, dots, after = inner.partition("...")
        return Term(text, (*before, *after), len(before) if dots else -1)

    def factors(self, value: Value, where: str) -> list[Factor]:
        """A factor for each dim of a tensor; None for dims that must not be sharded."""
        if self.replicated:
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


def notation_rule(op: Any, notation: str, reduce: Any, linear: Sequence[Any], addends: Sequence[str]) -> Rule:
    parsed = _parse(op, notation)
    groups = [(group,) if isinstance(group, str) else tuple(group) for group in linear]
    for name in (*addends, *(name for group in groups for name in group)):
        if name not in parsed.ins:
            raise RuleError(f"{name!r} is no tensor argument of {op}: these are {', '.join(parsed.ins)}")
    pending = _reductions(parsed, notation, reduce)

    def strategies(call: Call) -> list[Strategy]:
        where = _positions(call)
        ins: list[list[Factor]] = [[] for _ in call.inputs]
        for name, term in parsed.ins.items():
            for position in where[name]:
                ins[position] = term.factors(call.inputs[position], f"argument {name!r} of {call.op}")
        outs = _output_factors(call, parsed.outs)
        _drop_misfits(ins, outs, call)
        carried = [factor for dims in (*ins, *outs) for factor in dims]
        reductions = {letter: pending.get(str(letter), pending[""]) for letter in carried}
        together = [frozenset(p for name in group for p in where[name]) for group in groups]
        added = frozenset(position for name in addends for position in where[name])
        factors = Factors(ins, outs, reduce=reductions, linear=[group for group in together if group], addends=added)
        return [way for way in factors.strategies() if _writes_its_part(call, way)]

    return Rule(strategies)


def _reductions(parsed: Notation, notation: str, reduce: Any) -> dict[str, Partial | None]:
    """What is pending where a letter is missing: by letter, and under no letter for the others."""
    named = dict(reduce) if isinstance(reduce, Mapping) else {"": reduce}
    letters = {"", *(letter for term in (*parsed.ins.values(), *parsed.outs) for letter in term.letters)}
    if unknown := [letter for letter in named if letter not in letters]:
        raise RuleError(f"reduce names {', '.join(map(repr, unknown))}, but there is no such letter in {notation!r}")
    return {letter: None if name is None else Partial(name) for letter, name in {"": "sum", **named}.items()}


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
    """A dim of size one that is broadcast carries no letter. A letter is not sharded if it stands for different sizes,
    or for dims of results alone: the op itself says how long they are."""
    given, made = _sizes(ins, call.inputs), _sizes(outs, call.outputs)
    for names, value in zip((*ins, *outs), (*call.inputs, *call.outputs), strict=True):
        for dim, letter in enumerate(names):
            read, written = given.get(letter, set()), made.get(letter, set())
            sizes = (read | written) - {1} or {1}
            if len(sizes) > 1 or not sizes <= read or not written <= sizes or value.shape[dim] not in sizes:
                names[dim] = None


def _sizes(dims: Sequence[Sequence[Factor]], values: Sequence[Value]) -> dict[Factor, set[int]]:
    """For each letter, the sizes of the dims that carry it."""
    found: dict[Factor, set[int]] = {}
    for names, value in zip(dims, values, strict=True):
        for letter, size in zip(names, value.shape, strict=True):
            found.setdefault(letter, set()).add(size)
    return found


def _writes_its_part(call: Call, way: Strategy) -> bool:
    """What is written to is sharded with the rest, or pending: a replicated tensor cannot take one rank's part."""
    if all(placement is None for placement in way.ins):
        return True
    return all(way.ins[position] is not None for position in call.mutated)
