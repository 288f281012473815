"""Which model the keys and values of a file belong to: its config, and a sample of every weight.

The same in another process, on another device and after `save_pretrained`: no address and no hash of Python is in it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from hf_static_kv import compat

_SAMPLED = 16  # elements of each weight
# Fields of a config that change no key and no value.
_OTHER_FIELDS = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "transformers_version",
    "use_cache",
}  # fmt: skip
# A pass depends on these attributes of an adapter, and they are no weights.
_ADAPTER_STATES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


@dataclass(frozen=True)
class ModelIdentity:
    """What a file says of the model that computed it."""

    dtype: str
    attention: str  # the name of the attention implementation
    config: str  # JSON of the fields of the text config
    weights: str  # digest of names, shapes and samples

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelIdentity":
        if (ranks := getattr(model, "tp_size", None) or 1) > 1:
            raise ValueError(f"The model is split over tp_size={ranks} ranks, whose caches go to no file yet.")
        config = model.config.get_text_config(decoder=True)
        fields = {name: value for name, value in config.to_dict().items() if name not in _OTHER_FIELDS}
        text = json.dumps(fields, sort_keys=True, default=str)
        return cls(_name(model.dtype), str(compat.attention_name(config)), text, weights_digest(model))

    def difference(self, other: "ModelIdentity") -> str | None:
        """What keeps this model from using states of the other one; None where nothing does.

        Config fields that only one of them has are those of another version of transformers.
        """
        own, others = json.loads(self.config), json.loads(other.config)
        for name in own:
            if name in others and own[name] != others[name]:
                return f"{name} of its config is {others[name]}, and this model has {own[name]}"
        if self.dtype != other.dtype:
            return f"it is in {other.dtype}, and this model is in {self.dtype}"
        if self.weights != other.weights:
            return "its weights are others"
        return None


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> str:
    """Of the names, shapes, dtypes and 16 elements of every weight and saved buffer, and of the state of adapters."""
    named = [(name, part) for name, tensor in sorted(model.state_dict().items()) for part in unwrapped(tensor)]
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in named:
        if tensor.device.type != "meta":
            by_device.setdefault(tensor.device, []).append(sample(tensor).contiguous().view(torch.uint8))
    # Read from each device at once.
    read = {device: BytesIO(torch.cat(parts).cpu().numpy().tobytes()) for device, parts in by_device.items()}
    digest = blake2b(digest_size=16)
    for name, tensor in named:
        digest.update(f"{name} {_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        if tensor.device in read:
            digest.update(read[tensor.device].read(min(_SAMPLED, tensor.numel()) * tensor.dtype.itemsize))
    digest.update(str(adapter_states(compat.all_modules(model))).encode())
    return digest.hexdigest()


def sample(tensor: Tensor) -> Tensor:
    """At most 16 elements of a tensor, evenly spread, without a copy of all of it."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot list a float8
    size, step = min(_SAMPLED, tensor.numel()), max(1, tensor.numel() // _SAMPLED)
    return tensor.as_strided((size,), (step,)) if tensor.is_contiguous() else tensor.flatten()[::step][:size]


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those inside a wrapper such as a quantised weight."""
    inner = compat.inner_tensors(tensor)
    return [tensor] if inner is None else [part for wrapped in inner for part in unwrapped(wrapped)]


def adapter_states(modules: Sequence[Module]) -> list[tuple[str, ...]]:
    """Which adapters are active, disabled, merged, and how they are scaled, for each module that has any."""
    # Not `hasattr(module, ...)`: `Module.__getattr__` is slow. A whole model has a method of this name.
    has_state = (m for m in modules if hasattr(type(m), "active_adapters") or "active_adapters" in m.__dict__)
    adapters: Iterable[Any] = (module for module in has_state if not callable(module.active_adapters))
    return [tuple(str(getattr(module, name, None)) for name in _ADAPTER_STATES) for module in adapters]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
