"""A new step beside an ordinary pass of the model: the same logits, as far as rounding lets them be the same.

    the text            the newest token after all of the text
    its last tokens     as if the text began three tokens ago: a key that is lost is a quarter of what there is to see
    across a window     at a position that a window has crossed, with large values on both sides of the window's edge

How far rounding takes logits apart is measured: the ordinary pass is run again with the outputs of all weights moved by
up to one unit in their last place, which is more than another order of summing does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hf_static_kv.attention import EXACT_ATTENTION_NAME, without_cudnn
from hf_static_kv.generation import Call
from hf_static_kv.patching import attention_for_a_while
from hf_static_kv.step import DecodeStep

_MASKED = -1e4  # a logit below this one is no result
_TAIL = 3  # tokens before the newest, in the trial of the last tokens
_OUTSIDE = 4  # positions before a window, in the trial across it
_ATTEMPTS = 3
_HALF = (torch.bfloat16, torch.float16)  # in float32 half of the digits are enough to see any of this
_MARGIN = 2.0  # times the root mean square of what the noise does; see `_rounding_noise`


class Trial(NamedTuple):
    """One pass: the newest token at position `slot`, in texts that begin at `origin` [B]."""

    slot: int
    origin: torch.Tensor
    window: int | None = None  # the one that is crossed


def compare(step: DecodeStep, call: Call) -> None:
    """Raise where the step gives other logits than an ordinary pass. The cache is as before, whatever happens."""
    length = call.cache.seq_len
    try:
        for trial in _trials(call, length):
            _compare(step, call, trial)
    finally:
        call.cache.crop(length - call.cache.seq_len)


def _trials(call: Call, length: int) -> list[Trial]:
    origin = call.origin.to(call.device)
    trials = [Trial(length, origin)]
    if length > _TAIL:
        trials.append(Trial(length, origin.clamp(min=length - _TAIL)))
    capacity = call.cache.max_cache_len
    for window in sorted({layer.sliding_window for layer in call.cache.layers if layer.sliding_window}):
        slot = max(length, min(window + _OUTSIDE, capacity - 1))
        if slot > window:
            first = max(0, slot - window - _OUTSIDE)
            trials.append(Trial(slot, torch.full_like(origin, first), window))
    return trials


def _compare(step: DecodeStep, call: Call, trial: Trial) -> None:
    """Some models choose experts: near a tie rounding alone chooses others, so three tokens are tried."""
    for attempt in range(_ATTEMPTS):
        tokens = (call.last_tokens.to(call.device) + attempt) % call.model.config.get_text_config().vocab_size
        with _large_values_at_the_edge(call, trial):
            difference, bound = _difference_and_bound(step, call, trial, tokens)
        if difference <= bound:
            return
    raise RuntimeError(f"its logits are {difference:.2g} from those of an ordinary step, more than {bound:.2g}")


def _difference_and_bound(step: DecodeStep, call: Call, trial: Trial, tokens: torch.Tensor) -> tuple[float, float]:
    """How far the logits are apart and how far they may be, in the row where that is worst."""
    step.begin(trial.slot, trial.origin)
    got = step.run(tokens)  # before the ordinary pass, which would write the keys that this one must write
    expected = _ordinary(call, trial, tokens)
    difference = _difference(got, expected)
    largest = expected.masked_fill(expected < _MASKED, 0.0).abs().max()
    apart, bound = float(difference.abs().max()), float(torch.finfo(call.model.dtype).eps ** 0.5 * largest)
    if call.own_attention == EXACT_ATTENTION_NAME:
        return apart, 0.0
    if not apart <= bound or call.model.dtype not in _HALF:
        return apart, bound
    with _rounding_noise(call.modules):
        noise = _difference(_ordinary(call, trial, tokens), expected)
    rms, bounds = difference.square().mean(dim=-1).sqrt(), _MARGIN * noise.square().mean(dim=-1).sqrt()
    row = int((rms - bounds).argmax())
    return float(rms[row]), float(bounds[row])


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    # Some models write a large number or -inf where a token is never to be chosen, which is no measure for the others.
    both_masked = (expected < _MASKED) & (logits < _MASKED)
    return (logits - expected).masked_fill(both_masked, 0.0)


def _ordinary(call: Call, trial: Trial, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [B, V] of an ordinary pass, with the user's own attention, which is no kernel of ours."""
    cache, model = call.cache, call.model
    length = cache.seq_len
    mask = torch.arange(trial.slot + 1, device=tokens.device) >= trial.origin[:, None]
    cache.mark_written(trial.slot - length)
    try:
        # Without cuDNN, which would build a plan for this one call.
        with attention_for_a_while(model, call.attention), without_cudnn():
            outputs = model(
                input_ids=tokens[:, None],
                attention_mask=mask.long(),
                position_ids=trial.slot - trial.origin[:, None],
                past_key_values=cache,
                use_cache=True,
            )
    finally:
        cache.crop(length - cache.seq_len)
    logits: torch.Tensor = outputs.logits[:, -1].float()
    return logits


@contextmanager
def _large_values_at_the_edge(call: Call, trial: Trial) -> Iterator[None]:
    """The oldest position inside of the window and those before it, with values that no average hides; then as before.

    Keys of zero are seen as much as others are, so that each of these is about 1 / window of what a query sees.
    """
    if trial.window is None:
        yield
        return
    oldest, storage, rows = trial.slot - trial.window + 1, call.cache.storage_groups[0], len(trial.origin)
    edge = slice(max(0, oldest - _OUTSIDE), oldest + 1)
    keys, values = (t[:, :rows, :, edge] for t in (storage.keys, storage.values))
    before = keys.clone(), values.clone()
    try:
        keys.zero_()
        generator = torch.Generator(values.device).manual_seed(0)
        values.normal_(generator=generator).mul_(trial.window / _OUTSIDE)
        yield
    finally:
        keys.copy_(before[0])
        values.copy_(before[1])


@contextmanager
def _rounding_noise(modules: list[torch.nn.Module]) -> Iterator[None]:
    """The output of every module with weights of its own, moved by up to one unit in the last place.

    Sound steps differ from an ordinary pass by 0.2 to 1.3 times what this does, steps that lose a key, shift positions
    or change a window by 2.3 to 35 times (toys on a CPU, bfloat16).
    """

    def move(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        noise = torch.rand(output.shape, device=output.device, generator=generator) * 2 - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    weighted = [module for module in modules if any(own is not None for own in module._parameters.values())]
    generator = torch.Generator(next(weighted[0].parameters()).device).manual_seed(0)
    handles = [module.register_forward_hook(move) for module in weighted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
