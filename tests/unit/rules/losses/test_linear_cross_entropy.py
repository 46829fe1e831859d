"""The loss of what a linear layer gives, chunk by chunk: its classes and its rows sharded, along axes of their own or
the same ones, against plain torch on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, compare
from losses import with_logits, with_slopes
from saved import fake_mesh
from sweep import mesh_of, normal, place
from torch import Tensor

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode
from shardwise.parallel import ColwiseParallel, LinearCrossEntropy, linear_cross_entropy, parallelize_module

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
X, LAYER, BIAS, WEIGHT = normal(3, 5, 4), normal(7, 4), normal(7), normal(7).abs()
TARGET = torch.arange(15).view(3, 5) % 7
over_reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])

LAYOUTS: list[tuple[tuple[int, ...], Any, Any, Any]] = [
    # the mesh; the input, the layer and the target
    ((2,), [R], [S(0)], [R]),
    ((2,), [S(0)], [R], [S(0)]),
    ((2,), [S(1)], [S(0)], [S(1)]),  # sequence parallel
    ((4,), [S(1)], [S(0)], [R]),  # in uneven pieces, some of them empty
    ((2,), [R], [R], [R]),
    ((2,), [S(0)], [S(0)], [S(0)]),
    ((2,), [S(2)], [S(1)], [R]),
    ((2,), [P], [S(0)], [R]),
    ((2, 2), [S(0), R], [R, S(0)], [S(0), R]),
    ((2, 2), [S(0), S(1)], [R, S(0)], [S(0), S(1)]),
    ((2, 2), [S(1), S(1)], [R, S(0)], [S(1), S(1)]),
    ((2, 2), [R, R], [S(0), S(0)], [R, R]),
    ((2, 2), [R, S(1)], [S(0), S(0)], [R, S(1)]),
    ((2, 2), [S(0), S(1)], [S(0), S(0)], [S(0), S(1)]),
]


@over_reductions
@pytest.mark.parametrize("chunk_size", [3, 100])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "all options"])
def test_loss_and_gradients_of_both_orders(reduction: str, chunk_size: int, full: bool) -> None:
    more = {"label_smoothing": 0.1, "ignore_index": 1, "z_loss": 0.2} if full else {}

    def loss(x: Tensor, layer: Tensor, target: Tensor, *bias: Tensor) -> Tensor:
        options = {"reduction": reduction, "weight": beside(x, WEIGHT) if full else None, **more}
        if not isinstance(x, sw.DTensor):
            return with_logits(x, layer, target, *bias, **options)
        options["linear_bias"] = bias[0] if bias else None
        return linear_cross_entropy(x, layer, target, chunk_size=chunk_size, **options)

    for mesh, *where in LAYOUTS:
        bias = [[p if p == S(0) else R for p in where[1]]] if full else []
        inputs = [X, LAYER, TARGET, BIAS] if full else [X, LAYER, TARGET]
        compare(with_slopes(loss, 2), inputs, mesh_of(mesh), [*where, *bias])


def test_pieces_of_any_size() -> None:
    """Explicit pieces of rows and classes, of which some are empty."""
    mesh = mesh_of((4,))
    rows, classes = (0, 6, 2, 7), (2, 0, 4, 1)
    pieces = [x.clone() for x in X.view(15, 4).split(rows)], [x.clone() for x in LAYER.split(classes)]
    x, layer = (sw.DTensor.from_local(ranked(each), mesh, [S(0)]).requires_grad_() for each in pieces)
    target = sw.DTensor.from_local(ranked([x.clone() for x in TARGET.view(15).split(rows)]), mesh, [S(0)])
    linear_cross_entropy(x, layer, target, chunk_size=5).backward()
    plain, whole = X.view(15, 4).clone().requires_grad_(), LAYER.clone().requires_grad_()
    F.cross_entropy(plain @ whole.T, TARGET.view(15)).backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    torch.testing.assert_close(layer.grad.full_tensor(), whole.grad)


@over_reductions
def test_class_probabilities(reduction: str) -> None:
    chances = normal(3, 5, 7).softmax(-1)

    def loss(x: Tensor, layer: Tensor, chances: Tensor) -> Tensor:
        if isinstance(x, sw.DTensor):
            return linear_cross_entropy(x, layer, chances, reduction=reduction)
        return F.cross_entropy(F.linear(x, layer).movedim(-1, 1), chances.movedim(-1, 1), reduction=reduction)

    for where in ([[R], [S(0)], [S(2)]], [[S(0)], [R], [S(0)]]):
        compare(loss, [X, LAYER, chances], mesh_of((2,)), where)


def test_one_row_and_none() -> None:
    for x, target in ((X[0, 0], TARGET[0, 0]), (X[0, :0], TARGET[0, :0])):
        d, layer = place(x, R).requires_grad_(), place(LAYER, S(0))
        for reduction in ("none", "sum"):
            loss = linear_cross_entropy(d, layer, place(target, R), reduction=reduction)
            torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(x @ LAYER.T, target, reduction=reduction))


def test_all_targets_ignored() -> None:
    x, layer = place(X, R).requires_grad_(), place(LAYER, S(0)).requires_grad_()
    loss = linear_cross_entropy(x, layer, place(torch.full((3, 5), -100), R))
    loss.backward()
    assert loss.full_tensor().isnan()
    assert not x.grad.full_tensor().any() and not layer.grad.full_tensor().any()


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["input", "layer"])
def test_only_what_is_trained_has_a_gradient(needs: tuple[bool, bool]) -> None:
    given = [place(x, p).requires_grad_(need) for x, p, need in zip((X, LAYER), (R, S(0)), needs, strict=True)]
    plain = [x.clone().requires_grad_(need) for x, need in zip((X, LAYER), needs, strict=True)]
    linear_cross_entropy(*given, place(TARGET, R), chunk_size=4).backward()
    with_logits(*plain, TARGET).backward()
    for ours, theirs in zip(given, plain, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_a_graph_that_is_retained_can_be_passed_again() -> None:
    x, layer = place(X, R).requires_grad_(), place(LAYER, S(0)).requires_grad_()
    loss = linear_cross_entropy(x, layer, place(TARGET, R), chunk_size=4)
    first, second = (torch.autograd.grad(loss * 3, (x, layer), retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_plain_tensors() -> None:
    x, layer = X.clone().requires_grad_(), LAYER.clone().requires_grad_()
    loss = linear_cross_entropy(x, layer, TARGET, linear_bias=BIAS, weight=WEIGHT, chunk_size=4, z_loss=0.1)
    assert type(loss) is Tensor
    grads = torch.autograd.grad(loss, (x, layer))
    expected = with_logits(x, layer, TARGET, BIAS, weight=WEIGHT, z_loss=0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, layer)))


def test_plain_losses_may_be_added_to() -> None:
    """On one rank of several as well: nobody else has them."""
    x, target = torch.randn(4, 3, requires_grad=True), torch.arange(4)
    with fake_mesh(2, names=("tp",)) as mesh:
        head = LinearCrossEntropy(3, 6)
        parallelize_module(head, mesh, {"linear": ColwiseParallel()})
        for loss in (linear_cross_entropy(x, torch.randn(6, 3, requires_grad=True), target), head(x, target)):
            loss += 1
            assert type(loss) is Tensor
            loss.backward()
            assert x.grad is not None
            x.grad = None


@pytest.mark.parametrize("width", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_integers_of_any_width_name_classes(width: torch.dtype) -> None:
    """Also where chunks are filled up with rows that are ignored."""
    x, layer = place(X, S(1)), place(LAYER, S(0))
    for weight in (None, WEIGHT):
        given = None if weight is None else place(weight, R)
        loss = linear_cross_entropy(x, layer, place(TARGET.to(width), S(1)), weight=given, chunk_size=2)
        torch.testing.assert_close(loss.full_tensor(), with_logits(X, LAYER, TARGET, weight=weight))


# Precision


def in_half(*, chunk_size: int | None = None, **options: Any) -> list[Tensor]:
    """The errors of loss and gradients of bfloat16, against double: ours, or those of torch without a chunk size."""
    x, layer, target = normal(512, 32), normal(48, 32), torch.arange(512) % 48
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in (x, layer)]
        if dtype == torch.float64 or chunk_size is None:
            loss = F.cross_entropy(F.linear(*leaves), target)
        else:
            loss = linear_cross_entropy(*leaves, target, chunk_size=chunk_size, **options)
        found.append([t.double() for t in (loss.detach(), *torch.autograd.grad(loss, leaves))])
    return [(ours - exact).norm() / exact.norm() for exact, ours in zip(*found, strict=True)]


def test_errors_in_half_precision() -> None:
    """No larger than torch's; but for the layer's gradient, which is rounded once for each of 16 chunks, unless it is
    added up in single precision."""
    torch_s, ours, exact = in_half(), in_half(chunk_size=32), in_half(chunk_size=32, acc_dtype=torch.float32)
    assert ours[0] <= torch_s[0] and ours[1] <= torch_s[1]
    assert all(a <= b for a, b in zip(exact, torch_s, strict=True))
    assert exact[2] < ours[2] < 3 * torch_s[2]


def test_sums_are_no_less_exact_than_the_layer() -> None:
    leaves = [X.view(15, 4).clone().requires_grad_(), LAYER.clone().requires_grad_()]
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), TARGET.view(15)), leaves[1])
    loss = linear_cross_entropy(*leaves, TARGET.view(15), chunk_size=4, acc_dtype=torch.float32)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves[1])[0], expected, rtol=0, atol=1e-14)


def test_the_loss_has_the_dtype_that_is_asked_for() -> None:
    x, layer = place(X.bfloat16(), R), place(LAYER.bfloat16(), S(0))
    assert linear_cross_entropy(x, layer, place(TARGET, R)).dtype == torch.bfloat16
    loss = linear_cross_entropy(x, layer, place(TARGET, R), dtype=torch.float32)
    logits = F.linear(X.bfloat16(), LAYER.bfloat16()).float()
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits.movedim(-1, 1), TARGET))


def test_autocast_narrows_the_product_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        x, layer = place(X.float(), R).requires_grad_(), place(LAYER.float(), S(0)).requires_grad_()
        loss = linear_cross_entropy(x, layer, place(TARGET, R))
        plain, whole = X.float().requires_grad_(), LAYER.float().requires_grad_()
        expected = F.cross_entropy(F.linear(plain, whole).movedim(-1, 1), TARGET)
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss.full_tensor(), expected.detach())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=0.02, atol=1e-3)
    torch.testing.assert_close(layer.grad.full_tensor(), whole.grad, rtol=0.02, atol=1e-3)


def test_autocast_computes_a_weighted_loss_in_single_precision() -> None:
    weight, x, layer = WEIGHT.bfloat16(), X.float(), LAYER.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(place(x, R), place(layer, S(0)), place(TARGET, R), weight=place(weight, R))
        expected = F.cross_entropy(F.linear(x, layer).flatten(0, 1), TARGET.flatten(), weight)
    torch.testing.assert_close(found.full_tensor(), expected)


def test_autocast_leaves_double_precision_as_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(place(X, R), place(LAYER, S(0)), place(TARGET, R), weight=place(WEIGHT, R))
        expected = F.cross_entropy(F.linear(X, LAYER).flatten(0, 1), TARGET.flatten(), WEIGHT)
    torch.testing.assert_close(found.full_tensor(), expected)


# What is communicated: (kind, axes, bytes, whether in the backward pass)


def communicated(mesh: tuple[int, ...], where: list[Any], **options: Any) -> list[Any]:
    x, layer, target = (place(t, *p, mesh=mesh) for t, p in zip((X, LAYER, TARGET), where, strict=True))
    x, layer = x.requires_grad_(), layer.requires_grad_()
    with CommDebugMode() as comm:
        linear_cross_entropy(x, layer, target, **options).backward()
    return [(c.kind, c.axes, c.bytes, c.backward) for c in comm.comms]


@pytest.mark.parametrize("chunk_size", [5, 15])
def test_sums_of_a_chunk_are_exchanged_at_once(chunk_size: int) -> None:
    """Three numbers for each row. The gradient of the input is reduced once, in the backward pass."""
    a_chunk = ("all_gather", ("a",), 3 * chunk_size * 8, False)
    spent = communicated((2,), [[R], [S(0)], [R]], chunk_size=chunk_size)
    assert spent == [*[a_chunk] * (15 // chunk_size), ("all_reduce", ("a",), X.nbytes, True)]


def test_many_rows_at_once_are_reduced() -> None:
    """Two small reductions send less than an exchange among many ranks."""
    mesh = sw.recording((64,), ("a",))
    x, layer, target = (
        sw.distribute_tensor(t.to("meta"), mesh, [p])
        for t, p in ((normal(4096, 4), R), (normal(128, 4), S(0)), (torch.zeros(4096, dtype=torch.long), R))
    )
    with CommDebugMode() as comm:
        linear_cross_entropy(x, layer, target, chunk_size=2048)
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_reduce", 2048 * 8), ("all_reduce", 2 * 2048 * 8)] * 2


def test_sequence_parallelism_gathers_and_scatters_chunk_by_chunk() -> None:
    """The targets at once, rows and the sums of their logits by chunks, all of it in the forward pass."""
    chunk, num_chunks = 6, 3  # for the nine rows of the larger piece
    share = chunk // 2
    targets = ("all_gather", ("a",), num_chunks * share * 8, False)
    a_chunk = [
        ("all_gather", ("a",), share * 4 * 8, False),
        ("all_gather", ("a",), 3 * chunk * 8, False),
        ("reduce_scatter", ("a",), chunk * 4 * 8, False),
    ]
    checked = ("all_reduce", ("a",), 8, False)  # that no target is out of bounds
    assert communicated((2,), [[S(1)], [S(0)], [S(1)]], chunk_size=chunk) == [checked, targets, *a_chunk * num_chunks]


def test_rows_on_other_axes() -> None:
    """A mean divides by the weight of all rows: one number more. Gradients of the layer are data parallelism's."""
    spent = communicated((2, 2), [[S(0), R], [R, S(0)], [S(0), R]])
    kinds = [(kind, axes) for kind, axes, _, backward in spent if not backward]
    assert kinds == [("all_reduce", ("a",)), ("all_reduce", ("a",)), ("all_gather", ("b",))]
    assert sorted((kind, axes) for kind, axes, _, backward in spent if backward) == [
        ("all_reduce", ("a",)),
        ("all_reduce", ("b",)),
    ]


