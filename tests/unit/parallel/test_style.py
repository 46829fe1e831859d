"""Styles: every option gives one device's values and gradients, and what does not fit is refused before anything is
distributed."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as theirs
from meshes import data
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, parallel
from shardwise.comm import Ranked
from shardwise.errors import MeshError, PlacementError, PlanError, ShardShapeError
from shardwise.parallel.api import parallelize_module
from shardwise.parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

GRID = sw.simulate((2, 2), ("dp", "tp"))
MESH = sw.simulate((2,), ("tp",))
R, S = Replicate(), Shard


def part(x: Tensor, placement: sw.Placement, mesh: Any = MESH) -> Tensor:
    """What each rank holds of a tensor, with a way back for its gradient."""
    return x if placement == R else local(x, placement, mesh)


def local(x: Tensor, placement: sw.Placement, mesh: Any) -> Tensor:
    return DTensor.from_local(x, mesh).redistribute(placements=[placement]).to_local()


def whole(x: Tensor, placement: sw.Placement, mesh: Any = MESH) -> Tensor:
    return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement])).full_tensor()


def check_gradients(module: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(found, q[1].grad, atol=1e-10, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", [*theirs.__all__])
def test_names_and_arguments_are_torchs(name: str) -> None:
    both = getattr(parallel, name), getattr(theirs, name)
    facts = [[(p.name, p.kind, p.default) for p in inspect.signature(x).parameters.values()] for x in both]
    assert facts[0] == facts[1]


STYLES = {
    "columns": (ColwiseParallel, lambda: nn.Linear(4, 6), (S(0), S(0))),
    "columns, uneven, no bias": (ColwiseParallel, lambda: nn.Linear(4, 5, bias=False), (S(0),)),
    "columns of a table": (ColwiseParallel, lambda: nn.Embedding(7, 6), (S(1),)),
    "rows": (RowwiseParallel, lambda: nn.Linear(4, 6), (S(1), R)),
    "rows, uneven": (RowwiseParallel, lambda: nn.Linear(5, 6), (S(1), R)),
    "rows of a table": (RowwiseParallel, lambda: nn.Embedding(7, 6, padding_idx=2), (S(0),)),
}
INPUTS = (None, R, S(0), S(1), S(-1))
OUTPUTS = (None, R, S(0), S(1), S(-1), Partial())


@pytest.mark.parametrize("local_output", [True, False])
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
@pytest.mark.parametrize("given", INPUTS, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_every_option(style: str, given: Any, output: Any, local_output: bool) -> None:
    kind, make, placements = STYLES[style]
    torch.manual_seed(0)
    plain = make().double()
    is_table = isinstance(plain, nn.Embedding)
    x = torch.randint(7, (3, 4)) if is_table else data(3, 4, plain.in_features)
    made = kind(input_layouts=given, output_layouts=output, use_local_output=local_output)
    net = parallelize_module(copy.deepcopy(plain), MESH, made)
    assert tuple(p.placements[0] for p in net.parameters()) == placements
    x.requires_grad_(not is_table)
    expected, weight = plain(x), data(*plain(x).shape)
    (expected * weight).sum().backward()
    grad, x.grad = x.grad, None
    taken = given or (R if kind is ColwiseParallel else S(-1))
    y = net(part(x, taken))
    left = output or (S(-1) if kind is ColwiseParallel else R)
    assert isinstance(y, DTensor) is not local_output
    assert type(y) is (DTensor if not local_output else Tensor if left == R else Ranked)
    found = whole(y, left)
    torch.testing.assert_close(found, expected)
    (found * weight).sum().backward()
    check_gradients(net, plain)
    if not is_table:
        torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("placement", [R, S(0), S(2), Partial()], ids=str)
def test_distributed_inputs_are_brought_to_what_the_module_computes_on(style: Any, placement: sw.Placement) -> None:
    plain = nn.Linear(4, 6).double()
    net = parallelize_module(copy.deepcopy(plain), MESH, style(output_layouts=R))
    x = data(3, 2, 4)
    d = sw.distribute_tensor(x, MESH).requires_grad_()
    y = net(d.redistribute(placements=[placement]))
    torch.testing.assert_close(y, plain(x))
    y.sum().backward()
    plain(x).sum().backward()
    check_gradients(net, plain)


class Norm(nn.Module):
    """A norm in Python, with a weight that is not ones, frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(data(4))
        self.frozen = nn.Parameter(data(4), requires_grad=False)
        self.scale = nn.Buffer(data(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-5).rsqrt() * self.weight * self.frozen * self.scale


@pytest.mark.parametrize("local_output", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", [Norm, lambda: nn.LayerNorm(4, dtype=torch.float64)], ids=["ours", "torch's"])
def test_sequence_parallel(make: Any, dim: int, local_output: bool) -> None:
    plain, x = make(), data(3, 5, 4).requires_grad_()
    style = SequenceParallel(sequence_dim=dim, use_local_output=local_output)
    net = parallelize_module(copy.deepcopy(plain), MESH, style)
    assert all(p.placements == (R,) for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in plain.parameters()]
    expected, weight = plain(x), data(3, 5, 4)
    (expected * weight).sum().backward()
    for given in (part(x, S(dim)), DTensor.from_local(x, MESH, [R])):
        net.zero_grad()
        y = net(given)
        assert type(y) is (Ranked if local_output else DTensor)
        found = whole(y, S(dim))
        torch.testing.assert_close(found, expected)
        (found * weight).sum().backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)


WAYS = list(itertools.product([R, S(0), S(1), Partial()], repeat=2))


class Two(nn.Module):
    """Two inputs, one by keyword; two outputs, and what is no tensor."""

    def forward(self, x: Tensor, flag: bool = True, *, y: Tensor | None = None) -> Any:
        self.seen = x, y
        return x * 2, flag, x if y is None else y + 1


@pytest.mark.parametrize("local_output", [True, False])
@pytest.mark.parametrize(("taken", "wanted"), WAYS, ids=str)
def test_inputs_are_prepared(taken: Any, wanted: Any, local_output: bool) -> None:
    style = PrepareModuleInput(
        input_layouts=(taken, None),
        desired_input_layouts=(wanted, None),
        input_kwarg_layouts={"y": taken},
        desired_input_kwarg_layouts={"y": wanted},
        use_local_output=local_output,
    )
    net = parallelize_module(Two(), MESH, style)
    x = data(4, 6)
    net(local(x, taken, MESH), False, y=local(x, taken, MESH))
    for seen in net.seen:
        assert isinstance(seen, DTensor) is not local_output
        torch.testing.assert_close(whole(seen, wanted), x)
        if isinstance(seen, DTensor):
            assert seen.placements == (wanted,)


@pytest.mark.parametrize("local_output", [True, False])
@pytest.mark.parametrize(("taken", "wanted"), WAYS, ids=str)
def test_outputs_are_prepared(taken: Any, wanted: Any, local_output: bool) -> None:
    kinds = {"output_layouts": (taken, None, taken), "desired_output_layouts": (wanted, None, wanted)}
    style = PrepareModuleOutput(**kinds, use_local_output=local_output)
    both = PrepareModuleInputOutput(
        input_layouts=S(0), desired_input_layouts=S(1), use_local_input=True, **kinds, use_local_output=local_output
    )
    x = data(4, 6)
    first, flag, second = parallelize_module(Two(), MESH, style)(local(x, taken, MESH))
    assert flag is True
    for found, expected in ((first, 2 * x), (second, x)):
        assert isinstance(found, DTensor) is not local_output
        torch.testing.assert_close(whole(found, wanted), expected)
    net = parallelize_module(Two(), MESH, both)
    if taken == S(1):
        first, _, _ = net(local(x, S(0), MESH))
        torch.testing.assert_close(whole(first, wanted), 2 * x)


def test_one_input_and_one_output() -> None:
    style = PrepareModuleInputOutput(
        input_layouts=S(0), desired_input_layouts=R, output_layouts=R, desired_output_layouts=S(1)
    )
    net = parallelize_module(nn.Tanh(), MESH, style)
    x = data(4, 6)
    torch.testing.assert_close(whole(net(local(x, S(0), MESH)), S(1)), x.tanh())


# Plans


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return self.head(x)


def placed(net: nn.Module) -> dict[str, Any]:
    return {name: p.placements[0] for name, p in net.named_parameters() if isinstance(p, DTensor)}


COLUMNS, ROWS = {"weight": S(0), "bias": S(0)}, {"weight": S(1), "bias": R}
PLANS = {
    "by name": {
        f"layers.{i}.{n}": s for i in range(3) for n, s in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    },
    "wildcards": {"layers.*.up": ColwiseParallel(), "la*s.[0-9].d?wn": RowwiseParallel()},
    "nested": {"layers": {"*": {"up": ColwiseParallel(), "down": RowwiseParallel()}}},
    "nested, with the module itself": {"layers.*.up": {"": ColwiseParallel()}, "layers.*.down": RowwiseParallel()},
}


@pytest.mark.parametrize("mesh", [MESH, GRID["tp"]], ids=["one axis", "one of two"])
@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, mesh: Any) -> None:
    torch.manual_seed(0)
    plain, tokens = Net(), torch.randint(7, (2, 3))
    net = copy.deepcopy(plain)
    assert parallelize_module(net, mesh, PLANS[name]) is net
    both = (("up", COLUMNS), ("down", ROWS))
    assert placed(net) == {f"layers.{i}.{n}.{k}": p for i in range(3) for n, kinds in both for k, p in kinds.items()}
    for model in (plain, net):
        model(tokens).square().mean().backward()
    torch.testing.assert_close(net(tokens), plain(tokens))
    check_gradients(net, plain)


