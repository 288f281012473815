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
Price: milliseconds of a prompt and of a decode step of `GraphDecoder`, the median of 3 after one to warm up.
Exit status 1 when a difference inside `exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from measure import seconds
from outputs import add_output_arguments, check_outputs, write_outputs
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, add_workload_arguments, check_workload_arguments

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.testing import provenance

Record = dict[str, Any]
TRIALS = 3
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


def price(model: PreTrainedModel, workload: Workload, prefills: list[int]) -> Record:
    """Milliseconds of each prompt, and of a decode step."""
    record: Record = {"prefill_ms": {}}
    for length in prefills:
        ids = workload.prompt(length)["input_ids"]
        cache = StaticContiguousCache.from_model(model, length)
        record["prefill_ms"][str(length)] = _median(lambda ids=ids, cache=cache: _read(model, ids, cache), workload)
        del cache
    cache, decoder = StaticContiguousCache.from_model(model, workload.max_cache_len), GraphDecoder()

    def generate(tokens: int) -> None:
        cache.reset()
        keywords = {"past_key_values": cache, "custom_generate": decoder, "max_new_tokens": tokens, "do_sample": False}
        model.generate(**workload.prompt(), **keywords)

    generate(workload.new_tokens)
    first, last = (_median(lambda n=n: generate(n), workload) for n in (1, workload.new_tokens))
    record["decode_ms"] = (last - first) / (workload.new_tokens - 1)
    return record


def _read(model: Any, ids: torch.Tensor, cache: StaticContiguousCache) -> None:
    cache.reset()
    model(ids, past_key_values=cache, logits_to_keep=1)


def _median(call: Callable[[], None], workload: Workload) -> float:
    call()
    return statistics.median(seconds(call, workload.device) for _ in range(TRIALS)) * 1e3


@torch.no_grad()
def measure_all(workload: Workload, prefills: list[int]) -> Record:
    model = workload.build_model()
    sides = {}
    for name in ("usual", "exact"):
        context: AbstractContextManager[None] = exact(model) if name == "exact" else nullcontext()
        with context:
            differences = Comparisons(model, workload.prompt_len, workload.new_tokens).differences()
            sides[name] = {"differences": differences, **price(model, workload, prefills)}
    shown = {key: getattr(workload, key) for key in ("model", "dtype", "prompt_len", "new_tokens")}
    return {**provenance(workload.device), "workload": shown, **sides}


def markdown(record: Record) -> str:
    w, usual, inside = record["workload"], record["usual"], record["exact"]
    lines = [
        f"{w['model']}, {w['dtype']}, {w['prompt_len']} + {w['new_tokens']} tokens, {record['hardware']}, commit "
        f"{record['commit']}. The largest difference of logits:",
        "",
        "| | as usual | inside `exact` |",
        "|---|---|---|",
    ]
    for name, difference in usual["differences"].items():
        lines.append(f"| {name} | {difference:.2g} | {inside['differences'][name]:.2g} |")
    lines += ["", "| time, ms | as usual | inside `exact` | |", "|---|---|---|---|"]
    rows = {f"prompt of {length}": (ms, inside["prefill_ms"][length]) for length, ms in usual["prefill_ms"].items()}
    rows["a decode step of `GraphDecoder`"] = (usual["decode_ms"], inside["decode_ms"])
    for words, (before, after) in rows.items():
        lines.append(f"| {words} | {before:.3g} | {after:.3g} | {after / before:.2f} times |")
    return "\n".join(lines)


def plot(record: Record, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for offset, (name, color) in enumerate((("usual", "tab:gray"), ("exact", "tab:green"))):
        differences = record[name]["differences"]
        places = [i + 0.4 * offset for i in range(len(differences))]
        axis.bar(places, list(differences.values()), width=0.4, color=color, label=name)
    axis.set_xticks([i + 0.2 for i in range(len(differences))], list(differences))
    axis.set(
        ylabel="largest difference of logits", title=f"{record['workload']['model']}, {record['workload']['dtype']}"
    )
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--prompt-len", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prefills", type=int, nargs="+", default=[512, 4096], help="prompts that are timed")
    add_output_arguments(parser)
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> Workload:
    check_outputs(args)
    if args.prompt_len < PADDING + 16 or args.new_tokens < 2 or min(args.prefills) < 1:
        raise BadArgument(
            f"--prompt-len must be at least {PADDING + 16}, --new-tokens at least 2, --prefills at least 1"
        )
    room = args.prompt_len + args.new_tokens
    check_workload_arguments(args, max([room, *args.prefills]))
    return Workload(args.model, args.device, args.dtype, args.prompt_len, args.new_tokens, 1, room, args.real_weights)


def main() -> int:
    args = parse_args()
    try:
        record = measure_all(chosen(args), args.prefills)
    except BadArgument as error:
        print(f"bench_exact.py: {error}", file=sys.stderr)
        return 2
    write_outputs(args, record, markdown, plot)
    return 1 if any(record["exact"]["differences"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
