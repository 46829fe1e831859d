"""Whole programs as users write them, with sharded parameters and with plain ones: the same losses and gradients."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import Step, To, check_program
from torch import Tensor, nn, optim
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from shardwise.experimental import implicit_replication

pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning"),
    pytest.mark.usefixtures("double_precision"),
]


# A language model: tied embeddings, recomputation, accumulation, clipping, every optimizer, saving


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.before(x)).split(width, dim=2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))
        return x + self.mlp(self.after(x))


class LanguageModel(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.blocks, self.recompute = nn.ModuleList([Block(6, 3), Block(6, 2)]), recompute
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1), ignore_index=0)


def trained(make_optimizer: Callable[[Any], optim.Optimizer], *, clip: bool | None = None, rounds: int = 1) -> Step:
    def step(model: nn.Module, to: To) -> list[Tensor]:
        optimizer = make_optimizer([p for p in model.parameters() if p.dim() > 1])  # biases of keys have no gradient
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        losses = []
        for _ in range(2):
            batches = [to(torch.randint(0, 11, (5, 4))) for _ in range(rounds)]

            def closure(batches: list[Tensor] = batches) -> Tensor:
                model.zero_grad()
                for tokens in batches:
                    loss = model(tokens) / rounds
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=clip)
                return loss

            losses.append(optimizer.step(closure))
            scheduler.step()
        return losses

    return step


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 2)], ids=str)
def test_training_a_language_model(mesh: tuple[int, ...]) -> None:
    check_program(LanguageModel, trained(lambda ps: optim.AdamW(ps, 1e-2), rounds=2, clip=False), mesh=mesh)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_activations(reentrant: bool) -> None:
    check_program(lambda: LanguageModel(reentrant), trained(lambda ps: optim.SGD(ps, 0.1)), seeds=1)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda ps: optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda ps: optim.Adam(ps, 1e-2, amsgrad=True, foreach=False),
    "Adam, foreach": lambda ps: optim.Adam(ps, 1e-2, amsgrad=True, foreach=True),
    "AdamW, fused": lambda ps: optim.AdamW(ps, 1e-2, fused=True),
    "Adagrad, fused": lambda ps: optim.Adagrad(ps, 1e-2, fused=True),
    "Adafactor": lambda ps: optim.Adafactor(ps, 1e-2),
    "LBFGS": lambda ps: optim.LBFGS(ps, 0.1, max_iter=2, line_search_fn="strong_wolfe"),
    **{
        name: lambda ps, name=name: getattr(optim, name)(ps, 1e-2)
        for name in ("Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop", "ASGD")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    check_program(LanguageModel, trained(OPTIMIZERS[name], clip=True), seeds=1, meta="refused by torch")


def test_saving_and_going_on() -> None:
    def step(model: nn.Module, to: To) -> list[Tensor]:
        optimizer = optim.AdamW(model.parameters(), 1e-2)
        model(to(torch.randint(0, 11, (5, 4)))).backward()
        optimizer.step()
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        saved.seek(0)
        states = torch.load(saved, weights_only=False)
        model.load_state_dict(states["model"])
        optimizer = optim.AdamW(model.parameters(), 1.0)
        optimizer.load_state_dict(states["optimizer"])
        model.zero_grad()
        loss = model(to(torch.randint(0, 11, (5, 4))))
        loss.backward()
        return [loss]

    check_program(LanguageModel, step)


# Images, sequences, several losses, tables


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.down = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.Conv2d(6, 4, 3, 2),
        )
        self.norms, self.out = nn.ModuleList([norm(6), norm(6), norm(4)]), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(x)), inplace=True)
        x = F.max_pool2d(F.relu(x + self.norms[1](self.second(x))), 2, ceil_mode=True)
        return self.out(torch.flatten(F.adaptive_avg_pool2d(F.relu_(self.norms[2](self.down(x))), 1), 1))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c)], ids=["batch", "group"])
def test_a_residual_network(norm: Callable[[int], nn.Module]) -> None:
    def step(model: nn.Module, to: To) -> list[Tensor]:
        optimizer, losses = optim.SGD(model.parameters(), 0.1, momentum=0.9), []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(model(to(torch.randn(5, 3, 9, 7))), to(torch.randint(0, 5, (5,)))))
            losses[-1].backward()
            optimizer.step()
        with torch.no_grad():
            return [*losses, model.eval()(to(torch.randn(3, 3, 8, 8)))]

    check_program(lambda: Residual(norm), step)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4, padding_idx=0), nn.Linear(6, 3)
        self.memory = nn.LSTM(4, 3, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, lengths: Any) -> Tensor:
        x = self.embed(tokens)
        if lengths is None:
            return self.out(self.memory(x)[0])
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("lengths", [None, [5, 2, 3, 4]], ids=["whole", "packed"])
def test_tagging_sequences(lengths: Any) -> None:
    def step(model: nn.Module, to: To) -> list[Tensor]:
        with implicit_replication():  # the order of the lengths is a plain tensor, alike on all ranks
            scores = model(to(torch.randint(1, 9, (4, 5))), lengths)
        scores.square().mean().backward()
        return [scores]

    check_program(Tagger, step, meta="the same" if lengths is None else "refused by torch")
