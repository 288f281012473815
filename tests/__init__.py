"""Without a GPU, Triton's interpreter runs the kernels. Triton reads this variable when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
