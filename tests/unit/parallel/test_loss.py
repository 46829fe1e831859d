"""`loss_parallel`: an intent, not another result."""

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place
from torch.overrides import _get_current_function_mode_stack

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.parallel import loss_parallel

R, S = sw.Replicate(), sw.Shard
TARGET = torch.tensor([1, 3, 0, 2, 1, 0])


def gradient(x: sw.DTensor, target: sw.DTensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    F.cross_entropy(x, target, label_smoothing=0.1).backward()
    return x.grad.full_tensor()


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_nothing_changes_inside(placement):
    x, target = place(normal(6, 4), placement), place(TARGET, R)
    expected = gradient(x, target)
    with loss_parallel(), CommDebugMode() as comm:
        assert torch.equal(gradient(x, target), expected)
    with CommDebugMode() as outside:
        gradient(x, target)
    assert comm.comms == outside.comms


def test_backward_may_be_inside_or_outside():
    x, target = place(normal(6, 4), S(1)).requires_grad_(), place(TARGET, R)
    with loss_parallel():
        F.nll_loss(F.log_softmax(x, -1), target).backward()
        loss = F.nll_loss(x.log_softmax(1), target)
    first = x.grad.full_tensor()
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad.full_tensor(), first)


def test_moving_the_classes_is_refused():
    x, target = place(normal(6, 4), S(1)), place(TARGET, S(0))
    with CommDebugMode() as comm, loss_parallel():
        with pytest.raises(sw.errors.PlacementError, match=r"cross_entropy\(f64\[6,4\] S\(1\)@a, i64\[6\] S\(0\)@a"):
            F.cross_entropy(x, target)
        with pytest.raises(sw.errors.PlacementError, match=r"target\.redistribute"):
            F.cross_entropy(x, target)  # known by now
    assert comm.get_total_counts() == 0
    fixed = target.redistribute(placements=[R])
    with loss_parallel():
        inside = F.cross_entropy(x, fixed)
    torch.testing.assert_close(inside.full_tensor(), F.cross_entropy(x, target).full_tensor())


def test_limits_around_hold_as_well():
    logits, target = place(normal(6, 4), S(1)), place(TARGET, S(0))
    with sw.strict(moves=0), loss_parallel():
        with pytest.raises(sw.errors.StrictModeError, match="is more than moves=0 allows"):
            F.nll_loss(logits, target)  # moves its targets
        with pytest.raises(sw.errors.PlacementError, match="would move its logits"):
            F.cross_entropy(logits, target)


def test_plain_tensors_and_other_calls_pass():
    with loss_parallel():
        assert F.cross_entropy(normal(6, 4), TARGET) == F.cross_entropy(normal(6, 4), TARGET)
        assert (place(normal(6, 4), S(1)) + 1).placements == (S(1),)
        with pytest.raises(ValueError, match="Expected input batch_size"):
            F.cross_entropy(place(normal(6, 4), S(1)), place(TARGET[:3], R))


def test_exceptions_and_nesting_leave_nothing_behind():
    x, target = place(normal(6, 4), S(1)), place(TARGET, S(0))
    before = _get_current_function_mode_stack()
    with pytest.raises(KeyError), loss_parallel():
        raise KeyError
    assert _get_current_function_mode_stack() == before
    with loss_parallel():
        with loss_parallel(), pytest.raises(sw.errors.PlacementError):
            F.cross_entropy(x, target)
        with pytest.raises(sw.errors.PlacementError):
            F.cross_entropy(x, target)
    assert _get_current_function_mode_stack() == before
    F.cross_entropy(x, target)
