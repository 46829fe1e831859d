"""The search for the cheapest strategies: it finds what trying everything finds, and looks at much less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from sweep import mesh_of, normal, place
from torch import Tensor

import shardwise as sw
from shardwise.dispatch import choose
from shardwise.dispatch.choose import WIDE, choose_axis, placement_of, strategies_of
from shardwise.dispatch.prices import BACKWARD, DEFERRAL, IMPOSSIBLE, Prices, move_cost, units
from shardwise.dispatch.search import Search
from shardwise.dispatch.trace import Trace, trace_call
from shardwise.layout import Layout, Partial
from shardwise.redistribute import transition_cost
from shardwise.rules import PENDING, Call, Strategy, flat_values

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
RANKS = 2


def doubled_twice(x: Tensor, y: Tensor) -> Tensor:
    twice = x * 2
    return (twice + y) @ twice.t()


def written(x: Tensor, y: Tensor) -> Tensor:
    copy = x.clone()
    return copy.add_(y).exp()


def written_in_part(x: Tensor, y: Tensor) -> Tensor:
    copy = x * 1
    copy[1].mul_(2)
    return copy - y


FUNCTIONS: list[Callable[..., Any]] = [
    lambda x, y: (x + y) * x,
    lambda x, y: (x.exp() @ y).sum(0),
    lambda x, y: torch.cat([x, y.neg()]).mean(),
    lambda x, y: torch.stack([x, y, x]).view(3, 16).amax(0),
    lambda x, y: (x * 2, (x + y).relu(), x),
    lambda x, y: torch.linalg.multi_dot([x, y, x, y]),
    lambda x, y: torch.einsum("ab,bc->ca", x, y),
    lambda x, y: [part * 2 for part in (x - y).split(2)],
    lambda x, y: torch.where(x > 0, x.t(), y),
    doubled_twice,
    written,
    written_in_part,
]


def traced(function: Callable) -> Trace:
    metas = [torch.empty(4, 4, dtype=torch.float64, device="meta") for _ in range(2)]
    with torch.no_grad():
        return trace_call(function, metas, {}, metas, torch.device("cpu"))


# Everything tried


def cheapest(trace: Trace, options: Sequence[list[Strategy]], start: dict[int, Any]) -> list[Strategy] | None:
    """Of all combinations of strategies the cheapest, of those the first: by walking through all of them."""
    best: tuple[float, list[Strategy] | None] = (IMPOSSIBLE, None)

    def walk(position: int, placements: dict[int, Any], price: float, chosen: list[Strategy]) -> None:
        nonlocal best
        if price >= best[0]:
            return
        if position == len(trace.calls):
            total = price + owed(trace, placements)
            best = (total, chosen) if total < best[0] else best
            return
        call = trace.calls[position]
        for strategy in filled(options[position], call, placements):
            after = placements | {v.index: p for v, p in zip(call.outputs, strategy.outs, strict=True)}
            walk(position + 1, after, price + step(trace, call, strategy, placements), [*chosen, strategy])

    walk(0, start, 0, [])
    return best[1]


def owed(trace: Trace, placements: dict[int, Any]) -> float:
    pending = [value for value in flat_values(trace.output) if isinstance(placements[value.index], Partial)]
    return sum(units((1 - DEFERRAL) * transition_cost("all_reduce", value.numel, RANKS)) for value in pending)


def filled(options: list[Strategy], call: Call, placements: dict[int, Any]) -> list[Strategy]:
    """Strategies for any reduction, for the first one that is pending among the inputs they are for."""
    found = []
    for way in options:
        at = [placements[v.index] for v, wanted in zip(call.inputs, way.ins, strict=True) if wanted is PENDING]
        reduction = next((p for p in at if isinstance(p, Partial)), None)
        if not at:
            found.append(way)
        elif reduction is not None:
            ins, outs = ([reduction if p is PENDING else p for p in some] for some in (way.ins, way.outs))
            found.append(Strategy(tuple(ins), tuple(outs), way.cost))
    return found


def step(trace: Trace, call: Call, strategy: Strategy, placements: dict[int, Any]) -> float:
    price = units(strategy.cost)
    varies = any(p is not None for p in strategy.outs)
    for at, (value, wanted) in enumerate(zip(call.inputs, strategy.ins, strict=True)):
        source = placements[value.index]
        stays = at in call.mutated and value.index in trace.pinned
        stays = stays or (call.is_view and at == 0 and value.index in trace.written_families)
        if (stays and source != wanted) or (at in call.mutated and wanted not in strategy.outs):
            return IMPOSSIBLE
        price += units(move_cost(value, source, wanted, RANKS))
        if varies and wanted is None and value.dtype.is_floating_point:
            price += units(BACKWARD * transition_cost("all_reduce", value.numel, RANKS))
    return price


@pytest.mark.parametrize("narrow", [1, choose.NARROW])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_search_finds_what_trying_everything_finds(
    function: Callable, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "NARROW", narrow)
    trace, mesh = traced(function), mesh_of((RANKS,))
    options = [strategies_of(call) for call in trace.calls]
    for ways in product([R, S(0), S(1), P, Partial("max")], repeat=2):
        layouts = [Layout.of(mesh, (4, 4), [way]) for way in ways]
        start = {v.index: placement_of(layout, 0) for v, layout in zip(trace.inputs, layouts, strict=True)}
        start |= {value.index: None for value, _ in trace.constants}
        expected = cheapest(trace, options, start)
        assert expected is not None
        assert choose_axis(trace, 0, layouts, options, set()) == expected, ways


def test_what_is_banned_is_not_chosen() -> None:
    """Also where a reduction was filled in: a ban is of what was chosen."""
    trace, mesh = traced(lambda x, y: x.t()), mesh_of((RANKS,))
    options = [strategies_of(call) for call in trace.calls]
    for way in (S(0), P):
        layouts = [Layout.of(mesh, (4, 4), [way])] * 2
        banned: set[tuple[int, int, Strategy]] = set()
        seen = []
        while None not in seen:
            (strategy,) = choose_axis(trace, 0, layouts, options, banned)
            assert strategy not in seen
            banned.add((0, 0, strategy))
            banned.add((0, 1, options[0][0]))  # along another axis: of no concern
            seen.append(strategy if any(p is not None for p in strategy.ins) else None)
        assert len(seen) > 1


def test_prices_by_number_are_the_prices_of_moves() -> None:
    trace = traced(lambda x, y: x @ y)
    prices = Prices(trace, RANKS)
    everywhere = [None, 0, 1, P, Partial("avg"), Partial("max"), Partial("product"), Partial("norm", 2.0)]
    for source, target in product(everywhere, repeat=2):
        if source != target:
            found = prices.row(0, prices.number(target))[prices.number(source)]
            assert found == pytest.approx(units(move_cost(trace.values[0], source, target, RANKS)), rel=1e-12)


# Bounds


def ways_looked_at(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """How many ways a planned call was found to have in all its steps, the most in one of them, and the steps."""
    counts: list[int] = []
    pruned = Search._pruned

    def counted(self: Search, ways: dict) -> dict:
        counts.append(len(ways))
        return pruned(self, ways)

    with monkeypatch.context() as patch:
        patch.setattr(Search, "_pruned", counted)
        sw.clear_cache()
        call()
    return sum(counts), max(counts, default=0), len(counts)


def test_what_is_whole_everywhere_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    x = place(normal(5, 4), R)
    assert ways_looked_at(lambda: torch.gradient(x, spacing=2.0), monkeypatch) == (0, 0, 0)


@pytest.mark.parametrize("num_dims", [1, 2, 3, 4])
def test_functions_that_loop_over_numbers_are_planned_quickly(num_dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.gradient` makes dozens of ops per dim, whose results have nothing to do with each other."""
    x = place(normal(*(4,) * num_dims), S(0))
    spacing = [place(torch.arange(4.0, dtype=torch.float64), R) for _ in range(num_dims)]
    total, most, steps = ways_looked_at(lambda: torch.gradient(x, spacing=spacing), monkeypatch)
    assert steps in (37 * num_dims, 2 * 37 * num_dims)
    assert most <= WIDE
    assert total <= 8 * steps


