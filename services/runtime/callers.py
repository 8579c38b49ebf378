"""What a router tells its caller of himself: a Caller in the metadata of Generate (inference.proto).

It comes first, as initial metadata, and once more at the end: a client whose call fails at once may be given the
failure without what came before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc.aio
from google.protobuf.message import DecodeError

from headrace.services.runtime.errors import Internal
from headrace.services.runtime.intercept import CallerLeft
from headrace.v1 import inference_pb2

METADATA_KEY: Final = "headrace-caller-bin"


async def tell_caller(context: grpc.aio.ServicerContext[Any, Any], caller: inference_pb2.Caller) -> None:
    """Send it now, before anything else of the answer. Raises CallerLeft."""
    metadata = ((METADATA_KEY, caller.SerializeToString()),)
    context.set_trailing_metadata(metadata)
    try:
        await context.send_initial_metadata(metadata)
    except grpc.aio.InternalError as error:
        raise CallerLeft("the caller left") from error


def told_caller(metadata: Iterable[tuple[str, str | bytes]] | None) -> inference_pb2.Caller | None:
    """What metadata of either kind say; None: nothing, since the call was refused before anybody was known.

    Raises Internal for what is no Caller."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                return inference_pb2.Caller.FromString(value)
            except DecodeError as error:
                raise Internal(f"the router tells of its caller what cannot be read: {error}") from error
    return None
