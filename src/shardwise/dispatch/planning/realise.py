"""From one strategy per axis to whole layouts: the order of axes on a shared dim, and the sizes of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout import Layout, Mesh, Partial, chunk_sizes
from shardwise.rules import Call, Strategy

Cut = tuple[tuple[int, ...], tuple[int, ...] | None]
"""How a dim is cut: the axes, major first, and explicit sizes of the pieces if they are not `torch.chunk`'s."""


@dataclass(frozen=True, slots=True)
class Realised:
    """The layouts a call needs and gives; per input the axes on which it is used as varying, and per output those on
    which it is whole beside outputs that are not, so that its gradient must count once."""

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
    ins = tuple(
        [
            _layout(mesh, value.shape, in_cuts[i], [strategy.ins[i] for strategy in chosen])
            for i, value in enumerate(call.inputs)
        ]
    )
    outs = tuple(
        [
            _layout(mesh, value.shape, out_cuts[i], [strategy.outs[i] for strategy in chosen])
            for i, value in enumerate(call.outputs)
        ]
    )
    varies = [axis for axis, strategy in enumerate(chosen) if strategy.outs.count(None) < len(strategy.outs)]
    varying = tuple([_whole_along(varies, [strategy.ins[i] for strategy in chosen]) for i in range(len(ins))])
    alike = tuple([_whole_along(varies, [strategy.outs[i] for strategy in chosen]) for i in range(len(outs))])
    return Realised(ins, outs, varying, alike)


def _whole_along(axes: list[int], placements: Sequence[object]) -> frozenset[int]:
    """Those of some axes along which a value is whole."""
    return frozenset([axis for axis in axes if placements[axis] is None])


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


def _layout(mesh: Mesh, shape: tuple[int, ...], cuts: dict[int, Cut], placements: Sequence[object]) -> Layout:
    pending = [p if isinstance(p, Partial) else None for p in placements]
    if not cuts:
        return Layout(mesh, shape, None, pending)
    splits = [cuts[d][0] if d in cuts else () for d in range(len(shape))]
    sizes = [cuts[d][1] if d in cuts else None for d in range(len(shape))]
    return Layout(mesh, shape, splits, pending, sizes)
