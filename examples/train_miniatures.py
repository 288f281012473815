"""Train the miniatures under examples/models/ from scratch: Llama, Qwen3 and Gemma 3, 1.3 million
parameters each.

    python examples/train_miniatures.py                 # all three; minutes on a GPU, an hour or two on a CPU
    python examples/train_miniatures.py --model gemma3 --steps 50 --out /tmp/models

The text is examples/data/tinyshakespeare.txt; its last tenth is held out. Each model is saved as an
ordinary model folder: config, generation config, tokenizer, float32 safetensors. A stopped run
resumes from `checkpoint.pt` in that folder, which is removed at the end. `training.json` and
`training.png` in --out record the held-out loss beside that of bz2 and xz after the same training
text. The held-out text also selects the step whose weights are kept, and selected the default
settings: its score is a validation score, not a test score.
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import math
import time
from pathlib import Path

import torch
from common import environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent
TEXT = HERE / "data" / "tinyshakespeare.txt"
CONTEXT, VOCAB = 512, 1024
END = "<|endoftext|>"

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# Qwen3 norms its queries and keys. Gemma 3 has five sliding layers to one full layer, one KV head,
# and a window far shorter than its context.
MINIATURES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3_text",
        {"num_key_value_heads": 1, "sliding_window": 32, "query_pre_attn_scalar": 32},
    ),
}


def build_config(name: str) -> PreTrainedConfig:
    model_type, own = MINIATURES[name]
    return CONFIG_MAPPING[model_type](**{**COMMON, **own})


def split_text() -> tuple[str, str]:
    """The training text and the held-out last tenth, cut at a line."""
    text = TEXT.read_text()
    cut = text.index("\n", int(len(text) * 0.9)) + 1
    return text[:cut], text[cut:]


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE: encodes every text, and decoding restores it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
    )


def compressor_bits_per_byte(train: str, held_out: str) -> dict[str, float]:
    """Bits per byte that a compressor needs for the held-out text after it has compressed the
    training text.
    """
    compressors = {
        "bz2": lambda b: bz2.compress(b, 9),
        "xz": lambda b: lzma.compress(b, preset=9 | lzma.PRESET_EXTREME),
    }
    before, both = train.encode(), (train + held_out).encode()
    return {
        name: 8 * (len(compress(both)) - len(compress(before))) / (len(both) - len(before))
        for name, compress in compressors.items()
    }


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, ids: torch.Tensor, num_bytes: int) -> float:
    """Bits per byte of a text.

    Every token but the first is scored once, after at least half a context.
    """
    half = CONTEXT // 2
    windows = ids.unfold(0, CONTEXT + 1, half)  # [windows, CONTEXT + 1]
    last = len(ids) - CONTEXT - 1  # start of one more window, for the end of the text
    rest = (len(ids) - CONTEXT - 1) % half
    scored = [(windows[:1], CONTEXT), *((part, half) for part in windows[1:].split(64))]
    scored += [(ids[None, last:], rest)] if rest else []
    nats = 0.0
    for window, count in scored:
        logits = model(window[:, :-1], use_cache=False).logits[:, -count:].float()
        targets = window[:, -count:]
        nats += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ).item()
    return nats / math.log(2) / num_bytes


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warm_up:
        return args.lr * (step + 1) / args.warm_up
    progress = (step - args.warm_up) / max(1, args.steps - args.warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class Run:
    """The training of one model. A checkpoint holds all that a resumed run needs."""

    def __init__(
        self, name: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self.name, self.args, self.folder = name, args, args.out / name
        self.checkpoint = self.folder / "checkpoint.pt"
        train, held_out = split_text()
        self.train_ids, self.held_out_ids = (
            torch.tensor(tokenizer(text)["input_ids"], device=args.device)
            for text in (train, held_out)
        )
        self.held_out_bytes = len(held_out.encode())
        torch.manual_seed(args.seed)
        self.model = AutoModelForCausalLM.from_config(build_config(name)).to(args.device)
        decay = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": decay, "weight_decay": args.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99))
        self.generator = torch.Generator().manual_seed(args.seed)
        self.step, self.seconds = 0, 0.0
        self.best: dict = {"bits_per_byte": math.inf}
        self.history: dict[str, list] = {"train": [], "held_out": []}

    def save_checkpoint(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {
            "generator": self.generator.get_state(),
            "best": self.best,
            "history": self.history,
        }
        torch.save({**state, "step": self.step, "seconds": self.seconds}, self.checkpoint)

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.args.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.seconds = state["step"], state["seconds"]
        self.best, self.history = state["best"], state["history"]

    def train_step(self) -> float:
        starts = torch.randint(
            len(self.train_ids) - CONTEXT - 1, (self.args.batch_size,), generator=self.generator
        )
        batch = torch.stack(
            [self.train_ids[start : start + CONTEXT + 1] for start in starts.tolist()]
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.args)
        logits = self.model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def evaluate(self, loss: float) -> None:
        """Record both losses and keep the weights with the best held-out loss."""
        self.model.eval()
        score = bits_per_byte(self.model, self.held_out_ids, self.held_out_bytes)
        self.model.train()
        self.history["train"].append([self.step, loss])
        self.history["held_out"].append([self.step, score])
        if score < self.best["bits_per_byte"]:
            weights = {
                key: value.detach().cpu().clone() for key, value in self.model.state_dict().items()
            }
            self.best = {"bits_per_byte": score, "step": self.step, "weights": weights}

    def train(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.resume()
        began = time.perf_counter() - self.seconds
        with tqdm(total=self.args.steps, initial=self.step, desc=self.name, disable=None) as bar:
            while self.step < self.args.steps:
                loss = self.train_step()
                bar.update()
                if self.step % self.args.evaluate_every == 0 or self.step == self.args.steps:
                    self.evaluate(loss)
                    self.seconds = time.perf_counter() - began
                    self.save_checkpoint()
                    bar.set_postfix(
                        loss=f"{loss:.3f}",
                        held_out=f"{self.history['held_out'][-1][1]:.3f} bits/byte",
                    )
        self.model.load_state_dict(self.best["weights"])

    def save(self, tokenizer: PreTrainedTokenizerFast) -> dict:
        """Write the model folder and return its entry in the record."""
        self.model.eval().cpu().save_pretrained(self.folder)
        tokenizer.save_pretrained(self.folder)
        self.checkpoint.unlink(missing_ok=True)
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "bits_per_byte": round(self.best["bits_per_byte"], 4),
            "best_step": self.best["step"],
            "seconds": round(self.seconds, 1),
            "history": self.history,
        }


def plot(record: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    for name, model in record["models"].items():
        steps, scores = zip(*model["history"]["held_out"], strict=True)
        axis.plot(
            steps,
            scores,
            label=f"{name}: {model['bits_per_byte']:.2f} at step {model['best_step']}",
        )
    for name, bits in record["baselines"].items():
        axis.axhline(bits, linestyle="--", color="grey", linewidth=1)
        axis.text(
            axis.get_xlim()[1], bits, f"{name} {bits:.2f} ", ha="right", va="bottom", color="grey"
        )
    axis.set(
        title="Held-out loss of the miniatures",
        xlabel="training step",
        ylabel="bits per byte",
        ylim=(None, 3.2),
    )
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MINIATURES, nargs="+", default=list(MINIATURES))
    parser.add_argument("--out", type=Path, default=HERE / "models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--warm-up", type=int, default=60)
    parser.add_argument("--evaluate-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_float32_matmul_precision("high")  # TF32
    train, held_out = split_text()
    tokenizer = train_tokenizer(train)
    record_path = args.out / "training.json"
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "model")}
    baselines = compressor_bits_per_byte(train, held_out)
    record = {
        **environment(args.device),
        "settings": settings,
        "baselines": baselines,
        "models": {},
    }
    for name in args.model:
        run = Run(name, args, tokenizer)
        run.train()
        record["models"][name] = run.save(tokenizer)
        print(f"{name}: {record['models'][name]['bits_per_byte']:.3f} bits per byte, {baselines=}")
    record_path.write_text(json.dumps(record, indent=1) + "\n")
    plot(record, args.out / "training.png")


if __name__ == "__main__":
    main()
