"""A new step beside an ordinary pass of the model: the same logits, as far as rounding lets them be the same.

    the text          the newest token after all of the text
    two tokens        as if the text began with the token before the newest
    across a window   at a position that a window has crossed

A key that is lost, or one that is seen and should not be, is one of many: its values are made so large in a trial that
no average hides it. What a trial changes in the storage it puts back.

How far rounding takes logits apart is measured: the ordinary pass is run again with the outputs of all weights moved by
up to one unit in their last place, which is more than another order of summing does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hf_static_kv.attention import EXACT_ATTENTION_NAME, without_cudnn
from hf_static_kv.decoding.call import Call
from hf_static_kv.patching import attention_implementation
from hf_static_kv.program.step import DecodeStep

_MASKED = -1e4  # a logit below this one is no result
_EDGE = 4  # positions before a window, in the trial across it
_LOUD = 8.0  # times as large as the others
_HALF = (torch.bfloat16, torch.float16)  # in float32 half of the digits are enough to see any of this
_MARGIN = 2.0  # times the root mean square of what the noise does; see `_rounding_noise`


class Trial(NamedTuple):
    """One pass: the newest token at position `slot`, in texts that begin at `origin` [B].

    Values at `loud` positions are `scale` times the usual ones; those at `slot`, until the pass writes there, larger.
    """

    slot: int
    origin: torch.Tensor
    loud: range
    scale: float


def compare(step: DecodeStep, call: Call) -> None:
    """Raise where the step gives other logits than an ordinary pass. The cache is as before, whatever happens."""
    length = call.cache.seq_len
    try:
        for trial in _trials(call, length):
            _compare(step, call, trial)
    finally:
        call.cache.crop(length - call.cache.seq_len)


def _trials(call: Call, length: int) -> list[Trial]:
    origin, nothing = call.origin.to(call.device), range(0)
    trials = [Trial(length, origin, nothing, float(length))]
    if length:
        # Other values, but no larger ones: where outputs are normed, the larger would hide the newest.
        trials.append(Trial(length, torch.full_like(origin, length - 1), range(length - 1, length), 1.0))
    for window in sorted({layer.sliding_window for layer in call.cache.layers if layer.sliding_window}):
        slot = max(length, min(window + _EDGE, call.cache.max_cache_len - 1))
        if slot >= window:
            oldest = slot - window + 1  # of the positions in the window
            edge = range(max(0, oldest - _EDGE), oldest + 1)
            trials.append(Trial(slot, torch.full_like(origin, edge.start), edge, float(window)))
    return trials


def _compare(step: DecodeStep, call: Call, trial: Trial) -> None:
    """The first token agrees, or the two after it do: in a model of experts rounding alone may choose another one."""
    found: list[tuple[float, float]] = []

    def agrees(attempt: int) -> bool:
        tokens = (call.last_tokens.to(call.device) - attempt).abs()
        with _loud_values(call, trial):
            found.append(_difference_and_bound(step, call, trial, tokens))
        return found[-1][0] <= found[-1][1]

    if not (agrees(0) or (agrees(1) and agrees(2))):
        difference, bound = found[-1]
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
        with attention_implementation(model, call.attention), without_cudnn():
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
def _loud_values(call: Call, trial: Trial) -> Iterator[None]:
    """The storage with large values where the trial wants them; afterwards as it was.

    Keys of zero are seen about as much as others are.
    """
    storage, rows, length = call.cache.storage_groups[0], len(trial.origin), call.cache.seq_len
    keys, values = storage.keys[:, :rows], storage.values[:, :rows]
    positions = torch.tensor([*trial.loud, trial.slot], device=values.device)
    before = keys.index_select(3, positions), values.index_select(3, positions)
    usual = values[:, :, :, max(0, length - _EDGE) : length].float().square().mean(dim=(1, 2, 3, 4)).sqrt()  # [L]
    generator = torch.Generator(values.device).manual_seed(0)
    loud = torch.randn(before[1].shape, generator=generator, device=values.device)
    loud *= trial.scale * usual.view(-1, 1, 1, 1, 1)
    loud[:, :, :, -1] *= _LOUD  # where a key that is not written leaves what was there
    try:
        keys.index_fill_(3, positions, 0.0)
        largest = torch.finfo(values.dtype).max / _LOUD  # float16 has no more than 65,504
        values.index_copy_(3, positions, loud.clamp(-largest, largest).to(values.dtype))
        yield
    finally:
        keys.index_copy_(3, positions, before[0])
        values.index_copy_(3, positions, before[1])


@contextmanager
def _rounding_noise(modules: list[torch.nn.Module]) -> Iterator[None]:
    """The output of every module with weights of its own, moved by up to one unit in the last place.

    Sound steps differ from an ordinary pass by 0.2 to 1.3 times what this does (dev shapes and toys, bfloat16 and
    float16, H200 and CPU).
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
