"""Files of `transformers`, both ways: tiny random models, sharded, beside what transformers itself reads and writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import load, load_pretrained, save_pretrained
from shardwise.errors import CheckpointError, CheckpointFileError, ShardMemoryError
from shardwise.parallel import parallelize_module

transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MESH = sw.simulate((2, 2), ("dp", "tp"))
SIZES = {
    **{"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32},
}


def causal(config: str, **options: Any) -> Callable[[], Any]:
    """A model of random numbers, the same ones every time."""

    def make() -> Any:
        torch.manual_seed(0)
        made = getattr(transformers, config)(**{**SIZES, **options})
        return transformers.AutoModelForCausalLM.from_config(made).eval()

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "llama": causal("LlamaConfig"),
    "tied": causal("LlamaConfig", tie_word_embeddings=True),
    "experts": causal("MixtralConfig", num_local_experts=4),  # in files by themselves, in memory as one tensor
    "gpt2": causal("GPT2Config", n_embd=16, n_layer=2, n_head=4, n_positions=32),  # transposed weights
}


def by_plan(model: Any) -> Any:
    return parallelize_module(model, MESH["tp"], model._tp_plan)


def fully_sharded(model: Any) -> Any:
    for block in next(part for part in model.modules() if isinstance(part, nn.ModuleList)):
        sw.fully_shard(block, mesh=MESH["dp"])
    return sw.fully_shard(model, mesh=MESH["dp"])


CASES = [(name, way) for name in MODELS for way in (by_plan, fully_sharded) if (name, way) != ("gpt2", by_plan)]
cases = pytest.mark.parametrize(("name", "way"), CASES, ids=lambda x: getattr(x, "__name__", x))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.full_tensor() if isinstance(x, sw.DTensor) else x for name, x in model.state_dict().items()}


def check_equal(found: nn.Module, expected: nn.Module) -> None:
    state = values(found)
    for name, x in values(expected).items():
        assert torch.equal(state[name], x), name


def emptied(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model


@cases
def test_transformers_reads_what_is_saved(name: str, way: Callable, tmp_path: Path) -> None:
    expected, model = MODELS[name](), way(MODELS[name]())
    save_pretrained(model, tmp_path / "ours", max_shard_size="12KB")
    expected.save_pretrained(tmp_path / "theirs", max_shard_size="12KB")
    assert {*os.listdir(tmp_path / "theirs")} - {*os.listdir(tmp_path / "ours")} <= {
        file for file in os.listdir(tmp_path / "theirs") if file.startswith("model-")
    }
    found, about = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(about.values()), about
    check_equal(found, expected)


@cases
def test_what_transformers_writes_is_loaded(name: str, way: Callable, tmp_path: Path) -> None:
    expected, model = MODELS[name](), way(emptied(MODELS[name]()))
    expected.save_pretrained(tmp_path, max_shard_size="12KB")
    loaded = load_pretrained(model, tmp_path)
    check_equal(model, expected)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ((), ())
    size = sum(x.numel() * x.element_size() for x in {id(x): x for x in expected.parameters()}.values())
    assert loaded.num_bytes <= 1.05 * size  # of all ranks; experts and fused weights as well
    if way is by_plan:
        x = torch.arange(8).view(1, 8)
        with torch.no_grad():
            torch.testing.assert_close(model(x).logits, expected(x).logits, atol=1e-5, rtol=1e-4)


def test_parts_that_are_fully_sharded_by_themselves(tmp_path: Path) -> None:
    """transformers finds conversions by the names of classes, which `fully_shard` changes."""
    expected = MODELS["experts"]()

    def sharded(model: Any) -> Any:
        sw.fully_shard(model.model, mesh=MESH["dp"])
        return sw.fully_shard(model, mesh=MESH["dp"])

    model = sharded(MODELS["experts"]())
    save_pretrained(model, tmp_path / "ours")
    assert type(model).__name__ == "FSDPMixtralForCausalLM"
    expected.save_pretrained(tmp_path / "theirs")
    assert stored(tmp_path / "ours").keys() == stored(tmp_path / "theirs").keys()
    other = sharded(emptied(MODELS["experts"]()))
    load_pretrained(other, tmp_path / "theirs")
    check_equal(other, expected)


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def converter(source: str | list[str], target: str | list[str], *operations: Any) -> Any:
    return loading.WeightConverter(source, target, operations=[getattr(loading, name)(**by) for name, by in operations])


CONVERSIONS: dict[str, tuple[bool, Callable[[], Any]]] = {
    "put together": (
        False,
        lambda: converter("qkv.weight", [f"{x}_proj.weight" for x in "qkv"], ("Chunk", {"dim": 0})),
    ),
    "taken apart": (
        False,
        lambda: converter([r"mlp.up_proj.0", r"mlp.up_proj.1"], "mlp.up_proj.weight", ("Concatenate", {"dim": 1})),
    ),
    "transposed": (False, lambda: converter("out", "mlp.down_proj.weight", ("Transpose", {}))),
    "by turns": (True, lambda: converter("out", "mlp.down_proj.weight", ("Interleave", {"dim": 0}))),
    "joined by turns": (
        True,
        lambda: converter(
            "g", ["gate_proj.weight", "up_proj.weight"], ("Interleave", {"dim": 0}), ("Chunk", {"dim": 0})
        ),
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("way", [by_plan, fully_sharded])
def test_what_is_taken_apart_and_put_together_is_written_where_it_is(name: str, way: Callable, tmp_path: Path) -> None:
    """Ranks have no more than their shards then; what else becomes of them is computed of DTensors."""
    moves, convert = CONVERSIONS[name]
    expected, model = MODELS["llama"](), way(MODELS["llama"]())
    expected._weight_conversions, model._weight_conversions = [convert()], [convert()]
    expected.save_pretrained(tmp_path / "theirs")
    with sw.debug.CommDebugMode() as comms:
        save_pretrained(model, tmp_path / "ours")
    assert moves or not comms.comms
    found, right = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert found.keys() == right.keys() != MODELS["llama"]().state_dict().keys()
    assert all(torch.equal(found[key], x) for key, x in right.items())


def test_experts_are_written_where_they_are(tmp_path: Path) -> None:
    for way in (by_plan, fully_sharded):
        model = way(MODELS["experts"]())
        with sw.debug.CommDebugMode() as comms:
            save_pretrained(model, tmp_path / way.__name__)
        assert not comms.comms


class Numbers:
    """A conversion that looks at numbers, of which there are none on the meta device."""

    def convert(self, given: dict[str, Any], source_patterns: Any, target_patterns: Any, **_: Any) -> dict[str, Tensor]:
        (x,) = (x[0] if isinstance(x, list) else x for x in given.values())
        return {target_patterns[0]: x * 2 if x.abs().sum().item() else x}

    @property
    def reverse_op(self) -> Any:
        return self


def test_what_looks_at_numbers_is_computed_of_them(tmp_path: Path) -> None:
    expected, model = MODELS["llama"](), fully_sharded(MODELS["llama"]())
    for one in (expected, model):
        one._weight_conversions = [loading.WeightConverter("out", "mlp.down_proj.weight", operations=[Numbers()])]
    expected.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours")
    found, right = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert found.keys() == right.keys() and all(torch.equal(found[key], x) for key, x in right.items())


def test_there_and_back_with_checksums(tmp_path: Path) -> None:
    expected = MODELS["experts"]()
    save_pretrained(by_plan(MODELS["experts"]()), tmp_path)
    other = fully_sharded(emptied(MODELS["experts"]()))
    load_pretrained(other, tmp_path, verify=True)
    check_equal(other, expected)
    with pytest.raises(
        CheckpointError, match=r"no file has 'model\.layers\.0\.mlp\.gate\.weight', .* and \d+ more; the"
    ):
        load(other, tmp_path)  # by names alone


def test_transformers_reads_what_is_saved_over_another_model(tmp_path: Path) -> None:
    """Files of a set have names that were not there; the index says which."""
    for _ in range(3):
        expected = MODELS["llama"]()
        for x in expected.parameters():
            nn.init.normal_(x)
        model = MODELS["llama"]()
        model.load_state_dict(expected.state_dict())
        save_pretrained(fully_sharded(model), tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        check_equal(type(expected).from_pretrained(tmp_path), expected)


def test_a_base_model_and_one_with_a_head(tmp_path: Path) -> None:
    expected = MODELS["llama"]()
    expected.model.save_pretrained(tmp_path)
    model = by_plan(emptied(MODELS["llama"]()))
    with pytest.raises(CheckpointError, match=r"no file has 'lm_head\.weight'"):
        load_pretrained(model, tmp_path)
    assert load_pretrained(model, tmp_path, strict=False).missing_keys == ("lm_head.weight",)
    check_equal(model.model, expected.model)


def test_transformers_own_way_says_what_to_call(tmp_path: Path) -> None:
    model = by_plan(MODELS["llama"]())
    with pytest.raises(
        ShardMemoryError, match=r"Files of a sharded model are written and read by shardwise\.checkpoint"
    ):
        model.save_pretrained(tmp_path)
    for call in (save_pretrained, load_pretrained):
        with pytest.raises(
            TypeError, match=r"a Linear is no model of transformers; shardwise\.checkpoint\.save and load"
        ):
            call(nn.Linear(2, 2), tmp_path)


def test_what_was_there_stays_if_the_weights_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_plan(MODELS["llama"]())
    save_pretrained(model, tmp_path, max_shard_size="12KB")
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointFileError, match="No space left on device"):
            save_pretrained(emptied(model), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
    save_pretrained(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert not [path for path in tmp_path.parent.iterdir() if "unfinished" in path.name]
