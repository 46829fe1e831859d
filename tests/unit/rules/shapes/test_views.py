"""Views: reshapes, dims rearranged, added and removed, parts of a dim; and their `_copy` forms."""

import pytest
import torch
from compare import as_tensors
from features import differentiates
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.rules.shapes.reshapes import matching_dims

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

OPS = {
    "merge": (lambda a: a.view(5, 12), (5, 3, 4)),
    "merge outer": (lambda a: a.view(15, 4), (5, 3, 4)),
    "split": (lambda a: a.unflatten(1, (2, 2)), (5, 4)),
    "split in between": (lambda a: a.view(3, 2, 4), (6, 4)),
    "split in between twice": (lambda a: a.view(3, 2, 5, 2), (6, 10)),
    "split a part": (lambda a: a[1:].view(2, 3, 2), (7, 2)),
    "across": (lambda a: a.view(16, 6), (12, 8)),
    "across in between": (lambda a: a.view(8, 9), (12, 6)),
    "mixed": (lambda a: a.view(2, 3, 2, 2), (6, 4)),
    "ones": (lambda a: a.view(1, 5, 1, 3, 1), (5, 3)),
    "minus one": (lambda a: a.reshape(-1, 2), (6, 3)),
    "transposed": (lambda a: a.t().reshape(-1), (5, 4)),
    "flatten": (lambda a: a.flatten(), (5, 3, 2)),
    "ravel": (lambda a: a.ravel(), (1, 5)),
    "empty": (lambda a: a.reshape(0, 2), (0, 4)),
    "transpose": (lambda a: a.transpose(0, -1), (5, 3, 2)),
    "permute": (lambda a: a.permute(2, 0, 1), (5, 3, 2)),
    "movedim": (lambda a: a.movedim(0, -1), (5, 3, 2)),
    "T": (lambda a: a.T, (5, 3)),
    "mT": (lambda a: a.mT, (2, 5, 3)),
    "expand": (lambda a: a.expand(4, 4), (1, 4)),
    "expand lead": (lambda a: a.expand(2, -1, 3), (5, 3)),
    "expand middle": (lambda a: a.expand(5, 4, 3), (5, 1, 3)),
    "swapaxes": (lambda a: a.swapaxes(0, 1), (3, 4)),
    "atleast_3d": (torch.atleast_3d, (5, 3)),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 0), (5, 3)),
    "repeat_interleave flat": (lambda a: a.repeat_interleave(3), (5, 3)),
    "broadcast_to": (lambda a: torch.broadcast_to(a, (2, 5, 3)), (5, 1)),
    "squeeze": (lambda a: a.squeeze(), (1, 5, 1)),
    "squeeze dim": (lambda a: a.squeeze(0), (1, 5)),
    "squeeze wide": (lambda a: a.squeeze(0), (2, 5)),
    "squeeze dims": (lambda a: a.squeeze((0, 1)), (1, 5, 1)),
    "squeeze none": (lambda a: a.squeeze(()), (1, 5, 1)),
    "unsqueeze": (lambda a: a.unsqueeze(-1), (5, 3)),
    "slice": (lambda a: a[1:4], (5, 3)),
    "slice step": (lambda a: a[1::2], (7, 3)),
    "slice step inner": (lambda a: a[:, ::3], (3, 8)),
    "slice end": (lambda a: a[-2:], (5, 3)),
    "slice nothing": (lambda a: a[3:3], (5, 2)),
    "slice of slice": (lambda a: a[1:][::2][:2], (7, 2)),
    "narrow": (lambda a: a.narrow(0, 1, 3), (5, 3)),
    "select": (lambda a: a[3], (5, 3)),
    "select last": (lambda a: a.select(1, -1), (5, 3)),
    "getitem": (lambda a: a[1:3, None, 2], (5, 3)),
    "ellipsis": (lambda a: a[-1, ..., None], (5, 3)),
    "chunk": (lambda a: a.chunk(3, 0), (5, 3)),
    "unsafe_chunk": (lambda a: torch.unsafe_chunk(a, 2), (5, 2)),
    "hsplit": (lambda a: a.hsplit(2), (3, 4)),
    "vsplit": (lambda a: a.vsplit([1, 3]), (5, 2)),
    "dsplit": (lambda a: a.dsplit(2), (2, 3, 4)),
    "chunk inner": (lambda a: a.chunk(2, -1), (5, 3)),
    "split equal": (lambda a: a.split(2, 0), (5, 3)),
    "split sizes": (lambda a: a.split([2, 0, 3], 0), (5, 3)),
    "tensor_split": (lambda a: a.tensor_split(3, 0), (5, 3)),
    "unbind": (lambda a: a.unbind(0), (5, 3)),
    "unbind inner": (lambda a: a.unbind(1), (5, 3)),
    "iterate": (lambda a: tuple(a), (3, 2)),
    "part of pieces": (lambda a: a[1:4].view(9) * 2, (5, 3)),
    "bits": (lambda a: a.detach().view(torch.int64), (5, 3)),
    "bits shorter": (lambda a: a.detach().view(torch.int32), (5, 3)),
}


