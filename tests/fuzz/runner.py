"""Runs a case: no cache, DynamicCache, our cache in several ways, event by event side by side.

The truth is no cache, torch's plain attention, and the model as it is at that moment. Every other
contender must give its tokens, and its logits but for rounding. Contenders with a pool (an attached
model, a decoder with a cache of its own) pass no cache: they take part in calls of `generate`, in
those of several threads, and go on with the caches that they are given back.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import Barrier
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_static_kv import (
    GraphDecoder,
    StaticContiguousCache,
    StepRecorder,
    attach,
    attachment,
    served,
)
from hf_static_kv.cache import storage
from hf_static_kv.cache.passes import UnfinishedPass
from tests.fuzz.cases import (
    MAX_ROWS,
    ROOMY,
    Call,
    Case,
    Change,
    Continue,
    Copy,
    Crop,
    Event,
    Failure,
    Forward,
    NewText,
    Rows,
    Together,
)
from tests.fuzz.models import at_least, build_model, offloaded_model
from tests.fuzz.mutations import decoder_layers, mutable

# Rounding of a cached pass against a whole one, in units of the largest logit.
LOGITS_TOLERANCE = 128 * torch.finfo(torch.float32).eps
# transformers 5.17 splits the whole prompt into chunks, the tokens in the cache as well.
_CHUNKS_ON_A_TEXT = at_least("5.22")
_PASSES = 50  # of a thread that passes its prompt again and again
_TRIES = 12  # perturbed runs before a difference is no tie
# Errors of ours that are documented limits, by a part of the message.
REFUSALS: tuple[str, ...] = ()


class InjectedError(Exception):
    """Raised by a layer that a case makes fail."""


class SkippedCaseError(Exception):
    """The case cannot go on, and for a reason that is not ours."""


@dataclass
class Fault:
    """One wrong answer of one contender."""

    case: Case
    event: int
    contender: str
    what: str

    def __str__(self) -> str:
        return (
            f"FAULT of {self.contender} at event {self.event}: {self.what}\n{self.case.describe()}"
        )


@dataclass
class Tally:
    """What a run of cases has seen."""

    cases: int = 0
    compared: Counter[str] = field(default_factory=Counter)  # calls, by contender
    moves: Counter[str] = field(default_factory=Counter)  # cases, by the moves that they have
    ties: list[str] = field(default_factory=list)
    # Ours and DynamicCache alike, and not as no cache.
    like_dynamic: list[str] = field(default_factory=list)
    # DynamicCache alone is wrong or refuses.
    only_dynamic: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    largest_difference: float = 0.0  # of logits, in units of the largest logit
    architectures: set[str] = field(default_factory=set)

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        for name in ("compared", "moves", "only_dynamic", "skipped", "fallbacks"):
            getattr(self, name).update(getattr(other, name))
        for name in ("ties", "like_dynamic", "faults"):
            getattr(self, name).extend(getattr(other, name))
        self.largest_difference = max(self.largest_difference, other.largest_difference)
        self.architectures |= other.architectures


@dataclass
class Output:
    """What a call has given: whole texts, whatever part of them was passed."""

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...] = ()
    logits: tuple[torch.Tensor, ...] = ()
    random_state: torch.Tensor | None = None  # after the call, on a CPU
    streamed: list[int] | None = None
    recorded: list[list[int]] | None = None
    cache: Any = None  # what `generate` has returned


@dataclass
class Text:
    """All tokens so far [B, n], their mask, and how many of them are cached."""

    ids: torch.Tensor
    mask: torch.Tensor
    cached: int = 0

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def positions(self) -> torch.Tensor:
        return (self.mask.cumsum(dim=1) - 1).clamp(min=0)

    def extend(self, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        self.ids, self.mask = (
            torch.cat([self.ids, tokens], dim=1),
            torch.cat([self.mask, mask], dim=1),
        )

    def cut(self, length: int) -> None:
        self.ids, self.mask, self.cached = self.ids[:, :length], self.mask[:, :length], length

    def take_rows(self, indices: torch.Tensor) -> None:
        self.ids, self.mask = self.ids[indices], self.mask[indices]


# --- contenders


class Contender:
    """A model with a cache, taken through the history."""

    name = "DynamicCache"
    is_ours = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        self.cache: Any = DynamicCache(config=self.model.config)

    def forget(self, by_crop: bool) -> None:
        self.reset()

    def copy_cache(self) -> None:
        self.cache = copy.deepcopy(self.cache)

    def use_cache(self, cache: StaticContiguousCache) -> None:
        """A cache for other windows; a DynamicCache is made anew with each text."""

    def generate(self, text: Text, call: Call) -> Output:
        return generate(self.model, text, call, {"past_key_values": self.cache})

    def forward(self, text: Text, event: Forward) -> torch.Tensor:
        return forward(self.model, text, event, self.cache)


class Ours(Contender):
    name = "ours"
    is_ours = True
    sliding = "full"

    def __init__(self, model: PreTrainedModel, cache: StaticContiguousCache) -> None:
        self.cache = cache
        super().__init__(model)

    def reset(self) -> None:
        self.cache.reset()

    def forget(self, by_crop: bool) -> None:
        if by_crop:
            self.cache.crop(-self.cache.seq_len)
        else:
            self.cache.reset()

    def copy_cache(self) -> None:
        before, self.cache = self.cache, copy.deepcopy(self.cache)
        before.reset()

    def use_cache(self, cache: StaticContiguousCache) -> None:
        self.cache = cache

    def generate(self, text: Text, call: Call) -> Output:
        only_new = call.only_new or ("prefill_chunk_size" in call.options and not _CHUNKS_ON_A_TEXT)
        with failing(self.model, call.failure):
            return self._again(text, call.failure, only_new, lambda: self._generate(text, call))

    def forward(self, text: Text, event: Forward) -> torch.Tensor:
        with failing(self.model, event.failure):
            return self._again(
                text, event.failure, True, lambda: super(Ours, self).forward(text, event)
            )

    def _generate(self, text: Text, call: Call) -> Output:
        return super().generate(text, call)

    def _again(self, text: Text, failure: Failure | None, only_new: bool, make_call: Any) -> Any:
        """The call, and the same call again where it failed on purpose.

        What the failed call has left can stay if it is a part of the prompt and the prompt is
        passed whole.
        """
        try:
            return make_call()
        except InjectedError:
            lengths = {layer.get_seq_length() for layer in self.cache.layers}
            if len(lengths) > 1:
                raise AssertionError(
                    f"a failed pass left layers of lengths {sorted(lengths)}"
                ) from None
            left = self.cache.seq_len - text.cached
            if failure.crop or only_new or self.cache.seq_len >= text.length:
                if not self.cache.can_crop_to(text.cached):
                    raise SkippedCaseError(
                        "compact layers do not go back to before a failed call"
                    ) from None
                self.cache.crop(-left)
            return make_call()


class OursWithDecoder(Ours):
    name = "ours with decoder"

    def __init__(
        self, model: PreTrainedModel, cache: StaticContiguousCache, decoder: GraphDecoder
    ) -> None:
        self.decoder = decoder
        self.reasons: Counter[str] = Counter()
        super().__init__(model, cache)

    def _generate(self, text: Text, call: Call) -> Output:
        if not call.with_decoder or call.beams > 1 or call.is_assisted:
            return super()._generate(text, call)
        decoder, stream = self.decoder, None
        if call.streamer:
            stream = Collect()
            decoder = GraphDecoder(streamer=stream)
        how = {"past_key_values": self.cache, "custom_generate": decoder}
        output = generate(self.model, text, call, how, stream_apart=stream)
        self.reasons[decoder.fallback_reason or "none"] += 1
        if InjectedError.__name__ in (decoder.fallback_reason or ""):
            # It keeps the reason for good, and this failure has passed.
            self.decoder = GraphDecoder()
            shared_decoder.cache_clear()
        return output


class Compact(OursWithDecoder):
    name = "ours with compact layers and decoder"
    sliding = "compact"


class WithPool(Contender):
    """Calls that pass no cache and are given one of a pool."""

    is_ours = True

    def reset(self) -> None:
        self.cache = self.kept = None

    def generate(self, text: Text, call: Call) -> Output | None:
        """None where the call is not served."""
        call = replace(call, only_new=False)
        if call.keeps_cache:
            call = replace(call, options={**call.options, "return_dict_in_generate": True})
        with failing(self.model, call.failure), served_on_cpu():
            try:
                output = self._generate(text, call)
            except InjectedError:
                output = self._generate(text, call)
        if self.pool.in_use:
            raise AssertionError(f"{len(self.pool.in_use)} caches were not given back")
        if call.keeps_cache and output is not None:
            self.kept = output.cache
        return output

    def generate_in_threads(self, texts: list[Text], event: Together) -> list[Any]:
        """The output of `generate` for each text, and with `plain` the logits of passes over the
        last one.
        """
        ended: list[Text] = []

        def call(text: Text) -> Output | None:
            try:
                return self._generate(text, greedy_call(event.new_tokens))
            finally:
                ended.append(text)

        def pass_again(text: Text) -> list[torch.Tensor]:
            passes = [forward(self.model, text, Forward(()), None)]
            while len(ended) < len(texts) - 1 and len(passes) < _PASSES:
                passes.append(forward(self.model, text, Forward(()), None))
            return passes

        acts = [
            partial(pass_again if event.plain and text is texts[-1] else call, text)
            for text in texts
        ]
        with served_on_cpu():
            outputs = at_once(acts)
        if self.pool.in_use:
            raise AssertionError(f"{len(self.pool.in_use)} caches were not given back")
        return outputs


def served_on_cpu() -> Any:
    """Short prompts are given our cache on a CPU too."""
    return patch.object(served, "_MIN_PROMPT_ON_CPU", 0)


def at_once(acts: list[Callable[[], Any]]) -> list[Any]:
    """What they return, each in a thread of its own, begun together; raises what one of them
    raises.
    """
    barrier, interval = Barrier(len(acts)), sys.getswitchinterval()

    def run(act: Callable[[], Any]) -> Any:
        barrier.wait(timeout=60)
        return act()

    sys.setswitchinterval(1e-5)  # threads take turns far more often
    try:
        with ThreadPoolExecutor(len(acts)) as threads:
            return [future.result() for future in [threads.submit(run, act) for act in acts]]
    finally:
        sys.setswitchinterval(interval)


def greedy_call(new_tokens: int) -> Call:
    """Random numbers are drawn from one generator for all threads, so these calls draw none."""
    return Call((), {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}, seed=0)


class Attached(WithPool):
    """An attached twin of the model: of the same weights and config, so that other contenders'
    calls stay plain.
    """

    name = "attached"
    reuse_prefix = False

    @classmethod
    def twin(cls, model: PreTrainedModel) -> PreTrainedModel:
        twin = copy.copy(model)
        attach(twin, reuse_prefix=cls.reuse_prefix)
        return twin

    @property
    def pool(self) -> Any:
        return attachment(self.model).pool

    def _generate(self, text: Text, call: Call) -> Output:
        return generate(self.model, text, call, {})


class AttachedWithPrefixes(Attached):
    name = "attached, with prefixes"
    reuse_prefix = True


class DecoderAlone(WithPool):
    name = "decoder alone"

    def __init__(self, model: PreTrainedModel, decoder: GraphDecoder) -> None:
        self.decoder = decoder
        super().__init__(model)

    @property
    def pool(self) -> Any:
        return self.decoder.pool

    def _generate(self, text: Text, call: Call) -> Output | None:
        if call.beams > 1 or call.is_assisted:
            return None
        stream = self.decoder.streamer = Collect() if call.streamer else None
        return generate(
            self.model, text, call, {"custom_generate": self.decoder}, stream_apart=stream
        )


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class StopAt(StoppingCriteria):
    """Ends a row whose newest token is one of `ids`."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(self.ids, device=input_ids.device))


