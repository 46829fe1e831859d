"""The states of random numbers: what is drawn next is what would have been drawn."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import numpy
import torch

from shardwise.checkpoint.steps.random_states import all_states, random_states, restore_random_states


def drawn() -> list[Any]:
    return [
        [random.random(), random.gauss(0, 1), random.randrange(10**9)],
        [numpy.random.random(), numpy.random.standard_normal(), int(numpy.random.randint(10**9))],
        [*torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randperm(5).tolist()],
    ]


def saved() -> dict[str, Any]:
    return json.loads(json.dumps(random_states()))


def test_what_is_drawn_next() -> None:
    drawn()
    random.gauss(0, 1)  # one is kept for the next time
    states = all_states([saved()])
    expected = drawn()
    drawn()
    restore_random_states(states, 0)
    assert drawn() == expected


def test_ranks_have_their_own_and_one_state_is_kept_once() -> None:
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    zero = saved()
    expected = [drawn()]
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    random.seed(1)
    one = saved()
    states = all_states([zero, one])
    assert {name: (len(kept["states"]), kept["of"]) for name, kept in states.items()} == {
        "python": (2, [0, 1]),
        "torch": (1, [0, 0]),
        "numpy": (1, [0, 0]),
    }
    expected.append(drawn())
    for number in (0, 1):
        restore_random_states(states, number)
        assert drawn() == expected[number]


def test_on_more_ranks_all_get_what_all_had_and_new_ones_keep_what_differed() -> None:
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    zero = saved()
    _, numpys, torchs = drawn()
    random.seed(1), numpy.random.seed(0), torch.manual_seed(0)
    states = all_states([zero, saved()])
    random.seed(5)
    expected = random.random()
    random.seed(5)
    restore_random_states(states, 2)
    assert random.random() == expected and drawn()[1:] == [numpys, torchs]


def test_a_generator_that_is_not_there() -> None:
    states = all_states([{**saved(), "quantum": 1}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_random_states(states, 0)
