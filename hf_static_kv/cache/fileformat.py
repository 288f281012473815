"""The format of a cache file: a safetensors header, its parts as plain values, and the checksums.

```
8 bytes    length of the header
header     JSON: "__metadata__" holds everything but the states as strings, then comes the table of tensors
checksums  int64 [tensors, n]: one for each tensor and position
keys.0     [L, B, H, n, Dk]      group 0: L layers of one shape and dtype, B batch rows, H KV heads, n tokens
values.0   [L, B, H, n, Dv]      and so on, two tensors for each group
```

A group of compact layers has the positions from `first` on: n - `first` of them, and checksums of 0
before.

`digest` covers every byte of the header, and the checksums; a checksum covers what one tensor has
for one position.
"""

import json
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b, shake_128
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_static_kv.cache.identity import ModelIdentity
from hf_static_kv.cache.storage import LayerShape

FORMAT, VERSION = "hf_static_kv", 1
MAX_HEADER_BYTES = 32 << 20  # about four million token ids
MAX_CHECKSUM_BYTES = 512 << 20  # two million token ids in 16 groups
CHECKSUM_BYTES = 8
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
}  # torch's name, that of safetensors
_WORDS = (torch.int32, torch.int16, torch.int8)
_SHAPE = ("num_kv_heads", "key_head_dim", "value_head_dim")


class FileTensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    offset: int  # from the end of the header, in bytes
    num_bytes: int
    first: int = 0  # the position of the first states


@dataclass(frozen=True)
class FileGroup:
    """Layers of one shape and dtype, which have one pair of tensors in a file."""

    layers: list[int]
    shape: LayerShape
    dtypes: tuple[str, str]  # of keys, of values
    first: int = 0  # the oldest position that is saved

    @classmethod
    def parse(cls, values: Any) -> "FileGroup":
        _check(
            isinstance(values, dict) and set(values) == {field.name for field in fields(cls)},
            "a group",
        )
        shape, layers, dtypes, first = (
            values["shape"],
            values["layers"],
            values["dtypes"],
            values["first"],
        )
        _check(isinstance(shape, dict) and set(shape) == set(_SHAPE), "a shape")
        _check(
            _are_ints([*shape.values()], 1) and _are_ints(layers, 0) and _are_ints([first], 0),
            "the numbers of a group",
        )
        # Not `name in DTYPES`: a list in the place of a name has no hash.
        _check(
            isinstance(dtypes, list) and len(dtypes) == 2 and all(n in [*DTYPES] for n in dtypes),
            "the dtypes",
        )
        return cls(layers, LayerShape(**shape), (dtypes[0], dtypes[1]), first)

    def as_dict(self) -> dict[str, Any]:
        """What `parse` reads. Whether layers are compact is not the file's affair."""
        return {**asdict(self), "shape": {name: getattr(self.shape, name) for name in _SHAPE}}


