"""Resampling of images: by batch and channels, nearest neighbours also by spatial dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, remembered, skipping_empty
from shardwise.rules.kit.notation import Factor, Factors, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import SUM, Call, HeldValues, Local, Rule, Strategy, replicated
from shardwise.rules.kit.windows import Fetch, by_rank, even_pieces, held, with_halo
from shardwise.rules.math.reductions import PROGRAM_COST


def _by_channels(call: Call) -> list[Strategy]:
    names: list[Factor] = ["batch", "channel", *[None] * (call.inputs[0].ndim - 2)]
    linear = [frozenset({0})] if call.inputs[0].dtype.is_floating_point else []
    return Factors([names], [names], linear=linear).strategies()


register(
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    rule=skipping_empty(Rule(_by_channels)),
)


# Nearest neighbours


def _nearest(call: Call) -> list[Strategy]:
    x, out = call.inputs[0], call.outputs[0]
    found = _by_channels(call)
    for dim in range(2, x.ndim):
        resize = even_pieces(1, x.shape[dim], out.shape[dim])
        found.append(Strategy((dim,), (dim,), PROGRAM_COST, resize))
    return found


def _nearest_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Along a sharded dim, each rank fetches the neighbours of its outputs and picks from them."""
    x, out = ins[0], outs[0]
    if not any(x.splits[2:]):
        return None
    exact = call.name.startswith("_")
    scales = [value for name, value in call.bound.items() if name.startswith("scales")]
    fetches, picks = [], []
    for dim, scale in enumerate(scales, 2):
        source = _neighbours(x.shape[dim], out.shape[dim], scale, exact)
        pieces = [source[start:stop] for start, stop in out.intervals(dim)]
        want = [(piece[0], piece[-1] + 1) if piece else (0, 0) for piece in pieces]
        fetches += [Fetch.of(x, dim, want)] if x.splits[dim] else []
        starts = [piece[0] if piece and x.splits[dim] else 0 for piece in pieces]  # of what is fetched
        shifted = [tuple(at - start for at in piece) for piece, start in zip(pieces, starts, strict=True)]
        picks.append(held(out, dim, shifted if source != tuple(range(x.shape[dim])) else [None] * len(shifted)))
    return with_halo(_pick, fetches, [call["self"], by_rank(picks), HeldValues(out.held_shapes)])


@lru_cache(maxsize=256)
def _neighbours(size_in: int, size_out: int, scale: float | None, exact: bool) -> tuple[int, ...]:
    """Which input each output is: as torch finds it, rounding included."""
    aten = torch.ops.aten
    function = aten._upsample_nearest_exact1d.default if exact else aten.upsample_nearest1d.default
    places = torch.arange(size_in, dtype=torch.float64).reshape(1, 1, size_in)
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(int(at) for at in function(places, [size_out], scale).flatten().tolist())


def _pick(x: Tensor, picks: Sequence[tuple[int, ...] | None], shape: Sequence[int]) -> Tensor:
    """The elements picked along each dim; None picks all, on all ranks."""
    if not math.prod(shape):
        zeros = connected_zeros(x, shape, saves=False)
        return remembered(zeros) if any(pick is not None for pick in picks) else zeros
    for dim, pick in enumerate(picks, 2):
        if pick is not None:
            x = x.index_select(dim, torch.tensor(pick, device=x.device))
    return x


register(
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    rule=skipping_empty(Rule(_nearest, _nearest_local)),
)


# Sampling at the points of a grid, which are free


def _grid_sampler(call: Call) -> Factors:
    places = [f"at{d}" for d in range(call.inputs[0].ndim - 2)]
    image: list[Factor] = ["batch", "channel", *[None] * len(places)]
    return Factors([image, ["batch", *places, None]], [["batch", "channel", *places]], linear=[frozenset({0})])


register("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback", rule=factor_rule(_grid_sampler))


def _affine_grid(call: Call) -> list[Strategy]:
    return [replicated(call), Strategy((0,), (0,)), Strategy((SUM,), (SUM,))]


def _affine_grid_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    sizes = [(shape[0], *call["size"][1:]) for shape in ins[0].held_shapes]
    args, kwargs = call.replace(size=HeldValues(sizes))
    return Local(call.op, args, kwargs, resized=True)


register("affine_grid_generator", rule=skipping_empty(Rule(_affine_grid, _affine_grid_local)))
