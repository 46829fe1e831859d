"""Every operator of torch, on its own samples, gives what it gives on one device wherever its tensors lie: on meshes of
one to three axes, several axes on one dim in any order, pieces of any size, pending sums, averages and extrema."""

from __future__ import annotations

import random
import warnings
from functools import lru_cache

import pytest
import torch
from compare import check_shards
from hypothesis import given, note, settings
from hypothesis import strategies as st
from layouts import laid_out, random_layout
from sweep import mesh_of, normal
from torch import Tensor

import shardwise as sw
from shardwise.layout import Layout
from shardwise.proof.coverage import judge as judging
from shardwise.proof.coverage.command import make_case
from shardwise.proof.coverage.forms import OUT, Form, Unusable, forms
from shardwise.proof.kit.samples import Operator, Sample, all_operators

MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]
FORMS = ("function", "in-place", OUT)
LARGEST, MOST_TENSORS = 2000, 8

ROUNDED = ("half", "bfloat16", "chalf", "cfloat", "float")
"""Conversions that round: what a pending sum loses by them depends on its terms."""


@lru_cache(maxsize=64)
def samples(op: Operator) -> list[Sample]:
    """Those with tensors that are not too large."""
    found = op.samples(12) if op.dtype is not None else []
    return [
        sample
        for sample in found
        if 0 < len(sample.tensors) <= MOST_TENSORS and sum(x.numel() for x in sample.tensors) <= LARGEST
    ]


def pending_kinds(x: Tensor, op: Operator) -> tuple[str, ...]:
    if op.name in ROUNDED or not (x.is_floating_point() or x.is_complex()):
        return ()
    return ("sum", "avg") if x.is_complex() else ("sum", "avg", "max", "min")


def try_one(op: Operator, sample: Sample, form: Form, chance: random.Random) -> None:
    """A call is right, or a write that needs another layout is refused (whether it does is judged elsewhere)."""
    mesh = mesh_of(chance.choice(MESHES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = make_case(op, form, sample, seed=0)
        except Unusable:
            return
        layouts = [
            random_layout(chance, mesh, x.shape, pending=pending_kinds(x, op) if chance.random() < 0.5 else ())
            for x in case.sample.tensors
        ]
        verdict = judging.judge(case, mesh, layouts)
    told = f"{op.name} {form.name} {sample} on {[str(layout) for layout in layouts]}: {verdict.detail}"
    note(told)
    assert verdict.kind in ("right", "refused"), told


@pytest.fixture(autouse=True, scope="module")
def layouts_for_placements() -> None:
    """Cases are judged in whole layouts, of which placements say only a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "place", lambda x, mesh, layout, seed: laid_out(x, layout, seed))
        yield


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_any_operator_in_any_layout(number: int, chance: random.Random) -> None:
    op = all_operators()[number % len(all_operators())]
    if not samples(op):
        return
    try_one(
        op, chance.choice(samples(op)), chance.choice([form for form, _ in forms(op) if form.name in FORMS]), chance
    )


def test_an_extremum_is_reduced_before_terms_of_a_sum_are_made() -> None:
    mesh, x = mesh_of((3, 2)), normal(5).requires_grad_()
    d = laid_out(x, Layout.of(mesh, (5,), [sw.Partial("max"), sw.Replicate()]))
    d.redistribute(mesh, [sw.Replicate(), sw.Partial()]).backward(sw.distribute_tensor(torch.ones_like(x), mesh))
    check_shards(d.grad)
