"""A tensor-parallel MLP on two real ranks, against torch's module styles in the same run.

    python benchmarks/gloo_mlp.py            print the table
    python benchmarks/gloo_mlp.py --write    and write benchmarks/results/gloo-mlp-<date>.md
    python benchmarks/gloo_mlp.py --profile  instead, where a rank's time goes, function by function

Two processes, joined by Gloo, one thread each. The first layer is sharded by columns, the second by rows, and the
output is whole on every rank: `ColwiseParallel` and `RowwiseParallel`, or layouts alone. Both libraries run in the same
processes and take turns, in another order every round, so that noise on the machine hits them alike. "Plain" is
ordinary torch on one rank's sizes, with the same all_reduces. Numbers are those of the slower rank. CPU time is
that of the process, which what else runs on the machine does not lengthen. A missed target prints MISS; the exit status
stays 0.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import os
import platform
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as styles
import torch.multiprocessing
from rich.console import Console
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import shardwise as sw
from race import Row, Table, Timing, seconds

WIDTH, HIDDEN, NUM_RANKS = 1024, 4096, 2
NUM_TOKENS = (1024, 64)
NUM_ROUNDS, NUM_CALLS, NUM_WARM_UP = 15, {1024: 2, 64: 10}, 1
PLAIN, TORCH, SHARDWISE = "plain", "torch's module styles", "shardwise"
TARGET = 1.0
Step = Callable[[], object]
Found = dict[str, tuple[tuple[float, ...], tuple[float, ...]]]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


# The three systems, each as a module and its input


def by_styles(mesh: DeviceMesh, x: Tensor) -> Step:
    plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
    module = styles.parallelize_module(MLP(), mesh, plan)
    return _step(module, x.clone().requires_grad_())


def by_layouts(mesh: DeviceMesh, x: Tensor) -> Step:
    where = {"up.weight": 0, "up.bias": 0, "down.weight": 1}

    def lay(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            dim = where.get(f"{name}.{kind}")
            placements = [sw.Replicate() if dim is None else sw.Shard(dim)]
            setattr(module, kind, nn.Parameter(sw.distribute_tensor(parameter.detach(), mesh, placements)))

    module = sw.distribute_module(MLP(), mesh, lay)
    whole = [sw.Replicate()]
    data = sw.distribute_tensor(x, mesh, whole).requires_grad_()
    return _step(module, data, lambda y: y.redistribute(placements=whole))


class _Sum(torch.autograd.Function):
    """What is summed over the ranks on the way `forward`, or on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.forward = forward
        if forward:
            dist.all_reduce(x)
            ctx.mark_dirty(x)
            return x
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def,override]
        if not ctx.forward:
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad, None


