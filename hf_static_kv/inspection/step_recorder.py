"""The token of each step of a generation and those it was chosen from, as plain data for JSON."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

_REMEDY = (
    "Beam search reorders batch rows and assisted decoding drops candidate tokens: neither can "
    "be recorded. Record greedy decoding or sampling, with a new StepRecorder for each call, or "
    "read `steps` before the next one."
)


class StepRecorder(LogitsProcessor):
    """A logits processor that records the scores after earlier processors and changes nothing.

    It holds the record of one call of `generate`: pass what that call returned to `steps`. Another
    prompt starts a new record, and so does any call after `steps`. Before that, a prompt that is
    one token longer counts as the next step.
    """

    def __init__(self, best: int = 5, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if best < 1:
            raise ValueError(f"best must be at least 1, got {best}.")
        self.best = best
        self.tokenizer = tokenizer
        self._begin(torch.empty(0, 0))

    def _begin(self, prompt: Tensor) -> None:
        self.prompt_len = prompt.shape[1]  # 0 for a prompt of embeddings
        self._ids = prompt  # the sequences before the newest step
        self._scores: list[tuple[Tensor, Tensor, Tensor]] = []  # best tokens, log-probs, entropy
        self._chosen: list[Tensor] = []  # log-probs of the chosen tokens
        # [B, V] of the newest step, whose token is not chosen yet.
        self._log_probs: Tensor | None = None
        # Whether every step had the sequences of the last and a token; read deferred.
        self._is_continuous = torch.ones((), dtype=torch.bool, device=prompt.device)
        self._was_read = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        batch_size, length = self._ids.shape
        is_unread = bool(self._scores) and not self._was_read
        # Comparing tokens here would synchronize.
        if is_unread and input_ids.shape == (batch_size, length + 1):
            self._is_continuous = self._is_continuous & (input_ids[:, :-1] == self._ids).all()
            self._choose(input_ids[:, -1])
        else:
            n = self.prompt_len
            is_longer = len(input_ids) == batch_size and input_ids.shape[1] > n
            # Maybe the recorded call.
            if is_unread and is_longer and torch.equal(input_ids[:, :n], self._ids[:, :n]):
                raise ValueError(
                    "This sequence has the prompt of the record and is not its next step. "
                    f"{_REMEDY}"
                )
            self._begin(input_ids)
        log_probs = scores.float().log_softmax(dim=-1)
        top = log_probs.topk(min(self.best, log_probs.shape[-1]), dim=-1)
        terms = torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs)
        self._scores.append((top.indices, top.values, -terms.sum(dim=-1)))
        self._log_probs = log_probs
        self._ids = input_ids.clone()
        return scores

    def _choose(self, tokens: Tensor) -> None:
        if self._log_probs is not None:
            self._chosen.append(self._log_probs.gather(-1, tokens[:, None])[:, 0])
            self._log_probs = None

    def steps(self, sequences: Tensor) -> list[list[dict[str, Any]]]:
        """The steps of each batch row: token, text, probability, best tokens, entropy in nats.

        All batch rows have the same number of steps: those after the end of a sequence are padding.
        """
        sequences = sequences.to(self._ids.device)
        new = sequences[:, self.prompt_len :]
        known = self._ids[:, : sequences.shape[1]]
        remedy = f"pass what the same call of generate returned. {_REMEDY}"
        num_steps = len(self._scores)
        num_new = sequences.shape[1] - self.prompt_len
        if not 0 < num_new <= num_steps:
            counts = f"{num_steps} steps were recorded and the sequences hold {num_new} new tokens"
            raise ValueError(f"{counts}: {remedy}")
        if not bool(self._is_continuous) or not torch.equal(sequences[:, : known.shape[1]], known):
            raise ValueError(f"The sequences are not those whose steps were recorded: {remedy}")
        self._was_read = True
        if len(self._chosen) < num_new:
            self._choose(new[:, len(self._chosen)])
        return [
            [self._step(n, row, int(token)) for n, token in enumerate(tokens)]
            for row, tokens in enumerate(new)
        ]

    def _step(self, n: int, row: int, token: int) -> dict[str, Any]:
        tokens, log_probs, entropy = (tensor[row] for tensor in self._scores[n])
        pairs = zip(tokens.tolist(), log_probs.exp().tolist(), strict=True)
        best = [self._entry(*pair) for pair in pairs]
        chosen = self._entry(token, self._chosen[n][row].exp().item())
        return {**chosen, "best": best, "entropy": entropy.item()}

    def _entry(self, token: int, probability: float) -> dict[str, Any]:
        text = None if self.tokenizer is None else str(self.tokenizer.decode([token]))
        return {"token": token, "text": text, "probability": probability}
