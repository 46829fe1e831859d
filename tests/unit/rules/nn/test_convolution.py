"""Convolutions, wherever their inputs lie."""

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode

R, S = sw.Replicate(), sw.Shard


def conv(function, **options):
    return lambda x, w, b=None: function(x, w, b, **options)


CONVOLUTIONS = {
    "1d": (conv(F.conv1d, padding=1), (3, 4, 7), (5, 4, 3), (5,)),
    "stride and dilation": (conv(F.conv1d, stride=2, padding=2, dilation=2), (2, 4, 9), (3, 4, 3), (3,)),
    "no bias, no padding": (conv(F.conv1d), (2, 3, 9), (2, 3, 5)),
    "stride beyond the kernel": (conv(F.conv1d, stride=4), (1, 2, 11), (2, 2, 2)),
    "kernel beyond the shard": (conv(F.conv1d, padding=3), (3, 1, 4), (2, 1, 7), (2,)),
    "padding beyond the input": (conv(F.conv1d, padding=6, stride=3), (2, 1, 2), (2, 1, 2), (2,)),
    "unbatched": (conv(F.conv1d, padding=1), (4, 7), (5, 4, 3), (5,)),
    "2d": (conv(F.conv2d, stride=(2, 1), padding=(1, 2)), (2, 3, 6, 5), (4, 3, 3, 2), (4,)),
    "3d": (conv(F.conv3d, padding=1), (2, 2, 4, 3, 5), (3, 2, 3, 2, 3), (3,)),
    "depthwise": (conv(F.conv1d, groups=4, padding=1), (2, 4, 5), (4, 1, 3), (4,)),
    "groups": (conv(F.conv1d, groups=4, padding=1), (2, 8, 5), (8, 2, 2)),
    "groups of other widths": (conv(F.conv1d, groups=2, padding=1), (2, 4, 5), (6, 2, 3), (6,)),
    "groups that even cuts divide": (conv(F.conv1d, groups=3, padding=1), (2, 6, 5), (9, 2, 3), (9,)),
    "transposed": (conv(F.conv_transpose1d, stride=2, padding=1, output_padding=1), (2, 3, 5), (3, 4, 3), (4,)),
    "transposed with gaps": (
        conv(F.conv_transpose1d, stride=3, output_padding=2, dilation=2),
        *((2, 3, 4), (3, 2, 2), (2,)),
    ),
    "transposed 2d": (conv(F.conv_transpose2d, stride=(1, 2), padding=(1, 0)), (2, 2, 4, 3), (2, 3, 3, 2), (3,)),
    "transposed depthwise": (conv(F.conv_transpose1d, stride=2, groups=4), (2, 4, 4), (4, 1, 3), (4,)),
    "transposed groups": (conv(F.conv_transpose1d, padding=1, groups=2), (2, 4, 4), (4, 3, 3), (6,)),
    "transposed groups that even cuts divide": (
        conv(F.conv_transpose1d, stride=2, groups=3),
        *((2, 6, 4), (6, 1, 3), (3,)),
    ),
    "time first": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), (5, 3, 4), (3, 4, 2), (2,)),
}


@pytest.mark.parametrize(("op", "shapes"), [(op, s) for op, *s in CONVOLUTIONS.values()], ids=CONVOLUTIONS)
def test_convolution(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes))


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_named_padding(padding):
    sweep(conv(F.conv1d, padding=padding, dilation=2), normal(3, 2, 7), normal(2, 2, 3), partial=False)


@pytest.mark.parametrize("function", [F.conv1d, F.conv_transpose1d])
def test_gradient_of_the_gradient(function):
    def second(x, w):
        return torch.autograd.grad(function(x, w, padding=1).square().sum(), (x, w), create_graph=True)

    for where in ([R, R], [S(0), R], [S(1), S(1)], [S(2), R], [R, S(0)]):
        compare(second, (normal(2, 2, 6), normal(2, 2, 3)), mesh_of((2,)), [[p] for p in where])


MOVES = {
    "batch": ((S(0), R), S(0), {}),
    "output channels": ((R, S(0)), S(1), {}),
    "input channels": ((S(1), S(1)), sw.Partial(), {}),
    "rows": ((S(2), R), S(2), {"all_to_all": 1}),
    "columns": ((S(3), R), S(3), {"all_to_all": 1}),
}


@pytest.mark.parametrize(("where", "out", "moves"), MOVES.values(), ids=MOVES)
def test_only_halos_move(where, out, moves):
    x, w = (place(normal(*shape), p) for shape, p in zip([(4, 4, 8, 8), (4, 4, 3, 3)], where, strict=True))
    with CommDebugMode() as comm, sw.strict():
        result = F.conv2d(x, w, padding=1)
    assert result.placements == (out,) and comm.get_comm_counts() == moves


def test_a_kernel_of_one_moves_nothing():
    x, w = place(normal(2, 3, 7, 5), S(2)), place(normal(4, 3, 1, 1), R)
    with CommDebugMode() as comm:
        assert F.conv2d(x, w).placements == (S(2),)
    assert comm.get_total_counts() == 0


