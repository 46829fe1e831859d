"""A GPT that learns Python: data, tensor and sequence parallelism, and fully sharded parameters, on one mesh.

    python examples/gpt.py                                              this process plays all eight ranks
    python examples/gpt.py --dp 1 --shard 4 --tp 2                      another way to use eight ranks
    python examples/gpt.py --compile fx                                 the whole step as one captured program
    torchrun --nproc-per-node 4 examples/gpt.py --dp 2 --shard 1 --tp 2    processes: NCCL on GPUs, Gloo without

The model and the training loop are those of one device. What is parallel is said in `parallelize`, and nowhere else.
The text is the source of Python's own standard library. Every run is compared with one device.
"""

import argparse
import copy
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
)

WIDTH, HEADS, LAYERS, TOKENS, BATCH, BYTES = 64, 4, 2, 32, 8, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Lay = Callable[[Tensor], Tensor]


# --- One device ---


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def batches(steps: int) -> list[Tensor]:
    text = torch.tensor(list(Path(json.__file__).read_bytes()))
    starts = torch.randint(len(text) - TOKENS, (steps, BATCH), generator=torch.Generator().manual_seed(0))
    return [torch.stack([text[at : at + TOKENS + 1] for at in some]) for some in starts.tolist()]


# --- Many devices ---


def parallelize(model: GPT, mesh: shardwise.Mesh) -> nn.Module:
    """Between the layers of a tensor-parallel region activations are sharded along the sequence."""
    rows, whole, sequence = shardwise.Shard(-1), shardwise.Replicate(), shardwise.Shard(1)
    gather = PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole)
    by_columns = ColwiseParallel(use_local_output=False)
    by_rows = RowwiseParallel(input_layouts=rows, output_layouts=sequence, use_local_output=False)
    embedding = RowwiseParallel(input_layouts=whole, output_layouts=sequence, use_local_output=False)
    block = {
        **{"norm1": SequenceParallel(), "attention": gather, "norm2": SequenceParallel(), "mlp": gather},
        **{f"attention.{name}": by_columns for name in "qkv"},
        **{"attention.out": by_rows, "mlp.up": by_columns, "mlp.down": by_rows},
    }
    head = ColwiseParallel(input_layouts=sequence, use_local_output=False)
    ends = {"tokens": embedding, "positions": embedding, "norm": SequenceParallel(), "head": head}
    parallelize_module(model, mesh["tp"], {"blocks.*": block, **ends})
    if mesh.size(1) > 1:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["dp", "shard"])
        return model
    return shardwise.distribute_module(model, mesh)  # replicated along the other axes


def make_mesh(shape: tuple[int, int, int]) -> shardwise.Mesh:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return shardwise.simulate(shape, ("dp", "shard", "tp"))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return shardwise.init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "shard", "tp"))


# --- Both ---


def as_it_is(x: Any) -> Any:
    return x


def train(
    model: nn.Module, data: list[Tensor], positions: Tensor, lay: Lay = as_it_is, compiled: Any = as_it_is
) -> list[tuple]:
    """An ordinary training loop. `lay` says where a batch goes; `compiled` makes a program of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(tokens, positions)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    step = compiled(step)
    found = (step(lay(batch[:, :-1]), lay(batch[:, 1:])) for batch in data)
    return [(loss.item(), norm.item()) for loss, norm in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, what in (("dp", "replicas of the model"), ("shard", "shards of its parameters"), ("tp", "tensor")):
        parser.add_argument(f"--{axis}", type=int, default=2, help=f"ranks along the axis of {what} parallelism")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compile", choices=("fx", "inductor"), help="capture the step, and run the program")
    options = parser.parse_args()
    mesh = make_mesh((options.dp, options.shard, options.tp))
    device = "cpu" if isinstance(mesh, shardwise.Mesh) else DEVICE

    torch.manual_seed(0)
    plain = GPT().to(device)
    model = parallelize(copy.deepcopy(plain), mesh)
    rows = [shardwise.Shard(0), shardwise.Shard(0), shardwise.Replicate()]

    data = [batch.to(device) for batch in batches(options.steps)]
    positions = torch.arange(TOKENS, device=device).expand(BATCH, -1)
    expected = train(plain, data, positions)
    with CommDebugMode() as comm:
        found = train(
            model,
            data,
            shardwise.distribute_tensor(positions, mesh, rows),
            lambda x: shardwise.distribute_tensor(x, mesh, rows),
            partial(shardwise.compile, backend=options.compile) if options.compile else as_it_is,
        )
    if mesh.get_rank() == 0:
        for step in range(0, options.steps, 7):
            (loss, norm), (one, its_norm) = found[step], expected[step]
            print(f"step {step:2}   loss {loss:.5f} (one device {one:.5f})   gradient norm {norm:.4f} ({its_norm:.4f})")
        print(f"in {options.steps} steps: {dict(comm.get_comm_counts())}")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-3, rtol=2e-3)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
