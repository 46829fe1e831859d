"""What a step is saved from and loaded into: modules, optimizers, whatever has a `state_dict`, generators and dicts.

Each has a name, by which the user gives it. An optimizer's parameters go by the names that the modules beside it have
for them, so that neither their order nor a mesh counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint.entries import check_kept, state_of
from shardwise.checkpoint.steps.trees import Encoder, decode, tensors_in
from shardwise.errors import CheckpointError
from shardwise.tensor import DTensor

Names = Mapping[int, str]
"""What parameters are called, by their identity."""

SMALL = 2**16
"""Bytes. Plain tensors of at most this size that are no module's or optimizer's, states of random numbers say, may be
each rank's own; larger ones must be the same on all."""


OPTIONS = frozenset({"step", "keep", "background", "process_group", "random", "verify"})


def check_kinds(state: Mapping[str, Any]) -> None:
    """Each is something that can be loaded into, under a name that is no option's."""
    if taken := OPTIONS.intersection(state):
        raise TypeError(f"{min(taken)} is an option of save_step or load_latest: give the state another name")
    if not state:
        raise TypeError("give what is to be saved or loaded by name: model=model, optimizer=optimizer, …")
    for name, value in state.items():
        if isinstance(value, (nn.Module, torch.Generator, dict)):
            continue
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(
                f"{name} is a {type(value).__name__}, which has no state_dict to save and nothing to load into; put "
                f"numbers, text and the like into a dict, {name}={{...}}, which is saved and loaded as it is"
            )


def names_of_parameters(state: Mapping[str, Any]) -> dict[int, str]:
    """What the modules among the state call their parameters."""
    found: dict[int, str] = {}
    for name, module in state.items():
        if isinstance(module, nn.Module):
            for entry in state_of(module)[0]:
                found.setdefault(id(entry.tensor), f"{name}.{entry.name}")
    return found


def kind_of(value: Any) -> str:
    kinds = {nn.Module: "module", optim.Optimizer: "optimizer", torch.Generator: "generator", dict: "dict"}
    return next((kind for cls, kind in kinds.items() if isinstance(value, cls)), "object")


