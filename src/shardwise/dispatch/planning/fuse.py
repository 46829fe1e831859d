"""What torch takes apart on its way down, put together again: `linear` inside of a function is traced as views around a
product of matrices, and to view rows of several dims as rows of one loses where they are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.rules import Call, Value, flat_values

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def fused(calls: Sequence[Call], output: object, new_value: Callable[[tuple[int, ...], Value], Value]) -> list[Call]:
    """The calls of a trace, with products of flattened rows as `linear`. `new_value` makes a value of a shape, like
    another one."""
    products = [i for i, call in enumerate(calls) if call.op in (aten.addmm.default, aten.mm.default)]
    if not products:
        return list(calls)
    uses = Counter(value.index for call in calls for value in call.inputs)
    uses.update(value.index for value in flat_values(output))
    found: list[list[Call]] = [[call] for call in calls]
    for i in products:
        product = _Product.at(calls, i)
        if product is not None and all(uses[calls[j].outputs[0].index] == 1 for j in product.parts):
            for j in product.parts:
                found[j] = []
            found[product.after] = product.as_linear(new_value)
    return [call for parts in found for call in parts]


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of flattened rows with a turned weight: the calls that flatten, turn and multiply, and the one `after`
    them, which gives the rows their dims back."""

    calls: Sequence[Call]
    parts: tuple[int, int, int]
    after: int

    @staticmethod
    def at(calls: Sequence[Call], i: int) -> _Product | None:
        made = {value.index: j for j, call in enumerate(calls[:i]) for value in call.outputs}
        after = next((j for j in range(i + 1, len(calls)) if calls[i].outputs[0] in calls[j].inputs), None)
        rows, weight = (made.get(value.index) for value in calls[i].inputs[-2:])
        if rows is None or weight is None or after is None:
            return None
        views = calls[rows].op in _VIEWS and calls[after].op in _VIEWS and calls[weight].op is aten.t.default
        found = _Product(calls, (rows, weight, i), after)
        return found if views and found._is_linear() else None

    def _is_linear(self) -> bool:
        rows, _, product = (self.calls[i] for i in self.parts)
        x, out = rows.inputs[0].shape, self.calls[self.after].outputs[0].shape
        keeps_rows = len(out) > 2 and x[: len(out) - 1] == out[:-1] and out[-1] == product.outputs[0].shape[1]
        plain = product.bound.get("alpha", 1) == 1 == product.bound.get("beta", 1)
        return keeps_rows and plain and (len(product.inputs) == 2 or product.inputs[0].ndim == 1)

    def as_linear(self, new_value: Callable[[tuple[int, ...], Value], Value]) -> list[Call]:
        rows, turned, product = (self.calls[i] for i in self.parts)
        x, out = rows.inputs[0], self.calls[self.after].outputs[0]
        shape = (*out.shape[:-1], rows.outputs[0].shape[1])
        before = []
        if x.shape != shape:  # the last dims were flattened as well
            flat = new_value(shape, x)
            before, x = [Call(rows.op, (x, list(shape)), {}, (x,), (flat,))], flat
        inputs = (x, turned.inputs[0], *product.inputs[:-2])
        return [*before, Call(aten.linear.default, inputs, {}, inputs, (out,))]
