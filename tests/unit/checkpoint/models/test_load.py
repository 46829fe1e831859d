"""`load`: parameters from files, into shards; what fits, what does not, and that nothing is changed then."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import shardwise as sw
from shardwise.checkpoint import From, load, load_latest, save, save_step
from shardwise.checkpoint.models.sources import resolved
from shardwise.errors import CheckpointError, CheckpointFileError, DamagedFileError, PlanError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MESH = sw.simulate((2, 3), ("dp", "tp"))
R, S = sw.Replicate(), sw.Shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scratch", torch.full((3,), 7.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(F.relu(self.up(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight


def place(module: nn.Module, *placements: sw.Placement, mesh: Any = MESH) -> Any:
    """All matrices laid out, the rest replicated."""

    def lay(name: str, part: nn.Module, mesh: Any) -> None:
        for key, x in list(part._parameters.items()):
            if x is not None and x.dim() > 1:
                part._parameters[key] = nn.Parameter(sw.distribute_tensor(x.detach(), mesh, list(placements)))

    return sw.distribute_module(module, mesh, lay)


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, sw.DTensor) else x.detach()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(x).clone() for name, x in module.state_dict().items()}


def check_equal(found: nn.Module, expected: dict[str, Tensor]) -> None:
    state = values(found)
    assert state.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(state[name], x), name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A file, and what it holds."""
    torch.manual_seed(1)
    state = {name: torch.rand_like(x) if x.is_floating_point() else x + 3 for name, x in Net().state_dict().items()}
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors", state


