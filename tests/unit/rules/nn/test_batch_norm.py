"""Norms over whole batches, groups and rows: batch, instance, group, local response and weight norm."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compare import compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S = sw.Replicate(), sw.Shard
aten = torch.ops.aten


def batch_norm(training, **options):
    """The result, and the running statistics after it."""

    def run(x, weight, bias, running):
        mean, var = running.detach().clone(), running.detach().clone().abs() + 0.5
        return F.batch_norm(x, mean, var, weight, bias, training, **options), mean, var

    return run


def updated(x, weight, bias, running):
    mean, var = running.detach().clone(), running.detach().clone().abs() + 0.5
    return *aten._batch_norm_with_update(x, weight, bias, mean, var, 0.1, 1e-5)[:3], mean, var


WITH_RUNNING = {
    "training": batch_norm(True, momentum=0.3, eps=1e-3),
    "evaluation": batch_norm(False),
    "update": updated,
}


@pytest.mark.parametrize("x", [(5, 4), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("op", WITH_RUNNING.values(), ids=WITH_RUNNING)
def test_batch_norm_with_running_statistics(op, x):
    inputs = (normal(*x), normal(4), normal(4), normal(4) + 1)
    for running in (R, S(0)):
        for where in (R, *map(S, range(len(x)))):
            for mesh in (mesh_of((2,)), mesh_of((4,))):
                compare(op, inputs, mesh, [[where], [R], [S(0)], [running]])
    two = [([S(0), S(1)], [R, S(0)]), ([S(1), S(0)], [S(0), R]), ([S(0), S(0)], [R, R]), ([S(1), S(1)], [S(0), S(0)])]
    for where, running in two:
        compare(op, inputs, mesh_of((2, 2)), [where, [R, R], [R, R], running])


def test_parameters_that_are_strided_where_shards_have_one_element_of_each_row_and_channel():
    """There torch's own gradient takes them for contiguous."""
    film = normal(2, 2).t()

    def op(x, film, var):
        return F.batch_norm(x, var.detach(), var.detach() ** 2 + 1, film[:, 0], film[:, 1], eps=0.1)

    for where in (R, S(0), S(1), S(2)):
        compare(op, (normal(5, 2, 3), film, normal(2)), mesh_of((4,)), [[where], [R], [R]])


WITHOUT_RUNNING = {
    "affine": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "native": lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    "legitimate": lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
}


@pytest.mark.parametrize("op", WITHOUT_RUNNING.values(), ids=WITHOUT_RUNNING)
def test_batch_norm_of_this_batch(op):
    sweep(op, normal(3, 4, 5), normal(4), normal(4))


def test_plain_batch_norm():
    sweep(lambda x: F.batch_norm(x, None, None, training=True), normal(3, 4, 2, 2))


def test_instance_norm_with_running_statistics():
    def run(x, running):
        mean, var = running.detach().clone(), running.detach().clone().abs() + 0.5
        return F.instance_norm(x, mean, var, use_input_stats=True), mean, var

    sweep(run, normal(3, 4, 5), normal(4), partial=False)


def test_the_gradient_of_the_gradient():
    def second(x, w):
        return torch.autograd.grad(F.batch_norm(x, None, None, w, training=True).pow(3).sum(), x, create_graph=True)

    for where in (S(0), S(1), S(2)):
        compare(second, (normal(4, 2, 3), normal(2)), mesh_of((2,)), [[where], [R]])


@pytest.mark.parametrize("where", [S(0), S(2)], ids=str)
def test_statistics_are_added_up_not_gathered(where):
    module = nn.BatchNorm1d(3).double()
    d = sw.distribute_module(copy.deepcopy(module), mesh_of((2,)))
    x = normal(8, 3, 6)
    sharded = place(x, where)
    with CommDebugMode() as comm:
        out = d(sharded)
    assert out.placements == (where,) and comm.get_comm_counts() == {"all_reduce": 2}
    torch.testing.assert_close(out.full_tensor(), module(x))
    torch.testing.assert_close(d.running_mean.full_tensor(), module.running_mean)
    torch.testing.assert_close(d.running_var.full_tensor(), module.running_var)
    d.eval(), module.eval()
    with CommDebugMode() as comm:
        out = d(sharded)
    assert out.placements == (where,) and comm.get_total_counts() == 0
    torch.testing.assert_close(out.full_tensor(), module(x))


