"""Muon on DTensors: the steps of one device, each split matrix orthogonalised once, and two collectives for a mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.parallel import whole_matrices

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(8, 6), (6, 8), (5, 3), (1, 4), (3, 3)]
LINE, GRID = sw.simulate((3,), ("a",)), sw.simulate((2, 2), ("a", "b"))
BFLOAT16 = 2  # bytes

LAYOUTS: dict[str, tuple[Any, Any]] = {
    "rows": (LINE, [S0]),
    "columns": (LINE, [S1]),
    "blocks": (GRID, [S0, S1]),
    "rows twice": (GRID, [S0, S0]),
    "rows, in another order": (GRID, {0: ("b", "a")}),
    "replicated along the first axis": (GRID, [R, S0]),
    "replicated along the last axis": (GRID, [S1, R]),
    "on a submesh": (GRID["b"], [S0]),
    "with an axis of one rank": (sw.simulate((1, 2), ("a", "b")), [S0, S1]),
    "most shards empty": (sw.simulate((16,), ("a",)), [S0]),
}


def data(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def place(tensors: list[Tensor], mesh: Any, where: Any) -> list[nn.Parameter]:
    return [nn.Parameter(sw.distribute_tensor(x, mesh, where)) for x in tensors]


def plain(tensors: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(x.clone()) for x in tensors]


def set_grads(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, dtype=param.dtype)
        if isinstance(param, DTensor):
            param.grad = sw.distribute_tensor(grad, param.device_mesh)  # the setter moves it to where it belongs
        else:
            param.grad = grad


def steps(optimizer: optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        set_grads(optimizer.param_groups[0]["params"], seed)
        optimizer.step()


def check(found: optim.Optimizer, expected: optim.Optimizer) -> None:
    """Bit for bit: the owner runs torch's own function on the numbers that one device has."""
    pairs = zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True)
    for p, q in pairs:
        torch.testing.assert_close(whole(p), q.detach(), rtol=0, atol=0)
        assert found.state[p].keys() == expected.state[q].keys()
        for name, value in expected.state[q].items():
            torch.testing.assert_close(whole(found.state[p][name]), value, rtol=0, atol=0)


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    torch.manual_seed(0)
    weights = [data(*shape) for shape in SHAPES]
    ours, theirs = optim.Muon(place(weights, *LAYOUTS[layout]), lr=0.1), optim.Muon(plain(weights), lr=0.1)
    for optimizer in (ours, theirs):
        steps(optimizer, 1, 2, 3)
    check(ours, theirs)
    assert all(ours.state[p]["momentum_buffer"].placements == p.placements for p in ours.param_groups[0]["params"])