LAYOUTS = [(R, R), (S(0), R), (R, S(1)), (S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (S(1), S(1))]


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_each_rank_reads_what_its_shards_need(placements: Any, saved: Any) -> None:
    path, state = saved
    net = place(Net(), *placements)
    params = list(net.parameters())
    loaded = load(net, path)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ((), ())
    check_equal(net, state)
    assert [*net.parameters()] == params and net.up.weight.placements == tuple(placements)
    assert net.scratch.full_tensor().tolist() == [7.0] * 3
    # all ranks are held here, and what several have is read once
    assert loaded.num_bytes == sum(x.numel() * x.element_size() for x in state.values())


def test_what_comes_after_knows_of_it(saved: Any) -> None:
    """What was gathered before, or moved for several uses, or is a copy where torch has a view."""
    path, state = saved
    reference = Net()
    reference.load_state_dict(state)
    x = torch.randn(4, 6)
    net = place(Net(), S(0), S(0))
    placed = sw.distribute_tensor(x, MESH, [S(0), R])
    row = net.up.weight.detach()[3]
    with warnings.catch_warnings(action="ignore", category=sw.errors.FallbackWarning):
        net.eval(), reference.eval()
        net(placed)
        load(net, path)
        torch.testing.assert_close(net(placed).full_tensor(), reference(x))
    assert torch.equal(row.full_tensor(), state["up.weight"][3])


def test_fully_sharded_modules(saved: Any) -> None:
    path, state = saved
    reference = Net()
    reference.load_state_dict(state)
    net = Net()
    for part in (net.up, net.down, net):
        sw.fully_shard(part, mesh=MESH["dp"])
    x = sw.distribute_tensor(torch.randn(4, 6), MESH["dp"], [S(0)])
    net.eval(), reference.eval()
    net(x)
    net.unshard()  # its modules hold what is whole
    load(net, path)
    check_equal(net, state)
    torch.testing.assert_close(net(x).full_tensor(), reference(x.full_tensor()))


def test_styles(saved: Any) -> None:
    path, state = saved
    net = parallelize_module(Net(), MESH["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    load(net, path)
    check_equal(net, state)
    assert type(net.norm.weight) is nn.Parameter


@pytest.mark.parametrize("on_meta", [True, False])
def test_models_that_no_device_holds(on_meta: bool, saved: Any) -> None:
    path, state = saved
    if on_meta:
        with torch.device("meta"):
            plain = Net()
        plain.scratch = torch.ones(3)
        net = place(plain, S(0), S(1))
        assert net.up.weight.is_meta
        net.up.weight.mark = "kept"
    else:
        with sw.init_on(MESH, {"*.weight": [R, S(0)]}):
            net = Net()
    load(net, path)
    check_equal(net, state)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and not p.is_meta for p in net.parameters())
    assert not on_meta or net.up.weight.mark == "kept"


def test_a_plain_model_on_meta(saved: Any) -> None:
    path, state = saved
    with torch.device("meta"):
        net = Net()
    with pytest.raises(CheckpointError) as error:
        load(net, path)
    assert str(error.value) == (
        "Net has buffers on the meta device that no file has, because they are not persistent: 'scratch'. Make the "
        "model with shardwise.init_on, or give them their values first"
    )
    assert net.up.weight.is_meta
    net.scratch = torch.ones(3)
    load(net, path)
    check_equal(net, state)


@pytest.mark.parametrize("name", ["tokens.weight", "head.weight"])
def test_tied_weights_under_either_name(name: str, tmp_path: Path) -> None:
    save_file({name: torch.arange(32.0).view(8, 4)}, tmp_path / "x.safetensors")
    for net in (Tied(), place(Tied(), S(0), S(1))):
        assert load(net, tmp_path).missing_keys == ()
        assert whole(net.head.weight).view(-1).tolist() == list(range(32))
        assert net.head.weight is net.tokens.weight


def test_of_two_names_in_the_file_the_last_counts_as_in_torch(tmp_path: Path) -> None:
    state = {"tokens.weight": torch.zeros(8, 4), "head.weight": torch.ones(8, 4)}
    save_file(state, tmp_path / "x.safetensors")
    nets = Tied(), Tied()
    nets[0].load_state_dict(state)
    assert load(nets[1], tmp_path).unexpected_keys == ()
    assert torch.equal(nets[0].head.weight, nets[1].head.weight)


def test_wrapped_modules_have_the_names_of_what_they_wrap(saved: Any) -> None:
    path, state = saved
    net = Net()
    load(torch.compile(net, backend="eager"), path)
    check_equal(net, state)


def test_numbers_are_converted_as_they_are_read(tmp_path: Path) -> None:
    x = torch.randn(6, 9)
    for there in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        save_file({"weight": x.to(there)}, tmp_path / "x.safetensors")
        for here in (torch.float32, torch.bfloat16):
            net = place(nn.Linear(9, 6, bias=False, dtype=here), S(1), S(0))
            load(net, tmp_path / "x.safetensors")
            assert torch.equal(net.weight.detach().full_tensor(), x.to(there).to(here))


# Other names, and what is made of several


def test_other_names(saved: Any, tmp_path: Path) -> None:
    _, state = saved
    save_file({f"model.{name}": x for name, x in state.items()}, tmp_path / "other.safetensors")
    for keys in ({"**": "model.**"}, lambda name: f"model.{name}"):
        net = place(Net(), S(0), R)
        load(net, tmp_path / "other.safetensors", keys=keys)
        check_equal(net, state)


def test_some_are_left_as_they_are(saved: Any) -> None:
    path, state = saved
    net = place(Net(), S(0), R)
    before = values(net)
    loaded = load(net, path, keys={"up.*": None}, strict=False)
    assert loaded.missing_keys == () and loaded.unexpected_keys == ("up.bias", "up.weight")
    check_equal(net, {**state, "up.weight": before["up.weight"], "up.bias": before["up.bias"]})


HEADS, WIDTH = 3, 12
FUSED: dict[str, tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor], Any]] = {
    "a fused weight": (
        {"qkv": torch.randn(3 * WIDTH, WIDTH)},
        lambda file: file["qkv"][WIDTH : 2 * WIDTH],
        From("qkv", make=lambda w: w.chunk(3)[1]),
    ),
    "fused and transposed": (
        {"c_attn": torch.randn(WIDTH, 3 * WIDTH)},
        lambda file: file["c_attn"].T[:WIDTH],
        From("c_attn", make=lambda w: w.T[:WIDTH]),
    ),
    "fused by heads": (
        {"qkv": torch.randn(HEADS * 3 * 4, WIDTH)},
        lambda file: file["qkv"].view(HEADS, 3, 4, WIDTH)[:, 2].reshape(WIDTH, WIDTH),
        From("qkv", make=lambda w: w.view(HEADS, 3, 4, WIDTH)[:, 2].reshape(WIDTH, WIDTH)),
    ),
    "fused by heads as it is read": (
        {name: torch.randn(4, WIDTH) for name in "qkv"},
        lambda file: torch.stack([x.view(2, 2, WIDTH) for x in file.values()], 1).flatten(0, 2),
        From("q", "k", "v", make=lambda *qkv: torch.stack([x.view(2, 2, WIDTH) for x in qkv], 1).flatten(0, 2)),
    ),
    "several": (
        {"a": torch.randn(5, WIDTH), "b": torch.randn(7, WIDTH)},
        lambda file: torch.cat([file["a"], file["b"]]),
        From("a", "b", make=lambda a, b: torch.cat([a, b])),
    ),
    "rotary halves": (
        {"w": torch.randn(WIDTH, WIDTH)},
        lambda file: file["w"].view(HEADS, 2, 2, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH),
        From("w", make=lambda w: w.view(HEADS, 2, 2, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH)),
    ),
}


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_what_is_made_of_others_is_read_as_it_is_needed(name: str, placements: Any, tmp_path: Path) -> None:
    state, make, source = FUSED[name]
    save_file({key: x.contiguous() for key, x in state.items()}, tmp_path / "x.safetensors")
    net = place(nn.Linear(WIDTH, WIDTH, bias=False), *placements)
    loaded = load(net, tmp_path, keys={"weight": source})
    assert torch.equal(whole(net.weight), make(state))
    assert loaded.num_bytes <= 1.05 * 4 * WIDTH * WIDTH


