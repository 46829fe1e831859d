"""Programs with a known best schedule communicate no more than that, and compute what plain torch does."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from scheduled import Program, Size, judge, run_on, run_plain
from schedules import PORTS, PROGRAMS, missing, same
from wire import Collective, Schedule, Small, all_gather, all_reduce, all_to_all, reduce_scatter, ring_bytes

Case = tuple[Program, Size]
CASES: list[Case] = [(program, size) for program in PROGRAMS for size in program.sizes]


def parametrized(cases: list[Case]) -> pytest.MarkDecorator:
    names = [f"{program.name}, {size}".replace("×", "x") for program, size in cases]
    return pytest.mark.parametrize(("program", "size"), cases, ids=names)


tiny = parametrized([case for case in CASES if case[1].is_tiny])


def ends(program: Program) -> list[Size]:
    """The least and the greatest of the real sizes: latency counts most in one, bytes in the other. `make schedules`
    has those in between."""
    sizes = [size for size in program.sizes if not size.is_tiny]
    return [*dict.fromkeys((sizes[0], sizes[-1]))] if sizes else []


larger = parametrized([(program, size) for program in PROGRAMS for size in ends(program)])


def skip_if_missing(program: Program) -> None:
    if missing(program.needs):
        pytest.skip(f"{program.needs} is not installed")


@cache
def schedule_on(port: str, program: Program, size: Size) -> Schedule:
    skip_if_missing(program)
    return run_on(port, program, size).schedule


def check(program: Program, size: Size, found: Schedule) -> None:
    for name, comparison in zip(("forward", "backward"), judge(program, size, found), strict=True):
        assert comparison.is_met, f"{name}: {comparison.ours}; a person: {comparison.person}"


@pytest.mark.parametrize("port", PORTS)
@tiny
def test_communicates_no_more_than_a_person_would(program: Program, size: Size, port: str) -> None:
    check(program, size, schedule_on(port, program, size))


@pytest.mark.slow
@larger
def test_communicates_no_more_than_a_person_would_at_real_sizes(program: Program, size: Size) -> None:
    check(program, size, schedule_on("recording", program, size))


@tiny
def test_all_ports_communicate_alike(program: Program, size: Size) -> None:
    recorded, *others = (schedule_on(port, program, size) for port in PORTS)
    for other in others:
        assert same(recorded, other)


@tiny
def test_computes_what_plain_torch_does(program: Program, size: Size, double_precision: None) -> None:
    skip_if_missing(program)
    ours, plain = run_on("simulated", program, size), run_plain(program, size)
    torch.testing.assert_close(ours.result.full_tensor(), plain.result, rtol=program.tolerance, atol=0)
    assert ours.gradients.keys() == plain.gradients.keys()
    noise = 1e-3 * max((gradient.norm().item() for gradient in plain.gradients.values()), default=0.0)
    for name, gradient in plain.gradients.items():  # those that are zero but for rounding, like that of a key's bias
        error = (ours.gradients[name].full_tensor() - gradient).norm().item()
        assert error <= program.tolerance * (gradient.norm().item() + noise), name


def test_a_ring_sends_what_the_model_says() -> None:
    n, numbers = 4, 1024
    assert ring_bytes(all_reduce(numbers, n)) == 2 * (n - 1) / n * 4096
    assert ring_bytes(all_gather(numbers, n)) == (n - 1) / n * 4096
    assert ring_bytes(reduce_scatter(numbers, n)) == (n - 1) / n * 4096
    assert ring_bytes(all_to_all(numbers, n)) == (n - 1) / n * 1024
    assert ring_bytes(all_gather(numbers, n)) + ring_bytes(reduce_scatter(numbers, n)) == ring_bytes(
        all_reduce(numbers, n)
    )


def test_small_is_a_few_numbers_per_row_or_the_gradient_of_a_vector() -> None:
    small = Small(rows=4, width=64)
    assert small(all_reduce(32, 2), backward=False)
    assert not small(all_reduce(33, 2), backward=False)
    assert small(all_reduce(64, 2), backward=True)
    assert not small(all_reduce(65, 2), backward=True)
    assert not small(Collective("all_gather", 65, 2), backward=False)  # what counts is the whole: 130 bytes of 128
    assert not small(Collective("all_to_all", 0, 2), backward=False)  # others may bring much