# --- one call


def generate(
    model: PreTrainedModel,
    text: Text,
    call: Call,
    how: dict[str, Any],
    stream_apart: Collect | None = None,
) -> Output:
    """One call of `generate` with a cache.

    `stream_apart` is the streamer that a decoder has been given.
    """
    options = passed_options(model, text, call)
    given = text.ids[:, text.cached :] if call.only_new else text.ids
    inferred = (
        torch.ones_like(text.ids) if call.embeds == "alone" else inferred_mask(text.ids, options)
    )
    if call.only_new or call.mask or not torch.equal(text.mask, inferred):
        options["attention_mask"] = text.mask
    if call.embeds is not None:
        options["inputs_embeds"] = model.get_input_embeddings()(text.ids)
    inputs = {} if call.embeds == "alone" else {"inputs": given}
    stream = stream_apart
    if call.streamer and "custom_generate" not in how:
        stream = options["streamer"] = Collect()
    recorder = (
        StepRecorder(best=2)
        if call.record_steps and call.beams == 1 and not call.is_assisted
        else None
    )
    if recorder is not None:
        options["logits_processor"] = [recorder]
    result = run_generate(model, call, **inputs, **options, **how)
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    prompt = text.ids.repeat_interleave(call.options.get("num_return_sequences", 1), dim=0)
    passed = 0 if call.embeds == "alone" else given.shape[1]
    output = Output(
        torch.cat([prompt, sequences[:, passed:]], dim=1), random_state=random_state(text)
    )
    if not isinstance(result, torch.Tensor):
        output.scores, output.logits, output.cache = (
            result.scores,
            result.logits,
            result.past_key_values,
        )
    if stream is not None:
        prefix = (
            []
            if call.embeds == "alone"
            else given.repeat_interleave(call.copies, dim=0).flatten().tolist()
        )
        output.streamed = streamed_tokens(stream, prefix)
    if recorder is not None:
        output.recorded = [[step["token"] for step in row] for row in recorder.steps(sequences)]
    return output


