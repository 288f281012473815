"""Prefixes of prompts in a folder, for this and other processes."""

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
from hf_static_kv.cache.fileidentity import ModelIdentity
from hf_static_kv.cache.files import CacheFile, header_of, save_cache, tokens_to_save
from hf_static_kv.cache.layout import check_positive
from hf_static_kv.cache.storage import is_out_of_memory
from hf_static_kv.cache.values import dtype_name

logger = logging.getLogger(__name__)
_OWN_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_ANY_NAME = re.compile(r".*\.safetensors", re.DOTALL)
# The longer one is of earlier versions.
_TEMPORARY = re.compile(r"\.(hf_static_kv|[0-9a-f]{32}\.safetensors)\.[0-9a-f]{16}\.tmp")
_STALE_SECONDS = 3600  # a file that is still being written is younger
_MIN_TOKENS = 16  # fewer are computed as fast as they are read
_SHARE_OF_DISK = 0.25


class _Prefix(NamedTuple):
    file: tuple[int, int]  # inode and size, which tell another file of the same name
    tokens: Tensor  # [B, n]
    model: ModelIdentity | None  # None: the file cannot be read, or has left padding
    min_tokens: int = 1  # that can be loaded
    kv_dtype: str | None = None  # of codes; None: the states are stored as they are


