"""Cross entropy and negative log likelihood, with rows, classes, or both sharded."""

import pytest
import torch
import torch.nn.functional as F
from compare import check_shards, compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
TARGET = torch.tensor([1, 3, 0, 2, 1])
WEIGHT = torch.tensor([0.1, 2.0, 3.0, 0.5], dtype=torch.float64)
over_reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def loss_of(loss=F.cross_entropy, **options):
    """Of logits, targets and, it may be, class weights, which have no gradient."""
    return lambda x, target, *weight: loss(x, target, *(w.detach() for w in weight), **options)


@over_reductions
@pytest.mark.parametrize("weight", [(), (WEIGHT,)], ids=["equal", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, weight, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    sweep(loss_of(**options), normal(5, 4), TARGET, *weight, partial=False)
    sweep(loss_of(ignore_index=1, **options), normal(5, 4), TARGET, *weight, partial=False)


@over_reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_probabilities(reduction, smoothing):
    """They have a gradient, and so have class weights beside them."""
    loss = lambda x, p, *w: F.cross_entropy(x, p, *w, reduction=reduction, label_smoothing=smoothing)  # noqa: E731
    sweep(loss, normal(5, 4), normal(5, 4).softmax(1))
    sweep(loss, normal(2, 3, 4), normal(2, 3, 4).softmax(1), WEIGHT[:3], partial=False)
    sweep(loss, normal(4), normal(4).softmax(0), WEIGHT, partial=False)


@over_reductions
def test_other_shapes(reduction):
    options = {"reduction": reduction, "label_smoothing": 0.2, "ignore_index": 0}
    sweep(loss_of(**options), normal(4), torch.tensor(2))
    sweep(loss_of(**options), normal(2, 3, 2, 2), torch.randint(0, 3, (2, 2, 2)), WEIGHT[:3], partial=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_all_rows_ignored(reduction, smoothing):
    sweep(loss_of(reduction=reduction, label_smoothing=smoothing), normal(5, 4), torch.full((5,), -100))


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_legacy_reductions():
    sweep(loss_of(size_average=False), normal(5, 4), TARGET, partial=False)
    sweep(loss_of(reduce=False), normal(5, 4), TARGET, partial=False)


def test_fewer_classes_than_ranks():
    sweep(loss_of(label_smoothing=0.1), normal(3, 2), torch.tensor([1, 0, 1]), WEIGHT[:2], partial=False)
    sweep(loss_of(F.nll_loss), normal(3, 2), torch.tensor([1, 0, 1]), WEIGHT[:2], partial=False)


@over_reductions
@pytest.mark.parametrize("weight", [(), (WEIGHT,)], ids=["equal", "weighted"])
def test_nll(reduction, weight):
    sweep(loss_of(F.nll_loss, reduction=reduction, ignore_index=1), normal(5, 4), TARGET, *weight, partial=False)
    target = torch.randint(0, 4, (2, 2, 2))
    sweep(loss_of(F.nll_loss, reduction=reduction, ignore_index=1), normal(2, 4, 2, 2), target, *weight, partial=False)
    sweep(loss_of(F.nll_loss, reduction=reduction), normal(4), torch.tensor(1))


def test_masked_and_infinite_logits():
    """A class that cannot be costs nothing unless it is the target; then it costs everything."""
    x = normal(5, 4)
    x[:, 0] = -torch.inf
    for where in (S(0), S(1)):
        for target in (torch.tensor([1, 3, 1, 2, 1]), TARGET):
            out = F.cross_entropy(place(x, where), place(target, R), reduction="none")
            torch.testing.assert_close(out.full_tensor(), F.cross_entropy(x, target, reduction="none"))


def test_classes_in_pieces_of_any_size():
    x = normal(5, 14).requires_grad_()
    pieces = x.detach().split([2, 0, 7, 5], 1)
    d = sw.DTensor.from_local(ranked([p.clone() for p in pieces]), mesh_of((4,)), [S(1)]).requires_grad_()
    target = torch.tensor([1, 2, 13, 8, 9])
    F.cross_entropy(x, target, label_smoothing=0.1).backward()
    loss = F.cross_entropy(d, place(target, R, mesh=(4,)), label_smoothing=0.1)
    loss.backward()
    check_shards(d.grad)
    torch.testing.assert_close(d.grad.full_tensor(), x.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision(dtype):
    """The result is at least as near to the true one as torch's own, and has its dtype."""
    x, target = normal(64, 100).to(dtype), torch.arange(64)
    true = F.cross_entropy(x.double(), target, label_smoothing=0.1)
    plain = F.cross_entropy(x, target, label_smoothing=0.1)
    for where in (S(0), S(1)):
        loss = F.cross_entropy(place(x, where), place(target, R), label_smoothing=0.1)
        assert loss.dtype == dtype
        rounding = torch.finfo(dtype).eps * true
        assert (loss.full_tensor() - true).abs() <= (plain - true).abs() + rounding


@pytest.mark.parametrize("placements", [(S(1),), (S(0),)], ids=str)
def test_second_derivatives(placements):
    def curvature(x, target):
        loss = F.cross_entropy(x, target, label_smoothing=0.1)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return (slope**2).sum()

    compare(curvature, [normal(5, 4), TARGET], mesh_of((2,)), [placements, (R,)])


# What is communicated: (kind, axes, bytes, whether in the backward pass)


def communicated(loss, x, x_at, target, target_at, mesh, **options):
    d = place(x, *x_at, mesh=mesh).requires_grad_()
    target = place(target, *target_at, mesh=mesh)
    with CommDebugMode() as comm:
        out = loss(d, target, **options)
        (out if not out.ndim else out.sum()).backward()
    assert d.grad.placements == tuple(x_at)
    return [(c.kind, c.axes, c.bytes, c.backward) for c in comm.comms]


def reductions(*sizes, axes=("a",)):
    return [("all_reduce", axes, 8 * size, False) for size in sizes]


CLASSES = torch.arange(6) * 2


@over_reductions
@pytest.mark.parametrize("vocabulary", [16, 13, 5])
@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_sharded_classes_need_two_reductions(reduction, vocabulary, mesh):
    """Per row: the maximum; then the sum of exponentials and the target's logit. Smoothing adds the sum of logits;
    class weights, if they are sharded, the target's and, with smoothing, the sum of all."""
    target = CLASSES % vocabulary
    spent = lambda **more: communicated(  # noqa: E731
        F.cross_entropy, normal(6, vocabulary), [S(1)], target, [R], mesh, reduction=reduction, **more
    )
    assert spent() == reductions(6, 12)
    assert spent(label_smoothing=0.1) == reductions(6, 18)
    weight = normal(vocabulary).abs()
    assert spent(weight=place(weight, R, mesh=mesh)) == reductions(6, 12)
    assert spent(weight=place(weight, R, mesh=mesh), label_smoothing=0.1) == reductions(6, 18)
    assert spent(weight=place(weight, S(0), mesh=mesh)) == reductions(6, 18)
    assert spent(weight=place(weight, S(0), mesh=mesh), label_smoothing=0.1) == reductions(6, 30)


def test_classes_over_two_axes():
    spent = communicated(F.cross_entropy, normal(6, 13), [S(1), S(1)], CLASSES, [R, R], (2, 2))
    assert spent == reductions(6, 12, axes=("a", "b"))


def test_rows_and_classes():
    """The mean is over the whole batch: one reduction more, of two numbers. How many targets are out of range is asked
    first, in one number; where classes are not split, by the reduction that adds up the losses."""
    places = ([S(0), S(1)], CLASSES, [S(0), R], (2, 2))
    within = reductions(3, 6, axes=("b",))
    assert communicated(F.cross_entropy, normal(6, 13), *places) == reductions(1) + within + reductions(2)
    assert communicated(F.cross_entropy, normal(6, 13), [S(0)], CLASSES, [S(0)], (2,)) == reductions(3)
    assert communicated(F.cross_entropy, normal(6, 13), *places, reduction="none") == reductions(1) + within


def test_rows_of_sharded_probabilities():
    x = normal(6, 13)
    spent = communicated(F.cross_entropy, x, [S(0), S(1)], x.softmax(1), [S(0), S(1)], (2, 2))
    assert spent == reductions(3, 9, axes=("b",))


def test_negative_log_likelihood_is_a_look_up():
    """A pending sum; only a mean, which is divided by a weight, is reduced at once. Split targets are checked first."""
    assert communicated(F.nll_loss, normal(6, 13), [S(1)], CLASSES, [R], (2,), reduction="sum") == []
    assert communicated(F.nll_loss, normal(6, 13), [S(1)], CLASSES, [R], (2,)) == reductions(2)
    assert communicated(F.nll_loss, normal(6, 13), [S(0)], CLASSES, [S(0)], (2,)) == reductions(1, 2)


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_needs_two_reductions_and_one_backward(function):
    spent = communicated(lambda x, _: function(x, 1), normal(6, 13), [S(1)], CLASSES, [R], (2,))
    assert spent == [*reductions(6, 6), ("all_reduce", ("a",), 48, True)]


# Errors


@pytest.mark.parametrize("bad", [4, -7])
@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_target_out_of_bounds(loss, placement, bad):
    """Where each rank sees only its own rows, the ranks tell each other, in one number, and nothing else is sent: but
    for a mean, whose sums tell that there is such a target."""
    target = TARGET.clone()
    target[4] = bad
    x, target = place(normal(5, 4), placement), place(target, R)
    with (
        CommDebugMode() as comm,
        pytest.raises(IndexError, match=f"[tT]arget {bad} is out of bounds"),
    ):
        loss(x, target)
    sums = [("all_reduce", 24)] if loss is F.cross_entropy else []
    assert [(c.kind, c.bytes) for c in comm.comms] == ([*sums, ("all_reduce", 8)] if placement == S(0) else [])


@pytest.mark.parametrize("target_at", [(S(0), R), (S(0), S(0))], ids=str)
@pytest.mark.parametrize("x_at", [(S(0), R), (S(0), S(1)), (S(1), S(1)), (R, R)], ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_split_target_out_of_bounds(loss, x_at, target_at):
    """In the last row, which one rank has. Targets to be ignored are not looked at."""
    x, target = place(normal(5, 4), *x_at, mesh=(2, 2)), TARGET.clone()
    target[4] = 7
    with pytest.raises(IndexError, match="target 7 is out of bounds: it must be from 0 to"):
        loss(x, place(target, *target_at, mesh=(2, 2)))
    ignored = loss(x, place(target, *target_at, mesh=(2, 2)), ignore_index=7)
    torch.testing.assert_close(ignored.full_tensor(), loss(normal(5, 4), target, ignore_index=7))


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_class_weights_have_no_gradient(placement):
    weight = place(WEIGHT, R).requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        F.cross_entropy(place(normal(5, 4), placement), place(TARGET, R), weight)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"Expected input batch_size \(5\) to match target batch_size \(4\)"):
        F.cross_entropy(place(normal(5, 4), S(1)), place(TARGET[:4], R))
    with pytest.raises(ValueError, match="most is not a valid value for reduction"):
        F.cross_entropy(place(normal(5, 4), S(1)), place(TARGET, R), reduction="most")
