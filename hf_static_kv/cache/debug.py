"""The debug log: what every step does to a cache, at level DEBUG of the logger `hf_static_kv`.

HF_STATIC_KV_DEBUG=1         to standard error: "step at 12: 1 new token in 2 rows, 13 of 64 positions filled"
HF_STATIC_KV_DEBUG_LAYER=0   what layer 0 does as well: "layer 0 wrote [12, 13) and returned [5, 13)"
"""

import logging
import os

logger = logging.getLogger("hf_static_kv")
logged_layer: int | None = None


def turn_on(layer: int | None = None) -> None:
    """Log to standard error, with the views of one layer if one is named."""
    global logged_layer
    logged_layer = layer
    logger.setLevel(logging.DEBUG)
    if not any(getattr(handler, "is_ours", False) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.is_ours = True  # type: ignore[attr-defined]
        logger.addHandler(handler)


def log_step(start: int, new: int, rows: int, capacity: int) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        what = f"{new} new token{'s' * (new != 1)} in {rows} row{'s' * (rows != 1)}"
        logger.debug(
            "step at %d: %s, %d of %d positions filled", start, what, start + new, capacity
        )


def log_layer(layer_idx: int, start: int, new: int, seen: int) -> None:
    end = start + new
    message = "layer %d wrote [%d, %d) and returned [%d, %d)"
    logger.debug(message, layer_idx, start, end, end - seen, end)


if os.environ.get("HF_STATIC_KV_DEBUG") == "1":
    named = os.environ.get("HF_STATIC_KV_DEBUG_LAYER")
    turn_on(int(named) if named else None)
