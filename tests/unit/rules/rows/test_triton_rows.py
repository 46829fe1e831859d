"""The Triton programs, run by Triton's interpreter on the CPU: each beside the function it stands for, and whole losses
beside plain torch. On a GPU they run in tests/gpu."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, compare
from losses import with_logits, with_slopes, written_out
from sweep import mesh_of, normal, place
from torch import Tensor

import shardwise as sw
from shardwise.errors import KernelWarning
from shardwise.experimental import register_kernel
from shardwise.parallel import cross_entropy, linear_cross_entropy
from shardwise.rules.kit import kernels as table
from shardwise.rules.kit.registry import restored
from shardwise.rules.rows import device_kernels, row_numbers, row_passes

# Triton's interpreter counts loops by arrays of one number.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

R, S = sw.Replicate(), sw.Shard
HALF = (torch.bfloat16, torch.float16)
STEPS = [step for steps in device_kernels.WRITTEN_IN_TRITON.values() for step in steps]
over_reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
"""Of Triton's interpreter."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    if torch.cuda.is_available():
        pytest.skip("Triton's programs are compiled here, and run in tests/gpu")
    pytest.importorskip("triton", reason="needs Triton, whose interpreter runs programs on a CPU")
    from shardwise.rules.rows import triton_layout, triton_numbers, triton_rows, triton_softmax

    monkeypatch.setattr(triton_layout, "THREADS", 2)
    monkeypatch.setattr(triton_layout, "WRITING_THREADS", 2)  # so that rows take several rounds
    triton_layout._layout.cache_clear()
    modules = triton_rows, triton_numbers, triton_softmax
    yield SimpleNamespace(**{s.name: getattr(m, s.name) for m in modules for s in STEPS if hasattr(m, s.name)})
    triton_layout._layout.cache_clear()


@pytest.fixture
def on_cpu(programs: Any) -> Iterator[None]:
    """The programs as the kernels of CPUs."""
    with restored():
        for step in STEPS:
            register_kernel(step, "cpu")(getattr(programs, step.name))
        yield
    sw.clear_cache()


# Each beside the function it stands for