def test_what_is_computed_is_computed_of_the_whole(tmp_path: Path) -> None:
    state = {"w": torch.randn(4, WIDTH), "scale": torch.tensor(3.0)}
    save_file(state, tmp_path / "x.safetensors")
    net = place(nn.Linear(WIDTH, 4, bias=False), S(0), S(1))
    load(net, tmp_path, keys={"weight": From("w", "scale", make=lambda w, scale: (w + 1) * scale)})
    assert torch.equal(whole(net.weight), (state["w"] + 1) * 3)


TABLE = torch.arange(6.0)
RUN: dict[str, Callable[[Tensor], Tensor]] = {
    "with a tensor of its own": lambda w: w + TABLE,
    "with rows more": lambda w: torch.cat([w, torch.zeros(2, 6)]),
    "by what it holds": lambda w: w if w.sum() > 1e9 else -w,
    "by its largest number": lambda w: w / w.max().item(),
    "by numpy": lambda w: torch.from_numpy(w.numpy()[::-1].copy()),
}


@pytest.mark.parametrize("name", RUN)
def test_what_cannot_run_without_data_is_computed(name: str, tmp_path: Path) -> None:
    stored = torch.randn(4, 6)
    save_file({"w": stored}, tmp_path / "x.safetensors")
    right, net = RUN[name](stored), nn.Module()
    net.w = nn.Parameter(sw.distribute_tensor(torch.zeros_like(right), MESH, [S(0), S(1)]))
    load(net, tmp_path, keys={"w": From("w", make=RUN[name])})
    assert torch.equal(whole(net.w), right)


def test_wildcards() -> None:
    names = ["layers.0.attention.q.weight", "layers.10.mlp.weight", "head.weight"]
    found = resolved(names, {"layers.*.attention.*.weight": "h.*.attn.w_*", "layers.**": From("h.**", "x", make=max)})
    assert {name: source and source.keys for name, source in found.items()} == {
        "layers.0.attention.q.weight": ("h.0.attn.w_q",),
        "layers.10.mlp.weight": ("h.10.mlp.weight", "x"),
        "head.weight": ("head.weight",),
    }
    with pytest.raises(
        PlanError, match=r"^keys names 'layer\.\*', but no parameter or buffer that is left for it is called so$"
    ):
        resolved(names, {"layer.*": "x"})
    with pytest.raises(PlanError, match="left for it"):  # the first that fits counts
        resolved(names, {"**": "x.**", "head.*": "y.*"})
    with pytest.raises(
        PlanError, match=r"^the key 'a\.\*\.\*' has more wildcards than the name 'head\.\*' that it is for$"
    ):
        resolved(names, {"head.*": "a.*.*"})
    with pytest.raises(TypeError, match="a parameter is read from a key, or From"):
        resolved(names, lambda name: 3)
    with pytest.raises(TypeError, match="keys is a mapping from names, or a function of them: not a list"):
        resolved(names, ["a"])
    with pytest.raises(TypeError, match=r"From\('a', 'b'\): say what is made of several tensors, with make="):
        From("a", "b")
    with pytest.raises(TypeError, match="From takes the keys"):
        From()


