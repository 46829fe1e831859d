"""Losses that are summed where they lie."""

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

POINTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda a, b, **k: F.smooth_l1_loss(a, b, beta=0.3, **k),
    "huber": lambda a, b, **k: F.huber_loss(a, b, delta=0.3, **k),
    "bce": lambda a, b, **k: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), **k),
    "bce with logits": lambda a, b, **k: F.binary_cross_entropy_with_logits(a, b.sigmoid(), **k),
    "soft margin": lambda a, b, **k: F.soft_margin_loss(a, b.detach().sign(), **k),
    "gaussian": lambda a, b, **k: F.gaussian_nll_loss(a, b, a.abs() * 2, full=True, eps=0.2, **k),
}
COMPOSED = {
    "kl": lambda a, b: F.kl_div(a, b, log_target=True, reduction="batchmean"),
    "hinge": lambda a, b: F.hinge_embedding_loss(a, b.detach().sign(), margin=0.2),
    "ranking": lambda a, b: F.margin_ranking_loss(a, b, (a - b * 2).detach().sign(), margin=0.2),
    "poisson": lambda a, b: F.poisson_nll_loss(a, b.abs() + 0.5, full=True),
    "multilabel soft margin": lambda a, b: F.multilabel_soft_margin_loss(a, b.sigmoid()),
    "triplet": lambda a, b: F.triplet_margin_loss(a, b, a * b, swap=True),
    "triplet with distance": lambda a, b: F.triplet_margin_with_distance_loss(a, b, a * b),
    "cosine": lambda a, b: F.cosine_embedding_loss(a, b, (a.sum(1) > 0) * 2 - 1, margin=0.1),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", POINTWISE.values(), ids=POINTWISE)
def test_pointwise_loss(loss, reduction):
    sweep(lambda a, b: loss(a, b, reduction=reduction), normal(5, 3), normal(5, 3) / 2)


@pytest.mark.parametrize("loss", COMPOSED.values(), ids=COMPOSED)
def test_loss_made_of_other_ops(loss):
    """Their mean is one over the whole batch, however unevenly it is split."""
    sweep(loss, normal(5, 3), normal(5, 3) / 2, partial=False)


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


BROADCAST = {
    "mse": lambda a, b: F.mse_loss(a, b),
    "l1": lambda a, b: F.l1_loss(a, b),
    "huber": lambda a, b: F.huber_loss(a, b, reduction="none"),
    "gaussian": lambda a, b: F.gaussian_nll_loss(a, a * 2, b.abs() + 0.1, reduction="none"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("shape", [(1, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("loss", BROADCAST.values(), ids=BROADCAST)
def test_operands_that_broadcast(loss, shape):
    sweep(loss, normal(5, 3), normal(*shape))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_weights_of_elements(reduction):
    """They broadcast, and have no gradient."""
    sweep(
        lambda a, b, w: F.binary_cross_entropy(
            a.sigmoid(), b.detach().sigmoid(), w.detach().abs(), reduction=reduction
        ),
        *(normal(5, 3), normal(5, 3) / 2, normal(3)),
        partial=False,
    )
    sweep(
        lambda a, b, w: F.binary_cross_entropy_with_logits(
            a, b.sigmoid(), w.detach().abs(), pos_weight=w.detach() + 3, reduction=reduction
        ),
        *(normal(5, 3), normal(5, 3) / 2, normal(3)),
        partial=False,
    )
    sweep(
        lambda a, b, w: F.mse_loss(a, b, weight=w.abs(), reduction=reduction),
        *(normal(5, 3) + i for i in range(3)),
        partial=False,
    )


# Gaussian likelihood


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_variance_of_a_row_or_of_everything(reduction):
    loss = lambda a, b, v: F.gaussian_nll_loss(a, b, v.abs(), reduction=reduction)  # noqa: E731
    sweep(loss, normal(5, 3), normal(5, 3) / 2, normal(5), partial=False)
    sweep(lambda a, b: F.gaussian_nll_loss(a, b, 0.7, reduction=reduction), normal(5, 3), normal(5, 3) / 2)


def test_negative_variance_is_refused():
    x, var = place(normal(5, 3), S(0)), torch.ones(5, 3)
    var[4, 2] = -1
    with pytest.raises(ValueError, match="var has negative entry/entries"):
        F.gaussian_nll_loss(x, x, place(var, S(0)))
    with pytest.raises(ValueError, match="var has negative entry/entries"):
        F.gaussian_nll_loss(x, x, -1.0)
    with pytest.raises(ValueError, match="var is of incorrect size"):
        F.gaussian_nll_loss(x, x, place(torch.ones(4), R))
    with pytest.raises(ValueError, match="most is not valid"):
        F.gaussian_nll_loss(x, x, place(torch.ones(5, 3), R), reduction="most")


# Rows


LABELS = torch.tensor([[0, 2, -1], [1, -1, 0], [2, 1, 0], [-1, 1, 1], [0, -1, -1]])
TARGET = torch.tensor([0, 2, 1, 1, 0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margins_between_classes(reduction):
    options = {"reduction": reduction}
    sweep(lambda x, t: F.multilabel_margin_loss(x, t, **options), normal(5, 3), LABELS)
    sweep(
        lambda x, t, w: F.multi_margin_loss(x, t, p=2, margin=0.7, weight=w.detach().abs(), **options),
        *(normal(5, 3), TARGET, normal(3)),
        partial=False,
    )


@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
def test_margins_by_the_names_of_ops(reduction):
    aten = torch.ops.aten
    sweep(lambda x, t: aten.multilabel_margin_loss_forward(x, t, reduction), normal(5, 3), LABELS)
    sweep(lambda x, t: aten.multi_margin_loss(x, t, reduction=reduction), normal(5, 3), TARGET)
    x, target = place(normal(5, 3), S(0)), place(TARGET, S(0))
    with CommDebugMode() as comm, sw.strict():
        out = aten.multi_margin_loss(x, target, 1, 1.0, None, reduction)
    assert out.placements == ((P(),) if reduction else (S(0),))
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_reduce", 8)]  # whether all targets are in range


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_margins_of_one_row(reduction):
    sweep(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), normal(3), LABELS[0])
    sweep(lambda x, t: F.multi_margin_loss(x, t, reduction=reduction), normal(3), TARGET[1])


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.nll_loss], ids=["margin", "nll"])
def test_rows_are_not_gathered(loss):
    """It is only asked, in one number, whether all targets are in range."""
    x, target = place(normal(5, 3), S(0)), place(TARGET, S(0))
    with CommDebugMode() as comm:
        out = loss(x, target, reduction="sum")
    assert out.placements == (P(),) and [(c.kind, c.bytes) for c in comm.comms] == [("all_reduce", 8)]
