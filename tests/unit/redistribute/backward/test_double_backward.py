"""Trails: what a pass that will be differentiated has recorded, for whoever asked for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from shardwise.redistribute.backward.double_backward import anchored, anchors, left_behind, trail

PATIENCE = 30.0
"""Seconds until a test that waits for another thread gives up."""


def test_a_trail_notes_what_is_part_of_a_graph() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with trail() as outer:
        left_behind([x])
        with trail() as inner:
            left_behind([x, torch.ones(2)])
        left_behind([x])
    left_behind([x])
    assert inner.recorded == [[x]] and [len(noted) for noted in outer.recorded] == [1, 1]


def test_each_thread_has_trails_of_its_own() -> None:
    """Even while another thread, which came later, is on its way."""
    x, y = (torch.ones(2, requires_grad=True) * number for number in (2, 3))
    begun, done = Event(), Event()

    def other() -> list[list[torch.Tensor]]:
        with trail() as noted:
            begun.set()
            assert done.wait(PATIENCE)
            left_behind([y])
        return noted.recorded

    with ThreadPoolExecutor(1) as pool:
        with trail() as mine:
            found = pool.submit(other)
            assert begun.wait(PATIENCE)
            left_behind([x])
        done.set()
        ((theirs,),) = found.result(PATIENCE)
    assert len(mine.recorded) == 1 and mine.recorded[0][0] is x and theirs is y


def test_a_devices_own_thread_works_for_whoever_came_last() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with trail() as mine, ThreadPoolExecutor(1) as pool:
        pool.submit(left_behind, [x]).result(PATIENCE)
    assert len(mine.recorded) == 1 and mine.recorded[0][0] is x


def test_anchors_live_as_long_as_what_leads_to_them() -> None:
    before = len(anchors())
    with trail() as mine:
        (grad,) = anchored([torch.ones(2)])
        (same,) = anchored([torch.ones(2)])
    assert grad.requires_grad and same.requires_grad and len(anchors()) == before + 1
    del mine, same
    assert len(anchors()) == before + 1
    del grad
    assert len(anchors()) == before


def test_anchors_that_no_pass_needs_are_reached_by_those_that_ask_for_what_was_there_before() -> None:
    others = anchors()  # of passes of other tests

    def found(*asked: list[torch.Tensor]) -> int:
        return sum(all(anchor is not other for other in others) for anchor in anchors(*asked))

    x = torch.ones(2, requires_grad=True)
    old = x * 2
    with trail() as mine:
        (grad,) = anchored([old * 3])
    late = grad * 2
    assert [found([late]), found([x]), found([])] == [1, 1, 1]
    mine.needs_no_anchors()
    assert [found([late]), found([x]), found([late, old])] == [0, 0, 1]
    assert found() == 1
