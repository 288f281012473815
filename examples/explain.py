"""Why keys and values may be cached, what that saves, and why a cache must not slide: five
arguments with numbers.

    python examples/explain.py                       # prints the page and writes explain.png; half a minute on a CPU
    python examples/explain.py --plot other.png

For a reader who knows transformers and has not seen a KV cache. Every number on the page is
computed by this program.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_static_kv import StaticContiguousCache, exact
from hf_static_kv.testing import load_model

TEXT = "ROMEO:\nWhat light is this that"
NEW_TOKENS = [8, 16, 32, 64]  # for which (c) counts the work
LENGTHS = [8, 16, 24, 32, 40, 56, 80, 120]  # of the sequence, in (e)


def say(text: str) -> None:
    """Print a wrapped paragraph."""
    print(textwrap.fill(" ".join(text.split()), 100), end="\n\n")


def title(letter: str, words: str) -> None:
    print(f"\n({letter}) {words}\n{'-' * (len(words) + 4)}\n")


def appending_changes_nothing(model: PreTrainedModel, ids: torch.Tensor) -> None:
    title("a", "A new token does not change the earlier ones")
    say("Attention is causal: a token attends to itself and to the tokens before it. Here is one head with keys and "
        "values of two dimensions. The output of a token is a weighted mean of the values up to "
        "its position; the "
        "weights are the softmax of its query's products with their keys.")  # fmt: skip
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 2.0]])
    values = torch.tensor([[2.0, 0.0], [0.0, 4.0], [6.0, 6.0], [9.0, -9.0]])
    for length in (3, 4):
        scores = (keys[:length] @ keys[:length].T).masked_fill(
            ~torch.ones(length, length).tril().bool(), -torch.inf
        )
        outputs = scores.softmax(-1) @ values[:length]
        print(f"  {length} tokens: ", "  ".join(f"({a:.2f}, {b:.2f})" for a, b in outputs.tolist()))
    print()
    say("The fourth token does not change the first three outputs. They are the input of the next layer, so the same "
        "holds there. The keys and values of earlier tokens never change in any layer, and can "
        "be cached. On a trained "
        f"model of {model.config.num_hidden_layers} layers and a sequence of {ids.shape[1]} tokens:")  # fmt: skip
    before, after = keys_of(model, ids[:, :-1]), keys_of(model, ids)
    moved = max((b - a[:, :, :-1]).abs().max().item() for b, a in zip(before, after, strict=True))
    print(
        f"  keys of the first {ids.shape[1] - 1} tokens, with and without the last: largest "
        f"difference {moved:.0e}"
    )
    for name, context in (
        ("outside exact(model)", nullcontext()),
        ("inside exact(model)", exact(model)),
    ):
        with context, torch.no_grad():
            cache = StaticContiguousCache.from_model(model, ids.shape[1])
            model(ids[:, :-1], past_key_values=cache)
            cached = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
            difference = (cached - model(ids, use_cache=False).logits[:, -1]).abs().max().item()
        print(
            f"  logits of the last token, cached and uncached, {name}: largest difference "
            f"{difference:.0e}"
        )
    print()
    say("The difference outside exact is rounding: a matrix product of one token adds in another order than one of a "
        "hundred tokens. Inside exact the order is fixed, and the bits are equal.")  # fmt: skip


@torch.no_grad()
def keys_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """The keys of each layer after one pass."""
    cache = StaticContiguousCache.from_model(model, ids.shape[1])
    model(ids, past_key_values=cache)
    return [cache.layers[n].keys.clone() for n in range(len(cache.layers))]


def positions_computed(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cached: bool
) -> torch.Tensor:
    """Positions that each pass of `generate` computes, [passes, positions]: 0 absent, 1 cached, 2
    computed.
    """
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: sizes.append(args[0].shape[1])
    )
    try:
        model.generate(
            ids, max_new_tokens=new_tokens, do_sample=False, use_cache=cached, pad_token_id=0
        )
    finally:
        hook.remove()
    grid, end = torch.zeros(len(sizes), ids.shape[1] + new_tokens - 1), ids.shape[1]
    for n, size in enumerate(sizes):
        grid[n, : end + n] = 1
        grid[n, end + n - size : end + n] = 2
    return grid


def what_is_computed(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    title("b", "Which positions each step computes")
    grids = [positions_computed(model, ids[:, :6], 8, cached) for cached in (False, True)]
    for name, grid in zip(("without a cache", "with a cache"), grids, strict=True):
        print(f"  {name:16s} # computed   . cached")
        for n, cells in enumerate(grid.tolist(), start=1):
            print(f"    step {n}:  " + "".join(" .#"[int(cell)] for cell in cells))
        print(f"    {int((grid == 2).sum())} positions in all\n")
    return grids


def flops(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cached: bool) -> list[int]:
    """Floating-point operations of a generation up to each new token, counted by torch."""
    totals: list[int] = []
    with FlopCounterMode(display=False) as counter:
        hook = model.register_forward_hook(lambda *_: totals.append(counter.get_total_flops()))
        try:
            model.generate(
                ids, max_new_tokens=new_tokens, do_sample=False, use_cache=cached, pad_token_id=0
            )
        finally:
            hook.remove()
    return totals


def flops_by_formula(model: PreTrainedModel, prompt: int, new_tokens: int, cached: bool) -> int:
    """2 per weight of a linear layer and token, 4 D per query, key and head, and the LM head once
    per step.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linear = [
        m
        for m in model.modules()
        if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()
    ]
    weights = sum(module.weight.numel() for module in linear)
    attention = 4 * head_dim * config.num_attention_heads * config.num_hidden_layers
    rotary = head_dim  # angles: head_dim / 2 products of 2 operations
    total = 0
    for step in range(new_tokens):
        length = prompt + step
        queries = 1 if cached and step else length
        total += queries * (2 * weights + rotary) + attention * queries * length
        total += 2 * model.get_output_embeddings().weight.numel()
    return total