def test_the_mesh_of_the_block_around_is_taken() -> None:
    with MESH:
        assert parallelize_module(nn.Linear(4, 4), None, ColwiseParallel()).weight.placements == (S(0),)


def test_the_values_are_those_of_the_source_rank() -> None:
    for rank in (0, 1, None):
        net = parallelize_module(Net(), MESH, PLANS["wildcards"], src_data_rank=rank)
        assert placed(net)["layers.2.up.bias"] == S(0)
    with pytest.raises(MeshError, match="src_data_rank=2 is not on every axis"):
        parallelize_module(nn.Linear(4, 4), MESH, ColwiseParallel(), src_data_rank=2)


def test_modules_can_be_copied_and_pickled() -> None:
    net, tokens = parallelize_module(Net(), MESH, PLANS["wildcards"]), torch.randint(7, (2, 3))
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(again(tokens), net(tokens))


@pytest.mark.parametrize("order", ["first", "last", "one after the other"])
def test_tied_weights_stay_tied(order: str) -> None:
    torch.manual_seed(0)
    plain, tokens = Net(), torch.randint(7, (2, 3))
    plain.head.weight = plain.table.weight
    net = copy.deepcopy(plain)
    plan: dict[str, Any] = {"table": RowwiseParallel(input_layouts=R), "head": ColwiseParallel(output_layouts=R)}
    if order == "one after the other":
        for name, style in plan.items():
            parallelize_module(net, MESH, {name: style})
    else:
        parallelize_module(net, MESH, plan if order == "first" else dict(reversed(plan.items())))
    assert net.head.weight is net.table.weight and net.head.weight.placements == (S(0),)
    for model in (plain, net):
        model(tokens).square().mean().backward()
    check_gradients(net, plain)


