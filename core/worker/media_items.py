"""The media items that a worker keeps: encoded one by one, merged into prompts, and verified when first used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...ipc.errors import MainspringError, OutOfMemoryError, UnsupportedModelError, wire_name, wire_text
from ..model.media.dual_encoder import DualEncoder
from ..model.media.encoder_decoder import EncoderMerger
from ..model.media.features import EncodedItem
from ..model.media.merge import MergedPrompt
from ..model.media.retrieval import RetrievalMerger
from ..model.run.paged_model import PagedModel
from ..plan.control import KeepMedia, MediaFacts
from ..plan.step import Encoded, NewSequence
from .device import tensor_of

logger = logging.getLogger(__name__)

IMAGE_ROWS = 4  # hidden states of a token that take as much memory as its part of an image: of ColQwen2 it is 3


class MediaItems:
    """See the module.

    Args:
        verify: compares the paged path with the model's own for a prompt with media; raises `UnsupportedModelError`.
            None: media are not merged into prompts.
    """

    def __init__(
        self,
        model: PagedModel | DualEncoder,
        verify: Callable[[list[int], list[EncodedItem], MergedPrompt], None] | None = None,
    ) -> None:
        self._model, self._verify = model, verify
        self._merger = model if isinstance(model, DualEncoder) else model.merger
        if isinstance(model, PagedModel) and model.merger is not None and model.whole is not None:
            model.merger.embed = model.whole.embedding
        self._arrays: dict[int, KeepMedia] = {}
        self._encoded: dict[int, EncodedItem] = {}
        self._verified: dict[str, UnsupportedModelError | None] = {}  # by modality

    @property
    def facts(self) -> MediaFacts | None:
        merger = self._merger
        if merger is None:
            return None
        if isinstance(merger, DualEncoder):
            return MediaFacts(list(merger.modalities), merger.item_bytes, lone=True)
        if isinstance(merger, EncoderMerger):
            return MediaFacts(list(merger.modalities), merger.item_bytes, encoder_input=True)
        copies = 2 if merger.layered else 1  # such a model may be given rows for its first layers, too
        row_bytes = copies * self._model.hidden_size * self._model.dtype.itemsize
        if isinstance(merger, RetrievalMerger):
            return MediaFacts(list(merger.modalities), IMAGE_ROWS * row_bytes, merger.spans, lone=True)
        return MediaFacts(list(merger.modalities), row_bytes, merger.spans)

    def keep(self, record: KeepMedia) -> None:
        self._arrays[record.number] = record

    def drop(self, number: int) -> None:
        self._arrays.pop(number, None)
        self._encoded.pop(number, None)

    def encode(self, numbers: Sequence[int], beat: Callable[[], None]) -> list[Encoded]:
        """Encode the items of these numbers, whose arrays are not kept any longer. An item's error is its own. After
        each `beat` is called, because a large image can take a CPU half a minute."""
        found = []
        for number in numbers:
            found.append(self._encode(number))
            beat()
        return found

    def _encode(self, number: int) -> Encoded:
        try:
            record = self._arrays.pop(number, None)
            if record is None:
                raise KeyError(f"no arrays of media item {number}")
            arrays = {name: tensor_of(x) for name, x in zip(record.names, record.arrays, strict=True)}
            merger = self._merger
            if merger is None or record.modality not in merger.modalities:
                raise UnsupportedModelError(f"the model takes no {record.modality} in its prompts")
            began = time.perf_counter()
            item = self._encoded[number] = merger.encode(record.modality, arrays)
            return Encoded(number, item.num_bytes, seconds=time.perf_counter() - began)
        except torch.OutOfMemoryError:
            error: Exception = OutOfMemoryError("a media item could not be encoded: the device has no memory for it")
        except MainspringError as failed:
            error = failed
        except Exception as failed:  # of the model's own code
            logger.warning("a media item could not be encoded", exc_info=True)
            error = UnsupportedModelError(f"the model could not encode a media item: {failed}")
        return Encoded(number, 0, wire_name(error), wire_text(error))

    def vector(self, sequence: NewSequence) -> torch.Tensor:
        """``[width]``: what a dual encoder made of the item that is the prompt of a sequence."""
        found: torch.Tensor = self._encoded[sequence.media[0].number].output
        return found

    def merges(self, sequence: NewSequence) -> bool:
        """Whether the prompt of a sequence has media, or is a text that sees both ways."""
        return bool(sequence.media) or getattr(self._merger, "spans", "") == "every"

    def merged(self, sequence: NewSequence) -> MergedPrompt:
        """The prompt of an admitted sequence.

        Raises:
            UnsupportedModelError: the model merges its media in a way that can't be served.
        """
        merger = self._merger
        if merger is None or isinstance(merger, DualEncoder) or sequence.num_virtual:
            raise UnsupportedModelError("this model, or a prompt with the virtual tokens of an adapter, takes no media")
        ids = sequence.tokens[: sequence.prompt_len].tolist()
        try:
            media = sorted(sequence.media, key=lambda each: each.offset)
            items = [self._encoded[each.number] for each in media]
            merged = merger.merge(ids, items)
            _check_spans(merger.spans, merged, [(each.offset, each.offset + each.length) for each in media])
            self._verify_once(ids, items, merged)
        except MainspringError:
            raise
        except torch.OutOfMemoryError as failed:
            raise OutOfMemoryError("the device has no memory to merge media into a prompt") from failed
        except Exception as failed:  # of the model's own code, about this prompt
            logger.warning("media could not be merged into a prompt", exc_info=True)
            raise UnsupportedModelError(f"the model could not merge the media of a prompt: {failed}") from failed
        return merged

    def _verify_once(self, ids: list[int], items: list[EncodedItem], merged: MergedPrompt) -> None:
        assert self._verify is not None
        for modality in {item.modality for item in items} or {"text"}:
            if modality not in self._verified:  # other errors, such as a lack of memory, say nothing about it
                try:
                    self._verify(ids, items, merged)
                    self._verified[modality] = None
                except UnsupportedModelError as error:
                    self._verified[modality] = error
            if (refusal := self._verified[modality]) is not None:
                raise refusal


def _check_spans(spans: str, merged: MergedPrompt, items: list[tuple[int, int]]) -> None:
    """Refuse a prompt whose tokens see later ones where the planner may cut it."""
    index = np.arange(merged.length)
    for last in merged.reach:
        if last is None or spans in ("prompt", "every"):
            continue
        within = np.zeros(merged.length, np.int64)  # the last token of the item that a token is of
        for start, end in items:
            within[start:end] = end - 1
        if spans != "item" or (last > np.maximum(index, within)).any():
            raise UnsupportedModelError("tokens of this prompt see later ones that are not of the same media item")
