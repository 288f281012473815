"""Let a kernel begin while the one before it still runs ("programmatic dependent launch", compute capability 9.0 on).

    _kernel[grid](..., **early_launch(x))        and in the kernel, before anything that another kernel has written:
    after_previous(EARLY)

Short kernels in a row are mostly waiting: for the launch, and for the first bytes. What no kernel writes, such as the
weights, may be read before `after_previous`. Every kernel lets the next one begin only after its own wait, so whatever
is older than the kernel before is complete from the start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def early_launch(x: torch.Tensor) -> dict[str, Any]:
    """The keywords of a launch on x's device: `EARLY` for the kernel, `launch_pdl` for Triton."""
    if x.is_cuda and _knows_early_launch(x.device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache
def _knows_early_launch(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Wait until the kernel before this one is complete, then let the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
