"""Reads files with the C++ reader of PyPI fastsafetensor-3fs-reader; run by test_independent_client.py in a process of
its own, since that package loads the library for all of a process.

    python independent_client.py MOUNT FILE OFFSET:LENGTH:CHUNK …      prints JSON
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys

from fastsafetensor_3fs_reader import ThreeFSFileReader, get_backend, get_hf3fs_lib_path


def main() -> None:
    mount, path, *reads = sys.argv[1:]
    reader = ThreeFSFileReader(mount_point=mount, entries=8, io_depth=0, buffer_size=1 << 20)
    out = []
    for read in reads:
        offset, length, chunk = map(int, read.split(":"))
        for pipelined in (False, True):
            target = (ctypes.c_uint8 * length)()
            count = reader.read_chunked(path, ctypes.addressof(target), offset, length, chunk, pipelined)
            out.append([count, hashlib.sha256(bytes(target)[:count]).hexdigest()])
    headers = reader.read_headers_batch([path])
    reader.close()
    told = {"backend": get_backend(), "library": get_hf3fs_lib_path(), "reads": out, "headers": headers}
    sys.stdout.write(json.dumps(told) + "\n")


main()
