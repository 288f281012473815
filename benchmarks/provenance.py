"""Where, when and with what a record was made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Hardware, host, date, versions, commit and command of this run.

    The environment variable `COMMIT` names the commit of a copy that is no git checkout.
    """
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = (
        os.environ.get("COMMIT")
        or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    )
    return {
        "hardware": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name(),
        "host": cpu_name(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or "unknown",
        "command": " ".join(["python", *sys.argv]),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