def tensors(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Rows along a dim, of many strides."""
    torch.manual_seed(0)
    for x, dim in (
        (torch.randn(3, 70), 1),
        (torch.randn(3, 90)[::2, 11:81], 1),
        (torch.randn(2, 40, 3, 2), 1),
        (torch.randn(2, 3, 30)[:, :2], 2),
        (torch.randn(2, 30, 3).transpose(1, 2), 1),
        (torch.randn(33), 0),
        (torch.randn(0, 33), 1),
        (torch.randn(5, 0), 1),
    ):
        yield x.to(dtype), dim


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype not in HALF else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "enough"), [(torch.float32, 512), (torch.bfloat16, 1), (torch.float16, 512)], ids=str
)
def test_sums_and_gradients_of_rows(
    dtype: torch.dtype, enough: int, programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are shared by several programs, and rows that are not."""
    from shardwise.rules.rows import triton_layout

    monkeypatch.setattr(triton_layout, "ENOUGH", enough)
    for x, dim in tensors(dtype):
        rows = (*x.shape[:dim], *x.shape[dim + 1 :])
        for width, smoothed, weighted in ((torch.int64, False, False), (torch.int32, True, True)):
            target = torch.randint(-3, x.shape[dim] + 8, rows).to(width)
            weight = torch.rand(x.shape[dim]) if weighted and smoothed else None
            given = x, target, 2, dim, weight, smoothed
            sums = row_passes.row_sums.function(*given)
            check(programs.row_sums(*given), sums, dtype)
            numbers = torch.rand(5 if weighted else 3, *rows)
            numbers[row_passes.LARGEST] = sums[row_passes.MAXIMUM]
            grad, total = (torch.rand(rows), None) if smoothed else (torch.tensor(0.7), torch.tensor(3.0))
            more = numbers, grad, total, 0.1 * smoothed, weight, target, -2, 2, dim
            ours, theirs = torch.empty_like(x), torch.empty_like(x)
            for of_logits in (True, False):
                programs.row_gradient(x, ours, of_logits, *more)
                row_passes.row_gradient.function(x, theirs, of_logits, *more)
                check(ours, theirs, dtype)
            inplace = x.clone(memory_format=torch.preserve_format)
            programs.row_gradient(inplace, inplace, False, *more)
            check(inplace, theirs, dtype)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("log", [False, True])
def test_softmax_of_rows(log: bool, programs: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for x, dim in tensors(dtype):
            sums = row_passes.row_sums.function(x, None, 0, dim, None, False)
            check(programs.row_sums(x, None, 0, dim, None, False), sums, dtype)
            known = [torch.empty_like(x) for _ in range(2)]
            for passes, out in ((row_passes.row_softmax.function, known[0]), (programs.row_softmax, known[1])):
                passes(x, out, *sums, dim, log)
            check(known[1], known[0], dtype)
            grad = torch.randn(x.shape).to(dtype)
            total = row_passes.row_products.function(grad, known[0], dim, log)
            check(programs.row_products(grad, known[0], dim, log), total, dtype)
            found = [torch.empty_like(x) for _ in range(2)]
            row_passes.row_softmax_gradient.function(grad, known[0], found[0], total, dim, log)
            programs.row_softmax_gradient(grad, known[0], found[1], total, dim, log)
            check(found[1], found[0], dtype)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_numbers_of_rows(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.rules.rows import triton_numbers

    torch.manual_seed(0)
    for smoothing, z_loss in itertools.product((0.0, 0.1), (0.0, 0.2)):
        for weighted, is_kept, for_gradient in itertools.product((False, True), repeat=3):
            each, top, target = torch.rand(2, 5 if smoothing else 3, 170) + 0.5, torch.randn(170), torch.arange(170) % 9
            of_classes = torch.tensor(3.7) if weighted else None
            weights, largest = torch.rand(170) if weighted else None, torch.randn(170) if is_kept else None
            for sums, highest in ((each, None), (each[:1], top)):
                given = sums, highest, largest, target, weights, of_classes, 3, smoothing, 9, z_loss, for_gradient
                ours, theirs = programs.row_losses(*given), row_numbers.row_losses.function(*given)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
                for mean, few in itertools.product((False, True), (0, 1 << 13)):
                    monkeypatch.setattr(triton_numbers, "FEW_ROWS", few)
                    monkeypatch.setattr(triton_numbers, "ROWS_OF_ONE", 64)
                    of_all = *given, mean, torch.bfloat16
                    ours, theirs = programs.row_loss(*of_all), row_numbers.row_loss.function(*of_all)
                    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)
            both = each[0].clone(), each[0].clone()
            programs.row_terms(both[0], top)
            row_numbers.row_terms.function(both[1], top)
            torch.testing.assert_close(*both)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_multiples_of_all_elements(programs: Any) -> None:
    for dtype, factor in itertools.product((torch.float32, torch.bfloat16), (1.0, 0.3)):
        x = torch.randn(90, 101).to(dtype)
        found = x.clone()
        programs.scale_by(found, torch.tensor(factor))
        check(found, x * factor, dtype)


def test_too_many_rows_are_left_to_torch(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.rules.rows import triton_layout, triton_numbers

    assert triton_layout.layout_of(1, torch.empty(1 << 28, 3, device="meta")) is None
    assert triton_layout.layout_of(1, torch.empty((1 << 28) - 1, 3, device="meta")) is not None
    monkeypatch.setattr(triton_numbers, "MOST_OF_ONE", 6)
    monkeypatch.setattr(triton_numbers, "_loss", None)
    monkeypatch.setattr(triton_numbers, "_losses", None)
    given = torch.ones(1, 3, 7), torch.ones(7), None, torch.arange(7), None, None, 3, 0.0, 9, 0.0, False
    *_, value, whole = programs.row_loss(*given, True, torch.float32)
    check(torch.stack([value, whole]), torch.tensor([0.0, 6.0]), torch.float32)


@pytest.mark.slow
def test_programs_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="needs Triton's compiler")
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**outside, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parents[3] / "support" / "compiled_rows.py"
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    compiled = {line.split()[0] for line in ended.stdout.splitlines()}
    assert {"_sums", "_joined", "_gradient", "_softmax", "_products", "_softmax_gradient", "_losses"} < compiled


# Whole losses


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@over_reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_every_option(reduction: str, smoothing: float, on_cpu: None) -> None:
    """Value, gradient and second gradient, in single precision, against plain torch."""
    target, class_weights = torch.tensor([1, 70, 0]), normal(75).abs().float()
    for mesh, where, ignore, weight, z_loss in (
        ((2,), [S(1)], -100, None, 0.0),
        ((2,), [S(1)], 1, R, 0.3),
        ((2,), [S(1)], 1, S(0), 0.0),
        ((2, 2), [S(0), S(1)], 70, None, 0.3),
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore, "z_loss": z_loss}

        def loss(x: Tensor, target: Tensor, options: Any = options, weight: Any = weight) -> Tensor:
            sharded = isinstance(x, sw.DTensor)
            spread = [weight if weight is not None and p == S(1) else R for p in x.placements] if sharded else []
            given = None if weight is None else beside(x, class_weights, *spread)
            return (cross_entropy if sharded else written_out)(x, target, given, **options)

        rows = [p if p == S(0) else R for p in where]
        x = normal(3, 75).float()
        compare(with_slopes(loss), [x, target], mesh_of(mesh), [where, rows], atol=2e-4, rtol=2e-4)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_head_and_its_loss(on_cpu: None) -> None:
    x, layer, target = normal(2, 9, 4).float(), normal(75, 4).float(), torch.arange(18).view(2, 9) * 4

    def loss(x: Tensor, layer: Tensor, target: Tensor) -> Tensor:
        options = {"label_smoothing": 0.1, "ignore_index": 8, "z_loss": 0.1}
        if not isinstance(x, sw.DTensor):
            return with_logits(x, layer, target, **options)
        return linear_cross_entropy(x, layer, target, chunk_size=5, **options)

    for where in ([R], [S(0)], [R]), ([S(1)], [S(0)], [S(1)]):
        compare(with_slopes(loss, 2), [x, layer, target], mesh_of((2,)), where, atol=2e-4, rtol=2e-4)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_softmax_over_a_sharded_dim(on_cpu: None) -> None:
    for function, dim in itertools.product((F.softmax, F.log_softmax), (0, 1, 2)):
        both = with_slopes(lambda x, function=function, dim=dim: function(x, dim))
        compare(both, [normal(5, 6, 7).float()], mesh_of((2,)), [[S(dim)]], atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_logits_are_kept_and_may_be_written_over(on_cpu: None) -> None:
    """No exponentials: kernels take them again."""
    x, target = normal(5, 75).bfloat16(), torch.tensor([1, 70, 0, 2, 1])
    exact = x.double().requires_grad_()
    F.cross_entropy(exact, target).backward()
    for inplace in (False, True):
        leaf = place(x, S(1)).requires_grad_()
        logits = leaf * 1
        cross_entropy(logits, place(target, R), inplace_backward=inplace).backward()
        torch.testing.assert_close(leaf.grad.full_tensor().double(), exact.grad, rtol=1e-2, atol=1e-4)
        assert torch.equal(logits.detach().full_tensor(), leaf.grad.full_tensor()) is inplace


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_what_is_not_finite(on_cpu: None) -> None:
    x, target = normal(4, 75).float(), torch.tensor([1, 70, 0, 2])
    x[0, :60], x[1, 3], x[2] = -torch.inf, torch.nan, -torch.inf
    for reduction in ("none", "mean"):
        loss = F.cross_entropy(place(x, S(1)), place(target, R), reduction=reduction)
        torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(x, target, reduction=reduction), equal_nan=True)


# Where there are none


@pytest.mark.parametrize("found", [None, "2.9.1"])
def test_without_triton_it_is_said_once(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Triton:
        __version__ = found

    def imported(name: str) -> Any:
        if found is None:
            raise ImportError(name)
        return Triton

    monkeypatch.setattr(device_kernels.importlib, "import_module", imported)
    monkeypatch.setitem(table._providers, "cuda", device_kernels.offer_triton)
    said = "Triton is not installed" if found is None else "Triton 2.9.1 is too old"
    with restored():
        with pytest.warns(KernelWarning, match=f"{said}: losses .* Install triton 3.6 or newer"):
            assert not row_passes.keeps_logits("cuda")
        assert not row_passes.keeps_logits("cuda")
