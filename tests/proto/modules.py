"""The files of the contract, as modules."""

from __future__ import annotations

from headrace.v1 import (
    cache_pb2,
    common_pb2,
    control_pb2,
    decode_pb2,
    encoder_pb2,
    events_pb2,
    inference_pb2,
    prefill_pb2,
    registry_pb2,
    transfer_pb2,
)

MODULES = (
    cache_pb2,
    common_pb2,
    control_pb2,
    decode_pb2,
    encoder_pb2,
    events_pb2,
    inference_pb2,
    prefill_pb2,
    registry_pb2,
    transfer_pb2,
)
