"""How it is timed: a synchronised clock, the bytes that a step must read, the memory's bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from processes import FreshProcess
from transformers import PreTrainedModel, StoppingCriteria

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
    """Never stops a run; waits for the device after each token and notes when it was there."""

    def __init__(self, device: str, batch_size: int) -> None:
        self.device = device
        self.times: list[float] = []
        self.go_on = torch.zeros(batch_size, dtype=torch.bool, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        synchronize(self.device)
        self.times.append(time.perf_counter())
        return self.go_on

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds from each token to the next: one fewer than there are tokens."""
        return [(after - before) * 1e3 for before, after in zip(self.times, self.times[1:], strict=False)]


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest, for a handful of trials.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values: list[float], percent: float) -> float:
    """With linear interpolation between neighbours.

    >>> percentile([1.0, 2.0, 3.0, 5.0], 50)
    2.5
    """
    return torch.quantile(torch.tensor(values, dtype=torch.float64), percent / 100).item()


def latency(step_ms: list[float]) -> dict[str, float]:
    """A step's time in one run, for hundreds of steps."""
    middle = {f"p{percent}": percentile(step_ms, percent) for percent in (50, 95, 99)}
    return {"mean": statistics.fmean(step_ms), **middle, "min": min(step_ms), "max": max(step_ms)}


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that one decode step of a dense model reads.

    Every parameter once; of an embedding table that is not the output's as well, a step reads one row: not counted.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parameters = [p for p in model.parameters() if tied or p is not embedding.weight]
    return sum(p.numel() * p.element_size() for p in parameters)


def cache_read(model: PreTrainedModel, text: int, batch_size: int) -> int:
    """Bytes of keys and values that one decode step reads when the text, its own token included, is this long."""
    plans = plan_layers(model.config)
    shapes = known_shapes(plans, model.config)
    return sum(
        shape.num_bytes(min(text, plan.sliding_window or text), batch_size, model.dtype)
        for plan, shape in zip(plans, shapes, strict=True)
    )


def bytes_per_step(model: PreTrainedModel, prompt_len: int, new_tokens: int, batch_size: int) -> float | None:
    """What a decode step must read, in the mean over the steps that follow a prompt: weights once, and the cache.

    None where that is not known: a mixture of experts reads a part of its weights, and some configs do not tell the
    shape of their keys.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        return None
    texts = range(prompt_len + 1, prompt_len + max(new_tokens, 2))
    try:
        return weights_read(model) + statistics.fmean(cache_read(model, text, batch_size) for text in texts)
    except ValueError:
        return None


class Bandwidth:
    """How fast a device reads; a class, so that a fresh process can hold it and give the memory back."""

    def __init__(self, device: str) -> None:
        self.device = device

    def read(self) -> float:
        """Bytes per second: sums over a large tensor, 5 without a pause between, the median of 10 such after 3."""
        _load_libraries(self.device)
        numbers = torch.ones(BANDWIDTH_BYTES[torch.device(self.device).type] // 4, device=self.device)
        times = [seconds(lambda: [numbers.sum() for _ in range(5)], self.device) for _ in range(13)][3:]
        return 5 * numbers.numel() * 4 / statistics.median(times)


def _load_libraries(device: str) -> None:
    """Have the libraries read from the disk once, so that the first contender's cold start does not pay for it."""
    states = torch.ones(
        1, 4, 64, 64, device=device, dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32
    )
    torch.nn.functional.scaled_dot_product_attention(states, states @ states, states, is_causal=True)
    synchronize(device)


def measure_bandwidth(device: str) -> float:
    """`Bandwidth.read` in a process of its own."""
    process = FreshProcess(Bandwidth, device)
    try:
        bandwidth: float = process.call("read")
    finally:
        process.close()
    return bandwidth
