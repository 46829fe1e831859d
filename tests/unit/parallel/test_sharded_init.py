"""`init_on`: parameters that are made shard by shard are those of one device, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.dispatch.planning import randomness
from shardwise.errors import NoDataError, PlacementError, PlanError
from shardwise.parallel import ColwiseParallel, RowwiseParallel

R, S = sw.Replicate(), sw.Shard


class Net(nn.Module):
    """Layers that fill themselves, parameters made in other ways, and a model that fills them again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv1d(8, 6, 3)
        self.scale = nn.Parameter(torch.randn(8, 5) * 0.02)
        self.token = nn.Parameter(torch.zeros(1, 8))
        self.gate = nn.Parameter(torch.rand(16, 4), requires_grad=False)
        self.register_buffer("angles", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        nn.init.trunc_normal_(self.token, std=0.02)
        nn.init.xavier_uniform_(self.layers[1].weight)
        nn.init.orthogonal_(self.layers[2].weight)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.fill)

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.out_features == 8 and module.bias is not None:
            module.weight.data.normal_(0.0, 0.02)
            nn.init.zeros_(module.bias)


PLANS: dict[str, Any] = {
    "replicated": {},
    "by rows": {"embedding.weight": [S(0)], "layers.*.weight": [S(0)], "scale": [S(0)], "gate": [S(0)]},
    "by columns": {"*.weight": [R], "layers.*.weight": [S(1)], "scale": [S(1)], "token": [S(1)], "conv.weight": [S(2)]},
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")  # an orthogonal matrix takes all of it
@pytest.mark.parametrize("slab", [64, randomness.SLAB])
@pytest.mark.parametrize("plan", PLANS)
def test_one_devices_numbers(plan: str, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "SLAB", slab)
    torch.manual_seed(0)
    expected = Net()
    after = torch.rand(())
    torch.manual_seed(0)
    with sw.init_on(sw.simulate((3,)), PLANS[plan]):
        net = Net()
    assert torch.equal(torch.rand(()), after)
    assert net.head.weight is net.embedding.weight and not net.gate.requires_grad
    ours, theirs = net.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs) and all(isinstance(x, sw.DTensor) for x in ours.values())
    for name, x in theirs.items():
        torch.testing.assert_close(whole(ours[name]), x, rtol=0, atol=0, msg=name)
    for pattern, placements in PLANS[plan].items():
        if "*" not in pattern:
            assert net.get_parameter(pattern).placements == tuple(placements)  # type: ignore[attr-defined]


def test_a_plan_of_styles() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))

    with sw.init_on(mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}):
        net = made()
    assert net[0].weight.placements == (S(0),) and net[2].weight.placements == (S(1),)
    assert type(net[3].weight) is nn.Parameter
    x = torch.ones(3, 4)
    torch.testing.assert_close(net(x), made()(x))


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma": {},  # the head is the table
    "Mixtral": {"num_local_experts": 4},  # a list of experts is one parameter
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8},  # copies into some
}


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_models(kind: str) -> None:
    """These ask which device is the default, and would leave parameters on meta as they were made, other numbers."""
    transformers = pytest.importorskip("transformers")

    cls = getattr(transformers, f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**SIZES, **HEADS, **KINDS[kind])

    def made() -> Any:
        torch.manual_seed(0)
        return cls(config)

    expected = made()
    after = torch.rand(())
    mesh = sw.simulate((2,), ("tp",))
    with torch.device("meta"):
        plan = cls(config)._tp_plan
    with sw.init_on(mesh, plan):
        net = made()
    assert torch.equal(torch.rand(()), after)
    laid = sw.parallel.parallelize_module(made(), mesh, expected._tp_plan)
    ours, theirs, whole_first = net.state_dict(), expected.state_dict(), laid.state_dict()
    assert list(ours) == list(theirs)
    for name, x in theirs.items():
        torch.testing.assert_close(whole(ours[name]), x, rtol=0, atol=0, msg=name)
        assert ours[name].layout_on_mesh is whole_first[name].layout_on_mesh, name
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(net(ids).logits, expected(ids).logits)


def test_hugging_face_models_that_were_made_on_meta_initialise_themselves() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    with torch.device("meta"):
        net, expected = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    sw.parallel.parallelize_module(net, sw.simulate((2,), ("tp",)), net._tp_plan)
    for model in (net, expected):
        torch.manual_seed(0)
        model.to_empty(device="cpu").init_weights()
    for (name, x), y in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(x.detach()), y.detach(), rtol=0, atol=0, msg=name)
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(net(ids).logits, expected(ids).logits)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor) and not x.is_meta:
                self.number = max(self.number, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("plan", [{"weight": [S(0)]}, {"": "colwise"}, {"": ColwiseParallel()}], ids=str)
def test_only_shards_are_made(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of 4096 × 64 on 64 ranks, of which one is here."""
    monkeypatch.setattr(randomness, "SLAB", 1024)
    with Largest() as largest, sw.init_on(sw.simulate((64,)), plan):
        nn.Linear(64, 4096, bias=False)
    assert 0 < largest.number <= 4096


def test_a_plan_that_names_nobody() -> None:
    words = "the plan names 'wieght', but no parameter of Linear is called so"
    with pytest.raises(PlanError, match=words), sw.init_on(sw.simulate((2,)), {"wieght": [S(0)]}):
        nn.Linear(4, 4)


def test_a_plan_that_does_not_fit_a_tensor() -> None:
    words = r"init_on: the plan does not fit num_batches_tracked: S\(0\) names dim 0, but the tensor has 0 dims"
    with pytest.raises(PlacementError, match=words), sw.init_on(sw.simulate((2,)), {"*": [S(0)]}):
        nn.BatchNorm1d(4)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "__float__": lambda x: float(x[0]),
    "__bool__": lambda x: 1 if (x > 0).any() else 0,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "__getitem__": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
    "add": lambda x: torch.ones(4, device="cpu") + x,
    "matmul": lambda x: torch.ones(4, 4, device="cpu") @ x,  # of which torch makes up a result
}


@pytest.mark.parametrize("name", READS)
def test_constructors_that_need_numbers(name: str) -> None:
    """Where there are none, they are told so, and by whom."""
    with pytest.raises(NoDataError) as raised, sw.init_on(sw.simulate((2,))):
        READS[name](torch.randn(4))
    assert str(raised.value) == (
        f"torch.Tensor.{name} needs numbers of a tensor, and inside init_on there are none yet: constructors run on "
        f"the meta device, and what they did is done again once it is known where each parameter goes. Make tensors "
        f"whose numbers a constructor needs, and what they are computed from, with device='cpu', or do without"
    )


def test_constructors_that_read_numbers_of_their_own() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = [x.item() for x in torch.linspace(0, 0.5, 3, device="cpu")]
            self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
            self.weight = nn.Parameter(torch.zeros(4))

    with sw.init_on(sw.simulate((2,)), {"weight": [S(0)]}):
        made = Drops()
    assert [drop.p for drop in made.drops] == [0, 0.25, 0.5]
    assert made.weight.placements == (S(0),)


def test_hooks_and_modes_are_gone_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), sw.init_on(sw.simulate((2,))):
        nn.Linear(4, 4)
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta and not isinstance(nn.Linear(2, 2).weight, sw.DTensor)