def encoded(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """All of it as JSON, and its tensors by name; and which of these are plain, and no module's or optimizer's."""
    names = names_of_parameters(state)
    said: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    loose: list[str] = []
    for name, value in state.items():
        is_loose = kind_of(value) in ("object", "dict", "generator")
        encoder, before = Encoder(tensors, _is_own if is_loose else _never), len(tensors)
        said[name] = {"kind": kind_of(value), **_encoded(name, value, encoder, names)}
        loose += [key for key in [*tensors][before:] if is_loose and not isinstance(tensors[key], DTensor)]
    return said, tensors, loose


def _never(x: Tensor) -> bool:
    return False


def _is_own(x: Tensor) -> bool:
    return not isinstance(x, DTensor) and x.numel() * x.element_size() <= SMALL


def _encoded(name: str, value: Any, encoder: Encoder, names: Names) -> dict[str, Any]:
    match kind_of(value):
        case "module":
            return _of_module(name, value, encoder)
        case "optimizer":
            return _of_optimizer(name, value, encoder, names)
        case "generator":
            return {"state": encoder.encode(value.get_state(), name)}
        case "dict":
            return {"state": encoder.encode(value, name)}
    return {"state": encoder.encode(value.state_dict(), name)}


def _of_module(name: str, module: nn.Module, encoder: Encoder) -> dict[str, Any]:
    """Keys of tensors by all names that these have."""
    entries, others = state_of(module)
    tensors = {}
    for entry in entries:
        key = encoder.encode(entry.tensor, f"{name}.{entry.name}")["of"]
        tensors.update(dict.fromkeys(entry.names, key))
    return {
        "tensors": tensors,
        "others": {key: encoder.encode(value, f"{name}.{key}") for key, value in others.items()},
    }


def _of_optimizer(name: str, optimizer: optim.Optimizer, encoder: Encoder, names: Names) -> dict[str, Any]:
    """What is kept for each parameter, by its name, and the rest of a state dict."""
    saved = optimizer.state_dict()
    called = _names_by_number(optimizer, names)
    groups = [{**group, "params": [called[number] for number in group["params"]]} for group in saved["param_groups"]]
    kept = {}
    for number, value in saved["state"].items():
        if not isinstance(number, (int, str)):
            raise CheckpointError(f"{name} keeps state for {number!r}, which is no parameter, and cannot be saved")
        kept[called.get(number, number)] = value  # type: ignore[arg-type]
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {
        "state": {param: encoder.encode(value, f"{name}.{param}") for param, value in kept.items()},
        "groups": encoder.encode(groups, f"{name}.param_groups"),
        "rest": encoder.encode(rest, name),
    }


def _names_by_number(optimizer: optim.Optimizer, names: Names) -> dict[int, str]:
    """What each parameter is called, by its number in a state dict. One that no module has is called by its number."""
    return {number: names.get(id(param), f"{number}") for number, param in enumerate(_params(optimizer))}


def _params(optimizer: optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# Loading


MakeTensor = Callable[[str, Tensor | None], Tensor]
"""Makes a tensor to be read into, by the key of a saved one, to lie like another."""


def decoded(
    name: str, said: Mapping[str, Any], value: Any, names: Names, make: MakeTensor
) -> tuple[list[tuple[str, Tensor]], Callable[[], None]]:
    """For an object that state was saved of: its tensors that are read into by their keys, and what is to be done when
    all are read. Nothing is changed before; what `make` makes is read into as well."""
    if said["kind"] != kind_of(value):
        raise CheckpointError(f"{name} is a {type(value).__name__}, and was saved from a {said['kind']}")
    match kind_of(value):
        case "module":
            return _into_module(name, said, value, make)
        case "optimizer":
            return [], _into_optimizer(name, said, value, names, make)
        case "generator":
            found = decode(said["state"], lambda key: make(key, None))
            return [], lambda: value.set_state(found)
    encoder = Encoder(inline=_is_own)
    if any(True for _ in tensors_in(said["state"])):  # then those that are there now show where to put them
        encoder.encode(value if isinstance(value, dict) else value.state_dict(), name)
    found = decode(said["state"], lambda key: make(key, encoder.tensors.get(key)))
    if not isinstance(value, dict):
        return [], lambda: value.load_state_dict(found)
    return [], lambda: _replace_items(value, found)


def undone(value: Any) -> Callable[[], None]:
    """Puts an object back to what it holds now. What is loaded takes the place of what was there, and changes none."""
    match kind_of(value):
        case "generator":
            return partial(value.set_state, value.get_state())
        case "dict":
            return partial(_replace_items, value, dict(value))
    attributes = getattr(value, "__dict__", {})
    return partial(_replace_items, attributes, dict(attributes))


def _replace_items(value: dict[Any, Any], found: dict[Any, Any]) -> None:
    value.clear()
    value.update(found)


def _into_module(
    name: str, said: Mapping[str, Any], module: nn.Module, make: MakeTensor
) -> tuple[list[tuple[str, Tensor]], Callable[[], None]]:
    entries, others = state_of(module)
    check_kept(module, entries)
    saved = said["tensors"]
    missing = [entry.name for entry in entries if not any(one in saved for one in entry.names)]
    missing += [key for key in others if key not in said["others"]]
    known = {*(one for entry in entries for one in entry.names), *others}
    unexpected = [key for key in (*saved, *said["others"]) if key not in known]
    differences = ((missing, "new"), (unexpected, "gone"))
    apart = [f"{len(names)} names are {what}, {names[0]!r} for one" for names, what in differences if names]
    if apart:
        raise CheckpointError(f"{name} is not what was saved: {'; '.join(apart)}")
    found = {key: decode(value, lambda key: make(key, None)) for key, value in said["others"].items()}
    wanted = [(saved[next(one for one in entry.names if one in saved)], entry.tensor) for entry in entries]
    return wanted, lambda: _set_extra_states(module, found)


def _set_extra_states(module: nn.Module, found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        inner, _, last = key.rpartition(".")
        if last != "_extra_state":
            raise CheckpointError(f"{key!r} of {type(module).__name__} is no tensor, and torch has no way to set it")
        module.get_submodule(inner).set_extra_state(value)


def _make_like(make: MakeTensor, like: Tensor | None, key: str) -> Tensor:
    return make(key, like)


def _into_optimizer(
    name: str, said: Mapping[str, Any], optimizer: optim.Optimizer, names: Names, make: MakeTensor
) -> Callable[[], None]:
    numbers = {called: number for number, called in _names_by_number(optimizer, names).items()}
    params = _params(optimizer)
    groups = decode(said["groups"], lambda key: make(key, None))
    now = optimizer.state_dict()["param_groups"]
    called = _names_by_number(optimizer, names)
    none: dict[str, Any] = {"params": []}
    for at, (group, mine) in enumerate(zip_longest(groups, now, fillvalue=none)):
        there, here = {*group["params"]}, {called[number] for number in mine["params"]}
        if there != here:
            nameless = "; give the module that they belong to as well" if any(map(str.isdigit, here - there)) else ""
            which = min(there ^ here)
            raise CheckpointError(
                f"{name} is not what was saved: its parameter group {at} has other parameters, of which {which!r} is "
                f"only in the {'saved' if which in there else 'present'} one{nameless}"
            )
    state = {}
    for called_so, kept in said["state"].items():
        if not isinstance(kept, dict):
            raise ValueError(f"what is kept for {called_so!r} is no dict")
        param = params[numbers[called_so]] if called_so in numbers else None
        state[numbers.get(called_so, called_so)] = decode(kept, partial(_make_like, make, param))
    rest = decode(said["rest"], lambda key: make(key, None))
    groups = [{**group, "params": mine["params"]} for group, mine in zip(groups, now, strict=True)]
    return lambda: optimizer.load_state_dict({**rest, "state": state, "param_groups": groups})
