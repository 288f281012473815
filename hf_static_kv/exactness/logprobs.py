"""Log-probabilities of tokens by batch-invariant operations, alike in generation and in training.

    selected_logprobs(logits, tokens)       of logits that are there
    token_logprobs(model, sequences)        of whole sequences, by one pass of the model

Inside `exact` both give the same bits for the same tokens, whatever batch, padding or cache the
logits come from.
"""

from contextlib import ExitStack
from inspect import signature
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint

from hf_static_kv import patching
from hf_static_kv.compat import write_count
from hf_static_kv.exactness.exact import BatchInvariantMode
from hf_static_kv.program.shadow import shadow_of

_MAX_LOGITS_BYTES = 1 << 28  # of the logits of one chunk, in float32


def selected_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at these tokens, in float32.

    logits: [..., V]   tokens: [...], int64   result: [...]
    """
    if logits.shape[:-1] != tokens.shape:
        shapes = f"logits {tuple(logits.shape)} and tokens {tuple(tokens.shape)}"
        raise ValueError(f"{shapes} do not fit: [..., V] and [...].")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    with BatchInvariantMode():  # type: ignore[no-untyped-call]
        logprobs = (logits.float() / temperature).log_softmax(dim=-1)
        return logprobs.gather(-1, tokens[..., None])[..., 0]


def token_logprobs(
    model: Any,
    sequences: Tensor,
    attention_mask: Tensor | None = None,
    *,
    prompt_len: int = 1,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities [B, T - prompt_len] of tokens, given all tokens before them, in float32.

    Args:
        sequences: [B, T], left-padded prompts and what follows.
        attention_mask: [B, T], or that of the prompts, [B, prompt_len]; None: no padding.
        prompt_len: where the first of these tokens stands.
        temperature: divides the logits.

    Gradients flow. The logits of all tokens are never held at once: the model's head runs over a
    chunk of tokens at a time, and again over each chunk in the backward pass. Padding has numbers
    without a meaning.

    >>> from hf_static_kv import exact, selected_logprobs
    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model, prompt = random_model(tiny_config("llama"), dtype=torch.bfloat16), torch.tensor([[5, 6, 7, 8]])
    >>> with exact(model):
    ...     how = {"output_logits": True, "return_dict_in_generate": True}
    ...     output = model.generate(prompt, max_new_tokens=4, **how)
    ...     trained = token_logprobs(model, output.sequences, prompt_len=4)
    >>> sampled = selected_logprobs(torch.stack(output.logits, dim=1), output.sequences[:, 4:])
    >>> trained.requires_grad, torch.equal(trained, sampled)
    (True, True)
    """
    inner = patching.unwrapped(model, "token_logprobs")
    if sequences.ndim != 2 or not 1 <= prompt_len < sequences.shape[1]:
        given = f"sequences {tuple(sequences.shape)} and prompt_len {prompt_len}"
        raise ValueError(
            f"{given} do not fit: [B, T] and 1 to T - 1, with a token before each one that is "
            "asked for."
        )
    whole = tuple(sequences.shape)
    of_prompts = (len(sequences), prompt_len)
    if attention_mask is not None and attention_mask.shape not in (whole, of_prompts):
        expected = f"{whole}, or that of the prompts, {of_prompts}"
        raise ValueError(f"attention_mask must be {expected}, got {tuple(attention_mask.shape)}.")
    head = _Head(inner)
    # [B * n, hidden size]
    states = head.inputs(sequences, attention_mask)[:, prompt_len - 1 : -1].flatten(0, 1)
    tokens = sequences[:, prompt_len:]
    chunk = max(1, _MAX_LOGITS_BYTES // (4 * inner.config.get_text_config().vocab_size))
    chunks = zip(torch.split(states, chunk), torch.split(tokens.flatten(), chunk), strict=True)
    return torch.cat([head.logprobs(*pair, temperature) for pair in chunks]).view(tokens.shape)


class _Head:
    """What a model computes after its layers (linear layer, soft cap, scales), by its own code.

    It runs on a shadow with a given output of the layers: other threads run the model meanwhile.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers: Any = None  # the module of all layers
        self.output: Any = None  # of that module
        # Of the head, and how often each was written.
        self.weights: dict[str, tuple[Tensor, Any]] = {}
        self.thread = get_ident()

    def inputs(self, sequences: Tensor, mask: Tensor | None) -> Tensor:
        """The hidden states [B, T, hidden size]; positions count from the first token of a row."""
        given: dict[str, Any] = {}
        if mask is not None:
            given["attention_mask"] = mask = F.pad(
                mask, (0, sequences.shape[1] - mask.shape[1]), value=1
            )
            if "position_ids" in signature(self.model.forward).parameters:
                # As `generate` counts.
                given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with ExitStack() as hooks:
            for layers in {self.model.base_model, self.model.get_decoder()} - {self.model}:
                hooks.enter_context(layers.register_forward_hook(self._keep))
            self.model(sequences, **given, use_cache=False, logits_to_keep=1)
        if self.layers is None:
            takes = "a model with a head, such as AutoModelForCausalLM"
            raise ValueError(f"token_logprobs takes {takes}, got {type(self.model).__name__}.")
        name = next(name for name, module in self.model.named_modules() if module is self.layers)
        self.model = shadow_of(self.model)
        self.layers = self.model.get_submodule(name)
        self.weights = {
            name: (weight, write_count(weight)) for name, weight in self._present_weights().items()
        }
        states: Tensor = self.output.last_hidden_state
        return states

    def _keep(self, module: Module, args: Any, output: Any) -> None:
        if get_ident() == self.thread:
            # where one is inside the other, the outer one is last
            self.layers = module
            self.output = output

    def _present_weights(self) -> dict[str, Tensor]:
        """The parameters of all modules but the layers, a tied embedding too, by name."""
        layers = set(self.layers.modules())
        return {
            f"{name}.{own}": parameter
            for name, module in self.model.named_modules()
            if module not in layers
            for own, parameter in module.named_parameters(recurse=False)
        }

    def logprobs(self, states: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Of tokens [n] after states [n, hidden size]; gradients compute the logits again."""
        if not torch.is_grad_enabled():
            return self._logprobs(states, tokens, temperature)
        arguments = (states, tokens, temperature)
        return checkpoint(self._logprobs, *arguments, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _logprobs(self, states: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        self._refuse_other_weights()
        output = type(self.output)(**{**self.output, "last_hidden_state": states[None]})
        with patching.replaced("forward", {self.layers: lambda *args, **kwargs: output}):
            logits = self.model(tokens[None], use_cache=False).logits
        return selected_logprobs(logits[0], tokens, temperature)

    def _refuse_other_weights(self) -> None:
        """Raise if the head was changed: its gradients would be those of other logits."""
        present = self._present_weights()
        for name, (weight, count) in self.weights.items():
            # FSDP has whole weights there during a pass. The parts that it has at other times are
            # of another type.
            is_other = type(weight) is Parameter and present.get(name) is not weight
            if is_other or write_count(weight) != count:
                raise RuntimeError(
                    f"{name} was changed after token_logprobs, and the backward pass computes the "
                    "logits again: call backward() before the optimizer's step."
                )
