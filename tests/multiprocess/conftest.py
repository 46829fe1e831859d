"""What is to run on real ranks runs in one launch per number of ranks: starting processes is what costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launch import Case, Outcome, run_cases


def cases_of(item: pytest.Item) -> list[Case]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return [value for value in params.values() if isinstance(value, Case)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if cases_of(item):
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(900))  # the first of a size runs them all


@pytest.fixture(scope="session")
def on_ranks(request: pytest.FixtureRequest) -> Callable[[Case], list[Any]]:
    """What a case returns on each rank. All cases of its size that this session has run with it, in one launch."""
    outcomes: dict[int, dict[str, Outcome]] = {}

    def results(case: Case) -> list[Any]:
        if case.size not in outcomes:
            cases = [other for item in request.session.items for other in cases_of(item) if other.size == case.size]
            outcomes[case.size] = run_cases([*dict.fromkeys(cases)])
        outcome = outcomes[case.size][case.name]
        if isinstance(outcome, str):
            pytest.fail(outcome, pytrace=False)
        for rank, (_, error) in enumerate(outcome):
            if error:
                pytest.fail(f"on rank {rank}:\n{error}", pytrace=False)
        return [result for result, _ in outcome]

    return results
