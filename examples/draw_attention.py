"""Draw what each new token attends to in some layers, and print the candidates that it was chosen
from.

    python examples/draw_attention.py              # the Gemma 3 miniature: its windows are visible
    python examples/draw_attention.py --model smollm2 --layers 0 15 29 --prompt "The capital of France is"
    python examples/draw_attention.py --model Qwen/Qwen3-1.7B --device cuda --dtype bfloat16 --decoder graph

The picture has one panel per layer. Each line of a panel is a new token; its colours are the
attention weights over the sequence in the pass that chose it. --model takes a short name, a hub id,
a folder or a GGUF file. Exit status 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from common import BadArgument, encode, environment, read_prompts
from transformers import PreTrainedModel

from hf_static_kv import GraphDecoder, StaticContiguousCache, StepRecorder, trace_attention
from hf_static_kv.testing import load_model

Steps = list[dict[str, Any]]


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    inputs: dict[str, torch.Tensor],
    args: argparse.Namespace,
) -> Any:
    """The tokens of one generation, its step record and its attention trace."""
    cache = StaticContiguousCache.from_model(
        model, inputs["input_ids"].shape[1] + args.max_new_tokens
    )
    recorder = StepRecorder(args.best, tokenizer)
    loop = {"custom_generate": GraphDecoder()} if args.decoder == "graph" else {}
    torch.manual_seed(args.seed)
    with trace_attention(model, args.layers) as trace:
        tokens = model.generate(
            **inputs,
            past_key_values=cache,
            max_new_tokens=args.max_new_tokens,
            do_sample=args.sample,
            logits_processor=[recorder],
            pad_token_id=model.generation_config.pad_token_id or 0,
            **loop,
        )
    return tokens, recorder.steps(tokens)[0], trace


def label(text: str) -> str:
    """A token with its white space made visible."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")
    return "_" * (len(shown) - len(shown.lstrip(" "))) + shown.lstrip(" ") or "(empty)"


def table(steps: Steps) -> str:
    lines = ["| step | token | probability | entropy, bits | best tokens |", "|---" * 5 + "|"]
    for n, step in enumerate(steps, start=1):
        best = ", ".join(f"`{label(b['text'])}` {b['probability']:.0%}" for b in step["best"])
        bits = step["entropy"] / torch.log(torch.tensor(2.0)).item()
        lines.append(
            f"| {n} | `{label(step['text'])}` | {step['probability']:.0%} | {bits:.1f} | {best} |"
        )
    return "\n".join(lines)


def default_layers(model: PreTrainedModel) -> list[int]:
    """The first layer of each kind (sliding, full), or the first and the last layer."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    firsts = sorted({kind: kinds.index(kind) for kind in kinds}.values())
    return firsts if len(firsts) > 1 else sorted({0, config.num_hidden_layers - 1})


def draw(model: PreTrainedModel, texts: list[str], trace: Any, path: Path) -> None:
    """One panel per layer, mean over the heads; grey where a position is outside the layer's mask."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import PowerNorm

    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    # [passes, positions]
    matrices = {layer: trace.matrix(layer).mean(dim=0) for layer in trace.layers}
    passes, length = next(iter(matrices.values())).shape
    size = (max(7.0, 0.17 * length + 2.5), len(matrices) * (0.17 * passes + 1.5))
    figure, axes = plt.subplots(len(matrices), 1, figsize=size, layout="constrained", squeeze=False)
    colors = plt.get_cmap("magma_r").with_extremes(bad="#d9d9d9")
    for axis, (layer, matrix) in zip(axes[:, 0], matrices.items(), strict=True):
        for n, row in enumerate(trace.of_layer(layer)):
            matrix[n, : int(row.positions[0])] = torch.nan
            matrix[n, int(row.positions[-1]) + 1 :] = torch.nan
        # A square-root scale keeps small weights visible.
        shown = axis.imshow(
            matrix, cmap=colors, norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="none"
        )
        reach = (
            f"a window of {config.sliding_window}"
            if kinds[layer] == "sliding_attention"
            else "all tokens"
        )
        axis.set_title(
            f"layer {layer} attends to {reach}; grey: masked; mean over the heads", fontsize=10
        )
        axis.set_xticks(
            range(length), [label(text) for text in texts[:length]], rotation=90, fontsize=6
        )
        chosen = [label(text) for text in texts[len(texts) - passes :]]
        axis.set_yticks(range(passes), chosen, fontsize=6)
        axis.set_ylabel("new token", fontsize=8)
    figure.colorbar(shown, ax=axes[:, 0], label="attention weight", fraction=0.03, pad=0.01)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gemma3", help="default: %(default)s")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="default: the first of each kind, or first and last"
    )
    parser.add_argument(
        "--prompt", help="default: the first of examples/data/prompts.jsonl that suits the model"
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument(
        "--best", type=int, default=3, help="candidates per step in the table; default: %(default)s"
    )
    parser.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--decoder", choices=["plain", "graph"], default="plain")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: %(default)s",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument(
        "--plot", type=Path, default=Path("attention.png"), help="default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="write the step record here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        if args.max_new_tokens < 1 or args.best < 1:
            raise BadArgument("--max-new-tokens and --best must be at least 1")
        model, tokenizer = load_model(
            args.model, device=args.device, dtype=getattr(torch, args.dtype)
        )
        args.layers = args.layers or default_layers(model)
        inputs = encode(read_prompts(args, tokenizer)[0], model, tokenizer, args)
        tokens, steps, trace = run(model, tokenizer, inputs, args)
    except (BadArgument, ValueError) as error:
        print(f"draw_attention.py: {error}", file=sys.stderr)
        return 2
    print(table(steps))
    texts = [tokenizer.decode([token]) for token in tokens[0].tolist()]
    draw(model, texts, trace, args.plot)
    print(f"\n{args.plot}: layers {', '.join(map(str, trace.layers))} over the sequence")
    if args.json:
        record = {**environment(args.device), "model": args.model, "steps": steps}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
