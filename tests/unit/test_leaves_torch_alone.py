"""`import shardwise` leaves torch alone: a plain program has the same objects, whether or not shardwise is imported and
whether or not a DTensor exists. The first mesh changes what `torch_hooks` lists and nothing else."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fresh import run
from torch import Tensor, nn
from torch.utils import checkpoint

import shardwise as sw
from shardwise import torch_hooks
from shardwise.torch_hooks import HOOKS, Registered, Replaced, ReplacedLater

MESH = sw.simulate((2,), ("tp",))  # the hooks are there

SCRIPT = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch_snapshot import changes, snapshot

def plain_program():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()

def program(sw, mesh):
    model = sw.distribute_module(torch.nn.Linear(3, 2), mesh)
    x = sw.distribute_tensor(torch.ones(4, 3), mesh, [sw.Shard(0)])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = torch.nn.functional.layer_norm(model(x), (2,)).softmax(0).sum()
        loss.backward()
        optimizer.step()
    return loss.item()

for module in sys.argv[1:]:
    importlib.import_module(module)
plain_program()
before = snapshot()
plain_program()
quiet = changes(before, before := snapshot())
import shardwise as sw
imported = changes(before, before := snapshot())
mesh = sw.simulate((2,), ("tp",))
first_mesh = changes(before, before := snapshot())
program(sw, mesh)
print(json.dumps([quiet, imported, first_mesh, changes(before, snapshot())]))
"""


@functools.cache
def seen() -> tuple[list[str], ...]:
    """What changed in torch: by a plain program, by the import, by the first mesh, by a program on DTensors. Modules of
    torch's that the import loads, or that hooks wait for, are loaded before."""
    loaded = "import sys; before = set(sys.modules); import shardwise; print(*sorted(set(sys.modules) - before))"
    modules = [name for name in run(loaded).split() if name.startswith("torch.")]
    awaited = [hook.module for hook in HOOKS if isinstance(hook, ReplacedLater)]
    return tuple(json.loads(run(SCRIPT, *modules, *awaited)))


OWN_NAMES = (
    r"op shardwise::\w+",
    r"torch\.ops\.shardwise",
    r"torch\.ops\._dir\[:\]",  # the namespaces that were asked for,
    r"torch\.jit\._builtins\._builtin_table\[\d+\]",  # and the ops
    r"torch\.library\.(_defs|_impls)\{shardwise.*\}",
    r"torch\._weights_only_unpickler\._marked_safe_globals_set",
    r"torch\._weights_only_unpickler\._marked_safe_globals_set\{(shardwise|torch\.distributed\.device_mesh)\..*\}",
)


def test_the_comparison_is_quiet_where_nothing_changes() -> None:
    assert seen()[0] == []


def test_the_import_changes_nothing() -> None:
    """It registers names of its own: ops, and what rebuilds a DTensor that torch.load meets."""
    assert [name for name in seen()[1] if not re.fullmatch("|".join(OWN_NAMES), name)] == []


def test_the_first_mesh_changes_what_is_listed() -> None:
    changed = {re.sub(r"\(\)$|\.__wrapped__$|\[\d+\]$", "", name) for name in seen()[2]}
    replaced = {path(hook) for hook in HOOKS if not isinstance(hook, Registered)}
    if not hasattr(checkpoint._CheckpointFrame, "save_inputs"):  # before torch 2.12, where it is left as it is
        replaced.discard("torch.utils.checkpoint._CheckpointFrame")
    hooks = {
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.nn.modules.module._global_parameter_registration_hooks",
    }
    types = {name for name in changed if name.endswith("_foreach_supported_types[:]")}  # DTensor is one of them
    assert types and changed - {"torch.utils.hooks.RemovableHandle.next_id"} == replaced | hooks | types


def test_dtensors_change_nothing_more() -> None:
    numbers = "torch.utils.hooks.RemovableHandle.next_id"  # of handles
    assert set(seen()[3]) <= {numbers}


def home(hook: Replaced | ReplacedLater) -> Any:
    if isinstance(hook, Replaced):
        return hook.home
    module = importlib.import_module(hook.module)
    return module if hook.within is None else getattr(module, hook.within)


def path(hook: Replaced | ReplacedLater) -> str:
    where = home(hook)
    return (
        f"{where.__module__}.{where.__qualname__}.{hook.name}"
        if isinstance(where, type)
        else f"{where.__name__}.{hook.name}"
    )


