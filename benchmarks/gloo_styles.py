"""A transformer block by module styles, ours and torch's, on two real ranks in the same run.

    python benchmarks/gloo_styles.py            print the table
    python benchmarks/gloo_styles.py --write    and write benchmarks/results/gloo-styles-<date>.md
    python benchmarks/gloo_styles.py --profile  instead, where a rank's time goes, function by function

The same block, the same plan, the same plain input; the names of the styles come from one library or the other. How it
is measured is said in gloo_mlp.py. "Plain" is the block on one rank's sizes without communication: nobody is faster,
and how much there is to save is seen from it. The second table has no communication either: a fake group, and a block
so small that the time is the host's. Where transformers is installed, also a Llama by the plan that it carries, against
transformers' own tensor parallelism, which is made of torch's DTensors. A missed target prints MISS; the exit status
stays 0.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.tensor as their_tensors
import torch.distributed.tensor.parallel as their_styles
import torch.multiprocessing
from rich.console import Console
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
import shardwise.parallel
from gloo_mlp import NUM_RANKS, Found, Step, _profile, _spread, measure
from race import Row, Table, Timing, race, seconds

HEAD_DIM = 32
PLAIN, TORCH, SHARDWISE = "plain", "torch's styles", "shardwise's styles"
SIZES = ((64, 256), (64, 1024), (1024, 256), (1024, 1024))  # tokens, width
TARGETS = {64: 0.7, 1024: 1.0}
HOST_SIZE, HOST_TARGET = (8, 64), 0.7
NUM_ROUNDS = 15
NUM_CALLS = {64: 10, 1024: 1}


class Attention(nn.Module):
    def __init__(self, width: int, num_ranks: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width // num_ranks) for _ in range(3))
        self.out = nn.Linear(width // num_ranks, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, num_ranks: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width // num_ranks), nn.Linear(4 * width // num_ranks, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """`num_ranks` other than 1: as large as one rank's share."""

    def __init__(self, width: int, num_ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, num_ranks)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, num_ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.up")
ROWS = ("attention.out", "mlp.down")


def tensor_parallel(styles: Any, tensors: Any) -> dict[str, Any]:
    columns, rows = {name: styles.ColwiseParallel() for name in COLUMNS}, {n: styles.RowwiseParallel() for n in ROWS}
    return columns | rows


def sequence_parallel(styles: Any, tensors: Any) -> dict[str, Any]:
    """The stream is sharded along the sequence."""
    whole, sequence = tensors.Replicate(), tensors.Shard(1)
    into = {"input_layouts": (sequence,), "desired_input_layouts": (whole,)}
    return {
        **{name: styles.SequenceParallel() for name in ("norm1", "norm2")},
        **{name: styles.PrepareModuleInput(**into) for name in ("attention", "mlp")},
        **{name: styles.ColwiseParallel() for name in COLUMNS},
        **{name: styles.RowwiseParallel(output_layouts=sequence) for name in ROWS},
    }


PLANS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "tensor parallel": tensor_parallel,
    "with sequence parallel": sequence_parallel,
}
LIBRARIES = {TORCH: (their_styles, their_tensors), SHARDWISE: (shardwise.parallel, shardwise)}


def steps_of(mesh: DeviceMesh, plan: str, num_tokens: int, width: int) -> dict[str, Step]:
    torch.manual_seed(1)
    x = torch.randn(1, num_tokens, width)
    given = x if plan == "tensor parallel" else x.chunk(NUM_RANKS, 1)[mesh.get_local_rank()]
    steps = {PLAIN: _step(Block(width, NUM_RANKS), x)}
    for name, (styles, tensors) in LIBRARIES.items():
        block = styles.parallelize_module(Block(width), mesh, PLANS[plan](styles, tensors))
        steps[name] = _step(block, given)
    return steps


def _step(block: nn.Module, x: Tensor) -> Step:
    """Forward and backward, gradients of parameters and input included."""
    x = x.clone().requires_grad_()
    leaves = [x, *block.parameters()]
    grad: Tensor | None = None

    def step() -> list[Tensor]:
        nonlocal grad
        for leaf in leaves:
            leaf.grad = None
        y = block(x)
        y = y.wait() if isinstance(y, AsyncCollectiveTensor) else y
        grad = torch.ones_like(y) if grad is None else grad
        y.backward(grad)
        return [y.detach(), x.grad]

    return step


