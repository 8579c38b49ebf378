"""schemathesis against the gateway's own description: no 5xx, no hang (L13)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.services.gateway.fakes import World, says

EXAMPLES = 400 if os.environ.get("HEADRACE_FUZZ") == "full" else 6
"""Of each operation; HEADRACE_FUZZ=full takes minutes."""
OPERATIONS = ("chat", "completions", "responses", "messages", "count")


def attack(url: str, operation: str, mode: GenerationMode) -> list[int]:
    """The statuses of requests that follow the description, or do not."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: list[int] = []

    @given(case=schema.find_operation_by_id(operation).as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: Any) -> None:
        response = case.call(timeout=60)
        assert response.status_code < 500, (response.status_code, response.text, case.body)
        statuses.append(response.status_code)

    one()
    return statuses


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_whatever_the_description_allows(world: World, operation: str) -> None:
    """L13."""
    world.router.script = says("</think>", "hello")
    statuses = await asyncio.to_thread(attack, world.url, operation, GenerationMode.POSITIVE)
    statuses += await asyncio.to_thread(attack, world.url, operation, GenerationMode.NEGATIVE)
    assert statuses
