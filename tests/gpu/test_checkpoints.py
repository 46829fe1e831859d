"""Checkpoints of tensors on a CUDA device: read into and written from its memory, copied from it for saving in the
background. Skipped where there is no such device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state

import shardwise as sw
from shardwise import checkpoint

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

R, S = sw.Replicate(), sw.Shard


def grid() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"), device=DEVICE)


class Net(nn.Module):
    """Kinds of numbers and of memory that a device may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 64), nn.Linear(64, 40, bias=False)
        self.down.weight = nn.Parameter(self.down.weight.detach().T.contiguous().T)
        self.register_buffer("halves", torch.randn(33, 5).bfloat16())
        self.register_buffer("eighths", torch.randn(16, 4).to(torch.float8_e4m3fn))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x), 0.3))


def placed(seed: int, *placements: sw.Placement, mesh: Any = None, device: str = DEVICE) -> Any:
    def lay(name: str, part: nn.Module, mesh: Any) -> None:
        for kept in (part._parameters, part._buffers):
            for key, x in list(kept.items()):
                if x is not None and x.dim() > 1:
                    made = sw.distribute_tensor(x.detach(), mesh, list(placements))
                    kept[key] = nn.Parameter(made) if kept is part._parameters else made

    torch.manual_seed(seed)
    return sw.distribute_module(Net().to(device), grid() if mesh is None else mesh, lay)


def whole(x: Any) -> Tensor:
    return (x.detach().full_tensor() if isinstance(x, sw.DTensor) else x.detach()).cpu()


def check_equal(found: nn.Module, expected: nn.Module) -> None:
    right = expected.state_dict()
    for name, x in found.state_dict().items():
        assert x.device.type == DEVICE and torch.equal(*(whole(y).view(-1).view(torch.uint8) for y in (x, right[name])))


def trained(net: nn.Module, **options: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    steps(net, optimizer, 2)
    return optimizer


def steps(net: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        x = sw.distribute_tensor(torch.randn(8, 40, device=DEVICE), net.up.weight.device_mesh)
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("small", [False, True])
def test_safetensors(small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:  # so that tensors go to and from the device in parts
        monkeypatch.setattr("shardwise.checkpoint.files.reading.BUFFER", 600)
        monkeypatch.setattr("shardwise.checkpoint.files.writing.BUFFER", 600)
    net = placed(0, S(0), S(1))
    checkpoint.save(net, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name].float(), whole(x).float()) for name, x in net.state_dict().items())
    for other in (placed(1, R, S(0)), placed(2, S(1), S(1))):
        checkpoint.load(other, tmp_path, verify=True)
        check_equal(other, net)


def test_what_is_made_of_stored_tensors(tmp_path: Path) -> None:
    fused = torch.randn(12, 36)
    save_file({"qkv": fused}, tmp_path / "x.safetensors")
    for make in (lambda w: w.T[12:24], lambda w: w.T.chunk(3)[1] * 2, lambda w: w.view(12, 3, 12).flip(1)[:, 0]):
        net = nn.Module()
        net.w = nn.Parameter(sw.distribute_tensor(torch.zeros(12, 12, device=DEVICE).bfloat16(), grid(), [S(0), S(1)]))
        checkpoint.load(net, tmp_path, keys={"w": checkpoint.From("qkv", make=make)})
        assert torch.equal(whole(net.w), make(fused).bfloat16())


def test_models_that_no_device_holds(tmp_path: Path) -> None:
    net = placed(0, S(0), S(1))
    checkpoint.save(net, tmp_path)
    with torch.device("meta"):
        other = placed(1, S(1), S(0), device="meta")
    checkpoint.load(other, tmp_path)
    check_equal(other, net)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}, {"capturable": True}], ids=str)
def test_training_goes_on_bit_for_bit(options: dict[str, bool], tmp_path: Path) -> None:
    """With the device's random numbers, and from a copy that was made before the program went on."""
    net = placed(0, S(0), S(1))
    optimizer = trained(net, **options)
    checkpoint.save_step(tmp_path, step=1, model=net, optimizer=optimizer)
    steps(net, optimizer, 2)
    other = placed(1, S(0), S(1))
    second = trained(other, **options)
    assert checkpoint.load_latest(tmp_path, model=other, optimizer=second) == 1
    steps(other, second, 2)
    check_equal(other, net)


def test_on_another_mesh(tmp_path: Path) -> None:
    net = placed(0, S(0), S(1))
    optimizer = trained(net, fused=True)
    checkpoint.save_step(tmp_path, step=1, model=net, optimizer=optimizer, own={"x": torch.ones(3, device=DEVICE)})
    other = placed(1, S(1), mesh=sw.simulate((3,), ("x",), device=DEVICE))
    second, own = torch.optim.AdamW(other.parameters(), fused=True), {"x": torch.zeros(3, device=DEVICE)}
    checkpoint.load_latest(tmp_path, model=other, optimizer=second, own=own)
    check_equal(other, net)
    assert own["x"].tolist() == [1.0] * 3
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        for name, x in optimizer.state[p].items():
            assert torch.equal(whole(second.state[q][name]), whole(x))
    steps(other, second, 1)


SAVE: dict[str, Callable[[Any, Path], Any]] = {
    "at once": lambda state, folder: dcp.save(state, checkpoint_id=folder),
    "in the background": lambda state, folder: dcp.async_save(state, checkpoint_id=folder),
}


@pytest.mark.parametrize("how", SAVE)
def test_dcp(how: str, tmp_path: Path) -> None:
    net = placed(0, S(0), S(1))
    optimizer = trained(net)
    state = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(net, optimizer), strict=True))
    right = {name: whole(x).clone() for name, x in state["model"].items()}
    begun = SAVE[how](state, tmp_path)
    steps(net, optimizer, 1)
    if hasattr(begun, "result"):
        begun.result()
    other = placed(1, S(1), mesh=sw.simulate((3,), ("x",), device=DEVICE))
    found = {"model": other.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path)
    for name, x in right.items():
        assert torch.equal(whole(other.state_dict()[name]).float(), x.float()), name


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_state_dicts(full: bool, cpu_offload: bool) -> None:
    options = dcp_state.StateDictOptions(full_state_dict=full, cpu_offload=cpu_offload)
    net = placed(0, S(0), S(1))
    optimizer = trained(net)
    state, kept = dcp_state.get_state_dict(net, optimizer, options=options)
    assert {x.device.type for x in state.values()} == {"cpu" if cpu_offload else DEVICE}
    other = placed(1, S(0), S(1))
    second = torch.optim.AdamW(other.parameters())
    dcp_state.set_state_dict(other, second, model_state_dict=state, optim_state_dict=kept, options=options)
    check_equal(other, net)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(second.state[q]["exp_avg"]), whole(optimizer.state[p]["exp_avg"]))
    steps(other, second, 1)