def work(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, list[tuple[int, int, int]]]:
    title("c", "How much work a cache saves")
    say("Without a cache n tokens need 1 + 2 + ... + n computed positions: the work grows with the square of the "
        "length (that of attention, small here, with its cube). With a cache every step computes "
        "one position. torch counts the floating-point operations. The formula: 2 for each "
        "weight and token, 4 head_dim for each query, "
        "key and head.")  # fmt: skip
    model.set_attn_implementation("eager")  # the counter sees matrix products only
    counts: dict[str, list[tuple[int, int, int]]] = {"without a cache": [], "with a cache": []}
    print(f"  {'new tokens':>12s} {'without, MFLOP':>16s} {'formula':>9s} {'with, MFLOP':>13s} "
          f"{'formula':>9s} {'ratio':>7s}")  # fmt: skip
    for cached, points in zip((False, True), counts.values(), strict=True):
        totals = flops(model, ids, max(NEW_TOKENS), cached)
        points += [
            (n, totals[n - 1], flops_by_formula(model, ids.shape[1], n, cached)) for n in NEW_TOKENS
        ]
    for (n, without, formula), (_, with_cache, cached_formula) in zip(
        *counts.values(), strict=True
    ):
        print(f"  {n:12d} {without / 1e6:16.0f} {formula / 1e6:9.0f} {with_cache / 1e6:13.0f} "
              f"{cached_formula / 1e6:9.0f} {without / with_cache:6.1f}x")  # fmt: skip
    print()
    model.set_attn_implementation("sdpa")
    return counts


@torch.no_grad()
def after_sliding(model: PreTrainedModel, ids: torch.Tensor) -> tuple[float, float]:
    """Difference of a cache that dropped its first token from a new pass: logits, and values of the
    first layer.
    """
    cache, fresh = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    # The remaining tokens keep their positions; the new token comes after them.
    slid = model(
        ids[:, -1:], past_key_values=cache, position_ids=torch.tensor([[ids.shape[1] - 1]])
    ).logits[0, -1]
    expected = model(ids[:, 1:], past_key_values=fresh).logits[0, -1]
    scale = expected.std().item()
    first = (cache.layers[0].values - fresh.layers[0].values).abs().max() / fresh.layers[
        0
    ].values.abs().max()
    return (slid - expected).abs().max().item() / scale, first.item()


def no_sliding(model: PreTrainedModel, ids: torch.Tensor) -> None:
    title("d", "Why a cache must not slide")
    say("A full cache could drop its oldest token and continue. That would stand for a new pass over the sequence "
        "without that token. The difference between the two, relative to the spread of the logits:")  # fmt: skip
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=64, n_head=4, n_positions=64, vocab_size=model.config.vocab_size
    )
    gpt2 = GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(gpt2.transformer.wpe.weight, std=0.5)  # the size of trained ones
    for name, candidate in (
        ("learned positions (GPT-2, random weights)", gpt2),
        ("rotary positions (Llama, trained)", model),
    ):
        logits, values = after_sliding(candidate, ids)
        print(f"  {name:44s} logits {logits:.1e}, values of the first layer {values:.1e}")
    print()
    say("Learned positions are added before the first layer: moving a token by one position changes all its keys and "
        "values. Rotary positions depend on distances only, so the first layer is unchanged. But "
        "the remaining tokens have attended to the dropped one, and the keys and values of the "
        "layers above contain it. So this cache raises an error when it is full. crop removes "
        "the newest tokens only, to which no other token has "
        "attended.")  # fmt: skip


