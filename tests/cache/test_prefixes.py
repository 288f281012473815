"""Prefixes in a folder:

found by their tokens, shared by processes, bounded, and never a reason for a call to fail.
"""

import gc
import logging
import os
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_static_kv import (
    CacheFile,
    PrefixStore,
    StaticContiguousCache,
    attach,
    attached,
    attachment,
    detach,
)
from hf_static_kv.cache.prefixes import _STALE_SECONDS
from tests.conftest import COMMON, shared_toy_model, toy_model

ROOT = Path(__file__).parents[2]
TEXT = torch.arange(3, 103)[None]  # 100 tokens
QUESTION = torch.tensor([[9, 55, 9]])


def ask(model, ids, **how):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), **{**COMMON, "max_new_tokens": 6, **how}
    )


def reused(model, ids, folder, **settings):
    """Tokens of a new attachment to the model, and how many tokens of the prompt it has not
    computed.
    """
    with attached(model, reuse_prefix=folder, **settings) as info:
        tokens = ask(model, ids)
    assert torch.equal(tokens, ask(model, ids))
    return info.reused_tokens


def save(model, folder, ids=TEXT, **settings):
    with attached(model, reuse_prefix=folder, **settings) as info:
        ask(model, ids)
        return info.save(ids)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_saved_prefix_is_found_by_the_longest_one(tmp_path, name):
    model = shared_toy_model(name)
    save(model, tmp_path, TEXT[:, :40])
    save(model, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert reused(model, torch.cat([TEXT, QUESTION], dim=1), tmp_path) == 100
    assert reused(model, torch.cat([TEXT[:, :70], QUESTION], dim=1), tmp_path) == 70
    assert reused(model, TEXT, tmp_path) == 99  # one is left to compute
    assert reused(model, torch.cat([QUESTION, TEXT], dim=1), tmp_path) == 0


def test_in_a_new_process(tmp_path):
    model = shared_toy_model("llama")
    save(model, tmp_path)
    code = (
        "from tests.cache.test_prefixes import *\nprint(reused(shared_toy_model('llama'), "
        f"torch.cat([TEXT, QUESTION], dim=1), {str(tmp_path)!r}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert result.stdout == "100\n", result.stderr


def test_what_the_last_call_holds_is_saved_and_the_memory_goes_on_with_it(tmp_path):
    model = shared_toy_model("llama")
    with attached(model, reuse_prefix=tmp_path) as info:
        tokens = ask(model, TEXT)
        assert info.save() == info.save()  # the same tokens are one file
        assert len(os.listdir(tmp_path)) == 1
        ask(model, torch.cat([tokens, QUESTION], dim=1))
        assert info.reused_tokens == 105  # in memory: the last token was not computed
    assert reused(model, torch.cat([tokens, QUESTION], dim=1), tmp_path) == 105


def test_a_prefix_of_one_row_serves_a_batch(tmp_path):
    model = shared_toy_model("llama")
    save(model, tmp_path)
    batch = torch.cat([TEXT.repeat(3, 1), torch.tensor([[4, 5], [6, 7], [8, 9]])], dim=1)
    assert reused(model, batch, tmp_path) == 100
    assert reused(model, torch.cat([batch[:2], batch[:1].roll(1, dims=1)]), tmp_path) == 0


def test_a_batch_is_a_prefix_of_the_same_batch(tmp_path):
    model, batch = shared_toy_model("llama"), torch.cat([TEXT, TEXT + 1])
    save(model, tmp_path, batch)
    assert reused(model, torch.cat([batch, QUESTION.repeat(2, 1)], dim=1), tmp_path) == 100
    assert reused(model, torch.cat([TEXT, QUESTION], dim=1), tmp_path) == 0


def test_inside_exact_only_what_was_computed_inside(tmp_path):
    model, prompt = toy_model("llama").bfloat16(), torch.cat([TEXT, QUESTION], dim=1)
    save(model, tmp_path)
    with attached(model, reuse_prefix=tmp_path, exact=True) as info:
        ask(model, prompt)
        assert info.reused_tokens == 0
    save(model, tmp_path, exact=True)
    with attached(model, exact=True):
        expected = ask(model, prompt)
    with attached(model, reuse_prefix=tmp_path, exact=True) as info:
        assert torch.equal(ask(model, prompt), expected)
        assert info.reused_tokens == 100


@pytest.mark.parametrize("change", ["weights", "seed", "attention"])
def test_not_for_another_model(tmp_path, change):
    model = toy_model("llama")
    save(model, tmp_path)
    if change == "weights":
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    other = toy_model("llama", **{"seed": 1} if change == "seed" else {"attn": "eager"})
    assert reused(model if change == "weights" else other, TEXT, tmp_path) == 0
    assert reused(toy_model("llama"), TEXT, tmp_path) == 99


def test_weights_that_changed_after_the_call_are_not_saved_with_its_keys(tmp_path):
    model = toy_model("llama")
    with attached(model, reuse_prefix=tmp_path) as info:
        ask(model, TEXT)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        with pytest.raises(ValueError, match="on the model as it is now"):
            info.save()
    assert os.listdir(tmp_path) == []


def test_not_under_autocast(tmp_path):
    model = toy_model("llama")
    save(model, tmp_path)
    with attached(model, reuse_prefix=tmp_path) as info, torch.autocast("cpu", torch.bfloat16):
        ask(model, TEXT)
        assert info.reused_tokens == 0


def test_a_prefix_longer_than_the_kept_cache(tmp_path):
    """A short chat and then a long one, with the same beginning."""
    model, text = shared_toy_model("llama"), torch.randint(3, 100, (1, 500))
    save(model, tmp_path, text)
    with attached(model, reuse_prefix=tmp_path) as info:
        ask(model, text[:, :14])
        assert info.caches[0].max_cache_len == 256
        tokens = ask(model, torch.cat([text, QUESTION], dim=1))
        assert info.reused_tokens == 500
        assert [cache.max_cache_len for cache in info.caches] == [756]
    assert torch.equal(tokens, ask(model, torch.cat([text, QUESTION], dim=1)))


@pytest.mark.parametrize("sliding", ["full", "compact"])
def test_a_cache_of_fixed_capacity_takes_what_fits(tmp_path, small_spare, sliding):
    model = shared_toy_model("gemma3")
    large = StaticContiguousCache.from_model(model, 128)
    ask(model, TEXT, past_key_values=large)
    large.save(tmp_path / "mine.safetensors", model=model, tokens=TEXT)
    cache = StaticContiguousCache.from_model(model, 64, sliding=sliding)
    PrefixStore(tmp_path).fill(cache, model, torch.cat([TEXT, QUESTION], dim=1), "identity")
    assert cache.seq_len == 64
    assert torch.equal(cache.known_ids, TEXT[:, :64])


def test_a_file_of_a_compact_cache_is_not_taken_by_a_capacity_below_its_least(
    tmp_path, small_spare, caplog
):
    model = shared_toy_model("mistral")
    cache = StaticContiguousCache.from_model(model, 128, sliding="compact")
    ask(model, TEXT, past_key_values=cache)
    cache.save(tmp_path / "mine.safetensors", model=model, tokens=TEXT)
    small = StaticContiguousCache.from_model(model, 64)
    PrefixStore(tmp_path).fill(small, model, TEXT, "identity")
    assert small.seq_len == 0
    assert caplog.text == ""


def test_any_file_of_save_in_the_folder_is_found_but_not_with_left_padding(tmp_path):
    model, mask = shared_toy_model("llama"), torch.ones_like(TEXT)
    cache = StaticContiguousCache.from_model(model, 128)
    ask(model, TEXT, past_key_values=cache)
    cache.save(tmp_path / "mine.safetensors", model=model, tokens=TEXT)
    assert reused(model, TEXT, tmp_path) == 99
    mask[0, 0] = 0
    cache.save(tmp_path / "mine.safetensors", model=model, tokens=TEXT, attention_mask=mask)
    assert reused(model, TEXT, tmp_path) == 0


# --- the folder


def names(folder):
    return {path.name for path in Path(folder).glob("*.safetensors")}


def test_the_least_recently_used_goes_first(tmp_path):
    model = shared_toy_model("llama")
    texts = [torch.randint(3, 100, (1, 60)) for _ in range(4)]
    first = save(model, tmp_path, texts[0])
    # Another name: not counted, not removed.
    (tmp_path / "mine.safetensors").write_bytes(first.read_bytes())
    store = PrefixStore(tmp_path, max_bytes=int(2.5 * first.stat().st_size))
    paths = [first, save(model, store, texts[1])]
    os.utime(first, (1, 1))
    os.utime(paths[1], (2, 2))
    os.remove(tmp_path / "mine.safetensors")
    assert reused(model, texts[0], store) == 59  # used now
    paths.append(save(model, store, texts[2]))
    assert names(tmp_path) == {paths[0].name, paths[2].name}


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_prefix_beyond_the_bound_is_refused_and_nothing_is_removed(tmp_path, is_saved):
    model = shared_toy_model("llama")
    small = save(model, tmp_path, TEXT[:, :20])
    large = save(model, tmp_path)
    if not is_saved:
        large.unlink()
    before = set(os.listdir(tmp_path))
    size = small.stat().st_size
    with pytest.raises(
        ValueError, match=rf"A prefix of .* bytes is more than the {size:,} of max_bytes"
    ):
        save(model, PrefixStore(tmp_path, max_bytes=size))
    assert set(os.listdir(tmp_path)) == before
    assert save(model, PrefixStore(tmp_path, max_bytes=size), TEXT[:, :20]) == small


def test_a_file_that_may_not_be_removed_stays(tmp_path, monkeypatch):
    """In a folder of several users each may remove files of their own only."""
    model = shared_toy_model("llama")
    first = save(model, tmp_path)
    monkeypatch.setattr(Path, "unlink", denied)
    second = save(model, PrefixStore(tmp_path, max_bytes=first.stat().st_size + 1000), TEXT + 1)
    assert names(tmp_path) == {first.name, second.name}


@pytest.mark.parametrize("start", [f".{'0' * 32}.safetensors", ".hf_static_kv"])
def test_files_of_killed_writers_are_removed_when_they_are_old(tmp_path, start):
    old, new = (tmp_path / f"{start}.{digit * 16}.tmp" for digit in "12")
    for path in (old, new, tmp_path / "notes.tmp"):
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
    os.utime(new, (time.time() - _STALE_SECONDS / 2,) * 2)
    save(shared_toy_model("llama"), tmp_path)
    assert not old.exists()
    assert new.exists()
    assert (tmp_path / "notes.tmp").exists()


def test_another_process_adds_and_removes(tmp_path):
    """Two stores on one folder are what two processes have."""
    model, here, there = shared_toy_model("llama"), PrefixStore(tmp_path), PrefixStore(tmp_path)
    with attached(model, reuse_prefix=here) as info:
        ask(model, TEXT[:, :20])
        path = save(model, there)
        assert attachment(model) is info
        ask(model, TEXT)
        assert info.reused_tokens == 99
    path.unlink()
    assert reused(model, TEXT, here) == 0


def test_a_file_that_is_removed_when_it_is_about_to_be_read(tmp_path, monkeypatch, caplog):
    model = shared_toy_model("llama")
    path, longest = save(model, tmp_path), PrefixStore._longest

    def removed(self, *args):
        found = longest(self, *args)
        path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(PrefixStore, "_longest", removed)
    assert reused(model, TEXT, tmp_path) == 0
    assert caplog.text == ""


def test_too_little_memory_for_a_file_is_left_to_the_call(tmp_path, monkeypatch):
    model = shared_toy_model("llama")
    save(model, tmp_path)

    def fail(self, *args):
        raise torch.OutOfMemoryError("too little")

    monkeypatch.setattr(CacheFile, "allocate", fail)
    assert reused(model, TEXT, tmp_path) == 0


def damage(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("place", [100, -100], ids=["header", "states"])
def test_a_damaged_file_is_named_once_and_the_call_computes(tmp_path, caplog, place):
    model, store = shared_toy_model("llama"), PrefixStore(tmp_path)
    path = save(model, store)
    damage(path, place)
    with caplog.at_level(logging.WARNING), attached(model, reuse_prefix=store) as info:
        ask(model, TEXT)
        ask(model, TEXT.roll(1, dims=1))
        assert info.reused_tokens == 0
    assert caplog.text.count("A saved prefix is not used.") == 1
    assert str(path) in caplog.text


@pytest.mark.parametrize("place", [100, -6000], ids=["header", "states"])
def test_saving_again_replaces_a_damaged_file(tmp_path, place):
    model, store = shared_toy_model("llama"), PrefixStore(tmp_path)
    path = save(model, store)
    damage(path, place)
    assert save(model, store) == path
    assert reused(model, TEXT, store) == reused(model, TEXT, tmp_path) == 99


def denied(path, *args, **kwargs):
    raise PermissionError(13, "Permission denied", str(path))


def unreadable(kind):
    """What opens files and fails with this exception for one of them."""

    def opened(path):
        if str(path).endswith("bad.safetensors"):
            raise kind(13, "for a reason")
        return CacheFile(path)

    return opened


@pytest.mark.parametrize(
    "kind", [PermissionError, OSError, TypeError, KeyError, MemoryError, RecursionError]
)
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, caplog, kind):
    model = shared_toy_model("llama")
    save(model, tmp_path)
    (tmp_path / "bad.safetensors").touch()
    monkeypatch.setattr("hf_static_kv.cache.prefixes.CacheFile", unreadable(kind))
    check_that_one_is_skipped(model, tmp_path, caplog)


def check_that_one_is_skipped(model, folder, caplog):
    """`bad.safetensors` is logged once in two calls, and the good file is used in both."""
    store = PrefixStore(folder)
    with caplog.at_level(logging.WARNING):
        assert reused(model, TEXT, store) == reused(model, TEXT, store) == 99
        assert save(model, store, TEXT.flip(1)).exists()
    assert len(caplog.records) == 1
    assert "A saved prefix is not used." in caplog.text
    assert "bad.safetensors" in caplog.text


def lists_of_dtypes(path, good):
    content = good.read_bytes()
    path.write_bytes(
        content.replace(rb"[\"float32\", \"float32\"]", rb"[[], [\"float32\"]]       ")
    )
    assert path.read_bytes() != content


def gigabytes_of_checksums(path, good):
    """A sparse file whose sizes are right."""
    with CacheFile(good) as file:
        header = file.header
    groups = [replace(header.groups[0], layers=[i]) for i in range(4000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(header), "__post_init__", lambda self: None)
        huge = replace(
            header, tokens=[[7] * 20_000], groups=groups, sliding_windows=[None] * len(groups)
        )
    with open(path, "wb") as file:
        file.write(huge.encode(b""))
        file.truncate(file.tell() + huge.num_bytes)


BAD_ENTRIES = {
    "a link to itself": lambda path, good: path.symlink_to(path),
    "a link to a file below a file": lambda path, good: path.symlink_to(good / "x"),
    "dtypes in lists": lists_of_dtypes,
    "gigabytes of checksums": gigabytes_of_checksums,
    "no bytes": lambda path, good: path.touch(),
}


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_a_bad_entry_of_the_folder(tmp_path, caplog, kind):
    model = shared_toy_model("llama")
    good = save(model, tmp_path)
    BAD_ENTRIES[kind](tmp_path / "bad.safetensors", good)
    check_that_one_is_skipped(model, tmp_path, caplog)


def test_what_is_no_saved_prefix_is_not_looked_at(tmp_path, caplog):
    model = shared_toy_model("llama")
    save(model, tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "gone")
    with caplog.at_level(logging.WARNING):
        assert reused(model, TEXT, tmp_path) == 99
        save(model, tmp_path, TEXT.flip(1))
    assert caplog.text == ""


def test_a_prefix_that_may_be_read_and_not_touched(tmp_path, monkeypatch):
    model = shared_toy_model("llama")
    path = save(model, tmp_path)
    monkeypatch.setattr(os, "utime", denied)
    assert reused(model, TEXT, tmp_path) == 99
    assert save(model, tmp_path) == path


def test_only_files_of_the_store_are_touched(tmp_path):
    model = shared_toy_model("llama")
    own = save(model, tmp_path)
    mine = own.rename(tmp_path / "mine.safetensors")
    os.utime(mine, (1, 1))
    assert reused(model, TEXT, tmp_path) == 99
    assert mine.stat().st_mtime == 1
    mine.rename(own)
    assert reused(model, TEXT, tmp_path) == 99
    assert own.stat().st_mtime > 1


def test_a_folder_that_is_gone(tmp_path, caplog):
    model = shared_toy_model("llama")
    with attached(model, reuse_prefix=tmp_path / "folder"):
        (tmp_path / "folder").rmdir()
        with caplog.at_level(logging.WARNING):
            tokens = ask(model, TEXT)
    assert torch.equal(tokens, ask(model, TEXT))
    assert "Saved prefixes are not used." in caplog.text


def test_arguments(tmp_path):
    model = toy_model("llama")
    info = attach(model, reuse_prefix=str(tmp_path / "made" / "here"))
    assert attach(model, reuse_prefix=str(tmp_path / "made" / "here")) is info
    assert (tmp_path / "made" / "here").is_dir()
    with pytest.raises(ValueError, match="Nothing is kept of a last call: call generate"):
        info.save()
    ask(model, TEXT)
    with pytest.raises(ValueError, match="call generate with them"):
        info.save(QUESTION)
    detach(model)
    with pytest.raises(ValueError, match="The model is detached"):
        info.save()
    with (
        attached(model, reuse_prefix=True) as info,
        pytest.raises(ValueError, match=r"attach\(model, reuse_prefix=folder\)"),
    ):
        info.save()
    with pytest.raises(ValueError, match="max_bytes must be a positive int"):
        PrefixStore(tmp_path, max_bytes=0)


@pytest.mark.parametrize("folder", ["", 5, b"folder"])
def test_what_names_no_folder(folder):
    with pytest.raises(ValueError, match=f"folder={folder!r}: give the path of a folder"):
        PrefixStore(folder)
    model = toy_model("llama")
    with pytest.raises(ValueError, match=f"folder={folder!r}: give the path of a folder"):
        attach(model, reuse_prefix=folder)
    with pytest.raises(ValueError, match="not attached"):
        attachment(model)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file: give the path of a folder"):
        PrefixStore(tmp_path / "file")


def test_none_is_no_reuse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = shared_toy_model("llama")
    with attached(model, reuse_prefix=None, max_cache_len=512) as info:
        ask(model, TEXT)
        ask(model, TEXT)
        assert info.settings.store is None
        assert info.reused_tokens == 0
    assert os.listdir(tmp_path) == []


def test_ids_of_one_dimension_are_one_row(tmp_path):
    model = shared_toy_model("llama")
    with attached(model, reuse_prefix=tmp_path) as info:
        ask(model, TEXT)
        assert info.save(TEXT[0]) == info.save(TEXT)
    assert reused(model, TEXT, tmp_path) == 99


OTHER = TEXT.flip(1)


def padded(model):
    mask = torch.ones_like(OTHER)
    mask[0, :3] = 0
    model.generate(OTHER, attention_mask=mask, **COMMON)


def interrupted(model):
    def stop(*args):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ask(model, OTHER, stopping_criteria=[stop])


LAST_CALLS = {
    "a padded batch": padded,
    "embeddings": lambda model: model.generate(
        inputs_embeds=model.get_input_embeddings()(OTHER), **COMMON
    ),
    "beams": lambda model: ask(model, OTHER, num_beams=2),
    "a cache that the caller has": lambda model: ask(model, OTHER, return_dict_in_generate=True),
    "too long for the pool": lambda model: ask(model, OTHER.repeat(40, 10)),
    "an error": interrupted,
}


def test_settings_of_modules_are_told_apart(tmp_path):
    model = toy_model("llama")
    act = model.model.layers[0].mlp
    act.gain = 1.0
    own = type(act).forward

    class Scaled(type(act)):
        def forward(self, x):
            return own(self, x) * self.gain

    act.__class__ = Scaled
    save(model, tmp_path)
    assert reused(model, TEXT, tmp_path) > 0
    act.gain = 3.0
    assert reused(model, TEXT, tmp_path) == 0


@pytest.mark.parametrize("kind", LAST_CALLS)
def test_only_the_last_call_is_saved(tmp_path, kind):
    model, first = shared_toy_model("llama"), TEXT[:, :40]
    with attached(model, reuse_prefix=tmp_path, max_bytes=1 << 20) as info:
        ask(model, first)
        LAST_CALLS[kind](model)
        with pytest.raises(
            ValueError, match=r"Nothing is kept of a last call: .* save\(input_ids\)"
        ):
            info.save()
        assert os.listdir(tmp_path) == []
        info.save(first)  # of the call before
        ask(model, TEXT)
        with CacheFile(info.save()) as file:
            assert file.tokens.shape[1] == 105


def test_the_last_call_keeps_no_cache_from_being_freed(tmp_path):
    model = shared_toy_model("llama")
    with attached(model, reuse_prefix=tmp_path) as info:
        ask(model, TEXT)
        cache = weakref.ref(info.caches[0])
        info.pool.clear()
        gc.collect()
        assert cache() is None
        with pytest.raises(ValueError, match="Nothing is kept of a last call"):
            info.save()