# Errors


@pytest.mark.parametrize("where", [[[R], [S(0)], [R]], [[S(1)], [S(0)], [S(1)]], [[S(0)], [R], [S(0)]]], ids=str)
def test_target_out_of_bounds(where: list[Any]) -> None:
    target = TARGET.clone()
    target[2, 4] = 7
    x, layer, target = (place(t, *p) for t, p in zip((X, LAYER, target), where, strict=True))
    with pytest.raises(IndexError, match="target 7 is out of bounds: it must be from 0 to 6"):
        linear_cross_entropy(x, layer, target)


def test_sizes_that_do_not_fit() -> None:
    x, layer, target = place(X, R), place(LAYER, S(0)), place(TARGET, R)
    with pytest.raises(ValueError, match=r"rows of linear_weight .* they are \[7, 3\] and \[3, 5, 4\]"):
        linear_cross_entropy(x, layer[:, :3], target)
    with pytest.raises(ValueError, match=r"a target is integers \[3, 5\], .* or .* \[3, 5, 7\]; .* int64 \[15\]"):
        linear_cross_entropy(x, layer, target.flatten())
    with pytest.raises(ValueError, match=r"a target is integers .*; this one is bool \[3, 5\]"):
        linear_cross_entropy(x, layer, target.bool())
    with pytest.raises(ValueError, match=r"linear_bias has a number for each of 7 classes, not \[4\]"):
        linear_cross_entropy(x, layer, target, linear_bias=place(BIAS[:4], R))
    with pytest.raises(ValueError, match="chunk_size is a number of rows, at least 1; got 0"):
        linear_cross_entropy(x, layer, target, chunk_size=0)
    with pytest.raises(ValueError, match=r"z_loss .* is not negative; got -1"):
        linear_cross_entropy(x, layer, target, z_loss=-1.0)


