"""Every private name of another package: the package works or says what is missing when it is gone."""

import importlib.util
import logging
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.modules.module as torch_module

from hf_static_kv import GraphDecoder, StaticContiguousCache, compat, exact
from hf_static_kv.program import preload
from tests.conftest import COMMON, PROMPT, toy_model

BARE = SimpleNamespace()  # has none of the names
ROOT = Path(__file__).parents[1]


def generate(model, **keywords):
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **{**COMMON, **keywords})


def decode(model):
    """The tokens with a cache and a decoder, and why the call fell back."""
    cache, decoder = StaticContiguousCache.from_model(model, 64), GraphDecoder()
    return generate(model, past_key_values=cache, custom_generate=decoder), decoder.fallback_reason


def reason_without(monkeypatch, name, replacement):
    """Why a call falls back when a function of compat finds nothing; its tokens are right all the
    same.
    """
    model = toy_model("llama")
    expected = generate(model, use_cache=False)
    monkeypatch.setattr(compat, name, replacement)
    tokens, reason = decode(model)
    assert torch.equal(tokens, expected)
    return reason


class TestGenerate:
    def test_without_its_frame_calls_run_and_are_checked_pass_by_pass(self, monkeypatch):
        assert reason_without(monkeypatch, "generate_locals", lambda: None) is None
        model = toy_model("llama")
        with pytest.raises(ValueError, match="The cache is full"):
            generate(model, past_key_values=StaticContiguousCache(model.config, 15))

    def test_with_other_variables_in_its_frame(self, monkeypatch):
        assert reason_without(monkeypatch, "generate_locals", lambda: {"renamed": 1}) is None

    def test_without_prefill_the_call_falls_back(self, monkeypatch):
        assert compat.prefill(BARE) is None
        assert "no prefill" in reason_without(monkeypatch, "prefill", lambda model: None)

    def test_without_its_loop_the_remedy_is_named(self):
        with pytest.raises(RuntimeError, match="omit custom_generate"):
            compat.sampling_loop(BARE)
        assert not compat.has_common_loop(BARE)

    def test_without_the_context_around_decoding(self, monkeypatch):
        assert isinstance(compat.optimized_for_decode(BARE), nullcontext)
        assert (
            reason_without(monkeypatch, "optimized_for_decode", lambda model: nullcontext()) is None
        )

    def test_without_settings_that_it_leaves_on_the_config(self):
        assert compat.mask_length(BARE) == -1
        assert compat.pad_token(SimpleNamespace(pad_token_id=3)).tolist() == 3
        assert compat.pad_token(SimpleNamespace(pad_token_id=None)) is None


def test_without_attention_by_name_the_decoder_falls_back_and_exact_refuses(monkeypatch):
    assert not compat.can_set_attention(SimpleNamespace(config=BARE))
    assert compat.attention_name(BARE) is None
    reason = reason_without(monkeypatch, "can_set_attention", lambda model: False)
    assert reason == "LlamaForCausalLM does not use transformers' attention interface"
    with pytest.raises(ValueError, match="attention interface"), exact(toy_model("llama")):
        pass


class TestModules:
    def test_without_the_dicts_of_a_module_its_methods_serve(self):
        linear = torch.nn.Linear(2, 2)
        linear.register_buffer("buffer", torch.zeros(1))
        public = SimpleNamespace(
            children=linear.children, parameters=linear.parameters, buffers=linear.buffers
        )
        for kind, expected in {
            "modules": [],
            "parameters": [linear.weight, linear.bias],
            "buffers": [linear.buffer],
        }.items():
            for module in (public, linear):
                found = compat.own_parts(module, kind)
                assert [id(part) for part in found] == [id(part) for part in expected]
        assert compat.all_modules(public) == [public]

    def test_without_the_stores_of_hooks_none_are_seen(self, monkeypatch):
        assert compat.forward_hooks(BARE) == []
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            monkeypatch.delattr(torch_module, name)
        assert not compat.has_hooks([BARE])
        assert compat.has_hooks([SimpleNamespace(_forward_hooks={0: print})])

    def test_without_a_hook_of_accelerate_no_device_is_planned(self):
        assert compat.planned_device(BARE) is None

    def test_without_a_count_of_writes_a_tensor_is_taken_for_changed(self):
        tensor = SimpleNamespace(is_inference=lambda: False)
        assert compat.write_count(tensor) != compat.write_count(tensor)
        own = torch.zeros(1)
        assert compat.write_count(own) == compat.write_count(own)

    def test_without_a_count_of_users_none_is_known(self, monkeypatch):
        tensor = torch.zeros(2)
        before = compat.storage_users(tensor)
        view = tensor[:1]
        assert compat.storage_users(tensor) == before + 1
        del view
        assert compat.storage_users(tensor) == before
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
        assert compat.storage_users(tensor) is None

    def test_an_ordinary_tensor_has_no_inner_tensors(self):
        assert compat.inner_tensors(torch.zeros(1)) is None


