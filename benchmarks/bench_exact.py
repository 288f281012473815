"""How far logits are apart that should be the same, as usual and inside `exact`; and what `exact` costs.

    python benchmarks/bench_exact.py --model llama-3.2-1b --dtype float16 --json exact.json
    python benchmarks/bench_exact.py --model llama --device cpu --prompt-len 60 --new-tokens 20 --prefills 64

Differences: the largest between any two logits, in each of these comparisons:
  chunks     a text in one pass without a cache, and through the cache in chunks and single tokens
  decoder    the text that `GraphDecoder` writes: its own logits, and those of one pass over it without a cache
  batch      a row among eight through the cache, and alone
  padding    a row with padding to its left, beside a longer one, and bare
  capacity   in a cache that has just enough room, and in one for 32 times as much
  crop       after a part of the text was taken back and written again
Price: milliseconds of a prompt and of a decode step of `GraphDecoder`, as usual and inside `exact` in turns; the median
(least to greatest) of 5 after one to warm up. A decode step is (TN - T1) / (N - 1), as in bench_generation.py. With
`--prefills 0` it is left out.
Exit status 1 when a difference inside `exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from measure import seconds, spread
from outputs import benchmark_parser, check_outputs, save_picture, write_outputs
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.testing import provenance

Record = dict[str, Any]
TRIALS = 5
SIDES = ("usual", "exact")
ROWS, PADDING = 8, 37


class Comparisons:
    """Two ways to the same logits, each; on a text of `prompt_len` and `new_tokens`."""

    def __init__(self, model: PreTrainedModel, prompt_len: int, new_tokens: int) -> None:
        self.model: Any = model
        self.prompt_len, self.new_tokens, self.length = prompt_len, new_tokens, prompt_len + new_tokens
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.get_text_config().vocab_size
        self.ids = torch.randint(vocab_size, (ROWS, self.length), generator=generator).to(model.device)

    def through_the_cache(
        self, ids: torch.Tensor, singles: int, room: int | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A prompt in two chunks and `singles` tokens after it: the logits from the prompt's last token on."""
        cache = StaticContiguousCache.from_model(self.model, room or ids.shape[1], len(ids))
        prompt = ids.shape[1] - singles
        sizes, end, logits = [prompt // 3, prompt - prompt // 3, *[1] * singles], 0, []
        for chunk in ids.split(sizes, dim=1):
            end += chunk.shape[1]
            keywords = {}
            if mask is not None:
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, end - chunk.shape[1] : end]
                keywords = {"attention_mask": mask[:, :end], "position_ids": positions}
            logits.append(self.model(chunk, past_key_values=cache, **keywords).logits[:, -1:])
        return torch.cat(logits[1:], dim=1)

    def whole(self, ids: torch.Tensor, singles: int) -> torch.Tensor:
        """The same logits from one pass without a cache."""
        logits: torch.Tensor = self.model(ids, use_cache=False).logits[:, -singles - 1 :]
        return logits

    def chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.through_the_cache(self.ids[:1], 24), self.whole(self.ids[:1], 24)

    def decoder(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache, decoder = StaticContiguousCache.from_model(self.model, self.length), GraphDecoder()
        output = self.model.generate(
            self.ids[:1, : self.prompt_len],
            past_key_values=cache,
            custom_generate=decoder,
            max_new_tokens=self.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        if decoder.fallback_reason is not None:
            raise BadArgument(f"GraphDecoder does not serve this model: {decoder.fallback_reason}")
        return torch.stack(output.logits, dim=1), self.whole(output.sequences[:, :-1], self.new_tokens - 1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        alone = [self.through_the_cache(self.ids[row : row + 1], 4) for row in range(ROWS)]
        return self.through_the_cache(self.ids, 4), torch.cat(alone)

    def padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones_like(self.ids[:2])
        mask[0, :PADDING] = 0
        padded = self.through_the_cache(self.ids[:2], 8, mask=mask)[:1]
        return padded, self.through_the_cache(self.ids[:1, PADDING:], 8)

    def capacity(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.ids[:1]
        return self.through_the_cache(ids, 8), self.through_the_cache(ids, 8, room=32 * self.length)

    def crop(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache = StaticContiguousCache.from_model(self.model, self.length)
        self.model(self.ids[:1, : self.prompt_len], past_key_values=cache)
        cache.crop(-self.prompt_len // 2)
        rest = self.ids[:1, cache.seq_len : self.prompt_len]
        again = self.model(rest, past_key_values=cache).logits
        return again, self.whole(self.ids[:1, : self.prompt_len], rest.shape[1] - 1)

    def differences(self) -> dict[str, float]:
        largest = {}
        names = ("chunks", "decoder", "batch", "padding", "capacity", "crop")
        for name in tqdm(names, disable=None, leave=False):
            one, other = getattr(self, name)()
            largest[name] = (one.float() - other.float()).abs().max().item()
        return largest


class Price:
    """Milliseconds of each prompt and of a decode step, of one trial."""

    def __init__(self, model: PreTrainedModel, workload: Workload, prefills: list[int]) -> None:
        self.model: Any = model
        self.workload, self.prompt, self.decoder = workload, workload.prompt(), GraphDecoder()
        self.texts = {length: workload.prompt(length)["input_ids"] for length in prefills}
        self.cache = StaticContiguousCache.from_model(model, max([workload.max_cache_len, *prefills]))

    def trial(self) -> dict[str, float]:
        ms = {f"prompt of {n}": self._seconds(lambda ids=ids: self._read(ids)) * 1e3 for n, ids in self.texts.items()}
        first, last = (self._seconds(lambda n=n: self._generate(n)) for n in (1, self.workload.new_tokens))
        return ms | {"a decode step of `GraphDecoder`": (last - first) / (self.workload.new_tokens - 1) * 1e3}

    def _seconds(self, call: Callable[[], None]) -> float:
        self.cache.reset()
        return seconds(call, self.workload.device)

    def _read(self, ids: torch.Tensor) -> None:
        self.model(ids, past_key_values=self.cache, logits_to_keep=1)

    def _generate(self, tokens: int) -> None:
        keywords = {"past_key_values": self.cache, "custom_generate": self.decoder, "do_sample": False}
        self.model.generate(**self.prompt, **keywords, max_new_tokens=tokens)


def prices(model: PreTrainedModel, workload: Workload, prefills: list[int]) -> dict[str, Record]:
    """Both sides in turns, each with its spread over the trials."""
    price = Price(model, workload, prefills)
    trials: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in tqdm(range(TRIALS + 1), disable=None, leave=False):
        for side in SIDES:
            with _side(model, side):
                trials[side].append(price.trial())
    warm = {side: rows[1:] for side, rows in trials.items()}
    return {side: {name: spread([row[name] for row in rows]) for name in rows[0]} for side, rows in warm.items()}


def _side(model: PreTrainedModel, name: str) -> AbstractContextManager[None]:
    return exact(model) if name == "exact" else nullcontext()


@torch.no_grad()
def measure_all(workload: Workload, prefills: list[int]) -> Record:
    model = workload.build_model()
    differences = {}
    for side in SIDES:
        with _side(model, side):
            differences[side] = Comparisons(model, workload.prompt_len, workload.new_tokens).differences()
    shown = {key: getattr(workload, key) for key in ("model", "dtype", "prompt_len", "new_tokens")}
    record = {**provenance(workload.device), "workload": shown, "differences": differences}
    return {**record, "ms": prices(model, workload, prefills)} if prefills else record


def markdown(record: Record) -> str:
    w, differences = record["workload"], record["differences"]
    lines = [
        f"{w['model']}, {w['dtype']}, {w['prompt_len']} + {w['new_tokens']} tokens, {record['hardware']}, commit "
        f"{record['commit']}. The largest difference of logits:",
        "",
        "| | as usual | inside `exact` |",
        "|---|---|---|",
    ]
    for name, difference in differences["usual"].items():
        lines.append(f"| {name} | {difference:.2g} | {differences['exact'][name]:.2g} |")
    if "ms" not in record:
        return "\n".join(lines)
    lines += ["", "| time, ms | as usual | inside `exact` | |", "|---|---|---|---|"]
    for name, usual in record["ms"]["usual"].items():
        inside = record["ms"]["exact"][name]
        cells = [f"{f['median']:.3g} ({f['min']:.3g} to {f['max']:.3g})" for f in (usual, inside)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {inside['median'] / usual['median']:.2f} times |")
    return "\n".join(lines)


def plot(record: Record, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for offset, (name, color) in enumerate(zip(SIDES, ("tab:gray", "tab:green"), strict=True)):
        differences = record["differences"][name]
        places = [i + 0.4 * offset for i in range(len(differences))]
        axis.bar(places, list(differences.values()), width=0.4, color=color, label=name)
    axis.set_xticks([i + 0.2 for i in range(len(differences))], list(differences))
    axis.set(
        ylabel="largest difference of logits", title=f"{record['workload']['model']}, {record['workload']['dtype']}"
    )
    axis.legend()
    save_picture(figure, path)


def parse_args() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompt-len", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--prefills", type=int, nargs="+", default=[512, 4096], help="prompts that are timed; 0: none, no price"
    )
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> Workload:
    check_outputs(args)
    if args.batch_size != 1:
        raise BadArgument(f"--batch-size {args.batch_size}: the comparisons have batches of their own")
    if args.prompt_len < PADDING + 16 or args.new_tokens < 2 or (min(args.prefills) < 1 and args.prefills != [0]):
        raise BadArgument(
            f"--prompt-len must be at least {PADDING + 16}, --new-tokens at least 2, --prefills at least 1"
        )
    room = args.prompt_len + args.new_tokens
    check_workload_arguments(args, max([room, *args.prefills]))
    return Workload(args.model, args.device, args.dtype, args.prompt_len, args.new_tokens, 1, room, args.real_weights)


def main() -> int:
    args = parse_args()
    try:
        record = measure_all(chosen(args), [] if args.prefills == [0] else args.prefills)
    except BadArgument as error:
        print(f"bench_exact.py: {error}", file=sys.stderr)
        return 2
    write_outputs(args, record, markdown, plot)
    return 1 if any(record["differences"]["exact"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
