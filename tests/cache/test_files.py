"""Caches in files:

loaded, they go on as if they had never left; a file that is not what was saved is refused.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_static_kv import CacheFile, GraphDecoder, StaticContiguousCache
from hf_static_kv.cache import fileformat, filepieces, files
from hf_static_kv.cache.fileformat import MAX_HEADER_BYTES, checksum_weights, position_checksums
from hf_static_kv.cache.fileidentity import ModelIdentity, weights_digest
from hf_static_kv.testing import MINIATURES, load_model
from tests.cache.conftest import assert_same, snapshot
from tests.conftest import BATCH, COMMON, PROMPT, given, settings, shared_toy_model, st, toy_model
from tests.hybrids import hybrid_model

ROOT = Path(__file__).parents[2]
MODELS = [*MINIATURES, "gpt2", "mistral"]
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}


@cache
def model_named(name):
    return load_model(name)[0] if name in MINIATURES else shared_toy_model(name)


def generate(model, ids, cache, mask=None, **how):
    torch.manual_seed(5)
    mask = torch.ones_like(ids[:, :0]) if mask is None else mask
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **{**COMMON, **how})


def go_on(model, tokens, cache, mask=None, **how):
    """A second turn after the tokens."""
    question = torch.tensor([[3, 44, 101]]).expand(len(tokens), -1)
    return generate(model, torch.cat([tokens, question], dim=1), cache, mask, **how)


def saved(path, model, ids=PROMPT, max_cache_len=64, mask=None, **how):
    """A cache after one call, in a file too, and the tokens of that call."""
    cache = StaticContiguousCache.from_model(model, max_cache_len, batch_size=len(ids))
    tokens = generate(model, ids, cache, mask, **how)
    cache.save(path, model=model, tokens=tokens, attention_mask=mask)
    return cache, tokens


# --- there and back


def go_on_in_this_process(folder):
    """Load every file of the folder, generate, and write the tokens beside it."""
    for path in Path(folder).glob("*.safetensors"):
        name, mode = path.stem.split("-")
        model = model_named(name)
        cache = StaticContiguousCache.load(path, model)
        with CacheFile(path) as file:
            # The token that was returned and not written.
            last = json.loads(path.with_suffix(".json").read_text())
            tokens = torch.cat([file.tokens, torch.tensor([[last]])], dim=1)
        path.with_suffix(".json").write_text(
            json.dumps(go_on(model, tokens, cache, **MODES[mode]).tolist())
        )


@pytest.fixture(scope="module")
def after_a_new_process(tmp_path_factory):
    """Tokens by (model, mode):

    of a cache that never left, and of its file in one fresh process for all.
    """
    folder, stayed = tmp_path_factory.mktemp("files"), {}
    for name in MODELS:
        for mode, how in MODES.items():
            path, model = folder / f"{name}-{mode}.safetensors", model_named(name)
            cache, tokens = saved(path, model, **how)
            path.with_suffix(".json").write_text(json.dumps(tokens[0, -1].item()))
            stayed[name, mode] = go_on(model, tokens, cache, **how)
    code = f"from tests.cache.test_files import go_on_in_this_process as f; f({str(folder)!r})"
    command = [sys.executable, "-c", code]
    subprocess.run(
        command, cwd=ROOT, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return {
        key: (ids, json.loads((folder / f"{'-'.join(key)}.json").read_text()))
        for key, ids in stayed.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_new_process_goes_on_with_the_very_tokens(after_a_new_process, name, mode):
    stayed, loaded = after_a_new_process[name, mode]
    assert loaded == stayed.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_states_come_back_bit_for_bit(tmp_path, name, dtype):
    model = toy_model(name).to(dtype)
    cache, tokens = saved(tmp_path / "a.safetensors", model)
    loaded = StaticContiguousCache.load(tmp_path / "a.safetensors", model, max_cache_len=40)
    assert_same(snapshot(cache), snapshot(loaded))
    assert loaded.max_cache_len == 40
    assert torch.equal(loaded.known_ids, tokens[:, :-1])
    with pytest.raises(ValueError, match="does not continue the cached sequence"):
        generate(model, tokens.flip(1).repeat(1, 2), loaded, max_new_tokens=2)


def test_the_decoder_goes_on_too_and_all_tokens_are_known(tmp_path):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    cache = StaticContiguousCache.from_model(model, 64)
    tokens = generate(model, PROMPT, cache, custom_generate=GraphDecoder())
    cache.save(path, model=model)
    loaded = StaticContiguousCache.load(path, model)
    assert loaded.seq_len == cache.seq_len == tokens.shape[1] - 1
    expected, got = (
        go_on(model, tokens, c, custom_generate=GraphDecoder()) for c in (cache, loaded)
    )
    assert torch.equal(got, expected)


def test_a_loaded_cache_grows_unless_it_has_a_capacity(tmp_path):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    _, tokens = saved(path, model)
    loaded = StaticContiguousCache.load(path, model)
    assert (loaded.seq_len, loaded.max_cache_len) == (26, 26 + 256)
    loaded = StaticContiguousCache.load(path, model, tokens=2)
    assert go_on(model, tokens, loaded, max_new_tokens=240).shape[1] == 30 + 240
    assert loaded.max_cache_len == 2 * 258
    with pytest.raises(ValueError, match="max_cache_len >= 40"):
        go_on(model, tokens, StaticContiguousCache.load(path, model, 39), max_new_tokens=11)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("length", [1, 9, 26])
def test_a_part(tmp_path, name, length):
    model, path = shared_toy_model(name), tmp_path / "a.safetensors"
    _, tokens = saved(path, model)
    loaded = StaticContiguousCache.load(path, model, 64, tokens=length)
    assert loaded.seq_len == length
    fresh = generate(model, tokens, StaticContiguousCache.from_model(model, 64))
    assert torch.equal(generate(model, tokens, loaded), fresh)


def test_only_the_tokens_that_are_given_are_saved(tmp_path):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    cache, tokens = saved(path, model)
    cache.save(path, model=model)  # plain `generate` has told the prompt
    assert StaticContiguousCache.load(path, model).seq_len == PROMPT.shape[1]
    cache.save(path, model=model, tokens=tokens[0, :5])
    assert StaticContiguousCache.load(path, model).known_ids.tolist() == tokens[:, :5].tolist()


MASK = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_batch_with_left_padding(tmp_path, name):
    model, path = shared_toy_model(name), tmp_path / "a.safetensors"
    cache, tokens = saved(path, model, BATCH, mask=MASK)
    loaded = StaticContiguousCache.load(path, model)
    with CacheFile(path) as file:
        assert torch.equal(file.tokens, tokens[:, :-1])
        assert file.attention_mask[1].tolist() == [0] * 4 + [1] * 19
        mask = file.attention_mask
    assert torch.equal(go_on(model, tokens, loaded, mask), go_on(model, tokens, cache, mask))


@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_each_row_becomes_several(tmp_path, max_cache_len):
    model, path = shared_toy_model("gemma3"), tmp_path / "a.safetensors"
    cache, tokens = saved(path, model, BATCH)
    loaded = StaticContiguousCache.load(path, model, max_cache_len, repeat=3)
    assert loaded.batch_size == 6
    expected = go_on(model, tokens, cache).repeat_interleave(3, dim=0)
    assert torch.equal(go_on(model, tokens.repeat_interleave(3, dim=0), loaded), expected)


def test_layers_of_unlike_shape_and_dtype_have_a_pair_of_tensors_each(tmp_path):
    model, path, ids = (
        shared_toy_model("llama"),
        tmp_path / "a.safetensors",
        torch.arange(10).view(2, 5),
    )
    sizes = {"num_layers": 2, "num_kv_heads": [2, 1], "head_dim": [4, 7], "value_head_dim": [3, 7]}
    cache = StaticContiguousCache.allocate(
        **sizes, max_cache_len=9, batch_size=2, dtype=torch.bfloat16
    )
    for i, layer in enumerate(cache.layers):
        shape = layer.shape
        heads = (2, shape.num_kv_heads, 5)
        keys, values = (
            torch.randn(*heads, dim).bfloat16()
            for dim in (shape.key_head_dim, shape.value_head_dim)
        )
        cache.update(keys, values, i)
    cache.save(path, model=model, tokens=ids)
    other = StaticContiguousCache.allocate(
        **sizes, max_cache_len=30, batch_size=4, dtype=torch.bfloat16
    )
    with CacheFile(path) as file:
        other.fill(file, model, 5)
    assert_same(snapshot(cache), snapshot(other))


def test_a_window_of_one_token_may_keep_no_position(tmp_path):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "max_cache_len": 300}
    cache, loaded = (
        StaticContiguousCache.allocate(**sizes, sliding_windows=[1], sliding="compact")
        for _ in range(2)
    )
    for _ in range(200):
        cache.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4), 0)
    cache.save(path, model=model, tokens=torch.arange(cache.layers[0].oldest)[None])
    with CacheFile(path) as file:
        loaded.fill(file, model, 132)
    assert (loaded.seq_len, loaded.layers[0].oldest) == (132, 132)


def test_pieces_smaller_than_a_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(filepieces, "PIECE_BYTES", 300)
    model = shared_toy_model("gemma3")
    cache, _ = saved(tmp_path / "a.safetensors", model, BATCH)
    assert_same(
        snapshot(cache), snapshot(StaticContiguousCache.load(tmp_path / "a.safetensors", model))
    )


@pytest.mark.parametrize("piece_bytes", [300, 1 << 20])  # a part of a head, all heads
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_through_staging_memory_as_for_a_gpu(tmp_path, name, piece_bytes, monkeypatch):
    monkeypatch.setattr(filepieces, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(filepieces.LayerStates, "is_staged", True)
    model = shared_toy_model(name)
    cache, _ = saved(tmp_path / "a.safetensors", model, BATCH)
    assert_same(
        snapshot(cache), snapshot(StaticContiguousCache.load(tmp_path / "a.safetensors", model))
    )


def test_pieces_from_a_gpu_are_written_from_one_memory(tmp_path, monkeypatch):
    """While each piece had new memory, saving was 1.8 times slower (H200, 2026-11-17)."""
    monkeypatch.setattr(filepieces, "PIECE_BYTES", 300)
    monkeypatch.setattr(filepieces.LayerStates, "is_staged", True)
    written = []
    monkeypatch.setattr(
        files,
        "memories",
        lambda states: written.append(states.data_ptr()) or filepieces.memories(states),
    )
    saved(tmp_path / "a.safetensors", shared_toy_model("gemma3"), BATCH)
    assert len(written) > 10
    assert len(set(written)) == 1


# --- the file


def test_what_is_in_a_file(tmp_path):
    """Any reader of safetensors sees the states, and strings that say what they are."""
    path, model = tmp_path / "a.safetensors", shared_toy_model("gemma3")
    cache, tokens = saved(path, model, max_cache_len=200)
    states = 2 * 3 * 16 * 26 * 4
    assert states < path.stat().st_size < states + 8000  # no capacity
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert torch.equal(file.get_tensor("keys.0"), cache.key_storage[:, :, :, :26])
        assert torch.equal(file.get_tensor("values.0"), cache.value_storage[:, :, :, :26])
        assert file.get_tensor("checksums").shape == (2, 26)
    assert json.loads(metadata["tokens"]) == tokens[:, :-1].tolist()
    assert json.loads(metadata["sliding_windows"]) == [8, 8, None]
    assert json.loads(metadata["config"])["sliding_window"] == 8
    assert (metadata["format_version"], metadata["dtype"], metadata["left_padding"]) == (
        "1",
        "float32",
        "[0]",
    )


def test_saving_replaces_the_old_file_or_leaves_it(tmp_path, monkeypatch):
    path, model = tmp_path / "a.safetensors", shared_toy_model("llama")
    saved(path, model)
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files, "memories", full)
        with pytest.raises(OSError, match="no space"):
            saved(path, model, BATCH)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]
    saved(path, model, BATCH)
    assert StaticContiguousCache.load(path, model).batch_size == 2


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path):
    path, model = tmp_path / "a.safetensors", shared_toy_model("llama")
    cache, _ = saved(path, model)
    with CacheFile(path) as file:
        saved(path, model, BATCH)
        loaded = StaticContiguousCache.from_model(model, 64)
        loaded.fill(file, model, 26)
    assert_same(snapshot(cache), snapshot(loaded))


# --- what is refused


def with_window(model):
    config = type(model.config)(**{**model.config.to_dict(), "sliding_window": 9})
    return type(model)(config).eval()


def with_other_weights(model):
    other = toy_model("mistral")
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    return other


OTHER_MODELS = {
    "architecture": (
        lambda model: shared_toy_model("qwen3"),
        "config is mistral, and this model has qwen3",
    ),
    "layers": (
        lambda model: toy_model("mistral", num_hidden_layers=3),
        "num_hidden_layers of its config is 2, and",
    ),
    "window": (with_window, "sliding_window of its config is 8, and this model has 9"),
    "rope": (
        lambda model: toy_model(
            "mistral", rope_parameters={"rope_type": "default", "rope_theta": 9.0}
        ),
        "rope_",
    ),
    "dtype": (
        lambda model: toy_model("mistral").bfloat16(),
        "it is in float32, and this model is in bfloat16",
    ),
    "weights": (with_other_weights, "its weights are others"),
    "seed": (lambda model: toy_model("mistral", seed=1), "its weights are others"),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_the_states_of_another_model(tmp_path, other):
    model = shared_toy_model("mistral")
    saved(tmp_path / "a.safetensors", model)
    build, message = OTHER_MODELS[other]
    with pytest.raises(ValueError, match=message):
        StaticContiguousCache.load(tmp_path / "a.safetensors", build(model))
    assert (
        StaticContiguousCache.load(tmp_path / "a.safetensors", toy_model("mistral")).seq_len == 26
    )


class Adapter(torch.nn.Module):
    """A LoRA of one's own, which can be switched off by a number that is no weight."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.enabled = True
        self.scales = {"mine": [2.0]}

    def forward(self, x):
        return self.base(x) * self.scales["mine"][0] if self.enabled else self.base(x)


