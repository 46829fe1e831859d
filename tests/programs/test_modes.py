"""Modes end with their block, also by an error, and a call that fails leaves nothing switched on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside
from meshes import PAIR
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm import record
from shardwise.debug import CommDebugMode
from shardwise.experimental import implicit_replication
from shardwise.parallel import loss_parallel

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def is_strict() -> bool:
    """Whether a call that gathers is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sw.errors.FallbackWarning)
            torch.linalg.inv(sw.distribute_tensor(torch.eye(4), PAIR, [S(0)]))
    except sw.errors.StrictModeError:
        return True
    return False


def mixes() -> bool:
    """Whether plain tensors are taken for replicated ones."""
    try:
        sw.ones(4, device_mesh=PAIR, placements=[S(0)]) + torch.ones(4)
    except sw.errors.MixedTensorError:
        return False
    return True


def listens() -> bool:
    """Whether anybody is told of collectives."""
    return bool(record.listeners or record.fallbacks)


def entropy_gathers() -> bool:
    x = sw.ones(4, 6, device_mesh=PAIR, placements=[S(1)])
    with CommDebugMode() as comm:
        F.cross_entropy(x, sw.zeros(4, dtype=torch.int64, device_mesh=PAIR))
    return "all_gather" in comm.get_comm_counts()


MODES: dict[str, tuple[Callable[[], Any], Callable[[], bool], bool]] = {
    "strict": (sw.strict, is_strict, True),
    "implicit_replication": (implicit_replication, mixes, True),
    "CommDebugMode": (CommDebugMode, listens, True),
    "loss_parallel": (loss_parallel, entropy_gathers, False),  # changes nothing but intent
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_end_with_their_block(mode: str) -> None:
    enter, look, inside = MODES[mode]
    for _ in range(2):  # what was planned inside does not serve outside
        assert not look()
        with pytest.raises(KeyError), enter():
            assert look() is inside
            with pytest.raises(ZeroDivisionError), enter():
                assert look() is inside
                raise ZeroDivisionError
            assert look() is inside, "the inner block ended the outer one"
            raise KeyError
        assert not look()


def test_an_error_inside_a_call_leaves_nothing_switched_on() -> None:
    x = sw.ones(4, 6, device_mesh=PAIR, placements=[S(0)]).requires_grad_()
    for call in (lambda: x.view(7), lambda: x @ x, lambda: x[beside(x, torch.tensor([9]))], lambda: x.clamp_(max=0)):
        with pytest.raises((RuntimeError, IndexError)):
            call()
        assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled() and not listens()
        assert (x * 2).requires_grad
