"""Strict mode's limits: implicit moves of parameters, or of too many bytes, are refused before anything moves."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from custom_ops import positives
from sweep import normal
from torch import Tensor, nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.cause import watchers
from shardwise.debug import CommDebugMode
from shardwise.errors import StrictModeError

MESH = sw.simulate((4,), ("tp",))
FULL = 4 * 8 * 8 * 8  # bytes of what `cube` makes
pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")


def place(x: Tensor, *placements: Any) -> Tensor:
    return sw.distribute_tensor(x, MESH, placements or [Replicate()])


def cube(dim: int = 2) -> Tensor:
    """Matrices cut in two, of which determinants cannot be taken without moving them."""
    return place(normal(4, 8, 8), Shard(dim))


def refused(run: Callable[[], Any], **strict: Any) -> str:
    """The refusal of something that is allowed outside; nothing is communicated for it."""
    run()  # its plan is known from here on
    with CommDebugMode() as comm, sw.strict(**strict), pytest.raises(StrictModeError) as error:
        run()
    assert not comm.comms
    run()
    return str(error.value)


def test_the_refusal_of_a_parameter_says_what_where_and_how_to_mend_it() -> None:
    p = nn.Parameter(cube())
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    text = refused(lambda: torch.linalg.det(p), moves="parameters")
    other = cube()
    with CommDebugMode() as comm:
        torch.linalg.det(other)
    (c,) = comm.comms
    assert text == (
        f"strict mode: torch.linalg.det would move argument 0 (A) from {c.source} to {c.target} ({__file__}:{line}): "
        f"{c.kind} over tp, {c.wire_bytes:,} bytes sent by every rank, which is a parameter. Either move it yourself "
        f"before the call, which is never refused: .redistribute(placements=[{c.target.placements[0]!r}]); or lay the "
        f"arguments of the call out so that nothing has to move"
    )
    with sw.strict(moves="parameters"):
        torch.linalg.det(p.redistribute(placements=c.target.placements))
        torch.linalg.det(cube())


def test_a_view_of_a_parameter_is_one() -> None:
    p = nn.Parameter(cube())
    assert "which is a parameter" in refused(lambda: torch.linalg.det(p.transpose(1, 2)), moves="parameters")


def test_bytes_are_compared_with_what_a_rank_sends() -> None:
    x = cube()
    with CommDebugMode() as comm:
        torch.linalg.det(x)
    sent = comm.get_total_bytes()
    with sw.strict(moves=sent):
        torch.linalg.det(x)
    text = refused(lambda: torch.linalg.det(x), moves=sent - 1)
    assert f"{sent:,} bytes sent by every rank, which is more than moves={sent - 1} allows" in text


@pytest.mark.parametrize(
    ("moves", "num_bytes"), [("64MB", 64 * 10**6), ("1.5 kB", 1500), ("2GiB", 2**31), ("7", 7), ("1_000", 1000), (0, 0)]
)
def test_sizes(moves: Any, num_bytes: int) -> None:
    with sw.strict(moves=moves):
        assert sw.dispatch.modes.limits().bytes == num_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize("moves", ["parameter", "64XB", "-1", -1, 1.5, True, ""])
def test_what_is_no_limit(moves: Any) -> None:
    words = 'strict takes moves="parameters" or a number of bytes'
    with pytest.raises(ValueError, match=words) as error, sw.strict(moves=moves):
        pass
    assert repr(moves) in str(error.value) and not watchers


def test_what_is_asked_for_is_never_refused() -> None:
    x = cube().requires_grad_()
    with sw.strict(moves=0):
        y = x.redistribute(placements=[Shard(0)])
        z = (y * y).sum()
        z.item()
        z.backward()
        x.full_tensor()
        torch.softmax(cube(), 2)  # communicates, but moves nothing


def test_gradients_of_what_was_allowed_are_never_refused() -> None:
    h, w = place(normal(6, 16)).requires_grad_(), nn.Parameter(place(normal(32, 16), Shard(0)))
    with sw.strict(moves="parameters"), sw.strict(moves=0), CommDebugMode() as comm:
        torch.nn.functional.linear(h, w).to_local().sum().backward()
    assert comm.get_comm_counts() == {"all_reduce": 1}


def test_limits_add_up_and_can_be_lifted() -> None:
    p, x = nn.Parameter(cube()), cube()
    with sw.strict(moves=FULL), sw.strict(moves="parameters"):
        torch.linalg.det(x)
        with pytest.raises(StrictModeError, match="which is a parameter"):
            torch.linalg.det(p)
        with sw.strict(moves=0), pytest.raises(StrictModeError, match="more than moves=0"):
            torch.linalg.det(x)
        with sw.strict(), pytest.raises(StrictModeError):
            torch.linalg.det(p)
        with sw.strict(False):
            torch.linalg.det(p)
        torch.linalg.det(x)
    torch.linalg.det(p)
    assert not watchers


def test_nothing_moves_if_something_may_not() -> None:
    """Of two operands that must move, the first is within the limit."""
    a, b = place(normal(8, 8) + 8 * torch.eye(8), Shard(0)), place(normal(8, 640), Shard(0))
    with CommDebugMode() as comm:
        torch.linalg.solve(a, b)
    first, second = (c.wire_bytes for c in comm.comms)
    assert first < second
    assert "argument 1 (B)" in refused(lambda: torch.linalg.solve(a, b), moves=first)


def test_results_that_are_reduced() -> None:
    h, x, w = place(normal(6, 8)), place(normal(6, 16), Shard(1)), place(normal(8, 16), Shard(1))
    y = torch.nn.functional.linear(x, w)
    assert "torch.add would move" in refused(lambda: torch.add(h, y), moves=0)


def test_reductions_and_lists_and_writes() -> None:
    pending = sw.DTensor.from_local(normal(4, 8), MESH, [sw.Partial()])
    assert "to [4,8] R" in refused(pending.relu, moves=0)
    xs, ys = [place(normal(4, 8), Shard(0))], [nn.Parameter(place(normal(4, 8), Shard(1)))]
    assert "argument 1 (other)[0]" in refused(lambda: torch._foreach_add(xs, ys), moves="parameters")
    before = pending.full_tensor()
    with pytest.raises(StrictModeError, match="relu_ would move argument 0"), sw.strict(moves=0):
        pending.relu_()
    torch.testing.assert_close(pending.full_tensor(), before)


@pytest.mark.parametrize("function", [torch.linalg.eigvals, positives])
def test_calls_without_a_rule(function: Callable[[Tensor], Any]) -> None:
    x = nn.Parameter(place(normal(8, 8), Shard(1)))
    with torch.no_grad():
        assert "which is a parameter" in refused(lambda: function(x), enabled=False, moves="parameters")
        assert "more than moves=8" in refused(lambda: function(x), enabled=False, moves=8)
        assert "cannot run on these shards" in refused(lambda: function(x))


def test_results_as_long_as_the_data_say() -> None:
    x = place(normal(8, 8), Shard(1))
    text = refused(lambda: torch.nonzero(x), moves=0)
    assert "torch.nonzero would move a value inside of it (brought where" in text
    assert "from [8,8] S(1)@tp to [8,8] S(0)@tp" in text and text.endswith("nothing has to move, or allow more")


def test_values_inside_of_a_function() -> None:
    x, w, out = place(normal(6, 4, 8), Shard(2)), place(normal(24, 8), Shard(1)), place(normal(8, 8))

    def attention() -> Tensor:
        given = (x, x, x, 8, 2, w, None, None, None, False, 0.0, out, None)
        return torch.nn.functional.multi_head_attention_forward(*given, need_weights=False)[0]

    text = refused(attention, moves=0)
    assert "multi_head_attention_forward would move" in text


def test_other_threads_are_not_bound() -> None:
    p, found = nn.Parameter(cube()), []
    with sw.strict(moves="parameters"):
        thread = threading.Thread(target=lambda: found.append(torch.linalg.det(p)))
        thread.start()
        thread.join()
    assert len(found) == 1
