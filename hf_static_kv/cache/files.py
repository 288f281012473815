"""Caches to files and back, layer by layer in pieces. fileformat.py draws a file."""

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_static_kv
from hf_static_kv.cache import layout
from hf_static_kv.cache.allocation import AllocatedCache, Place
from hf_static_kv.cache.fileformat import DTYPES, MAX_HEADER_BYTES, FileGroup, FileTensor, Header
from hf_static_kv.cache.fileidentity import ModelIdentity
from hf_static_kv.cache.filepieces import LayerStates, Piece, memories, staging
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.storage import StorageGroup
from hf_static_kv.cache.values import dtype_name

_READERS = 4  # one thread copies less from the page cache than the memory takes


class CacheFile:
    """A file of `StaticContiguousCache.save`, open, with its header checked.

    ```python
    with CacheFile("chat.safetensors") as file:
        print(file.tokens, file.attention_mask)  # [B, n] each
    ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # One descriptor: a file that is replaced meanwhile is read as it was.
        self._file = open(self.path, "rb")  # noqa: SIM115
        self._seeking = Lock()
        try:
            self._read_header()
        except BaseException as error:
            self.close()
            if not isinstance(error, ValueError | RecursionError | MemoryError):
                raise
            raise self._refusal(f"{str(error) or type(error).__name__}.") from error

    def __enter__(self) -> "CacheFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def tokens(self) -> Tensor:
        """The token ids [B, n], left padding included."""
        return torch.from_numpy(np.array(self.header.tokens, np.int64))

    @property
    def attention_mask(self) -> Tensor:
        """[B, n]: 0 under the left padding, 1 at tokens."""
        starts = torch.tensor(self.header.left_padding)
        return (torch.arange(self.header.num_tokens) >= starts[:, None]).long()

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} cannot be loaded: {reason}")

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"it has {size} bytes, too few for its header: it is truncated")
        text = self._file.read(length)
        self.header = Header.parse(text)
        self._start = 8 + length
        wanted = self._start + self.header.num_bytes
        if size != wanted:
            raise ValueError(f"it has {size} bytes and should have {wanted}: it is truncated")
        checksums = bytearray(self._file.read(self.header.checksum_bytes))
        if not self.header.is_told_by(text, checksums):
            raise ValueError("its header is damaged")
        sums = torch.frombuffer(checksums, dtype=torch.int64)
        self._checksums = sums.view(-1, self.header.num_tokens)

    def _read(self, offset: int, buffer: memoryview) -> None:
        while buffer:
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [buffer], offset)
            else:  # Windows
                with self._seeking:
                    self._file.seek(offset)
                    count = self._file.readinto(buffer) or 0
            if count == 0:
                raise ValueError("it ends early: it is truncated")
            buffer = buffer[count:]
            offset += count

    # --- checks

    def check_model(self, identity: ModelIdentity) -> None:
        if (difference := identity.difference(self.header.model)) is not None:
            raise self._refusal(
                f"{difference}. Load the model that computed it (with transformers "
                f"{self.header.transformers_version}), or save its text again."
            )

    def check_length(self, tokens: int | None, max_cache_len: int | None) -> int:
        held = self.header.num_tokens
        length = held if tokens is None else tokens
        layout.check_positive(tokens=length)
        if length > held:
            raise ValueError(
                f"tokens={length}: {self.path} holds {held}. Ask for at most that many."
            )
        if length < (fewest := self.header.min_tokens):
            raise ValueError(
                f"tokens={length}: {self.path} was saved from a compact cache. Load at least "
                f"{fewest} of its {held} tokens."
            )
        if max_cache_len is not None and length > max_cache_len:
            raise ValueError(
                f"{self.path} holds {held} tokens, and max_cache_len={max_cache_len} is too short "
                f"for {length}. Use a longer one, or load a part: tokens={max_cache_len}."
            )
        return length

    def allocate(self, cache: AllocatedCache, model: PreTrainedModel, batch_size: int) -> None:
        """Allocate layers that have no storage, in the dtypes of the file; refuse unlike layers."""
        self._check_layers(cache)
        devices = layout.layer_devices(model, len(cache.layers))
        missing: dict[tuple[str, str], dict[int, Place]] = {}  # by dtypes
        for group, layer_idx in sorted(self._layers(), key=lambda pair: pair[1]):
            if not cache.layers[layer_idx].is_initialized:
                place = cache.planned_shape(layer_idx, group.shape), devices[layer_idx]
                missing.setdefault(group.dtypes, {})[layer_idx] = place
        for names, places in missing.items():
            dtypes = getattr(torch, names[0]), getattr(torch, names[1])
            cache.allocate_places(places, batch_size, dtypes)

    def _layers(self) -> list[tuple[FileGroup, int]]:
        return [(group, layer_idx) for group in self.header.groups for layer_idx in group.layers]

    def _check_layers(self, cache: AllocatedCache) -> None:
        _check_kinds(cache, "loaded")
        windows = [layer.sliding_window for layer in cache.layers]
        if windows != self.header.sliding_windows:
            raise self._refusal(
                f"its layers have the windows {self.header.sliding_windows}, and those of this "
                f"model {windows}. Load the model that it was saved from."
            )
        for group, layer_idx in self._layers():
            layer = cache.layers[layer_idx]
            planned = cache.planned_shape(layer_idx, group.shape).of_a_token
            dtypes = group.dtypes
            if layer.is_initialized:
                dtypes = dtype_name(layer.dtype), dtype_name(layer.value_dtype)
            if (planned, dtypes) != (group.shape, group.dtypes):
                raise self._refusal(
                    f"its layer {layer_idx} has {group.shape} in {group.dtypes}, and that of this "
                    f"model {planned} in {dtypes}. Load the model it was saved from."
                )

    # --- states

    @torch.no_grad()
    def read_into(self, cache: AllocatedCache, length: int, repeat: int = 1) -> None:
        """Put the first tokens into an allocated, empty cache; each row becomes `repeat` rows.

        The lengths move when all checksums are right. After an error the cache
        is empty.
        """
        rows = self.header.num_rows * repeat
        targets = []
        jobs = []
        for group, pair in zip(self.header.groups, self.header.pairs(), strict=True):
            for i, layer_idx in enumerate(group.layers):
                layer = cache.layers[layer_idx]
                first = layer.first_loaded(group.first, length)
                views = layer.free_views(rows, first, length)
                targets.append((layer, first, views))
                # Threads begin on the default stream: pass on the one that has filled the storage.
                on_gpu = layer.device.type == "cuda"
                stream = torch.cuda.current_stream(layer.device) if on_gpu else None
                for tensor, states in zip(pair, views, strict=True):
                    skipped = first - group.first
                    part = LayerStates(tensor, i, layer_idx, states[::repeat], skipped)
                    jobs.append((part, stream))
        with ThreadPoolExecutor(_READERS) as pool:
            shares = [jobs[i::_READERS] for i in range(_READERS)]
            sums = list(chain(*pool.map(self._read_parts, shares)))
        wrong = self.header.add_up(sums, length) != self._checksums[:, :length]
        if bool(wrong.any()):
            number, position = wrong.nonzero()[0].tolist()
            raise self._refusal(
                f"{self.header.states()[number].name} does not have its checksum at position "
                f"{position}. Copy the file again, or save its text again."
            )
        for _, _, views in targets:
            for states in views:
                states.unflatten(0, (-1, repeat))[:, 1:] = states[::repeat, None]
        for layer, first, _ in targets:
            layer.fill(rows, first, length)

    def _read_parts(self, jobs: list[tuple[LayerStates, Any]]) -> list[tuple[FileTensor, Tensor]]:
        buffer = staging(part for part, _ in jobs)
        sums = []
        for part, stream in jobs:
            with torch.no_grad(), torch.cuda.stream(stream):
                sums.append((part.tensor, part.checksums(self._read_pieces(part, buffer))))
        return sums

    def _read_pieces(self, part: LayerStates, buffer: Tensor) -> Iterator[Piece]:
        for piece in part.pieces():
            target = part.on_cpu(piece, buffer)
            offset = self._start + part.offset(piece)
            for memory in memories(target):
                self._read(offset, memory)
                offset += len(memory)
            if part.is_staged:
                piece.states.copy_(target)
            yield piece


# --- saving


def header_of(
    cache: AllocatedCache, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None
) -> Header:
    return Header(
        tokens.tolist(),
        _left_padding(tokens, mask),
        [layer.sliding_window for layer in cache.layers],
        _file_groups(cache, tokens.shape[1]),
        ModelIdentity.of(model),
        hf_static_kv.__version__,
        transformers.__version__,
    )


@torch.no_grad()
def save_cache(cache: AllocatedCache, path: str | os.PathLike[str], header: Header) -> None:
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file in it.")
    if not (folder := path.parent).is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: call os.makedirs({str(folder)!r}).")
    parts = []
    for group, pair in zip(header.groups, header.pairs(), strict=True):
        for number, tensor in enumerate(pair):
            for i, layer_idx in enumerate(group.layers):
                states = cache.layers[layer_idx].stored()[number][:, :, : tensor.shape[3]]
                parts.append(LayerStates(tensor, i, layer_idx, states))
    sums = [(part.tensor, part.checksums(part.pieces())) for part in parts]
    checksums = header.add_up(sums, header.num_tokens).numpy().tobytes()
    start = header.encode(checksums)
    with atomic_writer(path) as file:
        file.write(start)
        file.write(checksums)
        buffer = staging(parts)
        for part in parts:
            for piece in part.pieces():
                source = part.on_cpu(piece, buffer)
                if part.is_staged:
                    source.copy_(piece.states)
                for memory in memories(source):
                    file.write(memory)


def tokens_to_save(cache: AllocatedCache, known: Tensor | None, tokens: Tensor | None) -> Tensor:
    """The ids [B, n] of the first positions, the caller's or the known ones."""
    _check_kinds(cache, "saved")
    length = min(layer.length for layer in cache.layers)
    rows = cache.layers[0].batch_size
    if any(layer.was_assigned for layer in cache.layers):
        known = None
    if (ids := known if tokens is None else tokens) is None:
        raise ValueError(
            "The ids of the cached tokens are not known: pass them as tokens=... [batch, tokens]."
        )
    ids = (ids[None] if ids.ndim == 1 else ids)[:, :length].cpu()
    is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 2 or len(ids) != rows or not is_integer:
        raise ValueError(
            f"tokens are {list(ids.shape)} {ids.dtype}, and the cache holds {rows} rows of "
            f"{length} tokens. Pass what `generate` returned."
        )
    if ids.shape[1] == 0:
        raise ValueError("There are no tokens to save.")
    ids = ids.long()
    if bool((ids < 0).any()):
        row, position = (ids < 0).nonzero()[0].tolist()
        raise ValueError(
            f"tokens have the id {int(ids[row, position])} at position {position} of row {row}. "
            "Ids are 0 or more: tell left padding by attention_mask."
        )
    if known is not None and len(known) == rows:
        common = min(known.shape[1], ids.shape[1])
        if not torch.equal(ids[:, :common], known[:, :common].cpu()):
            raise ValueError("The tokens are not those that the cache was computed from.")
    return ids