class PrefixStore:
    """A folder of cache files for `attach(model, reuse_prefix=...)`.

    Processes and models may share it. Files that `add` has not written are
    read, and never removed or touched.

    Args:
        folder: Is made if it is not there.
        max_bytes: Bounds the files of `add`, the least recently used go first.
            By default a quarter of the disk's free space.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        if not isinstance(folder, str | os.PathLike) or folder == "":
            raise ValueError(f"folder={folder!r}: give the path of a folder.")
        if max_bytes is not None:
            check_positive(max_bytes=max_bytes)
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        if self.folder.is_file():
            raise NotADirectoryError(f"{self.folder} is a file: give the path of a folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._index: dict[str, _Prefix] = {}  # by name
        self._unusable: set[str] = set()  # names of files whose states are damaged
        self._told: set[str] = set()  # reasons that have been logged
        self._lock = Lock()
        self._identity: tuple[Any, ModelIdentity] | None = None

    def fill(
        self, cache: StaticContiguousCache, model: PreTrainedModel, ids: Tensor, identity: Any
    ) -> None:
        """Put the longest saved prefix of the prompt [B, n] into a cache that has less than half.

        Args:
            identity: Equal for two calls of a model that has not changed.
        """
        if torch.is_autocast_enabled(model.device.type):
            return  # the states have another dtype than the model
        with self._lock:
            if self._identity is None or self._identity[0] != identity:
                self._identity = identity, ModelIdentity.of(model)
            own = self._identity[1]
            try:
                path, length = self._longest(own, ids, cache.kv_dtype)
            except OSError as reason:  # the folder is gone
                logger.warning("Saved prefixes are not used. %s", reason)
                return
        if path is None or length < max(_MIN_TOKENS, 2 * cache.seq_len):
            return
        try:
            with CacheFile(path) as file:
                file.check_model(own)
                dtypes = {dtype for group in file.header.groups for dtype in group.dtypes}
                if not cache.is_allocated and dtypes != {dtype_name(model.dtype)}:
                    return  # only a pass can tell the dtype of its states
                if not cache.grows:
                    length = min(length, cache.max_cache_len)
                if length < file.header.min_tokens:
                    return
                cache.fill(file, model, length, len(ids) // file.header.num_rows)
            _touch(path)
        except (OSError, ValueError, RuntimeError) as reason:
            # Removed by another process, damaged, or out of memory.
            cache.reset()
            if isinstance(reason, RuntimeError) and not is_out_of_memory(reason):
                raise
            if isinstance(reason, ValueError):
                self._unusable.add(path.name)
                self._warn(str(reason))

    def add(self, cache: StaticContiguousCache, model: PreTrainedModel, tokens: Tensor) -> Path:
        """Save the tokens [B, n] of a cache."""
        header = header_of(cache, model, tokens_to_save(cache, cache.known_ids, tokens))
        size = len(header.encode(b"")) + header.num_bytes
        bound = self._bound(self._own_files())
        if size > bound:  # before others are removed in its favour
            raise ValueError(
                f"A prefix of {size:,} bytes is more than the {bound:,} of max_bytes. Pass "
                "PrefixStore(folder, max_bytes=...), or save fewer tokens."
            )
        content = f"{header.model} {header.tokens}"
        if header.kv_dtype is not None:
            content += f" {header.kv_dtype}"
        name = blake2b(content.encode(), digest_size=16).hexdigest()
        path = self.folder / f"{name}.safetensors"
        known = self._index.get(path.name)
        is_damaged = path.name in self._unusable or (known is not None and known.model is None)
        if path.exists() and not is_damaged:
            _touch(path)
        else:
            save_cache(cache, path, header)
            self._unusable.discard(path.name)
        self._remove_unused(path)
        return path

    def _longest(
        self, identity: ModelIdentity, ids: Tensor, kv_dtype: str | None
    ) -> tuple[Path | None, int]:
        """The file with the most tokens of the prompt, and how many. One row serves any number."""
        known = self._index
        self._index = {}
        for path, status in self._files(_ANY_NAME):
            file = (status.st_ino, status.st_size)
            found = known.get(path.name)
            if found is None or found.file != file:
                found = self._read(path, file)
            if found is not None:
                self._index[path.name] = found
        ids = ids.cpu()
        best = None
        longest = 0
        for name, prefix in self._index.items():
            if prefix.model is None or name in self._unusable or prefix.kv_dtype != kv_dtype:
                continue
            if len(prefix.tokens) not in (1, len(ids)):
                continue
            common = common_length(prefix.tokens, ids[:, :-1])
            if common <= longest or common < prefix.min_tokens:
                continue
            is_alike = prefix.model.attention == identity.attention
            if is_alike and identity.difference(prefix.model) is None:
                best = self.folder / name
                longest = common
        return best, longest

    def _read(self, path: Path, file: tuple[int, int]) -> _Prefix | None:
        """What the index keeps of a file; None if another try may succeed."""
        try:
            with CacheFile(path) as opened:
                header = opened.header
                model = None if any(header.left_padding) else header.model
                return _Prefix(file, opened.tokens, model, header.min_tokens, header.kv_dtype)
        except OSError as reason:
            self._warn_of(path, reason)
            return None
        except Exception as reason:  # whatever is wrong with one file, the others are used
            self._warn(str(reason) if isinstance(reason, ValueError) else f"{path}: {reason!r}.")
            return _Prefix(file, torch.empty(0, 0), None)

    def _warn(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("A saved prefix is not used. %s", reason)

    def _warn_of(self, path: str | Path, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another process has removed it
            self._warn(f"{path}: {error.strerror or error}.")

    def _files(self, names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.folder) as entries:
            for entry in filter(lambda entry: names.fullmatch(entry.name), entries):
                try:
                    if entry.is_file():
                        yield Path(entry.path), entry.stat()
                except OSError as reason:  # a link that leads nowhere
                    self._warn_of(entry.path, reason)

    def _own_files(self) -> dict[Path, os.stat_result]:
        return dict(self._files(_OWN_NAME))

    def _bound(self, own: dict[Path, os.stat_result]) -> int:
        if self.max_bytes:
            return self.max_bytes
        return int(_SHARE_OF_DISK * (shutil.disk_usage(self.folder).free + _total(own)))

    def _remove_unused(self, newest: Path) -> None:
        own = self._own_files()
        bound = self._bound(own)
        total = _total(own)
        for path in sorted(own.keys() - {newest}, key=lambda path: own[path].st_mtime_ns):
            if total <= bound:
                break
            with suppress(OSError):  # it belongs to another user
                path.unlink(missing_ok=True)
                total -= own[path].st_size
        for path, status in self._files(_TEMPORARY):
            if time.time() - status.st_mtime > _STALE_SECONDS:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # its writer was killed


def common_length(known: Tensor, ids: Tensor) -> int:
    """How many tokens [B, n] and [B, m] have in common."""
    length = min(known.shape[1], ids.shape[1])
    is_common = (known[:, :length] == ids[:, :length]).all(dim=0)
    return int(is_common.cumprod(dim=0).sum())


def _total(files: dict[Path, os.stat_result]) -> int:
    return sum(status.st_size for status in files.values())


def _touch(path: Path) -> None:
    if _OWN_NAME.fullmatch(path.name):
        with suppress(OSError):
            os.utime(path)
