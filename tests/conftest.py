import os

import pytest
import torch
import transformers

# Read when a kernel is defined: without a GPU, Triton's interpreter runs it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# Tiny models: one thread a process is faster than two, and two test processes share the machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
