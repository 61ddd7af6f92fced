"""The speed of prompts with images: preparing them beside a stream, a second question about an image, and batches
beside transformers.

    python benchmarks/media_speed.py [--models smolvlm-500m qwen2-vl-2b] [--parts stream answers] [--rounds 3] [--write]

Checkpoints have the shapes and the image processors of the real ones, random weights, and a tokenizer of bytes. Images
are JPEG files of 640 × 480 pixels, and no two are equal. In a round, each measurement alternates with what it is
compared with. A batch is measured from the files to the last token on both sides: transformers decodes each file once,
calls the checkpoint's processor once for all prompts and generates with one batch, padded on the left, with sdpa
attention, in bf16 or fp32, whichever took less time for one question before.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, Idefics3Config, Qwen2VLConfig

import attacks
from attacks import Beside, Victim
from bars import Bar, add_arguments, conclude
from daemon import Daemon
from mainspring import LLM, SamplingParams
from mainspring.ipc.connection import Connection
from mainspring.ipc.media_client import MediaInput
from mainspring.ipc.sync_client import SyncClient
from report import CACHE, MODELS

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from media_folders import make_processor, save_folder

WIDTH, HEIGHT = 640, 480  # of an image
REQUESTS, IMAGES, TOKENS = 16, 4, 64  # of a batch: questions, images that they share, and tokens of each answer
FEW_TOKENS = 16  # of the answer to one question, by which the type of transformers' weights is chosen
STREAM_SECONDS = 20.0  # for which a stream is measured, alone or beside the media workers
STREAM_TOKENS = 200  # of each request of the stream
PREPARED = 256  # images that are ready to be sent before the stream is measured
IN_FLIGHT = 8  # images that media workers have to prepare
MAX_LENGTH = 2_048  # tokens
KV_BYTES = 2 << 30
MAX_GAP, MAX_SECOND, MIN_SHARED, MIN_DISTINCT = 1.5, 0.25, 2.5, 1.0  # the bars
GREEDY = {"temperature": 0, "ignore_eos": True, "detokenize": False}


class Shape(NamedTuple):
    processor: str  # a name of media_folders
    before: str  # the text of a prompt before the question
    config: Callable[[Callable[[str], int], int], Any]  # of the tokenizer's function from a text to a token id, and its
    # number of tokens
    processed: dict[str, Any] | None  # settings of the image processor; None: the small ones of media_folders
    image_tokens: int  # of a tile, where the processor puts them into the prompt


def _smolvlm(token: Callable[[str], int], _: int) -> Any:
    return Idefics3Config(
        vision_config={
            "hidden_size": 768,
            "intermediate_size": 3_072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": 49_280,
            "hidden_size": 960,
            "intermediate_size": 2_560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "max_position_embeddings": 8_192,
            "pad_token_id": 258,
        },
        scale_factor=4,
        image_token_id=token("<image>"),
        tie_word_embeddings=False,
    )


def _tiny(token: Callable[[str], int], vocab_size: int) -> Any:
    return Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
            "pad_token_id": 258,
        },
        scale_factor=2,
        image_token_id=token("<image>"),
    )


def _qwen2_vl(token: Callable[[str], int], _: int) -> Any:
    return Qwen2VLConfig(
        text_config={
            "vocab_size": 151_936,
            "hidden_size": 1_536,
            "intermediate_size": 8_960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "tie_word_embeddings": True,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 258,
        },
        vision_config={"depth": 32, "embed_dim": 1_280, "hidden_size": 1_536, "num_heads": 16, "patch_size": 14},
        **{f"{kind}_token_id": token(f"<|{kind}|>") for kind in ("vision_start", "vision_end")},
        **{f"{kind}_token_id": token(f"<|{kind}_pad|>") for kind in ("image", "video")},
        tie_word_embeddings=True,
    )


_TILES = {"size": {"longest_edge": 2_048}, "max_image_size": {"longest_edge": 512}}
_PATCHES = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}}
SHAPES = {
    "smolvlm-500m": Shape("idefics3", "<image>", _smolvlm, _TILES, 64),
    "qwen2-vl-2b": Shape("qwen2_vl", "<|vision_start|><|image_pad|><|vision_end|>", _qwen2_vl, _PATCHES, 0),
    "smolvlm-tiny": Shape("idefics3", "<image>", _tiny, None, 4),
}


def processor_of(name: str) -> Any:
    shape = SHAPES[name]
    processor = make_processor(shape.processor)
    for field, value in (shape.processed or {}).items():
        setattr(processor.image_processor, field, type(getattr(processor.image_processor, field))(**value))
    if shape.image_tokens:
        processor.image_seq_len = shape.image_tokens
    processor.tokenizer.padding_side = "left"
    return processor


def save_processor(name: str, folder: Path) -> Any:
    """Write the files of a checkpoint that need no weights. → the processor."""
    save_folder(SHAPES[name].processor, folder)
    processor = processor_of(name)
    processor.image_processor.save_pretrained(folder)
    if SHAPES[name].image_tokens:
        processor.save_pretrained(folder)
    return processor


def save(name: str) -> Path:
    """The checkpoint's folder; made if it is not there."""
    folder = MODELS / name
    if not folder.exists():
        half = folder.with_name(f"{name}-unfinished")
        shutil.rmtree(half, ignore_errors=True)
        half.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = save_processor(name, half).tokenizer
        torch.manual_seed(0)
        config = SHAPES[name].config(tokenizer.convert_tokens_to_ids, len(tokenizer))
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
        model.save_pretrained(half)
        print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters", flush=True)
        half.rename(folder)
    return folder


