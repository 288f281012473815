"""One pair of files per kernel: `op.py` has the operation and its plain PyTorch twin, `op_triton.py` has the kernel."""
