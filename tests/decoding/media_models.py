"""Tiny models that take images or sounds, and prompts for them."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.conftest import TOY_SIZES
from tests.decoding.conftest import DEVICE

# Tokens: a part of an image or a sound, and those before and after it.
MEDIA, FIRST, LAST = (
    120,
    121,
    122,
)
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.4,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.4,
}
_AUDIO = {
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "max_source_positions": 8,
}
_SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN = {
    "image_token_id": MEDIA,
    "video_token_id": 123,
    "vision_start_token_id": FIRST,
    "vision_end_token_id": LAST,
}


class Family(NamedTuple):
    """A family of models, and what one image or sound is to it."""

    config: dict[str, Any]
    num_tokens: int  # in the prompt
    media: Callable[[int], dict[str, Tensor]]  # the keywords of that many of them
    token_types: Callable[[Tensor], dict[str, Tensor]] = lambda ids: {}


def _text(model_type: str, **own) -> dict[str, Any]:
    known = CONFIG_MAPPING[model_type]().to_dict()
    return {
        "model_type": model_type,
        **{name: size for name, size in TOY_SIZES.items() if name in known},
        **own,
    }


def _images(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(number, 3, 16, 16)}


def _qwen_images(number: int, height: int = 4, width: int = 8) -> dict[str, Tensor]:
    """Images of height x width patches, of which four are one token."""
    patches = torch.randn(height * width * number, 3 * 2 * 4 * 4)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, height, width]] * number)}


def _sounds(number: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(number, 8, 16),
        "feature_attention_mask": torch.ones(number, 16, dtype=torch.int64),
    }


_IDEFICS3 = Family(
    {
        "text_config": _text("llama"),
        "vision_config": _VISION,
        "image_token_id": MEDIA,
        "scale_factor": 2,
    },
    4,
    lambda number: {"pixel_values": torch.randn(number, 1, 3, 16, 16)},
)
FAMILIES = {
    # Tokens of an image attend to each other, in sliding layers too.
    "gemma3": Family(
        {
            "text_config": _text(
                "gemma3_text", num_hidden_layers=3, sliding_window_pattern=3, sliding_window=8
            ),
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_id": MEDIA,
        },
        4,
        _images,
        lambda ids: {"token_type_ids": (ids == MEDIA).long()},
    ),
    # Positions have three parts, and those after an image are smaller than the number of tokens
    # before them.
    "qwen2_5_vl": Family(
        {
            "text_config": _text("qwen2_5_vl_text", hidden_size=64, rope_parameters=_MROPE),
            "vision_config": {
                **_QWEN_VISION,
                "out_hidden_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_QWEN,
        },
        8,
        _qwen_images,
        lambda ids: {"mm_token_type_ids": (ids == MEDIA).long()},
    ),
    "qwen3_vl": Family(
        {
            "text_config": _text("qwen3_vl_text", rope_parameters=_MROPE),
            "vision_config": {
                **_QWEN_VISION,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **_QWEN,
        },
        8,
        _qwen_images,
        lambda ids: {"mm_token_type_ids": (ids == MEDIA).long()},
    ),
    "llava": Family(
        {
            "text_config": _text("llama"),
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_VISION},
            "image_token_index": MEDIA,
            "vision_feature_layer": -1,
        },
        16,
        _images,
    ),
    # The whole prompt attends to itself, and positions begin at 1.
    "paligemma": Family(
        {
            "text_config": _text("gemma"),
            "vision_config": {**_SIGLIP, "projection_dim": 48},
            "image_token_index": MEDIA,
            "projection_dim": 48,
            "hidden_size": 48,
        },
        16,
        _images,
        lambda ids: {"token_type_ids": torch.zeros_like(ids)},
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "qwen2_audio": Family(
        {
            "text_config": _text("qwen2"),
            "audio_config": {"model_type": "qwen2_audio_encoder", **_AUDIO},
            "audio_token_index": MEDIA,
        },
        4,
        _sounds,
    ),
}


@cache
def media_model(name: str) -> PreTrainedModel:
    """A tiny random model of this family."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**FAMILIES[name].config, tie_word_embeddings=False)
    model = AutoModelForMultimodalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # Gemma 3 would see no image
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval().to(DEVICE)


def media_prompt(
    name: str, lengths: tuple[int, ...] = (6,), seed: int = 0, **how
) -> dict[str, Tensor]:
    """For each length a prompt of some text, an image or a sound, and `length` tokens; padded to
    the left.
    """
    torch.manual_seed(seed)
    family = FAMILIES[name]
    ids, mask = torch.zeros(
        2, len(lengths), 4 + family.num_tokens + max(lengths), dtype=torch.int64
    )
    for row, length in enumerate(lengths):
        words = torch.randint(3, MEDIA, (2 + length,)).tolist()
        prompt = [*words[:2], FIRST, *[MEDIA] * family.num_tokens, LAST, *words[2:]]
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1
    media = partial(family.media, **how)(len(lengths))
    inputs = {"input_ids": ids, "attention_mask": mask, **media, **family.token_types(ids)}
    return {key: value.to(DEVICE) for key, value in inputs.items()}
