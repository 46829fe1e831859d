"""Initialisation: the functions of `nn.init` switch gradients off inside, where a plan would not know of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dispatch.functions.handlers import handles


@handles(nn.init.uniform_)
def _init_uniform(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return _initialise(Tensor.uniform_, func, args, kwargs)


@handles(nn.init.normal_)
def _init_normal(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return _initialise(Tensor.normal_, func, args, kwargs)


@handles(nn.init.constant_)
def _init_constant(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return _initialise(Tensor.fill_, func, args, kwargs)


@handles(nn.init.kaiming_uniform_)
def _init_kaiming_uniform(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    given = _bound(func, args, kwargs)
    tensor = given["tensor"]
    if 0 in tensor.shape:
        return tensor
    fan = nn.init._calculate_correct_fan(tensor, given["mode"])
    deviation = nn.init.calculate_gain(given["nonlinearity"], given["a"]) / math.sqrt(fan)
    bound = math.sqrt(3.0) * deviation
    return _initialise(Tensor.uniform_, nn.init.uniform_, (tensor, -bound, bound), {"generator": given["generator"]})


def _bound(func: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _initialise(method: Callable, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    values = list(_bound(func, args, kwargs).items())
    with torch.no_grad():
        named = {name: value for name, value in values if name == "generator"}
        return method(*(value for name, value in values if name != "generator"), **named)
