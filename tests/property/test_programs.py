"""Short random programs on random layouts give what they give on one device, value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from compare import check_shards
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sweep import mesh_of
from torch import Tensor

import shardwise as sw

MESHES = [(2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 1, 2), (2, 2, 2)]

# Every tensor of a program has two dims, so that any op may follow any other. An op takes one or two of them and
# gives another; ops of two need the same shape. All are smooth enough for gradients to be compared.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda a: a * -1.5,
    "shift": lambda a: a + 2,
    "reverse": lambda a: 1 - a,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "neg": torch.neg,
    "transpose": lambda a: a.t(),
    "flatten": lambda a: a.reshape(1, -1),
    "column": lambda a: a.reshape(-1, 1),
    "tail": lambda a: a[a.shape[0] // 2 :],
    "odd": lambda a: a[:, 1::2] if a.shape[1] > 1 else a,
    "row": lambda a: a[-1:].expand(2, a.shape[1]),
    "pick": lambda a: a[a.shape[0] // 2].unsqueeze(1),
    "split": lambda a: torch.cat(a.split([1, a.shape[0] - 1])[::-1], 0),
    "halves": lambda a: sum(c.sum() for c in a.chunk(2, 1)) * a,
    "sum": lambda a: a.sum(0, keepdim=True) * 0.5,
    "centre": lambda a: a - a.mean(),
    "norm": lambda a: a / (a.norm() + 1),
    "largest": lambda a: a.amax(1, keepdim=True) - a,
    "variance": lambda a: a * a.var(1, keepdim=True, correction=0),
    "softmax": lambda a: a.softmax(0),
    "log_softmax": lambda a: a.log_softmax(1),
    "logsumexp": lambda a: a.logsumexp(1, keepdim=True) + a,
    "layer_norm": lambda a: F.layer_norm(a, (a.shape[1],), eps=0.1),
    "rms_norm": lambda a: F.rms_norm(a, (a.shape[1],), eps=0.1),
    "gram": lambda a: a @ a.t() * 0.1,
    "where": lambda a: torch.where(a > 0, a, 0.1 * a),
    "stack": lambda a: torch.stack([a, -a], 1).flatten(1),
    "detach": lambda a: a.detach() + a,
    "written": lambda a: (a * 1.0).mul_(0.5),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b * b + 1),
    "cat": lambda a, b: torch.cat([a, b], 1),
    "mm": lambda a, b: a @ b.t() * 0.2,
    "linear": lambda a, b: F.linear(a, b * 0.2, b[:, 0]),
    "mse": lambda a, b: F.mse_loss(a, b) + a,
    "maximum": lambda a, b: torch.where(a > b, a, b),
}

Step = tuple[str, int, int]


def run(steps: list[Step], tensors: list[Tensor]) -> Tensor:
    """Each step reads tensors by number (modulo how many there are) and adds its result to them."""
    values = list(tensors)
    for name, first, second in steps:
        a = values[first % len(values)]
        if name in UNARY:
            values.append(UNARY[name](a))
            continue
        # Two different tensors: plans of f(x, x) are served to f(x, y), see test_the_same_tensor_twice in unit/rules.
        fitting = [x for x in values if x.shape == a.shape and x is not a] or [a * 0.5]
        values.append(BINARY[name](a, fitting[second % len(fitting)]))
        if values[-1].numel() > 400:
            values[-1] = values[-1][:3, :7]
    return values[-1]


@st.composite
def layouts(draw: st.DrawFn, num_axes: int) -> list[sw.Placement]:
    one = st.sampled_from([sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial(), sw.Partial("avg")])
    return [draw(one) for _ in range(num_axes)]


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, int], list[list[sw.Placement]], list[Step]]:
    """A mesh, the shape of the inputs (uneven, or fewer rows than ranks), their layouts, and 3 to 6 steps."""
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 5)))
    where = draw(st.lists(layouts(len(mesh)), min_size=1, max_size=3))
    step = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 7), st.integers(0, 7))
    return mesh, shape, where, draw(st.lists(step, min_size=3, max_size=6))


@settings(max_examples=250)
@given(programs())
@example(((2,), (3, 4), [[sw.Shard(0)]], [("centre", 0, 0), ("scale", 1, 0), ("shift", 2, 0)]))
@example(((4,), (2, 3), [[sw.Partial()], [sw.Replicate()]], [("add", 0, 1), ("layer_norm", 2, 0), ("pick", 3, 0)]))
def test_program(program):
    mesh, shape, where, steps = program
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in where]
    plain = [x.clone().requires_grad_() for x in inputs]
    dist = [sw.distribute_tensor(x, mesh_of(mesh), w).requires_grad_() for x, w in zip(inputs, where, strict=True)]
    expected, result = run(steps, plain), run(steps, dist)
    assert result.shape == expected.shape
    check_shards(result)
    torch.testing.assert_close(result.detach().full_tensor(), expected.detach(), atol=1e-8, rtol=1e-7)
    if not expected.requires_grad:
        return
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (expected * weights).sum().backward()
    (result * sw.distribute_tensor(weights, mesh_of(mesh))).sum().backward()
    for number, (p, d) in enumerate(zip(plain, dist, strict=True)):
        if p.grad is None:
            assert d.grad is None
            continue
        check_shards(d.grad)
        torch.testing.assert_close(
            d.grad.full_tensor(), p.grad, atol=1e-8, rtol=1e-6, msg=lambda m, n=number: f"gradient of input {n}: {m}"
        )
