"""Pads: a dim that grows at its ends. Of a sharded one the first and the last piece grow, unless those would be far
larger than the others. What a reflected or circular end is made of is fetched from the ranks that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from shardwise.layout import Layout, Partial
from shardwise.rules.kit.dim_rebuild import Rebuilt, Run, grown, rebuilding
from shardwise.rules.kit.empty import skipping_empty
from shardwise.rules.kit.notation import other_dims
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.types import ANY_PENDING, PROGRAM_COST, Call, Local, Resize, Rule, Strategy, replicated

Ends = tuple[Run, Run]
"""What is put before a dim and after it."""


def _constant(size: int, kept: Run, before: int, after: int) -> Ends:
    return Run(before, None), Run(after, None)


def _reflection(size: int, kept: Run, before: int, after: int) -> Ends:
    return Run(before, before, -1), Run(after, size - 2, -1)


def _replication(size: int, kept: Run, before: int, after: int) -> Ends:
    return Run(before, 0, 0), Run(after, size - 1, 0)


def _circular(size: int, kept: Run, before: int, after: int) -> Ends:
    """Of what was not cut off; the other modes see the uncut dim."""
    first = kept.start or 0
    return Run(before, first + kept.length - before), Run(after, first)


MODES: dict[str, Callable[[int, Run, int, int], Ends]] = {
    "constant": _constant,
    "reflect": _reflection,
    "replicate": _replication,
    "circular": _circular,
}
OPS = {
    "constant_pad_nd": "constant",
    "reflection_pad1d": "reflect",
    "reflection_pad2d": "reflect",
    "reflection_pad3d": "reflect",
    "replication_pad1d": "replicate",
    "replication_pad2d": "replicate",
    "replication_pad3d": "replicate",
}


def _mode(call: Call) -> str:
    return OPS.get(call.name) or call["mode"]


def _amounts(call: Call) -> dict[int, tuple[int, int]]:
    """How much each dim grows before and after. Torch counts dims from the last."""
    ends = call["padding"] if "padding" in call.bound else call["pad"]
    ndim = call.inputs[0].ndim
    pairs = {ndim - 1 - i: (ends[2 * i], ends[2 * i + 1]) for i in range(len(ends) // 2)}
    return {dim: pair for dim, pair in pairs.items() if pair != (0, 0)}


def _kept(size: int, before: int, after: int) -> Run:
    """The part of a dim that stays: all of it, but for what negative amounts cut off."""
    return Run(size + min(before, 0) + min(after, 0), max(-before, 0))


def _strategies(call: Call) -> list[Strategy]:
    x, amounts, mode = call.inputs[0], _amounts(call), _mode(call)
    if any(
        _kept(x.shape[d], *pair).length < (max(0, *pair) if mode == "circular" else 0) for d, pair in amounts.items()
    ):
        return [replicated(call)]  # more is cut off than there is, or so much that a circle would not close
    cost = 0.0 if mode == "constant" else 2 * PROGRAM_COST
    growing = [Strategy((d,), (d,), cost, resize=_growth(*pair)) for d, pair in amounts.items()]
    return [*other_dims(call, amounts).strategies(), *_pending(call, mode), *growing]


def _growth(before: int, after: int) -> Resize:
    return lambda sizes: [grown(sizes, before, after)]


def _pending(call: Call, mode: str) -> list[Strategy]:
    """A constant that is not zero would be added up by a pending sum; the same on every rank, it is itself to the other
    reductions that give back what all ranks agree on."""
    if mode != "constant" or not call["value"]:
        return [ANY_PENDING]
    return [Strategy((Partial(op),), (Partial(op),)) for op in ("avg", "max", "min")]


def _local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Torch's own kernels where the padded dims are not sharded."""
    x, amounts = call.inputs[0], _amounts(call)
    if any(ins[0].splits[d] for d in amounts):
        return rebuilding(x, ins[0], [_step(call, d, pair, ins[0], outs[0]) for d, pair in amounts.items()])
    if call.name in OPS and not ins[0].has_pending:
        return None
    # A step, not the function itself: such plans are kept for one value only, and what is pending depends on it.
    ends = call["padding"] if "padding" in call.bound else call["pad"]
    return Local(pad, [x, ends, _mode(call), call.bound.get("value")])


def _step(call: Call, dim: int, pair: tuple[int, int], have: Layout, give: Layout) -> Rebuilt:
    size = call.inputs[0].shape[dim]
    kept = _kept(size, *pair)
    before, after = MODES[_mode(call)](size, kept, *(max(amount, 0) for amount in pair))
    value = call.bound.get("value")
    return Rebuilt(dim, have.pieces(dim), give.pieces(dim), (before, kept, after), 0 if value is None else value)


PAD = register(*OPS, rule=skipping_empty(Rule(_strategies, _local)))


def _with_number(input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> tuple[tuple, dict]:
    """A value may be a number of numpy's, which torch's own binding takes and ours of an op does not."""
    is_number = not isinstance(value, Tensor) and hasattr(value, "item")
    return (input, pad, mode, value.item() if is_number else value), {}


register_function(
    pad,
    "Tensor input, int[] pad, str mode='constant', Scalar? value=None",
    rule=PAD,
    before=_with_number,
)