@pytest.mark.parametrize("change", ["enabled", "scales"])
def test_settings_of_modules_are_told_apart(tmp_path, change):
    model = toy_model("mistral")
    adapter = model.model.layers[0].mlp.up_proj = Adapter(model.model.layers[0].mlp.up_proj)
    saved(tmp_path / "a.safetensors", model)
    assert StaticContiguousCache.load(tmp_path / "a.safetensors", model).seq_len == 26
    if change == "enabled":
        adapter.enabled = False
    else:
        adapter.scales["mine"][0] = 3.0
    with pytest.raises(
        ValueError, match=rf"model\.layers\.\*\.mlp\.up_proj\.{change} is .*, and in this model"
    ):
        StaticContiguousCache.load(tmp_path / "a.safetensors", model)


def test_a_file_without_settings_is_of_an_older_version(tmp_path):
    model = shared_toy_model("mistral")
    saved(tmp_path / "a.safetensors", model)
    with CacheFile(tmp_path / "a.safetensors") as file:
        older = replace(file.header.model, settings="{}")
    assert ModelIdentity.of(model).difference(older) is None


def test_what_does_not_change_keys_does_not_change_the_identity(tmp_path):
    model = toy_model("llama")
    before = ModelIdentity.of(model)
    model.config.pad_token_id, model.config.use_cache, model.config.name_or_path = (
        7,
        False,
        "elsewhere",
    )
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert before == ModelIdentity.of(model)
    assert before.difference(ModelIdentity.of(again)) is None


