"""Why a KV cache may exist, what it saves, and what it must not do: five short arguments, each shown on numbers.

    python examples/explain.py                       # prints the page and writes explain.png; half a minute on a CPU
    python examples/explain.py --plot other.png

For a reader who has seen a transformer and never a cache. Every number on the page is computed while it is printed.
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
LENGTHS = [8, 16, 24, 32, 40, 56, 80, 120]  # of the text, where a window is shown


def say(text: str) -> None:
    """A paragraph, wrapped."""
    print(textwrap.fill(" ".join(text.split()), 100), end="\n\n")


def title(letter: str, words: str) -> None:
    print(f"\n({letter}) {words}\n{'-' * (len(words) + 4)}\n")


def appending_changes_nothing(model: PreTrainedModel, ids: torch.Tensor) -> None:
    title("a", "A new token leaves the old ones as they are")
    say("Attention is causal: a token looks at itself and at those before it, never ahead. Here is one head with keys "
        "and values of two numbers. The output of a token is the mean of the values before it, weighted by how well "
        "its query fits their keys.")  # fmt: skip
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 2.0]])
    values = torch.tensor([[2.0, 0.0], [0.0, 4.0], [6.0, 6.0], [9.0, -9.0]])
    for length in (3, 4):
        scores = (keys[:length] @ keys[:length].T).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
        outputs = scores.softmax(-1) @ values[:length]
        print(f"  {length} tokens: ", "  ".join(f"({a:.2f}, {b:.2f})" for a, b in outputs.tolist()))
    print()
    say("The first three outputs did not move when the fourth token came. What holds for one layer holds for the next, "
        "which is fed with these outputs; so it holds for the keys and values of every layer, and they may be kept. On "
        f"a trained model of {model.config.num_hidden_layers} layers and a text of {ids.shape[1]} tokens:")  # fmt: skip
    before, after = keys_of(model, ids[:, :-1]), keys_of(model, ids)
    moved = max((b - a[:, :, :-1]).abs().max().item() for b, a in zip(before, after, strict=True))
    print(f"  keys of the first {ids.shape[1] - 1}, with and without the last: largest difference {moved:.0e}")
    for words, context in (("as usual", nullcontext()), ("inside exact(model)", exact(model))):
        with context, torch.no_grad():
            cache = StaticContiguousCache.from_model(model, ids.shape[1])
            model(ids[:, :-1], past_key_values=cache)
            from_kept = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
            difference = (from_kept - model(ids, use_cache=False).logits[:, -1]).abs().max().item()
        print(f"  logits of the last, from kept keys and from the whole text, {words}: {difference:.0e}")
    print()
    say("What is left as usual is rounding: a library adds up one row in another order than a hundred. Inside exact "
        "the order is fixed, and the bits are equal.")  # fmt: skip


@torch.no_grad()
def keys_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """The keys of each layer after one pass."""
    cache = StaticContiguousCache.from_model(model, ids.shape[1])
    model(ids, past_key_values=cache)
    return [cache.layers[n].keys.clone() for n in range(len(cache.layers))]


def positions_computed(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cached: bool) -> torch.Tensor:
    """For each pass of `generate` the positions that went through the model, [passes, text], seen by a hook."""
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    try:
        model.generate(ids, max_new_tokens=new_tokens, do_sample=False, use_cache=cached, pad_token_id=0)
    finally:
        hook.remove()
    grid, end = torch.zeros(len(sizes), ids.shape[1] + new_tokens - 1), ids.shape[1]
    for n, size in enumerate(sizes):
        grid[n, : end + n] = 1  # there, and read from the cache
        grid[n, end + n - size : end + n] = 2  # computed
    return grid


def what_is_computed(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    title("b", "Which positions go through the model at each step")
    grids = [positions_computed(model, ids[:, :6], 8, cached) for cached in (False, True)]
    for words, grid in zip(("without a cache", "with a cache"), grids, strict=True):
        print(f"  {words:16s} # computed   . kept from before")
        for n, row in enumerate(grid.tolist(), start=1):
            print(f"    step {n}:  " + "".join(" .#"[int(cell)] for cell in row))
        print(f"    {int((grid == 2).sum())} positions in all\n")
    return grids


def flops(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cached: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        model.generate(ids, max_new_tokens=new_tokens, do_sample=False, use_cache=cached, pad_token_id=0)
    return counter.get_total_flops()


def flops_by_formula(model: PreTrainedModel, prompt: int, new_tokens: int, cached: bool) -> int:
    """2 for each weight of a linear layer and token; 4 D for each query, key and head; the head once a step."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()]
    weights = sum(module.weight.numel() for module in linear)
    attention = 4 * head_dim * config.num_attention_heads * config.num_hidden_layers
    rotary = head_dim  # of the angles: half a head's dims, 2 for each product
    total = 0
    for step in range(new_tokens):
        text = prompt + step
        queries = 1 if cached and step else text
        total += queries * (2 * weights + rotary) + attention * queries * text
        total += 2 * model.get_output_embeddings().weight.numel()
    return total


