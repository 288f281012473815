"""The token of each step of a generation, and the tokens it was chosen from: plain data, ready for JSON.

recorder = StepRecorder(best=5, tokenizer=tokenizer)
tokens = model.generate(**inputs, logits_processor=[recorder])
recorder.steps(tokens)[0]        the steps of the first batch row
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

_REMEDY = (
    "Beam search reorders batch rows and assisted decoding drops candidate tokens: neither can be recorded. Record "
    "greedy decoding or sampling, with a new StepRecorder for each call, or read `steps` before the next one."
)


class StepRecorder(LogitsProcessor):
    """A logits processor that records the scores it is given, after earlier processors, and does not change them.

    It holds the record of one call of `generate`: pass what that call returned to `steps`. Another prompt starts a new
    record, and so does any call after `steps`. Before that, a prompt that is one token longer counts as the next step.
    """

    def __init__(self, best: int = 5, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if best < 1:
            raise ValueError(f"best must be at least 1, got {best}.")
        self.best, self.tokenizer = best, tokenizer
        self.prompt_len = 0
        self._scores: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # best tokens, log-probs, entropy
        self._chosen: list[torch.Tensor] = []  # log-probs of the chosen tokens
        self._log_probs: torch.Tensor | None = None  # [B, V] of the newest step, whose token is not chosen yet
        self._ids = torch.empty(0, 0)  # the sequences before the newest step
        self._is_continuous = torch.tensor(True)  # every step had the sequences of the last and a token; read deferred
        self._was_read = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._is_next(input_ids):
            self._is_continuous = self._is_continuous & (input_ids[:, :-1] == self._ids).all()
            self._choose(input_ids[:, -1])
        else:
            self._begin(input_ids)
        log_probs = scores.float().log_softmax(dim=-1)
        top = log_probs.topk(min(self.best, log_probs.shape[-1]), dim=-1)
        entropy = -torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs).sum(dim=-1)
        self._scores.append((top.indices, top.values, entropy))
        self._log_probs, self._ids = log_probs, input_ids.clone()
        return scores

    def _is_next(self, input_ids: torch.Tensor) -> bool:
        """Whether this looks like the next step. Only shapes are compared: comparing tokens would synchronize."""
        batch_size, length = self._ids.shape
        return bool(self._scores) and not self._was_read and input_ids.shape == (batch_size, length + 1)

    def _begin(self, input_ids: torch.Tensor) -> None:
        """Start a new record. Raise where this may be the recorded call: a longer sequence with the same prompt."""
        prompt = self._ids[:, : self.prompt_len]
        is_longer = bool(self._scores) and len(prompt) == len(input_ids) and input_ids.shape[1] > self.prompt_len
        if is_longer and not self._was_read and torch.equal(input_ids[:, : self.prompt_len], prompt):
            raise ValueError(f"This sequence has the prompt of the record and is not its next step. {_REMEDY}")
        self.prompt_len = input_ids.shape[1]  # 0 for a prompt of embeddings
        self._scores, self._chosen, self._log_probs, self._was_read = [], [], None, False
        self._is_continuous = torch.ones((), dtype=torch.bool, device=input_ids.device)

    def _choose(self, tokens: torch.Tensor) -> None:
        if self._log_probs is not None:
            self._chosen.append(self._log_probs.gather(-1, tokens[:, None])[:, 0])
            self._log_probs = None

    def steps(self, sequences: torch.Tensor) -> list[list[dict[str, Any]]]:
        """The steps of each batch row: token, text, probability, the best tokens with theirs, entropy in nats.

        All batch rows have the same number of steps: those after the end of a sequence are padding.
        """
        sequences = sequences.to(self._ids.device)
        self._check(sequences)
        self._was_read = True
        new = sequences[:, self.prompt_len :]
        if len(self._chosen) < new.shape[1]:
            self._choose(new[:, len(self._chosen)])
        return [[self._step(n, row, int(token)) for n, token in enumerate(tokens)] for row, tokens in enumerate(new)]

    def _check(self, sequences: torch.Tensor) -> None:
        new, known = sequences.shape[1] - self.prompt_len, self._ids[:, : sequences.shape[1]]
        remedy = f"pass what the same call of generate returned. {_REMEDY}"
        if not 0 < new <= len(self._scores):
            raise ValueError(
                f"{len(self._scores)} steps were recorded and the sequences hold {new} new tokens: {remedy}"
            )
        if not bool(self._is_continuous) or not torch.equal(sequences[:, : known.shape[1]], known):
            raise ValueError(f"The sequences are not those whose steps were recorded: {remedy}")

    def _step(self, n: int, row: int, token: int) -> dict[str, Any]:
        tokens, log_probs, entropy = (tensor[row] for tensor in self._scores[n])
        best = zip(tokens.tolist(), log_probs.exp().tolist(), strict=True)
        return {
            **self._entry(token, self._chosen[n][row].exp().item()),
            "best": [self._entry(*candidate) for candidate in best],
            "entropy": entropy.item(),
        }

    def _entry(self, token: int, probability: float) -> dict[str, Any]:
        text = None if self.tokenizer is None else str(self.tokenizer.decode([token]))
        return {"token": token, "text": text, "probability": probability}
