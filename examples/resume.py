"""Training that may be killed at any moment, and goes on where it was: on as many ranks as there are then.

    python examples/resume.py run                   trains for 40 steps, and saves every fifth one in the folder `run`
    python examples/resume.py run --kill-at 23      the same, but the process is killed there; start it again
    torchrun --nproc-per-node 4 examples/resume.py run    processes: NCCL on GPUs, Gloo without

The loop is an ordinary one. What makes it one that can be resumed are three lines: `load_latest` before it, `save_step`
in it, and what both are given, which is all that the program needs to go on: model, optimizer, scheduler, and how far
it has come in its data. Random numbers go on as well.
"""

import argparse
import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise import checkpoint

WIDTH, BATCH, STEPS, EVERY = 32, 32, 40, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_mesh() -> Any:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return shardwise.simulate((4,), ("dp",))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return shardwise.init_device_mesh(DEVICE, (size,), mesh_dim_names=("dp",))


def make_model(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    return shardwise.fully_shard(model, mesh=mesh)


def batch(position: int, mesh: Any) -> list[Tensor]:
    """What comes at a position of the data."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(position))
    return [shardwise.distribute_tensor(t, mesh, [shardwise.Shard(0)]) for t in (x, x[:, :4].sum(1, keepdim=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where steps are saved, and looked for")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="have this process killed before a step")
    options = parser.parse_args()
    mesh = make_mesh()
    model = make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = {"position": 0}

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    done = checkpoint.load_latest(options.folder, **state)
    if mesh.get_rank() == 0:
        print("a fresh start" if done is None else f"goes on after step {done}")
    for step in range(1 if done is None else done + 1, STEPS + 1):
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(data["position"], mesh)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        data["position"] += BATCH
        if step % EVERY == 0:
            checkpoint.save_step(options.folder, step=step, keep=3, **state)  # while training goes on
            value = loss.item()
            if mesh.get_rank() == 0:
                print(f"step {step:2}   loss {value:.6f}")
    checkpoint.wait()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
