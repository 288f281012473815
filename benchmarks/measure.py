"""Timers, the bytes that a decode step must read, and the memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from contenders import CONTENDERS, Keywords, SetUp
from processes import FreshProcess
from transformers import PreTrainedModel, StoppingCriteria
from workload import Workload

from hf_static_kv.cache.layout import known_shapes, plan_layers

BANDWIDTH_BYTES = {"cuda": 4 << 30, "cpu": 1 << 28}


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
        return [
            (after - before) * 1e3
            for before, after in zip(self.times, self.times[1:], strict=False)
        ]


class TimedGenerate:
    """`generate` with one contender. The first call builds its cache and decoder; later calls use
    them again.

    Calls are greedy where their keywords do not say otherwise. `set_up` replaces the contender's
    own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contender: str,
        workload: Workload,
        set_up: SetUp | None = None,
    ) -> None:
        self.model: Any = model
        self.contender, self.workload, self.prompt = contender, workload, workload.prompt()
        self.set_up = set_up or CONTENDERS[contender].set_up
        self.keywords: Keywords = {}
        self._next_keywords: Callable[[], Keywords] | None = None

    def seconds(self, new_tokens: int, **more: Any) -> float:
        return seconds(lambda: self._generate(new_tokens, **more), self.workload.device)

    def step_ms(self) -> float:
        """Milliseconds of a decode step, (TN - T1) / (N - 1): the cost of the loop is included."""
        new_tokens = self.workload.new_tokens
        first, total = self.seconds(1), self.seconds(new_tokens)
        return (total - first) / (new_tokens - 1) * 1e3

    def _generate(self, new_tokens: int, **more: Any) -> None:
        if self._next_keywords is None:
            self._next_keywords = self.set_up(
                self.model, self.workload.max_cache_len, self.workload.batch_size
            )
        self.keywords = self._next_keywords()
        chosen = {"do_sample": False, **more}
        self.model.generate(**self.prompt, **self.keywords, **chosen, max_new_tokens=new_tokens)


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum of a few trials.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values: list[float], percent: float) -> float:
    """Interpolated linearly.

    >>> percentile([1.0, 2.0, 3.0, 5.0], 50)
    2.5
    """
    return torch.quantile(torch.tensor(values, dtype=torch.float64), percent / 100).item()


def latency(step_ms: list[float]) -> dict[str, float]:
    """Mean and percentiles over the steps of one run."""
    middle = {f"p{percent}": percentile(step_ms, percent) for percent in (50, 95, 99)}
    return {"mean": statistics.fmean(step_ms), **middle, "min": min(step_ms), "max": max(step_ms)}


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that one decode step of a dense model reads: each parameter once.

    An embedding table that is not tied to the output is not counted: a step reads one entry of it.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parameters = [p for p in model.parameters() if tied or p is not embedding.weight]
    return sum(p.numel() * p.element_size() for p in parameters)


def cache_read(model: PreTrainedModel, seq_len: int, batch_size: int) -> int:
    """Bytes of keys and values that one decode step reads; `seq_len` includes its own token."""
    plans = plan_layers(model.config)
    shapes = known_shapes(plans, model.config)
    return sum(
        shape.num_bytes(
            min(seq_len, plan.sliding_window or seq_len), batch_size, (model.dtype, model.dtype)
        )
        for plan, shape in zip(plans, shapes, strict=True)
    )


def bytes_per_step(
    model: PreTrainedModel, prompt_len: int, new_tokens: int, batch_size: int
) -> float | None:
    """Bytes that a decode step must read, weights and cache: the mean over the steps after a
    prompt.

    None where it is not known: a mixture of experts reads a part of its weights, and some configs
    do not give the shape of the keys.
    """
    config = model.config.get_text_config()
    if any(
        getattr(config, name, None)
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
    ):
        return None
    lengths = range(prompt_len + 1, prompt_len + max(new_tokens, 2))
    try:
        return weights_read(model) + statistics.fmean(
            cache_read(model, n, batch_size) for n in lengths
        )
    except ValueError:
        return None


class Bandwidth:
    """The read bandwidth of a device; a class, so that it can run in a `FreshProcess`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def read(self) -> float:
        """Bytes per second of five sums over a large tensor:

        the median of 10 trials after 3 for warming up.
        """
        _load_libraries(self.device)
        numbers = torch.ones(
            BANDWIDTH_BYTES[torch.device(self.device).type] // 4, device=self.device
        )
        times = [
            seconds(lambda: [numbers.sum() for _ in range(5)], self.device) for _ in range(13)
        ][3:]
        return 5 * numbers.numel() * 4 / statistics.median(times)


def _load_libraries(device: str) -> None:
    """Read the libraries from disk once, so that the first call of the first contender does not pay
    for it.
    """
    states = torch.ones(
        1,
        4,
        64,
        64,
        device=device,
        dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32,
    )
    torch.nn.functional.scaled_dot_product_attention(
        states, states @ states, states, is_causal=True
    )
    synchronize(device)


def measure_bandwidth(device: str) -> float:
    """`Bandwidth.read` in a fresh process."""
    process = FreshProcess(Bandwidth, device)
    try:
        bandwidth: float = process.call("read")
    finally:
        process.close()
    return bandwidth
