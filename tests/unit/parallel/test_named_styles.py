"""Hugging Face's models by the plans that they carry: one device's values, gradients and tokens, from one line."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.errors import MeshError, PlanError
from shardwise.parallel import ColwiseParallel, fully_shard, parallelize_module
from shardwise.parallel.named_styles import MEANINGS

transformers = pytest.importorskip("transformers")

LAYERS = 2
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {},
    "Gemma": {"head_dim": 8},  # the head is the table
    "Gemma2": {"head_dim": 8},
    "Phi3": {},  # queries, keys and values are one layer, as are gate and up
    "Cohere": {},  # attention and MLP side by side
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}
EXPERTS = ("Mixtral", "Qwen3Moe")
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


@functools.cache
def _built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**CONFIG, **KINDS[kind]))
    return model.to(torch.float32 if kind in EXPERTS else torch.float64).eval()


def build(kind: str = "Llama") -> nn.Module:
    return copy.deepcopy(_built(kind))


def pair(kind: str = "Llama", size: int = 2, **changes: str) -> tuple[nn.Module, nn.Module]:
    plain, model = build(kind), build(kind)
    mesh = sw.simulate((2, size), ("dp", "tp"))
    assert parallelize_module(model, mesh["tp"], model._tp_plan | changes) is model
    return plain, model


def check_loss_and_gradients(plain: nn.Module, model: nn.Module) -> Any:
    a, b = plain(IDS, labels=IDS), model(IDS, labels=IDS)
    assert type(b.loss) is type(b.logits) is Tensor
    torch.testing.assert_close(b.logits, a.logits)
    torch.testing.assert_close(b.loss, a.loss)
    a.loss.backward()
    b.loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, name=name: f"{name}: {m}")
    return b


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind: str) -> None:
    check_loss_and_gradients(*pair(kind))


@pytest.mark.parametrize("kind", ["Llama", "Gemma", "Mixtral"])
@pytest.mark.parametrize("size", [3, 4])
def test_any_number_of_ranks(kind: str, size: int) -> None:
    check_loss_and_gradients(*pair(kind, size))


@pytest.mark.parametrize("kind", EXPERTS)
def test_expert_parallel_plans(kind: str) -> None:
    plain, model = pair(kind, 2, **build(kind)._ep_plan)
    assert model.model.layers[0].mlp.experts.down_proj.placements == (Shard(0),)
    check_loss_and_gradients(plain, model)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache(kind: str) -> None:
    plain, model = pair(kind)
    tokens = [net.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for net in (plain, model)]
    assert type(tokens[1]) is Tensor and torch.equal(*tokens)


WAYS = [
    {"num_beams": 3},
    {"do_sample": True, "top_k": 5},
    {"cache_implementation": "static"},
    {"use_cache": False},
    {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
def test_other_ways_to_generate(way: dict[str, Any]) -> None:
    found = []
    for net in pair():
        torch.manual_seed(3)
        found.append(net.generate(IDS[:, :4], max_new_tokens=6, **way))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Gemma", "Gemma2"])
def test_communication_is_megatrons(kind: str) -> None:
    _, model = pair(kind)
    with CommDebugMode() as forward:
        loss = model(IDS, labels=IDS).loss
    with CommDebugMode() as backward:
        loss.backward()
    assert forward.get_comm_counts() == {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1}  # the logits
    assert backward.get_comm_counts() == {"all_reduce": 1 + 2 * LAYERS}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """The backward pass calls layers outside of the model's forward, with plain positions and masks."""
    nets = pair("Qwen3")
    for net in nets:
        net.train()
        enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)  # its older name
        enable({"use_reentrant": reentrant})
    check_loss_and_gradients(*nets)


def test_what_comes_out_is_plain_unless_dtensors_go_in() -> None:
    plain, model = pair()
    found = model(IDS, output_hidden_states=True)
    assert all(type(x) is Tensor for x in found.hidden_states)
    torch.testing.assert_close(found.hidden_states[1], plain(IDS, output_hidden_states=True).hidden_states[1])
    logits, cache = model(IDS, return_dict=False)
    assert type(logits) is Tensor and isinstance(cache.layers[0].keys, DTensor)
    mesh = model.lm_head.weight.device_mesh
    assert type(model(sw.distribute_tensor(IDS, mesh)).logits) is DTensor
    embeds = plain.model.embed_tokens(IDS)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, plain(inputs_embeds=embeds).logits)


def test_nothing_is_replicated_after_a_call_that_failed() -> None:
    _, model = pair()
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()
    with pytest.raises(sw.errors.MixedTensorError):
        model.lm_head.weight + torch.ones(64, 32)


def test_training_as_on_one_device() -> None:
    nets = pair()
    for net in nets:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            net((IDS + step) % 64, labels=(IDS + step) % 64).loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
    for (name, p), q in zip(nets[1].named_parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), msg=lambda m, name=name: f"{name}: {m}")


def test_a_model_keeps_its_class_and_is_copied_and_pickled() -> None:
    plain, model = pair()
    assert isinstance(model, type(plain)) and repr(type(model)) == repr(type(plain))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again is not model and again.model.layers[0].mlp.up_proj.weight.placements == (Shard(0),)
        torch.testing.assert_close(again(IDS).logits, plain(IDS).logits)


def test_tied_weights_stay_tied() -> None:
    _, model = pair("Gemma")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.placements == (Shard(0),)


