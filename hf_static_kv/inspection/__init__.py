"""Attention weights of a run (`trace_attention`) and the tokens it chose from (`StepRecorder`)."""
