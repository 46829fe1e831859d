"""State loads into modules and optimizers whose tensors lie elsewhere, and steps go on as on one device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check_shards
from torch import Tensor, nn, optim

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GRID = sw.simulate((2, 2), ("a", "b"))
Place = Callable[[Tensor], Tensor]

PLACES: dict[str, Place] = {
    "one device": lambda w: w.clone(),
    "rows": lambda w: sw.distribute_tensor(w, GRID["a"], [S0]),
    "columns": lambda w: sw.distribute_tensor(w, GRID["a"], [S1]),
    "blocks": lambda w: sw.distribute_tensor(w, GRID, [S0, S1]),
    "replicated": lambda w: sw.distribute_tensor(w, GRID, [R, R]),
    "other ranks": lambda w: sw.distribute_tensor(w, sw.simulate((3,), ("c",)), [S0]),
}
MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, 0.1, foreach=True, amsgrad=True),
    "AdamW, one by one": lambda p: optim.AdamW(p, 0.1, foreach=False),
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Adafactor": lambda p: optim.Adafactor(p, 0.1),  # its state has shapes of its own
    "LBFGS": lambda p: optim.LBFGS(p, 0.1, max_iter=2),  # lists, for all parameters together
    "Muon": lambda p: optim.Muon(p, 0.1),
}


def trained(make: Callable, weight: Tensor, saved: Any = None) -> tuple[Tensor, optim.Optimizer]:
    """A parameter after two steps, from a saved state if there is one."""
    param = nn.Parameter(weight)
    optimizer = make([param])
    if saved is not None:
        optimizer.load_state_dict(saved)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return param.detach(), optimizer


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")  # LBFGS joins all gradients into one vector
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(("rows", "blocks"), ("blocks", "columns"), ("rows", "columns"), ("replicated", "other ranks")),
        *(("one device", "blocks"), ("other ranks", "replicated")),
    ],
)
def test_loading_elsewhere(name: str, source: str, target: str) -> None:
    torch.manual_seed(0)
    make, weight = MAKERS[name], torch.randn(6, 4, dtype=torch.float64)
    middle, before = trained(make, weight.clone())
    expected, right = trained(make, middle.clone(), through_a_file(before.state_dict()))

    _, saved = trained(make, PLACES[source](weight))
    found, optimizer = trained(make, PLACES[target](middle), through_a_file(saved.state_dict()))
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-7, atol=1e-9)
    (state,), (theirs,) = optimizer.state.values(), right.state.values()
    assert state.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, Tensor) and value.dim():
            assert isinstance(state[key], DTensor) and state[key].device_mesh is found.device_mesh
            if value.shape == found.shape:
                assert state[key].placements == found.placements, "no step moves it again"


def test_what_is_where_it_belongs_is_not_touched() -> None:
    _, saved = trained(MAKERS["AdamW"], PLACES["rows"](torch.ones(6, 4)))
    param = nn.Parameter(PLACES["rows"](torch.ones(6, 4)))
    optimizer = MAKERS["AdamW"]([param])
    optimizer.load_state_dict(saved.state_dict())
    before = dict(optimizer.state[param])
    param.grad = torch.ones_like(param)
    with CommDebugMode() as comm:
        optimizer.step()
    assert not comm.comms and all(optimizer.state[param][key] is value for key, value in before.items())


def test_the_saved_state_stays_as_it_was() -> None:
    _, saved = trained(MAKERS["SGD"], torch.ones(6, 4))
    state = saved.state_dict()
    kept = state["state"][0]["momentum_buffer"]
    before = kept.clone()
    trained(MAKERS["SGD"], PLACES["blocks"](torch.ones(6, 4)), state)
    assert type(kept) is Tensor and torch.equal(kept, before)


# Optimizers, before a step


@pytest.mark.parametrize("source", ["one device", "columns", "other ranks"])
def test_once_an_optimizer_has_stepped_state_is_laid_out_as_it_is_loaded(source: str) -> None:
    _, saved = trained(MAKERS["AdamW"], PLACES[source](torch.ones(6, 4)))
    _, optimizer = trained(MAKERS["AdamW"], PLACES["rows"](torch.ones(6, 4)))
    optimizer.load_state_dict(saved.state_dict())
    (kept,), (theirs,) = optimizer.state_dict()["state"].values(), saved.state_dict()["state"].values()
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert kept[name].placements == (S0,) and kept[name].device_mesh is GRID["a"]
        right = theirs[name]
        assert torch.equal(kept[name].full_tensor(), right.full_tensor() if isinstance(right, DTensor) else right)
    assert type(kept["step"]) is Tensor


def test_no_shard_of_loaded_state_keeps_the_whole_in_memory() -> None:
    for stepped in (False, True):
        _, saved = trained(MAKERS["SGD"], torch.ones(6, 4))
        param, optimizer = trained(MAKERS["SGD"], PLACES["rows"](torch.ones(6, 4)))
        if not stepped:
            param = nn.Parameter(param)
            optimizer = MAKERS["SGD"]([param])
        optimizer.load_state_dict(saved.state_dict())
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        ((kept,),) = (state.values() for state in optimizer.state.values())
        with torch._C.DisableTorchFunctionSubclass():
            assert [x.untyped_storage().nbytes() for x in (kept, *kept._peers)] == [4 * 3 * 4] * 4


# Modules


def block() -> nn.Module:
    torch.manual_seed(1)
    f64: Any = {"dtype": torch.float64}
    return nn.Sequential(nn.Linear(4, 6, **f64), nn.BatchNorm1d(6, **f64), nn.Linear(6, 3, bias=False, **f64))


def by_hand(name: str, module: nn.Module, mesh: Any) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, {0: ("b", "a")}))


def init_on() -> nn.Module:
    with sw.init_on(GRID, {"0.weight": [S1, S0]}):
        return block()


def with_style() -> nn.Module:
    plan = {"0": sw.parallel.ColwiseParallel(output_layouts=R), "2": sw.parallel.RowwiseParallel(input_layouts=R)}
    return sw.parallel.parallelize_module(block(), GRID["b"], plan)


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "distribute_module": lambda: sw.distribute_module(block(), GRID, by_hand),
    "fully_shard": lambda: sw.fully_shard(block(), mesh=GRID),
    "styles": with_style,
    "init_on": init_on,
    "a copy": lambda: copy.deepcopy(sw.distribute_module(block(), GRID, by_hand)),
    "pickled": lambda: pickle.loads(pickle.dumps(sw.distribute_module(block(), GRID, by_hand))),
}


def other_state() -> tuple[nn.Module, dict[str, Tensor]]:
    plain = block()
    with torch.no_grad():
        for x in plain.state_dict().values():
            x.copy_(torch.rand(x.shape) * 9)
    return plain, plain.state_dict()


def check_loaded(net: nn.Module, state: dict[str, Tensor], before: dict[str, Any]) -> None:
    for name, x in net.state_dict().items():
        found = x.full_tensor() if isinstance(x, DTensor) else x
        assert torch.equal(found, state[name]), name
        assert isinstance(x, DTensor) == isinstance(before[name], DTensor)
        if isinstance(x, DTensor):
            check_shards(x)
            assert x.layout_on_mesh is before[name].layout_on_mesh


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", SHARDED)
def test_a_module_takes_plain_tensors_and_keeps_its_layouts(name: str, assign: bool) -> None:
    net, (plain, state) = SHARDED[name](), other_state()
    before, kept = net.state_dict(), copy.deepcopy(state)
    with CommDebugMode() as comm:
        assert net.load_state_dict(state, assign=assign) == ([], [])
    assert not comm.comms
    check_loaded(net, state, before)
    x = torch.randn(8, 4, dtype=torch.float64)
    net.eval()
    found: Any = net(x if name == "styles" else sw.distribute_tensor(x, GRID))
    found = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(found, plain.eval()(x))
    with torch.no_grad():
        for param in net.parameters():
            if isinstance(param, DTensor):
                param.zero_()
    assert all(torch.equal(x, kept[name]) for name, x in state.items()), "what was loaded is the module's own"


def test_state_of_another_mesh_and_of_another_layout() -> None:
    _, state = other_state()
    other = sw.simulate((3,), ("c",))
    for assign in (False, True):
        for mesh, placements in ((other, [S0]), (GRID, [R, S0])):
            net = SHARDED["distribute_module"]()
            before = net.state_dict()
            lying = {k: sw.distribute_tensor(x, mesh, placements if x.dim() else None) for k, x in state.items()}
            net.load_state_dict(lying, assign=assign)
            if not assign or mesh is other:  # what is on the mesh is assigned as it lies, as in torch
                check_loaded(net, state, before)


def test_a_module_on_meta_is_given_its_parts() -> None:
    with torch.device("meta"):
        net = sw.distribute_module(block(), GRID, by_hand)
    (_, state), before = other_state(), net.state_dict()
    net.load_state_dict(state, assign=True)
    check_loaded(net, state, before)
    assert not any(x.is_meta for x in net.state_dict().values()) and all(p.requires_grad for p in net.parameters())


def test_what_does_not_fit_is_refused_in_torchs_words() -> None:
    net, (_, state) = SHARDED["distribute_module"](), other_state()
    state["0.weight"] = state["0.weight"][:, 1:]
    state["more"] = state.pop("0.bias")
    with pytest.raises(RuntimeError) as error:
        net.load_state_dict(state)
    for said in (
        'Missing key(s) in state_dict: "0.bias"',
        'Unexpected key(s) in state_dict: "more"',
        "size mismatch for 0.weight: copying a param with shape torch.Size([6, 3]) from checkpoint, the shape in "
        "current model is torch.Size([6, 4])",
    ):
        assert said in str(error.value)
    state["0.weight"] = torch.zeros(6, 4)
    assert net.load_state_dict(state, strict=False) == (["0.bias"], ["more"])


def test_state_of_another_dtype_is_converted_or_assigned() -> None:
    for assign in (False, True):
        net, (_, state) = SHARDED["distribute_module"](), other_state()
        net.load_state_dict(
            {name: x.float() if x.is_floating_point() else x for name, x in state.items()}, assign=assign
        )
        assert net[0].weight.dtype == (torch.float32 if assign else torch.float64)


def test_tied_parameters_stay_one() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    sw.distribute_module(net, GRID, by_hand)
    weight = torch.randn(4, 4)
    net.load_state_dict({"0.weight": weight, "1.weight": weight})
    assert net[0].weight is net[1].weight and torch.equal(net[0].weight.full_tensor(), weight)


@pytest.mark.parametrize("assign", [False, True])
def test_a_parameter_that_was_distributed_by_hand(assign: bool) -> None:
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight, GRID, [S0, S1]))
    state = {"weight": torch.randn(6, 4)}
    layer.load_state_dict(state, assign=assign)
    assert torch.equal(layer.weight.full_tensor(), state["weight"]) and layer.weight.placements == (S0, S1)


def test_a_buffer_that_was_distributed_by_hand_says_what_to_do() -> None:
    layer = nn.Module()
    layer.register_buffer("table", sw.distribute_tensor(torch.zeros(6, 4), GRID, [S0, S1]))
    state = {"table": torch.randn(6, 4)}
    with pytest.raises(RuntimeError, match=r"run the call inside shardwise.experimental.implicit_replication\(\)"):
        layer.load_state_dict(state)
    with sw.experimental.implicit_replication():
        layer.load_state_dict(state)
    assert torch.equal(layer.table.full_tensor(), state["table"])  # type: ignore[union-attr, operator]


def test_what_a_module_shows_gathered_is_its_shards_to_state_dicts() -> None:
    net, (_, state) = SHARDED["fully_shard"](), other_state()
    before = net.state_dict()
    net.unshard()
    assert all(type(x) is type(before[name]) for name, x in net.state_dict().items())
    net.unshard()
    net.load_state_dict(state)
    check_loaded(net, state, before)
