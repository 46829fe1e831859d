"""A captured train step of an eight-layer GPT with its loss on a GPU, beside the same by hand, compiled by torch.

    python benchmarks/captured_gpt_gpu.py                       on the GPU; minutes, most of them the compilers'
    python benchmarks/captured_gpt_gpu.py --write               and write benchmarks/results/captured-gpt-gpu-<date>.md
    python benchmarks/captured_gpt_gpu.py --device cpu --tiny   tries all of it where there is no GPU

One process is rank 1 of 8 in torch's fake process group, whose collectives return at once: two ranks, with batches of
their own, times four tensor-parallel ones. Either each of the two has all parameters, and gradients are reduced; or
each has half of every parameter, gathered where it is used, and gradients are reduced and scattered. Both are said by
layouts alone; by hand they are Megatron's functions, a cross entropy over the vocabulary's parts, and a gather in front
of every weight. By hand, compiled: forward and backward by one torch.compile, the optimizer's step (AdamW, foreach) by
another, and gathers by torch's functional one: torch 2.11 compiled a gather into given memory without its gradient, and
a third of the products of matrices was missing. So these are counted, compiled and not.
The systems take turns in short slices; a ratio is the median of the ratios within the rounds. Each has a process of its
own, and all compile at once.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from apart import Apart, Made, clock_apart
from on_device import clock_of, kernels_of
from race import Call, Table, Timing, race, seconds
from real_models import PLAIN, SHARDWISE, with_parameters
from real_sizes import quieten_torch, versions
from scheduled import Size
from shardwise.debug import CommDebugMode
from transformer import GPT, MEGATRON, MLP, VOCABULARY, Attention, Block, Variant, token_ids

BATCHES, TENSOR = 2, 4
SIZE = Size(4, 2048, 4096, tp=TENSOR, dp=BATCHES, layers=8)
TINY = Size(4, 16, 64, tp=TENSOR, dp=BATCHES, layers=2)
COMPILED, CAPTURED = f"{PLAIN}, compiled", "captured"
LIMIT = 1.02
PRODUCTS = "gemm", "nvjet", "cutlass", "aten::mm", "aten::addmm", "aten::bmm"
"""Parts of the names of kernels that are products of matrices."""
WAYS = {"data × tensor parallel": False, "fully sharded × tensor parallel": True}


@dataclass(frozen=True)
class Case:
    """A GPT to train, and how."""

    size: Size
    mesh: DeviceMesh
    fully_sharded: bool

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def whole_gpt(case: Case) -> GPT:
    torch.manual_seed(0)
    torch.set_default_dtype(case.dtype)  # there is no room for eight of them in float32
    try:
        with case.device:
            variant = Variant(norm=nn.RMSNorm, bias=False)
            return GPT(case.size, variant, num_blocks=case.size.layers).requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def tensor_dim(name: str) -> int | None:
    """By which a parameter is split along the tensor-parallel axis."""
    splits = {**MEGATRON, **VOCABULARY}
    return next((split["tp"] for pattern, split in splits.items() if fnmatchcase(name, pattern)), None)


def batches(case: Case) -> Iterator[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return itertools.cycle([tuple(x.to(case.device) for x in token_ids(case.size)) for _ in range(4)])


# --- By layouts ---


def laid_out(case: Case, whole: GPT) -> GPT:
    def distributed(name: str, parameter: Tensor) -> Tensor:
        dim = tensor_dim(name)
        axes: dict[int, tuple[str, ...]] = {} if dim is None else {dim: ("tp",)}
        if case.fully_sharded:
            axes[0] = (*axes.get(0, ()), "batch")
        return sw.distribute_tensor(parameter, case.mesh, axes)

    return with_parameters(whole, distributed)


def split_batch(case: Case, x: Tensor) -> Tensor:
    return sw.distribute_tensor(x, case.mesh, {0: ("batch",)})


# --- By hand ---


class _Copy(torch.autograd.Function):
    """In front of weights split by columns: gradients are terms of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """Behind weights split by rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    """A weight from its parts, which get their part of the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = part.new_empty((BATCHES * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        part = grad.new_empty((grad.shape[0] // BATCHES, *grad.shape[1:]))
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None


class ByHand(nn.Module):
    """One rank's part of the GPT."""

    def __init__(self, case: Case, whole: GPT, *, compiled: bool = False) -> None:
        super().__init__()
        self.compiled = compiled
        self.tp, self.batch = case.mesh.get_group("tp"), case.mesh.get_group("batch")
        self.rank, self.fully_sharded = case.mesh.get_local_rank("tp"), case.fully_sharded
        self.part = with_parameters(whole, lambda name, parameter: self.own(case, name, parameter))

    def own(self, case: Case, name: str, parameter: Tensor) -> Tensor:
        dim = tensor_dim(name)
        part = parameter if dim is None else parameter.chunk(TENSOR, dim)[self.rank]
        if case.fully_sharded:
            part = part.chunk(BATCHES)[case.mesh.get_local_rank("batch")]
        return part.detach().clone()

    def weight(self, module: nn.Module) -> Tensor:
        own: Any = module.weight
        if not self.fully_sharded:
            return own
        return all_gather_tensor_autograd(own, 0, self.batch) if self.compiled else _Gather.apply(own, self.batch)

    def normed(self, norm: Any, x: Tensor) -> Tensor:
        """As it goes into weights that are split by columns."""
        return _Copy.apply(F.rms_norm(x, x.shape[-1:], self.weight(norm), norm.eps), self.tp)

    def attention(self, module: Attention, x: Tensor) -> Tensor:
        heads = [module.by_heads(F.linear(x, self.weight(w))) for w in (module.query, module.key, module.value)]
        mixed = module.attend(*heads).transpose(1, 2).contiguous().view(*x.shape[:2], -1)
        return _Reduce.apply(F.linear(mixed, self.weight(module.output)), self.tp)

    def mlp(self, module: MLP, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, self.weight(module.up)))
        return _Reduce.apply(F.linear(hidden, self.weight(module.down)), self.tp)

    def block(self, module: Block, x: Tensor) -> Tensor:
        x = x + self.attention(module.attention, self.normed(module.attention_norm, x))
        return x + self.mlp(module.mlp, self.normed(module.mlp_norm, x))

    def here(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Which ids are among those of this rank, and where."""
        local = ids - self.rank * count
        place = local.clamp(0, count - 1)
        return local == place, place

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        table = self.weight(self.part.tokens)
        mine, place = self.here(tokens, len(table))
        found = torch.where(mine.unsqueeze(-1), F.embedding(place, table), 0)
        x = _Reduce.apply(found, self.tp) + self.weight(self.part.positions)
        for block in self.part.blocks:
            x = self.block(block, x)
        logits = F.linear(self.normed(self.part.norm, x), self.weight(self.part.head)).flatten(0, 1)
        return self.loss(logits, targets.flatten())

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        top = logits.detach().amax(1).float()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.tp)
        less = logits.float() - top.unsqueeze(1)
        mine, place = self.here(targets, logits.shape[1])
        picked = torch.where(mine, less.gather(1, place.unsqueeze(1)).squeeze(1), 0)
        total, picked = _Reduce.apply(torch.stack([less.exp().sum(1), picked]), self.tp).unbind()
        return (total.log() - picked).sum() / (len(targets) * BATCHES)

    def reduce_gradients(self) -> None:
        if not self.fully_sharded:
            for parameter in self.parameters():
                dist.all_reduce(parameter.grad, group=self.batch)


# --- The systems ---


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0, foreach=True)


def by_hand(case: Case, *, compiled: bool) -> Call:
    model = ByHand(case, whole_gpt(case), compiled=compiled)
    optimizer, turns = adamw(model), batches(case)
    run, update = (torch.compile(model), torch.compile(optimizer.step)) if compiled else (model, optimizer.step)

    def own_batch() -> list[Tensor]:
        return [x.chunk(BATCHES)[case.mesh.get_local_rank("batch")] for x in next(turns)]

    def step() -> None:
        optimizer.zero_grad()
        run(*own_batch()).backward()
        model.reduce_gradients()
        update()

    if compiled:
        check_products(run, ByHand(case, whole_gpt(case)), own_batch())
    return step


remarks: list[str] = []


def check_products(run: Callable[..., Tensor], other: nn.Module, batch: list[Tensor]) -> None:
    """A baseline that leaves out a part of the work is none. (Gradients tell nothing: in a fake group what is reduced
    and scattered is whatever was in memory.)"""
    device = batch[0].device
    ours, theirs = (_num_products(lambda: compute(*batch).backward(), device) for compute in (run, other))  # noqa: B023
    if ours != theirs:
        remarks.append(f"compiled, forward and backward by hand have {ours} products of matrices, and {theirs} without")


def _num_products(call: Callable[[], None], device: torch.device) -> int:
    counts = kernels_of(call, device).counts
    return sum(count for name, count in counts.items() if any(part in name for part in PRODUCTS))


def by_layouts(case: Case, *, captured: bool) -> Call:
    model = laid_out(case, whole_gpt(case))
    optimizer = adamw(model)
    turns = itertools.cycle([tuple(split_batch(case, x) for x in next(batches(case))) for _ in range(4)])

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()

    run: Callable[..., Any] = sw.compile(step) if captured else step
    return lambda: run(*next(turns))


SYSTEMS: dict[str, Callable[[Case], Call]] = {
    PLAIN: lambda case: by_hand(case, compiled=False),
    COMPILED: lambda case: by_hand(case, compiled=True),
    SHARDWISE: lambda case: by_layouts(case, captured=False),
    CAPTURED: lambda case: by_layouts(case, captured=True),
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that somebody asks torch.distributed for."""
    found: Counter[str] = Counter()
    names = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
    before = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return before[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counting(name))
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def collectives_of(system: str, call: Call) -> int | None:
    if system == COMPILED:
        return None
    if system == PLAIN:
        with counted() as found:
            call()
        return found.total()
    with CommDebugMode() as comms:
        call()
    return comms.get_total_counts()


# --- The report ---


@dataclass(frozen=True)
class About:
    """What a process says of its system: how many collectives a step has, and what is wrong with it."""

    collectives: int | None
    remarks: list[str]


def made(system: str, way: str, device: str, tiny: bool) -> Made:
    torch.set_num_threads(1)
    quieten_torch()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=BATCHES * TENSOR)
    mesh = init_device_mesh(device, (BATCHES, TENSOR), mesh_dim_names=("batch", "tp"))
    call = SYSTEMS[system](Case(TINY if tiny else SIZE, mesh, WAYS[way]))
    if device == "cuda":
        torch.cuda.empty_cache()  # the whole model was there
    for _ in range(6):
        call()
    return call, clock_of(torch.device(device)), About(collectives_of(system, call), remarks)


def ready(systems: dict[str, Apart], until: float, said: list[str]) -> dict[str, About]:
    """What those say of themselves that can be measured."""
    found = {}
    for name, call in systems.items():
        try:
            found[name] = call.wait(until)
        except RuntimeError as error:
            said.append(f"could not be run: {name}: {error}")
        else:
            said += found[name].remarks
    return found


def table_of(way: str, size: Size, timings: dict[str, Timing], about: dict[str, About]) -> Table:
    rows = []
    for name, timing in timings.items():
        ratios = {to: timing.ratio_to(timings[to]) for to in (PLAIN, COMPILED) if to in timings}
        judged = ("", "")
        if name == CAPTURED and COMPILED in ratios:
            judged = f"≤ {LIMIT} x {COMPILED}", "pass" if ratios[COMPILED] <= LIMIT else "MISS"
        count = "-" if about[name].collectives is None else f"{about[name].collectives}"
        each = (f"{ratios[to]:.3f}" if to in ratios else "-" for to in (PLAIN, COMPILED))
        rows.append((name, seconds(timing.median), count, *each, *judged))
    columns = ("system", "time", "collectives", f"x {PLAIN}", f"x {COMPILED}", "limit", "")
    return Table(f"{way}: {size}, train step", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write a dated report")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder of the report")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run, for trying this out")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--patience", type=float, default=600, help="seconds in which systems must be compiled")
    options = parser.parse_args()
    until = time.monotonic() + options.patience
    ways = {way: {name: Apart(made, name, way, options.device, options.tiny) for name in SYSTEMS} for way in WAYS}
    console, said, tables = Console(width=150), list[str](), []
    try:
        for way, systems in ways.items():
            about = ready(systems, until, said)
            calls: dict[str, Call] = {name: systems[name] for name in about}
            timings = race(calls, num_rounds=options.rounds, clock=clock_apart)
            tables.append(table_of(way, TINY if options.tiny else SIZE, timings, about))
            tables[-1].print(console)
            if options.write:  # after each, so that a run that is cut short has what it has measured
                write(options, tables, said)
    finally:
        for call in (call for systems in ways.values() for call in systems.values()):
            call.close()
    for remark in said:
        console.print(remark, style="yellow", markup=False)


def write(options: argparse.Namespace, tables: list[Table], said: list[str]) -> None:
    today = datetime.date.today()
    text = [f"# A captured GPT on a GPU, {today}\n", f"{versions(torch.device(options.device))}.\n"]
    text += [*(table.markdown() for table in tables), *(f"- {remark}" for remark in said), ""]
    (options.out / f"captured-gpt-gpu-{today}.md").write_text("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
