"""What functions take apart and put together: read off one run, and the same as the function itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.models import recipes
from shardwise.checkpoint.models.recipes import Noted, Taken, grouped, recipe
from shardwise.local import part

A, B, C = torch.arange(24.0).view(4, 6), torch.arange(24.0, 48).view(4, 6), torch.arange(12).view(12)
D = torch.arange(48.0, 72).view(4, 6)

KNOWN: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "itself": (lambda a: a, (A,)),
    "transposed": (lambda a: a.T, (A,)),
    "a part": (lambda a: a[1:3, ::2], (A,)),
    "one of three": (lambda a: a.view(4, 3, 2)[:, 1], (A,)),
    "chunks": (lambda a: a.chunk(3, dim=1)[2], (A,)),
    "a diagonal": (lambda a: a.diagonal(), (A,)),
    "repeated": (lambda a: a[:1].expand(5, 6), (A,)),
    "joined": (lambda a, b: torch.cat([a, b]), (A, B)),
    "joined by columns": (
        lambda a, b: torch.cat((a, b[:, 2:]), -1),
        (A, B),
    ),
    "joined by an axis": (lambda a, b: torch.cat([a, b], axis=1), (A, B)),
    "stacked": (lambda a, b: torch.stack([a, b], dim=1), (A, B)),
    "stacked last": (lambda a, b: torch.stack([a, b], -1), (A, B)),
    "experts": (lambda a, b: torch.stack([torch.cat([a, b]), torch.cat([b, a])]), (A, B)),
    "rotary": (lambda a: a.view(2, 2, 1, 6).transpose(0, 1).reshape(4, 6), (A,)),
    "reshaped, then joined": (lambda a, b: torch.cat([a.view(2, 2, 6).transpose(0, 1).flatten(0, 1), b]), (A, B)),
    "heads by turns": (
        lambda a, b, d: torch.stack([x.view(2, 2, 6) for x in (a, b, d)], 1).flatten(0, 2),
        (A, B, D),
    ),
    "rows by turns": (lambda a, b: torch.stack([a, b], 1).reshape(8, 6), (A, B)),
    "numbers by turns": (lambda a, b: torch.stack([a[0], b[0]], 1).view(12), (A, B)),
    "by turns, then joined": (lambda a, b: torch.cat([torch.stack([a, b], 1).flatten(0, 1), a]), (A, B)),
    "joined, then flat": (lambda a, b: torch.cat([a, b], 1).flatten(), (A, B)),
    "joined, and made contiguous": (lambda a, b: torch.cat([a, b], 1).contiguous().clone().reshape(-1), (A, B)),
    "dims put together twice": (
        lambda a, b: torch.stack([a.view(2, 2, 6).transpose(0, 1).flatten(0, 1), b], 1).flatten(0, 1),
        (A, B),
    ),
    "a copy": (lambda a: a.T.contiguous(), (A,)),
    "named arguments": (lambda a: torch.reshape(input=a, shape=(2, 12)), (A,)),
    "a copy of a part": (lambda a: a[2].clone(), (A,)),
    "another dtype": (lambda c: c.view(torch.int32), (C,)),
    "a dim more": (lambda a: a[None, :, None], (A,)),
}

COMPUTED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "more than that": (lambda a: a + 1, (A,)),
    "in place": (lambda a: a.mul_(2), (A,)),
    "in place, before": (lambda a: torch.cat([a, a.mul_(2)]), (A,)),
    "in place, after": (lambda a, b: torch.cat([a, b]).mul_(2), (A, B)),
    "a copy written to": (lambda a: [y := a.clone(), y[0].zero_()][0], (A,)),
    "written to by its data": (lambda a: [a.data.mul_(2), a][1], (A,)),
    "a copy written to by its data": (lambda a: [y := a.clone(), y.data.zero_()][0], (A,)),
    "a view of what was joined": (lambda a, b: torch.cat([a, b]).T, (A, B)),
    "joined with a wider dtype": (lambda a, c: torch.cat([a.view(-1), c.double()]), (A, C)),
    "dims taken apart": (lambda a: a.T.reshape(4, 6), (A,)),
    "a conjugate": (lambda a: torch.view_as_complex(a.view(4, 3, 2)).conj(), (A,)),
    "columns by turns": (lambda a, b: torch.stack([a, b], 2).view(4, 12), (A, B)),
    "by turns, transposed": (lambda a, b: torch.stack([a.T, b.T], 1).view(12, 4), (A, B)),
    "a join in other dims": (lambda a, b: torch.cat([a, b]).view(6, 8), (A, B)),
    "a flat join that was written to": (
        lambda a, b: [y := torch.stack([a, b], 1), y.flatten(0, 1), y.neg_()][1],
        (A, B),
    ),
    "other numbers of joined bits": (lambda a, b: torch.cat([a, b]).view(torch.int32), (A, B)),
    "something new": (lambda a: torch.zeros_like(a), (A,)),
    "flipped": (lambda a: a.flip(0), (A,)),
}


def parts_of(function: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> list[Taken] | None:
    given = [torch.empty_like(x, device="meta") for x in arguments]
    with (noted := Noted(given)):
        made = function(*given)
    return recipe(made, noted)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_only_taken_apart_and_put_together(name: str) -> None:
    function, arguments = KNOWN[name]
    parts, expected = parts_of(function, arguments), function(*arguments)
    assert parts is not None
    found = torch.full_like(expected, -1)
    for one in parts:
        source = arguments[one.argument].view(-1).view(one.dtype)
        view = source.as_strided(one.sizes, one.strides, one.offset)
        part(found, *one.box).copy_(view.reshape(one.box[1]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", COMPUTED)
def test_what_does_more_is_not_taken_for_it(name: str) -> None:
    assert parts_of(*COMPUTED[name]) is None


def test_what_lies_in_very_many_runs_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments = KNOWN["heads by turns"]
    assert len(parts_of(function, arguments) or ()) == 6
    monkeypatch.setattr(recipes, "MOST_RUNS", 5)
    assert parts_of(function, arguments) is None


def test_dims_that_make_up_others() -> None:
    assert grouped((8, 3), (2, 4, 3)) == ((2, 4), (3,))
    assert grouped((4, 2), (4, 1, 2)) == ((4,), (1, 2))
    assert grouped((4,), (1, 4, 1)) == ((1, 4, 1),)
    assert grouped((4, 3), (4, 3)) == ((4,), (3,))
    assert grouped((4, 3), (3, 4)) is None
    assert grouped((8,), (2, 3)) is None
    assert grouped((4, 6), (2, 2, 6, 2)) is None
