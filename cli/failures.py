"""Typed errors of the system as the CLI's line and exit status (docs/cli.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.cli.exits import CliError, Exit
from headrace.services.runtime import errors

_EXITS: tuple[tuple[type[errors.HeadraceError], Exit], ...] = (
    (errors.Unavailable, Exit.UNREACHABLE),
    (errors.ResourceExhausted, Exit.OVERLOADED),
    (errors.DeadlineExceeded, Exit.DEADLINE),
    (errors.Cancelled, Exit.INTERRUPTED),
    (errors.Internal, Exit.FAILED),
    (errors.Corrupt, Exit.FAILED),
    (errors.Aborted, Exit.FAILED),
)
"""All others say that the request has to change."""


def exit_of(error: errors.HeadraceError) -> Exit:
    """The exit status of a typed error."""
    return next((status for kind, status in _EXITS if isinstance(error, kind)), Exit.USAGE)


def cli_error(error: errors.HeadraceError, address: str = "") -> CliError:
    """The CLI's form of a typed error; `address` is who was asked."""
    where = f" [{error.replica_id}]" if error.replica_id else ""
    again = f" (repeat after {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
    if isinstance(error, errors.Unavailable) and address and not error.replica_id and error.retry_after_s is None:
        return CliError(f"nobody answers at {address}: {error.message}", Exit.UNREACHABLE)
    return CliError(f"{error}{where}{again}", exit_of(error))


@contextmanager
def told(address: str = "") -> Iterator[None]:
    """Turn HeadraceError into CliError, and Ctrl-C into its exit status."""
    try:
        yield
    except errors.HeadraceError as error:
        raise cli_error(error, address) from error
    except KeyboardInterrupt:
        raise CliError("interrupted", Exit.INTERRUPTED) from None