def test_a_sample_of_every_weight_is_in_the_identity():
    model = toy_model("llama")
    known = {weights_digest(model)}
    for weight in model.state_dict().values():
        weight.view(-1)[0] += 1
        known.add(weights_digest(model))
    assert len(known) == len(model.state_dict()) + 1


def rewrite(path, change):
    """Change the header as a program would that writes a right safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def set_metadata(**strings):
    return lambda path: rewrite(path, lambda header: header["__metadata__"].update(strings))


SHAPE = {"num_kv_heads": 10**40, "key_head_dim": 16, "value_head_dim": 16}
GROUP = {
    "layers": [0, 1],
    "shape": {**SHAPE, "num_kv_heads": 2},
    "dtypes": ["float32", "float32"],
    "first": 0,
}
HUGE_GROUP, LATE_GROUP = (
    json.dumps([{**GROUP, "shape": SHAPE}]),
    json.dumps([{**GROUP, "first": 3}]),
)
SECOND_GROUP = json.dumps([{**GROUP, "first": 1}])
LISTED_GROUP = json.dumps([{**GROUP, "dtypes": [["float32"], {}]}])
DAMAGES = {
    "a newer format": (
        set_metadata(format_version="3", library_version="9.0"),
        "format is 3, of hf_static_kv 9.0",
    ),
    "a format with codes, and none": (
        set_metadata(format_version="2"),
        "the dtype of codes in its",
    ),
    "other tokens": (set_metadata(tokens="[[1, 2]]"), "has .* bytes and should have"),
    "tokens that are no ids": (set_metadata(tokens="[[true, 1.5]]"), "the tokens in its header"),
    "another digest": (set_metadata(digest="0" * 32), "its header is damaged"),
    "one string more": (set_metadata(more="x"), "its header is damaged"),
    "a group of 10^40 heads": (set_metadata(groups=HUGE_GROUP), "has .* bytes and should have"),
    "a group without its first tokens": (
        set_metadata(groups=LATE_GROUP),
        "layer 0 begins at position 3 and has no",
    ),
    "full attention without its first token": (
        set_metadata(groups=SECOND_GROUP),
        "layer 0 begins at position 1 and has",
    ),
    "a list as a dtype": (set_metadata(groups=LISTED_GROUP), "the dtypes in its header"),
    "a group of no layers": (set_metadata(groups="[]"), "the groups in its header"),
    "other spaces": (lambda path: rewrite(path, lambda header: None), "its header is damaged"),
    "deep brackets": (set_metadata(tokens="[" * 100_000), "cannot be loaded"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "text": (lambda path: path.write_text("no cache " * 99), "truncated"),
    "a byte less": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "should have"),
    "a byte more": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "should have"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "should have"),
    "weights": (
        lambda path: save_file({"x": torch.ones(4)}, path),
        "no file of `StaticContiguousCache.save`",
    ),
    "a bit": (lambda path: flip(path, -1000, 3), "values.0 does not have its checksum at position"),
    "swapped positions": (
        lambda path: swap(path, -64, -128, 64),
        "does not have its checksum at position 2[45]",
    ),
}


def test_a_header_that_is_signed_and_lies_about_its_tensors(tmp_path):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    saved(path, model)
    with CacheFile(path) as file:
        header, checksums = file.header, file._checksums.numpy().tobytes()
    encoded, table = header.encode(checksums), header._table()
    assert path.read_bytes().startswith(encoded)
    table["keys.0"]["shape"] = table["keys.0"]["shape"][::-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(header), "_table", lambda self: table)
        lie = header.encode(checksums)
    path.write_bytes(lie + path.read_bytes()[len(encoded) :])
    with pytest.raises(ValueError, match="its header is damaged"):
        CacheFile(path)


def test_full_attention_that_begins_later_is_refused_though_signed(tmp_path):
    """Its queries would see positions that the file does not have."""
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    saved(path, model)
    with CacheFile(path) as file:
        header = file.header
    with pytest.raises(ValueError, match="layer 0 begins at position 1 and has no sliding window"):
        replace(header, groups=[replace(header.groups[0], first=1)])
    windows = replace(header, sliding_windows=[8, 8], groups=[replace(header.groups[0], first=1)])
    assert windows.min_tokens == 8


def test_checksums_are_not_read_beyond_their_bound(tmp_path, monkeypatch):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    cache, tokens = saved(path, model)
    monkeypatch.setattr(fileformat, "MAX_CHECKSUM_BYTES", 415)
    with pytest.raises(ValueError, match="checksums of 416 bytes are more than the 415"):
        CacheFile(path)
    with pytest.raises(ValueError, match="checksums of 416 bytes are more than the 415"):
        cache.save(path, model=model, tokens=tokens)


def flip(path, place, bit):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def swap(path, first, second, size):
    content = bytearray(path.read_bytes())
    first, second = len(content) + first, len(content) + second
    one, other = content[first : first + size], content[second : second + size]
    content[first : first + size], content[second : second + size] = other, one
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(tmp_path, damage):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    saved(path, model)
    change, message = DAMAGES[damage]
    change(path)
    with pytest.raises(ValueError, match=message) as error:
        StaticContiguousCache.load(path, model)
    assert str(path) in str(error.value)


def test_damaged_states_leave_the_cache_empty(tmp_path):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    cache, tokens = saved(path, model)
    flip(path, -1000, 3)
    with CacheFile(path) as file, pytest.raises(ValueError, match="does not have its checksum"):
        cache.fill(file, model, 26)
    assert cache.seq_len == 0
    assert torch.equal(generate(model, PROMPT, cache), tokens)


def test_a_header_is_not_read_beyond_its_bound(tmp_path):
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="too few for its header"):
        CacheFile(path)


ARGUMENTS = [
    (
        {"max_cache_len": 25},
        "holds 26 tokens, and max_cache_len=25 is too short for 26. .* tokens=25",
    ),
    ({"tokens": 27}, "tokens=27: .* holds 26"),
    ({"tokens": 0}, "tokens must be a positive int"),
    ({"repeat": 0}, "repeat must be a positive int"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=str)
def test_arguments_of_load(tmp_path, arguments, message):
    model = shared_toy_model("llama")
    saved(tmp_path / "a.safetensors", model)
    with pytest.raises(ValueError, match=message):
        StaticContiguousCache.load(tmp_path / "a.safetensors", model, **arguments)


class OtherLayer(StaticContiguousCache.allocate(1, 1, 1, 1).layers[0].__class__):
    pass


def in_a_step(cache):
    cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0)


def forget(cache):
    cache._known_ids = None


def with_another_layer(cache):
    cache.layers[1].__class__ = OtherLayer


UNSAVED = {
    "empty": (StaticContiguousCache.reset, {}, "ids of the cached tokens are not known"),
    "empty, with tokens": (StaticContiguousCache.reset, {"tokens": PROMPT}, "no tokens to save"),
    "unknown tokens": (
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        {},
        "pass them as tokens",
    ),
    "assigned": (
        lambda cache: setattr(cache.layers[0], "keys", cache.layers[0].keys),
        {},
        "pass them as tokens",
    ),
    "rows": (lambda cache: None, {"tokens": BATCH}, "the cache holds 1 rows of 26 tokens"),
    "other tokens": (
        lambda cache: None,
        {"tokens": PROMPT.flip(1)},
        "not those that the cache was computed from",
    ),
    "dtype": (lambda cache: None, {"tokens": PROMPT.float()}, "torch.float32, and the cache holds"),
    "booleans": (lambda cache: None, {"tokens": PROMPT > 0}, "torch.bool, and the cache holds"),
    "negative ids": (
        forget,
        {"tokens": PROMPT - 90},
        r"id -73 at position 0 of row 0\. Ids are 0 or more: .*mask",
    ),
    "a step": (in_a_step, {"tokens": PROMPT}, "Layer 0 is in the middle of a step"),
    "another layer": (
        with_another_layer,
        {"tokens": PROMPT},
        "Layer 1 is a OtherLayer, which cannot be saved yet",
    ),
    "a hole": (
        lambda cache: None,
        {"attention_mask": torch.tensor([[1, 0] + [1] * 30])},
        "must have their rows",
    ),
    "a mask of other rows": (
        lambda cache: None,
        {"attention_mask": torch.ones(2, 3)},
        "must have their rows",
    ),
    "no token": (
        lambda cache: None,
        {"attention_mask": torch.zeros(1, 30)},
        "must have their rows",
    ),
}


@pytest.mark.parametrize("case", UNSAVED)
def test_what_cannot_be_saved(tmp_path, case):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    cache, _ = saved(tmp_path / "b.safetensors", model)
    change, arguments, message = UNSAVED[case]
    change(cache)
    with pytest.raises(ValueError, match=message):
        cache.save(path, model=model, **arguments)
    assert os.listdir(tmp_path) == ["b.safetensors"]


def test_a_header_that_load_would_refuse_is_not_written(tmp_path, monkeypatch):
    model, path = shared_toy_model("llama"), tmp_path / "a.safetensors"
    cache, tokens = saved(path, model)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    path.unlink()
    monkeypatch.setattr(fileformat, "MAX_HEADER_BYTES", length - 1)
    with pytest.raises(
        ValueError, match=rf"{length:,} bytes is more than the {length - 1:,}.* 1 rows of 26 tokens"
    ):
        cache.save(path, model=model, tokens=tokens)
    assert os.listdir(tmp_path) == []


def test_the_name_of_a_file_may_be_as_long_as_the_system_allows(tmp_path):
    path = tmp_path / f"{'x' * 243}.safetensors"  # 255 bytes
    saved(path, shared_toy_model("llama"))
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_that_is_missing_is_named(tmp_path):
    model = shared_toy_model("llama")
    cache, tokens = saved(tmp_path / "a.safetensors", model)
    with pytest.raises(
        FileNotFoundError, match=r"There is no folder .*missing.* os\.makedirs"
    ) as error:
        cache.save(tmp_path / "missing" / "a.safetensors", model=model, tokens=tokens)
    assert ".tmp" not in str(error.value)
    with pytest.raises(IsADirectoryError, match="is a folder: give the name of a file"):
        cache.save(tmp_path, model=model, tokens=tokens)


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    def denied(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(PermissionError, match=r"Permission denied: .*a\.safetensors'$"):
        saved(tmp_path / "a.safetensors", shared_toy_model("llama"))


@pytest.mark.parametrize(
    ("family", "kind"), [("lfm2", "LinearAttentionLayer"), ("falcon_h1", "StatefulLayer")]
)
def test_hybrid_caches_are_refused_by_name(tmp_path, monkeypatch, family, kind):
    model = hybrid_model(family)
    cache = StaticContiguousCache.from_model(model, 64)
    tokens = generate(model, PROMPT, cache)
    with pytest.raises(ValueError, match=f"Layer 0 is a {kind}, which cannot be saved yet"):
        cache.save(tmp_path / "a.safetensors", model=model, tokens=tokens)
    saved(tmp_path / "a.safetensors", shared_toy_model("llama"))
    monkeypatch.setattr(ModelIdentity, "difference", lambda *_: None)
    with pytest.raises(ValueError, match=f"Layer 0 is a {kind}, which cannot be loaded yet"):
        StaticContiguousCache.load(tmp_path / "a.safetensors", model, 64)


# --- checksums


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.float32, 3), (torch.bfloat16, 8), (torch.float16, 5), (torch.float64, 1)],
)
def test_checksums_are_the_sum_of_words_times_odd_weights(dtype, dim):
    states = torch.randn(2, 3, 4, dim).to(dtype)
    weights = checksum_weights("keys", 5, states)
    assert bool((weights % 2 == 1).all())
    assert len(weights.unique()) == weights.numel()
    word = 4 if dim * dtype.itemsize % 4 == 0 else 2
    expected = []
    for position in range(4):
        content = states[1, 2, position].view(torch.uint8).numpy().tobytes()
        words = [
            int.from_bytes(content[i : i + word], "little", signed=True)
            for i in range(0, len(content), word)
        ]
        total = sum(a * b for a, b in zip(words, weights[1, 2].tolist(), strict=True)) % 2**64
        expected.append(total - 2**64 if total >= 2**63 else total)
    assert position_checksums(states[1, 2:3], weights[1, 2:3]).tolist() == expected


def test_every_flipped_bit_and_every_swap_of_two_words_changes_a_checksum():
    states = torch.randn(1, 1, 1, 12)
    states[..., 4:8] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    weights = checksum_weights("keys", 0, states)[0]
    before, words = position_checksums(states[0], weights), states.view(torch.int32)[0, 0]
    for word in range(12):
        for bit in range(32):
            changed = words.clone()
            changed[0, word] ^= (
                torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
            )
            assert not torch.equal(
                position_checksums(changed.view(torch.float32)[None], weights), before
            )
        for other in range(word):
            changed = words.clone()
            changed[0, [word, other]] = words[0, [other, word]]
            assert not torch.equal(
                position_checksums(changed.view(torch.float32)[None], weights), before
            )


# --- mutated files


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model, the path of a file for it, and its bytes."""
    path, model = tmp_path_factory.mktemp("mutated") / "a.safetensors", shared_toy_model("llama")
    saved(path, model)
    return model, path, path.read_bytes()


