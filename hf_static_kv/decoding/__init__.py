"""The decode loop. Reading order: call, eligibility, sampling, verification, decoder."""
