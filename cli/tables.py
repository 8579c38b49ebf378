"""What the CLI shows of messages: tables for people, plain values for --json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.cli.ask import Answer
from headrace.v1 import common_pb2, control_pb2, registry_pb2


def as_json(message: Message) -> dict[str, Any]:
    """A message with the proto's field names, for machines.

    Unlike protobuf's own JSON, 64-bit counts are numbers and bytes are hexadecimal, as the logs have them; enums are
    their names; absent fields are null. Maps here have plain values only.
    """
    plain: dict[str, Any] = {}
    for one in message.DESCRIPTOR.fields:
        value = getattr(message, one.name)
        if one.message_type is not None and one.message_type.GetOptions().map_entry:
            plain[one.name] = dict(value)
        elif one.is_repeated:
            plain[one.name] = [_plain_value(one, item) for item in value]
        elif one.has_presence and not message.HasField(one.name):
            plain[one.name] = None
        else:
            plain[one.name] = _plain_value(one, value)
    return plain


def _plain_value(one: Any, value: Any) -> Any:
    """`one` is the field's descriptor, whose class depends on protobuf's implementation."""
    if one.type == FieldDescriptor.TYPE_MESSAGE:
        return as_json(value)
    if one.type == FieldDescriptor.TYPE_BYTES:
        return value.hex()
    if one.type == FieldDescriptor.TYPE_ENUM:
        known = one.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value


def human_bytes(count: float) -> str:
    """1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def request_row(label: str, answer: Answer) -> tuple[str, ...]:
    """One line of `request_table`."""
    report, usage = answer.report, answer.usage
    names = [one.peer.replica_id for one in report.replicas if one.role != common_pb2.ROLE_ROUTER] if report else []
    counts = "–"
    if usage is not None:
        counts = f"{usage.cached_tokens + usage.loaded_tokens}/{usage.computed_tokens}"
    rate = answer.tokens_per_s
    return (
        label,
        "\n".join(names) or "–",
        human_seconds(report.times.first_token_us / 1e6 if report else answer.first_token_s),
        f"{rate:.1f}" if rate is not None else "–",
        counts,
        str(usage.completion_tokens) if usage else "–",
        human_bytes(report.bytes.kv_bytes) if report else "–",
        (report.transport if report else "") or "–",
    )


def request_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Requests, one per row; fits 80 columns."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=False)
    for name in ("request", "replicas", "TTFT", "tok/s", "cached/\ncomputed", "out", "KV moved", "by"):
        left = name in ("request", "replicas", "by")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "request")
    for row in rows:
        table.add_row(*row)
    return table


def report_table(answer: Answer) -> Table:
    """One request in detail: where it ran and where its time went."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    report, usage = answer.report, answer.usage
    if report is None or usage is None:
        return table
    for one in report.replicas:
        role = role_name(one.role)
        table.add_row(role, f"{one.peer.replica_id} on {one.host}, attempt {one.attempt}")
    times = report.times
    rate = answer.tokens_per_s
    table.add_row("TTFT", human_seconds(times.first_token_us / 1e6))
    table.add_row("tokens/s", f"{rate:.1f}" if rate is not None else "–")
    parts = ("prepare", "queue", "encode", "reserve", "prefill_queue", "prefill", "transfer")
    spent = [(part, getattr(times, f"{part}_us")) for part in parts]
    table.add_row("of TTFT", ", ".join(f"{part} {human_seconds(us / 1e6)}" for part, us in spent if us))
    table.add_row(
        "prompt",
        f"{usage.prompt_tokens} tokens: {usage.cached_tokens} cached, {usage.loaded_tokens} loaded, "
        f"{usage.computed_tokens} computed" + (f", {usage.image_tokens} of images" if usage.image_tokens else ""),
    )
    again = f", {usage.recomputed_tokens} prompt tokens recomputed" if usage.recomputed_tokens else ""
    table.add_row("output", f"{usage.completion_tokens} tokens{again}")
    moved = f"{human_bytes(report.bytes.kv_bytes)} of KV by {report.transport or '–'}"
    if report.bytes.embedding_bytes:
        moved += f", {human_bytes(report.bytes.embedding_bytes)} of embeddings"
    table.add_row("moved", moved)
    table.add_row("seed", str(report.seed))
    return table


def role_name(role: common_pb2.Role.ValueType) -> str:
    """ROLE_PREFILL → `prefill`."""
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def state_name(state: registry_pb2.ReplicaState.ValueType) -> str:
    """REPLICA_STATE_READY → `ready`."""
    return registry_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()


def load_text(replica: registry_pb2.Replica) -> str:
    """`2 running, 1 queued, KV 12 %`: a replica's last load in a few words."""
    running = sum(load.running_requests for load in replica.loads)
    queued = sum(load.queued_requests + load.reserved_requests for load in replica.loads)
    parts = [f"{running} running"]
    if queued:
        parts.append(f"{queued} waiting")
    total = sum(load.rows_total for load in replica.loads)
    if total:
        used = sum(load.rows_used for load in replica.loads)
        cached = sum(load.rows_cached for load in replica.loads)
        parts.append(f"KV {100 * used / total:.0f} % used, {100 * cached / total:.0f} % cached")
    return ", ".join(parts) if replica.loads else "–"


def requests_text(counts: control_pb2.Conservation) -> str:
    """L11's sum in words, and what was turned away."""
    ended = {"finished": counts.finished, "cancelled": counts.cancelled, "deadline": counts.deadline}
    ended |= {"failed": counts.failed, "refused": counts.refused}
    ended |= {"invalid": counts.invalid, "unavailable": counts.unavailable}
    return ", ".join([f"{counts.live} live", *(f"{number} {name}" for name, number in ended.items() if number)])
