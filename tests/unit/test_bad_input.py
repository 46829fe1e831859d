"""Bad input: torch's errors wherever the input lies, on all ranks alike, and nothing left half done.

The whole run is `shardwise errors`. Errors of Shardwise's own are in test_errors.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sweep import mesh_of, normal, place

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode
from shardwise.proof.coverage.command import assignments
from shardwise.proof.errors import command as errors
from shardwise.proof.errors.bad_calls import DATA, Bad, refused
from shardwise.proof.errors.bad_data import BAD_DATA
from shardwise.proof.errors.command import Settings, excused, judge, measure, names_of
from shardwise.proof.kit import together
from shardwise.proof.kit.samples import Sample
from shardwise.rules.kit import refusals

R, S = sw.Replicate(), sw.Shard
FEW = Settings(layouts=4, spread=1)
PARTS = 24


# A part of the whole run


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_on_one_rank(name: str) -> None:
    function, tensors = BAD_DATA[name]
    if refused(function, Sample(0, tensors)) is None:
        assert torch.__version__ < "2.13", "torch refuses all of these"
        pytest.skip(f"this torch takes bad data for {name} without a word")
    (result,) = measure([DATA + name], Settings(layouts=10, spread=3))
    assert result.problems == []
    assert result.calls == 1 and sum(result.kinds.values()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, PARTS // 2])
def test_a_part_of_all_operators(part: int) -> None:
    results = measure(names_of(r"(?!data: |multinomial).*", (part, PARTS)), FEW)
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert sum(result.calls for result in results) > 50


# What the run can see


def bad(function: Callable[..., Any], *tensors: torch.Tensor) -> Bad:
    found = refused(function, Sample(0, tensors))
    assert found is not None
    return found


def verdict(call: Bad, *placements: sw.Placement) -> str:
    return judge(call, mesh_of((2,)), tuple((p,) for p in placements)).kind


def on_dtensors(distributed: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does one thing with DTensors and another with plain tensors."""
    return lambda x: distributed(x) if isinstance(x, sw.DTensor) else plain(x)


def raising(error: Exception) -> Callable[..., Any]:
    def function(*args: Any) -> None:
        raise error

    return function


X = normal(5, 3)
WRONG = ValueError("wrong")
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "the same": (raising(WRONG), "same"),
    "no error": (on_dtensors(lambda x: x, raising(WRONG)), "silent"),
    "other words": (on_dtensors(raising(ValueError("bad")), raising(WRONG)), "words"),
    "another type": (on_dtensors(raising(KeyError("wrong")), raising(WRONG)), "type"),
    "a type of ours": (on_dtensors(raising(sw.errors.PlacementError("wrong")), raising(WRONG)), "same"),
    "communicated": (on_dtensors(lambda x: (x.full_tensor(), raising(WRONG)()), raising(WRONG)), "told"),
    "written": (on_dtensors(lambda x: (x.zero_(), raising(WRONG)()), raising(WRONG)), "wrote"),
}


@pytest.mark.parametrize(("function", "kind"), CASES.values(), ids=CASES)
def test_verdicts(function: Callable[..., Any], kind: str) -> None:
    assert verdict(bad(function, X), S(0)) == kind


def test_a_rank_that_raises_alone_is_seen() -> None:
    zeros = ranked([torch.tensor([1]), torch.tensor([0])])
    with together.ranks_compared(), pytest.raises(together.RanksApart, match="no error; RuntimeError: ZeroDivision"):
        zeros // zeros
    with together.ranks_compared(), pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):
        zeros // ranked([torch.tensor([0]), torch.tensor([0])])
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):  # outside all is as it was
        zeros // zeros


def test_a_rule_that_does_not_confer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.rules.nn import losses

    call = bad(*(lambda function, tensors: (function, *tensors))(*BAD_DATA["binary_cross_entropy"]))
    sw.dispatch.clear_cache()
    monkeypatch.setattr(losses, "agreed", lambda *args: False)
    assert verdict(call, S(0), S(0)) == "apart"
    monkeypatch.undo()
    assert verdict(call, S(0), S(0)) == "same"


KNOWN = "{'all_gather': 1} before RuntimeError: Trying to create tensor with negative dimension -102: [3, -102]"


@pytest.mark.parametrize(
    ("name", "kind", "detail", "found"),
    [
        ("svd_lowrank", "told", KNOWN, "excused"),
        ("svd_lowrank", "same", "", "same"),
        ("svd_lowrank", "silent", KNOWN, "silent"),
        ("svd_lowrank", "told", "{'all_gather': 1} before RuntimeError: another", "told"),
        ("mm", "told", KNOWN, "told"),
        (
            "nn.functional.embedding_bag",
            "silent",
            "no error instead of IndexError: index out of range in self",
            "silent",
        ),
    ],
)
def test_an_excuse_is_for_one_operator_and_one_difference(name: str, kind: str, detail: str, found: str) -> None:
    assert excused(name, errors.Verdict(kind, detail)).kind == found


def test_a_refused_write_excuses_nothing_that_was_communicated() -> None:
    def pending(x: torch.Tensor) -> None:
        x.full_tensor()
        raise sw.errors.InPlaceError("uniform_ lies as [5,3] P(sum)@a")

    call = bad(on_dtensors(pending, raising(WRONG)), X)
    assert judge(call, mesh_of((2,)), ((S(0),),)).detail.startswith("{'all_gather': 1} before InPlaceError")


# Conferring costs one number, and only where it must


