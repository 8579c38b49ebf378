"""Certificates of a test's own: an authority, and one certificate of it for both ends on loopback."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.certificates import CertificateFiles, issue, make_authority
from headrace.services.runtime.peers import Peer, PeerRole

Certificates = CertificateFiles
DAYS = 2


def make_certificates(folder: Path) -> Certificates:
    """Good for two days, for both ends of mutual TLS, in place of what the folder had."""
    (folder / "ca.key").unlink(missing_ok=True)
    make_authority(folder, DAYS, "Headrace tests")
    return issue(folder, Peer(PeerRole.WHOLE), ("127.0.0.1", "localhost"), DAYS, "node")
