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

import os
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as styles
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import shardwise as sw
from race import Call, Row, Table, options_of, report, seconds
from ranks import Times, middle_half, on_gloo, profile, race_on_ranks

WIDTH, HIDDEN, NUM_RANKS = 1024, 4096, 2
NUM_TOKENS = (1024, 64)
NUM_ROUNDS, NUM_CALLS = 15, {1024: 2, 64: 10}
PLAIN, TORCH, SHARDWISE = "plain", "torch's module styles", "shardwise"
TARGET = 1.0
Found = dict[str, Times]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


# The three systems, each as a module and its input


def by_styles(mesh: DeviceMesh, x: Tensor) -> Call:
    plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
    module = styles.parallelize_module(MLP(), mesh, plan)
    return _step(module, x.clone().requires_grad_())


def by_layouts(mesh: DeviceMesh, x: Tensor) -> Call:
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


def by_hand(mesh: DeviceMesh, x: Tensor) -> Call:
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
) -> Call:
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


SYSTEMS: dict[str, Callable[[DeviceMesh, Tensor], Call]] = {PLAIN: by_hand, TORCH: by_styles, SHARDWISE: by_layouts}


# On each rank


def check(steps: dict[str, Call]) -> None:
    """All systems compute the same."""
    results = [step() for step in steps.values()]
    plain = [y.to_local() if isinstance(y, sw.DTensor) else y for y in results]
    for y in plain[1:]:
        torch.testing.assert_close(y, plain[0], atol=1e-4, rtol=1e-4)


def on_rank(num_rounds: int, profiled: bool) -> dict[int, Found]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    found = {}
    for num_tokens in NUM_TOKENS:
        torch.manual_seed(1)
        x = torch.randn(1, num_tokens, WIDTH)
        steps = {name: make(mesh, x) for name, make in SYSTEMS.items()}
        check(steps)
        if profiled:
            profile(steps, NUM_CALLS[num_tokens] * 5, f"{num_tokens} tokens, ")
        else:
            found[num_tokens] = race_on_ranks(steps, num_calls=NUM_CALLS[num_tokens], num_rounds=num_rounds)
    return found


# Here


def main() -> None:
    parser = options_of(__doc__, num_rounds=NUM_ROUNDS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    found = on_gloo(NUM_RANKS, on_rank, options.rounds, options.profile)
    if options.profile:
        return
    about = (
        f"{NUM_RANKS} ranks on Gloo with one thread each; width {WIDTH}, hidden {HIDDEN}, float32. Medians of "
        f"{options.rounds} interleaved rounds, of the slower rank; ratios are medians of the rounds' ratios, with "
        f"their middle half."
    )
    tables = [Table("Forward and backward of a tensor-parallel MLP", COLUMNS, list(map(_row, found.items())))]
    report("gloo-mlp", "Two Gloo ranks", about, tables, write=options.write)


COLUMNS = ("tokens", PLAIN, TORCH, SHARDWISE, "shardwise / torch's", "of CPU time", "shardwise / plain", "target", "")


def _row(measured: tuple[int, Found]) -> Row:
    num_tokens, found = measured
    ours, theirs = found[SHARDWISE], found[TORCH]
    ratio = ours.wall.ratio_to(theirs.wall)
    medians = tuple(seconds(found[name].wall.median) for name in (PLAIN, TORCH, SHARDWISE))
    beside_torch = f"{ratio:.2f} {middle_half(ours.wall, theirs.wall)}"
    of_work = f"{ours.work.ratio_to(theirs.work):.2f} {middle_half(ours.work, theirs.work)}"
    verdict = "pass" if ratio <= TARGET else "MISS"
    plain = f"{ours.wall.ratio_to(found[PLAIN].wall):.2f}"
    return f"1 x {num_tokens}", *medians, beside_torch, of_work, plain, f"{TARGET:.2f}", verdict


if __name__ == "__main__":
    main()
