"""Whether `exact` computes the model: a few tokens run in an ordinary pass before its first use.

`exact` knows norms, rotations and MLPs by trial. What a trial does not see (a clamp beyond its
inputs) shows here.
"""

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_static_kv import compat

_PROMPTS = 3
_TOKENS = 5
# Of the largest logit; clamps that a trial did not see changed logits by 0.4 to 1.2 of it.
_COARSE = 0.2
_CHECKED: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()


def trial_logits(model: PreTrainedModel) -> Tensor | None:
    """Logits [prompts, ...] of random tokens in one pass without a cache.

    None if the model was checked before, or cannot be: it needs other inputs than tokens, hooks
    would see them, or a part of it is not in memory.
    """
    is_there = all(parameter.device.type != "meta" for parameter in model.parameters())
    if _CHECKED.get(model) == _kind(model) or not is_there or compat.has_hooks(model.modules()):
        return None
    device = model.device
    generator = torch.Generator().manual_seed(0)
    with (
        suppress(Exception),
        torch.no_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        size = model.config.get_text_config().vocab_size
        ids = torch.randint(size, (_PROMPTS, _TOKENS), generator=generator, device="cpu").to(device)
        # Not called: it may be compiled.
        output: Any = model.forward(ids, use_cache=False, return_dict=True)
        logits: Tensor = output.get("logits", output.get("last_hidden_state"))
        return logits.float() if logits.isfinite().all() else None
    return None


def refuse_other_logits(model: PreTrainedModel, ordinary: Tensor | None) -> None:
    """Inside `exact`: raise if rounding does not explain how far its logits are from `ordinary`.

    In float32 the bound is sqrt(eps) times the largest logit. In half precision it is a coarse
    share of that, since a float32 copy of the model may not fit. One prompt must agree: by rounding
    a router may choose another expert.
    """
    inside = None if ordinary is None else trial_logits(model)
    if ordinary is not None and inside is not None:
        largest = float(ordinary.abs().max())
        difference = float((inside - ordinary).abs().flatten(1).amax(dim=1).min())
        if difference > (bound := _rounding(model) * largest):
            raise ValueError(
                f"exact does not compute what {type(model).__name__} computes: logits of "
                f"{_TOKENS} random tokens differ by {difference:.2g} from an ordinary pass. The "
                f"largest is {largest:.2g}, and rounding explains {bound:.2g}. Use this model "
                "without exact, and report it with its config."
            )
    _CHECKED[model] = _kind(model)


def _kind(model: PreTrainedModel) -> tuple[Any, ...]:
    """Changes if parts of the model are replaced or added."""
    return type(model), sum(1 for _ in model.modules())


def _rounding(model: PreTrainedModel) -> float:
    """What rounding may change, as a share of the largest logit."""
    is_tf32 = model.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    is_coarse = is_tf32 or model.dtype != torch.float32
    return _COARSE if is_coarse else float(torch.finfo(torch.float32).eps ** 0.5)
