"""Every kernel compiles for a GPU: the interpreter, which runs them on a CPU, takes much that the
compiler does not.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import triton_module

# Bytes that a program may have: RTX 4090 (and 3090), H100 and H200.
SHARED = {89: 99 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("capability", [90, pytest.param(89, marks=pytest.mark.slow)])
def test_every_kernel_compiles_and_fits(capability, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py"), str(capability)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    shared = [line.split() for line in result.stdout.splitlines()]
    names = {name for name, _ in shared}
    assert names >= {"invariant_linear_few_tokens", "decode_attention_split"}
    assert max(int(size) for _, size in shared) <= SHARED[capability]
    if capability == 90:
        assert names == triton_module("tests.kernels.sanitize").defined_kernels()