def test_what_torch_cannot_compute_is_found_out_before(tmp_path: Path) -> None:
    """Not when half of the model is loaded."""
    state = {"a": torch.ones(4, WIDTH), "w": torch.ones(4, WIDTH).to(torch.float8_e4m3fn)}
    save_file(state, tmp_path / "x.safetensors")
    net = nn.Module()
    net.a, net.w = nn.Parameter(torch.zeros(4, WIDTH)), nn.Parameter(torch.zeros(4, WIDTH))
    with pytest.raises(
        CheckpointError, match=r"'w' is read From\('w', make=...\), which fails for float8_e4m3fn .*not implemented"
    ):
        load(net, tmp_path, keys={"w": From("w", make=lambda w: w.sinh())})
    assert not net.a.any()


# What does not fit


def refused(path: Path, words: str, *, keys: Any = None, strict: bool = True, net: Any = None) -> None:
    net = place(Net(), S(0), S(1)) if net is None else net
    before = values(net)
    with pytest.raises(CheckpointError, match=words):
        load(net, path, keys=keys, strict=strict)
    check_equal(net, before)


@pytest.mark.parametrize("call", [save, load])
def test_state_dicts_are_no_modules(call: Any, saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" if call is save else saved[0]
    with pytest.raises(TypeError, match=r"a OrderedDict is no module: state dicts are saved and loaded by torch\.dist"):
        call(Net().state_dict(), path)
    assert [*tmp_path.iterdir()] == [saved[0]]


def test_names_that_do_not_fit(saved: Any, tmp_path: Path) -> None:
    _, state = saved
    save_file({**state, "more": torch.ones(1), "still more": torch.ones(1)} | {}, tmp_path / "more.safetensors")
    refused(
        tmp_path / "more.safetensors",
        r"does not fit Net: the model has nothing for 'more', 'still more'\. If they have",
    )
    del state["up.bias"]
    save_file(state, tmp_path / "less.safetensors")
    refused(tmp_path / "less.safetensors", "does not fit Net: no file has 'up.bias'")
    refused(
        tmp_path / "less.safetensors",
        "no file has 'up.bias', 'down.bias'; the model has nothing for 'down.bias'",
        keys={"down.bias": "x"},
    )
    loaded = load(place(Net(), S(0), R), tmp_path / "less.safetensors", strict=False)
    assert loaded.missing_keys == ("up.bias",)


def test_shapes_and_dtypes_that_do_not_fit(saved: Any, tmp_path: Path) -> None:
    _, state = saved
    wrong = {**state, "up.weight": torch.ones(6, 10), "down.bias": torch.ones(6, dtype=torch.int32)}
    save_file(wrong, tmp_path / "x.safetensors")
    words = (
        r"x\.safetensors does not fit Net: 'up\.weight' has shape \[10, 6\], and From\('up\.weight'\) gives \[6, 10\], "
        r"'down\.bias' is float32, and int32 is not converted to that unasked$"
    )
    refused(tmp_path / "x.safetensors", words)
    refused(tmp_path / "x.safetensors", words, strict=False)
    keys = {
        "up.weight": From("up.weight", make=lambda w: w.T),
        "down.bias": From("down.bias", make=lambda b: b.float()),
    }
    load(place(Net(), S(0), R), tmp_path / "x.safetensors", keys=keys)


def test_functions_that_do_not_fit(saved: Any) -> None:
    path, _ = saved
    for make, words in (
        (
            lambda w: w.nothing,
            r"'up\.weight' is read From\('up\.weight', make=...\), which fails for float32 \[10, 6\]: '",
        ),
        (lambda w: w[11], "which fails for .* out of bounds|which fails for .*index 11"),
        (lambda w: [w], "which makes a list and not a tensor"),
        (lambda w: w[:2], r"has shape \[10, 6\], and From\('up\.weight', make=\.\.\.\) gives \[2, 6\]"),
    ):
        refused(path, words, keys={"up.weight": From("up.weight", make=make)})


def test_nothing_is_read_into_what_is_pending(saved: Any) -> None:
    path, _ = saved
    net = place(Net(), S(0), R)
    net.up.bias = nn.Parameter(sw.distribute_tensor(torch.ones(10), MESH, [sw.Partial(), R]))
    refused(path, r"'up\.bias' is \[10\] P\(sum\)@dp: reduce what is pending on it first", net=net)


def test_a_module_without_places_for_what_its_state_dict_has(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "weight"] = self.weight * 2

    save_file({"weight": torch.ones(3, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointError, match="'weight' is in the state dict of Odd, but it is neither a parameter nor a buf"
    ):
        load(Odd(2, 3), tmp_path)


def test_tensors_that_are_not_dense(tmp_path: Path) -> None:
    net = nn.Module()
    net.register_buffer("x", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"^'x' is a sparse_coo tensor, and only dense ones are saved and loaded"):
        save(net, tmp_path / "x.safetensors")


def test_tensors_of_others_who_keep_their_numbers_elsewhere(tmp_path: Path) -> None:
    """What asks for their memory gets none: torch's own DTensor, quantised weights."""
    net = nn.Linear(3, 3)
    save(net, tmp_path / "x.safetensors")
    save_step(tmp_path / "run", step=1, background=False, net=net)
    net.weight = nn.Parameter(TwoTensor(torch.zeros(3, 3), torch.ones(3, 3)))
    for call in (
        lambda: save(net, tmp_path / "y.safetensors"),
        lambda: load(net, tmp_path / "x.safetensors"),
        lambda: save_step(tmp_path / "run", step=2, net=net),
        lambda: load_latest(tmp_path / "run", net=net),
        lambda: save_step(tmp_path / "run", step=2, data={"weight": net.weight.detach()}),
    ):
        with pytest.raises(
            CheckpointError, match=r"weight' is a torch\..*TwoTensor, which knows alone where its numbers"
        ):
            call()
    assert not net.weight.a.any() and net.weight.b.all()


# Sets of files


def write_set(folder: Path, state: dict[str, Tensor], **metadata: Any) -> None:
    halves = [*state][::2], [*state][1::2]
    for number, names in enumerate(halves):
        more = {name: value[number] for name, value in metadata.items()}
        save_file(
            {name: state[name] for name in names}, folder / f"part-{number}.safetensors", {"format": "pt", **more}
        )
    index = {name: f"part-{number}.safetensors" for number, names in enumerate(halves) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_a_set_with_an_index(saved: Any, tmp_path: Path) -> None:
    _, state = saved
    (folder := tmp_path / "set").mkdir()
    write_set(folder, state)
    save_file({"more": torch.ones(1)}, folder / "adapter.safetensors")  # nobody's
    for path in (folder, folder / "model.safetensors.index.json", str(folder)):
        net = place(Net(), S(0), S(1))
        load(net, path)
        check_equal(net, state)


def test_sets_that_are_not_whole(saved: Any, tmp_path: Path) -> None:
    _, state = saved
    (folder := tmp_path / "set").mkdir()

    def changed(words: str, change: Callable[[dict[str, Any]], Any]) -> None:
        write_set(folder, state)
        said = json.loads((folder / "model.safetensors.index.json").read_text())
        said = change(said) or said
        (folder / "model.safetensors.index.json").write_text(json.dumps(said))
        refused(folder, words)

    def at(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda said: said["weight_map"].update({name: value})

    changed(
        r"key 'x': the index says that it is in part-0\.safetensors, which does not have it",
        at("x", "part-0.safetensors"),
    )
    changed("cannot read .*part-7.safetensors: No such file", at("x", "part-7.safetensors"))
    changed(
        r"key 'x': '\.\./set/part-0\.safetensors' is no name of a safetensors file beside the index",
        at("x", "../set/part-0.safetensors"),
    )
    for name in ("/etc/passwd", "\0.safetensors", "\ud800.safetensors"):
        changed(rf"key 'x': {re.escape(repr(name))} is no name", at("x", name))
    changed("an index has a weight_map, from keys to names of files", at("x", 3))
    changed("an index has a weight_map", lambda said: {"metadata": {}})
    changed("expected a JSON object, found a list", lambda said: [said])
    write_set(folder, state, **{"shardwise.set": ["a", "b"]})
    refused(folder, r"part-1\.safetensors: this file and part-0\.safetensors are not of the same save: save again")


def test_folders_that_say_nothing(saved: Any, tmp_path: Path) -> None:
    _, state = saved
    (folder := tmp_path / "none").mkdir()
    refused(
        folder, r"no \.safetensors file, and no \.safetensors\.index\.json file, is in .*; of other formats, `shardwise"
    )
    save_file(state, folder / "a.safetensors")
    load(place(Net(), S(0), R), folder)
    save_file(state, folder / "b.safetensors")
    refused(
        folder,
        r"has 2 safetensors files and no index that says which belong together: a\.safetensors, b\.safetensors\.",
    )
    save_file(state, folder / "model.safetensors")
    load(place(Net(), S(0), R), folder)
    (folder / "model.safetensors").unlink()
    for name in "ab":
        (folder / f"{name}.safetensors.index.json").write_text("{}")
    refused(
        folder, "has several indexes, a.safetensors.index.json, b.safetensors.index.json: name the one that is meant"
    )
    with pytest.raises(CheckpointFileError, match="No such file or directory"):
        load(Net(), tmp_path / "nowhere")


def test_files_cut_off(saved: Any) -> None:
    path, _ = saved
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path, "cut off|at least 8 bytes")
    with pytest.raises(DamagedFileError) as error:
        load(Net(), path)
    assert error.value.key == "norm.num_batches_tracked" or error.value.key is not None
    assert error.value.offset is not None


def test_of_many_names_the_first_are_said(saved: Any, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    refused(
        tmp_path / "x.safetensors",
        r"no file has 'up\.weight', 'up\.bias', 'down\.weight', 'down\.bias', 'norm\.weight' and 4 more; the model",
    )


def test_what_shares_memory_with_itself_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("rows", torch.ones(1, 3).expand(4, 3))
    save(net, tmp_path / "model")
    save_step(tmp_path / "steps", step=1, background=False, model=net)
    before = values(net)
    for read in (lambda: load(net, tmp_path / "model"), lambda: load_latest(tmp_path / "steps", model=net)):
        with torch.no_grad():
            net.weight.zero_()
        with pytest.raises(CheckpointError, match="'rows' of Linear is expanded: its elements share memory, and noth"):
            read()
        assert not net.weight.any()
    net.rows = net.rows.contiguous()
    load(net, tmp_path / "model")
    check_equal(net, before)


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_in_inference_mode(is_sharded: bool, on_meta: bool, saved: Any) -> None:
    """What has got memory there is good for training as well."""
    path, state = saved
    with torch.device("meta" if on_meta else "cpu"):
        net = Net()
    net.scratch = torch.full((3,), 7.0)
    if is_sharded:
        sw.fully_shard(net, mesh=MESH["dp"])
    with torch.inference_mode():
        load(net, path, keys={"up.weight": From("up.weight", make=lambda w: w[:])})
        check_equal(net, state)
        with_step = save_step(path.parent / "steps", step=1, model=net).wait()
        assert load_latest(with_step.parent, model=net) == 1
    x = torch.randn(4, 6)
    net(sw.distribute_tensor(x, MESH["dp"], [S(0)]) if is_sharded else x).sum().backward()
    assert all(param.grad is not None for param in net.parameters())
