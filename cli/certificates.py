"""A certificate authority in a folder, for development and small clusters: `ca.crt` and `ca.key`, and for every process
or person NAME.crt and NAME.key, whose URI says what it may do (services/runtime/peers.py).

Larger clusters take certificates of their own authority (cert-manager, Vault …) that carry the same URI.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.cli.exits import CliError
from headrace.services.runtime.files import write_whole
from headrace.services.runtime.peers import Peer, PeerRole

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_ONLY_CLIENTS: Final = frozenset({PeerRole.OPERATOR, PeerRole.MONITOR, PeerRole.CLIENT})
"""Their certificates are good for calling, not for serving."""


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files of one identity."""

    ca: Path
    cert: Path
    key: Path


def files_of(folder: Path, name: str) -> CertificateFiles:
    """Where an identity's files lie in an authority's folder."""
    return CertificateFiles(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")


def make_authority(folder: Path, days: int = 3650, name: str = "Headrace development") -> None:
    """Make the authority. Raises CliError when the folder has one: all its certificates would be worth nothing."""
    if (folder / "ca.key").exists():
        raise CliError(f"{folder} has an authority; use it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    certificate = (
        _builder(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_whole(folder / "ca.key", _pem_key(key), 0o600)
    write_whole(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def issue(
    folder: Path, peer: Peer, hosts: Sequence[str] = LOOPBACK, days: int = 365, name: str | None = None
) -> CertificateFiles:
    """A new key and certificate in `folder`, over those of the same name: running processes take them up.

    `hosts`: names and addresses under which a server is dialled. `name`: of the files; default: the replica's, else the
    role's. Raises CliError without an authority.
    """
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise CliError(f"{folder} has no authority: make one with `headrace certs init {folder}` ({error})") from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise CliError(f"{folder / 'ca.key'} is not of the kind that `headrace certs init` makes")
    stem = name or peer.replica or peer.role.value
    key = ec.generate_private_key(ec.SECP256R1())
    serves = peer.role not in _ONLY_CLIENTS
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(peer.uri)]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if serves:
        names += [_host(host) for host in dict.fromkeys(hosts)]
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    certificate = (
        _builder(_name(stem), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    files = files_of(folder, stem)
    write_whole(files.key, _pem_key(key), 0o600)
    write_whole(files.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return files


def own_hosts() -> tuple[str, ...]:
    """Loopback and this machine's name."""
    return (*LOOPBACK, socket.gethostname())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of a cluster differ a little.
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
