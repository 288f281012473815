"""A fuzz case: one model, one cache and a history of events on it, all drawn from one integer seed.

Every history is a legal use: a text grows, is cut by `crop`, gets other rows, or is given up for
another text.

Moves come on top: a mutation of the model between calls, threads, offloaded weights, a returned
cache that is used by hand. Each family of moves has random numbers of its own: a case without some
of them is otherwise the same.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.fuzz.models import ARCHITECTURES, VARIANTS, available
from tests.fuzz.mutations import KINDS, NUMBERS

SEEDS_PER_MODEL = (
    4  # successive seeds share a model, since building one takes as long as a short call
)
MAX_ROWS = 12
ROOMY = 224  # tokens; no history is longer
FAMILIES = ("mutations", "threads", "offload", "returned")
MOVES = (*FAMILIES, *KINDS)  # what a run can be without: a family, or one kind of mutation
PADDING = 0  # the id at padded positions
_FIRST_ID, _END_ID = 3, 64  # prompts are drawn from here; every vocabulary has at least 64 ids

Tokens = tuple[tuple[int, ...], ...]  # new tokens of each row


@dataclass(frozen=True)
class NewText:
    """Forget the text by `reset`, or `by_crop` of all of it. The next tokens begin another one."""

    by_crop: bool = False


@dataclass(frozen=True)
class Failure:
    """A layer, or the head as the one after the last, raises in its n-th call of an event. Then the
    call is made again.

    `crop` says that tokens which the failed call has left in the cache are cropped first.
    """

    layer: int
    nth_call: int
    crop: bool


@dataclass(frozen=True)
class Call:
    """Append `tokens` to the text and call `generate` with `options`.

    `padding[b]`: as many of the first tokens of row b are masked.
    `hide_ended`: once the call has returned, what follows the end of a row is masked.
    `attention`: the implementation for this event.
    `only_new`: pass the tokens that are not cached, with a mask for all.
    `embeds`: pass the prompt as vectors, "alone" or "with ids".
    `by_max_length`: say `max_length` in the place of `max_new_tokens`.
    `mask`: pass the attention mask even where `generate` would infer the same one.
    `eos_at`: a row and a step; the token that is chosen there without end tokens is made the last
        of them.
    `keeps_cache`: calls without a cache of their own ask for the one that they were given
        (`return_dict_in_generate`).
    """

    tokens: Tokens
    options: dict[str, Any]
    seed: int
    padding: tuple[int, ...] = ()
    hide_ended: bool = False
    attention: str | None = None
    only_new: bool = False
    embeds: str | None = None
    by_max_length: bool = False
    mask: bool = True
    eos_at: tuple[int, int] | None = None
    stop_ids: tuple[int, ...] = ()
    streamer: bool = False
    record_steps: bool = False
    with_decoder: bool = True
    inference_mode: bool = False
    failure: Failure | None = None
    keeps_cache: bool = False

    @property
    def beams(self) -> int:
        return self.options.get("num_beams", 1)

    @property
    def copies(self) -> int:
        """Rows of the cache for each row of the prompt."""
        return max(self.beams, self.options.get("num_return_sequences", 1))

    @property
    def longest(self) -> int:
        """Tokens by which the cached text may grow, with the guesses of assisted decoding."""
        guesses = self.options.get("prompt_lookup_num_tokens", 0) + self.options.get(
            "assistant_tokens", 0
        )
        return len(self.tokens[0]) + self.options["max_new_tokens"] + guesses

    @property
    def is_assisted(self) -> bool:
        return "prompt_lookup_num_tokens" in self.options or "assistant_tokens" in self.options


@dataclass(frozen=True)
class Forward:
    """Append `tokens` to the text and pass what is not cached through the model."""

    tokens: Tokens
    padding: tuple[int, ...] = ()
    mask: bool = True
    inference_mode: bool = False
    failure: Failure | None = None


@dataclass(frozen=True)
class Crop:
    """`crop(-tokens)`, or as many as leave a token in every row.

    The text then ends where the cache does.
    """

    tokens: int


@dataclass(frozen=True)
class Rows:
    """Row i of the batch becomes what row `indices[i]` was, by this method of the cache."""

    method: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Go on with a deep copy of the cache; the other one is emptied."""


@dataclass(frozen=True)
class Change:
    """The mutation of the case takes effect, or is taken back.

    The text stays, and every cache is reset.
    """


@dataclass(frozen=True)
class Continue:
    """Append `tokens` to the text of the last call that kept its cache, and go on with that cache
    by hand.

    By one forward pass, or with `new_tokens` by `generate`. The text of the case stays as it is.
    """

    tokens: Tokens
    new_tokens: int = 0


