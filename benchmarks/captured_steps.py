"""What a captured train step costs: to run, to capture, and to look whether its program still serves.

    python benchmarks/captured_steps.py            print the tables
    python benchmarks/captured_steps.py --write    and write benchmarks/results/captured-steps-<date>.md

Everything runs in one process on one thread, as one rank of torch's fake process group, whose collectives return at
once. "Plain" is the same model on ordinary tensors of the sizes that one rank computes; compiled, that is its forward
and backward pass by torch.compile and its optimizer's step by another. The systems take turns in short slices. How long
Inductor takes is not counted as capturing; capturing and guards are the processor's time, and guards are all that a
call does before its program runs, with Dynamo imported, as it is by Inductor; "after writes", if somebody has written
to a module before each of them. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo.guards
import torch.distributed.tensor as their_tensors
import torch.distributed.tensor.parallel as their_styles
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import block as blocks
import shardwise as sw
from block import Training
from race import Call, Row, Table, Timing, options_of, race, report, seconds, work_per_call
from ranks import fake_world
from shardwise.graph import programs_of
from shardwise.graph.guards.call import flattened

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt

RATIO_TARGET, CAPTURE_TARGET, GUARDS_TARGET = 0.75, 60.0, 20e-6
NUM_LAYERS = (6, 12, 24)
PLAIN, COMPILED = "plain", "plain, compiled"
CAPTURED = "captured, Inductor"


def verdict(met: bool) -> str:
    return "pass" if met else "MISS"


# --- A step of a small block ---------------------------------------------------------------------


def compiled_by_torch(training: Training) -> Call:
    block, optimizer_step = torch.compile(training.block), torch.compile(training.optimizer.step)

    def step() -> None:
        for parameter in training.parameters:
            parameter.grad = None
        block(training.x).square().mean().backward()
        optimizer_step()

    return step


def block_steps() -> dict[str, Callable[[], Call]]:
    sizes = blocks.Sizes()

    def plain() -> Training:
        return Training.of(blocks.plain(sizes, 4))

    def theirs() -> Training:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        return Training.of(blocks.by_styles(their_tensors, their_styles, mesh, sizes))

    def ours() -> Training:
        return Training.of(blocks.by_hand(sw, sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), sizes))

    return {
        PLAIN: lambda: plain().step,
        COMPILED: lambda: compiled_by_torch(plain()),
        "torch styles": lambda: theirs().step,
        "torch styles, compiled": lambda: compiled_by_torch(theirs()),
        "shardwise": lambda: ours().step,
        "captured, node by node": lambda: sw.compile(ours().step, backend="fx"),
        CAPTURED: lambda: sw.compile(ours().step),
    }


def block_table(num_rounds: int) -> Table:
    calls: dict[str, Call] = {}
    for system, make in block_steps().items():
        try:
            call = make()
            for _ in range(3):
                call()
        except Exception as error:  # whatever a library under test raises
            print(f"{system} is left out: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        else:
            calls[system] = call
    timings = race(calls, num_rounds=num_rounds)
    rows = [block_row(system, timing, timings) for system, timing in timings.items()]
    title = "Train step with AdamW (foreach): a block of width 64, 2 x 8 tokens, tensor parallel over 4 ranks"
    return Table(title, ("system", "median", "min", "x plain", "x plain, compiled", "target", ""), rows)


def block_row(system: str, timing: Timing, timings: dict[str, Timing]) -> Row:
    to_plain = timing.ratio_to(timings[PLAIN])
    to_compiled = f"{timing.ratio_to(timings[COMPILED]):.2f}" if COMPILED in timings else "-"
    judged = (f"≤ {RATIO_TARGET:g}x plain", verdict(to_plain <= RATIO_TARGET)) if system == CAPTURED else ("", "")
    return system, seconds(timing.median), seconds(timing.minimum), f"{to_plain:.2f}", to_compiled, *judged


# --- Capturing a GPT -----------------------------------------------------------------------------


def gpt_step(num_layers: int) -> tuple[Call, tuple[Tensor, ...]]:
    """A train step of examples/gpt.py and its arguments, on data × tensor parallelism, once it has run."""
    gpt.LAYERS = num_layers
    mesh = sw.init_device_mesh("cpu", (4, 1, 2), mesh_dim_names=("dp", "shard", "tp"))
    model = gpt.parallelize(gpt.GPT(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)

    def step(tokens: Tensor, targets: Tensor, positions: Tensor) -> Any:
        optimizer.zero_grad()
        with sw.parallel.loss_parallel():
            logits = model(tokens, positions)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    rows = [sw.Shard(0), sw.Shard(0), sw.Replicate()]
    batch = gpt.batches(1)[0]
    given = tuple(sw.distribute_tensor(x.contiguous(), mesh, rows) for x in (batch[:, :-1], batch[:, 1:]))
    arguments = (*given, sw.distribute_tensor(torch.arange(gpt.TOKENS), mesh))
    step(*arguments)
    return step, arguments


def capture_table(num_rounds: int) -> Table:
    title = (
        f"Capturing a GPT's step: at most {CAPTURE_TARGET:g} s, and {seconds(GUARDS_TARGET)} to look whether it serves"
    )
    columns = ("layers", "nodes", "first capture", "another", "per layer", "guards a step", "after writes", "")
    return Table(title, columns, [capture_row(num_layers, num_rounds) for num_layers in NUM_LAYERS])


def capture_row(num_layers: int, num_rounds: int) -> Row:
    step, arguments = gpt_step(num_layers)
    first, another = (processor_seconds(lambda: sw.compile(step, backend="fx").capture(*arguments)) for _ in range(2))
    compiled = sw.compile(step, backend="fx")
    compiled(*arguments)
    guards, run = programs_of(compiled).runs[0]

    def look() -> bool:
        leaves, spec = flattened(arguments, {})
        return guards.miss(leaves, spec) is None and run.holds(leaves)

    kept, key = guards.training[0].slot

    def look_after_a_write() -> bool:
        kept[key] = not kept[key]
        kept[key] = not kept[key]
        return look()

    assert look() and look_after_a_write()
    timing, written = (
        race({"guards": each}, num_rounds=num_rounds, clock=work_per_call)["guards"]
        for each in (look, look_after_a_write)
    )
    nodes = sum(len(part.graph.nodes) for part in run.parts)
    met = first <= CAPTURE_TARGET and timing.median <= GUARDS_TARGET
    found = f"{first:.2f} s", f"{another:.2f} s", f"{1e3 * another / num_layers:.0f} ms"
    found += seconds(timing.median), seconds(written.median)
    return str(num_layers), str(nodes), *found, verdict(met)


def processor_seconds(call: Call) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def main() -> None:
    options = options_of(__doc__, num_rounds=31).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables = []
    with fake_world(1, 4):
        tables.append(block_table(options.rounds))
    with fake_world(3, 8):
        tables.append(capture_table(options.rounds))
    report("captured-steps", "Captured steps", "One thread.", tables, write=options.write)


if __name__ == "__main__":
    main()
