"""Sequences of different lengths: rows change hands, and nothing is gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from compare import check_shards, compare
from sweep import mesh_of, normal, place, sweep
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
LENGTHS = {"falling": [5, 4, 2, 1], "alike": [3, 3, 3, 3], "one": [4], "many": [5, 5, 4, 4, 3, 1, 1]}


def layer(function: Callable, lengths: list[int], *, both_ways: bool = False, layers: int = 1) -> Callable[..., Any]:
    def run(x: Tensor, h: Tensor, *weights: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths)
        hx = (h, h + 1) if function is torch.lstm else h
        settings = True, layers, 0.0, False, both_ways
        out, *states = function(packed.data, packed.batch_sizes, hx, list(weights), *settings)
        return out, pad_packed_sequence(PackedSequence(out, packed.batch_sizes), padding_value=0.5)[0], *states

    return run


def weights(gates: int, inputs: int, hidden: int) -> list[Tensor]:
    rows = gates * hidden
    return [normal(rows, inputs), normal(rows, hidden), normal(rows), normal(rows)]


LAYERS = {"lstm": (torch.lstm, 4), "gru": (torch.gru, 3), "tanh": (torch.rnn_tanh, 1), "relu": (torch.rnn_relu, 1)}
PLACES = [(R, S(1)), (S(0), R), (S(1), S(1)), (S(1), R), (S(2), S(2)), (P(), P())]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_layer_in_many_layouts(lengths: list[int]) -> None:
    inputs = (normal(5, len(lengths), 2), normal(1, len(lengths), 3), *weights(3, 2, 3))
    for size in (2, 4):
        for x, h in PLACES:
            compare(layer(torch.gru, lengths), inputs, mesh_of((size,)), [[x], [h], *[[R]] * 4])


@pytest.mark.parametrize(("function", "gates"), LAYERS.values(), ids=LAYERS)
def test_layer_on_two_axes(function: Callable, gates: int) -> None:
    inputs = (normal(5, 4, 2), normal(1, 4, 3), *weights(gates, 2, 3))
    run = layer(function, LENGTHS["falling"])
    compare(run, inputs, mesh_of((2, 2)), [[S(1), S(1)], [S(1), R], *[[R, S(0)]] * 4])
    compare(run, inputs, mesh_of((2, 2)), [[S(1), P()], [R, R], *[[S(0), R]] * 4])
    compare(run, inputs, mesh_of((2, 2)), [[R, S(1)], [R, R], *[[R, R]] * 4])


def test_both_ways_and_layers() -> None:
    stack = [*weights(4, 2, 3) * 2, *weights(4, 6, 3) * 2]
    inputs = (normal(5, 4, 2), normal(4, 4, 3), *stack)
    run = layer(torch.lstm, LENGTHS["falling"], both_ways=True, layers=2)
    for places in ([S(1)], [P()], [S(0)]):
        compare(run, inputs, mesh_of((3,)), [places, [R], *[[S(0)]] * len(stack)])


@pytest.mark.parametrize("batch_first", [False, True])
def test_between_padded_and_packed(batch_first: bool) -> None:
    """In every layout: dims beside time and batch stay cut, and what is pending stays so."""

    def run(x: Tensor) -> Any:
        packed = pack_padded_sequence(x, [4, 3, 1], batch_first)
        padded, lengths = pad_packed_sequence(packed, batch_first, padding_value=-1.5, total_length=6)
        assert lengths.tolist() == [4, 3, 1]
        return packed.data, padded, pad_packed_sequence(packed)[0]

    with sw.strict():
        sweep(run, normal(3, 4) if batch_first else normal(4, 3))
        sweep(run, normal(3, 4, 2) if batch_first else normal(4, 3, 2))
        compare(run, [normal(*((3, 4) if batch_first else (4, 3)), 2, 3)], mesh_of((2, 2)), [[S(3), S(1)]])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "without biases": lambda: nn.GRU(3, 4, 2, bias=False),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_keep_the_batch(name: str) -> None:
    """Lengths in any order, states made by the module itself, and weights in parts."""
    plain, x = MODULES[name]().double(), normal(5, 4, 3)
    module = copy.deepcopy(plain)
    sw.distribute_module(module, mesh_of((2,)), lambda _, m, mesh: _shard(m, mesh))

    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        packed, last = module(pack_padded_sequence(x, [2, 5, 1, 4], enforce_sorted=False))
        return (pad_packed_sequence(packed)[0], *(last if isinstance(last, tuple) else [last]))

    with sw.strict(), sw.experimental.implicit_replication():
        found = run(module, place(x, S(1)))
    expected = run(plain, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    found[0].square().sum().backward(), expected[0].square().sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        check_shards(ours.grad)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def _shard(module: nn.Module, mesh: Any) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(sw.distribute_tensor(param.detach(), mesh, [S(0)])))


def test_rows_are_exchanged_and_only_weights_gathered() -> None:
    x, h = place(normal(6, 4, 2), S(1)), place(normal(1, 4, 3), S(1))
    params = [place(w, R) for w in weights(3, 2, 3)]
    with CommDebugMode() as comm, sw.strict():
        packed = pack_padded_sequence(x, [6, 5, 3, 2])
        out, last = torch.gru(packed.data, packed.batch_sizes, h, params, True, 1, 0.0, False, False)
        padded, _ = pad_packed_sequence(PackedSequence(out, packed.batch_sizes))
    assert packed.data.placements == out.placements == (S(0),) and padded.placements == last.placements == (S(1),)
    assert {c.kind for c in comm.comms} == {"all_to_all"} and len(comm.comms) == 4


def test_dropout_between_layers_is_drawn_alike_by_replicas() -> None:
    module = sw.distribute_module(nn.LSTM(3, 4, 2, dropout=0.5).double(), mesh_of((2, 2)))
    state = place(normal(2, 4, 4), S(1), R, mesh=(2, 2))
    packed = pack_padded_sequence(place(normal(5, 4, 3), S(1), R, mesh=(2, 2)), LENGTHS["falling"])
    with sw.strict():
        out, (last, _) = module(packed, (state, state))
    check_shards(out.data)
    assert out.data.placements == (S(0), R) and last.placements == (S(1), R)
    assert torch.equal(last.full_tensor()[1, 0], out.data.full_tensor()[-1])  # where the longest one ends
    module.eval()
    assert not torch.allclose(module(packed, (state, state))[0].data.full_tensor(), out.data.full_tensor())


def test_gradients_of_gradients() -> None:
    def run(x: Tensor) -> Tensor:
        padded = pad_packed_sequence(pack_padded_sequence(x, [3, 1]))[0]
        (grad,) = torch.autograd.grad((padded**3).sum(), x, create_graph=True)
        return grad.square().sum()

    sweep(run, normal(3, 2, 2), partial=False)


def test_lengths_beyond_the_data_are_as_in_torch() -> None:
    """Torch packs what there is, and says that there is more."""
    x = normal(4, 3, 2)
    expected = pack_padded_sequence(x, [9, 2, 1])
    with pytest.warns(sw.errors.FallbackWarning):
        found = pack_padded_sequence(place(x, S(1)), [9, 2, 1])
    assert torch.equal(found.data.full_tensor(), expected.data)
    assert torch.equal(found.batch_sizes.full_tensor(), expected.batch_sizes)


def test_a_list_of_sequences() -> None:
    def run(a: Tensor, b: Tensor) -> Any:
        return pad_packed_sequence(pack_sequence([a, b]))[0]

    sweep(run, normal(4, 3), normal(2, 3))


BAD: dict[str, Callable[[Tensor], Any]] = {
    "not sorted": lambda x: pack_padded_sequence(x, [1, 4, 2]),
    "too few": lambda x: pack_padded_sequence(x, [4, 2]),
    "none": lambda x: pack_padded_sequence(x, [4, 2, 0]),
    "total": lambda x: pad_packed_sequence(pack_padded_sequence(x, [4, 2, 1]), total_length=2),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_torchs_own(name: str) -> None:
    with pytest.raises(Exception) as said:
        BAD[name](normal(4, 3, 2))
    for where in (R, S(0), S(1), S(2)):
        x = place(normal(4, 3, 2), where)
        with CommDebugMode() as comm, pytest.raises(type(said.value)) as found:
            BAD[name](x)
        assert str(found.value) == str(said.value)
        assert name == "total" or comm.get_total_counts() == 0
