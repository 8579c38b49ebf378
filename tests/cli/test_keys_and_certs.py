"""`headrace keys` and `headrace certs`: what they write, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509

from headrace.cli import main as program
from headrace.cli.certificates import issue, make_authority
from headrace.cli.client_tls import ENV_IDENTITY, client_tls
from headrace.cli.exits import CliError
from headrace.services.router.api_keys import KeysDocument
from headrace.services.router.tenants import Tenants
from headrace.services.runtime.errors import Unauthenticated
from headrace.services.runtime.peers import Peer, PeerRole


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.delenv(ENV_IDENTITY, raising=False)


def run(*arguments: str) -> None:
    program.app(list(arguments), standalone_mode=False)


def test_a_key_from_its_making_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown once; kept as a digest; listed without it; limits belong to the tenant and stay when a key is added."""
    path = tmp_path / "keys.json"
    store = ("--store", str(path))
    run("keys", "create", "--tenant", "acme", "--requests-per-second", "5", "--days", "1", *store)
    first = capsys.readouterr().out.strip()
    run("keys", "create", "--tenant", "acme", "--tokens-per-second", "100", "--json", *store)
    second = json.loads(capsys.readouterr().out)
    run("keys", "create", "--operator", "alice", *store)
    operator = capsys.readouterr().out.strip()
    document = KeysDocument.model_validate_json(path.read_bytes())
    assert document.tenants["acme"].requests_per_second == 5
    assert document.tenants["acme"].tokens_per_second == 100
    tenants = Tenants(b"0123456789abcdef", keyed=True)
    tenants.take(document)
    assert tenants.caller([("authorization", f"Bearer {first}")]).name == "acme"
    assert tenants.operator([("authorization", f"Bearer {operator}")]) == "alice"
    run("keys", "revoke", second["id"], *store)
    capsys.readouterr()
    run("keys", "list", *store)
    run("keys", "list", "--json", *store)
    listed = capsys.readouterr().out
    assert [key["state"] for key in json.loads(listed[listed.index("{") :])["keys"]] == ["valid", "revoked", "valid"]
    for secret in (first, second["key"], operator):
        assert secret not in listed + path.read_text()
    tenants.take(KeysDocument.model_validate_json(path.read_bytes()))
    with pytest.raises(Unauthenticated, match="revoked"):
        tenants.caller([("authorization", f"Bearer {second['key']}")])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("create",), "--tenant or --operator"),
        (("create", "--tenant", "a", "--operator", "b"), "--tenant or --operator"),
        (("create", "--tenant", "white space", "--store", "FILE"), "name"),
        (("create", "--tenant", "a", "--traffic-class", "fast", "--store", "FILE"), "traffic_class"),
        (("create", "--tenant", "a"), "--store"),
        (("create", "--tenant", "a", "--store", "etcd"), "registry"),
        (("revoke", "0123456789ab", "--store", "FILE"), "no key"),
    ],
)
def test_wrong_orders_are_told_in_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    given = [str(tmp_path / "keys.json") if item == "FILE" else item for item in arguments]
    with pytest.raises(CliError, match=says) as caught:
        run("keys", *given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "keys.json").exists()


def test_certificates_say_who_and_for_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Private keys are this user's; an authority is not made over another; clients' certificates serve nothing."""
    folder = tmp_path / "tls"
    run("certs", "init", str(folder))
    run(
        "certs",
        "issue",
        str(folder),
        "decode",
        "--replica",
        "decode-0",
        "--host",
        "decode.example",
        "--host",
        "10.0.0.7",
    )
    run("certs", "issue", str(folder), "client", "--name", "me")
    assert capsys.readouterr().out.split() == [str(folder / name) for name in ("ca.crt", "decode-0.crt", "me.crt")]
    for key in folder.glob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600
    server, client = (
        x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("decode-0.crt", "me.crt")
    )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["headrace://decode/decode-0"]
    assert names.get_values_for_type(x509.DNSName) == ["decode.example"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    uses = [one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value for one in (server, client)]
    assert [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in use for use in uses] == [True, False]
    with pytest.raises(CliError, match="authority"):
        run("certs", "init", str(folder))
    with pytest.raises(CliError, match="certs init"):
        issue(tmp_path / "empty", Peer(PeerRole.DECODE))
    with pytest.raises(CliError, match="choose from"):
        run("certs", "issue", str(folder), "nobody")


def test_commands_find_their_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$HEADRACE_IDENTITY names it; one that cannot be read is told; without any there is plain text."""
    make_authority(tmp_path / "tls")
    assert client_tls("127.0.0.1:1") is None
    monkeypatch.setenv(ENV_IDENTITY, f"{tmp_path / 'tls'}/me")
    found = client_tls("127.0.0.1:1")
    assert found is not None
    assert found.cert == tmp_path / "tls" / "me.crt"
    with pytest.raises(CliError, match=r"me\.(crt|key)"):
        found.open("127.0.0.1:1", [])
    monkeypatch.setenv(ENV_IDENTITY, f"{tmp_path / 'tls'}/")
    bare = client_tls("127.0.0.1:1")
    assert bare is not None
    assert bare.cert is None
    bare.open("127.0.0.1:1", []).close()
