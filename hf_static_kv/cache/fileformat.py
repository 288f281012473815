"""The format of a cache file: a safetensors header, its parts as plain values, and the checksums.

```
8 bytes    length of the header
header     JSON: "__metadata__" holds everything but the states as strings, then the table of tensors
checksums  int64 [tensors, n]: one for each tensor and position
keys.0     [L, B, H, n, Dk]      group 0: L layers of one shape and dtype, B batch rows, n tokens
values.0   [L, B, H, n, Dv]      and so on, two tensors for each group
```

With a `kv_dtype` a tensor has codes and scales, [L, B, H, n, D + 4] in int8.

A group of compact layers has the positions from `first` on, and checksums of 0
before. `digest` covers the header and the checksums.
"""

import json
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b, shake_128
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_static_kv.cache.codes import CODED
from hf_static_kv.cache.fileidentity import ModelIdentity
from hf_static_kv.cache.storage import LayerShape
from hf_static_kv.cache.values import dtype_name

FORMAT = "hf_static_kv"
VERSION = 1
CODED_VERSION = 2  # with codes in the place of states
MAX_HEADER_BYTES = 32 << 20  # about four million token ids
MAX_CHECKSUM_BYTES = 512 << 20  # two million token ids in 16 groups
CHECKSUM_BYTES = 8
# By torch's name, that of safetensors.
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_WORDS = (torch.int32, torch.int16, torch.int8)
_TENSOR_DTYPES = {**DTYPES, "int64": "I64", "int8": "I8"}
_SHAPE = ("num_kv_heads", "key_head_dim", "value_head_dim")
_LISTS = ("tokens", "left_padding", "sliding_windows", "groups")  # as JSON in strings
_VERSIONS = ("library_version", "transformers_version")


