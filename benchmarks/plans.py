"""Every family of Hugging Face's models of text that carries a plan, parallelized by it, against one device.

    python benchmarks/plans.py [FAMILY ...]   print a line for each
    python benchmarks/plans.py --write        and write benchmarks/results/plans-<date>.md (a quarter of an hour)

Small random models, two simulated ranks: the loss, all gradients, and tokens generated with a cache. Families that are
not made to continue text are judged by a weighted sum of what they put out. What the models compute is theirs; a family
that this file does not know how to make small is listed, not judged. Differences are relative to the largest number, in
float32.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

import shardwise
from race import Row, Table
from shardwise.debug import CommDebugMode
from shardwise.parallel import parallelize_module

TOLERANCE, LARGEST = 1e-4, 5_000_000
BASE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_topk": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_layer_freq": 1},
    **{"first_k_dense_replace": 1, "moe_layer_start_index": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
}
OTHERWISE: tuple[dict[str, Any], ...] = (  # tried in turn, until one can be built and run
    {},
    {"head_dim": 4, "num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 8},
    {"layer_types": ["full_attention", "full_attention"]},
)
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "crop_size": 28}
AUDIO = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 4},
    **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 32),
}
INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 4, "compress_ratio": 2}
ROTATED = {"rope_type": "default", "rope_theta": 1e4}
IMAGES = {"rope_parameters": ROTATED | {"mrope_section": [2, 1, 1]}}
OWN: dict[str, dict[str, Any]] = {  # what some families need besides
    "cohere_compass_text": {"rope_parameters": {"full_attention": IMAGES["rope_parameters"]}},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 2},
    "granitemoehybrid": {
        **{"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_state": 8},
        **{"shared_intermediate_size": 16},
    },
    "minimax_m3_vl_text": {"moe_layer_freq": [0, 1]},
    "phi4_multimodal": {"vision_config": VISION | {"image_size": 28}, "audio_config": AUDIO},
    "qwen4_exp_text": {
        **{"layer_types": ["linear_attention", "indexed_attention"]},
        **{f"indexer_{name}": value for name, value in INDEXER.items()},
    },
    "glm4v_moe_text": {"rope_parameters": ROTATED | {"mrope_section": [1, 1, 0]}},
    "esmc": {"num_key_value_heads": 4},
    "glm5_next_text": {
        **{"num_key_value_heads": 4, "qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 8},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "index_kpool": 2},
        **{"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    },
    "neomme": {"head_dim": 16},
    "cosmos3_edge_text": IMAGES,
    **dict.fromkeys(("glm4v_text", "glm_image_text", "glm_ocr_text", "qwen2_vl_text", "qwen2_5_vl_text"), IMAGES),
}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 2,
}
_MUSE = {"vision_config": _ENCODER, "out_hidden_size": 128, "projector_hidden_size": 32, "text_config": BASE}
OWN |= {
    "gemma4_vision": {
        "num_key_value_heads": 4,
        "patch_size": 2,
        "position_embedding_size": 8,
        "pooling_kernel_size": 2,
    },
    "muse_glimmer_vision": {"num_key_value_heads": 4, "patch_size": 2},
    "muse_glimmer": _MUSE,
    "muse_spark": {
        **_MUSE,
        **{"text_config": BASE | {"moe_hidden_size": 32}},
        **{"audio_config": {"out_hidden_size": 32, "hidden_sizes": [8, 8, 16, 32], "depths": [1, 1, 1, 1]}},
    },
}
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


INPUTS: dict[str, Callable[[], dict[str, Tensor]]] = {  # of families that do not take tokens
    "gemma4_vision": lambda: {
        "pixel_values": _drawn(2, 16, 12),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1),
    },
    "muse_glimmer_assistant": lambda: {
        "noise_embeds": _drawn(2, 16, 32),
        "context_hidden_states": _drawn(2, 5, 5 * 32),
    },
    "muse_glimmer_vision": lambda: {"pixel_values": _drawn(16, 24), "grid_thw": torch.tensor([[1, 4, 4]])},
}


def class_of(family: str) -> str:
    """The name of the class that has a family's plan: of one that continues text, else completes it, else takes it."""
    kinds = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES)
    name: Any = next((kind[family] for kind in kinds if family in kind), "")
    return name if isinstance(name, str) else name[0]


