"""What our own files hold of a tensor in one layout loads into any other, bit for bit. (Of dcp: test_dcp.py.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compare import check_shards
from layouts import laid_out
from torch import Tensor, nn
from twenty_layouts import SHAPE, distinct_layouts

from shardwise import checkpoint
from shardwise.layout import Layout


def module_of(values: dict[str, Tensor], layouts: dict[str, Layout]) -> nn.Module:
    net = nn.Module()
    for number, (name, x) in enumerate(values.items()):
        net.register_parameter(f"p{number}", nn.Parameter(laid_out(x, layouts[name])))
    return net


WAYS: dict[str, tuple[Callable[[nn.Module, Path], object], Callable[[nn.Module, Path], object]]] = {
    "a step": (
        lambda net, path: checkpoint.save_step(path, step=1, background=False, model=net),
        lambda net, path: checkpoint.load_latest(path, verify=False, model=net),
    ),
    "safetensors": (
        lambda net, path: checkpoint.save(net, path),
        lambda net, path: checkpoint.load(net, path),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_any_two_of_twenty_layouts_on_one_to_eight_ranks(way: str, tmp_path: Path) -> None:
    every = distinct_layouts()
    save, load = WAYS[way]
    values = {name: torch.arange(105.0).view(SHAPE) + 1000 * i for i, name in enumerate(every)}
    save(module_of(values, every), tmp_path / "all")
    for target in every.values():
        nothing = {name: torch.full(SHAPE, torch.nan) for name in every}
        net = module_of(nothing, dict.fromkeys(every, target))
        load(net, tmp_path / "all")
        for x, right in zip(net.parameters(), values.values(), strict=True):
            check_shards(x)
            assert x.layout_on_mesh is target and torch.equal(x.detach().full_tensor(), right)  # type: ignore[attr-defined]
