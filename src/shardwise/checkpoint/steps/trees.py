"""Nested values as JSON, with tensors aside: what training state is made of. Whatever else is in it is refused."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.entries import check_dense
from shardwise.checkpoint.files.memory import bytes_of, in_rows
from shardwise.checkpoint.files.reading import is_possible
from shardwise.errors import CheckpointError
from shardwise.words import dtype_name, dtype_named

TAG = "$"
"""A JSON object with this key stands for what JSON does not have."""


@dataclass(slots=True)
class Encoder:
    """Makes JSON of values, and keeps their tensors by name. `inline` says which tensors are part of the JSON."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    inline: Callable[[Tensor], bool] = lambda x: False
    _names: dict[int, str] = field(default_factory=dict)

    def encode(self, value: Any, name: str) -> Any:
        """`name` is what the value is called where it cannot be saved, and what its tensors are."""
        try:
            return self._encode(value, name)
        except RecursionError:
            raise CheckpointError(f"{name} is nested without end, and cannot be saved") from None

    def _encode(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return str(value) if isinstance(value, str) else value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {TAG: "float", "of": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if type(value) in _SEQUENCES:
            items = [self._encode(item, f"{name}.{at}") for at, item in enumerate(value)]
            return items if type(value) is list else {TAG: type(value).__name__, "of": items}
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        if type(value) in _TEXTS:
            return {TAG: type(value).__name__, "of": _TEXTS[type(value)][0](value)}
        if type(value).__module__ == "numpy":
            return self._numpy(value, name)
        raise CheckpointError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it "
            f"holds numbers, text, tensors, and lists and dicts of them"
        )

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} is a {type(value).__qualname__}, which is no dict, and cannot be saved")
        kind = next((kind for kind in (Counter, OrderedDict) if type(value) is kind), dict)
        if kind is dict and all(type(key) is str and key != TAG for key in value):
            return {key: self._encode(item, f"{name}.{key}") for key, item in value.items()}
        pairs = [
            [self._encode(key, f"a key of {name}"), self._encode(item, f"{name}.{key}")] for key, item in value.items()
        ]
        return {TAG: kind.__name__, "of": pairs}

    def _tensor(self, x: Tensor, name: str) -> Any:
        check_dense(x, name)
        if self.inline(x):
            flat = in_rows(x).cpu().reshape(-1).view(torch.uint8)
            facts = [dtype_name(x.dtype), list(x.shape), _as_text(bytes(bytes_of(flat)))]
            return {TAG: "numbers", "of": facts}
        known = self._names.get(id(x))
        if known is None or self.tensors[known] is not x:
            known = next(unused for unused in numbered(name) if unused not in self.tensors)
            self.tensors[known] = x
            self._names[id(x)] = known
        return {TAG: "tensor", "of": known}

    def _numpy(self, value: Any, name: str) -> Any:
        if value.ndim == 0 and value.dtype.kind in "biufc" and not hasattr(value, "__len__"):
            return self._encode(value.item(), name)
        try:
            return {TAG: "array", "of": self._tensor(torch.from_numpy(value.copy()), name)}
        except (TypeError, ValueError):  # of no numbers, or in another byte order
            raise CheckpointError(f"{name} is an array of {value.dtype}, which a checkpoint cannot hold") from None


def numbered(name: str) -> Iterator[str]:
    """The name, and what to call it where that is taken."""
    yield name
    number = 2
    while True:
        yield f"{name}~{number}"
        number += 1


def decode(said: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that JSON stands for; `tensor` gives those that were kept aside. ValueError, TypeError or KeyError if
    it stands for none."""
    if isinstance(said, list):
        return [decode(item, tensor) for item in said]
    if not isinstance(said, dict):
        return said
    if TAG not in said:
        return {key: decode(item, tensor) for key, item in said.items()}
    kind, of = said[TAG], said["of"]
    if kind == "tensor":
        return tensor(of)
    if kind == "array":
        return decode(of, tensor).numpy()
    if kind == "numbers":
        dtype, shape, text = of
        return _numbers(dtype_named(dtype), shape, _from_text(text))
    if kind in _DICTS:
        return _DICTS[kind]({decode(key, tensor): decode(item, tensor) for key, item in of})
    if kind in _MADE_OF_LISTS:
        return _MADE_OF_LISTS[kind](decode(item, tensor) for item in of)
    return _MADE_OF_TEXT[kind](of)


def _numbers(dtype: torch.dtype, shape: list[int], content: bytes) -> Tensor:
    if not is_possible(shape) or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are no {dtype} of shape {shape}")
    found = torch.empty(shape, dtype=dtype, device="cpu")
    bytes_of(found)[:] = content
    return found


def tensors_in(said: Any) -> Iterator[str]:
    """The names of the tensors that a value in JSON has."""
    if isinstance(said, list):
        for item in said:
            yield from tensors_in(item)
    elif isinstance(said, dict):
        if said.get(TAG) == "tensor":
            yield said["of"]
        else:
            yield from tensors_in(list(said.values()))


def _as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_SEQUENCES = (list, tuple, set, frozenset, torch.Size)
_DICTS: dict[str, Callable[[dict], Any]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_MADE_OF_LISTS: dict[str, Callable[[Iterator], Any]] = {kind.__name__: kind for kind in _SEQUENCES}
_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (_as_text, _from_text),
    complex: (repr, complex),
    torch.dtype: (dtype_name, dtype_named),
    torch.device: (str, torch.device),
}
_MADE_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "float": float,
    **{kind.__name__: back for kind, (_, back) in _TEXTS.items()},
}
