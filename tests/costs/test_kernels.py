"""The ops of torch that run on DTensors, forward and backward, are those that plain torch runs on the shards.

Its twin on a GPU, tests/gpu/test_kernels.py, compares kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import (
    CHECK,
    COPIES,
    DRAWS,
    MARK,
    NUM_RANKS,
    RANK,
    SHARED_REASONS,
    Place,
    Ran,
    Reason,
    Report,
    attention_cases,
    by_run,
    compared,
    kernels,
    ops_named,
    sized_cases,
    torch_cases,
)
from kernels import ops as ops_of
from saved import fake_mesh
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend

SEED = ops_named("random_", "_local_scalar_dense")

REASONS = (
    Reason("a seed is drawn from the CPU's generator, which all ranks keep in step", DRAWS, SEED + COPIES),
    Reason(
        "on the CPU torch looks at indices and refuses some: ranks with different ones confer first, to refuse alike",
        ("*cross_entropy", "*nll_loss", "*margin_loss", "*max_unpool*", "embedding"),
        CHECK + COPIES,
    ),
    *SHARED_REASONS,
)


@pytest.fixture
def place() -> Iterator[Place]:
    with fake_mesh(NUM_RANKS, names=("dp",), rank=RANK) as mesh:
        yield Place(mesh)


def test_functions(place: Place) -> None:
    compared(place, torch_cases(6), REASONS).check(at_least=700)


def test_sizes_of_real_programs(place: Place) -> None:
    compared(place, sized_cases(), REASONS).check(at_least=30)


def test_attention(place: Place) -> None:
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    compared(place, attention_cases(backends), REASONS).check(at_least=16)


def test_a_difference_is_seen() -> None:
    report = Report(())
    case = next(sized_cases())
    report.add(case, Ran({"aten::mm": 2}), Ran({"aten::mm": 1, "aten::clone": 1}))
    with pytest.raises(AssertionError, match=r"linear #0, replicated.*\n  \+1 aten::clone\n  -1 aten::mm"):
        report.check(at_least=1)


class Event:
    """What the profiler says of something that ran."""

    def __init__(self, name: str, device: DeviceType, start: int, correlation: int = 0) -> None:
        self.name, self.device_type = lambda: name, lambda: device
        self.start_ns, self.correlation_id = lambda: start, lambda: correlation


def test_kernels_belong_to_the_run_that_launched_them() -> None:
    """Whenever they ran, and although the device has marks of its own."""
    host, device = DeviceType.CPU, DeviceType.CUDA
    events = [
        *(Event(f"{MARK}{number}", host, start) for number, start in enumerate((100, 200))),
        *(Event("cudaLaunchKernel", host, start, number) for number, start in ((1, 110), (2, 120), (3, 210))),
        *(Event("gemm", device, start, number) for number, start in ((1, 115), (2, 205), (3, 260))),
        *(Event("Memset", device, 95), Event(f"{MARK}0", device, 115), Event("aten::mm", host, 105, 2)),
    ]
    assert by_run(events, 2, kernels(events)) == [{"gemm": 2}, {"gemm": 1}]
    assert by_run(events, 2, ops_of(events)) == [{"aten::mm": 1}, {}]
