"""`python -m hf_static_kv`: check, env, run; and `attaching_loaded_models`. For `serve` see
tests/clients.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import hf_static_kv
from hf_static_kv import __main__ as command_line
from hf_static_kv import attach, attaching_loaded_models, attachment, served
from hf_static_kv.__main__ import main
from hf_static_kv.testing import find_source, load_model, tiny_config

MINIATURE = find_source("llama").location
SMALL = ["--device", "cpu", "--prompt-len", "16", "--new-tokens", "4"]


@pytest.fixture(autouse=True)
def _program(monkeypatch):
    """`run` sets them for its program, and a process ends after it."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def _prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)


def facts(output):
    """The lines of a command by what stands before their colon."""
    return dict(line.split(": ", 1) for line in output.splitlines())


class TestCheck:
    @pytest.mark.usefixtures("_prompts_of_any_length")
    def test_a_model_that_is_served(self, capsys):
        assert main(["check", "llama", *SMALL]) == 0
        printed = capsys.readouterr()
        found = facts(printed.out)
        assert found["model"] == "llama, float32 on cpu; prompt 16, 4 new tokens, greedy, batch 1"
        assert found["served"] == "yes"
        assert found["captured"] == "no: there are no graphs on cpu"
        assert found["one kernel"] == "no: there are no graphs on cpu"
        assert found["exact"] == "yes, inside exact(model)"
        assert found["tokens"] == "the same"
        assert found["cache"] == "0.8 MiB"  # 6 layers, 2 heads of 32, 256 tokens, float32, twice
        for way in ("without attach", "with attach"):
            assert found[way].startswith("first token ")
            assert "tokens/s (medians of 3; warm-up: one call, " in found[way]
        assert "loading llama ..." in printed.err

    @pytest.mark.usefixtures("_prompts_of_any_length")
    def test_a_step_without_a_kernel(self, capsys, monkeypatch):
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu",))
        assert main(["check", "llama", *SMALL]) == 0
        found = facts(capsys.readouterr().out)
        assert found["captured"] == "yes"
        assert found["one kernel"] == "no: the device is no GPU of NVIDIA"

    def test_random_weights_and_a_call_that_is_not_served(self, capsys, monkeypatch):
        monkeypatch.setattr(command_line, "dev_config", lambda name: tiny_config("llama"))
        assert main(["check", "--random", "llama-3.2-1b", "--dtype", "bfloat16", *SMALL]) == 0
        found = facts(capsys.readouterr().out)
        assert found["model"].startswith("llama-3.2-1b, random weights, bfloat16 on cpu")
        reason = "no: on a cpu our cache is no faster for a prompt this short"
        assert (found["served"], found["captured"]) == (reason, reason)
        assert found["cache"] == "none of ours"

    @pytest.mark.usefixtures("_prompts_of_any_length")
    @pytest.mark.parametrize(
        ("dtype", "reason"),
        [
            ("float32", "please report it"),
            ("bfloat16", "round bfloat16 differently (docs/exact.md)"),
        ],
    )
    def test_other_tokens(self, dtype, reason, capsys, monkeypatch):
        run_loop = served.Attachment.run_loop

        def wrong_loop(self, *args):
            output = run_loop(self, *args)
            output[:, 18:] = 7
            return output

        monkeypatch.setattr(served.Attachment, "run_loop", wrong_loop)
        assert main(["check", "llama", "--dtype", dtype, *SMALL]) == 1
        found = facts(capsys.readouterr().out)
        assert found["tokens"].startswith("different from new token 3 on: ")
        assert found["tokens"].endswith(reason)

    @pytest.mark.usefixtures("_prompts_of_any_length")
    def test_a_call_that_attach_does_not_touch(self, capsys, monkeypatch):
        def load(name, **how):
            model, tokenizer = load_model(name, **how)
            model.generation_config.cache_implementation = "static"
            return model, tokenizer

        monkeypatch.setattr(command_line, "load_model", load)
        assert main(["check", "llama", *SMALL]) == 0
        found = facts(capsys.readouterr().out)
        reason = "no: the model's generation_config asks for a cache of its own"
        assert (found["served"], found["captured"]) == (reason, reason)

    def test_why_a_model_is_not_exact(self, capsys, monkeypatch):
        def refuse(model):
            raise ValueError("This model cannot be exact.\nMore of it.")

        monkeypatch.setattr(command_line, "exact", refuse)
        assert main(["check", "llama", *SMALL]) == 0
        assert facts(capsys.readouterr().out)["exact"] == "no: This model cannot be exact."


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "no such command: choose one of check, env, run, serve"),
        (["check"], "the following arguments are required: model"),
        (["check", "nosuch"], "'nosuch' is no folder, no hub id"),
        (["check", "--random", "nosuch"], "Unknown dev model 'nosuch': choose one of llama-3.2-1b"),
        (["check", "llama", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["check", "llama", "--device", "nosuch"], "Cannot load 'llama' from"),
        (["check", "llama", "--device", "cpu"], "and a --prompt-len of 1 to 448"),
        (["check", "llama", "--device", "cpu", "--new-tokens", "1"], "take 2 --new-tokens or more"),
        (["env", "--all"], "unrecognized arguments: --all"),
        (["run"], "name a script, or -m and a module"),
        (["run", "nosuch.py"], "there is no script nosuch.py"),
    ],
    ids=" ".join,
)
def test_a_bad_argument(arguments, reason, capfd):
    assert main(arguments) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"hf_static_kv {arguments[0]}: ")
    assert reason in error


