"""`headrace cache --store DIR`: a store on disk looked into and managed without a cluster."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main as program
from headrace.cli.ask import text_prompt
from headrace.cli.cache import parse_namespace, read_prompt, show_stats, usable_tokens
from headrace.cli.cache_keys import offline_keys
from headrace.cli.exits import CliError, Exit
from headrace.cli.model import make
from headrace.kvcache.entries import EntryInfo, EntryKind, RetentionClass, payload_digest
from headrace.kvcache.store.base import PutEntry, Store
from headrace.kvcache.store.open import StoreSettings, open_store
from headrace.services.router.tenants import tenant_tag
from headrace.v1 import common_pb2, control_pb2

SECRET = "a secret of at least sixteen"
NAMESPACE = hashlib.sha256(b"namespace").digest()
LOAD = ("load.block_tokens=32", "load.native_kernels=false")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    opened = open_store(StoreSettings(f"file://{folder}"))
    yield opened
    opened.close()


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("HEADRACE_ROUTER__SALT_SECRET", SECRET)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headrace", "cache", *arguments, "--store", str(folder)])
        with pytest.raises(SystemExit) as end:
            program.main()
        out, err = capsys.readouterr()
        return (end.value.code if isinstance(end.value.code, int) else 0), out, err

    return call


def put(store: Store, *keys: bytes, kind: EntryKind = EntryKind.BLOCK, tenant: str = "acme") -> None:
    entries = []
    for index, key in enumerate(keys):
        payload = (key * 200)[:5000]
        info = EntryInfo(
            key=key,
            kind=kind,
            namespace=NAMESPACE,
            parent=bytes(32),
            tokens=32 * (index + 1),
            length=len(payload),
            digest=payload_digest(payload),
            retention=RetentionClass.AGENT,
            tenant_tag=tenant_tag(SECRET.encode(), tenant),
        )
        entries.append(PutEntry(info, payload))
    assert all(store.put_many(entries).durable.result(30))


def key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def test_stats_verify_gc(store: Store, run: Run) -> None:
    put(store, *(key(name) for name in "abc"))
    store.close()
    code, out, _ = run("stats", "--json")
    assert code == Exit.DONE
    (tier,) = json.loads(out)["tiers"]
    assert (tier["tier"], tier["blocks"], tier["bytes"]) == ("CACHE_TIER_STORE", 3, 15_000)
    code, out, _ = run("stats")
    assert code == Exit.DONE
    assert "store" in out
    code, out, _ = run("verify", "--json")
    assert code == Exit.DONE
    assert json.loads(out)["checked"] == 3
    assert run("gc")[0] in (Exit.DONE, Exit.UNHEALTHY)
    assert "3 records checked, 0 bad" in run("verify")[1]


def test_stats_fit_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Large numbers in one line per tier; what needs words stands below, with what to do about it."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    peers = [common_pb2.PeerId(replica_id=name) for name in ("prefill-10", "decode-10")]
    numbers: dict[str, Any] = {
        "blocks": 1_123_456,
        "snapshots": 123_456,
        "bytes": 800 << 30,
        "capacity_bytes": 900 << 30,
        "hits": 1_123_456,
        "misses": {"absent": 123_456},
        "written_bytes": 800 << 30,
    }
    show_stats(
        [
            *(control_pb2.TierStats(tier=control_pb2.CACHE_TIER_DEVICE, replica=peer, **numbers) for peer in peers),
            control_pb2.TierStats(
                tier=control_pb2.CACHE_TIER_STORE,
                sharing=peers,
                failed_writes={"EDQUOT": 4, "other": 1},
                refused={"quota": 7, "known": 9},
                **numbers,
            ),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["device", "prefill-10", "1,123,456", "123,456", "800.0", "GiB", "900.0", "GiB"] in [row[:8] for row in rows]
    assert ["store", "2", "share", "it"] in [row[:4] for row in rows]
    text = " ".join(" ".join(lines).split())
    assert "store: 4 writes failed: EDQUOT (no room for a segment: raise cache.quota_bytes, or free disk space)" in text
    assert "store: 1 writes failed: other" in text
    assert "store: entries not taken: 7 (a quota or the disk is full)" in text


def test_a_damaged_record_is_an_exit_status(store: Store, folder: Path, run: Run) -> None:
    """L3: a scrub finds it and names it."""
    put(store, *(key(name) for name in "abc"))
    store.close()
    (segment,) = folder.rglob("*.seg")
    data = bytearray(segment.read_bytes())
    at = data.index(key("b") * 2)
    data[at] ^= 1
    segment.write_bytes(data)
    code, out, _ = run("verify", "--json")
    assert code == Exit.FAILED
    assert [bad["key"] for bad in json.loads(out)["bad"]] == [key("b").hex()]


def test_a_tenant_is_erased_by_name(store: Store, run: Run) -> None:
    """L25: the tag is derived from the cluster's secret."""
    put(store, key("a"), key("b"), tenant="acme")
    put(store, key("c"), tenant="umbrella")
    store.close()
    code, out, _ = run("drop-tenant", "acme", "--yes", "--json")
    assert code == Exit.DONE
    assert json.loads(out)["blocks"] == 2
    assert json.loads(run("stats", "--json")[1])["tiers"][0]["blocks"] == 1
    code, _, err = run("drop-tenant", "acme-typo", "--yes")
    assert code == Exit.USAGE
    assert "holds nothing of a tenant 'acme-typo'" in err
    code, out, _ = run("drop-namespace", NAMESPACE.hex(), "--yes")
    assert "store: 1 blocks and 0 snapshots dropped" in out
    assert json.loads(run("stats", "--json")[1])["tiers"][0]["blocks"] == 0