GROUPED = {
    "as many": (F.conv1d, (2, 8, 5), (8, 2, 3), (8,)),
    "more": (F.conv1d, (2, 8, 5), (16, 2, 3), (16,)),
    "fewer": (F.conv1d, (2, 8, 5), (4, 2, 3), (4,)),
    "without bias": (F.conv1d, (2, 8, 5), (16, 2, 3)),
    "transposed, more": (F.conv_transpose1d, (2, 8, 5), (8, 4, 3), (16,)),
    "transposed, fewer": (F.conv_transpose1d, (2, 8, 5), (8, 1, 3), (4,)),
}


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("x_lies", [S(1), R], ids=str)
@pytest.mark.parametrize(("function", "shapes"), [(f, s) for f, *s in GROUPED.values()], ids=GROUPED)
def test_whole_groups_move_nothing(function, shapes, x_lies, mesh):
    lies = [[p] * len(mesh) for p in (x_lies, S(0), S(0))]
    inputs = [place(normal(*shape), *p, mesh=mesh) for shape, p in zip(shapes, lies, strict=False)]
    with CommDebugMode() as comm, sw.strict():
        out = function(*inputs, groups=4)
    assert out.placements == (S(1),) * len(mesh) and comm.get_total_counts() == 0
    compare(
        lambda *args: function(*args, groups=4), [x.full_tensor() for x in inputs], mesh_of(mesh), lies[: len(shapes)]
    )


@pytest.mark.parametrize(("groups", "mesh"), [(3, (2,)), (5, (2,)), (5, (4,))])
@pytest.mark.parametrize("function", [F.conv1d, F.conv_transpose1d])
def test_groups_that_the_pieces_would_cut(function, groups, mesh):
    """Parts of groups are fetched; nobody gathers them all."""
    inputs = normal(2, 2 * groups, 5), normal(2 * groups, 2, 3), normal(2 * groups)
    for where in (S(1), R):
        lies = [where, S(0), S(0)]
        given = [place(t, p, mesh=mesh) for t, p in zip(inputs, lies, strict=True)]
        with CommDebugMode() as comm, sw.strict():
            function(*given, groups=groups)
        assert set(comm.get_comm_counts()) == {"all_to_all"}
        (out,) = compare(lambda *args: function(*args, groups=groups), inputs, mesh_of(mesh), [[p] for p in lies])
        assert all(piece % 2 == 0 for piece in out._layout.pieces(1))


def test_groups_and_a_halo():
    lies = [[S(1), S(2)], [S(0), R], [S(0), R]]
    for groups in (3, 4):
        for function, shape in ((F.conv1d, (4 * groups, 2, 3)), (F.conv_transpose1d, (2 * groups, 4, 3))):
            op = conv(function, groups=groups, stride=2, padding=1)
            inputs = normal(2, 2 * groups, 7), normal(*shape), normal(4 * groups)
            (out,) = compare(op, inputs, mesh_of((2, 2)), lies)
            assert out.placements == (S(1), S(2))


def test_groups_of_pieces_of_any_size():
    """Sizes that a user chose are kept where they are whole groups."""
    x, w = normal(2, 10, 5), normal(10, 2, 3)
    for sizes, kept in (([2, 6, 0, 2], (2, 6, 0, 2)), ([1, 6, 0, 3], (4, 4, 2, 0))):
        parts = [[part.clone() for part in t.split(sizes, dim)] for t, dim in ((x, 1), (w, 0))]
        d, weight = (
            sw.DTensor.from_local(ranked(p), mesh_of((4,)), [S(i)]) for p, i in zip(parts, (1, 0), strict=True)
        )
        out = F.conv1d(d, weight, groups=5)
        assert out._layout.pieces(1) == kept
        torch.testing.assert_close(out.full_tensor(), F.conv1d(x, w, groups=5))


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2}, {"padding": 2, "dilation": 2}], ids=str)
@pytest.mark.parametrize("function", [F.conv1d, F.conv_transpose1d])
def test_pieces_of_any_size(function, options):
    x, w, mesh = normal(2, 3, 9), normal(3, 3, 3), mesh_of((4,))
    shards = [part.clone() for part in x.split([1, 5, 0, 3], 2)]
    d = sw.DTensor.from_local(ranked(shards), mesh, [S(2)]).requires_grad_()
    plain, weight = x.clone().requires_grad_(), place(w, R, mesh=(4,)).requires_grad_()
    plain_weight = w.clone().requires_grad_()
    out, expected = function(d, weight, **options), function(plain, plain_weight, **options)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad)
    torch.testing.assert_close(weight.grad.full_tensor(), plain_weight.grad)
    assert options != {"padding": 1} or out._layout.pieces(2) == (1, 5, 0, 3)


def test_two_spatial_dims_at_once():
    mesh = mesh_of((2, 2))
    for function, shape in ((F.conv2d, (4, 3, 3, 3)), (F.conv_transpose2d, (3, 4, 3, 3))):
        op = conv(function, padding=1, stride=2)
        out = compare(op, (normal(2, 3, 7, 6), normal(*shape), normal(4)), mesh, [[S(2), S(3)], [R, R], [R, R]])
        assert out[0].placements == (S(2), S(3))


def test_half_precision():
    x, w = normal(2, 3, 16).bfloat16(), normal(3, 3, 3).bfloat16()
    out = F.conv1d(place(x, S(2)), place(w, R), padding=1)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.full_tensor(), F.conv1d(x, w, padding=1))


def test_wrong_channels_are_torchs_error():
    x, w = place(normal(2, 3, 8), S(2)), place(normal(4, 2, 3), R)
    with pytest.raises(RuntimeError, match="channel"), CommDebugMode() as comm:
        F.conv1d(x, w)
    assert comm.get_total_counts() == 0