def work(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, list[tuple[int, int, int]]]:
    title("c", "How much work that is")
    say("Without a cache, n tokens cost 1 + 2 + ... + n passes over a token: the work grows with the square of the "
        "text (and that of attention, small here, with its cube). With a cache every step is one token. torch counts "
        "the floating-point operations; beside it the formula: 2 for each weight and token, 4 times the size of a head "
        "for each pair of query and key.")  # fmt: skip
    model.set_attn_implementation("eager")  # in which every product is a matrix product that can be counted
    counts: dict[str, list[tuple[int, int, int]]] = {"without a cache": [], "with a cache": []}
    print(
        f"  {'new tokens':>12s} {'without, MFLOP':>16s} {'formula':>9s} {'with, MFLOP':>13s} {'formula':>9s}"
        f" {'saved':>7s}"
    )
    for new_tokens in (8, 16, 32, 64):
        row = []
        for cached, kept in zip((False, True), counts.values(), strict=True):
            counted = flops(model, ids, new_tokens, cached)
            formula = flops_by_formula(model, ids.shape[1], new_tokens, cached)
            kept.append((new_tokens, counted, formula))
            row += [counted, formula]
        mega = [number / 1e6 for number in row]
        print(
            f"  {new_tokens:12d} {mega[0]:16.0f} {mega[1]:9.0f} {mega[2]:13.0f} {mega[3]:9.0f} {row[0] / row[2]:6.1f}x"
        )
    print()
    model.set_attn_implementation("sdpa")
    return counts


@torch.no_grad()
def after_sliding(model: PreTrainedModel, ids: torch.Tensor) -> tuple[float, float]:
    """How far a cache that dropped its first token is from a fresh pass: logits, and values of the first layer."""
    cache, fresh = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    # The kept tokens stay at the positions that they had, and the new one comes after them.
    slid = model(ids[:, -1:], past_key_values=cache, position_ids=torch.tensor([[ids.shape[1] - 1]])).logits[0, -1]
    expected = model(ids[:, 1:], past_key_values=fresh).logits[0, -1]
    scale = expected.std().item()
    first = (cache.layers[0].values - fresh.layers[0].values).abs().max() / fresh.layers[0].values.abs().max()
    return (slid - expected).abs().max().item() / scale, first.item()


def no_sliding(model: PreTrainedModel, ids: torch.Tensor) -> None:
    title("d", "What a cache must not do: slide")
    say("When the cache is full it is tempting to drop its oldest token and go on. Compare that with what it is meant "
        "to be: a fresh pass over the text without that token. In units of the spread of the logits:")  # fmt: skip
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=64, vocab_size=model.config.vocab_size)
    gpt2 = GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(gpt2.transformer.wpe.weight, std=0.5)  # as strong as trained ones are
    for words, candidate in (
        ("learned positions (GPT-2, random weights)", gpt2),
        ("rotary positions (Llama, trained)", model),
    ):
        logits, values = after_sliding(candidate, ids)
        print(f"  {words:44s} logits {logits:.1e}, values of the first layer {values:.1e}")
    print()
    say("With learned positions a token's place is added to it before the first layer: a step to the left makes every "
        "key and value another one. Rotary positions turn queries and keys so that only distances count, and the first "
        "layer does not mind. But the layers above were fed with what the tokens had read, from the dropped one too, "
        "and that stays in their keys. So this cache refuses to be overfilled instead of sliding; crop takes back the "
        "newest tokens only, which no other token has read.")  # fmt: skip


