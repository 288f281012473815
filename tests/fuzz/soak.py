"""Threads that call `generate` on one attached model for minutes: each answer is compared with that of
the call alone, in float32, and memory must not grow.

python -m tests.fuzz.soak --seconds 300 --threads 16

One call in twenty fails in its own thread, and one in twenty is cancelled by another one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import resource
import sys
import threading
import time
from collections import Counter

import torch

from hf_static_kv import attach, served
from hf_static_kv.decoding.call import OWNER, Owner
from hf_static_kv.decoding.seats import Cancelled
from tests.conftest import shared_toy_model
from tests.fuzz.company import DEVICE, Caller, Stop, StopsAt, Streamer, draw, left_behind

KINDS = ("greedy", "stream", "ended", "criteria", "processors", "kept", "ngram", "least")
REQUESTS = 60  # unlike ones, which come again and again


class Soak:
    def __init__(self, model_name: str, seed: int, reuse_prefix: bool) -> None:
        self.plain = shared_toy_model(model_name, device=DEVICE)
        self.model = copy.copy(self.plain)
        rng = random.Random(seed)
        common = torch.tensor([rng.randrange(3, 120) for _ in range(40)])
        self.requests = [draw(rng, KINDS, common) for _ in range(REQUESTS)]
        for request in self.requests:
            alone = copy.copy(request)
            alone.delay = 0
            alone.run(self.plain)
            request.expected = alone.got
        self.info = attach(self.model, reuse_prefix=reuse_prefix, max_bytes=1 << 30)
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.wrong: list[str] = []
        self.end = 0.0

    def run(self, seconds: float, threads: int, seed: int) -> None:
        self.end = time.monotonic() + seconds
        callers = [
            threading.Thread(target=self._call_on, args=(random.Random(seed + n),), daemon=True)
            for n in range(threads)
        ]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join(seconds + 120)
        if any(thread.is_alive() for thread in callers):
            self.wrong.append("a call was lost")
        self.wrong += left_behind(self.info, self.model)

    def _call_on(self, rng: random.Random) -> None:
        while time.monotonic() < self.end and len(self.wrong) < 10:
            request = rng.choice(self.requests)
            fate = rng.random()
            kind = "failed" if fate < 0.05 else "cancelled" if fate < 0.1 else "answered"
            try:
                self._call(request, kind, rng)
            except (Stop, Cancelled):
                self._count(kind)
            except BaseException as error:
                self.wrong.append(f"{request.kind}: {error!r}")

    def _call(self, request: Caller, kind: str, rng: random.Random) -> None:
        arguments = request.arguments()
        if kind == "failed" and rng.random() < 0.5:
            arguments["streamer"] = Streamer(rng, goes_away=True)
        elif kind == "failed":
            stop = StopsAt(request.ids.shape[1] + rng.randrange(1, 4), fails=True)
            arguments["stopping_criteria"] = [stop]
        owner = Owner()
        token = OWNER.set(owner)
        if kind == "cancelled":
            threading.Timer(rng.random() * 0.05, self._cancel, [owner]).start()
        try:
            output = self.model.generate(request.ids, **arguments)
        finally:
            OWNER.reset(token)
        self._count("answered")
        got = output if isinstance(output, torch.Tensor) else output.sequences
        if not torch.equal(got, request.expected):
            what = f"{request.kind} of {request.ids.shape[1]} tokens"
            self.wrong.append(f"{what}: {got.tolist()}, alone {request.expected.tolist()}")

    def _count(self, kind: str) -> None:
        with self.lock:
            self.counts[kind] += 1

    def _cancel(self, owner: Owner) -> None:
        owner.is_cancelled = True
        self.info.decoder.loop_of(self.model).cancel(owner)


def memory_bytes() -> int:
    """Bytes in use. What torch has reserved grows until each stream of its pool has been some thread's."""
    gc.collect()
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--reuse-prefix", action="store_true")
    args = parser.parse_args()
    served._MIN_PROMPT_ON_CPU = 0
    served._DECODER_DEVICES = ("cpu", "cuda")
    soak = Soak(args.model, args.seed, args.reuse_prefix)
    used: list[int] = []
    parts = 5
    for part in range(parts):
        soak.run(args.seconds / parts, args.threads, args.seed + 1000 * part)
        used.append(memory_bytes())
        reserved = torch.cuda.memory_reserved() >> 20 if DEVICE == "cuda" else 0
        calls = sum(soak.counts.values())
        print(f"{calls} calls, {used[-1] >> 20} MiB, {reserved} MiB reserved", flush=True)
    # Torch keeps a cuBLAS workspace of 32 MiB for each thread's handle and each stream that it has met.
    if used[-1] > 1.02 * used[parts // 2] + (8 << 20):
        soak.wrong.append(f"memory grows: {used}")
    print(dict(soak.counts), soak.info)
    # A streamer may refuse the prompt, before a cache is asked for.
    if soak.info.calls < sum(soak.counts.values()) - soak.counts["failed"]:
        soak.wrong.append(f"{soak.info.calls} calls were counted")
    for what in soak.wrong:
        print(what)
    print(f"faults: {len(soak.wrong)}")
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