def by_hand(mesh: DeviceMesh, x: Tensor) -> Step:
    whole, rank = MLP(), mesh.get_rank()
    up, down = nn.Linear(WIDTH, HIDDEN // NUM_RANKS), nn.Linear(HIDDEN // NUM_RANKS, WIDTH, bias=False)
    bias = nn.Parameter(whole.down.bias.detach().clone())
    with torch.no_grad():
        for own, of_all, dim in ((up.weight, whole.up.weight, 0), (up.bias, whole.up.bias, 0)):
            own.copy_(of_all.chunk(NUM_RANKS, dim)[rank])
        down.weight.copy_(whole.down.weight.chunk(NUM_RANKS, 1)[rank])
    module = nn.ModuleList([up, down])
    module.bias = bias

    def forward(x: Tensor) -> Tensor:
        return _Sum.apply(down(F.gelu(up(_Sum.apply(x, False)))), True) + bias

    return _step(module, x.clone().requires_grad_(), call=forward)


def _step(
    module: nn.Module, x: Tensor, finish: Callable[[Tensor], Tensor] = lambda y: y, call: Callable | None = None
) -> Step:
    """Forward and backward, gradients of parameters and input included, with a gradient that is whole on every rank."""
    leaves = [x, *module.parameters()]
    forward, grad = call or module, None

    def step() -> Tensor:
        nonlocal grad
        for leaf in leaves:
            leaf.grad = None
        y = finish(forward(x))
        _await(y)
        grad = torch.ones_like(y) if grad is None else grad
        y.backward(grad)
        return y

    return step


def _await(y: Tensor) -> None:
    """Wait for an output, as its first use would: torch's styles hand it out while it is still being reduced."""
    if isinstance(y, AsyncCollectiveTensor):
        y.wait()


SYSTEMS: dict[str, Callable[[DeviceMesh, Tensor], Step]] = {PLAIN: by_hand, TORCH: by_styles, SHARDWISE: by_layouts}


# On each rank


def measure(steps: dict[str, Step], num_calls: int, num_rounds: int) -> Found:
    """Seconds per call, on the wall and of this process, of the rank that takes longer. All ranks shuffle alike, and
    begin each slice together."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order, chance = list(steps), random.Random(0)
    for _ in range(num_rounds):
        chance.shuffle(order)
        for name in order:
            for _ in range(NUM_WARM_UP):
                steps[name]()
            dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            for _ in range(num_calls):
                steps[name]()
            wall, work = time.perf_counter() - start, time.process_time() - worked
            samples[name].append((wall / num_calls, work / num_calls))
    found = {}
    for name, own in samples.items():
        longer = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(longer, dist.ReduceOp.MAX)
        wall, work = longer.T.tolist()
        found[name] = (tuple(wall), tuple(work))
    return found


def check(steps: dict[str, Step]) -> None:
    """All systems compute the same."""
    results = [step() for step in steps.values()]
    plain = [y.to_local() if isinstance(y, sw.DTensor) else y for y in results]
    for y in plain[1:]:
        torch.testing.assert_close(y, plain[0], atol=1e-4, rtol=1e-4)


def rank_main(rank: int, folder: str, num_rounds: int, profile: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    found = {}
    for num_tokens in NUM_TOKENS:
        torch.manual_seed(1)
        x = torch.randn(1, num_tokens, WIDTH)
        steps = {name: make(mesh, x) for name, make in SYSTEMS.items()}
        check(steps)
        if profile:
            _profile(steps, NUM_CALLS[num_tokens] * 5, rank, num_tokens)
        else:
            found[num_tokens] = measure(steps, NUM_CALLS[num_tokens], num_rounds)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def _profile(steps: dict[str, Step], num_calls: int, rank: int, num_tokens: int) -> None:
    for name, step in steps.items():
        with torch.profiler.profile() as ops, cProfile.Profile() as functions:
            for _ in range(num_calls):
                step()
        if rank == 0:
            print(f"{name}, {num_tokens} tokens, {num_calls} calls")
            print(ops.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))
            pstats.Stats(functions).sort_stats("tottime").print_stats(12)
        dist.barrier()


# Here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gloo-mlp-") as folder:
        given = (folder, options.rounds, options.profile)
        torch.multiprocessing.spawn(rank_main, given, nprocs=NUM_RANKS)
        found = torch.load(f"{folder}/found")
    if options.profile:
        return
    table = Table("Forward and backward of a tensor-parallel MLP", COLUMNS, list(map(_row, found.items())))
    table.print(Console(width=180))
    if options.write:
        _write(table)


COLUMNS = ("tokens", PLAIN, TORCH, SHARDWISE, "shardwise / torch's", "of CPU time", "shardwise / plain", "target", "")


def _row(measured: tuple[int, Found]) -> Row:
    num_tokens, found = measured
    walls, works = ({name: Timing(own[i]) for name, own in found.items()} for i in range(2))
    ours, ratio = walls[SHARDWISE], walls[SHARDWISE].ratio_to(walls[TORCH])
    medians = tuple(seconds(walls[name].median) for name in (PLAIN, TORCH, SHARDWISE))
    beside_torch = f"{ratio:.2f} {_spread(ours, walls[TORCH])}"
    of_work = f"{works[SHARDWISE].ratio_to(works[TORCH]):.2f} {_spread(works[SHARDWISE], works[TORCH])}"
    verdict = "pass" if ratio <= TARGET else "MISS"
    plain = f"{ours.ratio_to(walls[PLAIN]):.2f}"
    return f"1 x {num_tokens}", *medians, beside_torch, of_work, plain, f"{TARGET:.2f}", verdict


def _spread(ours: Timing, theirs: Timing) -> str:
    """The middle half of the rounds' ratios."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours.samples, theirs.samples, strict=True)], n=4)
    return f"({low:.2f} to {high:.2f})"


def _write(table: Table) -> None:
    today = datetime.date.today().isoformat()
    about = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {NUM_RANKS} ranks on Gloo with one thread each; width {WIDTH}, hidden {HIDDEN}, "
        f"float32. Medians of {NUM_ROUNDS} interleaved rounds, of the slower rank; ratios are medians of the rounds' "
        f"ratios, with their middle half."
    )
    path = Path(__file__).parent / "results" / f"gloo-mlp-{today}.md"
    path.write_text(
        f"# Two Gloo ranks, {today}\n\n`python benchmarks/gloo_mlp.py --write`: {about}\n\n{table.markdown()}"
    )


if __name__ == "__main__":
    main()
