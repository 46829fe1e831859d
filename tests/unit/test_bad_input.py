"""Bad input: refused wherever it is sharded, on all ranks alike, and nothing left half done.

Of all operators: tests/property/test_bad_arguments.py. Errors of Shardwise's own are in test_errors.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bad_calls import BadCall, check_refused, refused
from bad_data import BAD_DATA
from sweep import mesh_of, normal, place

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode
from shardwise.dispatch import clear_cache
from shardwise.dispatch.planning import ask_torch
from shardwise.proof.coverage.command import assignments
from shardwise.proof.kit.samples import Sample
from shardwise.proof.kit.together import RanksApart, ranks_compared

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()


def bad(function: Callable[..., Any], *tensors: torch.Tensor) -> BadCall:
    found = refused(function, Sample(0, tensors))
    assert found is not None, "torch takes it"
    return found


# Bad data, on one rank only


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_on_one_rank(name: str) -> None:
    function, tensors = BAD_DATA[name]
    call = refused(function, Sample(0, tensors))
    if call is None:
        assert torch.__version__ < "2.13", "torch refuses all of these"
        pytest.skip(f"this torch takes bad data for {name} without a word")
    chance = random.Random(0)
    for shape, most in (((2,), 10), ((2, 2), 3)):
        for way in assignments(tensors, len(shape), most, chance):
            check_refused(call, mesh_of(shape), way, may_move=True)


# What the check can see


def on_dtensors(distributed: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does one thing with DTensors and refuses plain tensors."""
    return lambda x: distributed(x) if isinstance(x, sw.DTensor) else refuse(x)


def refuse(x: Any) -> None:
    raise ValueError("wrong")


X = normal(5, 3)
SEEN: dict[str, tuple[Callable[..., Any], str]] = {
    "no error": (lambda x: x, "DID NOT RAISE"),
    "communicated": (lambda x: (x.full_tensor(), refuse(x)), "before it was refused"),
    "written": (lambda x: (x.zero_(), refuse(x)), "written to"),
}


@pytest.mark.parametrize(("function", "words"), SEEN.values(), ids=SEEN)
def test_what_is_wrong_is_seen(function: Callable[..., Any], words: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=words):
        check_refused(bad(on_dtensors(function), X), mesh_of((2,)), ((S(0),),))
    check_refused(bad(on_dtensors(refuse), X), mesh_of((2,)), ((S(0),),))


def test_a_rank_that_raises_alone_is_seen() -> None:
    zeros = ranked([torch.tensor([1]), torch.tensor([0])])
    with ranks_compared(), pytest.raises(RanksApart, match="no error; RuntimeError: ZeroDivision"):
        zeros // zeros
    with ranks_compared(), pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):
        zeros // ranked([torch.tensor([0]), torch.tensor([0])])
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):  # outside all is as it was
        zeros // zeros


def test_a_rule_that_does_not_confer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.rules.losses import losses

    function, tensors = BAD_DATA["binary_cross_entropy"]
    call, way = bad(function, *tensors), ((S(0),), (S(0),))
    clear_cache()
    monkeypatch.setattr(losses, "refuse", lambda *args: False)
    with pytest.raises(RanksApart):
        check_refused(call, mesh_of((2,)), way)
    monkeypatch.undo()
    check_refused(call, mesh_of((2,)), way)


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
    check_refused(bad(function, x, y), mesh_of((2,)), ((S(0),), (S(0),)))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
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
    for way in assignments(call.sample.tensors, 1, 12, random.Random(0)):
        clear_cache()
        check_refused(call, mesh_of((2,)), way)


def test_channels_that_do_not_fit_are_refused_at_any_size() -> None:
    """Sharded alike, some ranks would find that they do."""
    x, weight = place(torch.ones(2, 8, 300, 300), R), place(torch.ones(64, 8, 3, 3), S(0))
    bias = place(torch.ones(63), S(0))
    with CommDebugMode() as comm, ranks_compared(), pytest.raises(RuntimeError):
        F.conv2d(x, weight, bias)
    assert not comm.comms