def streamed_tokens(stream: Collect, prompt: list[int]) -> list[int]:
    """The new tokens that a streamer was given, after the prompt and before the end."""
    if stream.tokens[: len(prompt)] != prompt or not stream.ended:
        raise AssertionError(
            f"the streamer saw {stream.tokens}, ended: {stream.ended}, for the prompt {prompt}"
        )
    return stream.tokens[len(prompt) :]


def generate_without_cache(model: PreTrainedModel, text: Text, call: Call) -> Output:
    """The truth, with scores and logits where there are no beams."""
    needs_cache = ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model")
    options = passed_options(model, text, call)
    options = {name: value for name, value in options.items() if name not in needs_cache}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with plain_attention(text.ids.device):
        result = run_generate(
            model, call, inputs=text.ids, attention_mask=text.mask, use_cache=False, **options
        )
    return Output(result.sequences, result.scores, result.logits, random_state(text))


def plain_attention(device: torch.device) -> Any:
    """On a GPU: torch's memory-efficient attention is wrong for some masks (float32, 65 tokens, a
    window of 4).
    """
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()


def random_state(text: Text) -> torch.Tensor | None:
    """None on a GPU, where DynamicCache may draw for a token too many."""
    return torch.get_rng_state() if text.ids.device.type == "cpu" else None