def mutate(content, rng):
    """Bits flipped, bytes replaced, blocks swapped, parts removed or doubled, the header's length
    and numbers lied.
    """
    content, header = bytearray(content), int.from_bytes(content[:8], "little") + 8
    kind = rng.choice(
        [
            "bits",
            "bits in the header",
            "bytes",
            "swap",
            "cut",
            "remove",
            "double",
            "length",
            "number",
        ]
    )
    if kind.startswith("bits"):
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            content[rng.randrange(header if "header" in kind else len(content))] ^= (
                1 << rng.randrange(8)
            )
    elif kind == "bytes":
        start = rng.randrange(len(content))
        content[start : start + 16] = rng.randbytes(len(content[start : start + 16]))
    elif kind == "swap":
        size = rng.choice([1, 4, 64, 256])
        first, second = (rng.randrange(len(content) - size) for _ in range(2))
        one, other = bytes(content[first : first + size]), bytes(content[second : second + size])
        content[first : first + size], content[second : second + size] = other, one
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    elif kind in ("remove", "double"):
        start = rng.randrange(len(content))
        part = content[start : start + rng.choice([1, 8, 64])]
        content[start : start + len(part)] = b"" if kind == "remove" else part * 2
    elif kind == "length":
        content[:8] = rng.choice(
            [rng.randrange(1 << 16), rng.randrange(1 << 64), header - 7, 0]
        ).to_bytes(8, "little")
    else:  # a number of the header, and the length is right
        digits = [i for i in range(8, header) if 48 <= content[i] < 58]
        content[rng.choice(digits)] = rng.choice(b"0123456789")
    return bytes(content)


