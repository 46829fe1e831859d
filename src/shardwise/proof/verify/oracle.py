"""The truth about an op, by brute force: run it on every rank's shards, for every assignment of placements to its
inputs along one axis, and see whether what the ranks get recombines to what one device gets, gradient included.

Nothing here knows of rules or of redistribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import SUM, Partial
from shardwise.layout.sizes import chunk_sizes
from shardwise.proof.kit.compare import near
from shardwise.proof.verify.case import Case, Run
from shardwise.rules import AxisPlacement, Call, flat_values

KINDS = tuple(map(Partial, ("sum", "avg", "max", "min")))
Ins = tuple[int | None, ...]
"""For each input the dim that is sharded, if one is."""
Fits = Callable[[Call, Ins], bool]
MOST = 400
"""Assignments tried per call; beyond that, only those in which at most two inputs are not replicated."""


@dataclass(frozen=True, slots=True)
class Truth:
    """One assignment of placements to the inputs, and the placements of the outputs that are right for it: for each
    output the best one."""

    ins: Ins
    outs: tuple[AxisPlacement, ...]


# What is tried


def assignments(case: Case) -> Iterator[Ins]:
    """Every way to shard some inputs in dims of which both ranks get a part."""
    each = [[None, *(dim for dim, size in enumerate(value.shape) if size > 1)] for value in case.call.inputs]
    # Of many inputs (a list of tensors) all alike, or two of them: the rest follows.
    many = math.prod(map(len, each)) > MOST
    fits = UNCHECKED.get(case.call.name, lambda call, ins: True)
    for ins in _few(each) if many else itertools.product(*each):
        if any(placement is not None for placement in ins) and fits(case.call, ins):
            yield ins


def _per_channel(call: Call, ins: Ins) -> bool:
    """Parameters go with the channels of the input."""
    return all((placement == 0) == (ins[0] == 1) for placement in ins[1:])


def _alike(num_whole: int) -> Fits:
    """All are cut alike, in a dim before the last ones."""

    def fits(call: Call, ins: Ins) -> bool:
        dims = range(call.inputs[0].ndim - num_whole)
        return len(set(ins)) == 1 and (ins[0] is None or ins[0] in dims)

    return fits


def _attention(call: Call, ins: Ins) -> bool:
    """Queries, keys and values are cut alike, by batch or heads; or queries alone, by rows, and the mask with them."""
    query, key, value, *masks = ins
    if query == 2:
        rows = all(placement == mask.ndim - 2 for placement, mask in zip(masks, call.inputs[3:], strict=True))
        return key is None and value is None and rows
    return query in (None, 0, 1) and query == key == value and not any(p is not None for p in masks)


def _layer(call: Call, ins: Ins) -> bool:
    """Input and states are cut by batch; weights are whole."""
    states = len(flat_values(call["hx"]))
    batch = (0 if call["batch_first"] else 1, *[1] * states)
    return tuple(ins[: 1 + states]) == batch and not any(p is not None for p in ins[1 + states :])


UNCHECKED: dict[str, Fits] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _layer),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), _per_channel),
    **dict.fromkeys(("_native_batch_norm_legit_functional", "_batch_norm_no_update"), _per_channel),
    "_native_batch_norm_legit_no_training": _per_channel,
    **dict.fromkeys(("lu_unpack", "linalg_lu_solve", "linalg_ldl_solve", "ldl_solve"), _alike(2)),
    **dict.fromkeys(("ormqr", "linalg_householder_product", "max_pool2d_with_indices_backward"), _alike(2)),
    "max_pool3d_with_indices_backward": _alike(3),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_weight_norm_interface": lambda call, ins: (ins[0] == call["dim"]) == (ins[1] == call["dim"]),
    "segment_reduce": lambda call, ins: False,
}
"""Ops whose kernels reach beyond a tensor when its size does not go with the others': only what fits is tried."""


