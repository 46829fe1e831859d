"""The states of the random number generators that a program draws from: Python's, numpy's, torch's and the device's.

Shardwise draws from torch's, and has none of its own.
"""

from __future__ import annotations

import importlib
import random
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.steps.trees import Encoder, decode

States = dict[str, Any]
"""By the name of a generator its state, as JSON."""


def random_states() -> States:
    """Those of the generators that this process has."""
    found = {"python": _python_state(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = _numpy().get_state(legacy=False)
    if (device := _device()) is not None:
        found[device] = torch.get_device_module(device).get_rng_state()
    encoder = Encoder(inline=lambda x: True)
    return {name: encoder.encode(state, f"the random state of {name}") for name, state in found.items()}


def all_states(said: Sequence[States]) -> dict[str, Any]:
    """What the ranks have, each state once: for each generator its states, and which of them is each rank's."""
    found = {}
    for name in said[0]:
        states: list[Any] = []
        for rank in said:
            if name in rank and rank[name] not in states:
                states.append(rank[name])
        found[name] = {"states": states, "of": [states.index(rank[name]) for rank in said if name in rank]}
    return found


def restore_random_states(saved: Mapping[str, Any], number: int) -> None:
    """Each rank's own state, or the one that all had. Where they differed, a rank of a number that there was not then
    has none: its generator stays as it is, and no two ranks draw the same."""
    for name, kept in saved.items():
        states, of = kept["states"], kept["of"]
        if len(states) == 1 or number < len(of):
            _restore(name, states[0 if len(states) == 1 else of[number]])


def check_random_states(saved: Mapping[str, Any], number: int) -> None:
    """Raise unless they can be restored: which is tried, and undone."""
    before = random_states()
    try:
        restore_random_states(saved, number)
    finally:
        for name, state in before.items():
            _restore(name, state)


def _restore(name: str, state: Any) -> None:
    value = decode(state, _no_tensor)
    if name in _SET:
        _SET[name](value)
    elif name == _device():
        torch.get_device_module(name).set_rng_state(value)


def _no_tensor(name: str) -> Any:
    raise KeyError(name)


def _device() -> str | None:
    """The accelerator, if the program uses it."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    is_used = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device.type if is_used() else None


def _numpy() -> Any:
    return importlib.import_module("numpy").random


def _python_state() -> list[Any]:
    version, words, gauss = random.getstate()
    return [version, array("Q", words).tobytes(), gauss]


def _set_python_state(state: list[Any]) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(array("Q", words)), gauss))


def _set_numpy_state(state: dict[str, Any]) -> None:
    position = state["state"]["pos"]
    if type(position) is not int or not 0 <= position <= _WORDS:  # numpy would read memory there
        raise ValueError(f"{position!r} is no position among {_WORDS} words")
    _numpy().set_state(state)


_WORDS = 624
"""Of a Mersenne twister."""

_SET: dict[str, Callable[[Any], None]] = {
    "python": _set_python_state,
    "torch": torch.set_rng_state,
    "numpy": _set_numpy_state,
}
