"""`fuse_loss`: a model's own loss and gradients, and no logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import DTensor
from shardwise.errors import PlanError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, fuse_loss, parallelize_module
from shardwise.rules.losses import linear_cross_entropy as chunks

transformers = pytest.importorskip("transformers")

CLASSES, BATCH, TIME, CHUNK = 88, 2, 40, 36
CONFIG = {
    "vocab_size": CLASSES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma": {"head_dim": 8},  # the head is the table
    "Cohere": {},  # scales its logits
}
IDS = torch.randint(3, CLASSES, (BATCH, TIME), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(IDS % 7 == 0, -100)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "FEWEST_ROWS", CHUNK)


def build(kind: str = "Llama", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**CONFIG, **KINDS.get(kind, {}), **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().train()


class Largest(TorchDispatchMode):
    """The most rows of a tensor of as many columns as a rank has classes: of logits, and of the transposed head."""

    def __init__(self, *classes: int) -> None:
        super().__init__()
        self.classes, self.rows = classes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta and x.ndim and x.shape[-1] in self.classes:
                self.rows = max(self.rows, x.numel() // x.shape[-1])
        return out


def check(model: nn.Module, plain: nn.Module, **given: Any) -> Any:
    """The same loss and gradients; and at no time more logits than those of a chunk."""
    expected = plain(IDS, labels=LABELS, **given)
    expected.loss.backward()
    with Largest(CLASSES, CLASSES // 2) as largest:
        output = model(IDS, labels=LABELS, **given)
        output.loss.backward()
    assert largest.rows == CHUNK  # and more than the head has
    assert type(output.loss) is Tensor
    torch.testing.assert_close(output.loss, expected.loss)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")
    return output


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_plan_that_a_model_carries(kind: str, order: str) -> None:
    plain, model, mesh = build(kind), build(kind), sw.simulate((2,), ("tp",))
    if order == "before":
        assert fuse_loss(model) is model
    parallelize_module(model, mesh, model._tp_plan)
    if order == "after":
        fuse_loss(model)
    output = check(model, plain)
    assert output.logits is None and "logits" not in output


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_plan_for_the_head_alone(kind: str, order: str) -> None:
    """As torch's styles have it: what leaves the head is plain and whole, and so is the loss."""
    plain, model, mesh = build(kind), build(kind), sw.simulate((2,), ("tp",))
    plan = {"lm_head": ColwiseParallel(output_layouts=sw.Replicate())}
    if model.lm_head.weight is model.model.embed_tokens.weight:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=sw.Replicate())
    for step in (fuse_loss, lambda m: parallelize_module(m, mesh, plan))[:: 1 if order == "before" else -1]:
        step(model)
    assert check(model, plain).logits is None
    model.loss_function = plain.loss_function = lambda logits, labels, **_: (logits * LABELS.unsqueeze(-1)).sum()
    torch.testing.assert_close(model(IDS, labels=LABELS).loss, plain(IDS, labels=LABELS).loss)


def test_with_a_head_that_gives_sharded_logits() -> None:
    """They are the loss' to gather, or not: it is a DTensor."""
    plain, model, mesh = build(), fuse_loss(build()), sw.simulate((2,), ("tp",))
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(use_local_output=False)})
    with Largest(CLASSES, CLASSES // 2) as largest, sw.parallel.loss_parallel():
        output = model(IDS, labels=LABELS)
        output.loss.backward()
    assert largest.rows == CHUNK and output.logits is None
    expected = plain(IDS, labels=LABELS).loss
    expected.backward()
    torch.testing.assert_close(output.loss.full_tensor(), expected)
    torch.testing.assert_close(model.lm_head.weight.grad.full_tensor(), plain.lm_head.weight.grad)
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad)


def test_a_head_whose_output_is_a_part_computes_its_logits() -> None:
    """And so does one whose output a function of the user's moves."""
    for plan in (ColwiseParallel(), None):
        model, mesh = fuse_loss(build()), sw.simulate((2,), ("tp",))
        seen = []
        model.loss_function = lambda logits, labels, seen=seen, **_: seen.append(logits) or logits.sum()
        if plan is None:
            whole = lambda module, x, mesh: x.full_tensor()  # noqa: E731
            into = lambda module, inputs, mesh: (sw.DTensor.from_local(inputs[0], mesh),)  # noqa: E731
            sw.distribute_module(model.lm_head, mesh, input_fn=into, output_fn=whole)
        else:
            parallelize_module(model, mesh, {"lm_head": plan})
        model(IDS, labels=LABELS)
        assert seen[0].shape == (BATCH, TIME, CLASSES // (1 if plan is None else 2)) and "Logits" not in str(
            type(seen[0])
        )


def test_without_a_mesh() -> None:
    check(fuse_loss(build()), build())


