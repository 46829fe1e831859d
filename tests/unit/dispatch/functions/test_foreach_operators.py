"""Every `_foreach_*` operator on lists whose tensors differ in layout, mesh and dtype, against plain torch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.proof.coverage.command import assignments
from shardwise.proof.coverage.forms import Unusable, forms
from shardwise.proof.coverage.judge import Reference, judge
from shardwise.proof.kit.placing import mesh_of
from shardwise.proof.kit.samples import Operator, Sample, all_operators, operator

NAMES = [op.name for op in all_operators() if op.is_list]
LENGTH = 4
MESHES = ((2,), (3,))


def trimmed(sample: Sample, dtypes: tuple[torch.dtype, ...]) -> Sample:
    """The first elements of each list, in one dtype after the other."""

    def cast(x: Any, at: int) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtypes[at % len(dtypes)]).requires_grad_(x.requires_grad)

    def trim(tree: Any) -> Any:
        if not isinstance(tree, (list, tuple)):
            return tree
        return [cast(x, at) for at, x in enumerate(tree[:LENGTH])]

    kwargs = {name: trim(arg) for name, arg in sample.kwargs.items()}
    return Sample(sample.index, tuple(map(trim, sample.args)), kwargs)


def samples(op: Operator, dtypes: tuple[torch.dtype, ...]) -> list[Sample]:
    """One of every kind of arguments."""
    found: dict[Any, Sample] = {}
    for sample in op.samples():
        kinds = [type(x[0]) if isinstance(x, list) else type(x) for x in (*sample.args, *sample.kwargs.values())]
        found.setdefault((*kinds, *sample.kwargs), trimmed(sample, dtypes))
    return list(found.values())


def places(sample: Sample) -> list[int]:
    """The position of each tensor in its list; one that is in none is with the first."""
    found: dict[int, int] = {}
    for arg in (*sample.args, *sample.kwargs.values()):
        for at, x in enumerate(arg) if isinstance(arg, list) else [(0, arg)]:
            if isinstance(x, Tensor):
                found.setdefault(id(x), at)
    return [found[id(x)] for x in sample.tensors]


def verdicts(op: Operator, dtypes: tuple[torch.dtype, ...], *, several_meshes: bool) -> list[str]:
    """What is not right, of all forms and kinds of samples in some layouts each; and that something was tried."""
    problems, tried = [], 0
    for sample in samples(op, dtypes):
        meshes = [mesh_of(MESHES[at % 2 if several_meshes else 0]) for at in places(sample)]
        for form, _ in forms(op):
            try:
                case = Reference(form, sample)
            except Unusable:
                continue
            for way in assignments(sample.tensors, 1, 4, random.Random(sample.index)):
                found = judge(case, meshes, way)
                tried += 1
                if found.kind not in ("right", "refused"):
                    problems.append(f"{form.name} {sample} {way}: {found}")
    assert tried
    return problems


@pytest.mark.parametrize("name", NAMES)
def test_lists_on_several_meshes(name: str) -> None:
    assert verdicts(operator(name), (torch.float64,), several_meshes=True) == []


@pytest.mark.parametrize("name", NAMES)
def test_lists_of_several_dtypes(name: str) -> None:
    assert verdicts(operator(name), (torch.float64, torch.float32), several_meshes=False) == []
