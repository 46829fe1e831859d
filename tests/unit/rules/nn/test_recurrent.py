"""Recurrent layers, and the loss that goes with them."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compare import beside, check_shards, compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.experimental import implicit_replication

R, S = sw.Replicate(), sw.Shard


def params(gates, inputs, hidden):
    return [
        normal(gates * hidden, inputs),
        normal(gates * hidden, hidden),
        normal(gates * hidden),
        normal(gates * hidden),
    ]


def layer(function, *, batch_first=False):
    def run(x, h, *weights):
        hx = (h, h + 1) if function is torch.lstm else h
        return function(x, hx, list(weights), True, 1, 0.0, False, False, batch_first)

    return run


LAYERS = {
    "lstm": (torch.lstm, 4),
    "gru": (torch.gru, 3),
    "tanh": (torch.rnn_tanh, 1),
    "relu": (torch.rnn_relu, 1),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("function", "gates"), LAYERS.values(), ids=LAYERS)
def test_layer(function, gates, batch_first):
    shape = (4, 3, 2) if batch_first else (3, 4, 2)
    inputs = (normal(*shape), normal(1, 4, 3), *params(gates, 2, 3))
    whole, run = [[R]] * 4, layer(function, batch_first=batch_first)
    for mesh in (mesh_of((2,)), mesh_of((4,))):
        for x in (R, S(0), S(1), S(2)):
            for h in (R, S(1)):
                compare(run, inputs, mesh, [[x], [h], *whole])
    compare(run, inputs, mesh_of((2,)), [[R], [S(2)], [S(0)], [S(1)], [S(0)], [R]])
    batch = S(0) if batch_first else S(1)
    compare(run, inputs, mesh_of((2, 2)), [[batch, batch], [S(1), R], *[[R, R]] * 4])


@pytest.mark.parametrize(("function", "gates"), LAYERS.values(), ids=LAYERS)
def test_a_batch_moves_nothing_and_an_empty_part_of_it_is_right(function, gates):
    inputs = (normal(5, 3, 2), normal(1, 3, 4), *params(gates, 2, 4))
    where = [[S(1)], [S(1)], [R], [R], [R], [R]]
    dist = [sw.distribute_tensor(x, mesh_of((2,)), p) for x, p in zip(inputs, where, strict=True)]
    with CommDebugMode() as comm, sw.strict():
        out, *_ = layer(function)(*dist)
    assert out.placements == (S(1),) and comm.get_total_counts() == 0
    compare(layer(function), inputs, mesh_of((4,)), where)


def test_many_steps_are_planned_as_one():
    x, h = place(normal(300, 4, 2), S(1)), place(normal(1, 4, 3), S(1))
    weights = [place(w, R) for w in params(4, 2, 3)]
    out, *_ = layer(torch.lstm)(x, h, *weights)
    plain = layer(torch.lstm)(x.full_tensor(), h.full_tensor(), *(w.full_tensor() for w in weights))
    torch.testing.assert_close(out.full_tensor(), plain[0])


MODULES = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, 2),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 3)], ids=["batch", "no batch"])
def test_module(make, shape):
    """Modules make their first state themselves, as a plain tensor."""
    plain = make().double()
    module, x = sw.distribute_module(copy.deepcopy(plain), mesh_of((2,))), normal(*shape)
    with implicit_replication():
        out = module(place(x, S(len(shape) - 2)))[0]
    expected = plain(x)[0]
    torch.testing.assert_close(out.full_tensor(), expected)
    out.square().sum().backward(), expected.square().sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_dropout_between_layers_is_drawn_alike_by_replicas():
    module = sw.distribute_module(nn.LSTM(3, 4, 2, dropout=0.5).double(), mesh_of((2, 2)))
    state = place(normal(2, 4, 4), S(1), R, mesh=(2, 2))
    out, _ = module(place(normal(5, 4, 3), S(1), R, mesh=(2, 2)), (state, state))
    check_shards(out)


def in_parts(module, mesh, dim):
    """The module with all of its weights sharded, as FSDP (in dim 0) or a row-wise layer would."""
    for name, param in list(module.named_parameters()):
        where = [S(min(dim, param.dim() - 1))]
        module.register_parameter(name, nn.Parameter(sw.distribute_tensor(param.detach(), mesh, where)))
    return module


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_weights_in_parts_are_gathered_and_the_batch_is_not(make, dim):
    """However short the sequences are, and though the module makes its first state whole."""
    plain, x = make().double(), normal(1, 4, 3)
    module, d = in_parts(copy.deepcopy(plain), mesh_of((2,)), dim), place(x, S(1))
    with implicit_replication(), sw.strict(), CommDebugMode() as comm:
        out, _ = module(d)
    assert out.placements == (S(1),)
    assert {c.kind for c in comm.comms} == {"all_gather"} and len(comm.comms) == len(list(plain.parameters()))
    expected, _ = plain(x)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.square().sum().backward(), expected.square().sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad.placements == ours.placements
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_takes_few_calls(kind):
    """Whatever the number of steps: each layer is one op, and the batch stays in parts."""
    torch.manual_seed(0)
    plain = kind(3, 4, 3, dropout=0.5, bidirectional=True).double()
    module = in_parts(copy.deepcopy(plain), mesh_of((2,)), 0)
    x = place(normal(50, 4, 3), S(1))
    with implicit_replication(), sw.strict(), CommDebugMode() as comm:
        out, last = module(x)
    assert out.placements == (S(1),) and len(comm.comms) == len(list(plain.parameters()))
    last = last[0] if kind is nn.LSTM else last
    assert torch.equal(out.full_tensor()[-1, :, :4], last.full_tensor()[4])
    module.eval(), plain.eval()
    with implicit_replication():
        torch.testing.assert_close(module(x)[0].full_tensor(), plain(x.full_tensor())[0])
    assert not torch.equal(module(x)[0].full_tensor(), out.full_tensor())


def test_dropout_of_nothing_and_of_everything():
    """Where nothing is left to chance, values and gradients are those of the layers themselves."""
    inputs = (normal(5, 4, 2), normal(2, 4, 3), *params(4, 2, 3), *params(4, 3, 3))

    def run(dropout):
        return lambda x, h, *w: torch.lstm(x, (h, h + 1), list(w), True, 2, dropout, True, False, False)

    for dropout in (1e-300, 1.0):
        compare(run(dropout), inputs, mesh_of((2,)), [[S(1)], [R], *[[S(0)]] * 8])


CELLS = {
    "lstm": (lambda x, h, *weights: torch.lstm_cell(x, (h, h + 1), *weights), 4),
    "gru": (torch.gru_cell, 3),
    "tanh": (torch.rnn_tanh_cell, 1),
    "relu": (torch.rnn_relu_cell, 1),
}


@pytest.mark.parametrize(("cell", "gates"), CELLS.values(), ids=CELLS)
def test_cell(cell, gates):
    inputs = (normal(4, 2), normal(4, 3), *params(gates, 2, 3))
    for mesh in (mesh_of((2,)), mesh_of((4,))):
        for x, h in ((S(0), S(0)), (R, S(0)), (R, R)):
            compare(cell, inputs, mesh, [[x], [h], [R], [R], [R], [R]])


@pytest.mark.parametrize("name", CELLS)
def test_cell_with_sharded_gates(name):
    cell, gates = CELLS[name]
    inputs = (normal(4, 2), normal(4, 3), *params(gates, 2, 3))
    compare(cell, inputs, mesh_of((2,)), [[R], [R], [S(0)], [S(0)], [S(0)], [S(0)]])


TARGETS = {
    "padded": (torch.tensor([[1, 2, 3], [2, 1, 2], [3, 3, 1]]), (3, 2, 3)),
    "joined": (torch.tensor([1, 2, 3, 2, 1, 3]), (3, 2, 1)),
}


@pytest.mark.parametrize(("targets", "lengths"), TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_ctc_loss(targets, lengths, reduction):
    loss = lambda x, t: F.ctc_loss(x.log_softmax(2), t, (7, 6, 7), lengths, reduction=reduction)  # noqa: E731
    sweep(loss, normal(7, 3, 5), targets)


def test_mean_ctc_loss():
    targets, lengths = TARGETS["padded"]
    sweep(lambda x, t: F.ctc_loss(x.log_softmax(2), t, (7, 6, 7), lengths), normal(7, 3, 5), targets)


def test_ctc_loss_of_a_batch_moves_nothing():
    x, t = place(normal(7, 4, 5).log_softmax(2), S(1)), place(torch.ones(4, 2, dtype=torch.int64), S(0))
    with CommDebugMode() as comm, sw.strict():
        out = F.ctc_loss(x, t, (7,) * 4, (2,) * 4, reduction="none")
    assert out.placements == (S(0),) and comm.get_total_counts() == 0


@pytest.mark.parametrize(("targets", "lengths"), TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("where", [R, S(0)], ids=str)
def test_ctc_loss_of_lengths_in_tensors(targets, lengths, where):
    given = [torch.tensor((7, 6, 7), dtype=torch.int32), torch.tensor(lengths)]

    def loss(x, t):
        others = [R] * (x.device_mesh.ndim - 1) if isinstance(x, sw.DTensor) else []
        times, labels = (beside(x, numbers, where, *others) for numbers in given)
        return F.ctc_loss(x.log_softmax(2), t, times, target_lengths=labels)

    sweep(loss, normal(7, 3, 5), targets)


def test_lengths_in_tensors_gather_nothing_else():
    x, t = place(normal(7, 4, 5).log_softmax(2), S(1)), place(torch.ones(4, 2, dtype=torch.int64), S(0))
    times, labels = place(torch.tensor([7] * 4), S(0)), place(torch.tensor([2] * 4), R)
    with CommDebugMode() as comm, sw.strict():
        out = F.ctc_loss(x, t, times, labels, reduction="none")
    assert out.placements == (S(0),)
    assert [(one.kind, one.bytes) for one in comm.comms] == [("all_gather", 16)]


@pytest.mark.parametrize("times", [(7, 6, 9), (7, 6), (7, 6, -1), (7.0, 6.0, 7.0)], ids=str)
def test_bad_lengths_in_tensors(times):
    x, t, labels = normal(7, 3, 5).log_softmax(2), TARGETS["padded"][0], torch.tensor((3, 2, 3))
    with pytest.raises(RuntimeError) as expected:
        F.ctc_loss(x, t, torch.tensor(times), labels)
    with pytest.raises(RuntimeError) as raised:
        F.ctc_loss(place(x, S(1)), place(t, S(0)), place(torch.tensor(times), R), place(labels, R))
    assert str(raised.value) == str(expected.value)