OPTIONS: list[dict[str, Any]] = [
    {"nesterov": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.5, "momentum": 0.5},
    {"lr": torch.tensor(0.1)},
    {"lr": torch.tensor([0.1])},
    {"adjust_lr_fn": "original"},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"ns_steps": 2, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("layout", ["rows", "replicated along the last axis"])
def test_every_option(options: dict[str, Any], layout: str) -> None:
    torch.manual_seed(0)
    weights, options = [data(*shape) for shape in SHAPES], {"lr": 0.1, **options}
    ours, theirs = optim.Muon(place(weights, *LAYOUTS[layout]), **options), optim.Muon(plain(weights), **options)
    for optimizer in (ours, theirs):
        steps(optimizer, 1, 2)
    check(ours, theirs)


def test_groups_have_their_own_options() -> None:
    torch.manual_seed(0)
    weights = [data(6, 4), data(4, 6)]
    found = []
    for params in (place(weights, LINE, [S0]), plain(weights)):
        optimizer = optim.Muon([{"params": params[:1], "lr": 0.5, "ns_steps": 1}, {"params": params[1:]}], lr=0.1)
        set_grads(params, 1)
        optimizer.step()
        found.append(params)
    for p, q in zip(*found, strict=True):
        assert torch.equal(whole(p), q)


def test_explicit_sizes_and_replicas() -> None:
    torch.manual_seed(0)
    uneven = sw.distribute_tensor(data(7, 4), GRID, [S0, R])[2:]
    assert uneven.layout_on_mesh.sizes[0] is not None
    start = uneven.full_tensor()
    ours, theirs = optim.Muon([nn.Parameter(uneven.detach().clone())], lr=0.1), optim.Muon(plain([start]), lr=0.1)
    for optimizer in (ours, theirs):
        steps(optimizer, 1, 2)
    check(ours, theirs)


def mixed(sharded: bool) -> list[nn.Parameter]:
    """On several meshes, of several dtypes, plain, replicated everywhere, pending, and without a gradient."""
    torch.manual_seed(0)
    weights = [data(6, 4), data(4, 6, dtype=torch.float32), data(5, 5), data(4, 3), data(3, 4), data(4, 4), data(8, 2)]
    where = [
        (GRID, [S0, S1]),
        (GRID, [S0, R]),
        (LINE, [S1]),
        (GRID, [R, R]),
        None,
        (GRID, [R, Partial()]),
        (GRID["b"], [S0]),
    ]
    return [
        nn.Parameter(sw.distribute_tensor(w, *at) if sharded and at else w.clone())
        for w, at in zip(weights, where, strict=True)
    ]


def test_all_kinds_of_parameters_in_one_group() -> None:
    ours, theirs = optim.Muon(mixed(sharded=True), lr=0.1), optim.Muon(mixed(sharded=False), lr=0.1)
    for optimizer in (ours, theirs):
        params = optimizer.param_groups[0]["params"]
        for seed in (1, 2):
            set_grads(params, seed)
            params[0].grad = None if seed == 1 else params[0].grad
            with CommDebugMode() as comm:
                optimizer.step()
        if optimizer is ours:
            assert comm.get_comm_counts() == {"all_to_all": 2 * 3}, "two for each mesh, whatever the dtypes"
    check(ours, theirs)


# What is communicated, and where


def test_a_matrix_travels_once_to_its_owner_and_back() -> None:
    torch.manual_seed(0)
    optimizer = optim.Muon(place([data(6, 4) for _ in range(3)], LINE, [S0]), lr=0.1)
    steps(optimizer, 1)
    set_grads(optimizer.param_groups[0]["params"], 2)
    with sw.strict(), CommDebugMode() as comm:
        optimizer.step()
    there, back = comm.comms
    assert (there.kind, back.kind) == ("all_to_all", "all_to_all")
    assert there.bytes == 3 * (2 * 4) * BFLOAT16, "a third of each of the three matrices"
    assert back.bytes == (6 * 4) * BFLOAT16, "the one matrix that the rank owns"
    assert (there.function, there.why) == ("Muon", "updates to the owners of matrices")
    assert (back.function, back.why) == ("Muon", "orthogonalised updates from their owners")
    assert there.file == __file__


def test_replicas_send_a_part_each_and_all_get_the_result() -> None:
    torch.manual_seed(0)
    optimizer = optim.Muon(place([data(8, 4) for _ in range(4)], GRID, [R, S0]), lr=0.1)
    set_grads(optimizer.param_groups[0]["params"], 1)
    with CommDebugMode() as comm:
        optimizer.step()
    there, back = comm.comms
    assert there.bytes == 4 * (2 * 4) * BFLOAT16, "half of the half of each of the four matrices"
    assert back.bytes == 2 * (8 * 4) * BFLOAT16, "the one matrix that the rank owns, for each replica"


@pytest.mark.parametrize("layout", ["rows", "blocks", "replicated along the first axis"])
def test_a_matrix_is_orthogonalised_by_one_rank(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    seen, original = [], whole_matrices._zeropower_via_newtonschulz
    monkeypatch.setattr(
        whole_matrices,
        "_zeropower_via_newtonschulz",
        lambda x, **how: (seen.append(tuple(x.shape)), original(x, **how))[1],
    )
    optimizer = optim.Muon(place([data(*shape) for shape in SHAPES], *LAYOUTS[layout]), lr=0.1)
    steps(optimizer, 1)
    assert sorted(seen) == sorted(SHAPES)


def test_what_is_replicated_everywhere_communicates_nothing() -> None:
    optimizer = optim.Muon(place([data(4, 3)], GRID, [R, R]), lr=0.1)
    set_grads(optimizer.param_groups[0]["params"], 1)
    with CommDebugMode() as comm:
        optimizer.step()
    assert not comm.comms


def test_owners_have_as_much_to_do() -> None:
    shapes = [(64, 64)] * 3 + [(32, 64)] * 5 + [(8, 8)] * 7
    layouts = tuple(sw.distribute_tensor(torch.zeros(shape), LINE, [S0]).layout_on_mesh for shape in shapes)
    owned = whole_matrices._Owners(layouts).owned
    assert sorted(i for mine in owned for i in mine) == list(range(len(shapes)))
    work = [sum(m * n * min(m, n) for m, n in (shapes[i] for i in mine)) for mine in owned]
    assert max(work) - min(work) <= 32 * 64 * 32


# What people do between steps


def test_state_is_saved_and_loaded() -> None:
    torch.manual_seed(0)
    weights = [data(*shape) for shape in SHAPES]
    results = []
    for params in (place(weights, LINE, [S0]), plain(weights)):
        first = optim.Muon(params, lr=0.1)
        steps(first, 1, 2)
        second = optim.Muon(params, lr=0.3)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        steps(second, 3)
        results.append(second)
    check(*results)


def test_a_closure_and_hooks_of_others_are_heeded() -> None:
    torch.manual_seed(0)
    weights = [data(6, 4)]
    results = []
    for params in (place(weights, LINE, [S0]), plain(weights)):
        optimizer = optim.Muon(params, lr=0.1)

        def closure(params: list[nn.Parameter] = params) -> Tensor:
            set_grads(params, 1)
            return params[0].sum()

        assert optimizer.step(closure) is not None
        handle = optimizer.register_step_pre_hook(lambda opt, args, kwargs, params=params: set_grads(params, 2))
        optimizer.step()
        handle.remove()
        steps(optimizer, 3)
        results.append(whole(params[0]))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)  # on DTensors op by op, in half precision


def test_fully_sharded_modules_train_as_on_one_device() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    sharded, batch = copy.deepcopy(net), data(4, 6)
    mesh = sw.simulate((2,), ("dp",))
    for module in (sharded[0], sharded[2], sharded):
        sw.fully_shard(module, mesh=mesh)
    for model, x in ((net, batch), (sharded, sw.distribute_tensor(batch, mesh, [S0]))):
        optimizer = optim.Muon(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(sharded.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=2e-2, atol=2e-2)  # roundings to half precision differ