# Torch's function of that name, and the module


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it since 2.13")
def test_torch_s_function() -> None:
    x, layer = place(X.view(15, 4), R), place(LAYER, S(0))
    options = {"label_smoothing": 0.1, "ignore_index": None, "linear_bias": place(BIAS, R)}
    with sw.strict(moves=0):
        found = F.linear_cross_entropy(x, layer, place(TARGET.view(15), R), **options)
    expected = F.cross_entropy(F.linear(X, LAYER, BIAS).flatten(0, 1), TARGET.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found.full_tensor(), expected)
    several = F.linear_cross_entropy(place(X[0], R), place(LAYER[:6].view(3, 2, 4), R), place(TARGET[:2].T % 3, R))
    torch.testing.assert_close(
        several.full_tensor(), F.linear_cross_entropy(X[0], LAYER[:6].view(3, 2, 4), TARGET[:2].T % 3)
    )


def test_the_module_by_a_plan() -> None:
    head = LinearCrossEntropy(4, 7, bias=True, weight=WEIGHT.float(), label_smoothing=0.1, chunk_size=4)
    x = X.float().requires_grad_()
    expected = head(x, TARGET)
    grads = torch.autograd.grad(expected, (x, *head.parameters()))
    parallelize_module(head, mesh_of((2,)), {"linear": ColwiseParallel()})
    loss = head(x, TARGET)
    assert type(loss) is Tensor
    found = torch.autograd.grad(loss, (x, *head.parameters()))
    torch.testing.assert_close(loss, expected)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a.full_tensor() if isinstance(a, sw.DTensor) else a, b)
    assert list(head.state_dict()) == ["weight", "linear.weight", "linear.bias"]
