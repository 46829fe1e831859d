"""Hugging Face's models, built from their configs and laid out by names of parameters, as tensor-parallel plans do.

They make masks and positions of their own, which every rank makes alike: `implicit_replication` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from scheduled import Program, Size, Split, asked
from scheduled_blocks import BOTH, data_parallel, megatron
from scheduled_modules import CACHES, DECODING_SIZES, decoding, decoding_inputs
from shardwise.experimental import implicit_replication
from transformer import COLUMN, ROW, token_ids
from wire import Schedule, all_reduce

HALF = torch.bfloat16
NUM_EXPERTS, TOP_K = 8, 2
NUM_LABELS = 16
SIZES = (
    Size(1, 4, 64, tp=2),
    Size(2, 16, 64, tp=4),
    Size(2, 16, 64, tp=8),
    Size(1, 512, 1024, tp=4),
    Size(4, 256, 1024, tp=8),
    Size(1, 2048, 4096, tp=8, layers=32),  # as wide and deep as 7B
    Size(8, 8192, 8192, tp=8),
)


class LossOf(nn.Module):
    """A model, called by keywords, and its loss."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True))).loss


def decoder_config(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.width,
        "intermediate_size": 11 * size.width // 4,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads if size.seq == 1 else max(size.tp, size.heads // 4),
        "max_position_embeddings": 1 << 16,
        "use_cache": True,  # without, the model looks for packed sequences in data, of which meta tensors have none
    }


# --- Llama ---


def llama(size: Size, *, dtype: torch.dtype | None = None) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**decoder_config(size)))
    return LossOf(model if dtype is None else model.to(dtype), "input_ids", "labels")


def decoder(size: Size, *, itemsize: int = 4) -> Schedule:
    """A split vocabulary around Megatron's blocks. Small: the loss is made in float32."""
    stream, row = all_reduce(size.activation, size.tp, itemsize=itemsize), all_reduce(size.tokens, size.tp)
    halves = (stream,) * (2 * size.layers)
    return Schedule((stream, *halves, row, row, row), (stream, *halves))