def windows(ids: torch.Tensor) -> torch.Tensor:
    title("e", "What a sliding window changes")
    model, _ = load_model("gemma3")
    config = model.config
    say(f"Sliding layers attend to a window only: {config.sliding_window} tokens in five of the six layers of this "
        "small Gemma 3. The cache keeps all positions, so that crop is exact, and gives such a "
        "layer a view of its "
        "window. Keys that a new token attends to in each layer:")  # fmt: skip
    read = torch.zeros(config.num_hidden_layers, len(LENGTHS), dtype=torch.int64)
    cache = StaticContiguousCache.from_model(model, max(LENGTHS))
    with torch.no_grad():
        for n, length in enumerate(LENGTHS):
            model(ids[:, :1].expand(1, length - 1 - cache.seq_len), past_key_values=cache)
            for layer in range(config.num_hidden_layers):
                read[layer, n], _ = cache.get_mask_sizes(1, layer)  # for the next token
    print(f"  {'length':15s}" + "".join(f"{length:6d}" for length in LENGTHS))
    for layer, kind in enumerate(config.layer_types):
        print(
            f"  layer {layer} {'sliding' if 'sliding' in kind else 'full':7s}"
            + "".join(f"{n:6d}" for n in read[layer].tolist())
        )
    print()
    return read


def draw(
    grids: list[torch.Tensor],
    counts: dict[str, list[tuple[int, int, int]]],
    read: torch.Tensor,
    path: Path,
) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import ScalarFormatter

    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7), layout="constrained")
    colors = ListedColormap(["white", "#c6dbef", "tab:red"])
    for axis, grid, name in zip(axes[0], grids, counts, strict=True):
        axis.pcolormesh(grid, cmap=colors, vmin=0, vmax=2, edgecolors="white", linewidth=1)
        axis.invert_yaxis()
        axis.set(
            title=f"(b) {name}: {int((grid == 2).sum())} positions computed",
            xlabel="position",
            ylabel="step",
        )
        axis.set_xticks([n + 0.5 for n in range(grid.shape[1])], range(grid.shape[1]), fontsize=8)
        axis.set_yticks([n + 0.5 for n in range(len(grid))], range(1, len(grid) + 1), fontsize=8)
    axes[0, 0].text(
        0.97,
        0.93,
        "red: computed\nblue: cached",
        transform=axes[0, 0].transAxes,
        ha="right",
        va="top",
        fontsize=9,
    )
    for (name, points), color in zip(counts.items(), ("tab:red", "tab:blue"), strict=True):
        tokens, counted, formula = zip(*points, strict=True)
        axes[1, 0].plot(tokens, [n / 1e6 for n in formula], color=color, label=f"{name}: formula")
        axes[1, 0].plot(
            tokens, [n / 1e6 for n in counted], "o", color=color, label=f"{name}: counted"
        )
    axes[1, 0].set(
        xscale="log", yscale="log", title="(c) work", xlabel="new tokens", ylabel="MFLOP"
    )
    axes[1, 0].set_xticks(tokens, tokens)
    axes[1, 0].xaxis.set_major_formatter(ScalarFormatter())
    axes[1, 0].xaxis.set_minor_locator(plt.NullLocator())
    axes[1, 0].grid(alpha=0.3)
    axes[1, 0].legend(fontsize=8)
    axes[1, 1].plot(LENGTHS, read[-1], "o-", color="tab:red", label="full layer")
    axes[1, 1].plot(LENGTHS, read[0], "o-", color="tab:blue", label="sliding layer, window 32")
    axes[1, 1].set(
        title="(e) keys that a new token attends to", xlabel="sequence length", ylabel="keys"
    )
    axes[1, 1].grid(alpha=0.3)
    axes[1, 1].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("explain.png"), help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    if not args.plot.parent.is_dir():
        print(f"explain.py: there is no folder {args.plot.parent} to write to", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = load_model("llama")
    model.generation_config.eos_token_id = None
    encoded: Any = tokenizer(TEXT, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    print(f"Prompt: {TEXT!r}, {ids.shape[1]} tokens. Model: a Llama of 1.3 million parameters.")
    longer = model.generate(ids, max_new_tokens=120, do_sample=False, pad_token_id=0)
    appending_changes_nothing(model, longer)
    grids = what_is_computed(model, ids)
    counts = work(model, ids)
    no_sliding(model, ids)
    read = windows(ids)
    draw(grids, counts, read, args.plot)
    print(f"{args.plot}: (b), (c) and (e) as pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