def test_help(capsys):
    assert main([]) == main(["--help"]) == 0
    assert "python -m hf_static_kv check MODEL" in capsys.readouterr().out


def test_env(monkeypatch):
    monkeypatch.setenv("HF_STATIC_KV_DEBUG_LAYER", "0")
    command = [sys.executable, "-m", "hf_static_kv", "env"]
    root = Path(hf_static_kv.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith(f"hf_static_kv {hf_static_kv.__version__}, python 3.")
    found = facts("\n".join(lines))
    assert f"torch {version('torch')}, transformers 5." in found["packages"]
    assert "trl" in found["packages"]
    assert found["environment"] == "HF_STATIC_KV_DEBUG_LAYER=0"
    assert found["GPU, driver"]
    assert found["torch's CUDA"] == (torch.version.cuda or "none")


def is_attached(model):
    try:
        return attachment(model) is not None
    except ValueError:
        return False


class TestLoadedModels:
    def test_inside_and_after(self):
        before = vars(PreTrainedModel)["from_pretrained"]
        with attaching_loaded_models(max_cache_len=300):
            model = AutoModelForCausalLM.from_pretrained(MINIATURE)
            own, _ = type(model).from_pretrained(MINIATURE, output_loading_info=True)
            body = AutoModel.from_pretrained(MINIATURE)  # has no `generate`
            assert attachment(model).settings.max_cache_len == 300
            assert is_attached(own)
            assert not is_attached(body)
            assert PreTrainedModel.from_pretrained.__doc__ == before.__func__.__doc__
        assert vars(PreTrainedModel)["from_pretrained"] is before
        assert not is_attached(model)
        assert type(model) is type(AutoModelForCausalLM.from_pretrained(MINIATURE))

    def test_an_exception_restores_all(self):
        before = vars(PreTrainedModel)["from_pretrained"]
        models = []

        def fail():
            models.append(AutoModelForCausalLM.from_pretrained(MINIATURE))
            assert is_attached(models[0])
            raise KeyError

        with pytest.raises(KeyError), attaching_loaded_models():
            fail()
        assert vars(PreTrainedModel)["from_pretrained"] is before
        assert not is_attached(models[0])

    def test_settings_are_checked_at_once(self):
        before = vars(PreTrainedModel)["from_pretrained"]
        with (
            pytest.raises(ValueError, match="max_cache_len"),
            attaching_loaded_models(max_cache_len=0),
        ):
            pass
        with pytest.raises(TypeError, match="sliding"), attaching_loaded_models(sliding="full"):
            pass
        assert vars(PreTrainedModel)["from_pretrained"] is before

    def test_a_block_inside_a_block(self):
        before = vars(PreTrainedModel)["from_pretrained"]
        with attaching_loaded_models():
            with attaching_loaded_models(reuse_prefix=True):
                inner = AutoModelForCausalLM.from_pretrained(MINIATURE)
                assert attachment(inner).settings.reuse_prefix is True
            outer = AutoModelForCausalLM.from_pretrained(MINIATURE)
            assert is_attached(outer)
            assert not attachment(outer).settings.reuse_prefix
        assert vars(PreTrainedModel)["from_pretrained"] is before
        assert not is_attached(inner)
        assert not is_attached(outer)

    def test_a_model_of_before_stays_as_it_is(self):
        attached_before = AutoModelForCausalLM.from_pretrained(MINIATURE)
        info = attach(attached_before)
        plain = AutoModelForCausalLM.from_pretrained(MINIATURE)
        with attaching_loaded_models():
            assert not is_attached(plain)
        assert attachment(attached_before) is info


SCRIPT = """
import sys
from transformers import AutoModelForCausalLM
import neighbour
from hf_static_kv import attachment

if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    print(sys.argv[1:], attachment(model).calls)
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("way", ["script", "module"])
def test_run(way, tmp_path, monkeypatch, capsys):
    before = vars(PreTrainedModel)["from_pretrained"]
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("")
    if way == "module":
        monkeypatch.syspath_prepend(tmp_path)  # `python -m` puts the current folder there
    what = [str(tmp_path / "program.py")] if way == "script" else ["-m", "program"]
    with pytest.raises(SystemExit) as end:
        main(["run", *what, MINIATURE, "3", "--own-option"])
    assert end.value.code == 3
    assert capsys.readouterr().out == f"{[MINIATURE, '3', '--own-option']} 0\n"
    assert vars(PreTrainedModel)["from_pretrained"] is before
    sys.modules.pop("neighbour")


class TestServe:
    """Without a server; with one: tests/clients/test_serve.py."""

    @pytest.mark.parametrize(
        ("options", "is_served"),
        [
            (["--compile"], False),
            (["--continuous-batching"], True),
            (["--continuous-batching", "--compile"], True),
        ],
    )
    def test_what_is_not_served_is_said(self, options, is_served, capsys):
        before = vars(PreTrainedModel)["from_pretrained"]
        with pytest.raises(SystemExit) as end:
            main(["serve", "model", *options, "--help"])
        assert end.value.code == 0
        printed = capsys.readouterr()
        assert "transformers serve" in printed.out
        assert printed.err.startswith("--compile ") != is_served
        assert ("hf_static_kv does not serve it" in printed.err) != is_served
        assert vars(PreTrainedModel)["from_pretrained"] is before

    def test_without_its_packages(self, capsys, monkeypatch):
        monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
        assert main(["serve"]) == 2
        assert "pip install transformers[serving]" in capsys.readouterr().err
