"""Trails: what a pass that will be differentiated has recorded, for whoever asked for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from shardwise.redistribute.backward.double_backward import left_behind, trail

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
    assert [len(inner), len(outer)] == [1, 2] and all(y is x for y in (*inner, *outer))


def test_each_thread_has_trails_of_its_own() -> None:
    """Even while another thread, which came later, is on its way."""
    x, y = (torch.ones(2, requires_grad=True) * number for number in (2, 3))
    begun, done = Event(), Event()

    def other() -> list[torch.Tensor]:
        with trail() as noted:
            begun.set()
            assert done.wait(PATIENCE)
            left_behind([y])
        return noted

    with ThreadPoolExecutor(1) as pool:
        with trail() as mine:
            found = pool.submit(other)
            assert begun.wait(PATIENCE)
            left_behind([x])
        done.set()
        (theirs,) = found.result(PATIENCE)
    assert len(mine) == 1 and mine[0] is x and theirs is y


def test_a_devices_own_thread_works_for_whoever_came_last() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with trail() as mine, ThreadPoolExecutor(1) as pool:
        pool.submit(left_behind, [x]).result(PATIENCE)
    assert len(mine) == 1 and mine[0] is x
