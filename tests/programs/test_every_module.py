"""Every module of torch.nn, with its own test inputs: sharded parameters and inputs give what plain ones give."""

from __future__ import annotations

import copy
import random
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compare import check_shards
from sweep import mesh_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import shardwise as sw
from shardwise.experimental import implicit_replication
from shardwise.parallel import distribute_module
from shardwise.proof.kit.samples import all_operators

pytestmark = pytest.mark.filterwarnings(
    "ignore::shardwise.errors.FallbackWarning", "ignore::UserWarning", "ignore::FutureWarning"
)

MESHES = ((2,), (3,), (2, 2))
MOST_INPUTS = 3
RANDOM = ("Dropout", "RReLU", "FractionalMaxPool")
all_operators()  # imports what torch's samples need, and leaves everything as it was
with warnings.catch_warnings(action="ignore"):
    from torch.testing._internal.common_modules import module_db

MODULES = {info.name.removeprefix("nn."): info for info in module_db if "Lazy" not in info.name}


def anywhere(x: Tensor, mesh: Any, chance: random.Random, *, pending: bool) -> sw.DTensor:
    ways: list[sw.Placement] = [sw.Replicate(), *(sw.Shard(dim) for dim in range(x.dim()))]
    if pending and x.is_floating_point():
        ways.append(sw.Partial())
    return sw.distribute_tensor(x.detach(), mesh, [chance.choice(ways) for _ in range(mesh.ndim)])


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def check_close(found: Tensor, expected: Tensor) -> None:
    assert isinstance(found, sw.DTensor)
    check_shards(found)
    torch.testing.assert_close(found.detach().full_tensor(), expected.detach(), rtol=1e-6, atol=1e-8, equal_nan=True)


def check_module(module: nn.Module, args: Any, mesh: Any, chance: random.Random) -> None:
    """Forward, backward and statistics of a module and of its sharded copy."""

    def shard(name: str, part: nn.Module, mesh: Any) -> None:
        for key, p in part._parameters.items():
            if p is not None:
                made = anywhere(p, mesh, chance, pending=False)
                part._parameters[key] = nn.Parameter(made, requires_grad=p.requires_grad)

    dist = distribute_module(copy.deepcopy(module), mesh, shard)
    plain_args = tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, args)
    dist_args = tree_map(
        lambda x: (
            anywhere(x, mesh, chance, pending=True).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        ),
        args,
    )
    torch.manual_seed(1)
    expected = tensors(module(*plain_args[0], **plain_args[1]))
    torch.manual_seed(1)
    found = tensors(dist(*dist_args[0], **dist_args[1]))
    if any(name in type(module).__name__ for name in RANDOM) and module.training:
        assert [x.shape for x in found] == [x.shape for x in expected]
        return
    assert [x.requires_grad for x in found] == [x.requires_grad for x in expected]
    for x, y in zip(found, expected, strict=True):
        check_close(x, y)
    seeds = [torch.randn_like(y) for y in expected if y.requires_grad]
    if seeds:
        torch.autograd.backward([y for y in expected if y.requires_grad], seeds)
        torch.autograd.backward(
            [x for x in found if x.requires_grad], [sw.distribute_tensor(seed, mesh) for seed in seeds]
        )
    pairs = [*zip(tensors(dist_args), tensors(plain_args), strict=True), *zip(dist.parameters(), module.parameters())]
    for x, y in pairs:
        assert (x.grad is None) == (y.grad is None) or (y.grad is None and not x.grad.full_tensor().any())
        if y.grad is not None:
            check_close(x.grad, y.grad)
    for x, y in zip(dist.buffers(), module.buffers(), strict=True):
        check_close(x, y)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_torchs(name: str) -> None:
    info, tried = MODULES[name], 0
    chance = random.Random(name)
    for training in (True, False):
        inputs = list(info.module_inputs_func(info, "cpu", torch.float64, requires_grad=True, training=training))
        inputs = [x for x in inputs if x.forward_input is not None]
        for given in chance.sample(inputs, min(MOST_INPUTS, len(inputs))):
            args = (given.forward_input.args, given.forward_input.kwargs)
            if any(x.layout is not torch.strided for x in tensors(args)):
                continue
            torch.manual_seed(0)
            module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).double()
            module.train(training)
            try:
                copy.deepcopy(module)(*args[0], **args[1])
            except (RuntimeError, TypeError, ValueError, AssertionError):
                continue  # a module or an input that torch itself refuses in double precision
            with implicit_replication() if "Transformer" in name else nullcontext():  # masks of their own
                check_module(module, args, mesh_of(MESHES[tried % len(MESHES)]), chance)
            tried += 1
    assert tried, "nothing was compared"
