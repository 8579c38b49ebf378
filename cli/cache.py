"""`headrace cache …`: what the operations do and how their answers are shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.cli.cache_targets import CacheTarget
from headrace.cli.exits import CliError, Exit
from headrace.cli.request_line import LineError, parse_line
from headrace.cli.tables import as_json, human_bytes
from headrace.v1 import control_pb2, inference_pb2

_CAUSES: Final = {
    "full": "the queue was full: the disk is slower than what comes",
    "quota": "a quota or the disk is full",
    "no_room": "everything held is in use",
    "EDQUOT": "no room for a segment: raise cache.quota_bytes, or free disk space",
    "ENOSPC": "the disk is full",
    "dropped": "erased while they waited",
    "index": "the index did not answer",
}
"""Causes whose names do not say what to do; docs/retention.md has all."""


def stats(target: CacheTarget, *, as_json_text: bool) -> int:
    """Numbers of every tier; UNHEALTHY when a replica did not answer."""
    answer = target.cache_stats()
    if as_json_text:
        _print(answer)
    else:
        show_stats(answer.tiers)
    return _verdict(answer.failures)


def show_stats(tiers: Sequence[control_pb2.TierStats]) -> None:
    """One line per tier and replica that fits 80 columns, and below what needs words."""
    console = Console()
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("tier", "replica", "blocks", "snaps", "held", "of", "hits", "misses"):
        left = name in ("tier", "replica")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "replica", overflow="fold")
    tiers = sorted(tiers, key=lambda one: (one.tier, one.replica.replica_id))
    for tier in tiers:
        table.add_row(
            tier_name(tier.tier),
            holder(tier),
            f"{tier.blocks:,}",
            f"{tier.snapshots:,}",
            human_bytes(tier.bytes),
            human_bytes(tier.capacity_bytes) if tier.capacity_bytes else "–",
            f"{tier.hits:,}",
            f"{sum(tier.misses.values()):,}",
        )
    console.print(table)
    for tier in tiers:
        where = f"{tier_name(tier.tier)} {tier.replica.replica_id}".strip()
        for note in _notes(tier):
            console.print(f"{where}: {note}", highlight=False)


def holder(tier: control_pb2.TierStats) -> str:
    """Whose numbers these are: a replica's, or those of a store that several share."""
    return f"{len(tier.sharing)} share it" if tier.sharing else tier.replica.replica_id or "–"


def _notes(tier: control_pb2.TierStats) -> list[str]:
    """What is worth a line: tokens served, bytes written, disk, queue, and whatever was refused or failed."""
    parts = []
    if tier.lookup_tokens:
        parts.append(f"{tier.hit_tokens:,} of {tier.lookup_tokens:,} tokens served")
    if tier.written_bytes:
        parts.append(f"{human_bytes(tier.written_bytes)} written since start")
    if tier.disk_bytes:
        parts.append(f"{human_bytes(tier.disk_bytes)} on disk in {tier.segments} segments, {tier.buckets} buckets")
    if tier.queued_entries:
        parts.append(f"{tier.queued_entries} wait to be written")
    if refused := {cause: count for cause, count in sorted(tier.refused.items()) if cause != "known"}:
        told = ", ".join(f"{count:,} ({_CAUSES.get(cause, cause)})" for cause, count in refused.items())
        parts.append(f"[yellow]entries not taken: {told}[/yellow]")
    if tier.discarded or tier.quarantined:
        parts.append(f"[red]{tier.discarded} discarded, {tier.quarantined} quarantined[/red]")
    parts += [
        f"[red]{count:,} writes failed: {cause}{f' ({_CAUSES[cause]})' if cause in _CAUSES else ''}[/red]"
        for cause, count in sorted(tier.failed_writes.items())
    ]
    return parts