@pytest.mark.parametrize("batches", ["of each rank", "laid out"])
@pytest.mark.parametrize("order", ["by the plan first", "fully sharded first"])
def test_fully_sharded_on_another_axis(order: str, batches: str) -> None:
    plain, model, mesh = build(), build(), sw.simulate((2, 2), ("dp", "tp"))
    parts = [*model.model.layers, model]
    if order == "by the plan first":
        parallelize_module(model, mesh["tp"], model._tp_plan)
    for module in parts:
        fully_shard(module, mesh=mesh["dp"])
    if order == "fully sharded first":
        parallelize_module(model, mesh["tp"], model._tp_plan)
    assert str(model.model.layers[0].mlp.up_proj.weight.layout_on_mesh) == "[48,32] S(0)@tp,dp"
    laid = sw.distribute_tensor(IDS, mesh, [Shard(0), Replicate()])
    check_training(plain, model, laid if batches == "laid out" else laid.to_local())


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")  # experts count their tokens by histc
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_data_parallel_on_another_axis(kind: str) -> None:
    """A batch that is laid out on both axes stays split along the one that the plan knows nothing of."""
    plain, model, mesh = build(kind), build(kind), sw.simulate((2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], model._tp_plan)
    sw.distribute_module(model, mesh)
    check_training(plain, model, sw.distribute_tensor(IDS, mesh, [Shard(0), Replicate()]))


def test_a_sequence_that_is_split_on_another_axis_too() -> None:
    plain, mesh = Layers(), sw.simulate((2, 2), ("dp", "tp"))
    net = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"norm": "sequence_parallel", "up": "colwise"})
    sw.distribute_module(net, mesh)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    found = net(sw.distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    assert found.placements[0] == Shard(0)
    torch.testing.assert_close(found.full_tensor(), plain(x))


def check_training(plain: nn.Module, model: nn.Module, own: Any) -> None:
    for net, batch in ((plain, IDS), (model, own)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            net(batch, labels=batch).loss.backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_run_as_they_are(backend: str) -> None:
    plain, model = pair()
    with warnings.catch_warnings(action="error"):
        found = torch.compile(model, backend=backend)(IDS).logits
    torch.testing.assert_close(found, plain(IDS).logits)


# Names one by one, and what does not fit


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.table = nn.Parameter(torch.randn(3, 8, 12))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu()) + torch.einsum("bsd,edf->bsf", x, self.table).sum(
            -1, keepdim=True
        )


@pytest.mark.parametrize("name", MEANINGS)
def test_every_name_on_layers_and_parameters(name: str) -> None:
    torch.manual_seed(0)
    plain, x = Layers(), torch.randn(2, 5, 8, dtype=torch.float64)
    model = copy.deepcopy(plain)
    parallelize_module(model, sw.simulate((2,), ("tp",)), {"up": name, "norm": name, "table": name})
    for net in (plain, model):
        net(x).square().sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, key=key: f"{key}: {m}")


PLACED = {
    "colwise": (Shard(0), Shard(0), Shard(1)),
    "rowwise": (Shard(1), Replicate(), Shard(2)),
    "grouped_gemm": (Shard(0), Shard(0), Shard(0)),
    "replicate": (Replicate(), Replicate(), Replicate()),
}


@pytest.mark.parametrize("name", PLACED)
def test_where_weights_go(name: str) -> None:
    model = parallelize_module(Layers(), sw.simulate((2,), ("tp",)), {"up": name, "table": name})
    assert tuple(p.placements[0] for p in (model.up.weight, model.up.bias, model.table)) == PLACED[name]


def test_every_name_that_a_config_carries_is_known() -> None:
    """All but those of one kernel, for which there is no other way to compute."""
    known = import_module("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES.keys()
    assert {name for name in known if "megamoe" not in name} <= MEANINGS.keys()


def test_a_plan_that_does_not_fit_distributes_nothing() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    model = build()
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (
            {"lm_head": "colwize"},
            mesh["tp"],
            PlanError,
            "the plan's style 'colwize' for 'lm_head' is unknown; known are ",
        ),
        ({"lm_haed": "colwise"}, mesh["tp"], PlanError, "the plan names 'lm_haed', but no module of Llama"),
        (
            {"lm_head": ColwiseParallel()},
            mesh["tp"],
            PlanError,
            "module 'lm_head': in a plan with styles by name, plain",
        ),
        ({}, mesh, MeshError, "'colwise_gather_output' takes a mesh of one axis, such as mesh['tp']"),
    ]
    for change, where, kind, words in cases:
        with pytest.raises(kind) as error:
            parallelize_module(model, where, model._tp_plan | change)
        assert words in str(error.value)
        assert not any(isinstance(p, DTensor) for p in model.parameters()) and type(model) is type(build())
    parallelize_module(model, mesh["tp"], model._tp_plan)
    with pytest.raises(
        PlanError, match=r"lm_head\.weight is a DTensor already, .*; 'colwise_gather_output' shards plain"
    ):
        parallelize_module(model, mesh["tp"], model._tp_plan)


def test_layers_that_this_model_does_not_have_are_passed_over() -> None:
    """A plan is written for all models of its kind."""
    model = build()
    model._tp_plan["model.layers.*.mlp.experts.gate_up_proj"] = "packed_colwise"
    parallelize_module(model, sw.simulate((2,), ("tp",)), model._tp_plan)


def test_styles_beside_names() -> None:
    plain, model = build(), build()
    style = ColwiseParallel(use_local_output=False)
    parallelize_module(model, sw.simulate((2,), ("tp",)), model._tp_plan | {"lm_head": style})
    check_loss_and_gradients(plain, model)
    with CommDebugMode() as comm:
        model(IDS, labels=IDS)
    assert comm.get_comm_counts()["all_gather"] == 1  # the logits that are returned; the loss has them sharded
