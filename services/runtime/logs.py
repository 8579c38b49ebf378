"""Structured logs: JSON lines or a console, every line of a request carrying its id.

What is logged are events with typed fields, never prompts, tokens' text or credentials. As a second line of defence
fields whose names say "secret" are masked, at any depth.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TextIO, cast

import structlog
from pydantic import SecretBytes, SecretStr
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from headrace.services.runtime.settings import LogSettings

MASK: Final = "**********"
_SECRET_NAMES: Final = frozenset(
    {"authorization", "api_key", "cookie", "credential", "credentials", "password", "private_key", "salt", "secret"}
)
_SECRET_ENDINGS: Final = ("_secret", "_password", "_salt", "_credential", "_api_key", "_private_key")
_request_id: ContextVar[str | None] = ContextVar("headrace_request_id", default=None)


def configure(settings: LogSettings, stream: TextIO | None = None, **fields: str) -> None:
    """Send this process's logs, and those of libraries using `logging`, to `stream` (default: standard error).

    `fields` (role, replica …) stand in every line. Called once, at start.
    """
    out = sys.stderr if stream is None else stream
    console = settings.format == "console" or (settings.format == "auto" and out.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]

    def add_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**fields, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_request_id,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_fields,
        _mask_secrets,
        structlog.processors.StackInfoRenderer(),
    ]
    renderers: list[Processor] = (
        # Plain tracebacks: structlog's own choice prints the values of local variables, prompts among them.
        [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=_jsonable, ensure_ascii=False),
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Its debug lines tell of its own event loop plumbing, several per call.
    logging.getLogger("grpc").setLevel(max(level, logging.INFO))
    logging.getLogger("grpc._cython.cygrpc").addFilter(_somebody_was_there)


def _somebody_was_there(record: logging.LogRecord) -> bool:
    """False for gRPC's errors about an answer that its core did not take: whoever asked has left. gRPC logs each with a
    traceback, as a defect of the handler; metrics count the call as cancelled."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


def get(name: str) -> FilteringBoundLogger:
    """The logger of a module; `name` is its `__name__`. Before `configure`, warnings go to standard error, so that a
    tool's standard output stays its own."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[structlog.stdlib.add_log_level, structlog.dev.ConsoleRenderer(colors=False)],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
            cache_logger_on_first_use=False,
        )
    return cast(FilteringBoundLogger, structlog.get_logger(name.removeprefix("headrace.")))


def request_id() -> str | None:
    """The id of the request that the current task works for."""
    return _request_id.get()


@contextmanager
def request_context(identifier: str, **fields: str | int) -> Iterator[None]:
    """Within it, every log line of this task (and of tasks it starts) has request_id and `fields`."""
    token = _request_id.set(identifier)
    try:
        if not fields:
            yield
        else:
            with structlog.contextvars.bound_contextvars(**fields):
                yield
    finally:
        _request_id.reset(token)


def _add_request_id(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    identifier = _request_id.get()
    if identifier is not None:
        event.setdefault("request_id", identifier)
    return event


def _mask_secrets(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {key: _masked(key, value) for key, value in event.items()}


def _masked(key: str, value: Any) -> Any:
    name = key.lower().replace("-", "_")
    if isinstance(value, (SecretStr, SecretBytes)) or name in _SECRET_NAMES or name.endswith(_SECRET_ENDINGS):
        return MASK
    if isinstance(value, Mapping):
        return {str(inner): _masked(str(inner), item) for inner, item in value.items()}
    return value


def _jsonable(value: Any) -> Any:
    return value.hex() if isinstance(value, (bytes, bytearray, memoryview)) else repr(value)
