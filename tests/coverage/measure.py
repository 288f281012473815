"""What the package does with each decoder of the installed transformers: small random models,
float32, greedy.

python -m tests.coverage.measure              all decoders, into records/
python -m tests.coverage.measure llama bert   these alone, printed
"""

import argparse
import json
import multiprocessing
import re
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.decoding import prompts
from tests.conftest import BATCH, PROMPT
from tests.coverage.small_models import small_config, small_model
from tests.fuzz.fuzz import set_up

RECORDS = Path(__file__).parent / "records"
VERSION = ".".join(transformers.__version__.split(".")[:2])
CAPACITY, NEW_TOKENS = 32, 6
SECONDS = 60  # for one decoder
TOLERANCE = 3e-4  # of the largest logit: half of float32's digits
YES, MODEL_ITSELF = "yes", "the model itself runs"
REFUSED, NOT_MEASURED = "refused: ", "not measured: "
NO_CACHE, OWN_CACHE = "no cache", "transformers' own cache"

PADDED = torch.ones_like(BATCH)
PADDED[1, :4] = 0
CALLS = ((PROMPT.remainder(90), torch.ones_like(PROMPT)), (BATCH.remainder(90) * PADDED, PADDED))
Row = dict[str, str]
Output = tuple[Tensor, Tensor]  # tokens [B, n], and the logits [B, NEW_TOKENS, V] of the new ones


def measure(model_type: str) -> Row:
    """The row of one decoder: "yes" or a reason for the cache, captured steps and prompts, `exact`."""
    try:
        StaticContiguousCache(small_config(model_type), CAPACITY)
    except ValueError as refusal:
        return {"cache": REFUSED + first_clause(refusal)}
    model = small_model(model_type)
    got = [generated(model, call, past_key_values=new_cache(model)) for call in CALLS]
    compared = reference(model, got)
    if compared is None:
        return {"cache": "other tokens"}
    step = captured(model, got)
    is_step = step in (YES, MODEL_ITSELF)
    prompt = {"prompt": captured_prompts(model, got)} if is_step else {}
    return {
        "cache": YES,
        "compared with": compared,
        "step": step,
        **prompt,
        "exact": exactness(model),
    }


def new_cache(model: PreTrainedModel) -> StaticContiguousCache:
    return StaticContiguousCache(model.config, CAPACITY)


def generated(model: PreTrainedModel, call: tuple[Tensor, Tensor], **how: Any) -> Output:
    """One greedy call."""
    ids, mask = call
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True, **how}
    output = model.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **how
    )
    return output.sequences, torch.stack(output.logits, dim=1)


def same(got: Output, expected: Output) -> bool:
    """Equal tokens, and logits as near as rounding allows."""
    largest = float(expected[1].nan_to_num(neginf=0.0).abs().max())
    is_near = torch.allclose(got[1], expected[1], rtol=0.0, atol=TOLERANCE * largest)
    return is_near and torch.equal(got[0], expected[0])


def reference(model: PreTrainedModel, got: list[Output]) -> str | None:
    """What these outputs are equal to: all of those without a cache, or else with transformers'
    own.
    """
    references = {
        NO_CACHE: lambda: {"use_cache": False},
        OWN_CACHE: lambda: {"past_key_values": DynamicCache(config=model.config)},
    }
    for name, how in references.items():
        if all(
            same(output, generated(model, call, **how()))
            for output, call in zip(got, CALLS, strict=True)
        ):
            return name
    return None


def captured(model: PreTrainedModel, expected: list[Output]) -> str:
    """On a CPU the rewritten list of a step runs, without a graph."""
    decoder = GraphDecoder()
    decoder.show_no_warnings()
    for call, output in zip(CALLS, expected, strict=True):
        cache = new_cache(model)
        try:
            got = generated(model, call, past_key_values=cache, custom_generate=decoder)
        except ValueError as refusal:
            if "custom_generate" not in str(refusal):
                raise
            return "its own generate takes no custom_generate"
        if decoder.fallback_reason is not None:
            return first_clause(decoder.fallback_reason)
        if not same(got, output):
            return "other tokens"
        if not all(step.is_recorded for step in decoder.steps.by_cache[cache].values()):
            return MODEL_ITSELF
    return YES


