"""Functions that look at one of their arguments before they begin, and may refuse it.

What they do then (draw random numbers) knows nothing of other ranks, so an op of its own looks first, on all of them,
and passes the argument on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.agreement import agreed, refuse
from shardwise.rules.kit.indices import axes_of
from shardwise.rules.kit.notation import Factors, dims_of
from shardwise.rules.kit.registry import register_function
from shardwise.rules.kit.treatments import traced_form, treat
from shardwise.rules.kit.types import Call, Collectives, Local, Rule, Strategy


def _below_zero(x: Tensor) -> Tensor:
    return ~(x >= 0)


def _no_chance(x: Tensor) -> Tensor:
    return ~((x >= 0) & (x <= 1))


def _no_chances(x: Tensor) -> Tensor:
    return ~((x >= 0) & x.isfinite()).all(-1) | (x.sum(-1) == 0)


CHECKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "bernoulli": (_no_chance, "chances between 0 and 1"),
    "multinomial": (_no_chances, "rows of chances that are finite, not negative and not all zero"),
    "normal": (_below_zero, "standard deviations that are not negative"),
    "poisson": (_below_zero, "rates that are not negative"),
    "quantile": (_no_chance, "fractions between 0 and 1"),
}
"""By function: what is bad, and what it expects."""


def checked(x: Tensor, check: str) -> Tensor:
    """`x`, if it passes a check."""
    return x


def _free(call: Call) -> list[Strategy]:
    """Any part may be looked at. (A part of a row may be zero though the row is not; then all of it is gathered.)"""
    names = dims_of(call.inputs[0].ndim)
    return Factors([names], [names]).strategies()


def _checked_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    cuts = [(dim, axes) for dim, axes in enumerate(ins[0].splits) if axes]
    parts = [(dim, ins[0].pieces(dim)) for dim, _ in cuts]
    args = [parts, call["check"], call["x"]]
    return Local(_checked_together, args, groups=(axes_of(ins), *(axes for _, axes in cuts)))


def _checked_together(group: Collectives, *args: Any) -> Tensor:
    *groups, parts, check, x = args
    bad, expected = CHECKS[check]
    if group.is_captured or agreed(group, bad, x):
        gathered = x.detach()
        for (dim, sizes), along in zip(parts, groups, strict=True):
            gathered = along.gather(gathered, dim, sizes)
        refuse(group, bad, gathered, f"{check} expects {expected}")
    return x


register_function(
    checked,
    "Tensor x, str check",
    rule=Rule(_free, _checked_local),
    meta=lambda x, check: torch.empty_like(x),
)


def _checking(function: Callable[..., Any], at: int, name: str) -> Callable[..., Any]:
    """A function that has one of its arguments checked first, if that is a tensor of floats."""
    check = function.__name__.removeprefix("nan")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[at] if len(args) > at else kwargs.get(name)
        one_for_all = check == "bernoulli" and (len(args) > 1 or kwargs.get("p") is not None)
        if not isinstance(given, Tensor) or not given.dtype.is_floating_point or one_for_all:
            return function(*args, **kwargs)
        good = traced_form(checked)(given, check)
        if len(args) > at:
            return function(*args[:at], good, *args[at + 1 :], **kwargs)
        return function(*args, **{**kwargs, name: good})

    return call


for _at, _name, _functions in (
    (0, "input", (torch.bernoulli, Tensor.bernoulli, torch.multinomial, Tensor.multinomial, torch.poisson)),
    (1, "std", (torch.normal,)),
    (1, "q", (torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile)),
):
    for _function in _functions:
        treat(_function, traced_as=_checking(_function, _at, _name))
