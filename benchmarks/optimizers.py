"""Steps of AdamW and clipping, of 100 sharded parameters, against plain torch on one rank's shards.

    python benchmarks/optimizers.py            print the table
    python benchmarks/optimizers.py --write    and write benchmarks/results/optimizers-<date>.md

One process is rank 1 of 4 in torch's fake process group. Every other parameter is a matrix of width × width, the others
have width numbers; all are sharded along their first dim. Gradients are as a backward pass leaves them. Times are the
CPU's, since nothing waits. A missed target prints MISS; the exit status stays 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

import shardwise as sw
from race import Row, Table, options_of, race, report, seconds, work_per_call
from ranks import fake_world

NUM_PARAMETERS, NUM_RANKS, WIDTHS = 100, 4, (64, 256, 1024)
CLIPPING = {
    "parallel.clip_grad_norm_": sw.parallel.clip_grad_norm_,
    "torch's clip_grad_norm_": nn.utils.clip_grad_norm_,
}
TARGETS = {"AdamW, foreach": 1.1, "AdamW, fused": 1.15, **dict.fromkeys(CLIPPING, 1.2)}


def parameters(width: int, lay: Callable[[Tensor], Tensor]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(lay(torch.randn((width, width) if i % 2 else width))) for i in range(NUM_PARAMETERS)]


def give_gradients(params: list[nn.Parameter]) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # as autograd does, which knows of shards alone
        for p in params:
            torch._C.TensorBase.grad.__set__(p, torch.randn(torch._C.TensorBase.size(p)))  # type: ignore[attr-defined]


def call(name: str, params: list[nn.Parameter]) -> Callable[[], Any]:
    give_gradients(params)
    if name in CLIPPING:
        return partial(CLIPPING[name], params, 1.0)
    optimizer = torch.optim.AdamW(params, foreach="foreach" in name, fused="fused" in name)
    optimizer.step()  # makes the state, on DTensors: who looks at a gradient has a DTensor
    give_gradients(params)
    return optimizer.step


def row(name: str, width: int, mesh: Any, num_rounds: int) -> Row:
    plain = call(name, parameters(width, lambda x: x.chunk(NUM_RANKS)[1].clone()))
    ours = call(name, parameters(width, lambda x: sw.distribute_tensor(x, mesh, [sw.Shard(0)])))
    found = race({"plain": plain, "shardwise": ours}, num_rounds=num_rounds, clock=work_per_call)
    ratio = found["shardwise"].ratio_to(found["plain"])
    times = [seconds(timing.median) for timing in found.values()]
    verdict = "pass" if ratio <= TARGETS[name] else "MISS"
    return name, str(width), *times, f"{ratio:.2f}", str(TARGETS[name]), verdict


def main() -> None:
    options = options_of(__doc__, num_rounds=30).parse_args()
    torch.set_num_threads(1)
    with fake_world(1, NUM_RANKS):
        mesh = sw.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
        rows = [row(name, width, mesh, options.rounds) for name in TARGETS for width in WIDTHS]
    columns = ("measure", "width", "plain", "shardwise", "x plain", "target", "")
    tables = [Table(f"{NUM_PARAMETERS} parameters, sharded over {NUM_RANKS} ranks", columns, rows)]
    report("optimizers", "Optimizers and clipping", "One thread, CPU time.", tables, write=options.write)


if __name__ == "__main__":
    main()