def test_hooks_are_few_and_each_has_its_reason() -> None:
    assert len(HOOKS) <= 12
    assert all(len(hook.why) > 20 for hook in HOOKS)
    assert all(hasattr(home(hook), hook.name) for hook in HOOKS if not isinstance(hook, Registered))


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_hook_waits_for_a_module_that_is_not_imported(imported: str) -> None:
    script = f"""
import sys, torch, shardwise as sw
if {imported == "before"}:
    import torch.distributed.checkpoint, torch.distributed.fsdp
finders = len(sys.meta_path)
sw.simulate((2,), ("tp",))
print(len(sys.meta_path) - finders, "torch.distributed._state_dict_utils" in sys.modules)
import torch.distributed.checkpoint.state_dict
from torch.distributed._state_dict_utils import _iterate_state_dict
from torch.distributed.checkpoint.staging import StateDictStager
from torch.distributed.fsdp._fully_shard._fsdp_init import _verify_managed_param
hooked = _iterate_state_dict, StateDictStager._offload_tensor, _verify_managed_param
print(len(sys.meta_path) - finders, all(hasattr(f, "__wrapped__") for f in hooked))
"""
    waiting = ["0", "True"] if imported == "before" else ["3", "False"]
    assert run(script).split() == [*waiting, "0", "True"]


def test_neither_torch_compile_nor_torchs_own_dtensor_is_loaded() -> None:
    """Imports that take seconds, and register ops. (Some of torch's kernels for meta tensors load them, all the
    same.)"""
    script = (
        "import torch, shardwise as sw\n"
        "x = sw.distribute_tensor(torch.ones(4, 3), sw.simulate((2,), ('tp',)), [sw.Shard(0)]).requires_grad_()\n"
        "torch.nn.functional.linear(x, x).relu().softmax(0).sum().backward()\n"
        "print(*(name for name in ('torch._dynamo', 'torch.distributed.tensor') if name in sys.modules))"
    )
    assert run(script).split() == []


def test_the_first_call_of_a_program_does_not_wait_for_sympy() -> None:
    """Which torch imports where it adds up shapes, a third of a second. (Its kernels of matrix products do, too.)"""
    script = (
        "import torch, shardwise as sw\n"
        "x = sw.distribute_tensor(torch.ones(4, 3), sw.simulate((2,), ('tp',)), [sw.Shard(0)])\n"
        "x * 2 + x[0]\n"
        "import sys; print('sympy' in sys.modules)"
    )
    assert run(script).split() == ["False"]


# What hooks do to plain tensors: nothing


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 2.0) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


def test_functions_taken_before_the_first_mesh_are_caught() -> None:
    """`f = MyFunction.apply` at the top of a module is how most programs do it."""
    script = """
import torch, shardwise as sw
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.mean()
    @staticmethod
    def backward(ctx, grad):
        return grad * grad.numel()
mean = Mean.apply
x = torch.arange(8.0)
d = sw.distribute_tensor(x, sw.simulate((2,), ("tp",)), [sw.Shard(0)]).requires_grad_()
mean(d).sum().backward()
print(d.grad.full_tensor().tolist() == [8.0] * 8, torch.equal(mean(d).detach().full_tensor(), x * x.mean()))
"""
    assert run(script).split() == ["True", "True"]


PLAIN: dict[str, Callable[[], Any]] = {
    "apply": lambda: Doubled.apply(torch.ones(2)).tolist(),
    "apply by name": lambda: torch.autograd.grad(Doubled.apply(x := torch.ones(2, requires_grad=True), 3.0).sum(), x)[
        0
    ].tolist(),
    "packed": lambda: packed(torch.ones(2, requires_grad=True)),
    "func.grad": lambda: torch.func.grad(lambda x: x.sin().sum())(torch.zeros(3)).tolist(),
    "vmap": lambda: torch.vmap(torch.sum)(torch.ones(2, 3)).tolist(),
    "optimizer": lambda: stepped(nn.Parameter(torch.ones(2))),
}


def packed(x: Tensor) -> list[Any]:
    shapes: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(t.shape), t)[1], lambda t: t):
        (x * x).sum().backward()
    return [*shapes, x.grad.tolist()]  # type: ignore[union-attr]


def stepped(x: nn.Parameter) -> list[float]:
    x.grad = torch.ones(2)
    torch.optim.SGD([x], 0.5).step()
    return x.tolist()


@pytest.mark.parametrize("name", PLAIN)
def test_plain_programs_get_what_torch_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = PLAIN[name]()
    originals = {"apply": torch._C._FunctionBase.__dict__["apply"]}
    for hook in HOOKS:
        if not isinstance(hook, Registered):
            now = getattr(home(hook), hook.name)
            monkeypatch.setattr(home(hook), hook.name, getattr(now, "__wrapped__", originals.get(hook.name, now)))
    assert PLAIN[name]() == mine


def test_a_second_mesh_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_hooks.Replaced, "install", lambda hook: pytest.fail("installed twice"))
    sw.simulate((2,), ("again",))
