"""Timers, turns, figures of trials, the bytes that a decode step must read, the memory bandwidth."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
from contenders import CONTENDERS, Keywords, NextKeywords, SetUp
from tqdm import tqdm
from transformers import PreTrainedModel, StoppingCriteria
from workload import BadArgument, Workload

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.cache.layout import known_shapes, plan_layers

BANDWIDTH_BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}
SIDES = ("usual", "exact")
T = TypeVar("T")
Spread = dict[str, float]


# --- timers


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall-clock seconds of one call, with the device idle before and after it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


class Clock(StoppingCriteria):
    """Synchronizes and takes the time after each token; never stops a run."""

    def __init__(self, device: str, batch_size: int) -> None:
        self.device = device
        self.times: list[float] = []
        self.not_done = torch.zeros(batch_size, dtype=torch.bool, device=device)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        synchronize(self.device)
        self.times.append(time.perf_counter())
        return self.not_done

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds from each token to the next: one value fewer than tokens."""
        return [(after - before) * 1e3 for before, after in pairwise(self.times)]


class TimedGenerate:
    """`generate` with one contender.

    The first call builds its cache and decoder; later calls use them again. Calls are greedy if
    their keywords do not say otherwise. `set_up` replaces the contender's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contender: str,
        workload: Workload,
        set_up: SetUp | None = None,
    ) -> None:
        self.model: Any = model
        self.contender = contender
        self.workload = workload
        self.prompt = workload.prompt()
        self.set_up = set_up or CONTENDERS[contender].set_up
        self.keywords: Keywords = {}
        self._next_keywords: NextKeywords | None = None

    def seconds(self, new_tokens: int, **more: Any) -> float:
        taken = seconds(lambda: self._generate(new_tokens, **more), self.workload.device)
        wait_for_kernels(self.keywords)
        return taken

    def step_ms(self) -> float:
        new_tokens = self.workload.new_tokens
        trial = (self.seconds(1), self.seconds(new_tokens))
        return token_ms([trial], new_tokens)[0]

    def _generate(self, new_tokens: int, **more: Any) -> None:
        if self._next_keywords is None:
            w = self.workload
            self._next_keywords = self.set_up(self.model, w.max_cache_len, w.batch_size)
        self.keywords = self._next_keywords()
        chosen = {"do_sample": False, **more}
        self.model.generate(**self.prompt, **self.keywords, **chosen, max_new_tokens=new_tokens)


def wait_for_kernels(keywords: Keywords) -> None:
    """After a call with these: the next one tries the kernels of its steps, and the one after it is
    like all later ones.
    """
    if (decoder := keywords.get("custom_generate")) is not None:
        decoder.steps.wait_for_kernels()


# --- turns


def shuffled(items: Iterable[T], turn: int) -> list[T]:
    """Another order in each turn, the same in every run: none always follows the slowest."""
    items = list(items)
    return random.Random(turn).sample(items, len(items))


def in_turns(calls: dict[T, Callable[[], Any]], trials: int) -> dict[T, list[Any]]:
    """The results of each call, one in each trial."""
    found: dict[T, list[Any]] = {key: [] for key in calls}
    for trial in tqdm(range(trials), disable=None, leave=False):
        for key in shuffled(calls, trial):
            found[key].append(calls[key]())
    return found


def inside(model: PreTrainedModel, side: str) -> AbstractContextManager[None]:
    """The context of one of `SIDES`."""
    return exact(model) if side == "exact" else nullcontext()


def on_both_sides(model: PreTrainedModel, call: Callable[[], T]) -> dict[str, T]:
    found = {}
    for side in SIDES:
        with inside(model, side):
            found[side] = call()
    return found


def cost_of_exact(
    model: PreTrainedModel, trial: Callable[[], dict[str, float]], trials: int
) -> dict[str, dict[str, Spread]]:
    """The figures of `trial` on both sides in turns, after two trials of each for warming up."""
    bar = tqdm(range(trials + 2), disable=None, leave=False)
    _, _, *found = [on_both_sides(model, trial) for _ in bar]
    return {
        side: {name: spread([both[side][name] for both in found]) for name in found[0][side]}
        for side in SIDES
    }


def decoded_logits(
    model: Any, prompt: dict[str, torch.Tensor], new_tokens: int, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences [B, T] of `GraphDecoder`, and the logits of their new tokens, [B, n, V]."""
    batch_size, length = prompt["input_ids"].shape
    cache = StaticContiguousCache.from_model(model, length + new_tokens, batch_size)
    decoder = GraphDecoder()
    how |= {"past_key_values": cache, "custom_generate": decoder, "max_new_tokens": new_tokens}
    output = model.generate(**prompt, **how, return_dict_in_generate=True, output_logits=True)
    if decoder.fallback_reason is not None:
        raise BadArgument(f"GraphDecoder falls back on this model: {decoder.fallback_reason}")
    return output.sequences, torch.stack(output.logits, dim=1)


