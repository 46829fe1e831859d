"""Pads: a dim that grows, or shrinks, at its ends."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
MODES = ["constant", "reflect", "replicate", "circular"]

PADS = {
    "last": ((1, 2), (3, 2, 5)),
    "one side": ((0, 2), (3, 5)),
    "two dims": ((1, 2, 2, 1), (3, 2, 4, 5)),
    "two dims, no batch": ((1, 2, 2, 1), (2, 4, 5)),
    "negative": ((-1, 2, 1, -2), (3, 2, 4, 5)),
    "three dims": ((1, 1, 1, 0, 0, 2), (1, 2, 3, 2, 3)),
    "nothing": ((0, 0), (3, 2, 5)),
}


@pytest.mark.parametrize(("pad", "shape"), PADS.values(), ids=PADS)
@pytest.mark.parametrize("mode", MODES)
def test_pad(mode, pad, shape):
    sweep(lambda a: F.pad(a, pad, mode=mode), normal(*shape))


CONSTANTS = {
    "value": (1, 2, 3, 0),
    "all dims": (1, 1, 1, 1),
    "cut most": (0, 0, -4, 0),
    "cut and grow": (0, 0, -4, 9),
    "cut everything": (0, 0, -5, 2),
    "far larger": (0, 0, 50, 3),
}


@pytest.mark.parametrize("pad", CONSTANTS.values(), ids=CONSTANTS)
def test_constant(pad):
    sweep(lambda a: F.pad(a, pad, value=2.5), normal(5, 3))
    sweep(lambda a: torch.constant_pad_nd(a, pad), normal(5, 3))


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(2), np.int64(-3), np.float16(1), 2, None])
def test_numbers_of_numpy(number):
    sweep(lambda a: F.pad(a, (1, 0, 2, 1), value=number), normal(3, 2))


@pytest.mark.parametrize("mode", MODES)
def test_explicit_pieces(mode):
    sweep(lambda a: F.pad(a[:, 3:, 1:], (1, 1, 2, 3), mode=mode), normal(2, 9, 5))


@pytest.mark.parametrize("mode", MODES)
def test_second_derivative(mode):
    def gradient(a):
        return torch.autograd.grad((F.pad(a, (2, 1), mode=mode) ** 3).sum(), a, create_graph=True)[0]

    sweep(gradient, normal(2, 2, 5))


def test_modules():
    for module in (torch.nn.CircularPad1d(2), torch.nn.ReflectionPad1d((1, 2)), torch.nn.ZeroPad2d(1)):
        sweep(module, normal(2, 3, 4))


@pytest.mark.parametrize(
    ("mode", "comms"),
    [("constant", {}), ("replicate", {}), ("reflect", {"all_to_all": 2}), ("circular", {"all_to_all": 2})],
)
def test_the_ends_grow_where_they_lie(mode, comms):
    x = place(normal(2, 8, 3), S(1), mesh=(4,))
    with CommDebugMode() as comm:
        y = F.pad(x, (0, 0, 2, 2), mode=mode)
    assert comm.get_comm_counts() == comms
    assert str(y._layout) == "[2,12,3] S(1=4+2+2+4)@a"


@pytest.mark.parametrize("mode", MODES)
def test_other_dims_do_not_move(mode):
    x = place(normal(4, 2, 5), S(0))
    with CommDebugMode() as comm:
        y = F.pad(x, (1, 2), mode=mode)
    assert comm.get_total_counts() == 0
    assert str(y._layout) == "[4,2,8] S(0)@a"


def test_a_dim_that_grows_much_is_cut_evenly():
    x = place(normal(8, 3), S(0), mesh=(4,))
    with CommDebugMode() as comm:
        y = F.pad(x, (0, 0, 0, 20))
    assert comm.get_comm_counts() == {"all_to_all": 1}
    assert str(y._layout) == "[28,3] S(0)@a"


@pytest.mark.parametrize("pad", [F.pad, torch.constant_pad_nd])
def test_a_constant_counts_once(pad):
    """Zeros may be added up by a pending sum, other values may not: the plan for one does not serve the other."""
    for value, reduced in ((0.0, False), (2.0, True), (0.0, False), (3, True)):
        y = pad(place(normal(4, 3), P()), (1, 1), value=value)
        torch.testing.assert_close(y.full_tensor(), F.pad(normal(4, 3), (1, 1), value=value))
        if not reduced:
            assert y.placements == (P(),)


@pytest.mark.parametrize("pending", ["avg", "max", "min"])
def test_a_constant_passes_through_other_reductions(pending):
    x = place(normal(4, 3), P(pending))
    with CommDebugMode() as comm:
        y = F.pad(x, (1, 1), value=-2.5)
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(y.full_tensor(), F.pad(normal(4, 3), (1, 1), value=-2.5))


def test_bad_arguments_raise_as_in_torch():
    x = normal(2, 2, 5)
    for pad, mode in (((9, 9), "circular"), ((1, 1, 1), "constant"), ((-6, 0), "constant")):
        with pytest.raises(RuntimeError) as expected:
            F.pad(x, pad, mode=mode)
        with pytest.raises(RuntimeError) as raised:
            F.pad(place(x, S(2)), pad, mode=mode)
        assert str(raised.value).splitlines()[0] == str(expected.value).splitlines()[0]
    with pytest.raises(RuntimeError, match="Padding size should be less than the corresponding input dimension"):
        F.pad(place(x, S(2)), (9, 9), mode="reflect")