@pytest.mark.parametrize(("op", "shape"), OPS.values(), ids=OPS)
def test_view(op, shape):
    sweep(op, normal(*shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("op", ["select last", "unbind", "slice step", "split in between", "transpose"])
def test_view_of_other_dtypes(op, dtype):
    function, shape = OPS[op]
    sweep(function, (normal(*shape) > 0).to(dtype))


COPIES = {
    "view": lambda a: torch.view_copy(a, (3, 2, 4)),
    "permute": lambda a: torch.permute_copy(a, (1, 0)),
    "transpose": lambda a: torch.transpose_copy(a, 0, 1),
    "t": torch.t_copy,
    "expand": lambda a: torch.expand_copy(a, (2, 6, 4)),
    "expand nothing": lambda a: torch.expand_copy(a, (6, 4)),
    "squeeze": torch.squeeze_copy,
    "unsqueeze": lambda a: torch.unsqueeze_copy(a, 0),
    "slice": lambda a: torch.slice_copy(a, 0, 1, 5, 2),
    "narrow": lambda a: torch.narrow_copy(a, 0, -3, 2),
    "select": lambda a: torch.select_copy(a, 0, 1),
    "split": lambda a: torch.split_copy(a, 4),
    "split sizes": lambda a: torch.split_with_sizes_copy(a, [1, 5]),
    "unbind": torch.unbind_copy,
    "alias": torch.alias_copy,
    "lift_fresh": torch.ops.aten.lift_fresh_copy,
}


@pytest.mark.parametrize("op", COPIES.values(), ids=COPIES)
def test_copy_of_a_view(op):
    sweep(op, normal(6, 4), backward=differentiates(op, normal(6, 4)))


@pytest.mark.parametrize("where", [R, S(0), S(1)])
@pytest.mark.parametrize("op", COPIES.values(), ids=COPIES)
def test_a_copy_has_its_own_memory(op, where):
    x = place(normal(6, 4), where)
    for result in as_tensors(op(x)):
        result.zero_()
    torch.testing.assert_close(x.full_tensor(), normal(6, 4))


def test_complex_numbers_as_pairs():
    z = torch.complex(normal(5, 3), normal(5, 3).flip(0))
    for op in (torch.view_as_real, torch.real, torch.imag, torch.view_as_real_copy):
        sweep(op, z)
    sweep(lambda a: torch.view_as_real(torch.view_as_complex(a)), normal(5, 3, 2))
    for op in (lambda a: a.H, lambda a: a.mH, lambda a: a.conj().resolve_conj()):
        sweep(op, z)


def test_meshgrid():
    for indexing in ("ij", "xy"):
        sweep(lambda a, b, indexing=indexing: torch.meshgrid(a, b, indexing=indexing), normal(5), normal(3))


LIKE = {
    "view_as": (lambda a, b: a.view_as(b), (6, 2), (3, 4)),
    "expand_as": (lambda a, b: a.expand_as(b), (5, 1), (5, 3)),
    "broadcast_tensors": (lambda a, b: torch.broadcast_tensors(a, b)[0], (5, 1), (5, 3)),
}


@pytest.mark.parametrize(("op", "left", "right"), LIKE.values(), ids=LIKE)
def test_shape_of_another(op, left, right):
    sweep(lambda a, b: op(a, b) + b, normal(*left), normal(*right))


def test_a_change_of_size_in_place_is_refused():
    x = place(normal(6, 4), S(0))
    with pytest.raises(sw.errors.InPlaceError, match="changes the shape"):
        x.resize_(2, 2)
    torch.testing.assert_close(x.full_tensor(), normal(6, 4))


def test_sum_to_size():
    sweep(lambda a: a.sum_to_size(5, 1), normal(5, 3))


RESHAPED = {
    "t_": lambda a: a.t_(),
    "squeeze_": lambda a: a.unsqueeze(0).squeeze_(0),
    "unsqueeze_": lambda a: a.unsqueeze_(1),
    "transpose_": lambda a: a.transpose_(0, 1),
}


@pytest.mark.parametrize("op", [RESHAPED["t_"], RESHAPED["transpose_"]])
def test_a_sharded_dim_moves_in_place(op):
    x = place(normal(5, 3), S(0))
    assert op(x) is x
    assert x.placements == (S(1),)
    torch.testing.assert_close(x.full_tensor(), normal(5, 3).t())


def test_a_sharded_dim_is_not_squeezed_in_place():
    x = place(normal(1, 3), S(0))
    with pytest.raises(sw.errors.InPlaceError, match="sharded cannot be removed"):
        x.squeeze_(0)
    torch.testing.assert_close(x.full_tensor(), normal(1, 3))


@pytest.mark.parametrize("op", RESHAPED.values(), ids=RESHAPED)
def test_reshaped_in_place(op):
    x, y = normal(5, 3), place(normal(5, 3), R)
    result = op(y)
    assert result.shape == op(x).shape
    torch.testing.assert_close(result.full_tensor(), x)


STAYS = {
    "transpose": (lambda a: a.t(), S(0), "[6,8] S(1)@a"),
    "permute": (lambda a: a.permute(1, 0), S(1), "[6,8] S(0)@a"),
    "merge": (lambda a: a.view(48), S(0), "[48] S(0)@a"),
    "split": (lambda a: a.view(4, 2, 6), S(0), "[4,2,6] S(0)@a"),
    "heads": (lambda a: a.unflatten(1, (2, 3)), S(1), "[8,2,3] S(1)@a"),
    "slice": (lambda a: a[1:6], S(0), "[5,6] S(0)@a"),
    "slice uneven": (lambda a: a[3:], S(0), "[5,6] S(0=1+4)@a"),
    "slice one side": (lambda a: a[5:], S(0), "[3,6] S(0=0+3)@a"),
    "slice step": (lambda a: a[1::3], S(0), "[3,6] S(0=1+2)@a"),
    "view of explicit sizes": (lambda a: a[3:].view(30), S(0), "[30] S(0=6+24)@a"),
    "chunk": (lambda a: a.chunk(2, 0)[1], S(0), "[4,6] S(0=0+4)@a"),
    "chunk other": (lambda a: a.chunk(2, 1)[1], S(0), "[8,3] S(0)@a"),
    "select other": (lambda a: a[:, 2], S(0), "[8] S(0)@a"),
    "unbind other": (lambda a: a.unbind(1)[0], S(0), "[8] S(0)@a"),
    "expand": (lambda a: a.expand(3, 8, 6), S(1), "[3,8,6] S(2)@a"),
    "unsqueeze": (lambda a: a.unsqueeze(0), S(0), "[1,8,6] S(1)@a"),
}


@pytest.mark.parametrize(("op", "where", "layout"), STAYS.values(), ids=STAYS)
def test_nothing_moves(op, where, layout):
    x = place(normal(8, 6), where)
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_total_counts() == 0
    assert str(result._layout) == layout
    torch.testing.assert_close(result.full_tensor(), op(normal(8, 6)))


@pytest.mark.parametrize("pending", ["sum", "avg", "max", "min"])
def test_any_reduction_passes_through_a_view(pending):
    x = place(normal(8, 6), P(pending))
    with CommDebugMode() as comm:
        results = x.t(), x.view(48), x[1:3], x.unsqueeze(0), x.expand(2, 8, 6)
    assert comm.get_total_counts() == 0
    assert all(result.placements == (P(pending),) for result in results)


@pytest.mark.parametrize(
    ("op", "where", "comms", "layout"),
    [
        (lambda a: a.view(3, 2, 4), S(0), {"all_to_all": 1}, "[3,2,4] S(0)@a"),
        (lambda a: a.view(24), S(1), {"all_gather": 1}, "[24] R"),
        (lambda a: a.unbind(0)[0], S(0), {}, "[4] P(sum)@a"),
        (lambda a: a.unbind(1)[0], S(0), {}, "[6] S(0)@a"),
    ],
)
def test_views_that_need_data_of_other_ranks(op, where, comms, layout):
    x = place(normal(6, 4), where)
    with CommDebugMode() as comm:
        result = op(x)
    assert comm.get_comm_counts() == comms
    assert str(result._layout) == layout


def test_views_share_memory():
    """A slice of a shard is the shard's own memory, so that writing to it is seen."""
    x, expected = place(normal(8, 6), S(0)), normal(8, 6)
    x[3:5].mul_(2)
    expected[3:5].mul_(2)
    x[1:7, 2:4].zero_()
    expected[1:7, 2:4].zero_()
    x.view(48)[10:].add_(1)
    expected.view(48)[10:].add_(1)
    torch.testing.assert_close(x.full_tensor(), expected)


@pytest.mark.parametrize(
    ("view", "where"),
    [(lambda a: a.view(24), S(1)), (lambda a: a[5], S(0)), (lambda a: a.unfold(0, 2, 1), S(0))],
    ids=["moved", "selected", "windows"],
)
def test_a_write_to_a_view_is_seen_or_refused(view, where):
    x, expected = place(normal(6, 4), where), normal(6, 4)
    source = torch.ones_like(view(expected))
    view(expected).copy_(source)
    try:
        view(x).copy_(place(source, R))
    except sw.errors.InPlaceError:
        expected = normal(6, 4)
    torch.testing.assert_close(x.full_tensor(), expected)


def test_a_function_that_writes_to_views_of_its_result():
    sweep(lambda a: torch.ops.aten._pad_circular(a, (1, 2)), normal(3, 2, 5), partial=False)


def test_a_function_that_writes_to_a_tensor_of_its_own():
    sweep(lambda a: torch.vander(a.detach()), normal(5), partial=False)


def test_as_strided_sees_the_memory_of_one_device():
    sweep(lambda a: a.as_strided((2, 2), (1, 2)), normal(4, 3), partial=False)
    with pytest.raises(sw.errors.StrideError):
        place(normal(4, 3), S(0)).t().as_strided((2, 2), (1, 2))
    with pytest.raises(sw.errors.StrideError) as error:
        place(normal(4, 3), S(0))[:, ::2].as_strided((2, 2), (1, 2))
    assert str(error.value) == (
        "as_strided(f64[4,2] S(0)@a, [2, 2], [1, 2]): a sharded tensor that is not contiguous has no memory to take a "
        "view of by strides; call contiguous() first"
    )


def test_different_pieces_of_the_same_dim_meet():
    x = normal(9, 3)
    d = place(x, S(0), mesh=(4,))
    for op in (torch.add, torch.mul, lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.stack([a, b])):
        torch.testing.assert_close(op(d[2:7], d[4:]).full_tensor(), op(x[2:7], x[4:]))


def test_ordered_axes_survive_views():
    mesh = mesh_of((2, 2))
    x = normal(8, 6)
    d = sw.distribute_tensor(x, mesh, {0: ("b", "a")})
    for op, layout in (
        (lambda a: a.t(), "[6,8] S(1)@b,a"),
        (lambda a: a.view(4, 2, 6), "[4,2,6] S(0)@b,a"),
        (lambda a: a[3:], "[5,6] S(0=0+1+2+2)@b,a"),
    ):
        assert str(op(d)._layout) == layout
        torch.testing.assert_close(op(d).full_tensor(), op(x))


@pytest.mark.parametrize(
    ("source", "target", "groups"),
    [
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (2, 3, 4), [([0], [0, 1]), ([1], [2])]),
        ((12, 8), (16, 6), [([0, 1], [0, 1])]),
        ((5, 1), (5,), [([0], [0]), ([1], [])]),
        ((5,), (1, 5), [([0], [0, 1])]),
        ((), (1,), [([], [0])]),
    ],
)
def test_matching_dims(source, target, groups):
    assert matching_dims(source, target) == groups


@pytest.mark.parametrize(
    ("shape", "target"),
    [((1,), (-1,)), ((1,), (1, 1)), ((1, 4), (1, 2, 2)), ((1, 4, 3), (1, -1)), ((1, 1, 4), (1, 4))],
    ids=str,
)
def test_a_batch_of_one_stays_where_it_is(shape, target):
    x = normal(*shape)
    d = place(x, S(0))
    with CommDebugMode() as comm, sw.strict():
        y = d.view(target)
    assert y.placements == (S(0),) and comm.get_total_counts() == 0
    torch.testing.assert_close(y.full_tensor(), x.view(target))


COPIES = {
    "diagonal_copy": lambda x: torch.diagonal_copy(x, 1),
    "split_with_sizes_copy": lambda x: torch.split_with_sizes_copy(x, [1, 2, 1], 1),
    "unfold_copy": lambda x: torch.unfold_copy(x, 0, 3, 1),
    "permute_copy": lambda x: torch.permute_copy(x, (1, 0)),
    "view_copy": lambda x: torch.view_copy(x, (3, 2, 4)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_lie_as_torchs_do(name):
    for placement in (R, S(0), S(1)):
        for mine, expected in zip(
            *(as_tensors(COPIES[name](x)) for x in (place(normal(6, 4), placement), normal(6, 4)))
        ):
            assert mine.is_contiguous() and mine.stride() == expected.stride(), placement