def _few(each: Sequence[Sequence[int | None]]) -> Iterator[Ins]:
    whole: Ins = (None,) * len(each)
    found: dict[Ins, None] = {}
    for placement in dict.fromkeys(p for options in each for p in options if p is not None):
        found[tuple(placement if placement in options else None for options in each)] = None
    for i, j in itertools.combinations(range(len(each)), 2):
        for a, b in itertools.product(each[i], each[j]):
            ins = (*whole[:i], a, *whole[i + 1 : j], b, *whole[j + 1 :])
            if (a, b) != (None, None):
                found[ins] = None
            if len(found) > MOST:
                break
    yield from found


# The truth table


def truths(case: Case) -> list[Truth]:
    """Every assignment for which the op itself, on the shards of two ranks, gives the truth."""
    found = filter(None, (truth_of(case, ins, 2) for ins in assignments(case)))
    return list(filter(None, (_not_by_accident(case, truth) for truth in found)))


def _not_by_accident(case: Case, truth: Truth) -> Truth | None:
    """What is left of a truth on other data, and on three ranks where all of them get a part. None if nothing is, or if
    it owes itself to a piece of one row, which torch broadcasts."""
    dims = [v.shape[p] for v, p in zip(case.call.inputs, truth.ins, strict=True) if isinstance(p, int)]
    if all(chunk_sizes(size, (3,))[-1] for size in dims) and truth_of(case, truth.ins, 3) is None:
        return None
    outs = truth.outs
    for other in (truth_of(other, truth.ins, 2) for other in case.on_other_data):
        if other is None or any(a != b and worth(a) == worth(b) for a, b in zip(outs, other.outs, strict=True)):
            return None
        outs = tuple(min(pair, key=worth) for pair in zip(outs, other.outs, strict=True))
    few = min(dims, default=4) < 4
    if few and any(worth(p) != 1 and (p != SUM or len(truth.ins) > 1) for p in outs):
        return None
    return replace(truth, outs=outs)


def worth(placement: AxisPlacement) -> int:
    """Whole beats sharded beats pending."""
    return 2 if placement is None else 1 if isinstance(placement, int) else 0


def truth_of(case: Case, ins: Ins, num_ranks: int) -> Truth | None:
    """Whether the op on the shards gives the truth for one assignment, and the placements of its outputs."""
    parts = [pieces(x, dim, num_ranks) for x, dim in zip(case.tensors, ins, strict=True)]
    shards = [[part[rank] for part in parts] for rank in range(num_ranks)]
    for sizes in _localised(case, ins, num_ranks):
        truth = _judged(case, ins, shards, sizes)
        if truth is not None:
            return truth
    return None


def _judged(case: Case, ins: Ins, shards: list[list[Tensor]], sizes: Sequence[Any]) -> Truth | None:
    expected = case.expected
    try:
        runs = [case.run(mine, None, local) for mine, local in zip(shards, sizes, strict=True)]
    except Exception:  # whatever an op says about shards that do not fit it
        return None
    if any(len(run.results) != len(expected.results) for run in runs):
        return None  # a split into pieces: shards have fewer
    outs = []
    for i, whole in enumerate(expected.results):
        mine = [run.results[i] for run in runs]
        dims = [
            d
            for d in range(whole.dim())
            if sum(part.shape[d] if part.dim() > d else 0 for part in mine) == whole.shape[d]
        ]
        right = [p for p in (None, *dims, *KINDS) if is_whole(mine, p, whole)]
        if not right:
            return None
        outs.append(right)
    for way in itertools.islice(itertools.product(*outs), 64):
        if expected.gradients is None or _gradient_holds(case, ins, way, shards, sizes, runs):
            return Truth(ins, way)
    return None


