"""A Hugging Face model, parallelized by the plan that it carries, and trained beside one device.

    python examples/llama_plan.py                                       this process plays both ranks
    torchrun --nproc-per-node 2 examples/llama_plan.py                  two processes: NCCL on GPUs, Gloo without

The model is a small Llama with random weights: nothing is downloaded. It is not edited; it is called with plain
tensors, and answers with plain tensors.
"""

import copy
import os

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.debug import CommDebugMode
from shardwise.parallel import parallelize_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
STEPS = 8
TEXT = b"A plan says how each layer is sharded; the rest follows. "


def make_mesh() -> shardwise.DeviceMesh | shardwise.Mesh:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return shardwise.simulate((2,), ("tp",))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return shardwise.init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("tp",))


def train(model: nn.Module, tokens: torch.Tensor) -> list[float]:
    """An ordinary training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    mesh = make_mesh()
    device = DEVICE if isinstance(mesh, shardwise.DeviceMesh) else "cpu"
    torch.manual_seed(0)
    tokens = torch.tensor(list(TEXT), device=device).repeat(2, 1)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).to(device)

    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plain._tp_plan)  # the one line

    expected, losses = train(plain, tokens), train(model, tokens)
    with CommDebugMode() as comm, torch.no_grad():
        model(tokens)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    said = [net.generate(tokens[:1, :8], **options)[0].tolist() for net in (plain, model)]
    if mesh.get_local_rank() == 0:
        for step, (one, many) in enumerate(zip(expected, losses, strict=True)):
            print(f"step {step}   one device {one:.6f}   sharded {many:.6f}")
        print(f"a forward pass communicates {dict(comm.get_comm_counts())}")
        print(f"it continues {bytes(said[1][:8])!r} with {bytes(said[1][8:])!r}")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-3, rtol=1e-3)
    assert said[0] == said[1], "both generate the same tokens"
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