@pytest.mark.parametrize("training", [True, False])
def test_channels_move_nothing(training):
    x, stats = place(normal(6, 4, 5), S(1)), [place(normal(4).abs(), S(0)) for _ in range(4)]
    with CommDebugMode() as comm:
        out = F.batch_norm(x, *stats, training)
    assert out.placements == (S(1),) and comm.get_total_counts() == 0


def test_whole_running_statistics_of_sharded_channels():
    """They are written to where they are: every rank gets those of all channels, and the input stays."""
    x, mean, var = normal(16, 64, 64), torch.zeros(64, dtype=torch.float64), torch.ones(64, dtype=torch.float64)
    running, sharded = [place(mean, R), place(var, R)], place(x, S(1))
    with CommDebugMode() as comm:
        out = F.batch_norm(sharded, *running, training=True)
    assert out.placements == (S(1),) and set(comm.get_comm_counts()) == {"all_gather"}
    assert sum(c.bytes for c in comm.comms) < 2000  # statistics, not the input
    torch.testing.assert_close(out.full_tensor(), F.batch_norm(x, mean, var, training=True))
    torch.testing.assert_close(running[0].full_tensor(), mean)
    torch.testing.assert_close(running[1].full_tensor(), var)


def test_running_statistics_that_are_pending():
    x, running = place(normal(6, 4), S(0)), [place(normal(4).abs(), sw.Partial()) for _ in range(2)]
    expected = [normal(4).abs() for _ in range(2)]
    F.batch_norm(x, *running, training=True)
    F.batch_norm(normal(6, 4), *expected, training=True)
    for mine, value in zip(running, expected, strict=True):
        assert mine.placements == (sw.Partial(),)
        torch.testing.assert_close(mine.full_tensor(), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_torch(dtype):
    x = (normal(64, 4) * 3 + 5).to(dtype)
    op = lambda a: F.batch_norm(a, None, None, training=True)  # noqa: E731
    exact, plain, sharded = op(x.double()), op(x), op(place(x, S(0), mesh=(4,))).full_tensor()
    assert sharded.dtype == plain.dtype
    assert (sharded - exact).abs().max() <= 1.01 * (plain - exact).abs().max()


def test_one_value_per_channel_is_torchs_error():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.batch_norm(place(normal(1, 4), S(0)), None, None, training=True)


OTHERS = {
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 3, 2), (4,), (4,)),
    "group cut by the pieces": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 6, 5), (6,), (6,)),
    "one group": (lambda x: F.group_norm(x, 1), (2, 3)),
    "native group": (lambda x: aten.native_group_norm(x, None, None, 3, 4, 5, 2, 1e-5), (3, 4, 5)),
    "layer over two dims": (lambda x, w, b: F.layer_norm(x, (3, 4), w, b), (5, 3, 4), (3, 4), (3, 4)),
    "layer over all dims": (lambda x, w: F.layer_norm(x, (3, 4, 2), w), (3, 4, 2), (3, 4, 2)),
    "native layer": (lambda x: aten.native_layer_norm(x, [3, 4], None, None, 1e-5), (5, 3, 4)),
    "local response": (lambda x: F.local_response_norm(x, 3), (3, 5, 4)),
    "weight": (lambda v, g: torch._weight_norm(v, g, 0), (4, 5, 3), (4, 1, 1)),
    "weight of columns": (lambda v, g: torch._weight_norm_interface(v, g, 2), (4, 5, 3), (1, 1, 3)),
    "distance": (F.pairwise_distance, (5, 3), (5, 3)),
}


@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in OTHERS.values()], ids=OTHERS)
def test_other_norms(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes))


SHARDED = {
    "group, spatial": (lambda x: F.group_norm(x, 2), (4, 4, 8), S(2), 2),
    "group, part of a group": (lambda x: F.group_norm(x, 1), (4, 4, 8), S(1), 2),
    "layer, outer": (lambda x: F.layer_norm(x, (4, 8)), (4, 4, 8), S(1), 2),
}


@pytest.mark.parametrize(("op", "shape", "where", "reductions"), SHARDED.values(), ids=SHARDED)
def test_a_sharded_dim_gathers_nothing(op, shape, where, reductions):
    x = place(normal(*shape), where)
    with CommDebugMode() as comm, sw.strict():
        out = op(x)
    assert out.placements == (where,) and comm.get_comm_counts() == {"all_reduce": reductions}
