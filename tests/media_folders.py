"""Folders with real processors of transformers and a tokenizer of single bytes, and files of media. No weights."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS = "<s>"
WHISPER_TOKENS = [  # those of Whisper's prompts, with fewer languages
    f"<|{name}|>" for name in "startoftranscript en de fr translate transcribe startofprev notimestamps".split()
]
SPEECH = {"whisper": ["<|start|>"], "speech": WHISPER_TOKENS}  # a model's name here → its special tokens


def byte_tokenizer(special: list[str], **named: str) -> PreTrainedTokenizerFast:
    """Each byte is a token; so is each of the texts in `special`. A text begins with `BOS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([BOS, "</s>", "<pad>", *special])
    found.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token=BOS, eos_token="</s>", pad_token="<pad>", extra_special_tokens=named
    )


def _parts(name: str) -> tuple[Any, dict[str, Any]]:
    """The processor of a model type, and the fields of its config."""
    if name == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        tokenizer = byte_tokenizer(["<image>"])
        images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=56)
        made = transformers.LlavaProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
        return made, {"image_token_index": tokenizer.convert_tokens_to_ids("<image>")}
    if name == "llava_next":
        from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

        tokenizer = byte_tokenizer(["<image>"])
        images = LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
        )
        made = transformers.LlavaNextProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
        return made, {"image_token_index": tokenizer.convert_tokens_to_ids("<image>")}
    if name == "qwen2_vl":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        tokenizer = byte_tokenizer(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
        images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64})
        loose = type("Qwen2VLProcessor", (transformers.Qwen2VLProcessor,), {"check_argument_for_proper_class": _any})
        made = loose(images, tokenizer, _NoVideo())
        ids = {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")}
        return made, ids
    if name == "smolvlm" or name == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        special += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        tokenizer = byte_tokenizer(special)
        images = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
        made = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
        return made, {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")}
    if name == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        tokenizer = byte_tokenizer(list(named.values()), **named)
        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        made = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
        return made, {"image_token_index": tokenizer.convert_tokens_to_ids("<image_soft_token>")}
    if name == "paligemma":
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        tokenizer = byte_tokenizer(["<image>"])
        images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
        images.image_seq_length = 4
        made = transformers.PaliGemmaProcessor(images, tokenizer)
        return made, {"image_token_index": tokenizer.convert_tokens_to_ids("<image>")}
    if name == "glmasr":
        tokenizer = byte_tokenizer(["<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"])
        sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
        made = transformers.GlmAsrProcessor(sounds, tokenizer)
        return made, {"audio_token_id": tokenizer.convert_tokens_to_ids("<|pad|>")}
    if name == "qwen2_audio":
        tokenizer = byte_tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
        sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
        made = transformers.Qwen2AudioProcessor(sounds, tokenizer)
        return made, {"audio_token_index": tokenizer.convert_tokens_to_ids("<|AUDIO|>")}
    if name in ("bart", "mbart", "marian", "pegasus", "blenderbot"):
        tokenizer = byte_tokenizer([])
        return _Reader(tokenizer), {"is_encoder_decoder": True, "decoder_start_token_id": 257}
    if name in SPEECH:
        tokenizer = byte_tokenizer(SPEECH[name])
        sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
        loose = type("WhisperProcessor", (transformers.WhisperProcessor,), {"check_argument_for_proper_class": _any})
        start = tokenizer.convert_tokens_to_ids(SPEECH[name][0])
        more = {"model_type": "whisper", "is_encoder_decoder": True, "decoder_start_token_id": start}
        return loose(sounds, tokenizer), more
    raise KeyError(name)


class _Reader:
    """Of a model whose encoder reads text: there is a tokenizer only."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


class _NoVideo:
    """Video processors need torchvision."""

    model_input_names: tuple[str, ...] = ()
    merge_size = 2


def _any(self: Any, name: str, value: Any) -> type:
    return type(value)


def make_processor(name: str) -> Any:
    return _parts(name)[0]


def save_folder(name: str, folder: Path) -> Path:
    """A folder as a checkpoint has it, but without weights."""
    processor, config = _parts(name)
    folder.mkdir(exist_ok=True)
    processor.tokenizer.save_pretrained(folder)
    fields = {"processor_class": type(processor).__name__}
    for part in ("image_processor", "feature_extractor"):
        if (found := getattr(processor, part, None)) is not None:
            found.save_pretrained(folder)
    if name != "qwen2_vl":
        processor.save_pretrained(folder)
    else:
        (folder / "processor_config.json").write_text(json.dumps(fields))
    (folder / "config.json").write_text(json.dumps({"model_type": name, **config}))
    return folder


def picture(seed: int = 0, width: int = 90, height: int = 60) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def whisper_ids(*names: str) -> list[int]:
    """Of tokens of `WHISPER_TOKENS`."""
    return [259 + WHISPER_TOKENS.index(f"<|{name}|>") for name in names]


def tone(seconds: float = 1.0, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32) / 2


def wav_of(samples: np.ndarray, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
