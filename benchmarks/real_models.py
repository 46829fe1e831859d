"""The tensor-parallel block in three systems: by hand on plain tensors, with Shardwise, with torch's DTensor.

All three hold the same numbers on the same rank, so that where nothing is masked they compute the same ones: in a fake
process group an all-reduce leaves what it is given.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional as F

import shardwise as sw
from scheduled import Size
from transformer import MEGATRON, Block, Variant

PLAIN, SHARDWISE, TORCH = "by hand", "shardwise", "torch DTensor"

VARIANTS = {
    "RMSNorm, no biases": Variant(norm=nn.RMSNorm, bias=False),
    "LayerNorm, biases": Variant(),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A block to measure, and where."""

    size: Size
    variant: Variant
    mesh: DeviceMesh
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)


# --- Megatron's block, by hand ---


class _Copy(torch.autograd.Function):
    """Megatron's f, in front of weights split by columns: the gradients that the ranks have are terms of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Megatron's g, behind weights split by rows: in place, for nobody else has seen what they gave."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@dataclasses.dataclass(frozen=True)
class ByHand(Variant):
    """What a variant asks of the layout in front of the weights that are split by columns is f."""

    def gathered(self, x: Tensor) -> Tensor:
        return _Copy.apply(x) if torch.is_grad_enabled() else x


class RowParallel(nn.Module):
    """A weight split by rows; its bias is added to the sum, once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        summed = _Reduce.apply(F.linear(x, self.weight))
        return summed if self.bias is None else summed + self.bias


# --- The systems ---


def whole_block(case: Case) -> Block:
    torch.manual_seed(0)
    with case.device:
        return Block(case.size, case.variant).to(case.dtype).requires_grad_(False)


def split_dim(name: str) -> int | None:
    """The dim by which Megatron splits a parameter; None when every rank holds it whole.

    >>> split_dim("attention.query.bias"), split_dim("mlp.down.weight"), split_dim("mlp.down.bias")
    (0, 1, None)
    """
    return next((split["tp"] for pattern, split in MEGATRON.items() if fnmatchcase(name, pattern)), None)


def shard(case: Case, name: str, parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, in memory of its own."""
    dim, rank = split_dim(name), case.mesh.get_local_rank()
    return (parameter if dim is None else parameter.chunk(case.mesh.size(), dim)[rank]).detach().clone()


def with_parameters(whole: Block, make: Callable[[str, Tensor], Tensor]) -> Block:
    """A block like another one, with parameters made from that one's."""
    given = dict(whole.named_parameters())
    block = copy.deepcopy(whole, {id(parameter): parameter for parameter in given.values()})
    for name, parameter in given.items():
        owner, _, attribute = name.rpartition(".")
        setattr(block.get_submodule(owner), attribute, nn.Parameter(make(name, parameter)))
    return block


def plain_block(case: Case, whole: Block) -> Block:
    block = with_parameters(whole, lambda name, parameter: shard(case, name, parameter))
    block.variant = ByHand(**vars(case.variant))
    for module, name in ((block.attention, "output"), (block.mlp, "down")):
        linear = getattr(module, name)
        setattr(module, name, RowParallel(linear.weight, linear.bias))
    return block


def shardwise_block(case: Case, whole: Block) -> Block:
    def distributed(name: str, parameter: Tensor) -> Tensor:
        dim = split_dim(name)
        placement = sw.Replicate() if dim is None else sw.Shard(dim)
        return sw.DTensor.from_local(shard(case, name, parameter), case.mesh, [placement], run_check=False)

    return with_parameters(whole, distributed)


def torch_block(case: Case, whole: Block) -> Block:
    """Through torch's module styles. Outputs stay distributed and the norms are replicated on the mesh, so that all
    parameters are of one kind, as the fused optimizers demand."""
    block = with_parameters(whole, lambda _, parameter: parameter.detach().clone())
    columns = torch_parallel.ColwiseParallel(use_local_output=False)
    rows = torch_parallel.RowwiseParallel(use_local_output=False)
    styles = {
        **dict.fromkeys(("attention.query", "attention.key", "attention.value", "mlp.up"), columns),
        **dict.fromkeys(("attention.output", "mlp.down"), rows),
    }
    torch_parallel.parallelize_module(block, case.mesh, styles, src_data_rank=None)
    for norm in (block.attention_norm, block.mlp_norm):
        for name, parameter in list(norm.named_parameters()):
            setattr(norm, name, nn.Parameter(torch_replicated(case, parameter.detach())))
    return block


def torch_replicated(case: Case, x: Tensor) -> Tensor:
    return torch_tensor.DTensor.from_local(x, case.mesh, [torch_tensor.Replicate()], run_check=False)


def shardwise_replicated(case: Case, x: Tensor) -> Tensor:
    return sw.DTensor.from_local(x, case.mesh, [sw.Replicate()], run_check=False)


@dataclasses.dataclass(frozen=True)
class System:
    """How one of them builds a block from the whole one, and what it takes for an input."""

    block: Callable[[Case, Block], Block]
    replicated: Callable[[Case, Tensor], Tensor]


SYSTEMS = {
    PLAIN: System(plain_block, lambda _, x: x),
    SHARDWISE: System(shardwise_block, shardwise_replicated),
    TORCH: System(torch_block, torch_replicated),
}


# --- The programs ---


PROGRAMS = {"forward": "forward", "forward + backward": "forward_backward", "train step": "step"}
NUM_INPUTS = 4  # taken in turns, so that none is found in a cache


class Work:
    """A block of one system, with what the programs need. Its input wants a gradient, as it does inside a deeper
    model, and its output is given one."""

    def __init__(self, system: str, case: Case, whole: Block) -> None:
        self.block = SYSTEMS[system].block(case, whole)
        self.parameters = list(self.block.parameters())
        replicated = SYSTEMS[system].replicated
        drawn = [replicated(case, x) for x in activations(case, NUM_INPUTS + 1)]
        self.gradient = drawn.pop()
        self.inputs = [x.requires_grad_() for x in drawn]
        self.turns: Iterator[Tensor] = itertools.cycle(self.inputs)
        # So small a rate that many steps leave the numbers, and so their cost, as they were.
        fused = case.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-9, weight_decay=0.0, fused=fused, foreach=not fused)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.block(next(self.turns))

    def forward_backward(self) -> None:
        x = next(self.turns)
        for leaf in (x, *self.parameters):
            leaf.grad = None
        self.block(x).backward(self.gradient)

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def forget_gradients(self) -> None:
        for leaf in (*self.inputs, *self.parameters):
            leaf.grad = None


def activations(case: Case, count: int) -> list[Tensor]:
    """Numbers such as the residual stream has, the same for every system."""
    generator = torch.Generator(case.device).manual_seed(1)
    shape = (case.size.batch, case.size.seq, case.size.width)
    return [
        torch.randn(shape, generator=generator, device=case.device, dtype=torch.float32).to(case.dtype)
        for _ in range(count)
    ]