OF_NOTHING: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "no outputs": (lambda x, w: F.conv_transpose2d(x, w, padding=1), ((2, 2, 1, 1), (2, 2, 2, 2))),
    "no inputs": (F.conv_transpose2d, ((2, 2, 1, 0), (2, 2, 2, 2))),
    "an image of nothing": (lambda x: F.interpolate(x, scale_factor=0.1, mode="bilinear"), ((2, 2, 4, 4),)),
    "no channels": (lambda x: F.interpolate(x, size=2, mode="trilinear"), ((2, 0, 3, 3, 3),)),
    "averages of nothing": (lambda x: F.adaptive_avg_pool3d(x, 2), ((2, 0, 3, 3, 3),)),
}


@pytest.mark.parametrize(("function", "shapes"), OF_NOTHING.values(), ids=OF_NOTHING)
def test_of_nothing(function: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Kernels for meta tensors give an empty result where others complain."""
    call = bad(function, *(normal(*shape) for shape in shapes))
    for placement in (R, S(0), S(1)):
        check_refused(call, mesh_of((2,)), ((placement,),) * len(shapes))


# Trying out costs what it must


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Callable]:
    """The functions that were tried out."""
    found: list[Callable] = []
    original = ask_torch._raised
    monkeypatch.setattr(ask_torch, "_raised", lambda func, *rest: (found.append(func), original(func, *rest))[1])
    clear_cache()
    return found


def test_a_call_that_runs_as_it_is_is_not_tried(tried: list[Callable]) -> None:
    x, w = place(normal(6, 4), S(0)), place(normal(5, 4), R)
    F.linear(x, w, place(normal(5), R)).view(2, 3, 5).exp()
    F.conv1d(place(normal(2, 4, 6), S(0)), place(normal(3, 4, 3), R), place(normal(3), R))
    assert tried == []


def test_a_good_call_is_tried_once(tried: list[Callable]) -> None:
    x = place(normal(6, 4), S(1))
    for _ in range(2):
        x.softmax(1)
    assert len(tried) == 1


def test_large_calls_are_not_tried_unless_a_rank_holds_nothing(tried: list[Callable]) -> None:
    many = ask_torch.SMALL // 4 + 1
    place(torch.zeros(4, many), S(1)).softmax(1)
    assert tried == []
    with ranks_compared(), pytest.raises(RuntimeError):
        place(torch.zeros(1, many * 4, dtype=torch.bool), S(0)).argmax(1)
    assert tried
    larger = place(torch.zeros(1, ask_torch.LARGE + 1, dtype=torch.bool), S(0))
    with ranks_compared(), pytest.raises(NotImplementedError):  # a few of the elements tell
        larger.log_softmax(1)


def test_trying_draws_no_random_numbers() -> None:
    generator, alike = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    x = torch.zeros(6)
    before = torch.get_rng_state()
    assert ask_torch.refused(torch.Tensor.normal_, (x,), {"generator": generator}) is None
    assert ask_torch.refused(torch.Tensor.normal_, (x,), {}) is None
    assert not x.any()
    assert torch.equal(generator.get_state(), alike.get_state()) and torch.equal(torch.get_rng_state(), before)


def test_other_devices_have_other_kernels() -> None:
    assert ask_torch.refused(torch.median, (torch.empty(5, dtype=torch.bool, device="meta"),), {}) is None
    assert isinstance(ask_torch.refused(torch.median, (torch.empty(5, dtype=torch.bool),), {}), NotImplementedError)


def test_ops_of_users_are_not_tried_out() -> None:
    seen: list[tuple[int, ...]] = []

    @torch.library.custom_op("bad_input::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x.clone()

    noted.register_fake(torch.empty_like)
    noted(sw.distribute_tensor(torch.arange(3), mesh_of((4,)), [S(0)]))
    assert seen == [(3,)] * len(seen) and len(seen) in (1, 4)  # gathered; once for all ranks, or once for each


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("solve", [torch.linalg.lu_solve, torch.linalg.ldl_solve], ids=["lu", "ldl"])
def test_pivots_are_not_made_up(solve: Callable[..., torch.Tensor], tried: list[Callable]) -> None:
    """The rows that they name are swapped, wherever those are."""
    whole = normal(4, 3, 3)
    factor = torch.linalg.lu_factor if solve is torch.linalg.lu_solve else torch.linalg.ldl_factor
    parts = *factor(whole @ whole.mT), whole
    found = solve(*(place(x, S(1)) for x in parts))
    torch.testing.assert_close(found.full_tensor(), solve(*parts))  # type: ignore[attr-defined]
    assert not tried
