"""Retrieval models, such as ColPali and ColQwen2: a vision-language model that gives a vector for each token.

A prompt is a text, or an image in the prompt that the checkpoint's processor makes of it. The retrieval model's own
forward encodes the image and merges it, because it may do so in another way than the vision-language model inside of it
(ColQwen2 gives images the positions of a text). So an encoded item is what the processor made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from .features import EncodedItem
from .merge import Merger


class RetrievalMerger(Merger):
    """The merger of a retrieval model. Its `spans` are "every" if texts see both ways, too."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, front=model)
        self.modalities = ["image"]
        if self.spans == "prompt":
            self.spans = "every"

    def encode(self, modality: str, arrays: Mapping[str, torch.Tensor]) -> EncodedItem:
        """What the processor made of an item, on the model's device."""
        device, dtype = self.model.device, self.model.dtype
        kept = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in arrays.items()}
        return EncodedItem(modality, None, kept)

    @contextmanager
    def encoded(self, items: Sequence[EncodedItem]) -> Iterator[None]:
        yield
