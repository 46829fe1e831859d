"""Resampling of images, wherever they lie."""

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

S = sw.Shard
MODES = {
    "nearest 1d": ("nearest", (2, 3, 7)),
    "nearest 2d": ("nearest", (2, 3, 6, 5)),
    "nearest 3d": ("nearest", (2, 2, 4, 5, 3)),
    "nearest exact 1d": ("nearest-exact", (2, 3, 7)),
    "nearest exact 2d": ("nearest-exact", (2, 3, 6, 5)),
    "nearest exact 3d": ("nearest-exact", (2, 2, 4, 5, 3)),
    "linear": ("linear", (2, 3, 7)),
    "bilinear": ("bilinear", (2, 3, 6, 5)),
    "bicubic": ("bicubic", (2, 3, 6, 5)),
    "trilinear": ("trilinear", (2, 2, 4, 5, 3)),
    "area": ("area", (2, 3, 6, 5)),
}


@pytest.mark.parametrize(("mode", "shape"), MODES.values(), ids=MODES)
@pytest.mark.parametrize("to", [{"scale_factor": 1.7}, {"scale_factor": 2}, {"size": 4}], ids=str)
def test_interpolate(mode, shape, to):
    sweep(lambda x: F.interpolate(x, mode=mode, **to), normal(*shape), partial=False)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (1, 2, 4, 4, 4)], ids=str)
def test_neighbours_beside_a_sharded_dim(shape):
    """The first neighbour along a dim that is whole is not the first element either."""
    sweep(lambda x: F.interpolate(x, size=2, mode="nearest-exact"), normal(*shape), partial=False)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing(mode):
    sweep(lambda x: F.interpolate(x, size=4, mode=mode, antialias=True), normal(2, 3, 6, 5))


@pytest.mark.parametrize("exact", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("scale", [2, 1.7, 0.4, 41])
def test_nearest_neighbours_are_torchs_own(exact, scale):
    """The place of a neighbour is rounded, as if on one device, not from where the shard begins."""
    x = normal(1, 1, 57)
    out = F.interpolate(place(x, S(2), mesh=(4,)), scale_factor=scale, mode=exact)
    assert torch.equal(out.full_tensor(), F.interpolate(x, scale_factor=scale, mode=exact))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_nearest_neighbours_move_nothing(dim):
    x = place(normal(4, 4, 8, 8), S(dim))
    with CommDebugMode() as comm, sw.strict():
        out = F.interpolate(x, scale_factor=2)
    assert out.placements == (S(dim),) and comm.get_total_counts() == 0


GRIDS = {
    "plain": ({"align_corners": False}, (2, 3, 6, 5), (2, 4, 3, 2)),
    "bicubic": ({"mode": "bicubic", "padding_mode": "border", "align_corners": True}, (2, 3, 6, 5), (2, 4, 3, 2)),
    "3d": ({"padding_mode": "reflection", "align_corners": False}, (2, 2, 3, 4, 3), (2, 3, 2, 2, 3)),
}


@pytest.mark.parametrize(("options", "image", "grid"), GRIDS.values(), ids=GRIDS)
def test_grid_sample(options, image, grid):
    sweep(lambda x, g: F.grid_sample(x, g, **options), normal(*image), normal(*grid))


@pytest.mark.parametrize(("x", "grid", "out"), [(S(0), S(0), S(0)), (S(1), sw.Replicate(), S(1))], ids=str)
def test_grid_sample_moves_nothing(x, grid, out):
    image, places = place(normal(2, 4, 6, 5), x), place(normal(2, 4, 3, 2), grid)
    with CommDebugMode() as comm:
        result = F.grid_sample(image, places, align_corners=False)
    assert result.placements == (out,) and comm.get_total_counts() == 0


@pytest.mark.parametrize("size", [(3, 2, 4, 5), (3, 2, 4, 5, 2)], ids=str)
def test_affine_grid(size):
    dims = len(size) - 2
    sweep(lambda theta: F.affine_grid(theta, size, align_corners=False), normal(3, dims, dims + 1))