def photo(seed: int) -> bytes:
    """A JPEG file."""
    small = np.random.default_rng(seed).integers(0, 255, (HEIGHT // 20, WIDTH // 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def decoded(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


# ---------------------------------------------------------------------- beside a stream


def _idle(seconds: float, pipe: Any) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    pipe.send(Beside(began, time.monotonic(), 0.0, Counter()))


def _prepare(address: str, before: str, seed: int, seconds: float, pipe: Any) -> None:
    """Have images prepared. The seconds end early if all of `PREPARED` are."""
    client = SyncClient(Connection(address))
    media = client.media()
    files = [photo(seed + number) for number in range(PREPARED)]

    def send() -> Any:
        return media.prepare(before, [MediaInput("image", files.pop())], {})

    for future in [send() for _ in range(IN_FLIGHT)]:  # the workers have started
        media.forget(future.result(600))
    flying, count = {send() for _ in range(IN_FLIGHT)}, 0
    began, used = time.monotonic(), time.process_time()
    while files and time.monotonic() < began + seconds:
        done, flying = wait(flying, 600, FIRST_COMPLETED)
        for future in done:
            media.forget(future.result())
        flying |= {send() for _ in range(min(len(done), len(files)))}
        count += len(done)
    ended = time.monotonic()
    pipe.send(Beside(began, ended, (time.process_time() - used) / (ended - began), Counter(images=count)))
    media.close()
    client.close()


def beside_a_stream(name: str, workers: int, rounds: int, seconds: float) -> list[Bar]:
    attacks.TOKENS = STREAM_TOKENS
    flags = ("--model", str(save(name)), f"--max-model-len={MAX_LENGTH}", "--kv-cache-memory-bytes=268435456")
    ratios, rates, alone = [], [], []
    with Daemon(*flags, f"--media-workers={workers}") as daemon:
        victim = Victim(daemon.address)
        for number in range(rounds):
            quiet, exact, _ = victim.gaps_beside(_idle, seconds)
            args = (daemon.address, SHAPES[name].before, number * PREPARED, seconds)
            busy, also, preparing = victim.gaps_beside(_prepare, *args)
            if not (exact and also):
                raise SystemExit("the stream's tokens are not exact")
            alone.append(quiet)
            ratios.append(busy / quiet)
            rates.append(preparing.answers["images"] / (preparing.ended - preparing.began))
            print(f"  {workers} workers: {rates[-1]:.2f} images/s, p99 {busy * 1e3:.1f} ms of {quiet * 1e3:.1f} ms")
    what = f"{name}, {workers} media worker{'s' * (workers > 1)}"
    ratio, bar = median(ratios), f" ({MAX_GAP:g}×)" if workers == 1 else ""
    return [
        Bar(f"{what}: images prepared beside a stream", f"{median(rates):.2f} a second", None),
        Bar(
            f"{what}: p99 of the stream's gaps, of those alone{bar}",
            f"{ratio:.2f}× of {median(alone) * 1e3:.1f} ms ({min(ratios):.2f} to {max(ratios):.2f})",
            ratio <= MAX_GAP if workers == 1 else None,
        ),
    ]


# ---------------------------------------------------------------------- questions


class Question(NamedTuple):
    text: str
    file: bytes


def questions(before: str, images: int, seed: int) -> list[Question]:
    """Of a batch; they are about `images` images in turn. Another seed gives other images and texts."""
    files = [photo(1_000_000 + seed * REQUESTS + number) for number in range(images)]
    return [Question(f"{before}{seed}: what is {at} in it?", files[at % images]) for at in range(REQUESTS)]


class Ours:
    def __init__(self, name: str) -> None:
        self._llm = LLM(
            model=str(save(name)),
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=REQUESTS,
            kv_cache_memory_bytes=KV_BYTES,
        )

    def answer(self, asked: list[Question], tokens: int) -> float:
        """The seconds from the files to the last token."""
        params = SamplingParams(max_tokens=tokens, **GREEDY)
        prompts = [{"prompt": one.text, "multi_modal_data": {"image": one.file}} for one in asked]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
            raise SystemExit("outputs of wrong lengths")
        return took


class Took(NamedTuple):
    """Seconds of transformers."""

    prepare: float
    generate: float

    @property
    def whole(self) -> float:
        return self.prepare + self.generate


class Theirs:
    """transformers in this process."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._processor = processor_of(name)
        model = AutoModelForMultimodalLM.from_pretrained(save(name), dtype=dtype, attn_implementation="sdpa")
        self._model = model.eval()

    def answer(self, asked: list[Question], tokens: int) -> Took:
        began = time.perf_counter()
        images = {one.file: decoded(one.file) for one in asked}
        inputs = self._processor(
            text=[one.text for one in asked],
            images=[[images[one.file]] for one in asked],
            padding=True,
            return_tensors="pt",
        )
        prepared = time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(
                **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=258
            )
        if found.shape[1] != inputs["input_ids"].shape[1] + tokens:
            raise SystemExit("outputs of wrong lengths")
        return Took(prepared - began, time.perf_counter() - prepared)


def _serve_theirs(name: str, warm_up: list[Question], pipe: Any) -> None:
    """Choose a type, and answer batches until the other end is closed."""
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        seconds[dtype] = Theirs(name, dtype).answer(warm_up, FEW_TOKENS).generate
    dtype = min(seconds, key=seconds.__getitem__)
    theirs = Theirs(name, dtype)
    pipe.send(str(dtype).removeprefix("torch."))
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        pipe.send(theirs.answer(asked, TOKENS))


@contextmanager
def theirs_beside(name: str, warm_up: list[Question]) -> Iterator[Any]:
    """A connection to transformers in a process of its own: send questions, receive `Took`. The type comes first."""
    spawn = multiprocessing.get_context("spawn")
    ours, pipe = spawn.Pipe()
    process = spawn.Process(target=_serve_theirs, args=(name, warm_up, pipe), daemon=True)
    process.start()
    pipe.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def answers(name: str, rounds: int) -> list[Bar]:
    """The second question about an image, and batches beside transformers."""
    before, engine = SHAPES[name].before, Ours(name)
    engine.answer(questions(before, 1, 0), 2)  # the workers start, and the first prompt is verified
    seconds = []
    for number in range(rounds):
        first, second = questions(before, 1, 1_000 + number)[:2]
        seconds.append((engine.answer([first], 1), engine.answer([second], 1)))
        print(f"  first and second question about an image: {seconds[-1]} s", flush=True)
    share = median(second / first for first, second in seconds)
    firsts, others = (median(column) for column in zip(*seconds, strict=True))
    bars = [
        Bar(
            f"{name}: time to the first token of a second question about an image, of that of the first "
            f"({MAX_SECOND:g}×)",
            f"{share:.2f}× ({others * 1e3:.0f} ms of {firsts * 1e3:.0f} ms)",
            share <= MAX_SECOND,
        )
    ]
    kinds = {
        f"{REQUESTS} questions about {IMAGES} images": (IMAGES, MIN_SHARED),
        f"{REQUESTS} questions about {REQUESTS} images": (REQUESTS, MIN_DISTINCT),
    }
    found: dict[str, list[tuple[float, Took]]] = {kind: [] for kind in kinds}
    with theirs_beside(name, questions(before, 1, 0)[:1]) as theirs:
        dtype = theirs.recv()
        for number in range(rounds):
            for kind, (images, _) in kinds.items():
                asked = questions(before, images, 2_000 + 10 * number + images % 10)
                took = engine.answer(asked, TOKENS)
                theirs.send(asked)
                found[kind].append((took, theirs.recv()))
                print(f"  {kind}: {took:.2f} s, transformers {found[kind][-1][1]}", flush=True)
    for kind, (_, least) in kinds.items():
        ratios = [other.whole / own for own, other in found[kind]]
        alone = median(other.generate / own for own, other in found[kind])
        own, whole = median(own for own, _ in found[kind]), median(other.whole for _, other in found[kind])
        bars.append(
            Bar(
                f"{name}: {kind}, {TOKENS} tokens each: faster than transformers in {dtype} by ({least:g}×)",
                f"{median(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f}): {own:.1f} s and {whole:.1f} s; "
                f"{alone:.2f}× its `generate` without its processor",
                median(ratios) >= least,
            )
        )
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["smolvlm-500m", "qwen2-vl-2b"])
    parser.add_argument("--parts", nargs="+", choices=("stream", "answers"), default=["stream", "answers"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=STREAM_SECONDS, help="of a stream (default: %(default)g)")
    add_arguments(parser)
    args = parser.parse_args()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    code = 0
    for name in args.models:
        for part in args.parts:
            if part == "stream":
                bars = [bar for workers in (1, 2) for bar in beside_a_stream(name, workers, args.rounds, args.seconds)]
            else:
                bars = answers(name, args.rounds)
            args.json = CACHE / f"media_speed-{name}-{part}.json"
            code |= conclude(bars, {"section": f"media {part} {name}"}, args, "performance.md")
    return code


if __name__ == "__main__":
    sys.exit(main())
