"""The launcher itself: it succeeds, it reports the rank that failed, it stops a rank that hangs."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch import run_ranks

pytestmark = pytest.mark.multiprocess


def sum_of_ranks(rank: int, world_size: int, folder: Path, scale: torch.Tensor) -> None:
    assert dist.get_rank() == rank
    assert dist.get_world_size() == world_size
    total = scale * (rank + 1)
    dist.all_reduce(total)
    (folder / str(rank)).write_text(str(total.item()))


def test_every_rank_runs_and_they_communicate(tmp_path: Path) -> None:
    run_ranks(sum_of_ranks, 3, tmp_path, torch.tensor(10))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": "60", "1": "60", "2": "60"}


def rank_one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the shards do not fit")
    dist.barrier()


def test_a_failing_rank_is_named_and_its_traceback_shown() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(rank_one_raises, 2)
    report = str(caught.value)
    assert report.startswith("rank_one_raises on 2 ranks: rank 1 failed\n--- rank 1 failed:\nTraceback")
    assert "in rank_one_raises" in report
    assert "ValueError: the shards do not fit" in report
    assert report.endswith("--- rank 0 had not finished and had to be stopped")


def rank_zero_waits_for_ever(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def test_a_hanging_rank_is_stopped_and_its_stack_shown() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(rank_zero_waits_for_ever, 2, timeout=3)
    report = str(caught.value)
    assert report.startswith("rank_zero_waits_for_ever on 2 ranks: rank 0 did not finish within 3 s\n")
    assert "--- rank 0 was stopped here:" in report
    assert "in rank_zero_waits_for_ever" in report
    assert "rank 1" not in report


def rank_zero_vanishes(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_ends_without_an_exception_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 failed:\nthe process ended without a word, exit code 7"):
        run_ranks(rank_zero_vanishes, 2)


def everyone_warns(rank: int, world_size: int) -> None:
    warnings.warn("mind the gap", stacklevel=1)


def test_warnings_are_errors_on_the_ranks_too() -> None:
    with pytest.raises(AssertionError, match="UserWarning: mind the gap"):
        run_ranks(everyone_warns, 1)


def test_a_function_that_a_new_process_cannot_find_is_refused() -> None:
    def inner(rank: int, world_size: int) -> None: ...

    with pytest.raises(TypeError, match="must be a top-level function"):
        run_ranks(inner, 1)
