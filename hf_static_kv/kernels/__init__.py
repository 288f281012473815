"""Pairs of files: `op.py` has operations and their plain PyTorch twins, `op_triton.py` has the
kernels.
"""