def _gradient_holds(case: Case, ins: Ins, outs: tuple, shards: Any, sizes: Any, runs: list[Run]) -> bool:
    """Whether the ranks' gradients recombine under the dual placements."""
    num_ranks = len(shards)
    if any(isinstance(p, Partial) and p.reduce_op in ("max", "min") for p in outs):
        return True  # which rank the gradient goes to is decided where the reduction is done
    weights = []
    for rank in range(num_ranks):
        mine: list[Tensor | None] = []
        for i, placement in enumerate(outs):
            w = case.weights[i]
            if isinstance(placement, int):
                w = w.split([run.results[i].shape[placement] for run in runs], placement)[rank]
            elif isinstance(placement, Partial) and placement.reduce_op == "avg":
                w = w / num_ranks
            mine.append(w)
        weights.append(mine)
    try:
        back = [case.run(mine, w, local) for mine, w, local in zip(shards, weights, sizes, strict=True)]
    except Exception:
        return False
    wanted = case.expected.gradients
    assert wanted is not None
    for i, expected in enumerate(wanted):
        given = [None if run.gradients is None else run.gradients[i] for run in back]
        if expected is None:
            if any(g is not None and bool(g.any()) for g in given):
                return False
            continue
        grads = [torch.zeros_like(shards[r][i]) if g is None else g for r, g in enumerate(given)]
        dual = SUM if ins[i] is None and any(placement is not None for placement in outs) else ins[i]
        if not is_whole(grads, dual, expected):
            return False
    return True


# Taking a tensor apart along one axis, and putting it together again


def pieces(x: Tensor, dim: int | None, num_ranks: int) -> list[Tensor]:
    """Every rank's part of a tensor."""
    return [x] * num_ranks if dim is None else list(x.split(chunk_sizes(x.shape[dim], (num_ranks,)), dim))


def recombined(parts: Sequence[Tensor], placement: AxisPlacement) -> Tensor | None:
    """The whole of which the ranks have these parts; None if they do not fit together."""
    try:
        match placement:
            case None:
                return parts[0] if all(near(part, parts[0]) for part in parts[1:]) else None
            case int():
                return torch.cat(list(parts), placement)
            case Partial(reduce_op="sum" | "avg") if parts[0].dtype == torch.bool:
                return None
            case Partial(reduce_op="sum"):
                return sum(parts[1:], parts[0])
            case Partial(reduce_op="avg"):
                return sum(parts[1:], parts[0]) / len(parts)
            case Partial(reduce_op="max"):
                return torch.stack(list(parts)).amax(0)
            case Partial(reduce_op="min"):
                return torch.stack(list(parts)).amin(0)
    except RuntimeError:
        return None
    return None


def is_whole(parts: Sequence[Tensor], placement: AxisPlacement, expected: Tensor) -> bool:
    whole = recombined(parts, placement)
    return whole is not None and near(whole, expected)


# Sizes among the arguments


def _localised(case: Case, ins: Ins, num_ranks: int) -> Iterator[list[dict[Any, Any]]]:
    """Per rank, arguments to replace: first none; then, where a list of sizes speaks of the output, each of its
    entries scaled as the sharded dims are."""
    yield [{}] * num_ranks
    cuts = {
        chunk_sizes(v.shape[p], (num_ranks,)) for v, p in zip(case.call.inputs, ins, strict=True) if isinstance(p, int)
    }
    if len(cuts) != 1:
        return
    cut = cuts.pop()
    total = sum(cut)
    for where, sizes in _size_lists(case):
        for d, size in enumerate(sizes):
            if size > 1 and all(size * piece % total == 0 for piece in cut):
                yield [{where: [*sizes[:d], size * piece // total, *sizes[d + 1 :]]} for piece in cut]


def _size_lists(case: Case) -> Iterator[tuple[Any, list[int]]]:
    ranks = {output.ndim for output in case.call.outputs}
    for where, arg in (*enumerate(case.call.args), *case.call.kwargs.items()):
        if isinstance(arg, (list, tuple)) and arg and len(arg) in ranks and all(type(n) is int for n in arg):
            yield where, list(arg)
