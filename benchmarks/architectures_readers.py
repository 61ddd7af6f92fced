"""Encoder-decoder classes of transformers that read text or hear sound, tiny and random: a part of
`architectures_media.py`.

Each request has one input for the encoder. Four requests share steps: two inputs, one request that is preempted, and
one that begins with the blocks of another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, GenerationMixin, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from mainspring.benchmarks.tiny_media import HIDDEN, Inputs, draw, shrink

READERS: dict[str, str] = {  # model type → class
    name: kind
    for name, kind in (
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items(),
        *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.items(),
    )
    if name not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
}
START, BINS, FRAMES = 2, 16, 64
_FIELDS: dict[str, dict[str, Any]] = {
    "whisper": {"max_source_positions": FRAMES // 2, "num_mel_bins": BINS},
    "speech_to_text": {"num_mel_bins": BINS, "input_feat_per_channel": BINS, "conv_channels": 32},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "canary": {"encoder_config": {"hidden_size": HIDDEN}},
    "moonshine": {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("num_attention_heads", 4), ("num_key_value_heads", 4), ("num_hidden_layers", 2))
    },
    "led": {"attention_window": 16},
}


def build(model_type: str, gains: tuple[float, float], folder: Path) -> PreTrainedModel:
    """A tiny random fp32 model, saved to `folder` and read back, because computed positions are not saved."""
    config = shrink(CONFIG_MAPPING[model_type], _FIELDS.get(model_type, {}))
    config.decoder_start_token_id = START
    hears = model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    auto: Any = AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    model: PreTrainedModel = draw(auto.from_config(config, dtype=torch.float32), gains)
    model.save_pretrained(folder)
    model = auto.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.decoder_start_token_id = START
    model.generation_config.pad_token_id = 0
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "bad_words_ids"):
        setattr(model.generation_config, name, None)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model.eval()


def encoder_inputs(model: PreTrainedModel, seed: int) -> tuple[str, Inputs]:
    """What a prompt calls the input of the encoder, and the arrays."""
    encoder: Any = model.get_encoder()
    generator = torch.Generator().manual_seed(seed)
    if encoder.main_input_name == "input_ids":
        return "text", {"input_ids": torch.randint(6, 299, (1, 8 + seed), generator=generator)}
    if encoder.main_input_name == "input_values":
        return "audio", {"input_values": torch.randn(1, 4000, generator=generator)}
    shape = (1, BINS, FRAMES) if "whisper" in model.config.model_type else (1, FRAMES, BINS)
    return "audio", {"input_features": torch.randn(shape, generator=generator)}


def prompt(length: int) -> list[int]:
    """What the decoder begins with."""
    generator = torch.Generator().manual_seed(length)
    return [START, *torch.randint(6, 299, (length - 1,), generator=generator).tolist()]


@torch.inference_mode()
def generate(model: PreTrainedModel, inputs: Inputs, ids: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers alone. Classes with a `generate` of their own (Whisper) do more than that."""
    found: Any = GenerationMixin.generate(
        model,  # type: ignore[arg-type]
        **inputs,
        decoder_input_ids=torch.tensor([ids]),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
    )
    return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]