def verify(target: CacheTarget, *, as_json_text: bool) -> int:
    """Read and check every record; FAILED when one is bad."""
    last = control_pb2.VerifyCacheResponse()
    with Progress(
        TextColumn("verify"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("verify", total=None)
        for last in target.verify_cache():
            bar.update(task, completed=last.checked, total=last.expected or None)
    if not last.done:
        raise CliError("the scrub ended without a result; this is a defect of the server", Exit.FAILED)
    if as_json_text:
        _print(last)
    else:
        print(
            f"{last.checked:,} records checked, {len(last.bad)} bad; {last.missing_in_index} were missing in the index,"
            f" {last.dangling} rows of it led nowhere"
        )
        for bad in last.bad:
            print(f"{bad.key.hex()} {bad.cause}")
    return Exit.FAILED if last.bad else Exit.DONE


def collect(target: CacheTarget, *, as_json_text: bool) -> int:
    """One pass of the sweeper; UNHEALTHY when it was refused."""
    answer = target.collect_cache()
    if as_json_text:
        _print(answer)
    elif answer.refused:
        print(f"nothing was done: {answer.refused}")
    else:
        print(
            f"{answer.expired_buckets} buckets had expired, {answer.evicted_segments} segments evicted, "
            f"{answer.adopted_segments} adopted; {human_bytes(answer.freed_bytes)} freed"
        )
    return Exit.UNHEALTHY if answer.refused else Exit.DONE


def drop(target: CacheTarget, request: control_pb2.ClearCacheRequest, *, as_json_text: bool) -> int:
    """Drop a namespace, a tenant or everything; UNHEALTHY when a replica did not do its part."""
    answer = target.clear_cache(request)
    if as_json_text:
        _print(answer)
    else:
        for one in answer.drops:
            where = f"{tier_name(one.tier)} {one.replica.replica_id}".strip()
            print(f"{where}: {one.blocks:,} blocks and {one.snapshots:,} snapshots dropped")
    return _verdict(answer.failures)


def pin(target: CacheTarget, prompt: inference_pb2.Prompt, tenant: str, *, as_json_text: bool) -> int:
    """Keep a prompt's stored entries; UNHEALTHY when that keeps nothing usable."""
    answer = target.pin_cache(control_pb2.PinCacheRequest(prompt=prompt, tenant=tenant))
    if as_json_text:
        _print(answer)
    else:
        print(
            f"{answer.usable_tokens:,} of {answer.prompt_tokens:,} tokens are kept: {answer.pinned:,} blocks and "
            "snapshots are pinned"
        )
    if answer.usable_tokens:
        return Exit.DONE
    if not answer.asked:
        print("headrace: nothing is kept: the prompt is shorter than a block", file=sys.stderr)
        return Exit.UNHEALTHY
    lacking = "blocks from the first on and a snapshot at their end" if answer.needs_snapshots else "the first block"
    print(
        f"headrace: nothing is kept: the store does not hold {lacking}; send the prompt as a request, with "
        "--snapshot-at where others will go on from it, and pin it some seconds later (`headrace "
        "cache find` shows what is there)",
        file=sys.stderr,
    )
    return Exit.UNHEALTHY


def find(target: CacheTarget, prompt: inference_pb2.Prompt, tenant: str, *, as_json_text: bool) -> int:
    """Which tier has which block of a prompt."""
    answer = target.find_cache(control_pb2.FindCacheRequest(prompt=prompt, tenant=tenant))
    if as_json_text:
        _print(answer, usable_tokens=usable_tokens(answer))
    else:
        _show_found(answer)
    return _verdict(answer.failures)


def usable_tokens(answer: control_pb2.FindCacheResponse) -> dict[str, int]:
    """Per tier, the longest prefix that it holds as a whole: blocks from the first on, and for models with snapshots a
    snapshot at its end (L4). Any replica's copy counts; `any` takes all tiers together."""
    names = [tier_name(tier) for tier in (1, 2, 3)]
    found = dict.fromkeys([*names, "any"], 0)
    for name in found:
        for block in answer.blocks:
            if not _held(block.places, name):
                break
            if not answer.needs_snapshots or _held(block.snapshot_places, name):
                found[name] = block.end_tokens
    return found


def _held(places: Sequence[control_pb2.CachePlace], name: str) -> bool:
    return any(name in ("any", tier_name(place.tier)) for place in places)


def _show_found(answer: control_pb2.FindCacheResponse) -> None:
    console = Console()
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("tokens", "key", "device", "host", "store", "snapshot"):
        table.add_column(name, justify="right" if name == "tokens" else "left", overflow="fold")
    for block in answer.blocks:
        table.add_row(
            f"{block.end_tokens - answer.block_tokens:,}–{block.end_tokens:,}",
            block.key.hex()[:16],
            *(_places(block.places, tier) for tier in (1, 2, 3)),
            ", ".join(f"{tier_name(one.tier)} {_where(one)}".strip() for one in block.snapshot_places) or "–",
        )
    console.print(table)
    usable = ", ".join(f"{name} {tokens:,}" for name, tokens in usable_tokens(answer).items())
    print(f"{answer.prompt_tokens:,} tokens; longest prefix held as a whole: {usable}")


def _places(places: Sequence[control_pb2.CachePlace], tier: int) -> str:
    return ", ".join(_where(place) for place in places if place.tier == tier) or "–"


def _where(place: control_pb2.CachePlace) -> str:
    if place.tier != control_pb2.CACHE_TIER_STORE:
        return place.replica.replica_id or "yes"
    if not place.expires_unix_ms:
        return f"{place.retention}, for good"
    left = max(0.0, place.expires_unix_ms / 1000 - time.time())
    return f"{place.retention}, {left / 3600:.1f} h left"


def read_prompt(path: Path, *, chat: bool) -> inference_pb2.Prompt:
    """A prompt from a file: a `.json` file holds one object as a line of `headrace offline` has it, any other its text.

    Raises CliError for a file that makes none.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is no UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            return parse_line(text, path.parent)[1].prompt
        except LineError as error:
            raise CliError(f"{path}: {error}") from error
    from headrace.cli.ask import Message, chat_prompt, text_prompt

    return chat_prompt([Message("user", text)]) if chat else text_prompt(text)


def parse_namespace(text: str) -> bytes:
    """64 hexadecimal digits. Raises CliError."""
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b""
    if len(namespace) != 32:
        raise CliError(f"{text!r} is no namespace: give its 64 hexadecimal digits, as buckets in the store are named")
    return namespace


def tier_name(tier: int) -> str:
    """CACHE_TIER_STORE → `store`."""
    return control_pb2.CacheTier.Name(tier).removeprefix("CACHE_TIER_").lower()  # type: ignore[arg-type]


def _print(message: Any, **more: Mapping[str, int]) -> None:
    print(json.dumps({**as_json(message), **more}, ensure_ascii=False, indent=2))


def _verdict(failures: Sequence[control_pb2.CacheFailure]) -> int:
    for failure in failures:
        print(f"headrace: {failure.replica.replica_id}: {failure.error.message}", file=sys.stderr)
    return Exit.UNHEALTHY if failures else Exit.DONE
