"""A transformer block by module styles, ours and torch's, on two real ranks in the same run.

    python benchmarks/gloo_styles.py            print the table
    python benchmarks/gloo_styles.py --write    and write benchmarks/results/gloo-styles-<date>.md
    python benchmarks/gloo_styles.py --profile  instead, where a rank's time goes, function by function

The same block, the same plan, the same plain input; the names of the styles come from one library or the other. How it
is measured is said in gloo_mlp.py. "Plain" is the block on one rank's sizes without communication, "transport" what our
step communicates, collective after collective, of tensors that are there, with nothing else: nobody is faster than both
together, and "least" is what that is of torch's time. "Overhead" is what each library takes beyond it, ours / torch's.
The second table has no communication either: a fake group, and a block
so small that the time is the host's. Where transformers is installed, also a Llama by the plan that it carries, against
transformers' own tensor parallelism, which is made of torch's DTensors. A missed target prints MISS; the exit status
stays 0.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.tensor as their_tensors
import torch.distributed.tensor.parallel as their_styles
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import shardwise
import shardwise.debug
import shardwise.parallel
from race import Call, Row, Table, Timing, options_of, race, report, seconds
from ranks import Times, fake_world, middle_half, on_gloo, profile, race_on_ranks

NUM_RANKS, HEAD_DIM = 2, 32
PLAIN, TRANSPORT, TORCH, SHARDWISE = "plain", "transport", "torch's styles", "shardwise's styles"
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


def steps_of(mesh: DeviceMesh, plan: str, num_tokens: int, width: int) -> dict[str, Call]:
    torch.manual_seed(1)
    x = torch.randn(1, num_tokens, width)
    given = x if plan == "tensor parallel" else x.chunk(NUM_RANKS, 1)[mesh.get_local_rank()]
    steps = {PLAIN: _step(Block(width, NUM_RANKS), x)}
    for name, (styles, tensors) in LIBRARIES.items():
        block = styles.parallelize_module(Block(width), mesh, PLANS[plan](styles, tensors))
        steps[name] = _step(block, given)
    return steps


def _step(block: nn.Module, x: Tensor) -> Call:
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


def check(steps: dict[str, Call]) -> None:
    """Both libraries compute the same."""
    for ours, theirs in zip(steps[SHARDWISE](), steps[TORCH](), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def transport(mesh: DeviceMesh, step: Call) -> Call:
    """The collectives of a step, of float32, bare."""
    with shardwise.debug.CommDebugMode() as comms:
        step()
    group, size = mesh.get_group(), mesh.size()
    calls: list[Call] = []
    for comm in comms.comms:
        sent = torch.zeros(comm.bytes // 4)
        match comm.kind:
            case "all_reduce":
                calls.append(partial(dist.all_reduce, sent, group=group))
            case "all_gather":
                calls.append(partial(group._allgather_base, sent.new_empty(size * len(sent)), sent))
            case "reduce_scatter":
                calls.append(partial(group._reduce_scatter_base, sent.new_empty(len(sent) // size), sent))
            case other:
                raise NotImplementedError(other)

    def run() -> None:
        for call in calls:
            work: Any = call()
            if work is not None:
                work.wait()

    return run


Case = tuple[str, int, int]
Found = dict[str, Times]


def on_rank(num_rounds: int, profiled: bool) -> dict[Case, Found]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    found: dict[Case, Found] = {}
    for plan in PLANS:
        for num_tokens, width in SIZES:
            steps, num_calls = steps_of(mesh, plan, num_tokens, width), NUM_CALLS[num_tokens]
            check(steps)
            steps[TRANSPORT] = transport(mesh, steps[SHARDWISE])
            if profiled:
                profile(steps, num_calls * 5, f"{plan}, {num_tokens} tokens, ")
            else:
                found[plan, num_tokens, width] = race_on_ranks(steps, num_calls=num_calls, num_rounds=num_rounds)
    return found


def on_host(num_rounds: int) -> dict[str, dict[str, Timing]]:
    torch.set_num_threads(1)
    with fake_world(0, NUM_RANKS):
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        calls = {plan: steps_of(mesh, plan, *HOST_SIZE) for plan in PLANS}
        if find_spec("transformers"):
            calls |= llama_calls(mesh)
        return {name: race(systems, num_rounds=num_rounds) for name, systems in calls.items()}


def llama_calls(mesh: DeviceMesh) -> dict[str, dict[str, Call]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    shardwise.parallel.parallelize_module(ours, mesh, ours._tp_plan)
    apply_tensor_parallelism(theirs, mesh, theirs._expand_parallel_plan(theirs._tp_plan))
    nets, ids = {PLAIN: plain, TORCH: theirs, SHARDWISE: ours}, torch.randint(64, (1, 16))

    def train(net: nn.Module) -> None:
        net.zero_grad()
        net(ids, labels=ids).loss.backward()

    return {
        "Llama's own, training": {name: partial(train, net) for name, net in nets.items()},
        "Llama's own, inference": {name: torch.no_grad()(partial(net, ids)) for name, net in nets.items()},
    }


HOST_COLUMNS = ("plan", PLAIN, TORCH, SHARDWISE, "ours / torch's", "target", "")


def _host_row(measured: tuple[str, dict[str, Timing]]) -> Row:
    plan, timings = measured
    ratio = timings[SHARDWISE].ratio_to(timings[TORCH])
    medians = [seconds(timings[name].median) for name in (PLAIN, TORCH, SHARDWISE)]
    target = HOST_TARGET if plan in PLANS else 1.0
    verdict = "pass" if ratio <= target else "MISS"
    return plan, *medians, f"{ratio:.2f} {middle_half(timings[SHARDWISE], timings[TORCH])}", f"{target:.2f}", verdict


TIMED = PLAIN, TRANSPORT, TORCH, SHARDWISE
COLUMN_NAMES = (
    *("plan", "tokens", "width", *TIMED, "ours / torch's", "of CPU time", "least", "overhead", "target", ""),
)


def _row(measured: tuple[Case, Found]) -> Row:
    (plan, num_tokens, width), found = measured
    ours, theirs, target = found[SHARDWISE], found[TORCH], TARGETS[num_tokens]
    pairs = (ours.wall, theirs.wall), (ours.work, theirs.work)
    ratio, beside = ours.wall.ratio_to(theirs.wall), [f"{a.ratio_to(b):.2f} {middle_half(a, b)}" for a, b in pairs]
    medians = [seconds(found[name].wall.median) for name in TIMED]
    needed = found[PLAIN].wall.median + found[TRANSPORT].wall.median
    least, overhead = needed / theirs.wall.median, (ours.wall.median - needed) / (theirs.wall.median - needed)
    verdict = "pass" if ratio <= target else "MISS"
    bounds = f"{least:.2f}", f"{overhead:.2f}", f"{target:.2f}"
    return plan, str(num_tokens), str(width), *medians, *beside, *bounds, verdict


def main() -> None:
    parser = options_of(__doc__, num_rounds=NUM_ROUNDS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    found = on_gloo(NUM_RANKS, on_rank, options.rounds, options.profile)
    if options.profile:
        return
    host = on_host(options.rounds)
    tokens, width = HOST_SIZE
    tables = [
        Table("Forward and backward of a transformer block", COLUMN_NAMES, list(map(_row, found.items()))),
        Table(
            f"On the host: {tokens} tokens, width {width}, fake group", HOST_COLUMNS, list(map(_host_row, host.items()))
        ),
    ]
    about = (
        f"{NUM_RANKS} ranks on Gloo with one thread each, float32. Medians of {options.rounds} interleaved rounds, of "
        f"the slower rank; ratios are medians of the rounds' ratios, with their middle half."
    )
    report("gloo-styles", "Module styles on two Gloo ranks", about, tables, write=options.write)


if __name__ == "__main__":
    main()
