"""Functions that look at one of their arguments before they begin, and may refuse it.

What they do then (draw random numbers) knows nothing of other ranks, so an op of its own looks first, on all of them,
and passes the argument on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.agreement import agreed
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


Check = tuple[Callable[[Tensor], Tensor], Callable[..., Any]]

CHECKS: dict[str, Check] = {
    "bernoulli": (_no_chance, torch.bernoulli),
    "multinomial": (_no_chances, lambda x, count, again: torch.multinomial(x, count, bool(again))),
    "normal": (_below_zero, lambda x: torch.normal(0.0, x)),
    "poisson": (_below_zero, torch.poisson),
    "quantile": (_no_chance, lambda x: torch.quantile(x.new_zeros(2), x)),
}
"""By name: what is bad, and a call that torch refuses for it."""


def checked(x: Tensor, check: str, numbers: Sequence[int] = ()) -> Tensor:
    """`x`, if it passes a check."""
    return x


def _free(call: Call) -> list[Strategy]:
    """Any part may be looked at. (A part of a row may be zero though the row is not; then the whole is looked at.)"""
    names = dims_of(call.inputs[0].ndim)
    return Factors([names], [names]).strategies()


def _checked_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    cuts = [(dim, axes) for dim, axes in enumerate(ins[0].splits) if axes]
    parts = [(dim, ins[0].pieces(dim)) for dim, _ in cuts]
    args = [parts, call["check"], call["numbers"], call["x"]]
    return Local(_checked_together, args, groups=(axes_of(ins), *(axes for _, axes in cuts)))


def _checked_together(group: Collectives, *args: Any) -> Tensor:
    *groups, parts, check, numbers, x = args
    bad, refused = CHECKS[check]
    if agreed(group, bad, x):
        whole = x.detach()
        for (dim, sizes), along in zip(parts, groups, strict=True):
            whole = along.gather(whole, dim, sizes)
        with torch.random.fork_rng(devices=[]):
            group.map(refused, whole, *numbers)
    return x


register_function(
    checked,
    "Tensor x, str check, int[] numbers",
    rule=Rule(_free, _checked_local),
    meta=lambda x, check, numbers=(): torch.empty_like(x),
)


def _checking(function: Callable[..., Any], check: str, at: int, name: str) -> Callable[..., Any]:
    """A function that has one of its arguments checked first, if it is a tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[at] if len(args) > at else kwargs.get(name)
        if isinstance(given, Tensor) and given.dtype.is_floating_point:
            good = traced_form(checked)(given, check, [])
            if len(args) > at:
                args = (*args[:at], good, *args[at + 1 :])
            else:
                kwargs = {**kwargs, name: good}
        return function(*args, **kwargs)

    return call


def _bernoulli(function: Callable[..., Any]) -> Callable[..., Any]:
    """A chance that is given as a number is one for all elements, whatever they are."""

    def call(input: Tensor, p: float | None = None, **options: Any) -> Any:
        if p is not None:
            return function(input, p, **options)
        return function(
            traced_form(checked)(input, "bernoulli", []) if input.dtype.is_floating_point else input, **options
        )

    return call


def _multinomial(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Tensor, num_samples: int, replacement: bool = False, **options: Any) -> Any:
        if input.dtype.is_floating_point and input.ndim in (1, 2) and num_samples > 0:
            input = traced_form(checked)(input, "multinomial", [num_samples, int(replacement)])
        return function(input, num_samples, replacement, **options)

    return call


for _functions, _check, _at, _name in (
    ((torch.poisson,), "poisson", 0, "input"),
    ((torch.normal,), "normal", 1, "std"),
    ((torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile), "quantile", 1, "q"),
):
    for _function in _functions:
        treat(_function, traced_as=_checking(_function, _check, _at, _name))
for _bernoulli_, _multinomial_ in ((torch.bernoulli, torch.multinomial), (Tensor.bernoulli, Tensor.multinomial)):
    treat(_bernoulli_, traced_as=_bernoulli(_bernoulli_))
    treat(_multinomial_, traced_as=_multinomial(_multinomial_))