def test_tied_weights_that_styles_would_place_differently_are_right_too() -> None:
    plain, tokens = Net(), torch.randint(7, (2, 3))
    plain.head.weight = plain.table.weight
    net = copy.deepcopy(plain)
    parallelize_module(
        net, MESH, {"head": ColwiseParallel(output_layouts=R), "table": ColwiseParallel(output_layouts=R)}
    )
    assert net.head.weight is net.table.weight
    torch.testing.assert_close(net(tokens), plain(tokens))


def test_a_module_under_two_names_is_parallelized_once() -> None:
    net = Net()
    net.layers[1] = net.layers[0]
    tokens = torch.randint(7, (2, 3))
    expected = copy.deepcopy(net)(tokens)
    parallelize_module(net, MESH, PLANS["wildcards"])
    torch.testing.assert_close(net(tokens), expected)


class Doubling(ParallelStyle):
    """A style of a user's own."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        assert (self.src_data_rank, self.path) == (1, "head")
        module.weight = nn.Parameter(sw.distribute_tensor(module.weight.detach() * 2, device_mesh, [S(1)]))
        return sw.distribute_module(
            module,
            device_mesh,
            None,
            lambda mod, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [R]),),
            lambda mod, output, mesh: output.full_tensor(),
        )


def test_styles_of_ones_own() -> None:
    plain, tokens = Net(), torch.randint(7, (2, 3))
    net = parallelize_module(copy.deepcopy(plain), MESH, {"head": Doubling()}, src_data_rank=1)
    assert placed(net) == {"head.weight": S(1)}
    torch.testing.assert_close(net(tokens), 2 * plain(tokens))
    with pytest.raises(TypeError, match="abstract"):
        ParallelStyle()  # type: ignore[abstract]


def test_styles_that_are_written_for_torchs_way_of_making_them_are_refused() -> None:
    """torch's styles call functions of theirs that subclasses define otherwise; these here would never be called."""
    words = "Mine: _prepare_input_fn would not be called: .* and not ColwiseParallel. Define _apply"
    with pytest.raises(TypeError, match=words):

        class Mine(ColwiseParallel):
            @staticmethod
            def _prepare_input_fn(*args: Any) -> Any: ...

    class Whole(ColwiseParallel):
        @staticmethod
        def _prepare_input_fn(module: Any, inputs: Any, mesh: Any) -> Any:
            return DTensor.from_local(inputs[0], mesh)

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return sw.distribute_module(module, device_mesh, input_fn=self._prepare_input_fn)

    assert parallelize_module(nn.Linear(4, 6), MESH, Whole())(torch.ones(2, 4)).placements == (R,)


