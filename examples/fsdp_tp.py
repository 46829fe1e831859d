"""Fully sharded × tensor parallel: on one axis of the mesh layers are split, on the other their shards are split again.

    python examples/fsdp_tp.py                       this process plays all four ranks
    torchrun --nproc-per-node 4 examples/fsdp_tp.py  four processes, or two, or eight: NCCL on GPUs, Gloo without

The model and the training loop are those of one device, and every run is compared with one device. What is parallel is
said in `parallelize`: a plan on the axis "tp", `fully_shard` on the axis "shard".
"""

import copy
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

WIDTH, LAYERS, BATCH, STEPS = 32, 3, 16, 10
AXES = ("shard", "tp")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def parallelize(model: nn.Sequential, mesh: shardwise.Mesh) -> nn.Module:
    up, down = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["tp"], {"*.up": up, "*.down": down})
    for part in (*model, model):
        fully_shard(part, mesh=mesh["shard"])
    return model


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """An ordinary training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def make_mesh() -> shardwise.Mesh:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return shardwise.simulate((2, 2), AXES)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return shardwise.init_device_mesh(DEVICE, (2, ranks // 2), mesh_dim_names=AXES)


def main() -> None:
    mesh = make_mesh()
    device = "cpu" if isinstance(mesh, shardwise.Mesh) else DEVICE
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    inputs = [torch.randn(BATCH, WIDTH).to(device) for _ in range(STEPS)]
    data = [(x, x.roll(1, dims=-1)) for x in inputs]

    model = parallelize(copy.deepcopy(plain), mesh)
    rows = [shardwise.Shard(0), shardwise.Replicate()]
    split = [tuple(shardwise.distribute_tensor(t, mesh, rows) for t in pair) for pair in data]
    expected, found = train(plain, data), train(model, split)

    if mesh.get_rank() == 0:
        for step, ((loss, norm), (one, its_norm)) in enumerate(zip(found, expected, strict=True)):
            print(f"step {step}   loss {loss:.6f} (one device {one:.6f})   gradient norm {norm:.5f} ({its_norm:.5f})")
        for name, p in model[0].named_parameters():
            print(f"{name:12} {p.layout_on_mesh}   gradient {p.grad.layout_on_mesh}")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-3, rtol=1e-3)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
