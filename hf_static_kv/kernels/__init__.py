"""Kernels for one job each, with a plain PyTorch twin; tensors in, tensors out. They know no transformers."""
