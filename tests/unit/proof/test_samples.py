"""Torch's samples: all operators, always the same calls, and nothing else in the process changed by reading them."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy
import pytest
import torch

from shardwise.proof.coverage.forms import forms
from shardwise.proof.kit import samples
from shardwise.proof.kit.samples import (
    Sample,
    all_operators,
    counting_draws,
    operator,
    operators,
    replaced,
    seeded,
    show,
)


def values(given: list[Sample]) -> list[list[torch.Tensor]]:
    return [[x.detach() for x in sample.tensors] for sample in given]


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(
        len(row) == len(other) and all(torch.equal(x, y) for x, y in zip(row, other, strict=True))
        for row, other in zip(a, b, strict=True)
    )


def test_all_operators_are_there() -> None:
    names = [op.name for op in all_operators()]
    assert len(names) == len(set(names)) > 650
    assert {"add", "mm", "nn.functional.conv2d", "linalg.svd", "scatter_reduce.amax"} <= set(names)


@pytest.mark.parametrize("name", ["add", "nn.functional.cross_entropy", "linalg.solve", "nn.functional.max_unpool2d"])
def test_the_same_seed_gives_the_same_samples(name: str) -> None:
    first = values(operator(name).samples())
    torch.rand(3), random.random(), numpy.random.rand()
    operator("mul").samples()
    assert same(first, values(operator(name).samples()))


def test_another_seed_gives_others() -> None:
    assert not same(values(operator("add").samples(seed=0)), values(operator("add").samples(seed=1)))


def test_a_limit_picks_from_all_of_them() -> None:
    every = operator("sum").samples()
    some = operator("sum").samples(limit=4)
    assert some[0].index == 0 and some[-1].index == every[-1].index and len(some) == 4
    assert same(values(some), values([every[sample.index] for sample in some]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("add", torch.float64), ("bitwise_and", torch.int64), ("view_as_real", torch.complex128), ("sum", torch.float64)],
)
def test_double_precision_where_there_is_any(name: str, dtype: torch.dtype) -> None:
    assert operator(name).dtype is dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("add", torch.float32), ("bitwise_and", torch.int64), ("view_as_real", torch.complex64), ("sum", torch.float32)],
)
def test_single_precision_where_it_is_asked_for(name: str, dtype: torch.dtype) -> None:
    assert operator(name, "float32").dtype is dtype


def test_operators_on_lists_are_there() -> None:
    names = {op.name for op in all_operators() if op.is_list}
    assert {"_foreach_add", "_foreach_sqrt", "_foreach_addcdiv", "_foreach_norm", "_foreach_lerp"} <= names


def test_a_pattern_matches_whole_names() -> None:
    assert [op.name for op in operators("mm|bmm")] == ["bmm", "mm"]


def test_seeding_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    with seeded("x", 0):
        inside = torch.rand(2)
    with seeded("x", 0):
        assert torch.equal(inside, torch.rand(2))
    assert torch.equal(wanted, torch.rand(2))


@pytest.mark.parametrize(("name", "draws"), [("nn.functional.dropout", True), ("bernoulli", True), ("add", False)])
def test_random_operators_are_known(name: str, draws: bool) -> None:
    op = operator(name)
    sample = next(s for s in op.samples() if s.kwargs.get("training", True) and s.kwargs.get("p") != 0.0)
    with counting_draws() as drawn:
        op.function(*sample.args, **sample.kwargs)
        assert drawn() is draws


def test_a_tensor_used_twice_stays_one() -> None:
    x = torch.ones(2)
    sample = Sample(0, (x, [x, 3]), {"other": x})
    assert len(sample.tensors) == 1
    y = torch.zeros(2)
    assert replaced(sample.args, {id(x): y}) == (y, [y, 3])


class Pair(NamedTuple):
    first: object
    second: object


def test_trees_keep_their_types() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    size = torch.Size([2, 3])
    tree = {"a": [x, Pair(x, "b")], "c": (size, slice(1))}
    found = replaced(tree, {id(x): y})
    assert found == {"a": [y, Pair(y, "b")], "c": (size, slice(1))}
    assert type(found["a"][1]) is Pair and type(found["c"][0]) is torch.Size


def test_results_are_written_over_something_else() -> None:
    """Or a target that was not written would go unnoticed."""
    (form,) = [form for form, _ in forms(operator("ones_like")) if form.name == "function"]
    written = replace(form, name="out=").sample(Sample(0, (torch.tensor([1.0, 5.0, torch.nan]),)))
    assert written.kwargs["out"].tolist() == [0.0, 0.0, 0.0]
    numbers = replace(form, name="out=", function=torch.neg).sample(Sample(0, (torch.tensor([-1.0, 1.0]),)))
    assert numbers.kwargs["out"].tolist() == [0.0, 1.0]


def test_arguments_in_a_few_letters() -> None:
    args = (torch.ones(2, 3, dtype=torch.float64), [torch.ones(2, dtype=torch.int64), 1], "mean", torch.float32)
    assert show(args) == "[f64[2,3], [i64[2], 1], 'mean', torch.float32]"


def test_reading_samples_changes_no_settings() -> None:
    code = (
        "import hypothesis, torch; hypothesis.settings.register_profile('mine', max_examples=7);"
        "hypothesis.settings.load_profile('mine');"
        "from shardwise.proof.kit.samples import all_operators; all_operators();"
        "assert hypothesis.settings().max_examples == 7;"
        "torch.backends.cudnn.benchmark = True"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_methods_invocations", None)
    with pytest.raises(samples.NoSamplesError, match=r"pip install 'shardwise\[proof\]'"):
        all_operators.__wrapped__()
