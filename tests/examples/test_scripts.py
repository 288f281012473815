"""The scripts under examples/ run as a user would run them, at toy size."""

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_static_kv import testing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script's `main` in this process: a new one takes seconds to import torch and
    transformers.
    """

    def run_main(script, *args):
        monkeypatch.syspath_prepend(ROOT / "examples")
        status = importlib.import_module(script).main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=printed.out, stderr=printed.err)

    return run_main


SHORT_EXAMPLES = {
    "0_attach": "the same text: True",
    "1_drop_in": "same tokens as without a cache: True",
    "2_decoder": "fallback reason: None",
    "3_exact_logits": "inside exact: largest difference of logits 0.0",
    "4_attention_trace": "'urse'",
}


@pytest.mark.parametrize("script", SHORT_EXAMPLES)
def test_short_example(script, monkeypatch, capsys):
    path = ROOT / "examples" / f"{script}.py"
    assert len(path.read_text().splitlines()) < 40
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert SHORT_EXAMPLES[script] in capsys.readouterr().out


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs"], ids=["root", "docs"])
def test_an_installed_package_finds_the_miniatures_of_the_current_checkout(
    folder, tmp_path, monkeypatch
):
    """After `pip install .` examples/models is not beside the package."""
    monkeypatch.setattr(testing, "__file__", str(tmp_path / "hf_static_kv" / "testing.py"))
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.chdir(folder)
    found = [testing.find_source(name).location for name in testing.MINIATURES]
    assert found == [
        str(ROOT / "examples" / "models" / name) for name in ("llama", "qwen3", "gemma3")
    ]


def test_an_example_runs_in_its_own_process_with_an_installed_package(tmp_path):
    """The package is a copy, the current folder is another one, and the miniatures are found beside
    the script.
    """
    shutil.copytree(
        ROOT / "hf_static_kv", tmp_path / "hf_static_kv", ignore=shutil.ignore_patterns("*.pyc")
    )
    command = [
        sys.executable,
        str(ROOT / "examples" / "draw_attention.py"),
        "--model",
        "llama",
        "--layers",
        "99",
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert re.fullmatch(r"draw_attention.py: Layer 99 .*\n", result.stderr)
    assert result.returncode == 2


class TestOnPolicy:
    OPTIONS = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--updates",
        2,
        "--group",
        2,
        "--max-new-tokens",
        6,
    )

    def test_ratios_are_one_inside_exact_alone(self, run, tmp_path):
        record, picture = tmp_path / "on_policy.json", tmp_path / "on_policy.png"
        result = run("on_policy", *self.OPTIONS, "--json", record, "--plot", picture)
        assert result.returncode == 0, result.stderr
        results = json.loads(record.read_text())["results"]
        assert [(r["exact"], r["ratio"] == 0, r["divergence"] == 0) for r in results] == [
            *[(False, False, False)] * 2,
            *[(True, True, True)] * 2,
        ]
        *rows, _, without, inside = result.stdout.splitlines()
        assert len(rows) == 2 + 4
        assert without.startswith("without exact: reward ")
        assert inside.endswith(", largest |ratio - 1| of all updates 0")
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("text", "share"),
        [("to me,\nand more!\nthen no\nthe", 2 / 3), ("no line", 0.0), ("\n", 0.0), ("E\n", 1.0)],
    )
    def test_reward(self, monkeypatch, text, share):
        monkeypatch.syspath_prepend(ROOT / "examples")
        assert importlib.import_module("on_policy").reward(text, "e") == pytest.approx(share)

    def test_a_bad_argument(self, run):
        assert (
            "--letter must be one small letter, got 'ee'"
            in run("on_policy", "--letter", "ee").stderr
        )


def test_measure_exact_shows_a_difference_outside_and_none_inside(run, tmp_path):
    record = tmp_path / "exact.json"
    options = ["--model", "qwen3", "--device", "cpu", "--max-new-tokens", 6, "--json", record]
    result = run("measure_exact", *options)
    assert result.returncode == 0, result.stderr
    outside, inside = json.loads(record.read_text())["results"]
    assert outside["difference"] > 0
    assert inside["difference"] == 0
    assert "| qwen3 | **inside** | 0 | none |" in result.stdout


def test_measure_exact_refuses_in_a_line(run):
    result = run("measure_exact", "--model", "llama", "--max-new-tokens", 1)
    assert result.returncode == 2
    assert result.stderr == "measure_exact.py: --max-new-tokens must be at least 2, got 1\n"


def test_draw_attention_writes_a_picture_and_a_table(run, tmp_path):
    picture, record = tmp_path / "attention.png", tmp_path / "attention.json"
    options = ["--model", "gemma3", "--device", "cpu", "--max-new-tokens", 6, "--decoder", "graph"]
    result = run("draw_attention", *options, "--plot", picture, "--json", record)
    assert result.returncode == 0, result.stderr
    steps = json.loads(record.read_text())["steps"]
    assert len(steps) == 6
    assert all(
        len(step["best"]) == 3 and step["best"][0]["token"] == step["token"] for step in steps
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| 6 | `" in result.stdout


def test_explain(run, tmp_path, monkeypatch):
    """Each claim of the page is a number on it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr("explain.NEW_TOKENS", [4, 8])
    picture = tmp_path / "explain.png"
    result = run("explain", "--plot", picture)
    assert result.returncode == 0, result.stderr
    page = result.stdout
    assert "inside exact(model): largest difference 0e+00" in page
    assert "76 positions in all" in page  # 6 + 7 + ... + 13
    assert "13 positions in all" in page
    counts = [
        line.split() for line in page.splitlines() if re.fullmatch(r"(\s+\d+){5}\s+[\d.]+x", line)
    ]
    assert [int(row[0]) for row in counts] == [4, 8]
    # Counted, and by the formula.
    assert all(row[1] == row[2] and row[3] == row[4] for row in counts)
    slid = [
        [float(n) for n in re.findall(r"\d\.\de[+-]\d\d", line)]
        for line in page.splitlines()
        if "positions (" in line
    ]
    (learned_logits, learned_values), (rotary_logits, rotary_values) = slid
    assert learned_logits > 0.1 < rotary_logits
    assert rotary_values < 1e-5 < 0.1 < learned_values
    assert re.search(r"layer 0 sliding( +\d+)* +32 +32\n", page)
    assert re.search(r"layer 5 full( +\d+)* +120\n", page)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prompt_file_reads_a_text_once(run, tmp_path):
    options = [
        "--model",
        "gemma3",
        "--tokens",
        60,
        "--file",
        tmp_path / "a.safetensors",
        "--max-new-tokens",
        8,
    ]
    first, second = run("prompt_file", *options), run("prompt_file", *options)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith("60 tokens read in ")
    assert second.stdout.startswith("first token after ")

    def answers(result):
        return [line for line in result.stdout.splitlines() if "?" in line]

    assert len(answers(first)) == 2
    assert answers(first) == answers(second)
    refused = run("prompt_file", *options[:2], "--tokens", 50, *options[4:])
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "a.safetensors holds another text: remove it, or give another --file\n"
    )


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_documents_name_scripts_that_exist(page):
    text = page.read_text()
    for script in re.findall(r"\b(?:examples|benchmarks|tests)/[\w/.]+\.py\b(?!::)", text):
        assert (ROOT / script).exists(), script
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), link


def test_speculate(run, tmp_path):
    """Fewer passes, the same tokens, and a picture."""
    pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: see the extra `examples`"
    )
    plot = tmp_path / "accepted.png"
    result = run("speculate", "--max-new-tokens", 120, "--plot", plot)
    assert result.returncode == 0
    assert "the same tokens: True" in result.stdout
    (with_drafts,) = re.findall(r"with drafts: +\d+ tokens/s, (\d+) passes", result.stdout)
    assert int(with_drafts) < 110
    assert plot.stat().st_size > 1000
