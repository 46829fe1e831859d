"""Dtypes that torch has no kernel for: its own error wherever the input lies, on all ranks, and nothing communicated.

Kernels for meta tensors, on which calls are traced, take most of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sweep import mesh_of
from torch import Tensor

import shardwise as sw
from shardwise.dispatch import clear_cache
from shardwise.dispatch.planning import ask_torch as stand_ins
from shardwise.dispatch.planning.ask_torch import refused_dtypes
from shardwise.proof.errors.bad_calls import Bad
from shardwise.proof.errors.bad_calls import refused as refused_by_torch
from shardwise.proof.errors.command import judge
from shardwise.proof.kit.samples import Sample

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")

R, S = sw.Replicate(), sw.Shard
BOOL, BYTE, LONG = torch.bool, torch.uint8, torch.int64
HALF, BRAIN, COMPLEX = torch.float16, torch.bfloat16, torch.complex64

TARGET = torch.tensor([0, 2, 1, 0, 2])
CASES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], tuple[torch.dtype, ...]]] = {
    "median": (torch.median, (5, 3), (BOOL, COMPLEX)),
    "nanmedian": (torch.nanmedian, (5, 3), (BOOL,)),
    "trace": (torch.trace, (5, 5), (BOOL,)),
    "argmax": (torch.argmax, (5, 3), (BOOL, COMPLEX)),
    "argmin of rows": (lambda x: x.argmin(1), (5, 3), (BOOL,)),
    "cross_entropy": (lambda x: F.cross_entropy(x, like(x, TARGET)), (5, 3), (BYTE, LONG)),
    "nll_loss": (lambda x: F.nll_loss(x, like(x, TARGET), reduction="sum"), (5, 3), (BYTE, LONG)),
    "log_softmax": (lambda x: x.log_softmax(1), (5, 3), (BYTE, LONG)),
    "mm": (lambda x: x @ x, (5, 5), (BOOL,)),
    "nextafter": (lambda x: torch.nextafter(x, x), (5, 3), (BOOL, LONG, COMPLEX)),
    "special": (lambda x: torch.special.hermite_polynomial_h(x, x), (5, 3), (HALF, BRAIN, COMPLEX)),
    "cdist": (lambda x: torch.cdist(x, x, p=1.0), (5, 4, 3), (HALF, BRAIN, LONG)),
    "fft": (lambda x: torch.fft.fft(x, dim=1), (5, 3), (HALF, BRAIN)),
    "cholesky": (torch.linalg.cholesky, (3, 4, 4), (HALF, BRAIN)),
    "lu": (torch.linalg.lu_factor, (3, 4, 4), (HALF, BRAIN, LONG)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (3, 6), (BOOL, BYTE, LONG)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (3, 2, 6, 6), (BOOL, COMPLEX)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), (3, 2, 6, 6), (BOOL, LONG)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (3, 2, 4), (BOOL, LONG)),
    "reflected": (lambda x: F.pad(x, (1, 1), mode="reflect"), (3, 6), (BOOL,)),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(x, x), (3, 3, 3), (BOOL, BYTE)),
}


def like(x: Tensor, value: Tensor) -> Tensor:
    """`value` on the mesh of `x`, if that is on one."""
    return sw.distribute_tensor(value, x.device_mesh, src_data_rank=None) if isinstance(x, sw.DTensor) else value


def numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(tuple(shape)).remainder(5).to(dtype)


def bad_call(name: str, dtype: torch.dtype) -> Bad:
    function, shape, _ = CASES[name]
    found = refused_by_torch(function, Sample(0, (numbers(shape, dtype),)))
    assert found is not None and not found.of_data
    return found


def layouts(shape: Sequence[int]) -> list[tuple[int, sw.Placement]]:
    """Ways to lay a tensor out on so many ranks: whole, uneven, and with ranks that hold nothing."""
    return [(2, R), *((ranks, S(dim)) for ranks in (2, 4) for dim in range(len(shape)))]


EACH = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, case in CASES.items() for dtype in case[2]]


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_never_seen(name: str, dtype: torch.dtype) -> None:
    call = bad_call(name, dtype)
    for ranks, placement in layouts(CASES[name][1]):
        clear_cache()
        verdict = judge(call, mesh_of((ranks,)), ((placement,),))
        assert verdict.kind == "same", (ranks, placement, verdict)


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_planned_in_another_dtype(name: str, dtype: torch.dtype) -> None:
    """A plan that begins with a move, and holds for all dtypes, moves first; all ranks raise alike nevertheless."""
    function, shape, _ = CASES[name]
    call = bad_call(name, dtype)
    for ranks, placement in layouts(shape):
        clear_cache()
        mesh = mesh_of((ranks,))
        matrix = torch.eye(4).expand(3, 4, 4) if name == "cholesky" else numbers(shape, torch.float32)
        function(sw.distribute_tensor(matrix, mesh, [placement]))
        verdict = judge(call, mesh, ((placement,),))
        assert verdict.kind in ("same", "told"), (ranks, placement, verdict)


WITHOUT_MOVES = ("argmin of rows", "cdist", "fft", "log_softmax", "max_pool1d", "max_pool2d", "lu", "reflected")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", WITHOUT_MOVES)
def test_planned_in_another_dtype_where_nothing_moves(name: str, ranks: int) -> None:
    function, shape, dtypes = CASES[name]
    clear_cache()
    mesh = mesh_of((ranks,))
    function(sw.distribute_tensor(numbers(shape, torch.float32), mesh, [S(0)]))
    for dtype in dtypes:
        assert judge(bad_call(name, dtype), mesh, ((S(0),),)).kind == "same"


def test_two_axes_and_words_of_other_memory_formats() -> None:
    whole = numbers((3, 2, 6, 6), BOOL).contiguous(memory_format=torch.channels_last)
    call = refused_by_torch(lambda x: F.max_pool2d(x, 2), Sample(0, (whole,)))
    assert call is not None and "channels_last" in str(call.error)
    assert judge(call, mesh_of((2, 2)), ((S(0), S(3)),)).kind == "same"


@pytest.mark.parametrize("placement", [R, S(0)])
def test_more_elements_than_are_asked(placement: sw.Placement) -> None:
    many = sw.distribute_tensor(torch.zeros(stand_ins.MANY + 6, dtype=BOOL), mesh_of((2,)), [placement])
    with pytest.raises(RuntimeError, match=r"^argmax\(\): does not support bool input$"):
        many.argmax()
    with pytest.raises(NotImplementedError, match="\"median_cpu\" not implemented for 'Bool'"):
        many.median()
    rows = sw.distribute_tensor(torch.ones(1100, 1000, dtype=BRAIN), mesh_of((2,)), [placement])
    assert F.layer_norm(rows, (1000,)).dtype == BRAIN


# What is not refused


def lengths(x: Tensor) -> Tensor:
    """Neither zeros nor ones are good lengths, so what torch says to them is not of dtypes."""
    return torch.segment_reduce(x, "sum", lengths=like(x, torch.tensor([3, 0, 2])))


TAKEN: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "lengths": (lengths, numbers((5,), BRAIN)),
    "integers by integers": (lambda x: x // (x + 1), numbers((5, 3), LONG)),
    "a system": (lambda x: torch.linalg.solve(x, x), torch.eye(4).expand(3, 4, 4).to(COMPLEX)),
    "a definite matrix": (torch.linalg.cholesky, torch.eye(4).expand(3, 4, 4).to(COMPLEX)),
    "many rows": (lambda x: torch.cdist(x, x), numbers((30, 3), HALF)),
    "groups": (lambda x: F.group_norm(x, 5), numbers((3, 10, 2), BRAIN)),
    "a wide pool": (lambda x: F.avg_pool1d(x, 7, padding=3), numbers((3, 2, 9), BRAIN)),
    "a sum of a mask": (torch.sum, numbers((5, 3), BOOL)),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize(("function", "x"), TAKEN.values(), ids=TAKEN)
def test_what_torch_takes(function: Callable[[Tensor], Any], x: Tensor) -> None:
    expected = function(x)
    for placement in (R, S(0)):
        for ranks in (2, 4):
            clear_cache()
            found = function(sw.distribute_tensor(x, mesh_of((ranks,)), [placement]))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.full_tensor(), expected)


def test_asking_draws_no_random_numbers() -> None:
    generator, alike = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    x = torch.zeros(6, dtype=BRAIN)
    before = torch.get_rng_state()
    assert refused_dtypes(torch.Tensor.normal_, (x,), {"generator": generator}) is None
    assert refused_dtypes(torch.Tensor.normal_, (x,), {}) is None
    assert not x.any()
    assert torch.equal(generator.get_state(), alike.get_state()) and torch.equal(torch.get_rng_state(), before)


# What it costs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Callable]:
    """The functions that torch was asked about."""
    found: list[Callable] = []
    ask = stand_ins._said

    def said(func: Callable, *args: Any, **kwargs: Any) -> Exception | None:
        found.append(func)
        return ask(func, *args, **kwargs)

    monkeypatch.setattr(stand_ins, "_said", said)
    monkeypatch.setattr(stand_ins, "_taken", {})
    clear_cache()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everyday_dtypes_are_not_asked_about(asked: list[Callable], dtype: torch.dtype) -> None:
    x = sw.distribute_tensor(numbers((5, 3), dtype), mesh_of((2,)), [S(0)])
    F.layer_norm(x @ x.T, (5,)).median()
    assert asked == []


def test_torch_is_asked_once_whatever_the_sizes(asked: list[Callable]) -> None:
    for rows in (5, 6, 700):
        for placement in (R, S(0)):
            sw.distribute_tensor(numbers((rows, 8), BRAIN), mesh_of((2,)), [placement]).softmax(1)
    assert len(asked) == 1
    sw.distribute_tensor(numbers((5, 8), HALF), mesh_of((2,)), [R]).softmax(1)  # planned, for all dtypes
    assert len(asked) == 1
    sw.distribute_tensor(numbers((7, 8), HALF), mesh_of((2,)), [R]).softmax(1)
    sw.distribute_tensor(numbers((7, 8), HALF), mesh_of((2,)), [R]).softmax(0)
    assert len(asked) == 3


def test_views_are_not_asked_about(asked: list[Callable]) -> None:
    sw.distribute_tensor(numbers((4, 6), BRAIN), mesh_of((2,)), [S(0)]).view(2, 2, 6).transpose(1, 2)[:, 1:]
    assert asked == []


def test_what_is_remembered_is_bounded(asked: list[Callable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "MOST_TAKEN", 2)
    for dtype in (HALF, BRAIN, COMPLEX, LONG):
        assert refused_dtypes(torch.abs, (numbers((5,), dtype),), {}) is None
    assert len(stand_ins._taken) == 2


def test_what_cannot_be_made_small_is_not_asked_about(asked: list[Callable]) -> None:
    assert refused_dtypes(torch.argmax, (torch.zeros((), dtype=BOOL).expand(*[2] * 40),), {}) is None
    assert asked == []


def test_other_devices_have_other_kernels() -> None:
    elsewhere = torch.empty(5, dtype=BOOL, device="meta")
    assert refused_dtypes(torch.argmax, (elsewhere,), {}) is None
    assert stand_ins.refused(torch.median, (elsewhere,), {}) is None
    assert isinstance(stand_ins.refused(torch.median, (torch.empty(5, dtype=BOOL),), {}), NotImplementedError)


def test_ops_of_users_are_not_tried_out() -> None:
    seen: list[tuple[int, ...]] = []

    @torch.library.custom_op("refused_dtypes::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x.clone()

    noted.register_fake(torch.empty_like)
    noted(sw.distribute_tensor(numbers((5, 3), LONG), mesh_of((2,)), [R]))
    assert seen == [(5, 3)] * len(seen) and len(seen) in (1, 2)  # once for all ranks, or once for each


@pytest.mark.parametrize("solve", [torch.linalg.lu_solve, torch.linalg.ldl_solve], ids=["lu", "ldl"])
def test_pivots_are_not_made_up(solve: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that they name are swapped, wherever those are."""
    tried: list[Any] = []
    monkeypatch.setattr(stand_ins, "_said", lambda *args, **kwargs: tried.append(args))
    whole = torch.randn(4, 3, 3, dtype=torch.float64)
    factor = torch.linalg.lu_factor if solve is torch.linalg.lu_solve else torch.linalg.ldl_factor
    parts = *factor(whole @ whole.mT), whole
    found = solve(*(sw.distribute_tensor(x, mesh_of((2,)), [S(0)]) for x in parts))
    torch.testing.assert_close(found.full_tensor(), solve(*parts))  # type: ignore[attr-defined]
    assert not tried
