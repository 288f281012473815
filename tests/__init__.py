"""Without a GPU, Triton's interpreter runs the kernels.

Triton reads this variable when it is imported.
"""

import os
from contextlib import suppress
from types import FunctionType

import torch


def _patch_once_per_launch() -> None:
    """The interpreter patches `triton.language` at every call of a device function too: half of its
    time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # It patches the modules that a function sees: kernels see one of these, Triton's own functions
    # the other.
    sees_both = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: patch(sees_both)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with suppress(ImportError, AttributeError):  # no Triton, or one that does it otherwise
        _patch_once_per_launch()
