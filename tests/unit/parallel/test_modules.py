"""distribute_module, and training what it makes: optimizers, clipping, accumulation, as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from meshes import data
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def shard_weights(name: str, module: nn.Module, mesh: Any) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, [S0, S1]))


def pair() -> tuple[nn.Module, nn.Module]:
    plain = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    return plain, sw.distribute_module(copy.deepcopy(plain), MESH, shard_weights)


def check_equal(net: nn.Module, plain: nn.Module, grads: bool = False) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        right, found = (q.grad, p.grad) if grads else (q, p)
        torch.testing.assert_close(found.full_tensor(), right, atol=1e-10, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_what_partition_fn_leaves_is_replicated() -> None:
    plain, net = pair()
    assert net[0].weight.placements == (S0, S1) and net[0].bias.placements == (R, R)
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in net.parameters())
    check_equal(net, plain)
    bn = sw.distribute_module(nn.BatchNorm1d(3), MESH)
    assert isinstance(bn.running_mean, DTensor) and isinstance(bn.num_batches_tracked, DTensor)


def test_requires_grad_and_shared_parameters_are_kept() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    sw.distribute_module(net, MESH)
    assert net[1].weight is net[0].weight, "tied weights stay tied"
    assert not net[0].bias.requires_grad and net[1].bias.requires_grad


class Tied(nn.Module):
    """A language model's weights: a table that is also the head, and a mask that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, dtype=torch.float64)
        self.inner = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh())
        self.head = nn.Linear(4, 8, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight
        for module in (self.inner[0], self.head):
            module.register_buffer("mask", torch.ones(4, dtype=torch.float64) if module is not self.head else None)
        self.head.mask = self.inner[0].mask

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        return self.head(self.inner(hidden * self.inner[0].mask) * self.head.mask)


def each_apart(name: str, module: nn.Module, mesh: Any) -> None:
    for key, param in list(module._parameters.items()):
        if param is not None:
            setattr(module, key, nn.Parameter(sw.distribute_tensor(param.detach(), mesh, [R, S0])))
    for key, buffer in list(module._buffers.items()):
        setattr(module, key, sw.distribute_tensor(buffer, mesh, [R, S0]))


def only(chosen: str, *placements: sw.Placement) -> Any:
    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        if name == chosen:
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight.detach(), mesh, placements))

    return partition


def differently(name: str, module: nn.Module, mesh: Any) -> None:
    only("table", S0, R)(name, module, mesh)
    only("head", R, S1)(name, module, mesh)


def from_above(name: str, module: nn.Module, mesh: Any) -> None:
    if not name:
        only("", R, S0)("", module.head, mesh)


PARTITIONS = {
    "none": (None, (R, R)),
    "each apart": (each_apart, (R, S0)),
    "nothing": (lambda name, module, mesh: None, (R, R)),
    "only the first": (only("table", R, S0), (R, S0)),
    "only the last": (only("head", R, S1), (R, S1)),
    "differently": (differently, (S0, R)),
    "from above": (from_above, (R, S0)),
    "in place": (lambda name, module, mesh: module.double(), (R, R)),
}


@pytest.mark.parametrize("how", PARTITIONS)
def test_tied_weights_stay_tied(how: str) -> None:
    torch.manual_seed(0)
    partition, placements = PARTITIONS[how]
    plain = Tied()
    net = sw.distribute_module(copy.deepcopy(plain), MESH, partition)
    assert net.head.weight is net.table.weight and net.head.weight.placements == placements
    assert net.head.mask is net.inner[0].mask and isinstance(net.head.mask, DTensor)
    assert len(list(net.parameters())) == 3 and all(isinstance(p, DTensor) for p in net.parameters())
    tokens = torch.tensor([[1, 5, 7], [0, 2, 5]])
    for model, given in ((plain, tokens), (net, sw.distribute_tensor(tokens, MESH, [S0, R]))):
        model(given).square().mean().backward()
    check_equal(net, plain, grads=True)


def test_a_weight_that_partition_fn_takes_out_stays_out() -> None:
    def without_the_head(name: str, module: nn.Module, mesh: Any) -> None:
        if name == "head":
            module.weight = None

    net = sw.distribute_module(Tied(), MESH, without_the_head)
    assert net.head.weight is None and net.table.weight.placements == (R, R)


