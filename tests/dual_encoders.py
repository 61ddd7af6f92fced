"""Tiny checkpoints of dual encoders with random weights, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import processors

from media_folders import byte_tokenizer

LONGEST = 48  # tokens
SIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _image_processor(name: str) -> Any:
    if name == "clip":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 28, "width": 28})


class Model:
    """A tiny checkpoint with random weights, and what transformers makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.tokenizer = byte_tokenizer([])
        ends = [(token, self.tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
        self.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ends)
        self.images = _image_processor(name)
        kind = transformers.CLIPProcessor if name == "clip" else transformers.SiglipProcessor
        kind(self.images, self.tokenizer).save_pretrained(folder)
        ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
        text = {**SIDE, **ids, "vocab_size": len(self.tokenizer), "max_position_embeddings": LONGEST}
        more = {"projection_dim": 24} if name == "clip" else {}
        text |= {"projection_size": 32} if name == "siglip" else {}
        config = transformers.CONFIG_MAPPING[name](
            text_config=text, vision_config={**SIDE, "image_size": 28, "patch_size": 14}, **more
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: Any = transformers.AutoModel.from_config(config).eval()
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(0, 0.3)
        self.model.save_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    @torch.inference_mode()
    def text(self, ids: list[int]) -> np.ndarray:
        return _unit(self.model.get_text_features(input_ids=torch.tensor([ids])))

    @torch.inference_mode()
    def image(self, image: Any) -> np.ndarray:
        pixels = self.images(images=[image], return_tensors="pt")["pixel_values"]
        return _unit(self.model.get_image_features(pixel_values=pixels))


def _unit(output: Any) -> np.ndarray:
    found: np.ndarray = torch.nn.functional.normalize(output.pooler_output, dim=-1)[0].numpy()
    return found
