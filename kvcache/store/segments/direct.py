"""Whether the file system below a store knows O_DIRECT."""

from __future__ import annotations

import contextlib
import errno

from headrace.kvcache.store.files import FileLayer
from headrace.kvcache.store.segments.buffers import page_aligned
from headrace.kvcache.store.segments.record import ALIGN


def direct_io_works(files: FileLayer, probe: str) -> bool:
    """Write and read one page of a file `probe`, made and unlinked here. False where the file system refuses (tmpfs of
    older kernels, some network mounts): the engine then goes through the page cache and syncs all the same. Other
    errors are raised."""
    page = memoryview(page_aligned(ALIGN))
    file = None
    try:
        file = files.create(probe, direct=True)
        file.pwritev([page], 0)
        file.preadv([page], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        if file is not None:
            file.close()
        with contextlib.suppress(FileNotFoundError):
            files.unlink(probe)
    return True
