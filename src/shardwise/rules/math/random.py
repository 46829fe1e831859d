"""Random ops. How the numbers are drawn is for `dispatch.planning.randomness` to say; here only which dims are free."""

from __future__ import annotations

from shardwise.rules.kit.empty import skipping_empty
from shardwise.rules.kit.notation import Factor, Factors
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import Call, Rule, Strategy
from shardwise.rules.math.pointwise import pointwise_factors


def _element_wise(call: Call) -> list[Strategy]:
    return pointwise_factors(call).strategies()


register("poisson", "_standard_gamma", "normal_functional", rule=Rule(_element_wise))


# Samples of each row's distribution: the classes must not be sharded


def _multinomial(call: Call) -> list[Strategy]:
    lead: list[Factor] = ["row"] if call.inputs[0].ndim > 1 else []
    return Factors([[*lead, None]], [[*lead, None]]).strategies()


register("multinomial", rule=Rule(_multinomial))


# An empty argument torch's kernel returns as it is, and autograd then takes it for a result

register("native_dropout", rule=skipping_empty(Rule(_element_wise)))