def test_what_styles_say_of_themselves() -> None:
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), use_local_output=True)"
    )
    assert repr(SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    style = PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=R, output_layouts=R, desired_output_layouts=S(0)
    )
    assert repr(style.prepare_module_output) in repr(style)


# What does not fit

BAD_PLANS: dict[str, tuple[Any, type[Exception], str]] = {
    "no module": (
        {"layers.*.upp": COLUMNS},
        PlanError,
        "the plan names 'layers.*.upp', but no module of Net is called so",
    ),
    "similar": ({"tabel": ColwiseParallel()}, PlanError, "similar names: 'table'"),
    "no module inside": (
        {"layers.1": {"left": ColwiseParallel()}},
        PlanError,
        "the plan names 'left', but no module of layers.1 is called so; its children: 'up', 'down'",
    ),
    "no style": ({"head": "colwise!"}, PlanError, ""),
    "no plan": (
        {"head": 3},
        TypeError,
        "a plan is a ParallelStyle, or a dict of them by module name; got a int for 'head'",
    ),
    "no instance": (
        {"head": ColwiseParallel},
        TypeError,
        "a plan is made of styles, not of their classes: write ColwiseParallel(...) for 'head'",
    ),
    "torch's": (
        {"head": theirs.ColwiseParallel()},
        TypeError,
        "got a ColwiseParallel for 'head' of torch's; import it from shardwise.parallel",
    ),
    "unknown module": (
        {"layers.0": ColwiseParallel()},
        PlanError,
        "module 'layers.0': ColwiseParallel knows nn.Linear and nn.Embedding, not ModuleDict",
    ),
    "twice": (
        {"layers.*.up": ColwiseParallel(), "layers.1.up": RowwiseParallel()},
        PlanError,
        "two entries of the plan distribute the same parameters: layers.1.up (ColwiseParallel) and layers.1.up "
        "(RowwiseParallel)",
    ),
    "around": (
        {"layers.1": SequenceParallel(), "layers.*.up": ColwiseParallel()},
        PlanError,
        "distribute the same parameters: layers.1 (SequenceParallel) and layers.1.up (ColwiseParallel)",
    ),
}


@pytest.mark.parametrize("name", [name for name in BAD_PLANS if name != "no style"])
def test_a_plan_that_does_not_fit_distributes_nothing(name: str) -> None:
    plan, kind, words = BAD_PLANS[name]
    net = Net()
    with pytest.raises(kind) as error:
        parallelize_module(net, MESH, {"table": RowwiseParallel(), **plan})
    assert words in str(error.value)
    assert not placed(net) and not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_what_is_distributed_already_is_refused() -> None:
    net = parallelize_module(Net(), MESH, {"head": ColwiseParallel()})
    with pytest.raises(
        PlanError, match="module 'head' is parallelized already; ColwiseParallel would run its hooks twice"
    ):
        parallelize_module(net, MESH, {"table": RowwiseParallel(), "head": ColwiseParallel()})
    net.layers[0]["up"].weight = nn.Parameter(sw.distribute_tensor(data(6, 4), MESH, [S(1)]))
    with pytest.raises(PlanError, match=r"module 'layers\.0\.up': its parameter 'weight' is a DTensor already"):
        parallelize_module(net, MESH, {"table": RowwiseParallel(), "layers.*.up": ColwiseParallel()})
    assert list(placed(net)) == ["layers.0.up.weight", "head.weight"]


