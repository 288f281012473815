"""What the tests share: toy models, prompts and small helpers."""

import copy
import dataclasses
import importlib
import sys
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import served
from hf_static_kv.cache import storage
from hf_static_kv.testing import random_model

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ImportError:  # on a machine with a GPU there may be no more than the package needs

    def given(*args, **kwargs):
        return pytest.mark.skip(reason="hypothesis is not installed")

    def settings(**kwargs):
        return lambda test: test

    st = MagicMock()

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# Of float32 with a mask of 65 columns it is wrong by half of the largest number (Gemma 3, head dim 16,
# torch 2.11, H200, 2026-11-19): the reference of a test on a GPU is torch's plain attention.
torch.backends.cuda.enable_mem_efficient_sdp(False)
# Tiny models: one thread a process is faster than two, and two test processes share the machine.
torch.set_num_threads(1)
# For a device that may come, `torch.manual_seed` formats three stacks: a millisecond a call.
for module in (torch.cuda, torch.xpu, torch.mtia):
    if not module.is_available():
        module.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_spare(monkeypatch):
    """Compact layers of the toys have 20 slots, so that short sequences fill them."""
    monkeypatch.setattr(storage, "SLACK", 2)


@pytest.fixture(params=["loop", "decoder"])
def either_loop(request, monkeypatch):
    """Of an attached model: transformers' loop, and the decoder, which on a CPU runs steps without a
    graph.
    """
    if request.param == "decoder":
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
    elif torch.cuda.is_available():
        pytest.skip("on a GPU it is the decoder")


# --- calls of generate

# Longer than every window of a toy; eos off, so that lengths are full.
NEW_TOKENS = 14
PROMPT = torch.tensor([[17, 93, 5, 64, 5, 88, 121, 40, 17, 93, 5, 64, 77]])
BATCH = torch.tensor(
    [[17, 93, 5, 64, 5, 88, 121, 40, 17, 93], [9, 9, 31, 60, 12, 101, 3, 55, 8, 71]]
)
COMMON = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False}


class Collect(BaseStreamer):
    def __init__(self):
        self.values = []  # as they are given: nobody may write into them later

    def put(self, value):
        self.values.append(value)

    @property
    def tokens(self):
        return [token for value in self.values for token in value.flatten().tolist()]

    def end(self):
        self.ended = True


def calls_in(function):
    """How many functions of Python it calls: the host's time, without a clock. The least of three,
    so nothing once.
    """
    counts = []

    def note(frame, event, argument):
        counts[-1] += event == "call"

    for _ in range(3):
        counts.append(0)
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return min(counts)


def triton_module(name):
    """One of our kernel files.

    Only a missing Triton is a reason to skip; a file that is not there is an error.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module(name)


# --- toy models of the architectures in the generate matrix; windows and chunks are shorter than
# every prompt

WINDOW = 8
TOY_SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Untied and far above the usual 0.02, so that attention moves the logits and a wrong key shows
    # in the tokens.
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
_MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

# name: (model_type, what differs from TOY_SIZES)
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    # Two sliding layers and a full one.
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "sliding_window": WINDOW,
            "num_key_value_heads": 1,
        },
    ),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", {"head_dim": 12}),
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "num_hidden_layers": 4, "logit_scale": 1.0}),
    "mixtral": ("mixtral", _MOE),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "gpt_oss": ("gpt_oss", {**_MOE, "sliding_window": WINDOW}),
    "llama4": (
        "llama4_text",
        {
            **_MOE,
            "attention_chunk_size": WINDOW,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
        },
    ),
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
_NOT_IN = {
    "gpt2": {"intermediate_size", "num_key_value_heads", "head_dim"},
    "gpt_neox": {"num_key_value_heads", "head_dim"},
    "phi3": {"head_dim"},
}


def toy_config(name: str, **overrides) -> PreTrainedConfig:
    model_type, own = ARCHITECTURES[name]
    fields = {**TOY_SIZES, **own, **overrides}
    fields = {key: value for key, value in fields.items() if key not in _NOT_IN.get(model_type, ())}
    if model_type == "gpt2":
        fields = {_GPT2_NAMES.get(key, key): value for key, value in fields.items()}
        fields["n_positions"] = fields.pop("max_position_embeddings")
    return CONFIG_MAPPING[model_type](**fields)


@cache
def _built_once(name: str, attn: str, seed: int) -> PreTrainedModel:
    return random_model(toy_config(name), seed=seed, attn_implementation=attn)


def toy_model(name: str, attn: str = "sdpa", seed: int = 0, **overrides) -> PreTrainedModel:
    if not overrides:
        # A copy takes half the time of another model.
        return copy.deepcopy(_built_once(name, attn, seed))
    return random_model(toy_config(name, **overrides), seed=seed, attn_implementation=attn)


@cache
def shared_toy_model(name: str, attn: str = "sdpa", device: str = "cpu") -> PreTrainedModel:
    """For tests that leave the model as it is: built once in a process."""
    return toy_model(name, attn).to(device)


# --- tiny models of any other type

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def tiny_model(model_type: str, cls=AutoModelForCausalLM, **own) -> PreTrainedModel:
    """A small model of any type: of the usual sizes those that its config knows, and its own."""
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)}
    config = config_class(**{key: size for key, size in SIZES.items() if key in known} | own)
    torch.manual_seed(0)
    return cls.from_config(config).eval()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long.txt. A line is the node id of a test, or of all its cases."""
    root = Path(__file__).parent
    long = {line for line in (root / "long.txt").read_text().splitlines() if line[:1] != "#"}
    for item in items:
        if item.nodeid in long or item.nodeid.partition("[")[0] in long:
            item.add_marker("long")
