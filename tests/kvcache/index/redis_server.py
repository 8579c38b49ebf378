"""A real redis-server of the tests' own, plain or with TLS and ACL, on a free port or one given."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench._ports import free_ports

ACL_USER = "headrace"
ACL_PASSWORD = "a-password-of-the-tests"


@dataclass
class RedisServer:
    """Started by `start`; `kill` takes its contents with it, unless it was told to keep a dump."""

    folder: Path
    tls: bool = False
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        if self.tls:
            ca = self.folder / "ca.crt"
            return f"rediss://{ACL_USER}:{ACL_PASSWORD}@127.0.0.1:{self.port}/0?ssl_ca_certs={ca}"
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.port:
            (self.port,) = free_ports(1)
        lines = ["bind 127.0.0.1", 'save ""', "appendonly no", "daemonize no", f"dir {self.folder}"]
        lines += self._tls_lines() if self.tls else [f"port {self.port}"]
        config = self.folder / "redis.conf"
        config.write_text("\n".join(lines) + "\n")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([binary, str(config)], stdout=log, stderr=log)
        self._wait_until_it_listens()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _tls_lines(self) -> list[str]:
        make_certificates(self.folder)
        acl = self.folder / "users.acl"
        acl.write_text(f"user default off\nuser {ACL_USER} on >{ACL_PASSWORD} ~headrace:* -@all {ACL_COMMANDS}\n")
        return [
            "port 0",
            f"tls-port {self.port}",
            f"tls-cert-file {self.folder / 'server.crt'}",
            f"tls-key-file {self.folder / 'server.key'}",
            f"tls-ca-cert-file {self.folder / 'ca.crt'}",
            "tls-auth-clients no",
            f"aclfile {acl}",
        ]

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            assert self._process is not None
            assert self._process.poll() is None, (self.folder / "log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not come up"
                time.sleep(0.01)


# What headrace's user may do; kvcache/index/README.md shows the same line.
ACL_COMMANDS = (
    "+auth +select +time +eval +hmget +hget +hset +hdel +hlen +hscan +hkeys +hvals +smembers +sadd +srem +spop +scard "
    "+get +set +del +info +memory|usage"
)


def make_certificates(folder: Path) -> None:
    """A CA, and a server certificate for 127.0.0.1 signed by it, with openssl."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=test CA")
    openssl("req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "server.crt", "-days", "2", "-extfile", "names"),
    )
