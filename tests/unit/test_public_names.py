"""Public names as users of torch's DTensor know them: their arguments, what they accept, what they say to mistakes."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch
from sweep import mesh_of, normal, place
from torch import Tensor, nn
from torch.nn.utils import prune

import shardwise as sw
from shardwise.experimental import implicit_replication

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
X = normal(4, 3)

# Arguments, in torch's order

MADE = ("requires_grad", "dtype", "layout", "device_mesh", "placements")
SIGNATURES: dict[Callable, tuple[str, ...]] = {
    sw.DTensor.from_local: (
        *("local_tensor", "device_mesh", "placements", "run_check", "shape", "stride", "grad_placements"),
    ),
    sw.DTensor.to_local: ("self", "grad_placements"),
    sw.DTensor.full_tensor: ("self", "grad_placements"),
    sw.DTensor.redistribute: (*("self", "device_mesh", "placements", "async_op", "forward_dtype", "backward_dtype"),),
    sw.distribute_tensor: ("tensor", "device_mesh", "placements", "src_data_rank"),
    sw.distribute_module: ("module", "device_mesh", "partition_fn", "input_fn", "output_fn"),
    sw.full: ("size", "fill_value", *MADE),
    **dict.fromkeys((sw.zeros, sw.ones, sw.empty, sw.rand, sw.randn), ("size", *MADE)),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments_are_torchs(function: Callable) -> None:
    parameters = inspect.signature(function).parameters
    assert tuple(parameters) == SIGNATURES[function]
    if "device_mesh" in parameters:
        assert parameters["device_mesh"].default is None, "the mesh that the program is in"


TORCHS = "torch.distributed.tensor"
MODULES = (
    "",
    "debug",
    "device_mesh",
    "experimental",
    "placement_types",
    "parallel",
    *map("parallel.{}".format, ("api", "loss", "style")),
)


@pytest.mark.parametrize("module", MODULES)
def test_programs_switch_by_changing_the_import(module: str) -> None:
    theirs, ours = (import_module(f"{package}.{module}".rstrip(".")) for package in (TORCHS, "shardwise"))
    assert {*theirs.__all__} <= {*dir(ours)}


# Modules


def distributed(input_fn: Any = None, output_fn: Any = None) -> nn.Module:
    return sw.distribute_module(nn.Linear(3, 2, dtype=torch.float64), mesh_of((2,)), None, input_fn, output_fn)


def test_functions_of_older_programs_do_not_take_the_module() -> None:
    net = distributed(
        lambda inputs, mesh: (sw.distribute_tensor(inputs[0], mesh, [S(0)]),),
        lambda outputs, mesh: outputs.redistribute(placements=[R]),
    )
    assert net(X).placements == (R,)
    net = distributed(lambda *given: tuple(sw.distribute_tensor(x, given[2]) for x in given[1]))
    assert net(X).shape == (4, 2)


def test_functions_of_other_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"input_fn takes a module, its inputs and the mesh; this one takes \(x\)"):
        distributed(lambda x: x)
    with pytest.raises(ValueError, match=r"output_fn takes a module, its outputs and the mesh; this one takes \(\)"):
        distributed(None, lambda: None)


def test_buffers_that_modules_share_stay_one() -> None:
    net = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    net[1].running_mean = net[0].running_mean
    sw.distribute_module(net, mesh_of((2,)))
    assert net[1].running_mean is net[0].running_mean and net[1].running_var is not net[0].running_var


def test_what_partition_fn_puts_in_the_place_of_freed_tensors_is_its_own() -> None:
    net = nn.ModuleList([nn.Linear(2, 2) for _ in range(20)])

    def renew(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.full((2, 2), float(name)))

    sw.distribute_module(net, mesh_of((2,)), renew)
    assert [net[i].weight[0, 0].item() for i in range(20)] == [float(i) for i in range(20)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("where", [R, S(0), S(1)])
def test_random_channels_are_pruned_as_on_one_device(dim: int, where: sw.Placement) -> None:
    plain = nn.Linear(4, 6, dtype=torch.float64)
    net = copy.deepcopy(plain)
    net.weight = nn.Parameter(place(net.weight.detach(), where))
    for module in (plain, net):
        torch.manual_seed(3)
        with implicit_replication():  # the channels are drawn alike everywhere
            prune.random_structured(module, "weight", 0.5, dim)
            prune.random_structured(module, "weight", 1, dim)
    torch.testing.assert_close(net.weight.detach().full_tensor(), plain.weight.detach())


def test_a_model_is_made_without_data_and_filled_later() -> None:
    def make(device: str) -> nn.Module:
        with torch.device(device):
            return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, [S(0)]))

    plain, net = make("cpu"), sw.distribute_module(make("meta"), mesh_of((2,)), shard)
    assert net[0].weight.is_meta and net[0].weight.placements == (S(0),)
    net.to_empty(device="cpu")
    for model in (plain, net):
        torch.manual_seed(0)
        for module in model:
            module.reset_parameters()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), q.detach())
    fresh = sw.distribute_module(make("meta"), mesh_of((2,)))
    fresh.load_state_dict(net.state_dict(), assign=True)
    torch.testing.assert_close(fresh[0].weight.full_tensor(), net[0].weight.full_tensor())


# Values that leave, and others that come


@pytest.mark.parametrize("leave", [Tensor.numpy, numpy.asarray], ids=["numpy", "asarray"])
def test_what_needs_a_gradient_is_not_given_away(leave: Callable) -> None:
    for x in (X.clone().requires_grad_(), place(X, S(0)).requires_grad_()):
        with pytest.raises(RuntimeError, match="Can't call numpy\\(\\) on Tensor that requires grad"):
            leave(x)
    assert numpy.array_equal(place(X, S(0)).requires_grad_().numpy(force=True), X.numpy())


def test_numbers_of_numpy_share_plans_like_pythons() -> None:
    x, pending = place(X, S(0)), place(X, P)
    before = 0
    for step in range(6):
        number = numpy.float64(step - 2.5)
        for found, expected in (
            (x * number, X * float(number)),
            (pending * number, X * float(number)),
            (x.amax(0) * number, X.amax(0) * float(number)),
            (pending + number, X + float(number)),
            (nn.functional.leaky_relu(x, number), nn.functional.leaky_relu(X, float(number))),
            (x * numpy.complex128(1j * step), X * (1j * step)),
        ):
            torch.testing.assert_close(found.full_tensor(), expected)
        multiplied = sw.cache_info().misses
        x * numpy.float64(step + 0.25)
        assert not step or sw.cache_info().misses == multiplied
        before += 1
    assert before == 6


class Other:
    """Something that knows what to do with tensors to its left."""

    def __radd__(self, left: Any) -> Any:
        return left.shape

    __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __radd__


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "matmul"])
def test_operators_leave_it_to_what_knows_better(name: str) -> None:
    assert getattr(operator, name)(place(X, S(0)), Other()) == X.shape
    with pytest.raises(TypeError, match="unsupported operand type"):
        getattr(operator, name)(place(X, S(0)), None)


# Mistakes


def test_placements_of_another_library_are_named() -> None:
    other = type("Shard", (), {"__module__": "elsewhere.placements", "__repr__": lambda self: "Shard(dim=0)"})()
    with pytest.raises(
        sw.errors.PlacementError, match=r"got Shard\(dim=0\) of elsewhere.placements; import Shard from shardwise"
    ):
        sw.distribute_tensor(X, mesh_of((2,)), [other])


def test_exporting_does_not_get_at_the_shards() -> None:
    for module, x in ((distributed(), place(X, R)), (nn.Linear(3, 2), place(X, S(0)))):
        with pytest.raises(sw.errors.ShardMemoryError, match="would give the memory of this rank's shard"):
            torch.export.export(module, (x,))
    assert torch.export.export(nn.ReLU(), (X,)).module()(X).equal(X.relu())


def test_a_tensor_within_a_graph_is_not_cut_off_silently() -> None:
    w = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="takes leaves of the graph"):
        sw.distribute_tensor(w * 2, mesh_of((2,)), [S(0)])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_attributes_go_where_the_tensor_goes(again: Callable) -> None:
    for x in (X.clone(), place(X, S(0))):
        x.kind = ["weight"]
        assert again(x).kind == ["weight"] and again(x).kind is not x.kind
