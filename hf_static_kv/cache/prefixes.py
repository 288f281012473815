"""Prefixes of prompts in a folder: saved once, found by their tokens, in other processes too."""

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.files import CacheFile
from hf_static_kv.cache.identity import ModelIdentity
from hf_static_kv.cache.layout import check_positive
from hf_static_kv.cache.storage import is_out_of_memory

logger = logging.getLogger(__name__)
_OWN_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.safetensors\.[0-9a-f]{16}\.tmp")
_STALE_SECONDS = 3600  # a file that is still being written is younger
_MIN_TOKENS = 16  # fewer are computed as fast as they are read
_SHARE_OF_DISK = 0.25


class _Prefix(NamedTuple):
    """What the index keeps of a file."""

    file: tuple[int, int]  # inode and size: another file of the same name has others
    tokens: Tensor  # [B, n]
    model: ModelIdentity | None  # None: the file cannot be read, or has left padding
    min_tokens: int = 1  # that can be loaded


class PrefixStore:
    """A folder of cache files for `attach(model, reuse_prefix=...)`. Processes and models may share it.

    `max_bytes` bounds the files that `add` has written, by default a quarter of the disk's free space; the least
    recently used go first. Other files of the folder are read and never removed.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        if max_bytes is not None:
            check_positive(max_bytes=max_bytes)
        self.folder, self.max_bytes = Path(folder), max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._index: dict[str, _Prefix] = {}  # by name
        self._unusable: set[str] = set()  # names of files whose states are damaged
        self._lock = Lock()
        self._identity: tuple[Any, ModelIdentity] | None = None

    def fill(self, cache: StaticContiguousCache, model: PreTrainedModel, ids: Tensor, content: Any) -> None:
        """Put the longest saved prefix of the prompt [B, n] into the cache, if it holds less than half of that.

        `content` is equal for two calls of a model that has not changed. At least one token is left to compute.
        """
        if torch.is_autocast_enabled(model.device.type):  # the states have another dtype than the model
            return
        with self._lock:
            if self._identity is None or self._identity[0] != content:
                self._identity = content, ModelIdentity.of(model)
            identity = self._identity[1]
            try:
                path, length = self._longest(identity, ids)
            except OSError as reason:  # the folder is gone
                logger.warning("Saved prefixes are not used. %s", reason)
                return
        if path is None or length < max(_MIN_TOKENS, 2 * cache.seq_len):
            return
        try:
            with CacheFile(path) as file:
                file.check_model(identity)
                if not cache.is_allocated and not file.header.is_in(model.dtype):
                    return  # only a pass can tell the dtype of its states
                cache.fill(file, model, length, len(ids) // file.header.num_rows)
            os.utime(path)  # used now
        except (OSError, ValueError, RuntimeError) as reason:  # removed by another process, damaged, out of memory
            cache.reset()
            if isinstance(reason, RuntimeError) and not is_out_of_memory(reason):
                raise
            if isinstance(reason, ValueError):
                self._unusable.add(path.name)
                logger.warning("A saved prefix is not used. %s", reason)

    def add(self, cache: StaticContiguousCache, model: PreTrainedModel, tokens: Tensor) -> Path:
        """Save the first positions of a cache, those of the tokens [B, n]."""
        name = blake2b(f"{ModelIdentity.of(model)} {tokens.tolist()}".encode(), digest_size=16).hexdigest()
        path = self.folder / f"{name}.safetensors"
        known = self._index.get(path.name)
        is_damaged = path.name in self._unusable or (known is not None and known.model is None)
        if path.exists() and not is_damaged:
            os.utime(path)
        else:
            cache.save(path, model=model, tokens=tokens)
            self._unusable.discard(path.name)
        self._remove_unused(path)
        return path

    def _longest(self, identity: ModelIdentity, ids: Tensor) -> tuple[Path | None, int]:
        """The file with the most tokens of the prompt, and how many. A file of one row serves every number of rows."""
        self._refresh()
        ids, best, longest = ids.cpu(), None, 0
        for name, prefix in self._index.items():
            if prefix.model is None or name in self._unusable or len(prefix.tokens) not in (1, len(ids)):
                continue
            length = min(prefix.tokens.shape[1], ids.shape[1] - 1)
            is_common = (prefix.tokens[:, :length] == ids[:, :length]).all(dim=0)
            common = int(is_common.cumprod(dim=0).sum())
            if common <= longest or common < prefix.min_tokens or prefix.model.attention != identity.attention:
                continue
            if identity.difference(prefix.model) is None:
                best, longest = self.folder / name, common
        return best, longest

    def _refresh(self) -> None:
        """Read the headers of new files, forget files that are gone."""
        known, self._index = self._index, {}
        for entry, status in self._files():
            if not entry.name.endswith(".safetensors"):
                continue
            file = (status.st_ino, status.st_size)
            if entry.name in known and known[entry.name].file == file:
                self._index[entry.name] = known[entry.name]
                continue
            with suppress(OSError):  # removed meanwhile, or not ours to read
                self._index[entry.name] = _read(entry.path, file)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed it
                    if entry.is_file():
                        yield entry, entry.stat()

    def _remove_unused(self, newest: Path) -> None:
        own = {Path(entry.path): status for entry, status in self._files() if _OWN_NAME.fullmatch(entry.name)}
        total = sum(status.st_size for status in own.values())
        bound = self.max_bytes or int(_SHARE_OF_DISK * (shutil.disk_usage(self.folder).free + total))
        for path in sorted(own, key=lambda path: (path == newest, own[path].st_mtime_ns)):
            if total <= bound:
                break
            path.unlink(missing_ok=True)
            total -= own[path].st_size
            if path == newest:
                size = own[path].st_size
                raise ValueError(f"A prefix of {size:,} bytes is more than the {bound:,} of max_bytes: it is not kept.")
        for entry, status in self._files():
            if _TEMPORARY.fullmatch(entry.name) and time.time() - status.st_mtime > _STALE_SECONDS:
                Path(entry.path).unlink(missing_ok=True)  # its writer was killed


def _read(path: str, file: tuple[int, int]) -> _Prefix:
    try:
        with CacheFile(path) as opened:
            is_padded = any(opened.header.left_padding)
            header = opened.header
            return _Prefix(file, opened.tokens, None if is_padded else header.model, header.min_tokens)
    except ValueError as reason:
        logger.warning("A saved prefix is not used. %s", reason)
        return _Prefix(file, torch.empty(0, 0), None)
