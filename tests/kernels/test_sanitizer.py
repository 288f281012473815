"""What `make sanitize` runs: every kernel, with valid arguments. On a CPU Triton's interpreter runs
them.
"""

import json
import subprocess

import pytest
import torch

from tests.conftest import triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_kernel_runs():
    sanitize = triton_module("tests.kernels.sanitize")
    ran = set(sanitize.run_kernels(DEVICE))
    assert ran - {sanitize.WHOLE_STEP} == sanitize.defined_kernels()


def test_a_record_has_what_a_tool_found(monkeypatch, tmp_path):
    sanitize = triton_module("tests.kernels.sanitize")
    summaries = {
        "memcheck": "ERROR SUMMARY: 2 errors",
        "racecheck": "RACECHECK SUMMARY: 0 hazards displayed",
    }

    def run(command, **options):
        if "--version" in command:
            return subprocess.CompletedProcess(
                command, 0, "NVIDIA (R) Compute Sanitizer\nVersion 2025.3.0", ""
            )
        output = (
            f"kernels: fused_add_norm decode_attention_split\n========= {summaries[command[2]]}\n"
        )
        return subprocess.CompletedProcess(command, 0, output, "")

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "/cuda/bin/compute-sanitizer")
    monkeypatch.setattr(sanitize, "provenance", lambda device: {"commit": "abc"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["sanitize.py", "--json", str(tmp_path / "record.json")])
    assert sanitize.main() == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(run["tool"], run["errors"]) for run in record["runs"]] == [
        ("memcheck", 2),
        ("racecheck", 0),
    ]
    assert all(run["version"] == "Version 2025.3.0" for run in record["runs"])
    assert record["runs"][0]["kernels"] == ["fused_add_norm", "decode_attention_split"]
    assert "place_tokens" in record["runs"][0]["missing"]


def test_the_record_has_every_kernel_and_no_error():
    sanitize = triton_module("tests.kernels.sanitize")
    if not sanitize.RECORD.exists():
        pytest.skip("`make sanitize` has not been run")
    record = json.loads(sanitize.RECORD.read_text())
    assert [run["tool"] for run in record["runs"]] == list(sanitize.TOOLS)
    for run in record["runs"]:
        assert (run["errors"], run["exit_code"]) == (0, 0)
        assert set(run["kernels"]) - {sanitize.WHOLE_STEP} == sanitize.defined_kernels()