@pytest.mark.parametrize("name", ["binary_cross_entropy none", "multi_margin_loss none", "floor_divide", "bernoulli"])
def test_good_data_costs_one_number(name: str) -> None:
    function, tensors = BAD_DATA[name]
    good = [x.clone().fill_(1) for x in tensors]
    split, whole = ([place(x, placement) for x in good] for placement in (S(0), R))
    with CommDebugMode() as comm:
        assert function(*split).placements == (S(0),)
    assert [c.kind for c in comm.comms] == ["all_reduce"] and comm.comms[0].bytes <= 8
    with CommDebugMode() as comm:
        function(*whole)
    assert not comm.comms


def test_floats_are_divided_without_a_word() -> None:
    x, y = place(normal(5, 3), S(0)), place(_zero_at_the_end(normal(5, 3)), S(0))
    with CommDebugMode() as comm:
        result = x // y
    assert not comm.comms and not torch.isfinite(result.full_tensor()[-1, -1])


def _zero_at_the_end(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[-1] = 0
    return x


def test_a_plan_for_floats_is_not_taken_for_integers() -> None:
    """A plan may hold for all dtypes; one that divides must not."""
    function, (x, y) = BAD_DATA["remainder"]
    function(place(x.double(), S(0)), place(y.double(), S(0)))
    assert verdict(bad(function, x, y), S(0), S(0)) == "same"


@pytest.mark.parametrize("name", ["floor_divide_", "multinomial", "binary_cross_entropy", "linalg.lu_solve"])
def test_good_data_after_bad(name: str) -> None:
    function, tensors = BAD_DATA[name]
    laid = [place(x, S(0)) for x in tensors]
    with pytest.raises(RuntimeError):
        function(*laid)
    for x, whole in zip(laid, tensors, strict=True):
        assert torch.equal(x.full_tensor(), whole)
    good = [x.clone().fill_(1) for x in tensors]
    torch.manual_seed(0)
    expected = function(*good)
    result = function(*(place(x, S(0)) for x in good))
    assert result.shape == expected.shape
    if name != "multinomial":
        torch.testing.assert_close(result.full_tensor(), expected)


def test_a_row_that_is_zero_on_one_rank_only_has_chances() -> None:
    chances = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    before = torch.get_rng_state()
    picked = torch.multinomial(place(chances, S(1)), 1)
    assert picked.full_tensor().tolist() == [[3], [0]]
    drawn = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.multinomial(place(chances.flip(0), S(0)), 1)
    assert torch.equal(torch.get_rng_state(), drawn), "looking at bad chances draws nothing"


# What torch's kernels for meta tensors let pass

A, B, C = normal(2, 4, 6), normal(3, 4, 3), normal(4, 3, 3)
ROWS, COMPLEX = torch.tensor([0, 1, 2]), normal(4, 3).to(torch.complex128)
LENIENT: dict[str, tuple[Any, ...]] = {
    "bias of another size": (F.conv1d, A, B, normal(4)),
    "bias of two dims": (F.conv1d, A, B, normal(3, 1)),
    "dilation": (partial(F.conv1d, dilation=-1), A, B),
    "output padding": (partial(F.conv_transpose1d, output_padding=5), A, C),
    "channels": (F.conv_transpose1d, A, B),
    "linear": (F.linear, normal(6, 4), normal(3, 4), normal(2, 6, 3)),
    "addmm": (torch.addmm, normal(2, 6, 3), normal(6, 4), normal(4, 3)),
    "dtypes of products": (torch.matmul, normal(6, 4), normal(4, 3).float()),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), normal(6, 4), ROWS, normal(2, 4)),
    "index_put": (lambda x, i, s: x.index_put((i,), s), normal(6, 4), ROWS, normal(3, 3)),
    "put": (torch.put, normal(6, 4), ROWS, normal(4)),
    "masked_scatter": (torch.masked_scatter, normal(6, 4), torch.ones(6, 4).byte(), normal(6, 4)),
    "samples": (partial(torch.multinomial, num_samples=7), normal(6, 4).abs()),
    "complex pooling": (partial(F.max_pool2d, kernel_size=2), COMPLEX[None]),
    "complex classes": (F.cross_entropy, COMPLEX, torch.tensor([0, 1, 2, 0])),
    "boundaries": (torch.bucketize, normal(6, 4), normal(6, 4)),
}


@pytest.mark.parametrize("name", LENIENT)
def test_refused_before_anything_moves(name: str) -> None:
    call = bad(*LENIENT[name])
    sw.dispatch.clear_cache()
    for way in assignments(call.sample.tensors, 1, 12, random.Random(0)):
        assert judge(call, mesh_of((2,)), way) == errors.Verdict("same"), way


def test_torch_is_asked_only_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = refusals._said
    monkeypatch.setattr(refusals, "_said", lambda call, fill: (asked.append(call.name), original(call, fill))[1])
    monkeypatch.setattr(refusals, "_known", set())
    sw.dispatch.clear_cache()
    x, w = place(normal(6, 4), S(0)), place(normal(5, 4), R)
    F.linear(x, w, place(normal(5), R))
    x.index_add(0, place(torch.tensor([1, 2]), R), place(normal(2, 4), R))
    F.conv1d(place(normal(2, 4, 6), S(0)), place(normal(3, 4, 3), R), place(normal(3), R))
    assert asked == []
    for _ in range(2):
        sw.dispatch.clear_cache()
        place(normal(6, 4).to(torch.complex128), S(0)).exp()
    assert asked == ["exp", "exp"], "once, of zeros and of ones"
