"""The differential fuzzer: random models and histories, with and without caches, compared in
float32.

python -m tests.fuzz.fuzz --cases 1000            seeds 0 to 999
python -m tests.fuzz.fuzz --seed 1234 --cases 1   one case again, with its description
python -m tests.fuzz.fuzz --without threads,list  no threads, and no mutation of a list on a module

What several threads do depends on their timing too: such a case may need some replays.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
import transformers

from hf_static_kv.decoding import prompts
from tests.fuzz.cases import MOVES, SEEDS_PER_MODEL, make_case
from tests.fuzz.runner import Fault, Tally, run_case

CONTENDERS = ("dynamic", "ours", "decoder", "compact", "attached", "prefixes", "decoder alone")
_SEEDS_PER_TASK = 5 * SEEDS_PER_MODEL  # a process keeps its models over successive seeds


def main() -> int:
    args = parse_arguments()
    started = time.monotonic()
    tally = Tally()
    shown = 0
    for part in run_tasks(args, deadline=started + args.seconds if args.seconds else None):
        tally.add(part)
        for fault in tally.faults[shown:]:
            print(f"\n{fault}\n  replay: {replay_command(fault.case.seed, args)}", flush=True)
        shown = len(tally.faults)
        if not args.quiet:
            print(f"\r{progress(tally, started)}", end="", flush=True)
    print("\n" + summary(tally, time.monotonic() - started))
    return 1 if tally.faults else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, help="start no more cases after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--plain-only", action="store_true", help="our cache in the loop of generate only"
    )
    only.add_argument(
        "--decoder-only", action="store_true", help="our cache with GraphDecoder only"
    )
    only.add_argument(
        "--pools-only",
        action="store_true",
        help="attached models and decoders with caches of their own",
    )
    parser.add_argument(
        "--without", type=parse_moves, default=(), help=f"moves to leave out: {', '.join(MOVES)}"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--describe", action="store_true", help="print the cases and run none")
    args = parser.parse_args()
    if args.describe:
        for seed in range(args.seed, args.seed + args.cases):
            print(make_case(seed, args.without).describe())
        sys.exit()
    return args


def parse_moves(words: str) -> tuple[str, ...]:
    moves = tuple(word.strip() for word in words.split(",") if word.strip())
    if unknown := sorted(set(moves) - set(MOVES)):
        raise argparse.ArgumentTypeError(
            f"no move is called {', '.join(unknown)}: choose among {', '.join(MOVES)}"
        )
    return moves


def run_tasks(args: argparse.Namespace, deadline: float | None) -> Iterator[Tally]:
    """Tallies as they come: of every case with one process, and else of every task."""
    contenders = chosen_contenders(args)
    if args.jobs == 1:
        set_up()
        for seed in range(args.seed, args.seed + args.cases):
            if deadline is not None and time.monotonic() > deadline:
                return
            yield run_seeds([seed], args.device, contenders, without=args.without)
        return
    starts = range(args.seed, args.seed + args.cases, _SEEDS_PER_TASK)
    how = args.device, contenders, deadline, args.without
    tasks = [
        (range(start, min(start + _SEEDS_PER_TASK, args.seed + args.cases)), *how)
        for start in starts
    ]
    # CUDA cannot be used in a forked process.
    with multiprocessing.get_context("spawn").Pool(args.jobs, set_up) as pool:
        yield from pool.imap_unordered(_run_task, tasks)


def chosen_contenders(args: argparse.Namespace) -> tuple[str, ...]:
    if args.plain_only or args.decoder_only:
        return "dynamic", "ours" if args.plain_only else "decoder"
    return tuple(
        name
        for name in CONTENDERS
        if not (args.pools_only and name in ("ours", "decoder", "compact"))
    )


def set_up() -> None:
    torch.set_num_threads(1)  # tiny models: one thread a process is fastest
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("hf_static_kv").setLevel(logging.ERROR)  # fallbacks are counted
    warnings.filterwarnings("ignore")  # odd settings are on purpose
    # Prompts are short, and most runs are on a CPU.
    prompts.SIZES = (2, 4, 8, 32)
    prompts.DEVICES = ("cpu", "cuda")


def _run_task(task: tuple[range, str, tuple[str, ...], float | None, tuple[str, ...]]) -> Tally:
    return run_seeds(*task)


def run_seeds(
    seeds: range | list[int],
    device: str = "cpu",
    contenders: tuple[str, ...] = CONTENDERS,
    deadline: float | None = None,
    without: tuple[str, ...] = (),
) -> Tally:
    tally = Tally()
    for seed in seeds:
        if deadline is not None and time.monotonic() > deadline:
            break
        run_case(make_case(seed, without), device, contenders, tally)
    return tally


def replay_command(seed: int, args: argparse.Namespace) -> str:
    """Runs the case alone.

    A pooled case may need those before it, with which it shares its model.
    """
    flag = "".join(
        f" --{name}-only" for name in ("plain", "decoder", "pools") if getattr(args, f"{name}_only")
    )
    flag += f" --without '{','.join(args.without)}'" if args.without else ""
    end = f" --device {args.device}{flag}"
    first = seed - seed % SEEDS_PER_MODEL
    alone = f"python -m tests.fuzz.fuzz --seed {seed} --cases 1{end}"
    if not make_case(seed, args.without).pooled or first == seed:
        return alone
    whole = f"python -m tests.fuzz.fuzz --seed {first} --cases {seed - first + 1}{end}"
    return f"{alone}\n  if it passes alone: {whole}"


def progress(tally: Tally, started: float) -> str:
    seconds = time.monotonic() - started
    return (
        f"{tally.cases} cases, {tally.compared.total()} calls compared, {len(tally.ties)} ties, "
        f"{len(tally.faults)} faults, {seconds / max(1, tally.cases):.2f} s a case "
    )


def summary(tally: Tally, seconds: float) -> str:
    lines = [
        f"{tally.cases} cases of {len(tally.architectures)} architectures in {seconds:.0f} s "
        f"({seconds / max(1, tally.cases):.2f} s a case)",
        f"calls compared: {_counts(tally.compared)}",
        f"moves: {_counts(tally.moves)}",
        f"largest difference of logits: {tally.largest_difference:.2g} of the largest logit",
        f"ties: {len(tally.ties)}",
        *(f"  {tie}" for tie in tally.ties),
        f"ours and DynamicCache alike, unlike no cache: {len(tally.like_dynamic)}",
        *(f"  {where}" for where in tally.like_dynamic),
        *_section("only DynamicCache differs or refuses", tally.only_dynamic),
        *_section("cases ended early", tally.skipped),
        *_section("calls of the decoder by fallback reason", tally.fallbacks),
        f"faults: {len(tally.faults)}",
        *(f"  seed {f.case.seed} ({_kind(f)}), {f.contender}: {f.what}" for f in tally.faults),
    ]
    return "\n".join(lines)


def _section(title: str, counter: Counter[str]) -> list[str]:
    return [
        f"{title}: {counter.total()}",
        *(f"  {count:5} {words}" for words, count in counter.most_common()),
    ]


def _kind(fault: Fault) -> str:
    return ", ".join([fault.case.architecture, *sorted(fault.case.moves)])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.items())


if __name__ == "__main__":
    sys.exit(main())