def test_operands_that_wait_for_their_turn_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operand of an einsum is brought into shape first. Together these may lie in thousands of ways."""
    operands = [place(normal(4, 4, 4), S(i % 3)) for i in range(6)]
    call = lambda: torch.einsum("abc,bcd,cde,def,efg,fga->abe", *operands)  # noqa: E731
    total, most, steps = ways_looked_at(call, monkeypatch)
    assert most <= 16
    assert total <= 8 * steps


def test_work_grows_with_the_length_of_a_trace_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(many: int) -> int:
        matrices = [place(normal(4, 4), S(i % 2), mesh=(2,)) for i in range(many)]
        return ways_looked_at(lambda: torch.linalg.multi_dot(matrices), monkeypatch)[0]

    assert chain(24) < 6 * chain(6)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_a_search_that_leaves_ways_out_is_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "NARROW", 1)
    monkeypatch.setattr(choose, "WIDE", 2)
    sw.clear_cache()
    x = normal(4, 4, 4)
    spacing = [torch.arange(4.0, dtype=torch.float64) * (i + 1) for i in range(3)]
    expected = torch.gradient(x, spacing=spacing)
    for where in ([S(0), S(1)], [S(2), S(2)], [P, S(1)]):
        d = sw.distribute_tensor(x, mesh_of((2, 2)), where)
        found = torch.gradient(d, spacing=[sw.distribute_tensor(s, mesh_of((2, 2))) for s in spacing])
        torch.testing.assert_close([t.full_tensor() for t in found], list(expected))
    sw.clear_cache()