class FileTensor(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int  # from the end of the header, in bytes
    num_bytes: int
    first: int = 0  # the position of the first states


@dataclass(frozen=True)
class FileGroup:
    layers: list[int]
    shape: LayerShape
    dtypes: tuple[str, str]  # of key states, of value states
    first: int = 0  # the oldest position that is saved

    @classmethod
    def parse(cls, values: Any) -> "FileGroup":
        names = {field.name for field in fields(cls)}
        _check(isinstance(values, dict) and set(values) == names, "a group")
        shape = values["shape"]
        _check(isinstance(shape, dict) and set(shape) - {"kv_dtype"} == set(_SHAPE), "a shape")
        shape = dict(shape)
        kv_dtype = shape.pop("kv_dtype", None)
        _check(kv_dtype in [None, *CODED], "the dtype of codes")
        layers = values["layers"]
        first = values["first"]
        are_sizes = _are_ints([*shape.values()], 1)
        _check(are_sizes and _are_ints(layers, 0) and _are_ints([first], 0), "a group")
        dtypes = values["dtypes"]
        # `[*DTYPES]`: a list in the place of a name has no hash.
        are_names = isinstance(dtypes, list) and all(name in [*DTYPES] for name in dtypes)
        _check(are_names and len(dtypes) == 2, "the dtypes")
        own = LayerShape(**shape, kv_dtype=kv_dtype)
        return cls(layers, own, (dtypes[0], dtypes[1]), first)


@dataclass(frozen=True)
class Header:
    """Everything that a file says but its states. What `parse` would refuse is not saved."""

    tokens: list[list[int]]  # [B, n], left padding included
    left_padding: list[int]  # positions before the first token of each batch row
    sliding_windows: list[int | None]  # of each layer
    groups: list[FileGroup]
    model: ModelIdentity
    library_version: str
    transformers_version: str

    def __post_init__(self) -> None:
        tokens = self.tokens
        are_rows = isinstance(tokens, list) and bool(tokens)
        _check(are_rows and all(_are_ints(row, 0) for row in tokens), "the tokens")
        are_even = len({len(row) for row in tokens}) == 1
        _check(are_even and max(map(max, tokens)) < 1 << 63, "the tokens")
        padding = self.left_padding
        _check(_are_ints(padding, 0) and len(padding) == len(tokens), "the left padding")
        _check(max(padding) < len(tokens[0]), "the left padding")
        windows = self.sliding_windows
        _check(isinstance(windows, list), "the windows")
        _check(_are_ints([w for w in windows if w is not None] or [1], 1), "the windows")
        layers = [layer for group in self.groups for layer in group.layers]
        _check(bool(layers) and sorted(layers) == list(range(len(windows))), "the layers")
        _check(len({group.shape.kv_dtype for group in self.groups}) == 1, "the dtype of codes")
        for group in self.groups:
            whole = [layer for layer in group.layers if windows[layer] is None]
            if group.first and whole:
                raise ValueError(
                    f"its layer {whole[0]} begins at position {group.first} and has no sliding "
                    "window"
                )
        _check(self.min_tokens <= self.num_tokens, "the first position of a group")
        if self.checksum_bytes > MAX_CHECKSUM_BYTES:
            raise ValueError(
                f"checksums of {self.checksum_bytes:,} bytes are more than the "
                f"{MAX_CHECKSUM_BYTES:,} of a file. Save fewer than {self.num_tokens:,} tokens"
            )

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens[0])

    @property
    def kv_dtype(self) -> str | None:
        """Of codes in the place of states."""
        return self.groups[0].shape.kv_dtype

    @property
    def _version(self) -> str:
        return str(VERSION if self.kv_dtype is None else CODED_VERSION)

    @property
    def min_tokens(self) -> int:
        """The fewest tokens that can be loaded: compact layers lack what fewer would see."""
        windows = self.sliding_windows
        fewest = [
            group.first + max(windows[layer] or 1 for layer in group.layers) - 1
            for group in self.groups
            if group.first
        ]
        return max([1, *fewest])

    def states(self) -> list[FileTensor]:
        found = []
        offset = self.checksum_bytes
        for number, group in enumerate(self.groups):
            dtypes = getattr(torch, group.dtypes[0]), getattr(torch, group.dtypes[1])
            length = self.num_tokens - group.first
            rows = [len(group.layers), self.num_rows, group.shape.num_kv_heads, length]
            stored = group.shape.stored(dtypes)
            for name, (dim, dtype) in zip(("keys", "values"), stored, strict=True):
                size = prod(rows) * dim * dtype.itemsize
                name = f"{name}.{number}"
                found.append(FileTensor(name, dtype, [*rows, dim], offset, size, group.first))
                offset += size
        return found

    def pairs(self) -> list[list[FileTensor]]:
        states = self.states()
        return [states[i : i + 2] for i in range(0, len(states), 2)]

    def add_up(self, sums: list[tuple[FileTensor, Tensor]], length: int) -> Tensor:
        """The checksums [tensors, length] of a file from those [length - first] of its layers."""
        names = [tensor.name for tensor in self.states()]
        totals = torch.zeros(len(names), length, dtype=torch.int64)
        for tensor, own in sums:
            totals[names.index(tensor.name), tensor.first :] += own.cpu()
        return totals

    @property
    def checksum_bytes(self) -> int:
        return 2 * len(self.groups) * self.num_tokens * CHECKSUM_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes after the header."""
        return self.checksum_bytes + sum(tensor.num_bytes for tensor in self.states())

    def encode(self, checksums: bytes | bytearray) -> bytes:
        """The start of a file, up to the checksums."""
        metadata = {"format": FORMAT, "format_version": self._version, "digest": ""}
        lists = {name: getattr(self, name) for name in _LISTS}
        lists["groups"] = [asdict(group) for group in self.groups]
        for group in lists["groups"]:
            del group["shape"]["window"]
            if self.kv_dtype is None:
                del group["shape"]["kv_dtype"]
        metadata |= {name: json.dumps(own) for name, own in lists.items()}
        metadata |= asdict(self.model)
        metadata |= {name: getattr(self, name) for name in _VERSIONS}
        content = {"__metadata__": metadata, **self._table()}
        encoded = _signed(json.dumps(content, separators=(",", ":")).encode(), checksums)
        if (length := len(encoded) - 8) > MAX_HEADER_BYTES:
            raise ValueError(
                f"A header of {length:,} bytes is more than the {MAX_HEADER_BYTES:,} of a file: save "
                f"fewer than {self.num_rows:,} rows of {self.num_tokens:,} tokens."
            )
        return encoded

    def _table(self) -> dict[str, Any]:
        shape = [2 * len(self.groups), self.num_tokens]
        checksums = FileTensor("checksums", torch.int64, shape, 0, self.checksum_bytes)
        table = {}
        for tensor in (checksums, *self.states()):
            table[tensor.name] = {
                "dtype": _TENSOR_DTYPES[dtype_name(tensor.dtype)],
                "shape": tensor.shape,
                "data_offsets": [tensor.offset, tensor.offset + tensor.num_bytes],
            }
        return table

    @classmethod
    def parse(cls, text: bytes) -> "Header":
        metadata = _metadata(json.loads(text))
        values: dict[str, Any] = {name: json.loads(metadata[name]) for name in _LISTS}
        groups = values["groups"]
        _check(isinstance(groups, list) and bool(groups), "the groups")
        names = [field.name for field in fields(ModelIdentity)]
        identity = ModelIdentity(**{name: metadata[name] for name in names if name in metadata})
        for name in ("config", "settings"):
            _check(isinstance(json.loads(getattr(identity, name)), dict), f"the {name}")
        values["groups"] = [FileGroup.parse(group) for group in groups]
        values |= {name: metadata[name] for name in _VERSIONS}
        header = cls(model=identity, **values)
        _check(metadata["format_version"] == header._version, "the dtype of codes")
        return header

    def is_told_by(self, text: bytes, checksums: bytes | bytearray) -> bool:
        content = json.loads(text)
        digest = _metadata(content)["digest"]
        unsigned = text.rstrip(b" ").replace(_digest(digest), _digest(""), 1)
        del content["__metadata__"]
        return _signed(unsigned, checksums)[8:] == text and content == self._table()


def _signed(unsigned: bytes, checksums: bytes | bytearray) -> bytes:
    """The length of a header and its text, with the digest of the text without it."""
    digest = blake2b(unsigned, digest_size=16)
    digest.update(checksums)
    text = unsigned.replace(_digest(""), _digest(digest.hexdigest()), 1)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest(digest: str) -> bytes:
    # Quotation marks inside of strings have a backslash.
    return f'"digest":"{digest}"'.encode()


def _metadata(content: Any) -> dict[str, str]:
    """The strings of a header. A later format is named before anything else."""
    metadata = content.get("__metadata__") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError("it is no file of `StaticContiguousCache.save`")
    version = metadata.get("format_version")
    if version not in (str(VERSION), str(CODED_VERSION)):
        raise ValueError(
            f"its format is {version}, of hf_static_kv {metadata.get('library_version')}; this one "
            f"reads formats {VERSION} and {CODED_VERSION}. Install a newer hf_static_kv"
        )
    # Older files have no settings.
    names = {field.name for field in fields(ModelIdentity)} - {"settings"}
    names |= {"digest", *_LISTS, *_VERSIONS}
    are_strings = all(isinstance(value, str) for value in metadata.values())
    _check(names <= metadata.keys() and are_strings, "the strings")
    return metadata


def _are_ints(values: Any, least: int) -> bool:
    return isinstance(values, list) and set(map(type, values)) == {int} and min(values) >= least


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"{what} in its header cannot be read")


# --- checksums


def checksum_weights(name: str, layer_idx: int, states: Tensor) -> Tensor:
    """Odd numbers [B, H, W] below 2^32 for the words of states [B, H, n, D], by SHAKE-128."""
    rows, heads, _, dim = states.shape
    words = dim * states.dtype.itemsize // _word(states).itemsize
    drawn = shake_128(f"{name} {layer_idx}".encode()).digest(4 * rows * heads * words)
    numbers = np.frombuffer(drawn, "<u4").astype(np.int64) | 1
    return torch.from_numpy(numbers.reshape(rows, heads, words)).to(states.device)


def position_checksums(states: Tensor, weights: Tensor) -> Tensor:
    """Sum of the words [H, n, W] of states times weights [H, W], modulo 2^64: int64 [n].

    A changed word changes the sum, for its weight is odd. Other changes are
    missed with a probability below 2^-30 at each position.
    """
    words = states.view(_word(states))
    if not words.is_cpu:
        return (words * weights[:, None]).sum((0, 2))
    # numpy makes no tensor of the products.
    return torch.from_numpy(np.einsum("hnw,hw->n", words.numpy(), weights.numpy(), dtype=np.int64))


def _word(states: Tensor) -> torch.dtype:
    """The largest integer that divides the bytes of a head."""
    num_bytes = states.shape[-1] * states.dtype.itemsize
    return next(word for word in _WORDS if num_bytes % word.itemsize == 0)
