"""Logs: request ids on every line, one JSON object a line, secrets masked."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from grpc._cython import cygrpc
from pydantic import SecretStr

from headrace.services.runtime import logs
from headrace.services.runtime.settings import LogSettings


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """A stream that gets the logs; what was configured before is put back."""
    root = logging.getLogger()
    before, level, config = root.handlers[:], root.level, structlog.get_config()
    stream = io.StringIO()
    yield stream
    root.handlers[:], root.level = before, level
    structlog.configure(**config)


def _lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_every_line_of_a_request_has_its_id_also_in_tasks(out: io.StringIO) -> None:
    logs.configure(LogSettings(), out, role="decode")
    log = logs.get("headrace.services.decode.main")

    async def request(identifier: str) -> None:
        with logs.request_context(identifier, attempt=2):
            assert logs.request_id() == identifier
            await asyncio.create_task(asyncio.to_thread(log.info, "working"))

    await asyncio.gather(request("one"), request("two"))
    log.info("idle")
    by_id = {line.get("request_id"): line for line in _lines(out)}
    assert by_id.keys() == {"one", "two", None}
    assert by_id["one"]["attempt"] == 2
    assert by_id["one"]["role"] == "decode"
    assert by_id["one"]["logger"] == "services.decode.main"
    assert logs.request_id() is None


def test_secrets_are_masked_at_any_depth(out: io.StringIO) -> None:
    logs.configure(LogSettings(), out)
    logs.get("x").info(
        "loaded",
        api_key="s1",
        tenant_salt=b"s1",
        plain=SecretStr("s1"),
        headers={"Authorization": "Bearer s1", "nested": {"password": "s1"}},
        tokens=3,
    )
    assert "s1" not in out.getvalue()
    assert _lines(out)[0]["tokens"] == 3
    assert out.getvalue().count(logs.MASK) == 5


def test_levels_libraries_exceptions_and_odd_values(out: io.StringIO) -> None:
    logs.configure(LogSettings(level="warning"), out)
    logs.get("x").info("hidden")
    logging.getLogger("lib").warning("from %s", "a library")
    try:
        raise ValueError("boom")
    except ValueError:
        logs.get("x").error("failed", exc_info=True, digest=b"\x01\xff")
    library, failure = _lines(out)
    assert (library["event"], library["logger"]) == ("from a library", "lib")
    assert "ValueError: boom" in failure["exception"]
    assert failure["digest"] == "01ff"


def test_the_console_is_for_people(out: io.StringIO) -> None:
    logs.configure(LogSettings(format="console"), out)
    logs.get("x").info("hello", count=1)
    assert "hello" in out.getvalue()
    assert "count=1" in out.getvalue()
    assert not out.getvalue().startswith("{")


def test_an_answer_that_nobody_takes_is_not_logged_as_a_defect(out: io.StringIO) -> None:
    """gRPC logs what its core did not take with a traceback; other errors of it stay."""
    logs.configure(LogSettings(), out)
    logger = logging.getLogger("grpc._cython.cygrpc")
    for error in (cygrpc.ExecuteBatchError("left"), RuntimeError("real")):
        try:
            raise error
        except Exception:
            logger.exception("raised by servicer method")
    (line,) = _lines(out)
    assert "real" in line["exception"]
