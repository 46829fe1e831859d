"""From one strategy per axis to layouts: the order of axes on a shared dim, and the sizes of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout import Layout, Mesh, Partial, chunk_sizes
from shardwise.rules import Call, Strategy, Value

Cut = tuple[tuple[int, ...], tuple[int, ...] | None]
"""How a dim is cut: the axes, major first, and explicit sizes of the pieces if they are not `torch.chunk`'s."""


@dataclass(frozen=True, slots=True)
class Realised:
    """The layouts a call needs and gives; per input the axes on which it is used as varying, and per output those on
    which it is replicated beside outputs that are not, so that its gradient must count once."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    varying: tuple[frozenset[int], ...]
    alike: tuple[frozenset[int], ...]


class CannotRealise(Exception):
    """A combination of strategies that has no layout: the strategy along `axis` must be another."""

    def __init__(self, axis: int, strategy: Strategy) -> None:
        super().__init__(axis, strategy)
        self.axis = axis
        self.strategy = strategy


def realise(call: Call, chosen: Sequence[Strategy], current: Sequence[Layout], mesh: Mesh) -> Realised:
    """The layouts of a call's inputs and outputs under one strategy per axis, keeping to `current` where possible."""
    by_strategy: dict[Strategy, list[int]] = {}
    for axis, strategy in enumerate(chosen):
        by_strategy.setdefault(strategy, []).append(axis)
    in_cuts: list[dict[int, Cut]] = [{} for _ in call.inputs]
    out_cuts: list[dict[int, Cut]] = [{} for _ in call.outputs]
    for strategy, axes in by_strategy.items():
        if any(isinstance(p, int) for p in (*strategy.ins, *strategy.outs)):
            _cut_dims(call, strategy, axes, current, mesh, in_cuts, out_cuts)
    sought = [strategy.ins for strategy in chosen], [strategy.outs for strategy in chosen]
    ins = _layouts(mesh, call.inputs, in_cuts, sought[0])
    outs = _layouts(mesh, call.outputs, out_cuts, sought[1])
    varies = [axis for axis, strategy in enumerate(chosen) if strategy.outs.count(None) < len(strategy.outs)]
    varying, alike = (
        tuple([frozenset([axis for axis in varies if placements[axis][i] is None]) for i in range(len(layouts))])
        for layouts, placements in zip((ins, outs), sought, strict=True)
    )
    return Realised(ins, outs, varying, alike)


def _cut_dims(
    call: Call,
    strategy: Strategy,
    axes: list[int],
    current: Sequence[Layout],
    mesh: Mesh,
    in_cuts: list[dict[int, Cut]],
    out_cuts: list[dict[int, Cut]],
) -> None:
    """All axes under one strategy cut the same dims, in the same order and pieces."""
    order, sizes = _common_cut(call, strategy, axes, current)
    length: int | None = None  # of the first input's cut dim
    for i, placement in enumerate(strategy.ins):
        if isinstance(placement, int):
            _add(in_cuts[i], placement, (order, sizes), axes[-1], strategy)
            if length is None:
                length = call.inputs[i].shape[placement]
    out_sizes: Sequence[tuple[int, ...] | None] = [sizes] * len(call.outputs)
    if strategy.resize is not None and length is not None:
        resized = strategy.resize(sizes or chunk_sizes(length, tuple([mesh.shape[axis] for axis in order])))
        if resized is None:
            raise CannotRealise(axes[-1], strategy)
        out_sizes = resized
    for i, placement in enumerate(strategy.outs):
        if isinstance(placement, int):
            _add(out_cuts[i], placement, (order, out_sizes[i]), axes[-1], strategy)


def _add(cuts: dict[int, Cut], dim: int, cut: Cut, axis: int, strategy: Strategy) -> None:
    if dim in cuts:  # two strategies cut the same dim in ways that do not combine
        raise CannotRealise(axis, strategy)
    cuts[dim] = cut


def _common_cut(call: Call, strategy: Strategy, axes: list[int], current: Sequence[Layout]) -> Cut:
    """The cut that most of the data already has, wholly or as far as it goes: that of what is written to, or of the
    largest input. Where inputs of one size are cut into different pieces the cut is even: some ranks may have all of
    one and nothing of another, as of the parts of a packed projection."""
    best: tuple[tuple, Cut] | None = None
    for i, placement in enumerate(strategy.ins):
        if not isinstance(placement, int) or not current[i].splits[placement]:
            continue
        layout, written = current[i], i in call.mutated
        cut, sizes = layout.splits[placement], layout.sizes[placement]
        begun = tuple(axis for axis in cut if axis in axes)
        complete = set(cut) == set(axes)
        weight = written, layout.numel, sizes is None, complete
        found = (*begun, *(axis for axis in axes if axis not in begun)), sizes if complete else None
        if best is None or weight > best[0]:
            best = weight, found
        elif weight == best[0] and not written and sizes != best[1][1]:
            best = weight, (best[1][0], None)
    if best is None:
        return tuple(axes), None
    order, sizes = best[1]
    lengths = {call.inputs[i].shape[p] for i, p in enumerate(strategy.ins) if isinstance(p, int)}
    return order, sizes if sizes is not None and lengths == {sum(sizes)} else None


def _layouts(
    mesh: Mesh, values: Sequence[Value], cuts: Sequence[dict[int, Cut]], sought: Sequence[Sequence[object]]
) -> tuple[Layout, ...]:
    """The layouts of some values: `cuts` says how their dims are cut, `sought`, axis by axis, what is pending."""
    described = [
        (
            value.shape,
            [cut[d][0] if d in cut else () for d in range(value.ndim)] if cut else None,
            [p if isinstance(p := placements[i], Partial) else None for placements in sought],
            [cut[d][1] if d in cut else None for d in range(value.ndim)] if cut else None,
        )
        for i, (value, cut) in enumerate(zip(values, cuts, strict=True))
    ]
    return tuple([Layout(mesh, *one) for one in described])
