"""Tiny checkpoints of retrieval models with random weights, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import media_models
from media_folders import byte_tokenizer

KINDS = ["colpali", "colqwen2"]
LONGEST = 256  # tokens
TEXT = {**media_models.TEXT, "max_position_embeddings": LONGEST}
SIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def _colpali() -> tuple[Any, Any]:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = byte_tokenizer(["<image>"])
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = transformers.ColPaliProcessor(images, tokenizer)
    vlm = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **SIDE},
        text_config={"model_type": "gemma", "vocab_size": len(tokenizer), "head_dim": 16, **TEXT},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
    )
    return processor, transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=24)


def _colqwen2() -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = byte_tokenizer(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})
    processor = transformers.ColQwen2Processor(images, tokenizer)
    tokens = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{text}|>")
        for name, text in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    vlm = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
            **TEXT,
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        **tokens,
    )
    return processor, transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=24)


class Model:
    """A tiny checkpoint."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.processor, config = _colpali() if name == "colpali" else _colqwen2()
        self.processor.save_pretrained(folder)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: Any = transformers.AutoModelForPreTraining.from_config(config).eval()
            for key, parameter in self.model.named_parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(0, 1.0 if "embed_tokens" in key else 0.2)
        self.model.save_pretrained(folder)

    def query(self, text: str) -> str:
        """The text of a query, as the checkpoint's processor writes it."""
        begin = "<s>" if self.name == "colpali" else ""
        return f"{begin}{self.processor.query_prefix}{text}{self.processor.query_augmentation_token * 10}\n"

    @torch.inference_mode()
    def text(self, text: str) -> tuple[list[int], np.ndarray]:
        """The token ids of a query and their vectors ``[tokens, width]``."""
        given = self.processor(text=[text], return_tensors="pt")
        return given["input_ids"][0].tolist(), self.model(**given).embeddings[0].numpy()

    @torch.inference_mode()
    def image(self, image: Any) -> tuple[list[int], np.ndarray]:
        given = self.processor(images=[image], return_tensors="pt")
        given.pop("labels", None)
        return given["input_ids"][0].tolist(), self.model(**given).embeddings[0].numpy()