def test_find_names_a_prompt_as_a_cluster_would(store: Store, run: Run, tmp_path: Path) -> None:
    model = make("deepseek-v41-tiny", tmp_path / "models", 0)
    text = "What stands in the store of a cluster that is gone. " * 4
    keys, length, block = offline_keys(model, LOAD, SECRET, text_prompt(text), "acme")
    assert length == len(text)
    assert len(keys.blocks) == len(keys.snapshots) == length // block
    put(store, *keys.blocks[:5])
    put(store, keys.snapshots[3], kind=EntryKind.SNAPSHOT)
    store.close()
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    sets = [part for item in LOAD for part in ("--set", item)]
    at = ["find", str(file), "--model", str(model), *sets]
    code, out, err = run(*at, "--tenant", "acme", "--json")
    assert code == Exit.DONE, err
    answer = json.loads(out)
    assert [len(each["places"]) for each in answer["blocks"]] == [1] * 5 + [0] * (length // block - 5)
    assert answer["blocks"][0]["places"][0]["retention"] == "agent"
    assert answer["usable_tokens"] == {"device": 0, "host": 0, "store": 4 * block, "any": 4 * block}
    assert json.loads(run(*at, "--tenant", "umbrella", "--json")[1])["usable_tokens"]["store"] == 0
    code, out, _ = run(*at, "--tenant", "acme")
    assert "agent" in out
    assert f"store {4 * block}" in out
    at[0] = "pin"
    code, out, _ = run(*at, "--tenant", "acme")
    assert code == Exit.DONE
    assert f"{4 * block} of {length} tokens are kept: 5 blocks and snapshots are pinned" in out
    code, out, err = run(*at, "--tenant", "umbrella")
    assert code == Exit.UNHEALTHY
    assert f"0 of {length} tokens are kept" in out
    assert "blocks from the first on and a snapshot at their end; send the prompt" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("drop-namespace", "xyz"), "64 hexadecimal digits"),
        (("find", "/nowhere"), "cannot read /nowhere"),
        (("stats", "--router", "h:1"), "exclude each other"),
    ],
)
def test_wrong_use_is_one_line(store: Store, run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == Exit.USAGE
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_without_a_store_is_refused(run: Run, folder: Path) -> None:
    code, _, err = run("stats")
    assert code == Exit.USAGE
    assert f"{folder} is no store" in err
    assert not folder.exists(), "and none is made"


def test_a_store_that_cannot_be_written_is_one_line(
    store: Store, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only mount, somebody else's folder: said before anything is opened. Tests run as root, whom modes do not
    stop, so what the system answers is played."""
    store.close()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for command in ("stats", "verify", "gc"):
        code, _, err = run(command)
        assert code == Exit.USAGE
        assert f"{folder} cannot be written" in err
        assert "as its owner" in err
        assert len(err.strip().splitlines()) == 1


def test_an_index_that_cannot_be_opened_is_one_line(store: Store, folder: Path, run: Run) -> None:
    store.close()
    (folder / "index.sqlite.lock").unlink()
    (folder / "index.sqlite.lock").mkdir()
    code, _, err = run("stats")
    assert code == Exit.USAGE
    assert "index cannot be used" in err
    assert "make it writable" in err
    assert len(err.strip().splitlines()) == 1


def test_secret_and_model_are_asked_for(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"token_ids": [5] * 40}))
    assert "--model" in run("find", str(file))[2]
    monkeypatch.delenv("HEADRACE_ROUTER__SALT_SECRET")
    assert "HEADRACE_ROUTER__SALT_SECRET" in run("drop-tenant", "acme", "--yes")[2]


def test_the_secret_beside_a_store_is_used(
    store: Store, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `headrace up --store` keeps it."""
    monkeypatch.delenv("HEADRACE_ROUTER__SALT_SECRET")
    (folder / "salt-secret").write_text(SECRET + "\n")
    (folder / "salt-secret").chmod(0o600)
    put(store, key("a"), tenant="acme")
    store.close()
    assert json.loads(run("drop-tenant", "acme", "--yes", "--json")[1])["blocks"] == 1


def test_prompt_files(tmp_path: Path) -> None:
    """A text, a text as a chat, or a request as `headrace offline` takes it."""
    (tmp_path / "p.txt").write_text("hello")
    (tmp_path / "p.json").write_text(json.dumps({"chat": [{"role": "user", "content": "hello"}]}))
    assert read_prompt(tmp_path / "p.txt", chat=False) == text_prompt("hello")
    assert read_prompt(tmp_path / "p.txt", chat=True) == read_prompt(tmp_path / "p.json", chat=False)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CliError, match="no JSON"):
        read_prompt(tmp_path / "bad.json", chat=False)


def test_usable_is_a_whole_prefix() -> None:
    """L4: blocks from the first on, and a snapshot at the end where the model needs one."""

    def block(end: int, *tiers: int, snapshot: bool = False) -> Any:
        places = [control_pb2.CachePlace(tier=tier) for tier in tiers]  # type: ignore[arg-type]
        return control_pb2.FoundBlock(end_tokens=end, places=places, snapshot_places=places if snapshot else ())

    blocks = [block(16, 1, 3), block(32, 3, snapshot=True), block(48, 1), block(64), block(80, 3)]
    plain = control_pb2.FindCacheResponse(blocks=blocks)
    assert usable_tokens(plain) == {"device": 16, "host": 0, "store": 32, "any": 48}
    windowed = control_pb2.FindCacheResponse(blocks=blocks, needs_snapshots=True)
    assert usable_tokens(windowed) == {"device": 0, "host": 0, "store": 32, "any": 32}


def test_a_namespace_is_64_digits() -> None:
    assert parse_namespace("ab" * 32) == b"\xab" * 32
    with pytest.raises(CliError):
        parse_namespace("ab" * 31)