def test_other_mistakes() -> None:
    with pytest.raises(
        MeshError, match=r"module 'head': ColwiseParallel takes a mesh of one axis, such as mesh\['tp'\]"
    ):
        parallelize_module(Net(), GRID, {"head": ColwiseParallel()})
    with pytest.raises(TypeError, match=r"parallelize_module takes a torch.nn.Module, not a list"):
        parallelize_module([], MESH, {})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no plan"):
        parallelize_module(nn.Linear(2, 2), MESH)
    with pytest.raises(
        PlanError,
        match="input_layouts and desired_input_layouts have one entry each for every input; they have 2 and 1",
    ):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=R)
    with pytest.raises(PlanError, match="they have 1 and none"):
        PrepareModuleInput(input_layouts=R)
    with pytest.raises(PlanError, match="output_layouts and desired_output_layouts"):
        PrepareModuleOutput(output_layouts=R, desired_output_layouts=(R, R))
    with pytest.raises(PlacementError, match=r"got Shard\(dim=1\) of torch\..*; import Shard from shardwise"):
        ColwiseParallel(output_layouts=torch.distributed.tensor.Shard(1))  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match=r"got Replicate\(\) of torch\..*; import Replicate from shardwise"):
        PrepareModuleInput(input_layouts=torch.distributed.tensor.Replicate(), desired_input_layouts=R)
    with pytest.raises(PlanError, match=r"input_kwarg_layouts names \['x'\], desired_input_kwarg_layouts \['y'\]"):
        PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R})


def test_calls_that_do_not_fit_name_the_module() -> None:
    net = Net()
    plan = {
        "layers.*.up": ColwiseParallel(),
        "layers.0.down": RowwiseParallel(),
        "head": PrepareModuleInput(input_layouts=R, desired_input_layouts=R),
    }
    parallelize_module(net, MESH, plan)
    with pytest.raises(
        PlanError, match=r"module 'layers.2.up': its first positional input must be a tensor; it was given none"
    ):
        net.layers[2]["up"](input=data(2, 4))
    with pytest.raises(PlanError, match=r"module 'head': input_layouts has 1 entries for 2 inputs"):
        net.head(data(2, 4), 1)
    with pytest.raises(PlanError, match=r"module 'head': Replicate\(\) is a layout of a tensor; found a int"):
        net.head(1)
    with pytest.raises(ShardShapeError, match=r"the shard at tp=0 has shape \[2, 4\]"):
        net.layers[0]["down"](data(2, 4))
    with pytest.raises(
        MeshError, match=r"module 'layers.0.up': its style brings .* given one on Mesh\(dp=2\), \[4,4\] S"
    ):
        net.layers[0]["up"](sw.distribute_tensor(data(4, 4), GRID["dp"], [S(0)]))


@pytest.mark.parametrize("local", [True, False])
def test_compiled_models_run_the_hooks_as_they_are(local: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    net = parallelize_module(
        copy.deepcopy(plain),
        MESH,
        {"0": ColwiseParallel(use_local_output=local), "2": RowwiseParallel(use_local_output=local)},
    )
    x = torch.randn(3, 4)
    with warnings.catch_warnings(action="error"):
        found = torch.compile(net, backend="eager")(x)
    torch.testing.assert_close(whole(found, R), plain(x))


def test_a_model_is_freed_after_a_step() -> None:
    net = parallelize_module(Net(), MESH, PLANS["wildcards"])
    for _ in range(2):
        net(torch.randint(7, (2, 3))).sum().backward()
    alive = [weakref.ref(parameter) for parameter in net.parameters()]
    del net
    gc.collect()
    assert not any(parameter() is not None for parameter in alive)


def test_what_is_shared_follows_writes() -> None:
    plain = nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]).requires_grad_(False)
    net = parallelize_module(copy.deepcopy(plain), MESH, {"*": ColwiseParallel(output_layouts=R)})
    leaf = data(3, 4).requires_grad_()
    found = []
    for modules in (plain, net):
        x = leaf * 1
        first = modules[0](x)
        x += 1
        found.append(torch.autograd.grad((first.sin() + modules[1](x).cos()).sum(), leaf)[0])
    torch.testing.assert_close(found[1], found[0])
