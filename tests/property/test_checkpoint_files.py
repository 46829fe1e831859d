"""Any tensor in any layout, saved and loaded into any other layout, on any mesh, bit for bit: through safetensors files
and through steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import laid_out, random_layout
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import From, load, load_step, save, save_step
from shardwise.checkpoint.models import reverted
from shardwise.checkpoint.models.save import save_parts
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.writers import parts_of
from shardwise.tensor import wrap

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
MESHES = [sw.simulate(shape, ("a", "b", "c")[: len(shape)]) for shape in ((1,), (2,), (3,), (2, 2), (3, 2), (2, 1, 2))]
SHAPES = [(), (0,), (1,), (5,), (16,), (4, 6), (7, 3), (5, 0), (3, 1, 4), (2, 3, 4), (2, 3, 2, 3)]
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.complex64),
    *(torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
ONLY_IN_STEPS = [torch.complex128, torch.complex32]


def random_tensor(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits: NaNs of every kind as well."""
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.frombuffer(bytearray(chance.randbytes(size)), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw & 1
    return raw.view(dtype)[: torch.Size(shape).numel()].view(shape)


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(-1).view(torch.uint8).tolist() if x.numel() else []


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    module = nn.Module()
    for name, x in tensors.items():
        module.register_buffer(name, x)
    return module


def placed(chance: random.Random, x: Tensor, *, pending: bool = False) -> Tensor:
    """Plain, or in any layout: axes in any order, pieces of any size, also transposed in memory."""
    if chance.random() < 0.1:
        return x.clone()
    mesh = chance.choice(MESHES)
    adds_up = pending and x.dtype in (torch.float32, torch.int64) and bool(x.isfinite().all())
    made = laid_out(x, random_layout(chance, mesh, x.shape, pending=("sum", "max") if adds_up else ()))
    if x.dim() > 1 and chance.random() < 0.3:
        made = wrap(made.to_local().transpose(0, 1).contiguous().transpose(0, 1), made.layout_on_mesh)
    return made


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def draw(chance: random.Random, dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    count = chance.randint(1, 6)
    return {
        f"x{i}": random_tensor(chance, chance.choice(SHAPES), chance.choice(dtypes))
        if chance.random() < 0.8
        else torch.randn(chance.choice(SHAPES))
        for i in range(count)
    }


@pytest.mark.parametrize("seed", range(60))
def test_safetensors(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    tensors = draw(chance, DTYPES)
    there = module_of({name: placed(chance, x, pending=True) for name, x in tensors.items()})
    expected = {name: bits(whole(x)) for name, x in there.state_dict().items()}
    save(there, tmp_path / "files", max_shard_size=chance.choice((1, 100, "1GB")))
    found = {k: x for file in (tmp_path / "files").glob("*.safetensors") for k, x in load_file(file).items()}
    assert {name: bits(x) for name, x in found.items()} == expected
    here = module_of({name: placed(chance, torch.zeros_like(x)) for name, x in tensors.items()})
    loaded = load(here, tmp_path / "files", verify=chance.random() < 0.5)
    assert {name: bits(whole(x)) for name, x in here.state_dict().items()} == expected
    assert not loaded.missing_keys and not loaded.unexpected_keys


@pytest.mark.parametrize("seed", range(60))
def test_steps(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    tensors = draw(chance, DTYPES + ONLY_IN_STEPS)
    there = module_of({name: placed(chance, x, pending=True) for name, x in tensors.items()})
    expected = {name: bits(whole(x)) for name, x in there.state_dict().items()}
    folder = save_step(tmp_path, step=seed, model=there, background=chance.random() < 0.5).wait()
    here = module_of({name: placed(chance, torch.zeros_like(x)) for name, x in tensors.items()})
    assert load_step(folder, model=here) == seed
    assert {name: bits(whole(x)) for name, x in here.state_dict().items()} == expected


def random_function(chance: random.Random, shape: tuple[int, ...]) -> tuple[str, int]:
    """What is made of tensors of a shape, and of how many."""
    n = len(shape)
    views = ["x", *(f"x.transpose({a}, {b})" for a in range(n) for b in range(a))]
    views += [f"x.narrow({d}, {s // 3}, {s - s // 3 - s // 4})" for d, s in enumerate(shape) if s > 2]
    halves = [(d, s // 2) for d, s in enumerate(shape) if s % 2 == 0]
    views += [f"x.unflatten({d}, (2, {h})).transpose({d}, {d + 1}).flatten({d}, {d + 1})" for d, h in halves]
    view = chance.choice(views)
    both = f"[{view}, {view.replace('x', 'y')}]"
    return chance.choice(
        [
            (view, 1),
            (f"torch.cat({both}, {chance.randrange(n)})", 2),
            (f"torch.stack({both}, {chance.randrange(n + 1)})", 2),
            (f"torch.stack({both}, {(dim := chance.randrange(n)) + 1}).flatten({dim}, {dim + 1})", 2),
            (f"torch.cat({both}).flatten()", 2),
            (f"{view} * 2", 1),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_what_is_made_of_stored_tensors(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    shape = chance.choice([shape for shape in SHAPES if len(shape) > 1 and 0 not in shape])
    text, count = random_function(chance, shape)
    make = eval(f"lambda {', '.join('xy'[:count])}: {text}", {"torch": torch})
    stored = [torch.randn(shape) for _ in range(count)]
    save(module_of({f"k{i}": x for i, x in enumerate(stored)}), tmp_path / "x.safetensors")
    expected = make(*stored)
    here = module_of({"w": placed(chance, torch.zeros(expected.shape))})
    load(here, tmp_path, keys={"w": From(*(f"k{i}" for i in range(count)), make=make)})
    assert torch.equal(whole(here.w), expected), text


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("seed", range(60))
def test_what_files_have_of_parameters(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some a part, of some several, of some what is computed of them: written by those who hold it."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    functions, tensors = {}, {"alone": torch.randn(chance.choice(SHAPES))}
    for number in range(3):
        shape = chance.choice([shape for shape in SHAPES if len(shape) > 1 and 0 not in shape])
        texts = ["y", *chance.sample(random_parts(shape), 2)]
        texts = texts if chance.random() < 0.7 else [*texts[chance.randrange(6) :], random_function(chance, shape)[0]]
        functions[number] = [eval(f"lambda x, y: {text}", {"torch": torch}) for text in texts]
        tensors |= {f"{name}{number}": torch.randn(shape) for name in "xy"}

    def revert(model: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = {"only": given["alone"]} if "alone" in given else {}
        for number, some in functions.items():
            if {f"x{number}", f"y{number}"} <= given.keys():
                ours = given[f"x{number}"], given[f"y{number}"]
                made |= {f"{number}.{at}": function(*ours) for at, function in enumerate(some)}
        return made

    monkeypatch.setattr(reverted, "_revert", revert)
    ranks, mesh = Ranks(), chance.choice(MESHES)
    laid = {name: laid_out(x, random_layout(chance, mesh, x.shape)) for name, x in tensors.items()}
    made = reverted.reverted(None, laid, ranks, "saving")
    save_parts(*made.parts(*parts_of(made.tensors, ranks)), tmp_path / "x.safetensors", 10**9, ranks)
    found = load_file(tmp_path / "x.safetensors")
    right = revert(None, tensors)
    assert {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in right.items()}
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in right.items()}


def random_parts(shape: tuple[int, ...]) -> list[str]:
    """What conversions make: chunks, rows, and what is joined of them."""
    dims = range(len(shape))
    found = [f"x.chunk({s}, {d})[{s // 2}].squeeze({d}).contiguous()" for d, s in enumerate(shape)]
    found += [f"x.chunk(2, {d})[0].contiguous().transpose(0, 1).contiguous()" for d in dims]
    found += [f"x.chunk(2, {d})[0].contiguous().chunk(2, {e})[-1].unsqueeze({d})" for d in dims for e in dims]
    found += [f"torch.cat([y.chunk(2, {d})[-1].contiguous(), x], {d})" for d in dims]
    return [*found, "torch.stack([x, y]).transpose(0, 1)", "x.flatten()", "x.reshape(-1, x.shape[-1])"]


SHOWN = {
    "conjugated": lambda x: x.conj(),
    "a part of one": lambda x: x.conj()[1:],
    "with the other sign": lambda x: x.conj().imag,
    "both": lambda x: torch._neg_view(x.conj()),
}
"""Views that show their memory otherwise than it is."""


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize("name", SHOWN)
def test_views_that_show_their_memory_otherwise(name: str, kind: str, tmp_path: Path) -> None:
    def view(x: Tensor) -> Tensor:
        return SHOWN[name](x if kind == "plain" else sw.distribute_tensor(x, MESHES[1], [sw.Shard(1)]))

    there = module_of({"x": view(torch.randn(5, 4, dtype=torch.complex64))})
    expected = whole(there.x).resolve_conj().resolve_neg()  # type: ignore[operator, arg-type]
    save(there, tmp_path / "model")
    folder = save_step(tmp_path, step=1, background=False, model=there, dict={"x": there.x}).wait()
    for into in (torch.zeros_like(expected), view(torch.zeros(5, 4, dtype=torch.complex64))):
        for how in (lambda net: load(net, tmp_path / "model", verify=True), lambda net: load_step(folder, model=net)):
            here = module_of({"x": into})
            how(here)
            assert torch.equal(whole(here.x), expected)  # type: ignore[arg-type]
            here.x.zero_()  # type: ignore[operator, union-attr]
    found = {"x": into}
    load_step(folder, dict=found)
    assert torch.equal(whole(found["x"]), expected)