@dataclass(frozen=True)
class Together:
    """Threads use one model at the same time, each with a prompt of its own.

    `generate` for `new_tokens`; with `plain` the last thread passes its prompt through the model
    instead, again and again while others run.
    """

    prompts: Tokens
    new_tokens: int
    plain: bool


Event = NewText | Call | Forward | Crop | Rows | Copy | Change | Continue | Together


@dataclass(frozen=True)
class Mutation:
    """What a case changes about its model between calls, and from which number to which."""

    kind: str
    place: int
    numbers: tuple[float, float]


@dataclass(frozen=True)
class Case:
    seed: int
    architecture: str
    variant: int
    events: tuple[Event, ...]
    capacity: int
    rows: int  # of the storage
    lazy: bool  # allocated by the first forward pass, and else by `from_model`
    pooled: bool  # on a cache and decoder that earlier cases of this model have used
    mutation: Mutation | None = None
    offloaded: bool = False

    @property
    def moves(self) -> set[str]:
        """The families of its moves, and the kind of its mutation."""
        found = {"offload"} if self.offloaded else set()
        found |= {"mutations", self.mutation.kind} if self.mutation is not None else set()
        kinds = {Together: "threads", Continue: "returned"}
        return found | {kinds[type(event)] for event in self.events if type(event) in kinds}

    def describe(self) -> str:
        how = "pooled" if self.pooled else "lazy" if self.lazy else f"from_model, {self.rows} rows"
        how += ", offloaded" if self.offloaded else ""
        head = f"seed {self.seed}: {self.architecture} v{self.variant}, capacity {self.capacity} ({how})"
        if self.mutation is not None:
            head += (
                f", mutation {self.mutation.kind} {self.mutation.numbers} at {self.mutation.place}"
            )
        return "\n".join(
            [head, *(f"  {number}. {describe(event)}" for number, event in enumerate(self.events))]
        )


def describe(event: Event) -> str:
    """The event on one line: fields that differ from their defaults, tokens as rows x columns."""
    said = []
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "tokens" and not isinstance(event, Crop):
            said.append(f"tokens {len(value)}x{len(value[0])}")
        elif field.name == "options":
            said += [f"{name}={option}" for name, option in value.items()]
        elif value != field.default and not (field.name == "padding" and not any(value)):
            said.append(f"{field.name}={describe(value) if isinstance(value, Failure) else value}")
    return f"{type(event).__name__}({', '.join(said)})"


def make_case(seed: int, without: Collection[str] = ()) -> Case:
    """The case of this seed. Blocks of seeds go through all architectures, and then through the
    next variants.

    `without` names moves to leave out.
    """
    names = available()
    block = seed // SEEDS_PER_MODEL
    name, variant = names[block * 29 % len(names)], block // len(names) % VARIANTS
    rng = random.Random(seed)
    pooled = rng.random() < 0.5
    lazy = rng.random() < 0.4
    history = _History(rng, name, fixed_rows=lazy)
    moves = _Moves(seed, history, frozenset(without))
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        history.grow()
        moves.follow()
    moves.end()
    exact = rng.random() < 0.5 and not pooled
    capacity = history.needed if exact else ROOMY
    how = history.rows, lazy, pooled, moves.mutation, moves.offloaded
    return Case(seed, name, variant, tuple(history.events), capacity, *how)


