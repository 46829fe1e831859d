"""Train one transformer twice, on one device and on a 2 x 2 mesh, and compare every step.

    python examples/demo.py

The mesh is simulated: this process plays all four ranks. The model knows nothing of it; how its
parameters lie on the mesh is said in one table, `SHARDING`.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode

VOCABULARY, WIDTH, HEADS, BATCH, TOKENS, STEPS = 32, 32, 4, 8, 16, 8


# The model, as for a single device.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(2, 3) * heads[-1] ** -0.5, dim=-1)
        return self.output((weights @ v).transpose(1, 2).reshape(x.shape))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


# The sharding, beside it: on "dp" all parameters are replicated; on "tp" these are split.

SHARDING = {
    r"(query|key|value|up)\.(weight|bias)": (Replicate(), Shard(0)),  # by output features: heads, hidden units
    r"(output|down)\.weight": (Replicate(), Shard(1)),  # by input features, so the result is a sum over "tp"
    r"head\.weight": (Replicate(), Shard(0)),  # by vocabulary
    r".*": (Replicate(), Replicate()),
}
BATCH_SHARDING = (Shard(0), Replicate())


def shard_parameters(model: nn.Module, mesh: shardwise.DeviceMesh) -> None:
    for name, parameter in list(model.named_parameters()):
        placements = next(p for pattern, p in SHARDING.items() if re.search(f"{pattern}$", name))
        module, _, attribute = name.rpartition(".")
        sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        setattr(model.get_submodule(module), attribute, sharded)


# One training step: the same function for both.


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # so that a difference would be a mistake, not rounding
    mesh = shardwise.simulate((2, 2), ("dp", "tp"))

    single = Transformer()
    sharded = copy.deepcopy(single)
    shard_parameters(sharded, mesh)
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (single, sharded)}

    rows, counts, sizes = [], Counter(), Counter()
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
        targets = (5 * tokens + 1) % VOCABULARY  # what is to be learned
        expected = train_step(single, optimizers[single], tokens, targets)

        batch = [distribute_tensor(t, mesh, BATCH_SHARDING) for t in (tokens, targets)]
        with CommDebugMode() as comm:
            loss = whole(train_step(sharded, optimizers[sharded], *batch))

        records = communicated(comm)
        for kind, axes, size in records:
            counts[kind, axes] += 1
            sizes[kind, axes] += size
        difference = f"{(loss - expected).abs():.1e}"
        moved = f"{sum(size for *_, size in records):,}"
        rows.append((step, f"{loss:.6f}", f"{expected:.6f}", difference, len(records), moved))

    pairs = zip(sharded.parameters(), single.parameters(), strict=True)
    difference = max((whole(ours) - theirs).abs().max().item() for ours, theirs in pairs)
    show("Loss per step", ("step", "2 x 2 mesh", "one device", "difference", "collectives", "bytes"), rows)
    print(f"Largest difference in any parameter after {STEPS} steps: {difference:.1e}\n")
    rows = [
        (*key, f"{counts[key] / STEPS:g}", f"{sizes[key] / STEPS:,.0f}", counts[key], f"{sizes[key]:,}")
        for key in sorted(counts)
    ]
    show("Communicated", ("collective", "mesh axis", "per step", "bytes", f"{STEPS} steps", "bytes"), rows)


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def communicated(comm: CommDebugMode) -> list[tuple[str, str, int]]:
    """What each collective was: its kind, its mesh axes, its bytes."""
    return [(str(record.kind), " x ".join(record.axes), record.bytes) for record in comm.comms]


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    lines = [[str(cell) for cell in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        print(title)
        for line in (columns, *lines):
            print(" ".join(cell.rjust(12) for cell in line))
    else:
        table = Table(*(Column(name, justify="right") for name in columns), title=title, title_justify="left")
        for line in lines:
            table.add_row(*line)
        Console().print(table)


if __name__ == "__main__":
    main()
