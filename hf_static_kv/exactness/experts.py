"""Mixtures of experts inside `exact`: an implementation for transformers' `ExpertsInterface`."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers.integrations.moe import ExpertsInterface

from hf_static_kv import compat
from hf_static_kv.kernels.gradients import differentiable
from hf_static_kv.kernels.invariant_linear import expert_linear, expert_linear_plain
from hf_static_kv.patching import replaced_function

EXACT_EXPERTS_NAME = "static_contiguous_exact"
IS_BALANCING_LOSS: ContextVar[bool] = ContextVar("is_balancing_loss", default=False)
_BALANCING_LOSS = "load_balancing_loss_func"  # of the models of transformers that have one


def exact_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum of the chosen experts of each token, in the order in which they were chosen.

    hidden_states: [M, K]   top_k_index, top_k_weights: [M, k]
    """
    if compat.is_expert_parallel(module):
        raise ValueError(
            "exact has no batch-invariant sum over the processes of an expert parallel model."
        )
    k = top_k_index.shape[1]
    experts = top_k_index.reshape(-1)
    # Each token k times in succession.
    states = hidden_states[:, None].expand(-1, k, -1).reshape(len(experts), -1)
    states = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", states, experts)
    states = compat.apply_gate(module, states) if module.has_gate else module.act_fn(states)
    states = _linear(module, "down_proj", states, experts)
    if getattr(module, "has_post_expert_norm", False):
        states = module.post_expert_norm(states)
    weighted = states.view(len(hidden_states), k, -1).float() * top_k_weights[..., None].float()
    total = weighted[:, 0]
    for i in range(1, k):
        total = total + weighted[:, i]
    return total.to(hidden_states.dtype)


def _linear(module: Any, name: str, states: Tensor, experts: Tensor) -> Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None

    def by_expert(function: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        return function(states, weight, experts, bias)

    operation = partial(by_expert, expert_linear)
    plain = partial(by_expert, expert_linear_plain)
    return differentiable(operation, plain, states, weight, bias)  # type: ignore[no-any-return]


def parameter_adapters(model: Module) -> dict[str, Any]:
    """PEFT's LoRA adapters of parameters, such as stacked experts, by module name."""
    return {
        name: part
        for name, part in model.named_modules()
        if hasattr(part, "parameter_name") and hasattr(part, "lora_A")
    }


def refuse_active(adapters: dict[str, Any]) -> None:
    """Refuse `parameter_adapters` in use: each pass would compute their weights anew."""
    for name, adapter in adapters.items():
        is_in_use = any(active in adapter.lora_A for active in adapter.active_adapters)
        if is_in_use and not adapter.merged and not adapter.disable_adapters:
            raise ValueError(
                f"{name} has a LoRA adapter of its parameter {adapter.parameter_name}, and exact "
                "has no kernel for adapters of stacked experts. Merge the adapter "
                "(`merge_adapter()` of PEFT), or leave experts out of target_modules and "
                "target_parameters."
            )


def ordinary_balancing_loss(model: Module) -> AbstractContextManager[None]:
    """Leave the auxiliary loss alone: it is a mean over tokens, and no token's own."""
    modules = {type(module).__module__ for module in model.modules()}
    owners = [module for module in modules if hasattr(sys.modules.get(module), _BALANCING_LOSS)]
    return replaced_function(_BALANCING_LOSS, dict.fromkeys(owners, _balancing_loss))


def _balancing_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = IS_BALANCING_LOSS.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        IS_BALANCING_LOSS.reset(token)


ExpertsInterface.register(EXACT_EXPERTS_NAME, exact_experts)