def test_the_weights_that_a_recurrent_layer_lists_are_its_parameters() -> None:
    layer = nn.LSTM(4, 4, num_layers=2)
    layer.weight_hh_l1 = layer.weight_hh_l0
    sw.distribute_module(layer, MESH, lambda name, module, mesh: None)
    assert layer.weight_hh_l1 is layer.weight_hh_l0
    assert all(listed is getattr(layer, name) for listed, name in zip(layer._flat_weights, layer._flat_weights_names))


def test_input_and_output_functions() -> None:
    plain = nn.Linear(4, 6, dtype=torch.float64)
    net = sw.distribute_module(
        copy.deepcopy(plain),
        MESH,
        shard_weights,
        input_fn=lambda mod, inputs, mesh: tuple(sw.distribute_tensor(x, mesh, [S0, R]) for x in inputs),
        output_fn=lambda mod, outputs, mesh: outputs.full_tensor(),
    )
    x = data(5, 4)
    out = net(x)
    assert type(out) is Tensor
    torch.testing.assert_close(out, plain(x))
    out.sum().backward()
    plain(x).sum().backward()
    check_equal(net, plain, grads=True)


def test_a_module_is_distributed_once() -> None:
    net = sw.distribute_module(nn.Linear(2, 2), MESH)
    with pytest.raises(RuntimeError, match="distribute_module was already applied to this module"):
        sw.distribute_module(net, MESH)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, True),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, True),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, True),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, True),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}, False),
    "NAdam": (torch.optim.NAdam, {}, False),
    "RAdam": (torch.optim.RAdam, {}, False),
    "Rprop": (torch.optim.Rprop, {}, False),
}


@pytest.mark.parametrize("how", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_device(name: str, how: str) -> None:
    kind, options, has_fused = OPTIMIZERS[name]
    if how == "fused" and not has_fused:
        pytest.skip(f"torch has no fused {name}")
    switches = {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
    plain, net = pair()
    a, b = kind(plain.parameters(), **options, **switches), kind(net.parameters(), **options, **switches)
    for step in range(6):
        x = data(5, 4)
        a.zero_grad(set_to_none=step % 2 == 0)
        b.zero_grad(set_to_none=step % 2 == 0)
        for micro in (0, 1):  # gradients accumulate over two parts of the batch
            part = x[micro::2]
            plain(part).pow(2).sum().backward()
            net(sw.distribute_tensor(part, MESH, [S0, R])).pow(2).sum().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor(), norm)
        check_equal(net, plain, grads=True)
        a.step()
        b.step()
        check_equal(net, plain)
        if step == 3:  # state survives a round trip
            a.load_state_dict(copy.deepcopy(a.state_dict()))
            b.load_state_dict(copy.deepcopy(b.state_dict()))
    states = [s for state in b.state.values() for s in state.values() if isinstance(s, Tensor) and s.dim()]
    assert all(isinstance(s, DTensor) for s in states)


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_by_any_norm(kind: float, foreach: bool) -> None:
    plain, net = pair()
    x = data(5, 4)
    plain(x).pow(2).sum().backward()
    net(sw.distribute_tensor(x, MESH, [S0, R])).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=kind, foreach=foreach)
    found = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type=kind, foreach=foreach)
    torch.testing.assert_close(found.full_tensor(), expected)
    check_equal(net, plain, grads=True)
    nn.utils.clip_grad_value_(plain.parameters(), 0.01, foreach=foreach)
    nn.utils.clip_grad_value_(net.parameters(), 0.01, foreach=foreach)
    check_equal(net, plain, grads=True)


def test_lbfgs() -> None:
    """Its `view_as` reads the shape of a tensor that no op of the trace uses."""
    plain, net = pair()
    x = data(5, 4)
    for module, batch in ((plain, x), (net, sw.distribute_tensor(x, MESH, [S0, R]))):
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=5)

        def closure(module: nn.Module = module, batch: Tensor = batch, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = module(batch).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    check_equal(net, plain)


def test_comm_debug_mode_ends_with_its_block_and_nests() -> None:
    d = sw.ones(4, 4, device_mesh=MESH, placements=[S0, R], requires_grad=True)
    with pytest.raises(KeyError), CommDebugMode() as failed:
        raise KeyError
    with CommDebugMode() as outer:
        d.full_tensor()
        with CommDebugMode() as inner:
            d.redistribute(placements=[R, R]).sum().backward()
    d.full_tensor()
    assert failed.get_total_counts() == 0
    assert outer.get_comm_counts()["all_gather"] == 2 and inner.get_comm_counts() == {"all_gather": 1}
