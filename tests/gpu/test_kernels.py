"""The kernels that run on DTensors, forward and backward, are those that plain torch runs on the shards: all functions
of torch.nn.functional and attention in all its backends, in float32 and bfloat16. Skipped without a CUDA device.

With SHARDWISE_WRITE=path in the environment, what was found is written there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from kernels import (
    NUM_RANKS,
    RANK,
    SHARED_REASONS,
    Case,
    Place,
    Reason,
    attention_cases,
    compared,
    sized_cases,
    torch_cases,
)
from saved import fake_mesh
from torch.nn.attention import SDPBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),  # torch 2.11, once per process
]

DTYPES = [torch.float32, torch.bfloat16]
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
REASONS = (
    *(Reason(each.text, each.functions, each.kernels) for each in SHARED_REASONS),
    Reason("plain torch copies parts of larger tensors, which are contiguous here", ("*max_unpool*",), ("*copy*",)),
)

found: list[str] = []


@pytest.fixture(params=DTYPES, ids=str)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with fake_mesh(NUM_RANKS, names=("dp",), device="cuda", rank=RANK) as mesh:
        yield Place(mesh, request.param)


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[None]:
    yield
    if path := os.environ.get("SHARDWISE_WRITE"):
        where = f"torch {torch.__version__}, {torch.cuda.get_device_name()}; rank {RANK} of {NUM_RANKS}, fake group"
        Path(path).write_text("\n".join([f"# Kernels on DTensors and on plain shards\n\n{where}.\n", *found]))


def check(place: Place, cases: Iterable[Case], title: str, *, at_least: int) -> None:
    report = compared(place, cases, REASONS)
    found.append(report.markdown(f"{title}, {str(place.dtype).removeprefix('torch.')}"))
    report.check(at_least=at_least)


def test_functions(place: Place) -> None:
    check(place, torch_cases(4), "Torch's samples of its functions", at_least=400)


def test_sizes_of_real_programs(place: Place) -> None:
    check(place, sized_cases(), "Sizes of real programs", at_least=30)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_attention(place: Place, backend: SDPBackend) -> None:
    half_only = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    if half_only and place.dtype == torch.float32:
        pytest.skip(f"{backend.name} takes half precision only")
    check(place, attention_cases([backend]), f"Attention, {backend.name}", at_least=4)
