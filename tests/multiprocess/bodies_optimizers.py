"""Bodies about optimizers: on real ranks element-wise ones step on the shards themselves, and nobody can tell;
Muon's matrices have owners."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn, optim

import shardwise as sw
from bodies import R, S, assert_close, body, doubles, everywhere
from shardwise.comm import as_mesh
from shardwise.debug import CommDebugMode

STEPS = 4
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "adamw": (optim.AdamW, {"lr": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.1}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
    "adadelta": (optim.Adadelta, {"lr": 0.5}),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {"lr": 0.1}),
    "asgd": (optim.ASGD, {"lr": 0.1}),
}
LOOPS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "loop": {"foreach": False}}
PLACEMENTS = ([S(0)], [S(1)], [R], [S(0)])


class Model(nn.Module):
    """Parameters in several layouts, one that never gets a gradient, and, if `mixed`, one that is left plain."""

    def __init__(self, weights: list[Tensor], mesh: Any, *, mixed: bool = False) -> None:
        super().__init__()
        placed = [
            w.clone() if mesh is None else sw.distribute_tensor(w, mesh, where)
            for w, where in zip(weights, PLACEMENTS, strict=True)
        ]
        self.weights = nn.ParameterList(nn.Parameter(w) for w in placed)
        self.plain = nn.Parameter(weights[0].clone()) if mixed else None

    def gradients(self, step: int) -> None:
        for index, weight in enumerate(self.weights[:-1]):
            ((weight - index) ** 2 * (step + 1)).sum().backward()
        if self.plain is not None and step:  # it comes later, when the others have their state
            (self.plain**2).sum().backward()


@body(2)
def every_optimizer_steps_as_on_one_device(mesh: Any) -> None:
    weights = [doubles(5, 3), doubles(2, 4), doubles(3), doubles(4)]
    for name, (kind, options) in WAYS.items():
        for loop, how in LOOPS.items():
            mixed = loop == "loop"  # lists of plain tensors and DTensors together are refused
            models = Model(weights, None, mixed=mixed), Model(weights, mesh, mixed=mixed)
            plain, ours = (kind(model.parameters(), **options, **how) for model in models)
            for step in range(STEPS):
                for model, optimizer in zip(models, (plain, ours), strict=True):
                    optimizer.zero_grad()
                    model.gradients(step)
                    optimizer.step()
                    if step == 1:  # new state objects, as after loading a checkpoint
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                if step == 2:  # and new storage
                    for parameter in models[1].weights:
                        parameter.data = parameter.data.clone()
            for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
                assert_close(a, b, f"{name} {loop}")
                check_state(ours.state[a], plain.state[b], a, f"{name} {loop}")


def check_state(ours: dict[str, Any], theirs: dict[str, Any], parameter: Tensor, context: str) -> None:
    assert ours.keys() == theirs.keys(), context
    for key, value in theirs.items():
        if isinstance(value, Tensor) and isinstance(parameter, sw.DTensor) and value.dim():
            assert isinstance(ours[key], sw.DTensor), f"{context}: {key} is no DTensor"
        if isinstance(value, Tensor):
            assert_close(ours[key], value, f"{context}: {key}")


@body(2)
def gradients_are_freed_when_their_parameters_let_go_of_them(mesh: Any) -> None:
    model = Model([doubles(5, 3), doubles(2, 4), doubles(3), doubles(4)], mesh)
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    for step in range(3):
        model.gradients(step)
        optimizer.step()
        with torch._C.DisableTorchFunctionSubclass():
            storage = model.weights[0].grad.untyped_storage()._weak_ref()
        optimizer.zero_grad()
        assert torch.UntypedStorage._expired(storage), step


@body(2)
def a_hook_that_replaces_gradients_is_heeded(mesh: Any) -> None:
    weight = doubles(4, 3)
    x, expected = nn.Parameter(sw.distribute_tensor(weight, mesh, [S(0)])), nn.Parameter(weight.clone())
    for parameter in (x, expected):
        optimizer = optim.SGD([parameter], lr=0.5)

        def halve(opt: Any, args: Any, kwargs: Any) -> None:
            for p in opt.param_groups[0]["params"]:
                p.grad = p.grad * 0.5

        optimizer.register_step_pre_hook(halve)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
    assert_close(x, expected)


@body(2)
def a_closure_is_run_on_distributed_parameters(mesh: Any) -> None:
    x = nn.Parameter(sw.distribute_tensor(doubles(4, 3), mesh, [S(0)]))
    optimizer = optim.SGD([x], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


@body(2, 2)
def muon_gathers_each_matrix_to_one_rank(mesh: Any) -> None:
    """Also of matrices of which some ranks hold nothing, or all hold the same; and each travels once, and back once."""
    shapes = [(6, 4), (4, 8), (5, 3), (1, 4), (3, 3)]
    where = [[S(0), S(1)], [R, S(1)], [S(0), R], [S(0), S(0)], [R, R]]
    weights = [doubles(*shape) for shape in shapes]
    placed = [sw.distribute_tensor(w, mesh, at) for w, at in zip(weights, where, strict=True)]
    found, expected = ([nn.Parameter(w.clone()) for w in some] for some in (placed, weights))
    optimizers = [optim.Muon(params, lr=0.1, weight_decay=0.3) for params in (found, expected)]
    for step in range(3):
        for params, optimizer in zip((found, expected), optimizers, strict=True):
            optimizer.zero_grad()
            for index, weight in enumerate(params):
                ((weight - index) ** 2 * (step + 1)).sum().backward()
            with CommDebugMode() as comm:
                optimizer.step()
            if optimizer is optimizers[0]:
                check_journeys(comm, mesh, [w for w, at in zip(weights, where, strict=True) if at != [R, R]])
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
        check_state(optimizers[0].state[a], optimizers[1].state[b], a, "muon")


def check_journeys(comm: CommDebugMode, mesh: Any, matrices: list[Tensor]) -> None:
    """On real ranks: what all of them together send."""
    assert [one.kind for one in comm.comms] == ["all_to_all", "all_to_all"]
    here = as_mesh(mesh).held
    if len(here) == 1:
        sent = everywhere({here[0]: [one.bytes for one in comm.comms]})
        there, back = (sum(bytes_) for bytes_ in zip(*sent.values(), strict=True))
        numels = [matrix.numel() for matrix in matrices]
        replicated = numels[1] + numels[2]  # along one axis of two ranks
        assert (there, back) == (2 * sum(numels), 2 * (sum(numels) + replicated)), "in bfloat16"


@body(2, 2)
def state_loads_into_other_layouts_and_meshes(mesh: Any) -> None:
    weight = doubles(6, 4)

    def trained(parameter: nn.Parameter, state: Any = None) -> optim.Optimizer:
        optimizer = optim.AdamW([parameter], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(2):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
        return optimizer

    saved = trained(nn.Parameter(sw.distribute_tensor(weight, mesh, [S(0), S(1)]))).state_dict()
    state = trained(nn.Parameter(weight.clone())).state_dict()
    expected = nn.Parameter(weight.clone())
    right = trained(expected, copy.deepcopy(state))
    for where in ((mesh, [R, S(0)]), (mesh["tp"], [S(0)])):
        for loaded in (saved, state):
            found = nn.Parameter(sw.distribute_tensor(weight, *where))
            optimizer = trained(found, copy.deepcopy(loaded))
            assert_close(found, expected)
            check_state(optimizer.state[found], right.state[expected], found, "loaded")
