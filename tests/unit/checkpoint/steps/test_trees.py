"""Nested values as JSON and back, exactly; and what is refused, by its name."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.steps.trees import Encoder, decode, tensors_in
from shardwise.errors import CheckpointError

VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": [0, -1, 10**40, 1.5, -0.0, 1e-320, 0.1 + 0.2, True, False],
    "no numbers": (math.inf, -math.inf),
    "text": ["", "naïve", "\ud800", "$"],
    "sequences": [(), (1, (2, [3])), {1, 2}, frozenset("a"), torch.Size([2, 3])],
    "dicts": {"a": {"$": 1, "b": {}}, "c": {1: "x", (2, "y"): None, 1.5: []}, "d": {True: 0}},
    "kinds of dicts": [Counter({3: 2, 1: 5}), OrderedDict([("b", 1), ("a", 2)])],
    "other things": [b"\0\xff", 1 + 2j, torch.bfloat16, torch.device("cuda", 3), complex(math.inf, -0.0)],
    "tagged": {"$": "tensor", "of": "x"},
}


def there_and_back(value: Any, **options: Any) -> Any:
    encoder = Encoder(**options)
    said = json.loads(json.dumps(encoder.encode(value, "it"), allow_nan=False))
    assert {*tensors_in(said)} == encoder.tensors.keys()
    return decode(said, encoder.tensors.__getitem__)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str) -> None:
    found = there_and_back(VALUES[name])
    assert found == VALUES[name] and repr(found) == repr(VALUES[name])


def test_what_is_no_number_comes_back() -> None:
    assert math.isnan(there_and_back(math.nan)) and math.isnan(there_and_back({"a": [math.nan]})["a"][0])


def test_numbers_of_numpy_become_numbers() -> None:
    found = there_and_back([numpy.float64(1.5), numpy.int64(3), numpy.bool_(True), numpy.float32(0.5)])
    assert found == [1.5, 3, True, 0.5] and [type(one) for one in found] == [float, int, bool, float]


TENSORS = {
    "float": torch.randn(2, 3),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 2),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex128),
    "strided": torch.arange(6).view(2, 3).T,
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "bf16": torch.ones(1, dtype=torch.bfloat16),
    "fp8": torch.ones(3).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("inline", [True, False])
def test_tensors(inline: bool) -> None:
    found = there_and_back({"a": [TENSORS]}, inline=lambda x: inline)["a"][0]
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert found[name].dtype == x.dtype and found[name].tolist() == x.tolist()


def test_names_of_tensors() -> None:
    x, y, z = torch.ones(1), torch.ones(1), torch.ones(1)
    encoder = Encoder()
    encoder.encode({"a": {"b": x}, "a.b": y, "c": [x, {1: z}]}, "opt")
    assert {name: id(value) for name, value in encoder.tensors.items()} == {
        "opt.a.b": id(x),
        "opt.a.b~2": id(y),
        "opt.c.1.1": id(z),
    }


@pytest.mark.parametrize("inline", [True, False])
def test_arrays(inline: bool) -> None:
    whole = numpy.arange(6, dtype=numpy.uint32).reshape(2, 3)
    for x in (whole, whole[::-1], whole.T, whole[:, ::2], whole[:0], whole[1, 1:2].reshape(())):
        found = there_and_back({"x": x}, inline=lambda x: inline)["x"]
        assert isinstance(found, numpy.ndarray) and found.dtype == x.dtype and found.shape == x.shape
        assert (found == x).all()


class Own:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)
REFUSED: dict[str, tuple[Any, str]] = {
    "an object": (
        {"a": [1, Own()]},
        r"^it\.a\.1 is a .*\.Own, which a checkpoint cannot hold: it holds numbers, text, tensors",
    ),
    "a function": ({"f": len}, r"^it\.f is a builtins\.builtin_function_or_method, which a checkpoint cannot hold"),
    "a deque": (deque([1]), r"^it is a collections\.deque, which"),
    "a key": ({Own(): 1}, r"^a key of it is a .*\.Own"),
    "a loop": (LOOP, "^it is nested without end, and cannot be saved"),
    "objects in an array": (
        {"x": numpy.array([None])},
        r"^it\.x is an array of object, which a checkpoint cannot hold",
    ),
    "an array in another byte order": (
        {"x": numpy.arange(3, dtype=">i4")},
        r"^it\.x is an array of >i4, which a checkpoint cannot hold",
    ),
    "a sparse tensor": ([torch.eye(2).to_sparse()], r"^'it\.0' is a sparse_coo tensor, and only dense ones are saved"),
    "a mapping": (type("M", (dict,), {})().keys().mapping, r"^it is a mappingproxy, which is no dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=words):
        Encoder().encode(value, "it")


def test_dicts_with_a_default_are_dicts() -> None:
    found = there_and_back(defaultdict(list, a=[1]))
    assert found == {"a": [1]} and type(found) is dict


@pytest.mark.parametrize(
    "said",
    [
        {"$": "os.system", "of": "true"},
        {"$": "tensor"},
        {"$": "numbers", "of": ["float32", [2], "AAAA"]},
        {"$": "numbers", "of": ["Tensor", [1], "AAAAAA=="]},
        {"$": "numbers", "of": ["uint8", [2**60], ""]},
        {"$": "numbers", "of": ["uint8", [0, 2**62, 2**62], ""]},
        {"$": "numbers", "of": ["uint8", [-1, -4], "AAAAAA=="]},
        {"$": "float", "of": "1.5; import os"},
        {"$": "dtype", "of": "save"},
        {"$": "dict", "of": [[[1], 2]]},
        {"$": "tuple", "of": 3},
        {"$": "bytes", "of": "*"},
    ],
    ids=str,
)
def test_json_that_stands_for_nothing(said: Any) -> None:
    def none(name: str) -> Tensor:
        raise KeyError(name)

    with pytest.raises((KeyError, ValueError, TypeError)):
        decode(said, none)