class TestDispatchAndCompiling:
    def test_without_a_dispatch_mode_exact_says_so(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", types.ModuleType("empty"))
        spec = importlib.util.spec_from_file_location("compat_again", compat.__file__)
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        with pytest.raises(RuntimeError, match="exact needs TorchDispatchMode"):
            again.DispatchMode()

    def test_without_a_schema_an_operation_is_refused(self):
        with pytest.raises(RuntimeError, match="cannot run inside exact"):
            compat.schema(BARE)

    def test_without_the_wrapper_of_a_compiled_module(self):
        assert compat.inside_compiled(BARE) is None
        assert not compat.is_compiled_in_place(BARE)
        assert not compat.is_fullgraph(BARE)


class TestTriton:
    def test_without_pdl_instructions(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton.language.extra.cuda", None)
        assert compat.pdl_instructions() == (None, None)

    def test_without_parallel_compiling(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
        entered = []
        with compat.parallel_compiling(pool=None):
            entered.append(True)
        assert entered

    def test_a_launcher_is_built_before_its_kernel_is_compiled(self, monkeypatch):
        """From the source that Triton's compilation holds; what fails after that is left to the
        loading.
        """
        built = []

        class Launcher:
            def __init__(self, source, metadata):
                built.append(source)
                self.scratch_size = metadata.global_scratch_size

        driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=Launcher))
        monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
        src = object()
        compat.build_launcher(lambda: src)
        assert built == [src]
        compat.build_launcher(lambda: None)  # of a Triton that holds none
        assert built == [src]

    def test_without_what_is_loaded_in_advance(self, monkeypatch):
        for name in ("triton.runtime", "triton.runtime.cache", "triton.experimental.gluon"):
            monkeypatch.setitem(sys.modules, name, None)
        preload._thread.cache_clear()
        preload.load(preload.TRITON)
        preload.wait_for(preload.TRITON)
        assert not any(preload._thread(part).is_alive() for part in preload.TRITON)
        preload._thread.cache_clear()
        assert compat.load_kernel(BARE) is None


class TestCuda:
    def test_without_its_bindings_the_graph_serves(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cuda", None)
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        assert compat.cuda_bindings() is None
        assert not compat.has_cuda_bindings()

    def test_to_look_for_its_bindings_loads_none(self, monkeypatch, tmp_path):
        (tmp_path / "cuda" / "bindings").mkdir(parents=True)
        for name in ("__init__", "nvrtc"):
            (tmp_path / "cuda" / "bindings" / f"{name}.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        assert compat.has_cuda_bindings()
        assert "cuda.bindings.nvrtc" not in sys.modules

    def test_kernels_are_kept_beside_those_of_triton(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton.knobs", None)
        assert compat.triton_cache_dir() == Path.home() / ".triton" / "cache"
        knobs = SimpleNamespace(cache=SimpleNamespace(dir="/elsewhere"))
        monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
        assert compat.triton_cache_dir() == Path("/elsewhere")


def test_the_package_imports_without_any_of_them():
    code = """
import sys, torch, transformers
import torch.nn.modules.module, torch.utils._python_dispatch as dispatch
from transformers import GenerationMixin, PreTrainedModel
for owner, name in [
    (dispatch, "TorchDispatchMode"), (GenerationMixin, "_prefill"), (GenerationMixin, "_sample"),
    (GenerationMixin, "_optimize_model_for_decode"), (PreTrainedModel, "_can_set_attn_implementation"),
    (torch.nn.modules.module, "_global_forward_hooks"),
]:
    delattr(owner, name)
for name in ("triton.language.extra.cuda", "triton.runtime._async_compile", "triton.runtime.cache"):
    sys.modules[name] = None
import hf_static_kv
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_a_failed_capture_is_logged_with_its_traceback(caplog, monkeypatch):
    monkeypatch.setattr("hf_static_kv.decoding.steps.verify", lambda step, call: 1 / 0)
    with caplog.at_level(logging.DEBUG, logger="hf_static_kv"):
        _, reason = decode(toy_model("llama"))
    assert "ZeroDivisionError" in reason
    records = [record for record in caplog.records if record.exc_info]
    assert len(records) == 2  # of the recorded pass, and of the model itself
    assert all(record.exc_info[0] is ZeroDivisionError for record in records)
    assert all(record.levelno == logging.DEBUG for record in records)
