"""What vLLM's examples download, made here: `vllm_media_examples.py` lets them import it instead of `vllm.assets` and
`vllm.multimodal.utils`."""

from __future__ import annotations

import sys
import tempfile
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from media_folders import file_of, picture, tone, wav_of

RATE = 16_000  # samples per second


def fetch_image(url: str) -> Any:
    """A picture that depends on the URL."""
    return picture(zlib.crc32(url.encode()), width=96, height=64)


def data_url(url: str) -> str:
    """The same picture, as a file in a URL."""
    return f"data:image/png;base64,{b64encode(file_of(fetch_image(url))).decode()}"


class ImageAsset:
    def __init__(self, name: str) -> None:
        self.pil_image = fetch_image(name)


class AudioAsset:
    def __init__(self, name: str) -> None:
        self.audio_and_sample_rate = tone(1.0, RATE, 200 + zlib.crc32(name.encode()) % 800), RATE

    def get_local_path(self) -> Path:
        with tempfile.NamedTemporaryFile(suffix=".wav", delete=False) as file:
            file.write(wav_of(self.audio_and_sample_rate[0]))
        return Path(file.name)


class VideoAsset:
    def __init__(self, name: str, num_frames: int = -1) -> None:
        import numpy as np

        self.np_ndarrays = np.stack([np.asarray(fetch_image(f"{name} {number}")) for number in range(num_frames)])
        self.metadata = {"fps": 2.0, "total_num_frames": num_frames, "frames_indices": list(range(num_frames))}

    def get_audio(self, sampling_rate: float = RATE) -> Any:
        return tone(1.0, int(sampling_rate))