class _History:
    """Draws events and keeps what the next one needs to know: rows, and bounds on the length of the
    text.

    With `fixed_rows` the first text has as many rows as any later one: a lazily built cache
    allocates no more.
    """

    def __init__(self, rng: random.Random, architecture: str, fixed_rows: bool) -> None:
        self.rng, self.architecture, self.fixed_rows = rng, architecture, fixed_rows
        self.events: list[Event] = []
        self.batch = 0
        self.rows = 0  # most rows of the cache so far; of the first text with `fixed_rows`
        self.longest = 0  # upper bound of the length of the text
        self.needed = 0
        self.has_uncached = (
            False  # the last token of the text, which `generate` has chosen and not passed on
        )
        # the text cannot go on: there is none yet, or beams have left other rows in the cache
        self.must_end = True

    def grow(self) -> None:
        rng = self.rng
        kinds = {"continue": 5, "forward": 2, "crop": 2, "rows": 1, "copy": 0.5, "new text": 2}
        kind = "new text" if self.must_end else rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "new text":
            self._new_text()
        elif kind == "crop":
            self._crop()
        elif kind == "rows":
            self._take_rows()
        elif kind == "copy":
            self.events.append(Copy())
        if kind == "forward" or rng.random() < 0.12:
            self._forward()
        else:
            self._call()

    # --- events

    def _new_text(self) -> None:
        batch = self.rng.choices([1, 2, 3, 4], [5, 3, 1, 1])[0]
        self.batch = min(batch, self.rows) if self.fixed_rows and self.rows else batch
        self.events.append(NewText(self.rng.random() < 0.2))
        self.longest = 0
        self.must_end = self.has_uncached = False

    def _draw_padding(self, columns: int, is_first: bool) -> tuple[int, ...]:
        """A text begins with a token in its longest row; later padding makes holes in the mask."""
        rng = self.rng
        likely = (0.5 if self.batch > 1 else 0.08) if is_first else 0.12
        if columns == 0 or rng.random() > likely:
            return (0,) * self.batch
        padding = [rng.randrange(columns) for _ in range(self.batch)]
        if self.batch > 1:
            padding[rng.randrange(self.batch)] = 0
        return tuple(padding)

    def _crop(self) -> None:
        tokens = self.rng.choice([0, 1, 1, 2, 3, 5, 8, 13, 40])
        self.events.append(Crop(tokens))
        self.has_uncached = False

    def _take_rows(self) -> None:
        rng, most = self.rng, max(1, self.rows if self.fixed_rows else 4)
        method = rng.choice(["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
        count = self.batch if method == "reorder_cache" else rng.randint(1, most)
        indices = tuple(rng.randrange(self.batch) for _ in range(count))
        if method == "batch_repeat_interleave":
            repeats = rng.randint(1, max(1, most // self.batch))
            indices = tuple(row for row in range(self.batch) for _ in range(repeats))
        self.events.append(Rows(method, indices))
        self.batch = len(indices)
        self._count_rows(self.batch)

    def _forward(self) -> None:
        rng = self.rng
        tokens, padding = self._tokens(is_first=self.longest == 0)
        self._count_rows(self.batch)
        self._count(len(tokens[0]), 0)
        self.has_uncached = False
        failure = self._failure() if rng.random() < 0.2 else None
        self.events.append(
            Forward(tokens, padding, rng.random() < 0.5, rng.random() < 0.25, failure)
        )

    def _call(self) -> None:
        is_first = self.longest == 0
        tokens, padding = self._tokens(is_first)
        call = self._draw_call(Call(tokens, {}, self.rng.randrange(1000), padding), is_first)
        self.batch *= call.options.get("num_return_sequences", 1)
        self._count_rows(len(tokens) * call.copies)
        self._count(len(tokens[0]), call.longest - len(tokens[0]))
        # A row must not end in a masked token when the next call adds none.
        self.must_end, self.has_uncached = call.beams > 1, not call.hide_ended
        self.events.append(call)

    def _draw_call(self, call: Call, is_first: bool) -> Call:
        rng, architecture = self.rng, ARCHITECTURES[self.architecture]
        only_new = not is_first and rng.random() < 0.35
        takes_embeds = architecture.takes_embeds and not only_new
        call = replace(
            call,
            attention=rng.choice(architecture.attention) if rng.random() < 0.1 else None,
            only_new=only_new,
            embeds=rng.choice(["alone", "with ids"])
            if takes_embeds and rng.random() < 0.12
            else None,
            mask=rng.random() < 0.6,
            with_decoder=rng.random() < 0.9,
            inference_mode=rng.random() < 0.25,
            failure=self._failure() if rng.random() < 0.08 else None,
        )
        options = {"max_new_tokens": rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 8, 12])}
        mode = self._mode(is_first, call)
        options |= getattr(self, f"_{mode}")()
        sees_all_ids = not call.only_new and call.embeds != "alone"
        is_assisted = mode in ("lookup", "assistant")
        if sees_all_ids and not is_assisted:
            options |= self._text_processors()
        options |= self._ends(options["max_new_tokens"])
        if not is_assisted:
            options |= self._other_processors()
        if not is_assisted and call.embeds is None and rng.random() < 0.15:
            options["prefill_chunk_size"] = rng.randint(1, 6)
        call = replace(
            call,
            options=options,
            by_max_length=sees_all_ids and call.embeds is None and rng.random() < 0.15,
            hide_ended=mode != "beams" and rng.random() < 0.5,
            eos_at=(rng.randrange(4), rng.randrange(12))
            if "eos_token_id" in options and rng.random() < 0.4
            else None,
        )
        return call if is_assisted or mode == "beams" else self._watched(call)

    def _mode(self, is_first: bool, call: Call) -> str:
        weights = {"greedy": 5.0, "sampling": 3.0}
        if is_first and self.batch <= 2 and not self._must_keep_rows():
            weights["beams"] = 1.0
        if is_first and self.batch == 1 and call.embeds is None:
            weights |= {"lookup": 0.6, "assistant": 0.4}
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _must_keep_rows(self) -> bool:
        return self.fixed_rows and self.rows > 0

    # --- options of `generate`

    def _greedy(self) -> dict[str, Any]:
        return {"do_sample": False}

    def _sampling(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {"do_sample": True, "top_k": rng.choice([0, 5, 50])}
        if rng.random() < 0.5:
            options["temperature"] = rng.choice([0.3, 0.7, 1.5])
        if rng.random() < 0.3:
            options |= rng.choice(
                [
                    {"top_p": 0.8},
                    {"min_p": 0.05},
                    {"top_p": 0.95, "min_p": 0.01},
                    {"typical_p": 0.7},
                ]
            )
        if (
            self.longest == 0
            and self.batch <= 2
            and not self._must_keep_rows()
            and rng.random() < 0.25
        ):
            options["num_return_sequences"] = rng.choice([2, 3])
        return options

    def _beams(self) -> dict[str, Any]:
        rng = self.rng
        beams = rng.choice([2, 3])
        options = {"num_beams": beams, "do_sample": rng.random() < 0.3}
        if rng.random() < 0.4:
            options["num_return_sequences"] = rng.randint(1, beams)
        if rng.random() < 0.3:
            options |= {"early_stopping": True, "length_penalty": rng.choice([0.5, 2.0])}
        return options

    def _lookup(self) -> dict[str, Any]:
        return {"do_sample": False, "prompt_lookup_num_tokens": self.rng.randint(1, 4)}

    def _assistant(self) -> dict[str, Any]:
        return {"do_sample": False, "assistant_tokens": self.rng.randint(1, 4)}

    def _text_processors(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.rng.random() < 0.15:
            options["repetition_penalty"] = self.rng.choice([0.8, 1.3, 2.0])
        if self.rng.random() < 0.1:
            options["no_repeat_ngram_size"] = self.rng.choice([1, 2, 3])
        if self.rng.random() < 0.05:
            options["bad_words_ids"] = [[self.rng.randrange(64)] for _ in range(9)] + [[7, 8]]
        if self.batch == 1 and self.rng.random() < 0.04:
            options["guidance_scale"] = 1.5  # the processor runs the model itself
        return options

    def _other_processors(self) -> dict[str, Any]:
        rng = self.rng
        if rng.random() > 0.12:
            return {}
        return rng.choice(
            [
                {"suppress_tokens": rng.sample(range(64), 20)},
                {"forced_eos_token_id": rng.randrange(64)},
                {"renormalize_logits": True},
            ]
        )

    def _ends(self, max_new_tokens: int) -> dict[str, Any]:
        """End tokens: as many as make it likely that some row ends early."""
        rng = self.rng
        if rng.random() < 0.5:
            return rng.choice([{}, {"pad_token_id": PADDING}])
        count = rng.choice([1, 6, 12, 24])
        ids = rng.sample(range(64), count)
        options: dict[str, Any] = {"eos_token_id": ids if count > 1 else ids[0]}
        if rng.random() < 0.8:
            options["pad_token_id"] = rng.choice([PADDING, PADDING, 1, ids[0], 50])
        if rng.random() < 0.2:
            options["min_new_tokens"] = rng.randint(1, min(4, max_new_tokens))
        return options

    def _watched(self, call: Call) -> Call:
        """With something that looks at every step."""
        rng = self.rng
        if rng.random() < 0.2:
            call.options.update(
                return_dict_in_generate=True, output_scores=True, output_logits=True
            )
        if rng.random() < 0.03:
            call.options.update(return_dict_in_generate=True, output_hidden_states=True)
        return replace(
            call,
            stop_ids=tuple(rng.sample(range(64), 8)) if rng.random() < 0.1 else (),
            streamer=rng.random() < 0.1,
            record_steps=rng.random() < 0.08,
        )

    # --- numbers

    def _tokens(self, is_first: bool) -> tuple[Tokens, tuple[int, ...]]:
        """Tokens to append, and the padding of each row."""
        rng = self.rng
        columns = rng.choice(
            [1, 2, 3, 5, 7, 9, 9, 12, 12, 16, 24] if is_first else [0, 1, 1, 2, 3, 5, 9]
        )
        columns = columns if self.has_uncached else max(1, columns)
        few = rng.random() < 0.3  # repeated tokens: prompt lookup finds its guesses
        ids = rng.sample(range(_FIRST_ID, _END_ID), 3) if few else list(range(_FIRST_ID, _END_ID))
        padding = self._draw_padding(columns, is_first)
        rows = ([PADDING] * pad + rng.choices(ids, k=columns - pad) for pad in padding)
        return tuple(tuple(row) for row in rows), padding

    def _failure(self) -> Failure:
        return Failure(
            self.rng.randrange(12), self.rng.choice([0, 0, 1, 2]), self.rng.random() < 0.5
        )

    def _count(self, tokens: int, new_tokens: int) -> None:
        self.longest += tokens + new_tokens
        self.needed = max(self.needed, self.longest)

    def _count_rows(self, rows: int) -> None:
        self.rows = self.rows if self._must_keep_rows() else max(self.rows, rows)


class _Moves:
    """Draws what comes on top of a history, and puts it there."""

    def __init__(self, seed: int, history: _History, without: frozenset[str]) -> None:
        self.history, self.without = history, without
        self.rng = {family: random.Random(f"{family} {seed}") for family in FAMILIES}
        rng = self.rng["mutations"]
        drawn = Mutation(rng.choice(list(KINDS)), rng.randrange(100), rng.choice(NUMBERS))
        self.offloaded = self._has("offload", 0.05)
        is_mutated = (
            self._has("mutations", 0.4) and drawn.kind not in without and not self.offloaded
        )
        self.mutation = drawn if is_mutated else None
        # Accelerate moves the weights in and out around each pass of one thread.
        self.threads = self._has("threads", 0.12) and not self.offloaded
        self.changes: list[Event] = []

    def _has(self, family: str, chance: float) -> bool:
        return self.rng[family].random() < chance and family not in self.without

    def follow(self) -> None:
        """What follows the last event: its cache is kept, or the model changes and the call is made
        again.
        """
        call = self.history.events[-1]
        if not isinstance(call, Call) or call.beams > 1:
            return
        if self._has("returned", 0.15) and not call.is_assisted:
            self.history.events[-1] = replace(call, keeps_cache=True)
            self.history.events.append(self._continue())
        chance = self.rng["mutations"].random()
        if self.mutation is not None and chance < 0.7:
            self.changes += [Change(), self._again(call)]
            self.history.events += self.changes[-2:]

    def end(self) -> None:
        events = self.history.events
        if any("assistant_tokens" in getattr(event, "options", ()) for event in events):
            # The assistant is a copy of the model: it would keep the mutation, and has no weights
            # to copy.
            events[:] = [
                event for event in events if not any(event is change for change in self.changes)
            ]
            self.offloaded = False
        if not any(isinstance(event, Change) for event in events):
            self.mutation = None
        if self.mutation is not None and self.mutation.kind == "attention":
            # Keys of one attention function do not serve another.
            events[:] = [
                replace(e, attention=None) if getattr(e, "attention", None) else e for e in events
            ]
        if self.threads:
            rng = self.rng["threads"]
            events.insert(rng.randint(1, len(events)), self._together(rng))

    def _continue(self) -> Continue:
        rng = self.rng["returned"]
        return Continue(self._tokens(rng), rng.choice([0, 2, 4]))

    def _again(self, call: Call) -> Call:
        """The call again, after tokens of another turn: a captured step and a prefix of the last
        one would serve it.
        """
        history = self.history
        one_row = () if history.batch == 1 else ("guidance_scale",)
        left_out = ("num_return_sequences", *one_row)
        options = {name: value for name, value in call.options.items() if name not in left_out}
        tokens = self._tokens(self.rng["mutations"])
        again = replace(
            call, tokens=tokens, options=options, padding=(), failure=None, keeps_cache=False
        )
        history._count_rows(history.batch)
        history._count(len(tokens[0]), again.longest - len(tokens[0]))
        return again

    def _tokens(self, rng: random.Random) -> Tokens:
        columns = rng.randint(1, 3)
        return tuple(
            tuple(rng.choices(range(_FIRST_ID, _END_ID), k=columns))
            for _ in range(self.history.batch)
        )

    def _together(self, rng: random.Random) -> Together:
        lengths = rng.choices([2, 5, 9, 14], k=rng.choice([2, 2, 3]))
        prompts = tuple(
            tuple(rng.choices(range(_FIRST_ID, _END_ID), k=length)) for length in lengths
        )
        return Together(prompts, rng.choice([3, 5, 8]), rng.random() < 0.5)