def _check_kinds(cache: AllocatedCache, what: str) -> None:
    for layer_idx, layer in enumerate(cache.layers):
        if type(layer) is not StaticContiguousLayer:
            raise ValueError(
                f"Layer {layer_idx} is a {type(layer).__name__}, which cannot be {what} yet."
            )


def _left_padding(tokens: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return [0] * len(tokens)
    mask = mask[:, : tokens.shape[1]].cpu().bool()
    starts = (~mask).sum(1)
    expected = torch.arange(mask.shape[1]) >= starts[:, None]
    is_left = len(mask) == len(tokens) and torch.equal(mask, expected)
    if not is_left or int(starts.max()) == tokens.shape[1]:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, and the tokens are {list(tokens.shape)}: it "
            "must have their rows, 0 under left padding and 1 after it."
        )
    return starts.tolist()


def _file_groups(cache: AllocatedCache, length: int) -> list[FileGroup]:
    found: dict[tuple[StorageGroup, int], list[int]] = {}
    used = [(cache.layers[0].batch_size, cache.layers[0].length)]
    for layer_idx, layer in enumerate(cache.layers):
        if layer.group is None or layer.used() != used:
            raise ValueError(f"Layer {layer_idx} is in the middle of a step, or has no storage.")
        if (fewest := layer.length - layer.num_croppable) > length:
            raise ValueError(
                f"Layer {layer_idx} keeps the positions from {layer.oldest} on, too few for "
                f"{length} of {layer.length} tokens. Save at least {fewest}."
            )
        found.setdefault((layer.group, layer.oldest), []).append(layer_idx)
    groups = []
    for (storage, first), layers in found.items():
        dtypes = dtype_name(storage.dtypes[0]), dtype_name(storage.dtypes[1])
        if unknown := [name for name in dtypes if name not in DTYPES]:
            raise ValueError(
                f"Keys and values in {unknown[0]} cannot be saved, only in {', '.join(DTYPES)}."
            )
        groups.append(FileGroup(layers, storage.shape.of_a_token, dtypes, first))
    return groups


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block is done."""
    # A longer name may not fit.
    temporary = path.with_name(f".hf_static_kv.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            # Else a power cut may leave a name without its bytes.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
