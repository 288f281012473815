"""Verification: a new step must give the logits of an ordinary pass, up to rounding, before it is
used.

    case              position of the newest token             exposes
    whole sequence    after all cached tokens                  a key that is not written, a wrong position
    next position     one later                                a length or a position that is frozen
    two tokens        as if the sequence began one earlier     a wrong seq_start, a key that is not seen
    across a window   where a window no longer begins at 0     a window or chunk of another size

A pass is recorded with a token and at a position that no case uses, and two tokens are compared:
what is frozen in the recording shows.

One key among many hardly moves an average, so values at the critical positions are replaced by
large planted ones.

In bf16 and fp16 the allowed difference is measured: the ordinary pass runs again with the outputs
of all modules with parameters moved by up to one unit in the last place, which is more than another
order of summation does. In float32 it is sqrt(eps) times the largest logit, as half of its digits
show every fault. Inside `exact` it is zero.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_static_kv import compat
from hf_static_kv.cache.codes import STEP
from hf_static_kv.cache.identity import first_difference, pass_state, states_of_a_call
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import plan_layers
from hf_static_kv.decoding.call import Call
from hf_static_kv.kernels.persistent_step_cuda import COMPILER
from hf_static_kv.patching import (
    EXACT_ATTENTION_NAME,
    IS_VERIFICATION,
    attention_implementation,
    without_cudnn,
)
from hf_static_kv.program.quantised import unrounded_inputs
from hf_static_kv.program.record import leaves
from hf_static_kv.program.step import DecodeStep, last_logits_only

_MASKED = -1e4  # a lower logit marks a token that is never selected
_EDGE = 4  # positions before a window in the case across it
_UNWRITTEN = (
    8.0  # further factor at the newest position: a pass that does not write there reads this
)
# Times the root mean square of what `_rounding_noise` does. Sound steps differ from an ordinary
# pass by 0.2 to 1.3 times that (dev shapes and toys, bfloat16 and float16, H200 and CPU, November
# 2026).
_MARGIN = 2.0
_CODES_APART = 4  # steps between codes; one was not enough for 8 layers of 512 dims


class Case(NamedTuple):
    """One pass over a storage with planted values."""

    position: int  # of the newest token
    seq_start: Tensor  # [B], where the sequences begin
    planted: range  # positions with planted values, beside `position`
    scale: float  # how many times as large as usual they are


def verify(step: DecodeStep, call: Call) -> None:
    """Raise where the step gives other logits than an ordinary pass.

    The cache is left as it was in any case.
    """
    here = call.cache.snapshot()
    before = IS_VERIFICATION.set(True)
    try:
        for number, case in enumerate(_cases(call, call.cache.seq_len)):
            _verify(step, call, case, num_tokens=2 if number == 0 else 1)
    finally:
        IS_VERIFICATION.reset(before)
        call.cache.restore(here)


@contextmanager
def without_side_effects(model: Any) -> Iterator[None]:
    """Raise if passes inside change the model or draw from Python's or numpy's generator, whose
    state is put back.

    A replay would do neither. Where other threads run, any of them may have drawn: that the logits
    differ from pass to pass tells, too.
    """
    # The compiler of a kernel draws nothing.
    compiling = [thread for thread in threading.enumerate() if thread.name == COMPILER]
    is_alone = threading.active_count() - len(compiling) == 1
    state = pass_state(model)
    drawn = random.getstate()
    drawn_by_numpy = np.random.get_state()
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    has_drawn = random.getstate() != drawn or str(np.random.get_state()) != str(drawn_by_numpy)
    if has_drawn and is_alone:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        raise RuntimeError("a pass draws random numbers outside of torch") from failure
    if (after := pass_state(model)) != state:
        raise RuntimeError(
            f"a pass changes the model: {first_difference(state, after)}"
        ) from failure
    if failure is not None:
        raise failure


def _cases(call: Call, length: int) -> list[Case]:
    seq_start = call.seq_start.to(call.device)
    nothing = range(0)
    cases = [Case(length, seq_start, nothing, float(length))]
    # That has a slot in all layers.
    last = min(layer.offset + layer.num_slots for layer in call.cache.kv_layers) - 1
    if length < last:
        cases.append(Case(length + 1, seq_start, range(length, length + 1), 1.0))
    if length:
        # Other values, but no larger ones: where outputs are normed, larger ones would hide the
        # newest.
        cases.append(
            Case(length, torch.full_like(seq_start, length - 1), range(length - 1, length), 1.0)
        )
    plans = plan_layers(call.model.config)
    for window, is_chunked in sorted(
        {(plan.sliding_window, plan.is_chunked) for plan in plans if plan.sliding_window}
    ):
        position = max(length, min(window + _EDGE, last))
        if position >= window:
            # The first position in the window, or in the second chunk of the sequence.
            oldest = max(window, position - _EDGE) if is_chunked else position - window + 1
            kept = max(
                layer.oldest for layer in call.cache.kv_layers if layer.sliding_window == window
            )
            edge = range(max(kept, oldest - _EDGE), oldest + 1)
            start = oldest - window if is_chunked else edge.start
            cases.append(Case(position, torch.full_like(seq_start, start), edge, float(window)))
    return cases


def _verify(step: DecodeStep, call: Call, case: Case, num_tokens: int) -> None:
    """So many tokens agree, and one more for each that does not: rounding alone may choose another
    expert.
    """
    missing = num_tokens
    for number in range(num_tokens + 2):
        with _planted_values(call, case):
            difference, bound = _difference_and_bound(
                step, call, case, _compared_tokens(call, number)
            )
        missing += -1 if difference <= bound else 1
        if missing == 0:
            return
    raise RuntimeError(
        f"its logits are {difference:.2g} from those of an ordinary step, more than {bound:.2g}"
    )


# --- a pass of many tokens


class Passed(NamedTuple):
    """What a pass over several tokens gave."""

    logits: Tensor  # [B, V] or [B, n, V], float32
    states: list[tuple[int, Tensor]]  # the first position, and keys or values [B, H, n, D]


def verify_prompt(step: DecodeStep, call: Call, tokens: Tensor, lengths: Sequence[int]) -> None:
    """Raise if the pass gives other logits, keys or values than the model for these numbers of
    tokens, of `tokens` [B, n] that are repeated; at once, and in two parts.

    A model may decide by the number of tokens. The cache is left as it was.
    """
    for length in lengths:
        repeats = -(-length // tokens.shape[1])
        whole = tokens.repeat(1, repeats)[:, :length]
        expected = _ordinary_prompt(step, call, whole)
        noisy = None
        if call.model.dtype in (torch.bfloat16, torch.float16):
            with step.on_shadow() as model, _rounding_noise(compat.all_modules(model)):
                noisy = _ordinary_prompt(step, call, whole)
        for parts in ([whole], list(whole.chunk(2, dim=1))):
            here = call.cache.snapshot()
            for part in parts:
                logits = append_prompt(step, call, part, _default_positions(call, part))
            passed = _written_since(call, here[0], logits)
            call.cache.restore(here)
            _compare(call, passed, expected, noisy)


def verify_drafts(step: DecodeStep, call: Call) -> None:
    """Raise if a pass of several tokens gives other logits, after any of them, or other states than
    the model: of two tokens, and of as many as the pass takes. The cache is left as it was.
    """
    here = call.cache.snapshot()
    most = step.token.shape[1]
    vocabulary = call.model.config.get_text_config(decoder=True).vocab_size
    before = IS_VERIFICATION.set(True)
    try:
        for length in sorted({min(2, most), most}):
            newest = _newest_tokens(call)[:, None]
            tokens = (newest - torch.arange(length, device=newest.device)) % vocabulary
            at = here[0], call.seq_start.to(call.device), call.position_ids(here[0])
            expected = _ordinary_prompt(step, call, tokens, all_logits=True)
            noisy = None
            if call.model.dtype in (torch.bfloat16, torch.float16):
                with step.on_shadow() as model, _rounding_noise(compat.all_modules(model)):
                    noisy = _ordinary_prompt(step, call, tokens, all_logits=True)
            step.set_position(*at)
            logits = step.run(tokens)[:, -length:]
            call.cache.mark_written(length, len(tokens))
            passed = _written_since(call, here[0], logits)
            call.cache.restore(here)
            _compare(call, passed, expected, noisy)
    finally:
        IS_VERIFICATION.reset(before)
        call.cache.restore(here)


def append_prompt(step: DecodeStep, call: Call, tokens: Tensor, position_ids: Tensor) -> Tensor:
    """Append tokens [B, n] by one run of the pass; the logits [B, V] of the last."""
    call.cache.reserve(tokens.shape[1])
    step.set_position(call.cache.seq_len, call.seq_start)
    with step.on_shadow(call.own_attention) if step.runs_model else nullcontext():
        logits = step.run(tokens, position_ids)
    call.cache.mark_written(tokens.shape[1], len(tokens))
    return logits


def _default_positions(call: Call, tokens: Tensor) -> Tensor:
    """The positions [B, n] of the next tokens."""
    start = call.cache.seq_len
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    return (positions - call.seq_start.to(tokens)[:, None]).clamp(min=0)


def _ordinary_prompt(
    step: DecodeStep, call: Call, tokens: Tensor, all_logits: bool = False
) -> Passed:
    here = call.cache.snapshot()
    positions = torch.arange(here[0] + tokens.shape[1], device=tokens.device)
    inputs = {
        "attention_mask": (positions >= call.seq_start.to(tokens)[:, None]).long(),
        "position_ids": _default_positions(call, tokens),
        "past_key_values": call.cache,
    }
    with _ordinary(step, call) as model:
        kept = {} if all_logits else last_logits_only(model)
        outputs = model(input_ids=tokens, use_cache=True, **inputs, **kept)
    logits = outputs.logits.float()
    passed = _written_since(call, here[0], logits if all_logits else logits[:, -1])
    call.cache.restore(here)
    return passed


def _written_since(call: Call, length: int, logits: Tensor) -> Passed:
    """The states of the positions from `length` on, copied; zeros where a row has padding."""
    states = []
    for layer in call.cache.kv_layers:
        first = max(layer.oldest, length)
        positions = torch.arange(first, layer.length, device=layer.device)
        is_padding = positions < call.seq_start.to(positions)[:, None]  # [B, n]
        for own in (layer.keys, layer.values):
            written = own[:, :, first - layer.length :]
            states.append((first, written.masked_fill(is_padding[:, None, :, None], 0)))
    return Passed(logits, states)


def _compare(call: Call, passed: Passed, expected: Passed, noisy: Passed | None) -> None:
    others = (passed,) if noisy is None else (passed, noisy)
    apart: list[Any] = [("logits", expected.logits, *(own.logits for own in others))]
    for n, (first, states) in enumerate(expected.states):
        same = [own.states[n][1][:, :, first - own.states[n][0] :] for own in others]
        layer = f"{'values' if n % 2 else 'keys'} of layer {n // 2}"
        apart.append((layer, states.float(), *(own.float() for own in same)))
    for name, whole, got, *noise in apart:
        difference = _difference(got, whole)
        found = float(difference.abs().max())
        bound = 0.0
        if call.own_attention != EXACT_ATTENTION_NAME:
            largest = whole.masked_fill(whole < _MASKED, 0.0).abs().max()
            bound = float(_share(call) * largest)
        if noise and bound:
            found = float(difference.square().mean().sqrt())
            bound = _MARGIN * float(_difference(noise[0], whole).square().mean().sqrt())
        if not found <= bound:
            raise RuntimeError(
                f"its {name} are {found:.2g} from those of an ordinary pass, more than {bound:.2g}"
            )


def _share(call: Call) -> float:
    """Of the largest number, how far another order of sums may move one. With codes (codes.py) some
    round the other way, and later layers see that.
    """
    of_sums = float(torch.finfo(call.model.dtype).eps ** 0.5)
    return of_sums if call.cache.kv_dtype is None else max(of_sums, _CODES_APART * STEP)


def _newest_tokens(call: Call) -> Tensor:
    ids = call.input_ids  # [B, 0] where the prompt is `inputs_embeds`
    return (ids[:, -1] if ids.shape[1] else ids.new_zeros(len(ids))).to(call.device)


def _compared_tokens(call: Call, number: int) -> Tensor:
    return (_newest_tokens(call) - number).abs()  # valid tokens, at most four of them


def unverified_inputs(call: Call) -> tuple[Tensor, Tensor]:
    """Positions [..., B, 1] and a token [B] that no case uses."""
    newest = _newest_tokens(call)
    vocabulary = call.model.config.get_text_config(decoder=True).vocab_size
    other = min(6, vocabulary - 1)
    return call.position_ids(0).clamp(min=0), torch.where(newest >= other, 0, other)


def _difference_and_bound(
    step: DecodeStep, call: Call, case: Case, tokens: Tensor
) -> tuple[float, float]:
    """How far the logits are apart and how far they may be, in the worst batch row."""
    here = call.cache.snapshot()
    step.set_position(case.position, case.seq_start, call.position_ids(case.position))
    # Before the ordinary pass, which would write the keys that this one must write.
    got = step.run(tokens)
    call.cache.restore(here)
    expected = _ordinary_logits(step, call, case, tokens)
    difference = _difference(got, expected)
    largest = expected.masked_fill(expected < _MASKED, 0.0).abs().max()
    apart = float(difference.abs().max())
    bound = float(_share(call) * largest)
    if call.own_attention == EXACT_ATTENTION_NAME:
        return apart, 0.0
    if not apart <= bound or call.model.dtype not in (torch.bfloat16, torch.float16):
        return apart, bound
    with step.on_shadow() as model, _rounding_noise(compat.all_modules(model)):
        noise = _difference(_ordinary_logits(step, call, case, tokens), expected)
    rms = difference.square().mean(dim=-1).sqrt()
    bounds = _MARGIN * noise.square().mean(dim=-1).sqrt()
    worst = int((rms - bounds).argmax())
    return float(rms[worst]), float(bounds[worst])


def _difference(logits: Tensor, expected: Tensor) -> Tensor:
    # Some models write a large negative number or -inf for tokens that are never selected.
    return (logits - expected).masked_fill((expected < _MASKED) & (logits < _MASKED), 0.0)


def _ordinary_logits(step: DecodeStep, call: Call, case: Case, tokens: Tensor) -> Tensor:
    """The logits [B, V] of an ordinary pass, with the user's own attention and none of our kernels."""
    cache = call.cache
    here = call.cache.snapshot()
    seq_start = case.seq_start[:, None]
    mask = torch.arange(case.position + 1, device=tokens.device) >= seq_start
    inputs: dict[str, Any] = {
        "attention_mask": mask.long(),
        "position_ids": call.position_ids(case.position),
    }
    inputs |= {
        "past_key_values": cache,
        "use_cache": True,
        **call.step_inputs.settings,
        **call.step_inputs.tensors,
    }
    cache.mark_written(case.position - cache.seq_len)
    with _ordinary(step, call) as model, _unread(call):
        outputs = model(input_ids=tokens[:, None], **inputs)
    cache.restore(here)  # `verify` does so after an exception
    return outputs.logits[:, -1].float()  # type: ignore[no-any-return]