def assert_refused(original, seed):
    model, path, content = original
    if (mutated := mutate(content, random.Random(seed))) == content:
        return
    path.write_bytes(mutated)
    with pytest.raises(ValueError, match="cannot be loaded"):
        StaticContiguousCache.load(path, model)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 60))
def test_a_mutated_file_is_refused(original, seed):
    assert_refused(original, seed)


STRANGE = [
    None, True, -1, 0, 1, 2, 7, 26, 1 << 40, 10**30, 10**400, 1.5, float("nan"), "", "x", "\ud800",
    "float16", [], [[]],
    {}, {"x": []}, [0], [0, 1], ["float32"], [["float32"], {}], "[" * 3000, "[]", "{}", "[[1]]",
]  # fmt: skip


def distort(value, rng):
    """Put something strange in the place of the value or of something inside it."""
    if (
        isinstance(value, str)
        and value[:1] in ("[", "{")
        and value not in STRANGE
        and rng.random() < 0.9
    ):
        return json.dumps(distort(json.loads(value), rng))
    if isinstance(value, list | dict) and value and rng.random() < 0.9:
        value = copy(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = distort(value[key], rng)
        return value
    return rng.choice(STRANGE)


def signed(content):
    """The start of a file with these values and a right digest, and how many bytes follow it, all
    of them 0.
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    try:
        header = fileformat.Header.parse(text)
    except (ValueError, RecursionError):
        return fileformat._signed(text, b""), 0
    return header.encode(
        bytes(header.checksum_bytes)
    ), header.num_bytes  # its tensors are those of its groups


@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 1 << 60))
def test_no_header_raises_anything_but_a_value_error(original, seed):
    """Headers of strange values whose digest and sizes are right, as whoever can write the file can
    make them.
    """
    model, path, content = original
    rng, length = random.Random(seed), int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["digest"] = ""
    for _ in range(rng.choice([1, 1, 2, 3])):
        part = header if rng.random() < 0.2 else header["__metadata__"]
        if not isinstance(part, dict) or not part:
            break
        key = rng.choice([*part, "groups", "tokens"])
        part[key] = distort(part.get(key), rng)
        if not isinstance(header.get("__metadata__"), dict):
            break
    start, num_bytes = signed(header)
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(len(start) + min(num_bytes, 1 << 40))
    error = None
    try:
        StaticContiguousCache.load(path, model)
    except Exception as caught:
        error = caught
    assert error is None or isinstance(error, ValueError), repr(error)


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_value_error(original, content):
    path = original[1]
    for start in (b"", len(content).to_bytes(8, "little")):
        path.write_bytes(start + content)
        with pytest.raises(ValueError, match="cannot be loaded"):
            CacheFile(path)


@pytest.mark.slow
def test_ten_thousand_mutated_files_are_refused_in_bounded_memory(original):
    assert_refused(original, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(10_000):
        assert_refused(original, seed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# --- killed


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    """SIGKILL at random moments of a process that saves two caches in turn, under one name."""
    model, path, rng = shared_toy_model("llama"), tmp_path / "a.safetensors", random.Random(0)
    both = [
        saved(path, model, ids, max_cache_len=200, max_new_tokens=100) for ids in (PROMPT, BATCH)
    ]
    rows = set()
    for _ in range(200):
        if (child := os.fork()) == 0:
            while True:
                for cache, tokens in both:
                    cache.save(path, model=model, tokens=tokens)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = StaticContiguousCache.load(path, model)
        rows.add(loaded.batch_size)
        assert_same(snapshot(both[loaded.batch_size - 1][0]), snapshot(loaded))
    assert rows == {1, 2}
    leftovers = [name for name in os.listdir(tmp_path) if name != path.name]
    assert all(name.startswith(".hf_static_kv.") and name.endswith(".tmp") for name in leftovers)


# --- devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("here", ["cpu", "cuda"])
@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_from_one_device_to_another(tmp_path, here, there):
    path, models = (
        tmp_path / "a.safetensors",
        {device: toy_model("gemma3").to(device) for device in (here, there)},
    )
    cache = StaticContiguousCache.from_model(models[here], 64)
    generate(models[here], PROMPT.to(here), cache)
    cache.save(path, model=models[here], tokens=PROMPT)
    before = path.read_bytes()
    loaded = StaticContiguousCache.load(path, models[there])
    loaded.save(path, model=models[there])
    assert path.read_bytes() == before  # the same states, checksums and identity