def with_eos_that_occurs(model: PreTrainedModel, text: Text, call: Call) -> Call:
    """The call with one more end token, one that it would choose without end tokens."""
    about_ends = ("eos_token_id", "min_new_tokens", "forced_eos_token_id")
    free = replace(
        call,
        options={name: value for name, value in call.options.items() if name not in about_ends},
    )
    new = generate_without_cache(model, text, free).sequences[:, text.length :]
    row, step = call.eos_at
    eos = call.options["eos_token_id"]
    # Few, so that rows get as far.
    others = [id_ for id_ in eos if id_ < len(eos)] if isinstance(eos, list) else []
    ids = [*others, int(new[row % len(new), step % new.shape[1]])]
    return replace(call, options={**call.options, "eos_token_id": ids})


def passed_options(model: PreTrainedModel, text: Text, call: Call) -> dict[str, Any]:
    options = dict(call.options)
    if text.cached and not _CHUNKS_ON_A_TEXT:
        options.pop("prefill_chunk_size", None)
    if call.by_max_length:
        options["max_length"] = text.length + options.pop("max_new_tokens")
    if "assistant_tokens" in options:
        options["assistant_model"] = assistant = assistant_of(model)
        assistant.generation_config.num_assistant_tokens = options.pop("assistant_tokens")
    return options


@lru_cache(maxsize=4)
def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """Like the model in most of its guesses."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter += 0.03 * noise
    return assistant


def run_generate(model: PreTrainedModel, call: Call, **options: Any) -> Any:
    if call.stop_ids:
        options["stopping_criteria"] = [StopAt(call.stop_ids)]
    torch.manual_seed(call.seed)
    with torch.inference_mode() if call.inference_mode else nullcontext():
        return model.generate(**options)


def inferred_mask(ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The mask that `generate` makes where none is given."""
    pad, eos = options.get("pad_token_id"), options.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    if pad is None or pad in ends:
        return torch.ones_like(ids)
    return (ids != pad).long()


