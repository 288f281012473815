"""The decode loop. Reading order: call, eligibility, selection, tokens, verification, prompts, decoder."""