def families(wanted: list[str]) -> Iterator[str]:
    for family in wanted or sorted(CONFIG_MAPPING):
        if getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) and hasattr(transformers, class_of(family)):
            yield family


def built(family: str) -> nn.Module | str:
    """A small model that one device can run, or why there is none."""
    reason = ""
    for change in (OWN[family],) if family in OWN else OTHERWISE:
        try:
            cls, config = (
                getattr(transformers, class_of(family)),
                CONFIG_MAPPING[family](**copy.deepcopy(BASE | change)),
            )
            config = config if family != "llama4" else config.get_text_config().__class__(**BASE)
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
            if size < LARGEST:
                torch.manual_seed(0)
                model = cls(config).eval()
                loss_of(model).backward()
                return model
            reason = "large"
        except Exception as error:  # theirs: the configuration is none of this family's
            reason = reason or f"{type(error).__name__}: {error}".split("\n")[0]
    return reason


def continues(model: nn.Module) -> bool:
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def loss_of(model: Any) -> Tensor:
    if continues(model):
        return model(IDS, labels=IDS).loss
    made = INPUTS.get(model.config.model_type)
    output = (model(**made()) if made else model(IDS))[0]
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).mean()


def judged(family: str) -> Row:
    plain = built(family)
    if isinstance(plain, str):
        return family, "-", "-", "-", "-", plain[:80]
    plain.zero_grad()
    model = copy.deepcopy(plain)
    parallelize_module(model, shardwise.simulate((2,), ("tp",)), model._tp_plan)
    try:
        loss, gradients, same, counts = compared(plain, model)
    except Exception as error:
        return family, "-", "-", "-", "-", f"RAISED {type(error).__name__}: {error}"[:120]
    verdict = "pass" if max(loss, gradients) < TOLERANCE and same is not False else "WRONG"
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    tokens = {True: "same", False: "other", None: ""}[same]
    return family, f"{loss:.0e}", f"{gradients:.0e}", tokens, shown, verdict


def compared(plain: Any, model: Any) -> tuple[float, float, bool | None, dict[str, int]]:
    with CommDebugMode() as comm:
        ours = loss_of(model)
    theirs = loss_of(plain)
    ours.backward()
    theirs.backward()
    pairs = [
        (p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters()) if q.grad is not None
    ]
    options = {"max_new_tokens": 4, "do_sample": False}
    tokens = [net.generate(IDS[:, :4], **options) for net in (plain, model) if continues(net)]
    largest = max(q.abs().max().item() for _, q in pairs)
    gradients = max((p - q).abs().max().item() for p, q in pairs) / max(largest, 1e-6)
    same = torch.equal(*tokens) if tokens else None
    return _far(ours, theirs), gradients, same, dict(comm.get_comm_counts())


def _far(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs() / b.abs().clamp_min(1e-6)).item()


COLUMNS = ("family", "loss", "gradients", "tokens", "a forward pass communicates", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for family in families(options.families):
        rows.append(judged(family))
        print(*rows[-1], sep="  ", flush=True)
    rows.sort(key=lambda row: (row[1] == "-", row[0]))
    table = Table(f"{sum(row[-1] == 'pass' for row in rows)} families pass, of {len(rows)}", COLUMNS, rows)
    table.print(Console(width=180))
    if options.write:
        today = datetime.date.today().isoformat()
        about = f"torch {torch.__version__}, transformers {transformers.__version__}, 2 simulated ranks, float32."
        path = Path(__file__).parent / "results" / f"plans-{today}.md"
        path.write_text(
            f"# Hugging Face's plans, {today}\n\n`python benchmarks/plans.py --write`: {about}\n\n{table.markdown()}"
        )


if __name__ == "__main__":
    main()
