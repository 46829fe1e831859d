"""Iterators that a function reaches: it is captured if it leaves them alone."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import CaptureError, CaptureWarning

ADVICE = ", which only Python would do in every run: take items outside, and hand them in"


def made_by(items: list[int]) -> Iterator[int]:
    yield from items


KINDS: list[Callable[[Any], Any]] = [iter, made_by, enumerate, itertools.cycle, lambda items: iter(DataLoader(items))]


class Trainer:
    """Which takes a batch where it is handed none."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.weight = batches, nn.Parameter(torch.ones(3))

    def step(self, x: Any = None) -> Any:
        x = next(self.batches) if x is None else x
        return (x * self.weight).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_taken_is_left_alone(kind: Callable[[Any], Any]) -> None:
    trainer, others = Trainer(kind([3, 4])), kind([5, 6])
    step, x = sw.compile(trainer.step, backend="fx"), torch.ones(3)
    before = trainer.batches
    assert step(x).item() == step(x).item() == 3
    assert trainer.batches is before and len(step.programs) == 1
    trainer.batches = others  # as in another epoch
    assert step(x).item() == 3 and len(step.programs) == 1
    trainer.batches = None
    assert step(x).item() == 3 and len(step.programs) == 2
    assert next(before) == next(kind([3, 4])) and next(others) == next(kind([5, 6]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_is_refused_where_it_is_taken(kind: Callable[[Any], Any]) -> None:
    trainer = Trainer(kind([3, 4]))
    where = f"{__file__}, line {inspect.getsourcelines(Trainer.step)[1] + 1}"
    before = trainer.batches
    with pytest.raises(CaptureError) as caught:
        sw.compile(trainer.step, backend="fx")()
    assert str(caught.value) == f"the program takes the next item of self.batches in {where}{ADVICE}"
    assert trainer.batches is before and next(before) == next(kind([3, 4]))


def test_all_ways_to_use_one_count() -> None:
    batches = iter(DataLoader([3, 4]))
    named, listed, take = {"it": batches}, [batches], batches.__next__

    def swallows(x: Any) -> Any:
        try:
            next(batches)
        except Exception:
            return x
        return x + 1

    functions: dict[Callable[[Any], Any], str] = {
        lambda x: (x, [*named["it"]]): "takes the next item of named['it']",
        lambda x: (x, list(zip(listed[0], "ab"))): "takes the next item of listed[0]",
        lambda x: (x, len(batches)): "looks into batches",
        lambda x: (x, batches._num_yielded): "looks into batches",
        lambda x: (x, take()): "calls take",
        lambda x: (x, 3 in batches): "takes the next item of batches",
        swallows: "takes the next item of batches",
    }
    for function, said in functions.items():
        with pytest.raises(CaptureError, match=f"the program {said.replace('[', '.').replace(']', '.')} in .*{ADVICE}"):
            sw.compile(function, backend="fx")(torch.ones(3))
    assert named["it"] is batches and listed[0] is batches and next(batches).item() == 3


def test_where_nothing_else_can_be_put_in_its_place() -> None:
    batches = iter([3, 4])
    pair = (batches, 0)
    for function, given, name in (
        (lambda x: (x, next(pair[0])), (), "pair[0]"),
        (lambda x, it: (x, next(it)), (batches,), "it"),
        (partial(lambda it, x: (x, next(it)), batches), (), "partial(0)"),
    ):
        with pytest.raises(CaptureError) as caught:
            sw.compile(function, backend="fx")(torch.ones(3), *given)
        assert str(caught.value) == f"the program may take the next item of {name}{ADVICE}"
    assert next(batches) == 3


def test_a_name_made_at_run_time() -> None:
    class Work:
        def __init__(self) -> None:
            self.turn_0 = iter([3, 4])

    work = Work()
    with pytest.raises(CaptureError, match=r"the program may take the next item of work\.turn_0"):
        sw.compile(lambda x: (x, next(getattr(work, f"turn_{0}"))), backend="fx")(torch.ones(3))


def test_another_thread_has_the_iterator_meanwhile() -> None:
    batches, taken = iter([3, 4, 5]), SimpleQueue()

    def step(x: Any) -> Any:
        if x is None:
            return next(batches)
        assert batches is not None and batches and isinstance(batches, type(iter([])))
        other = Thread(target=lambda: taken.put(next(batches)))
        other.start()
        other.join()
        return x * 2

    assert sw.compile(step, backend="fx")(torch.ones(3)).tolist() == [2, 2, 2]
    assert taken.get() == 3 and next(batches) == 4


def test_one_that_the_program_replaces_or_keeps_elsewhere_is_put_back() -> None:
    for change in (
        lambda work: setattr(work, "batches", iter([7])),
        lambda work: setattr(work, "kept", work.batches),
        lambda work: delattr(work, "batches"),
    ):
        trainer = Trainer(batches := iter([3, 4]))
        step = sw.compile(lambda x, change=change, trainer=trainer: (change(trainer), x), backend="fx")
        with pytest.raises(CaptureError, match="the program changes"):
            step(torch.ones(3))
        assert trainer.batches is batches and not hasattr(trainer, "kept") and next(batches) == 3


def test_a_function_that_takes_one_runs_as_it_is_if_it_may() -> None:
    batches = iter([3, 4])
    step = sw.compile(lambda x: (x, next(batches)), backend="fx", fullgraph=False)
    with pytest.warns(CaptureWarning, match="the program takes the next item of batches"):
        assert step(torch.ones(3))[1] == 3
    assert step(torch.ones(3))[1] == 4
