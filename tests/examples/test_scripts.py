"""The scripts under examples/ run as a user would run them, at toy size."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*args):
    return subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300)


def run_installed(tmp_path, folder, *args):
    """As after `pip install .`: the package is a copy, and examples/models is not beside it."""
    shutil.copytree(ROOT / "hf_static_kv", tmp_path / "site" / "hf_static_kv", ignore=shutil.ignore_patterns("*.pyc"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs"], ids=["root", "docs"])
def test_an_installed_package_finds_the_miniatures_of_the_current_checkout(folder, tmp_path):
    code = "from hf_static_kv import testing; print(testing.__file__); "
    code += "print(*(testing.find_source(name).location for name in testing.MINIATURES))"
    result = run_installed(tmp_path, folder, "-P", "-c", code)
    assert result.returncode == 0, result.stderr
    package, found = result.stdout.splitlines()
    assert package.startswith(str(tmp_path))
    assert found.split() == [str(ROOT / "examples" / "models" / name) for name in ("llama", "qwen3", "gemma3")]


def test_an_example_finds_the_miniatures_beside_it_with_an_installed_package(tmp_path):
    options = ["--model", "llama", "--device", "cpu", "--layers", 99]
    result = run_installed(tmp_path, tmp_path, ROOT / "examples" / "trace.py", *options)
    assert result.stderr == "trace.py: Layer 99 has no attention that could be traced: layers 0, 1, 2, 3, 4, 5 have.\n"


def test_the_example_of_exact_shows_a_difference_and_none(tmp_path):
    record = tmp_path / "exact.json"
    result = run("examples/exact.py", "--model", "qwen3", "--device", "cpu", "--max-new-tokens", 24, "--json", record)
    assert result.returncode == 0, result.stderr
    usual, inside = json.loads(record.read_text())["rows"]
    assert usual["difference"] > 0
    assert inside["difference"] == 0
    assert "| qwen3 | **exact** | 0 | never |" in result.stdout


def test_the_example_of_exact_refuses_in_a_line():
    result = run("examples/exact.py", "--model", "llama", "--max-new-tokens", 1)
    assert result.returncode == 2
    assert result.stderr == "exact.py: --max-new-tokens must be at least 2, got 1\n"


def test_the_example_of_a_trace_writes_a_picture_and_a_table(tmp_path):
    picture, record = tmp_path / "trace.png", tmp_path / "trace.json"
    options = ["--model", "gemma3", "--device", "cpu", "--max-new-tokens", 6, "--decoder", "graph"]
    result = run("examples/trace.py", *options, "--plot", picture, "--json", record)
    assert result.returncode == 0, result.stderr
    steps = json.loads(record.read_text())["steps"]
    assert len(steps) == 6
    assert all(len(step["best"]) == 3 and step["best"][0]["token"] == step["token"] for step in steps)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| 6 | `" in result.stdout


def test_the_example_of_a_trace_refuses_in_a_line(tmp_path):
    result = run("examples/trace.py", "--model", "llama", "--device", "cpu", "--layers", 99)
    assert result.returncode == 2
    assert result.stderr == "trace.py: Layer 99 has no attention that could be traced: layers 0, 1, 2, 3, 4, 5 have.\n"


def test_the_page_that_explains(tmp_path):
    """Each claim of the page is a number on it."""
    picture = tmp_path / "explain.png"
    result = run("examples/explain.py", "--plot", picture)
    assert result.returncode == 0, result.stderr
    page = result.stdout
    assert "inside exact(model): 0e+00" in page
    assert "76 positions in all" in page  # 6 + 7 + ... + 13
    assert "13 positions in all" in page
    counts = [line.split() for line in page.splitlines() if re.fullmatch(r"(\s+\d+){5}\s+[\d.]+x", line)]
    assert [int(row[0]) for row in counts] == [8, 16, 32, 64]
    assert all(row[1] == row[2] and row[3] == row[4] for row in counts)  # counted, and by the formula
    slid = [
        [float(n) for n in re.findall(r"\d\.\de[+-]\d\d", line)] for line in page.splitlines() if "positions (" in line
    ]
    (learned_logits, learned_values), (rotary_logits, rotary_values) = slid
    assert learned_logits > 0.1 < rotary_logits
    assert rotary_values < 1e-5 < 0.1 < learned_values
    assert re.search(r"layer 0 window( +\d+)* +32 +32\n", page)
    assert re.search(r"layer 5 full( +\d+)* +120\n", page)
    assert picture.read_bytes().startswith(b"\x89PNG")
