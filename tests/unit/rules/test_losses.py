"""Losses and look-ups."""

import pytest
import torch
import torch.nn.functional as F
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

POINTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda a, b, **k: F.smooth_l1_loss(a, b, beta=0.3, **k),
    "huber": lambda a, b, **k: F.huber_loss(a, b, delta=0.3, **k),
    "bce": lambda a, b, **k: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), **k),
    "soft margin": lambda a, b, **k: F.soft_margin_loss(a, b.detach().sign(), **k),
    "kl": lambda a, b, **k: F.kl_div(a, b, log_target=True, **k),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", POINTWISE.values(), ids=POINTWISE)
def test_pointwise_loss(loss, reduction):
    sweep(lambda a, b: loss(a, b, reduction=reduction), normal(5, 3), normal(5, 3) / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_mean_does_not_overflow(dtype):
    x = torch.full((100, 100), 30.0, dtype=dtype)
    loss = F.mse_loss(place(x, S(0)), place(x * 0, S(0)))
    torch.testing.assert_close(loss.full_tensor(), F.mse_loss(x, x * 0))


def test_mean_loss_of_shards_stays_pending():
    a, b = place(normal(50, 30), S(0)), place(normal(50, 30), S(0))
    with CommDebugMode() as comm:
        loss = F.mse_loss(a, b)
    assert loss.placements == (P(),) and comm.get_total_counts() == 0


def test_the_same_tensor_twice():
    """What was planned for f(x, x) is not what f(x, y) needs."""
    x, y = place(normal(11, 3), S(0)), place(normal(11, 3) * 2, S(0))
    assert F.mse_loss(x, x).item() == 0
    torch.testing.assert_close(F.mse_loss(x, y).full_tensor(), F.mse_loss(normal(11, 3), normal(11, 3) * 2))


def cross_entropy(target, *, weight=None, **options):
    """A loss of logits alone: targets and weights lie on the mesh of the logits, sharded by rows."""

    def loss(x):
        if not isinstance(x, sw.DTensor):
            return F.cross_entropy(x, target, weight, **options)
        rows = [S(0) if target.dim() else R] * x.device_mesh.ndim
        where = [R] * x.device_mesh.ndim
        spread = None if weight is None else sw.distribute_tensor(weight, x.device_mesh, where)
        return F.cross_entropy(x, sw.distribute_tensor(target, x.device_mesh, rows), spread, **options)

    return loss


TARGET = torch.tensor([1, 3, 0, 2, 1])
WEIGHT = torch.tensor([0.1, 2.0, 3.0, 0.5], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:aten.gather")  # of the weights, in the smoothed mean
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["equal", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, weight, smoothing):
    options = {"reduction": reduction, "weight": weight, "label_smoothing": smoothing}
    sweep(cross_entropy(TARGET, **options), normal(5, 4))
    sweep(cross_entropy(TARGET, ignore_index=1, **options), normal(5, 4))


def test_cross_entropy_of_other_shapes():
    sweep(cross_entropy(torch.tensor(2)), normal(4))
    sweep(cross_entropy(torch.randint(0, 3, (2, 4)), ignore_index=0, weight=WEIGHT[:3]), normal(2, 3, 4))
    sweep(cross_entropy(torch.full((5,), -100), reduction="sum"), normal(5, 4))
    sweep(cross_entropy(torch.full((5,), -100)), normal(5, 4))
    sweep(cross_entropy(torch.softmax(normal(5, 4), 1), weight=WEIGHT), normal(5, 4))


def test_fewer_classes_than_ranks():
    sweep(cross_entropy(torch.tensor([1, 0, 1]), weight=WEIGHT[:2]), normal(3, 2))


def test_sharded_classes_are_not_gathered():
    x, target = place(normal(8, 40), S(1)).requires_grad_(), place(torch.arange(8), R)
    with CommDebugMode() as comm:
        F.cross_entropy(x, target).backward()
    assert set(comm.get_comm_counts()) <= {"all_reduce"}
    assert x.grad.placements == (S(1),)


INDEX = torch.tensor([[0, 1, 1], [3, 5, 1], [0, 2, 4]])


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("where", [R, S(0), S(1)], ids=str)
def test_embedding(options, where):
    for shape in ((2,), (4,), (2, 2)):
        index = sw.distribute_tensor(INDEX, mesh_of(shape), [where] * len(shape))
        for rows in (R, S(0), S(1), P()):
            w = normal(6, 3).requires_grad_()
            d = sw.distribute_tensor(w.detach(), mesh_of(shape), [rows] * len(shape)).requires_grad_()
            expected, out = F.embedding(INDEX, w, **options), F.embedding(index, d, **options)
            torch.testing.assert_close(out.full_tensor(), expected)
            (expected**2).sum().backward()
            (out**2).sum().backward()
            torch.testing.assert_close(d.grad.full_tensor(), w.grad)


def test_embedding_split_by_columns_moves_nothing():
    index, table = place(INDEX, R), place(normal(6, 4), S(1))
    with CommDebugMode() as comm:
        out = F.embedding(index, table)
    assert out.placements == (S(2),) and comm.get_total_counts() == 0