@contextmanager
def _ordinary(step: DecodeStep, call: Call) -> Iterator[Any]:
    """The model as ordinary passes run it, with the user's own attention.

    Where the step rounds fewer inputs than a package does, the model rounds as few.
    """
    with (
        step.on_shadow() as model,
        attention_implementation(model, call.attention),
        without_cudnn(),  # which would build a plan for this one call
        unrounded_inputs(model) if step.rounds_fewer_inputs else nullcontext(),
    ):
        yield model


def _unread(call: Call) -> AbstractContextManager[object]:
    """Raises where a pass needs a tensor that belongs to this call alone: the step is used for
    other calls, too.
    """
    names = {
        id(leaf): name for name, value in call.step_inputs.tensors.items() for leaf in leaves(value)
    }
    names |= states_of_a_call(call.modules)
    return _Unread(names) if names else nullcontext()


class _Unread(TorchFunctionMode):
    """Raises where an operation takes one of these tensors, which are named by their `id`."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (name := self.names.get(id(leaf))) is not None:
                raise RuntimeError(f"it needs {name}, which belongs to one call")
        return func(*args, **kwargs)


@contextmanager
def _planted_values(call: Call, case: Case) -> Iterator[None]:
    """The storage with large values, and keys of zero, which get an average weight, where the case
    wants them.
    """
    # One of each group: all have its offset.
    layers = {id(layer.group): layer for layer in call.cache.kv_layers}
    with ExitStack() as groups:
        for layer in layers.values():
            groups.enter_context(_planted_in_group(layer, case, call.cache.seq_len))
        yield


@contextmanager
def _planted_in_group(layer: StaticContiguousLayer, case: Case, length: int) -> Iterator[None]:
    storage: Any = layer.group
    keys, values = storage.keys[:, : len(case.seq_start)], storage.values[:, : len(case.seq_start)]
    kept = [position for position in (*case.planted, case.position) if position >= layer.oldest]
    slots = torch.tensor(kept, device=values.device) - layer.offset
    before = keys.index_select(3, slots), values.index_select(3, slots)
    newest = values[:, :, :, max(0, length - _EDGE - layer.offset) : length - layer.offset]
    _, newest = layer.as_read((newest, newest))
    usual = newest.float().square().mean(dim=(1, 2, 3, 4)).sqrt()  # [L]
    generator = torch.Generator(values.device).manual_seed(0)
    size = *before[1].shape[:-1], layer.shape.value_head_dim
    planted = torch.randn(size, generator=generator, device=values.device)
    planted *= case.scale * usual.view(-1, 1, 1, 1, 1)
    planted[:, :, :, -1] *= _UNWRITTEN
    try:
        keys.index_fill_(3, slots, 0.0)
        largest = torch.finfo(layer.value_dtype).max / _UNWRITTEN  # 65,504 / 8 in float16
        planted = planted.clamp(-largest, largest).to(layer.value_dtype)
        values.index_copy_(3, slots, layer.as_stored(planted))
        yield
    finally:
        keys.index_copy_(3, slots, before[0])
        values.index_copy_(3, slots, before[1])


@contextmanager
def _rounding_noise(modules: list[torch.nn.Module]) -> Iterator[None]:
    """The output of every module with weights of its own, moved by up to one unit in the last
    place.
    """

    def move(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = torch.rand(output.shape, device=output.device, generator=generator) * 2 - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    weighted = [module for module in modules if compat.own_parts(module, "parameters")]
    generator = torch.Generator(next(weighted[0].parameters()).device).manual_seed(0)
    with ExitStack() as hooks:
        for module in weighted:
            hooks.enter_context(module.register_forward_hook(move))
        yield
