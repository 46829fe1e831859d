"""Random ops. How the numbers are drawn is for `dispatch.planning.randomness` to say; here only which dims are free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.layout import Layout
from shardwise.rules.kit.empty import remembered
from shardwise.rules.kit.notation import Factor, Factors
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.treatments import treat
from shardwise.rules.kit.types import Call, Local, Rule, Strategy
from shardwise.rules.math.pointwise import pointwise_factors


def _element_wise(call: Call) -> list[Strategy]:
    return pointwise_factors(call).strategies()


register("poisson", "_standard_gamma", "normal_functional", rule=Rule(_element_wise))


# Samples of each row's distribution: the classes must be whole


def _multinomial(call: Call) -> list[Strategy]:
    lead: list[Factor] = ["row"] if call.inputs[0].ndim > 1 else []
    return Factors([[*lead, None]], [[*lead, None]]).strategies()


register("multinomial", rule=Rule(_multinomial))


# Of nothing, torch's kernel returns its own argument, which autograd then takes for a result


def _dropout_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    return None if all(map(math.prod, ins[0].held_shapes)) else Local(_dropout_or_empty, call.args, call.kwargs)


def _dropout_or_empty(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if x.numel():
        return torch.native_dropout(x, *args, **kwargs)
    return remembered(x), x.new_empty(x.shape, dtype=torch.bool)


register("native_dropout", rule=Rule(_element_wise, _dropout_local))


# In place, torch adds a dim to what has no batch, and removes it again: the argument itself has another shape meanwhile


def _in_a_batch(function: Callable[..., Tensor], num_dims: int) -> Callable[..., Tensor]:
    """A function that is given, of a tensor without a batch to be written to, a view with one."""

    def call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not inplace or input.dim() != num_dims:
            return function(input, p, training, inplace)
        function(input.unsqueeze(0), p, training, inplace)
        return input

    return call


treat(F.dropout1d, traced_as=_in_a_batch(F.dropout1d, 2))
treat(F.dropout3d, traced_as=_in_a_batch(F.dropout3d, 4))