@dataclass(frozen=True)
class Header:
    """Everything that a file says but its states.

    Values that `parse` would refuse are refused here: none is saved.
    """

    tokens: list[list[int]]  # [B, n], left padding included
    left_padding: list[int]  # positions before the first token of each batch row
    sliding_windows: list[int | None]  # of each layer
    groups: list[FileGroup]
    model: ModelIdentity
    library_version: str
    transformers_version: str

    def __post_init__(self) -> None:
        tokens, padding, windows = self.tokens, self.left_padding, self.sliding_windows
        _check(
            isinstance(tokens, list) and bool(tokens) and all(_are_ints(row, 0) for row in tokens),
            "the tokens",
        )
        _check(
            len({len(row) for row in tokens}) == 1 and max(map(max, tokens)) < 1 << 63, "the tokens"
        )
        _check(_are_ints(padding, 0) and len(padding) == len(tokens), "the left padding")
        _check(max(padding) < len(tokens[0]), "the left padding")
        _check(
            isinstance(windows, list)
            and _are_ints([w for w in windows if w is not None] or [1], 1),
            "the windows",
        )
        layers = [layer for group in self.groups for layer in group.layers]
        _check(bool(layers) and sorted(layers) == list(range(len(windows))), "the layers")
        for group in self.groups:
            _check(group.first <= self.num_tokens, "the first position of a group")
            whole = [layer for layer in group.layers if windows[layer] is None]
            if group.first and whole:
                raise ValueError(
                    f"its layer {whole[0]} begins at position {group.first} and has no sliding "
                    "window: the positions before that are missing"
                )
        _check(self.min_tokens <= self.num_tokens, "the first position of a group")
        if self.checksum_bytes > MAX_CHECKSUM_BYTES:
            raise ValueError(
                f"checksums of {self.checksum_bytes:,} bytes are more than the "
                f"{MAX_CHECKSUM_BYTES:,} that a file may have. Save fewer than "
                f"{self.num_tokens:,} tokens"
            )

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens[0])

    @property
    def min_tokens(self) -> int:
        """The fewest tokens that can be loaded: compact layers lack what fewer would see."""
        layers = (
            (group.first, self.sliding_windows[i]) for group in self.groups for i in group.layers
        )
        return max((first + (window or 1) - 1 for first, window in layers if first), default=1)

    def is_in(self, dtype: torch.dtype) -> bool:
        """Whether all keys and values are of this dtype."""
        return all(entry.dtype == dtype for entry in self.entries()[1:])

    def entries(self) -> list[FileTensor]:
        """The tensors in the order of the file."""
        found = [
            FileTensor(
                "checksums",
                torch.int64,
                [2 * len(self.groups), self.num_tokens],
                0,
                self.checksum_bytes,
            )
        ]
        for number, group in enumerate(self.groups):
            dims = (group.shape.key_head_dim, group.shape.value_head_dim)
            for name, dim, dtype_name in zip(("keys", "values"), dims, group.dtypes, strict=True):
                length = self.num_tokens - group.first
                shape = [len(group.layers), self.num_rows, group.shape.num_kv_heads, length, dim]
                dtype, offset = getattr(torch, dtype_name), found[-1].offset + found[-1].num_bytes
                num_bytes = prod(shape) * dtype.itemsize
                found.append(
                    FileTensor(f"{name}.{number}", dtype, shape, offset, num_bytes, group.first)
                )
        return found

    def pairs(self) -> list[list[FileTensor]]:
        """Keys and values of each group."""
        entries = self.entries()[1:]
        return [entries[i : i + 2] for i in range(0, len(entries), 2)]

    def add_up(self, sums: list[tuple[FileTensor, Tensor]], length: int) -> Tensor:
        """The checksums [tensors, length] of a file from those of its layers, [length - first]."""
        names = [entry.name for entry in self.entries()[1:]]
        totals = torch.zeros(len(names), length, dtype=torch.int64)
        for entry, own in sums:
            totals[names.index(entry.name), entry.first :] += own.cpu()
        return totals

    @property
    def checksum_bytes(self) -> int:
        return 2 * len(self.groups) * self.num_tokens * CHECKSUM_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes after the header."""
        last = self.entries()[-1]
        return last.offset + last.num_bytes

    def encode(self, checksums: bytes | bytearray) -> bytes:
        """The start of a file, up to its first tensor.

        Its length does not depend on the checksums.
        """
        own = {
            "tokens": self.tokens,
            "left_padding": self.left_padding,
            "sliding_windows": self.sliding_windows,
        }
        own["groups"] = [group.as_dict() for group in self.groups]
        metadata = {"format": FORMAT, "format_version": str(VERSION), "digest": ""}
        metadata |= {name: json.dumps(value) for name, value in own.items()} | asdict(self.model)
        metadata |= {
            "library_version": self.library_version,
            "transformers_version": self.transformers_version,
        }
        content = {"__metadata__": metadata, **self._table()}
        encoded = _signed(json.dumps(content, separators=(",", ":")).encode(), checksums)
        if (length := len(encoded) - 8) > MAX_HEADER_BYTES:
            raise ValueError(
                f"A header of {length:,} bytes is more than the {MAX_HEADER_BYTES:,} that a file "
                f"may have: it has {self.num_rows:,} rows of {self.num_tokens:,} tokens. Save "
                "fewer tokens or fewer rows."
            )
        return encoded

    def _table(self) -> dict[str, Any]:
        """The tensors as a safetensors header tells of them."""
        names = {**DTYPES, "int64": "I64"}
        return {
            entry.name: {
                "dtype": names[str(entry.dtype).removeprefix("torch.")],
                "shape": entry.shape,
                "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
            }
            for entry in self.entries()
        }

    @classmethod
    def parse(cls, text: bytes) -> "Header":
        """The header of a file; a `ValueError` names what is wrong with it."""
        content = json.loads(text)
        metadata = _metadata(content)
        windows, padding = (
            json.loads(metadata[name]) for name in ("sliding_windows", "left_padding")
        )
        tokens, groups = (json.loads(metadata[name]) for name in ("tokens", "groups"))
        _check(isinstance(groups, list) and bool(groups), "the groups")
        identity = ModelIdentity(
            **{f.name: metadata[f.name] for f in fields(ModelIdentity) if f.name in metadata}
        )
        for name in ("config", "settings"):
            _check(isinstance(json.loads(getattr(identity, name)), dict), f"the {name}")
        versions = metadata["library_version"], metadata["transformers_version"]
        return cls(
            tokens,
            padding,
            windows,
            [FileGroup.parse(group) for group in groups],
            identity,
            *versions,
        )

    def is_told_by(self, text: bytes, checksums: bytes | bytearray) -> bool:
        """Whether no byte of the text or of the checksums has changed, and its tensors are those of
        this header.
        """
        digest = _metadata(content := json.loads(text))["digest"]
        unsigned = text.rstrip(b" ").replace(_digest(digest), _digest(""), 1)
        told = {name: content[name] for name in content if name != "__metadata__"}
        return _signed(unsigned, checksums)[8:] == text and told == self._table()


def _signed(unsigned: bytes, checksums: bytes | bytearray) -> bytes:
    """The length of a header and its text, with the digest of the text without it."""
    digest = blake2b(unsigned, digest_size=16)
    digest.update(checksums)
    text = unsigned.replace(_digest(""), _digest(digest.hexdigest()), 1)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest(digest: str) -> bytes:
    return f'"digest":"{digest}"'.encode()  # quotation marks inside of strings have a backslash


def _metadata(content: Any) -> dict[str, str]:
    """The strings of a header.

    A format of a later version is named before anything else is looked at.
    """
    metadata = content.get("__metadata__") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError("it is no file of `StaticContiguousCache.save`")
    version = metadata.get("format_version")
    if version != str(VERSION):
        written = f"hf_static_kv {metadata.get('library_version')}"
        raise ValueError(
            f"its format is {version}, of {written}; this one reads format {VERSION}. Install a "
            "newer hf_static_kv"
        )
    names = {
        "digest",
        "tokens",
        "left_padding",
        "sliding_windows",
        "groups",
        "library_version",
        "transformers_version",
    }
    names |= {field.name for field in fields(ModelIdentity)} - {
        "settings"
    }  # which older files do not have
    _check(
        names <= metadata.keys() and all(isinstance(value, str) for value in metadata.values()),
        "the strings",
    )
    return metadata


def _are_ints(values: Any, least: int) -> bool:
    """Whether this is a list of at least one int, none of them below `least`."""
    return isinstance(values, list) and set(map(type, values)) == {int} and min(values) >= least


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"{what} in its header cannot be read")


# --- checksums


def checksum_weights(name: str, layer_idx: int, states: Tensor) -> Tensor:
    """Odd numbers [B, H, W] below 2^32 for the W words of states [B, H, n, D]:

    from SHAKE-128 of the layer's name.
    """
    rows, heads, _, dim = states.shape
    words = dim * states.dtype.itemsize // _word(states).itemsize
    drawn = shake_128(f"{name} {layer_idx}".encode()).digest(4 * rows * heads * words)
    numbers = np.frombuffer(drawn, "<u4").astype(np.int64) | 1
    return torch.from_numpy(numbers.reshape(rows, heads, words)).to(states.device)


def position_checksums(states: Tensor, weights: Tensor) -> Tensor:
    """Sum of the words [H, n, W] of states [H, n, D] times their weights [H, W], modulo 2^64: int64
    [n].

    A changed word changes the sum, for its weight is odd. Any other change is missed with a
    probability below 2^-30 at each position that it touches. Sums of integers are the same on every
    device.
    """
    words = states.view(_word(states))
    if not words.is_cpu:
        return (words * weights[:, None]).sum((0, 2))
    # numpy makes no tensor of the products, whose memory would take longer than they do.
    return torch.from_numpy(np.einsum("hnw,hw->n", words.numpy(), weights.numpy(), dtype=np.int64))


def _word(states: Tensor) -> torch.dtype:
    """The largest integer that divides the bytes of a head: of 4 bytes but for odd dims."""
    num_bytes = states.shape[-1] * states.dtype.itemsize
    return next(word for word in _WORDS if num_bytes % word.itemsize == 0)
