"""The salt secret of a local cluster with a store: kept beside the store, so that a later run finds its prefixes again.

Whoever can read the file can read the store's bytes as well; both belong to one user. It reaches the router by its
environment, which `ps` does not show.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from headrace.cli.exits import CliError, Exit

SECRET_FILE: Final = "salt-secret"
VARIABLE: Final = "HEADRACE_ROUTER__SALT_SECRET"


def store_secret(directory: Path) -> str:
    """The secret of a store's folder, drawn when it has none; the folder is made for this user alone.

    Raises CliError when it cannot be made, or others can read the secret.
    """
    path = directory / SECRET_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written whole under another name, then linked: of two clusters that start at once the first one's counts.
        fresh = directory / f"{SECRET_FILE}.{os.getpid()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink()
        found = path.stat()
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
            raise CliError(f"{path} can be read by others: make it yours alone (chmod 600), or set {VARIABLE}")
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise CliError(f"--store {directory} cannot be used: {error.strerror}", Exit.FAILED) from error
