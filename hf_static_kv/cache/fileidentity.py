"""Who a model is in files, the same in every process: config, settings, samples of weights."""

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.identity import OF_TORCH
from hf_static_kv.cache.ranks import num_ranks
from hf_static_kv.cache.samples import NUM_SAMPLED, sample
from hf_static_kv.cache.values import Values, dtype_name, unwrapped

# Attributes that tell where or how a model runs, not what it computes.
_OF_A_LOADED_MODEL = {"generation_config", "hf_device_map", "name_or_path", "warnings_issued"}
_OF_HOOKS = {"_hf_hook", "_old_forward", "forward"}
_OF_TRAINING = {"training", "padding_idx"}
# Fields of a config that change no key and no value.
_OTHER_FIELDS = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class ModelIdentity:
    """What a file says of the model that computed it."""

    dtype: str
    attention: str  # the name of the attention implementation
    config: str  # JSON of the fields of the text config
    weights: str  # digest of names, shapes and samples
    settings: str = "{}"  # JSON of the attributes of modules, by their names

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelIdentity":
        if (ranks := num_ranks(model)) > 1:
            raise ValueError(f"The caches of tp_size={ranks} ranks go to no file yet.")
        config = model.config.get_text_config(decoder=True)
        fields = {name: own for name, own in config.to_dict().items() if name not in _OTHER_FIELDS}
        text = json.dumps(fields, sort_keys=True, default=str)
        attention = str(compat.attention_name(config))
        dtype = dtype_name(model.dtype)
        return cls(dtype, attention, text, weights_digest(model), _settings(model))

    def difference(self, other: "ModelIdentity") -> str | None:
        """What keeps this model from using states of the other one; None if nothing does.

        Fields that only one has do not count: transformers adds some over time.
        """
        own = json.loads(self.config)
        others = json.loads(other.config)
        for name in own:
            if name in others and own[name] != others[name]:
                return f"{name} of its config is {others[name]}, and this model has {own[name]}"
        if self.dtype != other.dtype:
            return f"it is in {other.dtype}, and this model is in {self.dtype}"
        if self.weights != other.weights:
            return "its weights are others"
        if self.settings == other.settings:
            return None
        own = json.loads(self.settings)
        others = json.loads(other.settings)
        for name in (*own, *others):
            mine, theirs = (found.get(name, found.get(_common(name))) for found in (own, others))
            if mine is not None and theirs is not None and mine != theirs:
                return f"{name} is {_brief(theirs)}, and in this model {_brief(mine)}"
        return None


def _settings(model: PreTrainedModel) -> str:
    """The attributes of the modules but weights and configs, as JSON; once if layers are alike."""
    values = Values(compat.all_modules(model), is_portable=True)
    found: dict[str, str] = {}
    texts: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name in OF_TORCH or _is_of_a_process(module, name, value):
                continue
            full_name = f"{path}.{name}".lstrip(".")
            text = json.dumps(values.of_attribute(value), sort_keys=True, default=_json_of)
            found[full_name] = text
            texts.setdefault(_common(full_name), set()).add(text)
    kept = {}
    for name, text in found.items():
        is_alike = len(texts[_common(name)]) == 1
        kept[_common(name) if is_alike else name] = json.loads(text)
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def _common(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _is_of_a_process(module: Module, name: str, value: Any) -> bool:
    is_model = isinstance(module, PreTrainedModel)
    is_hooked = "_hf_hook" in module.__dict__
    return (
        (is_model and (name.startswith("_") or name in _OF_A_LOADED_MODEL))
        or (is_hooked and name in _OF_HOOKS)
        or name in _OF_TRAINING
        or isinstance(value, (PreTrainedConfig, torch.device, Tensor))
    )


def _json_of(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(json.dumps(item, sort_keys=True, default=_json_of) for item in value)
    if isinstance(value, CodeType):
        return value.co_name
    if isinstance(value, bytes):
        return value.hex()
    return getattr(value, "__qualname__", str(value))


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> str:
    """A digest of name, shape, dtype and 16 elements of every weight and saved buffer."""
    weights = sorted(model.state_dict().items())
    named = [(name, part) for name, tensor in weights for part in unwrapped(tensor)]
    samples: dict[torch.device, list[Tensor]] = {}
    for _, tensor in named:
        if tensor.device.type != "meta":
            sampled = sample(tensor).contiguous().view(torch.uint8)
            samples.setdefault(tensor.device, []).append(sampled)
    read = {
        device: BytesIO(torch.cat(parts).cpu().numpy().tobytes())
        for device, parts in samples.items()
    }
    digest = blake2b(digest_size=16)
    for name, tensor in named:
        digest.update(f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        if tensor.device in read:
            size = min(NUM_SAMPLED, tensor.numel()) * tensor.dtype.itemsize
            digest.update(read[tensor.device].read(size))
    # Files of version 0.2 have this for a model without adapters.
    digest.update(b"[]")
    return digest.hexdigest()