def windows(ids: torch.Tensor) -> torch.Tensor:
    title("e", "What a window changes")
    model, _ = load_model("gemma3")
    config = model.config
    say(f"Some layers are made to look back no further than a window: in this small Gemma 3 by {config.sliding_window} "
        "tokens, in five layers of six. All positions stay in our cache, so that crop is exact, and such a layer is "
        "handed its window alone. Keys that a new token reads in each layer:")  # fmt: skip
    read = torch.zeros(config.num_hidden_layers, len(LENGTHS), dtype=torch.int64)
    cache = StaticContiguousCache.from_model(model, max(LENGTHS))
    with torch.no_grad():
        for n, length in enumerate(LENGTHS):
            model(ids[:, :1].expand(1, length - 1 - cache.seq_len), past_key_values=cache)
            for layer in range(config.num_hidden_layers):
                read[layer, n], _ = cache.get_mask_sizes(1, layer)  # for one token more
    print("  text of      " + "".join(f"{length:6d}" for length in LENGTHS))
    for layer, kind in enumerate(config.layer_types):
        print(
            f"  layer {layer} {'window' if 'sliding' in kind else 'full':6s}"
            + "".join(f"{n:6d}" for n in read[layer].tolist())
        )
    print()
    return read


def draw(
    grids: list[torch.Tensor], counts: dict[str, list[tuple[int, int, int]]], read: torch.Tensor, path: Path
) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import ScalarFormatter

    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7), layout="constrained")
    colors = ListedColormap(["white", "#c6dbef", "tab:red"])
    for axis, grid, words in zip(axes[0], grids, ("without a cache", "with a cache"), strict=True):
        axis.pcolormesh(grid, cmap=colors, vmin=0, vmax=2, edgecolors="white", linewidth=1)
        axis.invert_yaxis()
        axis.set(title=f"(b) {words}: {int((grid == 2).sum())} positions computed", xlabel="position", ylabel="step")
        axis.set_xticks([n + 0.5 for n in range(grid.shape[1])], range(grid.shape[1]), fontsize=8)
        axis.set_yticks([n + 0.5 for n in range(len(grid))], range(1, len(grid) + 1), fontsize=8)
    axes[0, 0].text(
        0.97, 0.93, "red: computed\nblue: kept", transform=axes[0, 0].transAxes, ha="right", va="top", fontsize=9
    )
    for (words, rows), color in zip(counts.items(), ("tab:red", "tab:blue"), strict=True):
        tokens, counted, formula = zip(*rows, strict=True)
        axes[1, 0].plot(tokens, [n / 1e6 for n in formula], color=color, label=f"{words}: formula")
        axes[1, 0].plot(tokens, [n / 1e6 for n in counted], "o", color=color, label=f"{words}: counted")
    axes[1, 0].set(xscale="log", yscale="log", title="(c) work", xlabel="new tokens", ylabel="MFLOP")
    axes[1, 0].set_xticks(tokens, tokens)
    axes[1, 0].xaxis.set_major_formatter(ScalarFormatter())
    axes[1, 0].xaxis.set_minor_locator(plt.NullLocator())
    axes[1, 0].grid(alpha=0.3)
    axes[1, 0].legend(fontsize=8)
    axes[1, 1].plot(LENGTHS, read[-1], "o-", color="tab:red", label="a full layer")
    axes[1, 1].plot(LENGTHS, read[0], "o-", color="tab:blue", label="a layer with a window of 32")
    axes[1, 1].set(title="(e) keys that a new token reads", xlabel="length of the text", ylabel="keys")
    axes[1, 1].grid(alpha=0.3)
    axes[1, 1].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("explain.png"), help="default: %(default)s")
    args = parser.parse_args()
    if not args.plot.parent.is_dir():
        print(f"explain.py: there is no folder {args.plot.parent} to write to", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = load_model("llama")
    model.generation_config.eos_token_id = None
    encoded: Any = tokenizer(TEXT, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    print(f"The text: {TEXT!r}, {ids.shape[1]} tokens. The model: a Llama of 1.3 million parameters.")
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