def check(steps: dict[str, Step]) -> None:
    """Both libraries compute the same."""
    for ours, theirs in zip(steps[SHARDWISE](), steps[TORCH](), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


Case = tuple[str, int, int]


def rank_main(rank: int, folder: str, num_rounds: int, profile: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    found: dict[Case, Found] = {}
    for plan in PLANS:
        for num_tokens, width in SIZES:
            steps = steps_of(mesh, plan, num_tokens, width)
            check(steps)
            if profile:
                _profile(steps, NUM_CALLS[num_tokens] * 5, rank, num_tokens)
            else:
                found[plan, num_tokens, width] = measure(steps, NUM_CALLS[num_tokens], num_rounds)
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def host_main(rank: int, folder: str, num_rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    calls = {plan: steps_of(mesh, plan, *HOST_SIZE) for plan in PLANS}
    if find_spec("transformers"):
        calls |= llama_calls(mesh)
    timings = {name: race(systems, num_rounds=num_rounds) for name, systems in calls.items()}
    torch.save(
        {plan: {name: t.samples for name, t in found.items()} for plan, found in timings.items()}, f"{folder}/host"
    )


def llama_calls(mesh: DeviceMesh) -> dict[str, dict[str, Step]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    shardwise.parallel.parallelize_module(ours, mesh, ours._tp_plan)
    apply_tensor_parallelism(theirs, mesh, theirs._tp_plan)
    nets, ids = {PLAIN: plain, TORCH: theirs, SHARDWISE: ours}, torch.randint(64, (1, 16))

    def train(net: nn.Module) -> None:
        net.zero_grad()
        net(ids, labels=ids).loss.backward()

    return {
        "Llama's own, training": {name: partial(train, net) for name, net in nets.items()},
        "Llama's own, inference": {name: torch.no_grad()(partial(net, ids)) for name, net in nets.items()},
    }


HOST_COLUMNS = ("plan", PLAIN, TORCH, SHARDWISE, "ours / torch's", "target", "")


def _host_row(measured: tuple[str, dict[str, tuple[float, ...]]]) -> Row:
    plan, found = measured
    timings = {name: Timing(samples) for name, samples in found.items()}
    ratio = timings[SHARDWISE].ratio_to(timings[TORCH])
    medians = [seconds(timings[name].median) for name in (PLAIN, TORCH, SHARDWISE)]
    target = HOST_TARGET if plan in PLANS else 1.0
    verdict = "pass" if ratio <= target else "MISS"
    return plan, *medians, f"{ratio:.2f} {_spread(timings[SHARDWISE], timings[TORCH])}", f"{target:.2f}", verdict


COLUMN_NAMES = ("plan", "tokens", "width", PLAIN, TORCH, SHARDWISE, "ours / torch's", "of CPU time", "target", "")


def _row(measured: tuple[Case, Found]) -> Row:
    (plan, num_tokens, width), found = measured
    walls, works = ({name: Timing(own[i]) for name, own in found.items()} for i in range(2))
    ratio, target = walls[SHARDWISE].ratio_to(walls[TORCH]), TARGETS[num_tokens]
    beside = [f"{t[SHARDWISE].ratio_to(t[TORCH]):.2f} {_spread(t[SHARDWISE], t[TORCH])}" for t in (walls, works)]
    medians = [seconds(walls[name].median) for name in (PLAIN, TORCH, SHARDWISE)]
    verdict = "pass" if ratio <= target else "MISS"
    return plan, str(num_tokens), str(width), *medians, *beside, f"{target:.2f}", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gloo-styles-") as folder:
        torch.multiprocessing.spawn(rank_main, (folder, options.rounds, options.profile), nprocs=NUM_RANKS)
        if options.profile:
            return
        torch.multiprocessing.spawn(host_main, (folder, options.rounds), nprocs=1)
        found, host = torch.load(f"{folder}/found"), torch.load(f"{folder}/host")
    tokens, width = HOST_SIZE
    tables = [
        Table("Forward and backward of a transformer block", COLUMN_NAMES, list(map(_row, found.items()))),
        Table(
            f"On the host: {tokens} tokens, width {width}, fake group", HOST_COLUMNS, list(map(_host_row, host.items()))
        ),
    ]
    for table in tables:
        table.print(Console(width=180))
    if options.write:
        _write(tables, options.rounds)


def _write(tables: list[Table], num_rounds: int) -> None:
    today = datetime.date.today().isoformat()
    about = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"{NUM_RANKS} ranks on Gloo with one thread each, float32. Medians of {num_rounds} interleaved rounds, of the "
        f"slower rank; ratios are medians of the rounds' ratios, with their middle half."
    )
    path = Path(__file__).parent / "results" / f"gloo-styles-{today}.md"
    path.write_text(
        f"# Module styles on two Gloo ranks, {today}\n\n`python benchmarks/gloo_styles.py --write`: {about}\n\n"
        + "\n".join(table.markdown() for table in tables)
    )


if __name__ == "__main__":
    main()
