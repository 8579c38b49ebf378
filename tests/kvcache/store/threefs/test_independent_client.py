"""The double against a client that somebody else wrote for the real library: PyPI fastsafetensor-3fs-reader, whose C++
extension links libhf3fs_api_shared.so and calls nine of its functions with the published structures."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).parent / "independent_client.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fastsafetensor_3fs_reader") is None,
    reason="fastsafetensor-3fs-reader is not installed: it has wheels for x86-64 Linux only",
)


@pytest.mark.parametrize("moods", ["", "delay_us=300,jitter_us=2000,seed=5"])
def test_it_reads_through_the_double_what_lies_in_the_file(double_path: Path, mount: Path, moods: str) -> None:
    header = json.dumps({"t": {"dtype": "U8", "shape": [3_000_000], "data_offsets": [0, 3_000_000]}}).encode()
    body = random.Random(11).randbytes(3_000_000)
    data = len(header).to_bytes(8, "little") + header + body
    path = mount / "model.safetensors"
    path.write_bytes(data)
    reads = [(0, len(data), 0), (17, 2_500_000, 65_536), (len(data) - 1000, 5000, 0), (1 << 20, 1 << 20, 300_000)]
    result = subprocess.run(
        [sys.executable, str(CLIENT), str(mount), str(path), *(":".join(map(str, read)) for read in reads)],
        env=os.environ
        | {"HF3FS_LIB_DIR": str(double_path.parent), "FASTSAFETENSORS_BACKEND": "cpp", "HF3FS_DOUBLE": moods},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["backend"] == "cpp"
    assert told["library"] == str(double_path)
    wanted = [data[offset : offset + length] for offset, length, _ in reads for _ in range(2)]
    assert told["reads"] == [[len(part), hashlib.sha256(part).hexdigest()] for part in wanted]
    assert told["headers"] == {str(path): [header.decode(), len(header) + 8, len(data)]}
    # Destroyed rings and memory took their names with them: this client makes its ring without flags.
    assert os.listdir(mount / "3fs-virt" / "iovs") == []