def forward(model: PreTrainedModel, text: Text, event: Forward, cache: Any) -> torch.Tensor:
    """The logits [B, n, V] of the text; with a cache, of those tokens that it does not have."""
    first = 0 if cache is None else text.cached
    options: dict[str, Any] = (
        {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
    )
    is_padded = bool((text.mask == 0).any())
    if event.mask or is_padded:
        options["attention_mask"] = text.mask
    if is_padded and "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = text.positions[:, first:]
    attention = plain_attention(text.ids.device) if cache is None else nullcontext()
    with torch.inference_mode() if event.inference_mode else torch.no_grad(), attention:
        return model(input_ids=text.ids[:, first:], **options).logits


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    before = model.config._attn_implementation
    if name is None or name == before:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def failing(model: PreTrainedModel, failure: Failure | None) -> Iterator[None]:
    """The model with one layer, or its head, that raises once."""
    if failure is None:
        yield
        return
    modules = [*decoder_layers(model), model.get_output_embeddings()]
    calls = 0

    def count_and_raise(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failure.nth_call + 1:
            raise InjectedError

    hook = modules[failure.layer % len(modules)].register_forward_pre_hook(count_and_raise)
    try:
        yield
    finally:
        hook.remove()


def continued(text: Text, call: Call, sequences: torch.Tensor) -> Text:
    """The text after a call, whose last token is not in the cache."""
    mask = text.mask.repeat_interleave(call.options.get("num_return_sequences", 1), dim=0)
    new = sequences[:, text.length :]
    new_mask = torch.ones_like(new)
    if call.hide_ended and "eos_token_id" in call.options:
        eos = call.options["eos_token_id"]
        is_end = torch.isin(new, torch.tensor(eos, device=new.device)).long()
        new_mask = (is_end.cumsum(dim=1) - is_end == 0).long()
    return Text(sequences, torch.cat([mask, new_mask], dim=1), cached=sequences.shape[1] - 1)


# --- ties


@contextmanager
def perturbed(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """The model with embeddings and logits moved by as much as rounding may move them."""
    generator = torch.Generator().manual_seed(seed)

    def noise_like(states: torch.Tensor) -> torch.Tensor:
        return (2 * torch.rand(states.shape, generator=generator) - 1).to(states.device)

    def move_embeddings(module: Any, args: Any, states: torch.Tensor) -> torch.Tensor:
        return states * (1 + 8 * torch.finfo(states.dtype).eps * noise_like(states))

    def move_logits(module: Any, args: Any, output: Any) -> None:
        size = output.logits.abs().max() * LOGITS_TOLERANCE / 2
        output.logits = output.logits + size * noise_like(output.logits)

    hooks = [
        model.get_input_embeddings().register_forward_hook(move_embeddings),
        model.register_forward_hook(move_logits),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_tie(
    model: PreTrainedModel, text: Text, call: Call, expected: torch.Tensor, got: torch.Tensor
) -> bool:
    """Whether no cache, perturbed by rounding, parts from itself as `got` does.

    Compared up to the first column that differs: what follows is another text. Beams choose whole
    texts.
    """
    columns = min(expected.shape[1], got.shape[1])
    same = (expected[:, :columns] == got[:, :columns]).all(dim=0)
    first = columns if bool(same.all()) else int(same.int().argmin())
    end = max(expected.shape[1], got.shape[1]) if call.beams > 1 else first + 1
    for seed in range(_TRIES):
        with perturbed(model, seed):
            other = generate_without_cache(model, text, call).sequences
        if torch.equal(other[:, :end], got[:, :end]):
            return True
    return False


# --- a case


@dataclass
class Workspace:
    """A model, and the caches and the decoder that its cases share."""

    model: PreTrainedModel
    pooled: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=8)
def workspace(architecture: str, variant: int, device: str, offloaded: bool = False) -> Workspace:
    build = offloaded_model if offloaded else build_model
    return Workspace(build(architecture, variant, device))


@lru_cache(maxsize=1)
def shared_decoder() -> GraphDecoder:
    """One decoder for the pooled caches of all models."""
    return GraphDecoder()


class Runner:
    """One case, event by event."""

    def __init__(self, case: Case, device: str, contenders: tuple[str, ...], tally: Tally) -> None:
        self.case, self.device, self.tally = case, device, tally
        self.space = workspace(case.architecture, case.variant, device, case.offloaded)
        self.model = self.space.model
        makers = {
            "dynamic": self._dynamic,
            "ours": self._ours,
            "decoder": self._decoder,
            "compact": self._compact,
            "attached": lambda: self._attached(Attached),
            "prefixes": lambda: self._attached(AttachedWithPrefixes),
            "decoder alone": self._decoder_alone,
        }
        # DynamicCache first: others are compared with it.
        self.contenders = [makers[name]() for name in contenders]
        self.text: Any = None  # a Text, once there is one
        self.kept_text: Any = None  # of the last call whose cache was kept
        self.turn: Any = None  # takes the mutation from one of its numbers to the other
        self.event = 0
        self.refused: tuple[int, str] | None = (
            None  # the event that DynamicCache could not do, and why
        )

    def _dynamic(self) -> Contender:
        return Contender(self.model)

    def _ours(self) -> Contender:
        return Ours(self.model, self._cache("ours"))

    def _decoder(self) -> Contender:
        cache = self._cache("decoder")
        return OursWithDecoder(
            self.model, cache, shared_decoder() if self.case.pooled else GraphDecoder()
        )

    def _compact(self) -> Contender:
        cache = self._cache("compact", "compact")
        return Compact(self.model, cache, shared_decoder() if self.case.pooled else GraphDecoder())

    def _attached(self, kind: type[Attached]) -> Contender:
        make = partial(kind.twin, self.model)
        return kind(self._pooled(kind.name, make) if self.case.pooled else make())

    def _decoder_alone(self) -> Contender:
        return DecoderAlone(
            self.model, self._pooled("alone", GraphDecoder) if self.case.pooled else GraphDecoder()
        )

    def _cache(self, owner: str, sliding: str = "full") -> StaticContiguousCache:
        case, model = self.case, self.model
        if case.pooled:
            make = partial(
                StaticContiguousCache.from_model, model, ROOMY, MAX_ROWS, sliding=sliding
            )
            return self._pooled(owner, make)
        if case.lazy:
            return StaticContiguousCache(model.config, case.capacity, sliding=sliding)
        return StaticContiguousCache.from_model(model, case.capacity, case.rows, sliding=sliding)

    def _pooled(self, name: str, make: Any) -> Any:
        if name not in self.space.pooled:
            self.space.pooled[name] = make()
        return self.space.pooled[name]

    def run(self) -> None:
        with self._mutable():
            for number, event in enumerate(self.case.events):
                self.event = number
                with attention_implementation(self.model, getattr(event, "attention", None)):
                    self._handle(event)

    @contextmanager
    def _mutable(self) -> Iterator[None]:
        mutation = self.case.mutation
        if mutation is None:
            yield
            return
        with mutable(self.model, mutation.kind, mutation.place) as change:
            numbers = itertools.cycle(mutation.numbers)
            self.turn = lambda: change(next(numbers))
            self.turn()
            yield

    def _handle(self, event: Event) -> None:
        if isinstance(event, NewText):
            self._new_text(event)
        elif isinstance(event, Crop):
            self._crop(event)
        elif isinstance(event, Rows):
            self._take_rows(event)
        elif isinstance(event, Copy):
            self._copy()
        elif isinstance(event, Change):
            self._change()
        elif isinstance(event, Continue):
            self._continue(event)
        elif isinstance(event, Together):
            self._together(event)
        else:
            self._extend(event)
            (self._forward if isinstance(event, Forward) else self._call)(event)

    def finish(self) -> None:
        for contender in self.contenders:
            if isinstance(contender, OursWithDecoder):
                self.tally.fallbacks.update(contender.reasons)

    # --- events

    def _new_text(self, event: NewText) -> None:
        self.text = None
        for contender in self.contenders:
            contender.forget(event.by_crop)

    @property
    def _holders(self) -> list[Contender]:
        """The contenders with a cache of their own."""
        return [contender for contender in self.contenders if contender.cache is not None]

    def _copy(self) -> None:
        for contender in self._holders:
            contender.copy_cache()
        self._check_lengths()

    def _change(self) -> None:
        """Another number, and all caches empty: keys belong to the model that computed them."""
        self.turn()
        self.text.cached = 0
        for contender in self.contenders:
            if self.case.mutation.kind == "window" and isinstance(contender, Ours):
                case, sliding = self.case, contender.sliding
                rows = MAX_ROWS if case.pooled else case.rows
                contender.use_cache(
                    StaticContiguousCache.from_model(
                        self.model, case.capacity, rows, sliding=sliding
                    )
                )
            contender.reset()

    def _continue(self, event: Continue) -> None:
        """The text of the case stays: the caches that were kept are not those of the contenders."""
        if self.kept_text is None:
            return
        before, self.text = self.text, self.kept_text
        self._extend(event)
        step = Forward(event.tokens)
        call = replace(greedy_call(event.new_tokens), only_new=True)
        by_generate = event.new_tokens > 0
        if by_generate:
            expected = self._truth(lambda: generate_without_cache(self.model, self.text, call))
        else:
            seen = self.text.mask[:, self.text.cached :].bool()
            logits = self._truth(lambda: forward(self.model, self.text, step, None))[
                :, self.text.cached :
            ][seen]
        for contender in self._pooled_contenders:
            cache, contender.kept = contender.kept, None
            if cache is None:
                continue
            how = {"past_key_values": cache}
            if by_generate:
                got = self._attempt(
                    contender, partial(generate, contender.model, self.text, call, how)
                )
                self._judge(contender, self._compare(call, expected, got), got.sequences, {})
            else:
                got = self._attempt(
                    contender, partial(forward, contender.model, self.text, step, cache)
                )
                self._judge(contender, self._compare_logits(logits, got[seen]), got, {})
        self.text, self.kept_text = before, None

    def _together(self, event: Together) -> None:
        """Random states are not compared: threads share one."""
        call = greedy_call(event.new_tokens)
        texts = [
            Text(ids, torch.ones_like(ids))
            for ids in (self._ids([prompt]) for prompt in event.prompts)
        ]
        expected = [
            self._truth(partial(generate_without_cache, self.model, text, call)) for text in texts
        ]
        logits = self._truth(partial(forward, self.model, texts[-1], Forward(()), None))
        before = self.text
        for contender in self._pooled_contenders:
            outputs = self._attempt(contender, partial(contender.generate_in_threads, texts, event))
            for self.text, truth, got in zip(texts, expected, outputs, strict=True):
                if isinstance(got, list):
                    problems = [self._compare_logits(logits, one) for one in got]
                    self._judge(contender, next(filter(None, problems), None), got[-1], {})
                else:
                    truth.random_state = None
                    self._judge(contender, self._compare(call, truth, got), got.sequences, {})
        self.text = before

    @property
    def _pooled_contenders(self) -> list[Any]:
        return [contender for contender in self.contenders if isinstance(contender, WithPool)]

    def _ids(self, rows: Any) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def _extend(self, event: Call | Forward | Continue) -> None:
        tokens = self._ids(event.tokens)
        mask = torch.ones_like(tokens)
        for row, pad in enumerate(getattr(event, "padding", ())):
            mask[row, :pad] = 0
        if self.text is None:
            self.text = Text(tokens, mask)
        else:
            self.text.extend(tokens, mask)

    def _crop(self, event: Crop) -> None:
        # The first column by which every row has a token.
        first = int(self.text.mask.argmax(dim=1).max())
        caches = [contender.cache for contender in self._holders if contender.is_ours]
        kept = [layer.num_croppable for cache in caches for layer in cache.kv_layers]
        tokens = max(0, min([event.tokens, self.text.cached - first - 1, *kept]))
        for contender in self._holders:
            self._attempt(contender, lambda contender=contender: contender.cache.crop(-tokens))
        self.text.cut(self.text.cached - tokens)
        self._check_lengths()

    def _take_rows(self, event: Rows) -> None:
        indices = torch.tensor(event.indices, device=self.device)
        if event.method == "batch_repeat_interleave":
            argument: Any = len(indices) // len(self.text.ids)
        else:
            argument = indices
        for contender in self._holders:
            self._attempt(
                contender,
                lambda contender=contender: getattr(contender.cache, event.method)(argument),
            )
        self.text.take_rows(indices)

    def _forward(self, event: Forward) -> None:
        whole = self._truth(lambda: forward(self.model, self.text, event, None))
        seen = self.text.mask[:, self.text.cached :].bool()
        expected = whole[:, self.text.cached :][seen]
        wrong: dict[str, Any] = {}
        for contender in self._holders:
            got = self._attempt(
                contender, lambda contender=contender: contender.forward(self.text, event)
            )
            if got is not None:
                self._judge(contender, self._compare_logits(expected, got[seen]), got, wrong)
        self.text.cached = self.text.length
        self._check_lengths()

    def _call(self, call: Call) -> None:
        if call.eos_at is not None:
            call = self._truth(lambda: with_eos_that_occurs(self.model, self.text, call))
        expected = self._truth(lambda: generate_without_cache(self.model, self.text, call))
        wrong: dict[str, Any] = {}
        for contender in list(self.contenders):
            got = self._attempt(
                contender, lambda contender=contender: contender.generate(self.text, call)
            )
            if got is not None:
                self._judge(contender, self._compare(call, expected, got), got.sequences, wrong)
        self.text = continued(self.text, call, expected.sequences)
        if call.keeps_cache:
            self.kept_text = copy.copy(self.text)
        if call.beams == 1:
            self._check_lengths()

    # --- verdicts

    def _truth(self, compute: Any) -> Any:
        try:
            return compute()
        except Exception as error:  # whatever transformers refuses
            raise SkippedCaseError(f"no cache: {_first_line(error)}") from error

    def _attempt(self, contender: Contender, act: Any) -> Any:
        """What the contender does; None where DynamicCache cannot, which then leaves the case."""
        try:
            return act()
        except SkippedCaseError:
            raise
        except Exception as error:
            reason = _first_line(error)
            if not contender.is_ours:
                self._leave(contender, f"refuses: {reason}")
                self.refused = (self.event, reason)
                return None
            if isinstance(error, UnfinishedPass) and contender.name.startswith("ours"):
                self._leave(contender, f"refuses: {reason}")
                return None
            if any(part in str(error) for part in REFUSALS):
                raise SkippedCaseError(f"documented refusal: {reason}") from error
            if self.refused == (self.event, reason):
                raise SkippedCaseError(f"as DynamicCache: {reason}") from error
            self._fault(contender, f"raises {reason}")
            raise SkippedCaseError("a fault") from error

    def _leave(self, contender: Contender, why: str) -> None:
        self.contenders.remove(contender)
        self.tally.only_dynamic[f"{self.case.architecture}: {why}"] += 1

    def _judge(
        self, contender: Contender, problem: str | None, got: torch.Tensor, wrong: dict[str, Any]
    ) -> None:
        """Book what comparing an answer with the truth has found; `wrong` keeps the wrong answers
        to this event.
        """
        self.tally.compared[contender.name] += 1
        if problem is None:
            return
        if not contender.is_ours:
            if problem != "tie":
                wrong[contender.name] = got  # ours may share it, which is then no fault of ours
                self._leave(contender, "differs from no cache")
            return
        where = f"seed {self.case.seed}, event {self.event}, {contender.name}"
        if problem == "tie":
            self.tally.ties.append(where)
            raise SkippedCaseError("a tie")
        dynamic = wrong.get(Contender.name)
        if dynamic is not None and _alike(dynamic, got):
            self.tally.like_dynamic.append(f"{where} ({self.case.architecture})")
            raise SkippedCaseError("as DynamicCache")
        self._fault(contender, problem)
        raise SkippedCaseError("a fault")

    def _fault(self, contender: Contender, what: str) -> None:
        self.tally.faults.append(Fault(self.case, self.event, contender.name, what))

    def _compare(self, call: Call, expected: Output, got: Output) -> str | None:
        """What is wrong with an answer of `generate`: None, "tie", or words."""
        if not torch.equal(expected.sequences, got.sequences):
            if is_tie(self.model, self.text, call, expected.sequences, got.sequences):
                return "tie"
            return f"tokens {_new(got, self.text)}, not {_new(expected, self.text)}"
        if expected.random_state is not None and not torch.equal(
            expected.random_state, got.random_state
        ):
            return "another random state after the call"
        new_tokens = expected.sequences[:, self.text.length :]
        if got.streamed is not None and got.streamed != new_tokens.T.flatten().tolist():
            return f"streamed {got.streamed}, not {new_tokens.T.flatten().tolist()}"
        problem = self._compare_steps(got, new_tokens)
        if not got.logits or problem is not None:
            return problem
        steps = len(expected.logits)
        if (len(got.logits), len(got.scores)) != (steps, steps):
            return f"{len(got.logits)} logits and {len(got.scores)} scores of {steps} steps"
        logits, scores = torch.stack(expected.logits), torch.stack(expected.scores)
        problem = self._compare_logits(logits, torch.stack(got.logits))
        if problem is None:
            # Processors may shift scores towards 0, but not the rounding of the logits that they
            # come from.
            scale = logits[logits.isfinite()].abs().max().item() / min(
                1.0, call.options.get("temperature", 1.0)
            )
            problem = self._compare_logits(scores, torch.stack(got.scores), "scores", scale)
        return problem

    def _compare_steps(self, got: Output, new_tokens: torch.Tensor) -> str | None:
        if got.recorded is None:
            return None
        for recorded, row in zip(got.recorded, new_tokens.tolist(), strict=True):
            if recorded != row[: len(recorded)] or not recorded:
                return f"recorded {recorded} of {row}"
        return None

    def _compare_logits(
        self,
        expected: torch.Tensor,
        got: torch.Tensor,
        name: str = "logits",
        scale: float | None = None,
    ) -> str | None:
        if expected.shape != got.shape:
            return f"{name} of shape {list(got.shape)}, not {list(expected.shape)}"
        finite = expected.isfinite() & got.isfinite()
        if not torch.equal(expected.isfinite(), got.isfinite()):
            # The logits have agreed before the scores are looked at, so top-k or top-p has cut at a
            # near tie.
            return "tie" if name == "scores" else f"{name} that are not finite elsewhere"
        expected, got = expected[finite], got[finite]
        if expected.numel() == 0:
            return None
        difference = (got - expected).abs().max().item() / (scale or expected.abs().max().item())
        if not difference <= LOGITS_TOLERANCE:
            return f"{name} differ by {difference:.2g} of the largest logit, more than {LOGITS_TOLERANCE:.2g}"
        self.tally.largest_difference = max(self.tally.largest_difference, difference)
        return None

    def _check_lengths(self) -> None:
        for contender in self._holders:
            length = int(contender.cache.get_seq_length())
            if length != self.text.cached:
                words = f"the cache holds {length} tokens, not {self.text.cached}"
                # A call of one token ends before a cache can refuse a model that skips layers.
                if not contender.is_ours or contender.cache.is_unfinished:
                    self._leave(contender, words)
                    continue
                self._fault(contender, words)
                raise SkippedCaseError("a fault")


def run_case(case: Case, device: str, contenders: tuple[str, ...], tally: Tally) -> None:
    """Run one case and book what it shows."""
    tally.cases += 1
    tally.architectures.add(case.architecture)
    tally.moves.update(case.moves)
    with patch.object(storage, "SLACK", 2):  # so that short texts fill the slots of compact layers
        runner = Runner(case, device, contenders, tally)
        try:
            runner.run()
        except SkippedCaseError as reason:
            tally.skipped[str(reason)] += 1
        runner.finish()


def _new(output: Output, text: Text) -> list[list[int]]:
    return output.sequences[:, text.length :].tolist()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return (
        torch.equal(one, other)
        if one.dtype == torch.long
        else torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160]