class NextToken(nn.Module):
    """Hugging Face's Llama, one token for each sequence, and a cache of what came before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = llama(size).model

    def forward(self, tokens: Tensor, *caches: Tensor) -> Tensor:
        from transformers import DynamicCache

        past = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(zip(caches[::2], caches[1::2], strict=True)):
            past.update(keys, values, layer)
        return self.model(tokens, past_key_values=past, use_cache=True).logits.argmax(-1)


ATTENTION = {"*.q_proj.*": COLUMN, "*.k_proj.*": COLUMN, "*.v_proj.*": COLUMN, "*.o_proj.weight": ROW}
LLAMA = ATTENTION | {
    "*embed_tokens.weight": COLUMN,
    "*lm_head.weight": COLUMN,
    "*.gate_proj.weight": COLUMN,
    "*.up_proj.weight": COLUMN,
    "*.down_proj.weight": ROW,
}


# --- Mixtral ---


class OwnExperts(nn.Module):
    """Each rank runs its own experts on the tokens that are routed to them: written for one rank, as engineers write
    expert parallelism, between `to_local` and `from_local`."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts
        self.numbers = nn.Buffer(torch.arange(experts.num_experts))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if not isinstance(x, sw.DTensor):
            return self.experts(x, chosen, weights)
        mesh, (terms,) = x.device_mesh, (sw.Partial(),)
        numbers = asked(self.numbers, tp=0).to_local()
        local = [asked(t).to_local(grad_placements=[terms]) for t in (x, weights)]
        own = {name: parameter.to_local() for name, parameter in self.experts.named_parameters()}
        return sw.DTensor.from_local(
            self.on_one_rank(own, numbers, local[0], asked(chosen).to_local(), local[1]), mesh, [terms]
        )

    def on_one_rank(
        self, own: dict[str, Tensor], numbers: Tensor, x: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """Experts of other ranks have a number past the last, which the model passes over."""
        experts, count = self.experts, len(numbers)
        elsewhere = (chosen < numbers[0]) | (chosen > numbers[-1])
        local = torch.where(elsewhere, count, chosen - numbers[0])
        num_experts, experts.num_experts, experts._is_expert_parallel = experts.num_experts, count, True
        try:
            return torch.func.functional_call(experts, own, (x, local, weights))
        finally:
            experts.num_experts, experts._is_expert_parallel = num_experts, False


def mixtral(size: Size, *, by_layout: bool = False) -> nn.Module:
    """`by_layout`: the model as it is, with its experts laid out on the ranks and nothing written for one rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**decoder_config(size), num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K)
    model = MixtralForCausalLM(config).to(torch.bfloat16)  # on meta, grouped products are of nothing else
    for layer in model.model.layers if not by_layout else ():
        layer.mlp.experts = OwnExperts(layer.mlp.experts)
    return LossOf(model, "input_ids", "labels")


def expert_parallel(size: Size) -> Schedule:
    """The experts' sums are where the MLP's would be. Small: the gradient of the weights that tokens are routed by."""
    routed = all_reduce(TOP_K * size.tokens, size.tp)
    return decoder(size, itemsize=2) + Schedule((), (routed,) * size.layers)


MIXTRAL = LLAMA | {"*.experts.gate_up_proj": COLUMN, "*.experts.down_proj": COLUMN}


# --- T5 ---


def t5(size: Size, *, dtype: torch.dtype | None = None) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=size.vocab,
        d_model=size.width,
        d_kv=size.head_dim,
        d_ff=size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    return LossOf(model if dtype is None else model.to(dtype), "input_ids", "labels")


def encoder_and_decoder(size: Size, *, itemsize: int = 4) -> Schedule:
    """Two embeddings, two halves in each layer of the encoder, three in the decoder's; backward, all layers share the
    sum of the gradient of what the encoder gave."""
    stream, row = all_reduce(size.activation, size.tp, itemsize=itemsize), all_reduce(size.tokens, size.tp)
    layers = (stream,) * (5 * size.layers)
    return Schedule((stream, stream, *layers, row, row, row), (stream, stream, *layers))


T5 = {
    "*.shared.weight": COLUMN,
    "*.q.weight": COLUMN,
    "*.k.weight": COLUMN,
    "*.v.weight": COLUMN,
    "*.o.weight": ROW,
    "*.relative_attention_bias.weight": {"tp": 1},  # by heads
    "*.wi.weight": COLUMN,
    "*.wo.weight": ROW,
}


# --- ViT ---

PATCH = 8


def vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.hidden,
        image_size=PATCH * sides(size),
        patch_size=PATCH,
        num_labels=NUM_LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return LossOf(ViTForImageClassification(config), "pixel_values", "labels")


def sides(size: Size) -> int:
    """Patches along a side of an image: the sequence has one more token than their square."""
    return int((size.seq - 1) ** 0.5)


def images(size: Size) -> tuple[Tensor, ...]:
    side = PATCH * sides(size)
    return torch.randn(size.batch, 3, side, side), torch.randint(NUM_LABELS, (size.batch,))


def image_classes(size: Size) -> Schedule:
    """Patches, positions and classes are whole on every rank."""
    return megatron(size) * size.layers


VIT = ATTENTION | {"*.fc1.*": COLUMN, "*.fc2.weight": ROW}
VIT_SIZES = (
    Size(1, 5, 64, tp=2),
    Size(2, 17, 64, tp=4),
    Size(4, 257, 1024, tp=8),
    Size(8, 1025, 4096, tp=8),
    Size(64, 1025, 8192, tp=8),
)


def both(size: Size) -> Schedule:
    return decoder(size) + data_parallel(llama, LLAMA, size)


def hugging_face(
    name: str,
    build: Callable[[Size], nn.Module],
    schedule: Callable[[Size], Schedule],
    splits: dict[str, Any],
    *,
    inputs: Callable[[Size], tuple[Tensor, ...]] = token_ids,
    sizes: tuple[Size, ...] = SIZES,
    input_splits: tuple[Split, ...] = (),
    trains: bool = True,
    tolerance: float = 1e-5,
) -> Program:
    return Program(
        f"Hugging Face {name}",
        build,
        inputs,
        schedule,
        sizes,
        splits,
        input_splits,
        trains=trains,
        inside=implicit_replication,
        needs="transformers",
        tolerance=tolerance,
    )


PROGRAMS = (
    hugging_face("Llama", llama, decoder, LLAMA),
    hugging_face("Llama, bfloat16", partial(llama, dtype=HALF), partial(decoder, itemsize=2), LLAMA, tolerance=3e-2),
    hugging_face("Llama, dp × tp", llama, both, LLAMA, sizes=BOTH, input_splits=({"dp": 0}, {"dp": 0})),
    hugging_face(
        "Llama, decoding",
        NextToken,
        decoding,
        LLAMA,
        inputs=decoding_inputs,
        input_splits=CACHES,
        sizes=DECODING_SIZES,
        trains=False,
    ),
    hugging_face("Mixtral, expert parallel", mixtral, expert_parallel, MIXTRAL, tolerance=3e-2),
    hugging_face(
        "Mixtral, experts by layout",
        partial(mixtral, by_layout=True),
        expert_parallel,
        MIXTRAL,
        tolerance=3e-2,
    ),
    hugging_face("T5", t5, encoder_and_decoder, T5),
    hugging_face(
        "T5, bfloat16",
        partial(t5, dtype=HALF),
        partial(encoder_and_decoder, itemsize=2),
        T5,
        tolerance=0.15,  # plain torch's own gradients are off by up to 0.11 from those in float64
    ),
    hugging_face("ViT", vit, image_classes, VIT, inputs=images, sizes=VIT_SIZES),
)