def test_a_model_that_adds_to_its_loss_in_place() -> None:
    options = {"num_local_experts": 2, "output_router_logits": True, "experts_implementation": "eager"}
    check(fuse_loss(build("Mixtral", **options)), build("Mixtral", **options))


def test_a_number_of_items_over_several_batches() -> None:
    """What Hugging Face's Trainer divides by."""
    check(fuse_loss(build()), build(), num_items_in_batch=torch.tensor(123))


def test_fully_sharded() -> None:
    """As a whole. A head that is sharded by itself is whole within its forward only, and computes its logits."""
    mesh = sw.simulate((2,), ("dp",))
    for alone in (False, True):
        plain, model = build(), fuse_loss(build())
        for module in (model.model.layers[0], *([model.lm_head] if alone else []), model):
            fully_shard(module, mesh=mesh)
        expected, output = plain(IDS, labels=LABELS), model(IDS, labels=LABELS)  # each rank has this batch
        assert (output.logits is None) is not alone
        torch.testing.assert_close(output.loss, expected.loss)
        expected.loss.backward()
        output.loss.backward()
        torch.testing.assert_close(model.lm_head.weight.grad.full_tensor(), plain.lm_head.weight.grad)


def test_what_is_done_to_logits_beside_is_right() -> None:
    """A model that squashes its logits has them computed, and gives them out."""
    plain, model = (build("Gemma2", head_dim=8, final_logit_softcapping=5.0) for _ in range(2))
    expected, output = plain(IDS, labels=LABELS), fuse_loss(model)(IDS, labels=LABELS)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)


def test_logits_are_there_where_nothing_is_trained() -> None:
    plain, model = build(), fuse_loss(build())
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(IDS, labels=LABELS).logits, plain(IDS, labels=LABELS).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(IDS[:, :5], **options).tolist() == plain.generate(IDS[:, :5], **options).tolist()


def test_tuples() -> None:
    expected, output = (model(IDS, labels=LABELS, return_dict=False) for model in (build(), fuse_loss(build())))
    assert len(output) == len(expected) and output[1] is None
    torch.testing.assert_close(output[0], expected[0])


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[..., 1:].flatten()),
    "flattened": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), LABELS.flatten()),
    "rows": lambda x: F.cross_entropy(x.reshape(-1, x.size(-1)), LABELS.view(-1), reduction="none").mean(),
    "converted": lambda x: F.cross_entropy(x.to(x.device).to(torch.float64).view(-1, CLASSES), LABELS.view(-1)),
    "halved": lambda x: F.cross_entropy((x / 2).view(-1, CLASSES), LABELS.view(-1).clamp(0), ignore_index=0),
}
COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "every second class": lambda x: F.cross_entropy(
        x[..., ::2].reshape(-1, CLASSES // 2), LABELS.view(-1).clamp(0) // 2
    ),
    "in place": lambda x: F.cross_entropy(x.sub_(1).view(-1, CLASSES), LABELS.view(-1)) + x.sum(),
    "chances": lambda x: F.cross_entropy(x.view(-1, CLASSES), x.detach().softmax(-1).view(-1, CLASSES)),
    "narrowed": lambda x: F.cross_entropy(x.bfloat16().view(-1, CLASSES), LABELS.view(-1)).double(),
    "dims": lambda x: F.cross_entropy(x.movedim(-1, 1), LABELS),
}


@contextmanager
def with_loss(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Iterator[None]:
    model.loss_function = lambda logits, **_: loss(logits)
    yield


@pytest.mark.filterwarnings("ignore:.*size_average")
@pytest.mark.parametrize("name", [*LOSSES, *COMPUTED])
def test_losses_of_many_forms(name: str) -> None:
    """Those that take rows of logits, and do no more than torch's loss, need none; all are right."""
    found = []
    for model in (build(), fuse_loss(build())):
        with with_loss(model, {**LOSSES, **COMPUTED}[name]), Largest(CLASSES) as largest:
            output = model(IDS, labels=LABELS)
            output.loss.backward()
        found.append((output.loss.detach(), model.lm_head.weight.grad, model.model.embed_tokens.weight.grad))
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
    assert (largest.rows == CHUNK) == (name in LOSSES)


def test_models_can_be_copied_and_pickled() -> None:
    model = fuse_loss(build())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again(IDS, labels=LABELS).logits is None
        assert type(again).__name__ == "LlamaForCausalLM"


def test_an_error_leaves_nothing_switched_on() -> None:
    model = fuse_loss(build())
    with pytest.raises(IndexError):
        model(IDS, labels=LABELS + CLASSES)
    assert type(model.lm_head(torch.zeros(1, 32, dtype=torch.float64))) is Tensor


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(PlanError, match=r"get_output_embeddings\(\) is an nn.Linear, .* Linear has NoneType"):
        fuse_loss(nn.Linear(2, 2))

    class Headed(nn.Module):
        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(PlanError, match="whose forward takes labels; that of Headed does not"):
        fuse_loss(Headed())
