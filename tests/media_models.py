"""Tiny random checkpoints that take media, with a real processor, and what transformers generates of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from mainspring import LLMEngine, SamplingParams
from media_folders import SPEECH, make_processor, save_folder

COUNT = 12  # tokens of an output
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)

PLACEHOLDER = {
    "llava": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "whisper": "",
    "speech": "",
    "glmasr": "<|begin_of_audio|><|pad|><|end_of_audio|>",
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
HEARS = ("glmasr", "qwen2_audio")
READERS = ["bart", "mbart", "marian", "pegasus", "blenderbot"]
ENCODER_DECODER: dict[str, Any] = dict.fromkeys(SPEECH, transformers.AutoModelForSpeechSeq2Seq)
ENCODER_DECODER |= dict.fromkeys(READERS, transformers.AutoModelForSeq2SeqLM)
# what embeddings are multiplied by, so that outputs depend on the encoder's input
EMBEDDING = {"whisper": 2, "speech": 2, "bart": 20, "mbart": 20, "marian": 20, "pegasus": 2, "blenderbot": 2}
_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type != 'text' %}PLACEHOLDER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def _config(name: str, tokenizer: Any) -> Any:
    text = {**TEXT, "vocab_size": len(tokenizer)}
    token = tokenizer.convert_tokens_to_ids
    if name == "llava":
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.LlavaConfig(
            vision_config={"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, **vision},
            text_config={"model_type": "llama", **text},
            image_token_index=token("<image>"),
            vision_feature_layer=-1,
        )
    if name == "glmasr":
        sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.GlmAsrConfig(
            audio_config={"num_mel_bins": 16, "max_position_embeddings": 100, **sizes},
            text_config={"model_type": "llama", **text},
            audio_token_id=token("<|pad|>"),
        )
    if name == "qwen2_audio":
        sizes = {f"encoder_{what}": n for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))}
        return transformers.Qwen2AudioConfig(
            audio_config={"num_mel_bins": 16, "d_model": 32, "max_source_positions": 100, **sizes},
            text_config={"model_type": "qwen2", **text},
            audio_token_index=token("<|AUDIO|>"),
        )
    if name in READERS:
        return transformers.CONFIG_MAPPING[name](
            vocab_size=len(tokenizer),
            d_model=32,
            max_position_embeddings=256,
            **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE.items()},
            bos_token_id=256,
            eos_token_id=257,
            pad_token_id=258,
            decoder_start_token_id=257,
            forced_eos_token_id=None,
        )
    if name in SPEECH:
        return transformers.WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=32,
            num_mel_bins=16,
            max_source_positions=100,
            max_target_positions=256,
            **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE.items()},
            bos_token_id=256,
            eos_token_id=257,
            pad_token_id=258,
            decoder_start_token_id=token(SPEECH[name][0]),
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={"hidden_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 14},
        **{f"{kind}_token_id": token(f"<|{kind}|>") for kind in ("vision_start", "vision_end")},
        **{f"{kind}_token_id": token(f"<|{kind}_pad|>") for kind in ("image", "video")},
    )


def make(name: str, folder: Path) -> Path:
    """The checkpoint of a model type, in a folder that need not exist."""
    save_folder(name, folder)
    processor = make_processor(name)
    torch.manual_seed(0)
    with torch.no_grad():
        model = _auto(name).from_config(_config(name, processor.tokenizer))
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:  # else all prompts get the same tokens
                parameter.mul_(EMBEDDING.get(name, 4) if "embed" in path else 8 if name in ENCODER_DECODER else 4)
    saved = json.loads((folder / "config.json").read_text())
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, **config}))
    (folder / "chat_template.jinja").write_text(CHAT.replace("PLACEHOLDER", PLACEHOLDER.get(name, "")))
    return folder


def _auto(name: str) -> Any:
    return ENCODER_DECODER.get(name, transformers.AutoModelForMultimodalLM)


class Reference:
    """transformers on the same checkpoint."""

    def __init__(self, name: str, folder: Path, model: Any = None) -> None:
        self._name, self._folder = name, folder
        self._processor, self._hears = make_processor(name), name in HEARS
        self._model = model or self.load()

    def load(self) -> Any:
        """The checkpoint in float32."""
        return _auto(self._name).from_pretrained(self._folder, dtype=torch.float32).eval()

    def prompt_ids(self, prompt: str, items: list[Any]) -> list[int]:
        return list(map(int, self._inputs(prompt, items)["input_ids"][0]))

    def tokens(self, prompt: str, items: list[Any], count: int) -> list[int]:
        """The first `count` output tokens, greedily, whatever they are."""
        [found] = self.generate(prompt, items, count)
        return found

    def generate(self, prompt: str, items: list[Any], count: int, **how: Any) -> list[list[int]]:
        """`count` tokens of each sequence that `how`, arguments of transformers, asks for."""
        inputs = self._inputs(prompt, items)
        with torch.inference_mode():
            found = self._model.generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, **how
            )
        return [[int(token) for token in one[inputs["input_ids"].shape[1] :]] for one in found]

    def _inputs(self, prompt: str, items: list[Any]) -> Any:
        given = {"audio": items, "sampling_rate": 16_000} if self._hears else {"images": items}
        return self._processor(text=[prompt], return_tensors="pt", **(given if items else {}))


def run(engine: LLMEngine, prompts: dict[str, Any], params: SamplingParams = GREEDY) -> dict[str, Any]:
    """The last output of each request."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    return found


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)