# --- figures


def spread(values: list[float]) -> Spread:
    """Median, minimum and maximum of a few trials.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def token_ms(trials_s: Iterable[Sequence[float]], new_tokens: int) -> list[float]:
    """Milliseconds of a decode step in each trial: (TN - T1) / (N - 1), the loop included.

    >>> token_ms([(0.5, 2.5)], new_tokens=11)
    [200.0]
    """
    return [(total - first) / (new_tokens - 1) * 1e3 for first, total in trials_s]


def percentile(values: list[float], percent: float) -> float:
    """Interpolated linearly.

    >>> percentile([1.0, 2.0, 3.0, 5.0], 50)
    2.5
    """
    return torch.quantile(torch.tensor(values, dtype=torch.float64), percent / 100).item()


def step_percentiles(step_ms: list[float]) -> dict[str, float]:
    """Of all steps at one point of a sweep."""
    names = {"median_ms": 50, "p10_ms": 10, "p90_ms": 90}
    return {name: percentile(step_ms, percent) for name, percent in names.items()}


def latency(step_ms: list[float]) -> dict[str, float]:
    """Mean and percentiles over the steps of one run."""
    middle = {f"p{percent}": percentile(step_ms, percent) for percent in (50, 95, 99)}
    return {"mean": statistics.fmean(step_ms), **middle, "min": min(step_ms), "max": max(step_ms)}


# --- what a step reads, and how fast


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that one decode step of a dense model reads: each parameter once.

    An embedding table that is not tied to the output is not counted: a step reads one entry of it.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parameters = [p for p in model.parameters() if tied or p is not embedding.weight]
    return sum(p.numel() * p.element_size() for p in parameters)


def cache_read(model: PreTrainedModel, seq_len: int, batch_size: int) -> int:
    """Bytes of keys and values that one decode step reads; `seq_len` includes its own token."""
    plans = plan_layers(model.config)
    total = 0
    for plan, shape in zip(plans, known_shapes(plans, model.config), strict=True):
        seen = min(seq_len, plan.sliding_window or seq_len)
        total += shape.num_bytes(seen, batch_size, (model.dtype, model.dtype))
    return total


def bytes_per_step(
    model: PreTrainedModel, prompt_len: int, new_tokens: int, batch_size: int
) -> float | None:
    """Bytes of weights and cache that a decode step must read, in the mean over a generation.

    None if it is not known: a mixture of experts reads a part of its weights, and some configs do
    not give the shape of the keys.
    """
    config = model.config.get_text_config()
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    if any(getattr(config, name, None) for name in experts):
        return None
    lengths = range(prompt_len + 1, prompt_len + max(new_tokens, 2))
    try:
        cache = statistics.fmean(cache_read(model, length, batch_size) for length in lengths)
    except ValueError:
        return None
    return weights_read(model) + cache


def measure_bandwidth(device: str) -> float:
    """Bytes per second that sums over a large tensor read; its memory is given back."""
    _load_libraries(device)
    size = BANDWIDTH_BYTES[torch.device(device).type]
    bandwidth = _read_rate(torch.ones(size // 4, device=device), device)
    torch.cuda.empty_cache()
    return bandwidth


def _read_rate(numbers: torch.Tensor, device: str) -> float:
    """Of five sums: the median of 10 trials after 3 for warming up."""
    times = [seconds(lambda: [numbers.sum() for _ in range(5)], device) for _ in range(13)]
    return 5 * numbers.numel() * numbers.element_size() / statistics.median(times[3:])


def _load_libraries(device: str) -> None:
    """Read the libraries from disk: the first call of the first contender does not pay for it."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    states = torch.ones(1, 4, 64, 64, device=device, dtype=dtype)
    attention = torch.nn.functional.scaled_dot_product_attention
    attention(states, states @ states, states, is_causal=True)
    synchronize(device)