@patch.object(prompts, "DEVICES", ("cpu",))
@patch.object(prompts, "SIZES", (16, 32))
def captured_prompts(model: PreTrainedModel, expected: list[Output]) -> str:
    """As `captured`. The second call records the pass of a size, and the third one runs it."""
    for call, output in zip(CALLS, expected, strict=True):
        decoder = GraphDecoder()
        decoder.show_no_warnings()
        cache = new_cache(model)
        for _ in range(3):
            cache.reset()
            got = generated(model, call, past_key_values=cache, custom_generate=decoder)
            if not same(got, output):
                return "other tokens"
        if not decoder.prompts.steps:
            return first_clause(decoder.prompts.reason or "no pass was captured")
        if not all(step.is_recorded for step in decoder.prompts.steps):
            return MODEL_ITSELF
    return YES


@torch.no_grad()
def exactness(model: PreTrainedModel) -> str:
    """Whether a prompt in chunks has the bits of the whole prompt without a cache."""
    try:
        with exact(model):
            for ids, mask in CALLS:
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
                inputs = {"attention_mask": mask, "position_ids": positions}
                whole = model(ids, use_cache=False, **inputs).logits[mask.bool()]
                if not torch.equal(in_chunks(model, ids, mask, positions)[mask.bool()], whole):
                    return "other bits"
    except (ValueError, RuntimeError) as refusal:
        return first_clause(refusal)
    return YES


def in_chunks(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    cache, parts, end = new_cache(model), [], 0
    for size in (5, 1, 1, ids.shape[1] - 7):
        start, end = end, end + size
        inputs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        parts.append(
            model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs).logits
        )
    return torch.cat(parts, dim=1)


def first_clause(message: Exception | str) -> str:
    """The message of the package without names and numbers, and without what follows its first
    clause.

    >>> first_clause("'mamba' has no layer with keys and values (linear_attention). Leave `past_key_values` out.")
    'has no layer with keys and values'
    >>> first_clause("the step cannot be captured (ValueError: layer 2 has no attention of its own: it uses another's)")
    'layer N has no attention of its own'
    >>> first_clause("aten.histc.default: its result for a token may depend on what else is computed with it.")
    'no batch-invariant kernel for histc'
    """
    words = re.sub(r"^the step cannot be captured \(\w+: (.*)\)$", r"\1", str(message).strip())
    if found := re.match(r"aten\.(\w+)", words):
        return f"no batch-invariant kernel for {found[1]}"
    words = re.sub(
        r"^('[\w-]+'|\w+For[A-Z]\w+) | \[[\d, ]+\]| of ('[\w-]+'|\w+For[A-Z]\w+)", "", words
    )
    words = re.split(r"[.,:;]( |$)| \(", re.sub(r"(?<!\w)\d[\d.e+-]*", "N", words))[0]
    return words[:1].lower() + words[1:]


def measure_all(names: list[str], jobs: int = 2, seconds: float = SECONDS) -> dict[str, Row]:
    """Rows by name.

    Every decoder has a process of its own, so that one that hangs or dies gets a row too.
    """
    context, rows, running, waiting = multiprocessing.get_context("fork"), {}, {}, list(names)
    while waiting or running:
        while waiting and len(running) < jobs:
            name, (here, there) = waiting.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(name, there))
            process.start()
            there.close()
            running[here] = name, process, time.monotonic() + seconds
        ready = wait(list(running), timeout=0.5)
        for here, (name, process, deadline) in list(running.items()):
            if here in ready or time.monotonic() > deadline:
                rows[name] = (
                    _receive(here)
                    if here in ready
                    else {"cache": f"{NOT_MEASURED}no answer in {seconds} s"}
                )
                process.kill()
                process.join()
                del running[here]
    return {name: rows[name] for name in names}


def _send(name: str, there: Connection) -> None:
    try:
        row = measure(name)
    except Exception as error:
        first_line = re.split(r"\n|\. ", str(error).strip())[0]
        row = {"cache": f"{NOT_MEASURED}{type(error).__name__}: {first_line}"}
    there.send(row)


def _receive(here: Connection) -> Row:
    try:
        return here.recv()
    except EOFError:
        return {"cache": f"{NOT_MEASURED}its process died"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("decoders", nargs="*")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    set_up()
    rows = measure_all(args.decoders or sorted(DECODERS), args.jobs)
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    if args.decoders:
        print(*lines, sep="\n")
    else:
        (RECORDS / f"{VERSION}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
