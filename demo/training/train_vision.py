"""Trains the vision demo from a seed and writes it with its processor to a folder (`make demo-vision`).

The vision tower is trained alone first: for each patch, linear heads name the figure whose centre lies in the patch,
its colour and the patch's place. Then the whole model is trained on questions and answers, with the same heads as a
second loss. The heads are not saved. Every row has one picture and several questions. In most rows each question has
the positions of a first question and sees the picture and itself only, which trains many short prompts for the price
of one picture; in the others the questions are the turns of one conversation.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from corpus import ASSISTANT, BEGIN, END, PAD, SYSTEM, USER
from pictures import (
    CELL,
    COLOURS,
    DIGITS,
    MAX_SHAPES,
    SHAPES,
    SIDE,
    VISION_FOLDER,
    Figure,
    Picture,
    draw,
    heldout,
    pictures,
    question,
)
from tokenizer import byte_level_bpe

SEED = "1"
IMAGE = "<image>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT, IMAGE)
NO_PICTURE = "Show me a picture first."
VOCAB_SIZE = 400
CONTEXT_LENGTH = 1024
PATCH = CELL
PATCHES = (SIDE // PATCH) ** 2
VISION_STEPS, VISION_ROWS = 250, 64
STEPS, ROWS = 2600, 16
QUESTIONS_PER_ROW = 8
PEAK_RATE = 2e-3
WEIGHT_DECAY = 0.05
PROMPT_WEIGHT = 0.02  # of a prompt's token in the loss; prompts are drawn at random, so there is little to learn
NAMES = (*SHAPES, *DIGITS)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] in ['image', 'image_url'] %}
                {{- '<image>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


class Batch(NamedTuple):
    """Rows padded to one length [rows, tokens], and their pictures with what each patch shows.

    A token sees the tokens before it whose segment is 0 (the picture) or its own. `ends` [questions, 2] has the row and
    token at which each prompt about a picture ends, `about` [questions, patches] 1 for the patches that it is about.
    """

    tokens: Tensor
    positions: Tensor
    weights: Tensor
    segments: Tensor
    pixels: Tensor
    ends: Tensor
    about: Tensor


class Row(NamedTuple):
    """A row: tokens, positions, weights in the loss and segments; where prompts end, and the patches they are about."""

    tokens: list[int]
    positions: list[int]
    weights: list[float]
    segments: list[int]
    ends: list[int]
    about: list[list[int]]


def train_tokenizer(seed: str) -> Tokenizer:
    """A byte-level BPE, trained on questions and answers; every digit is a token of its own."""
    rng, texts = Random(f"tokenizer {seed}"), [NO_PICTURE]
    for picture, _ in zip(pictures(seed, held_out=False), range(20_000), strict=False):
        asked = question(rng, picture)
        texts += [asked.prompt, asked.answer, f" {asked.answer}"]
    return byte_level_bpe(texts, SPECIAL_TOKENS, VOCAB_SIZE)


def _row(tokenizer: Tokenizer, rng: Random, picture: Picture | None) -> Row:
    """Questions about a picture, or about none: as first messages of chats, one conversation, or text to continue."""
    begin, user, assistant, end, image = (SPECIAL_TOKENS.index(token) for token in (BEGIN, USER, ASSISTANT, END, IMAGE))
    form = rng.choices(("chats", "conversation", "text"), (0.6, 0.2, 0.2))[0]
    prefix = [begin] if form == "text" else [begin, user]
    subject = picture or next(pictures(str(rng.random()), held_out=False))
    if picture:
        prefix += [image] * PATCHES
    row = Row(prefix[:], list(range(len(prefix))), [0.0] * len(prefix), [0] * len(prefix), [], [])
    for number in range(QUESTIONS_PER_ROW if picture else 2):
        asked = question(rng, subject)
        answer = asked.answer if picture else NO_PICTURE
        if form == "text":
            prompt = tokenizer.encode(rng.choice(("", "\n")) + asked.prompt, add_special_tokens=False).ids
            answer = f" {answer}"
        else:
            prompt = [user] if form == "conversation" and number else []
            prompt += [*tokenizer.encode(asked.prompt, add_special_tokens=False).ids, assistant]
        answered = [*tokenizer.encode(answer, add_special_tokens=False).ids, end]
        start = len(row.tokens) if form == "conversation" else len(prefix)
        if picture:
            row.ends.append(len(row.tokens) + len(prompt) - 1)
            row.about.append([_patch(figure) for figure in asked.about])
        row.tokens.extend(prompt + answered)
        row.positions.extend(range(start, start + len(prompt) + len(answered)))
        row.weights.extend([PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answered))
        row.segments.extend([1 if form == "conversation" else number + 1] * (len(prompt) + len(answered)))
    return row


def _patch(figure: Figure) -> int:
    """The patch in which the figure's centre lies."""
    return int(figure.y) // PATCH * (SIDE // PATCH) + int(figure.x) // PATCH


def _pixels(shown: list[Picture]) -> Tensor:
    """[pictures, 3, side, side] from -1 to 1, as the checkpoint's image processor makes them."""
    pixels = torch.from_numpy(np.stack([np.asarray(draw(picture)) for picture in shown]))
    return (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()


def _labels(shown: list[Picture]) -> tuple[Tensor, Tensor]:
    """[pictures, patches]: the figure whose centre lies in the patch (0: none), and its colour (-100: none)."""
    names = torch.zeros(len(shown), PATCHES, dtype=torch.long)
    colours = torch.full((len(shown), PATCHES), -100)
    for row, picture in enumerate(shown):
        for figure in picture.figures:
            patch = _patch(figure)
            names[row, patch] = NAMES.index(figure.name) + 1
            colours[row, patch] = list(COLOURS).index(figure.colour)
    return names, colours


def _batch(tokenizer: Tokenizer, rng: Random, shown: list[Picture]) -> Batch:
    """A row for each picture, and one row in 16 without a picture."""
    rows = [_row(tokenizer, rng, picture) for picture in shown]
    rows += [_row(tokenizer, rng, None) for _ in range(len(shown) // 16)]
    length = max(len(row.tokens) for row in rows)

    def padded(name: str, filler: float) -> Tensor:
        lists = [getattr(row, name) for row in rows]
        return torch.tensor([items + [filler] * (length - len(items)) for items in lists])

    segments = padded("segments", 0)
    ends = torch.tensor([(number, end) for number, row in enumerate(rows) for end in row.ends])
    about = torch.zeros(len(ends), PATCHES)
    for place, patches in enumerate(patches for row in rows for patches in row.about):
        about[place, patches] = 1.0
    weights = padded("weights", 0.0)
    return Batch(padded("tokens", 0), padded("positions", 0), weights, segments, _pixels(shown), ends, about)


def new_model() -> LlavaForConditionalGeneration:
    """A LLaVA with random weights: a SigLIP vision tower of 16 patches and a Llama."""
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=SiglipVisionConfig(
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=SIDE,
                patch_size=PATCH,
                vision_use_head=False,
            ),
            text_config=LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                max_position_embeddings=CONTEXT_LENGTH,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                tie_word_embeddings=True,
                bos_token_id=SPECIAL_TOKENS.index(BEGIN),
                eos_token_id=SPECIAL_TOKENS.index(END),
                pad_token_id=SPECIAL_TOKENS.index(PAD),
            ),
            image_token_index=SPECIAL_TOKENS.index(IMAGE),
            image_seq_length=PATCHES,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
    )


class _Heads(nn.Module):
    """Name what the projected rows of a picture show, and the rows that a question is about; used in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.name = nn.Linear(width, len(NAMES) + 1)
        self.colour = nn.Linear(width, len(COLOURS))
        self.place = nn.Linear(width, PATCHES)
        self.asked, self.shown = nn.Linear(width, width), nn.Linear(width, width)
        self.least = nn.Parameter(torch.tensor([-3.0]))  # few patches are meant
        self.register_buffer("balance", torch.tensor([0.2] + [1.0] * len(NAMES)))  # most patches show no centre

    def forward(self, rows: Tensor, shown: list[Picture]) -> Tensor:
        names, colours = _labels(shown)
        name = F.cross_entropy(self.name(rows).float().flatten(0, 1), names.flatten(), self.balance)
        colour = F.cross_entropy(self.colour(rows).float().flatten(0, 1), colours.flatten())
        places = torch.arange(PATCHES).repeat(len(shown))
        return name + colour + 0.3 * F.cross_entropy(self.place(rows).float().flatten(0, 1), places)

    def about(self, hidden: Tensor, is_image: Tensor, batch: Batch) -> Tensor:
        """The loss of telling from hidden states [rows, tokens, width] which patches each question is about."""
        pictures = hidden[is_image].view(-1, PATCHES, hidden.shape[-1])
        row, end = batch.ends.unbind(1)
        scores = (self.asked(hidden[row, end])[:, None] * self.shown(pictures)[row]).float().sum(-1)
        return F.binary_cross_entropy_with_logits(scores / 11 + self.least, batch.about)


def _answer_loss(model: LlavaForConditionalGeneration, heads: _Heads, batch: Batch, rows: Tensor) -> Tensor:
    """The weighted loss of the next tokens, with the pictures' rows put in place of their tokens."""
    embedded = model.get_input_embeddings()(batch.tokens)
    is_image = batch.tokens == model.config.image_token_index
    embedded = embedded.masked_scatter(is_image[..., None], rows.to(embedded.dtype))
    segments = batch.segments
    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    mask = (seen & torch.ones(seen.shape[1:]).tril().bool())[:, None]
    output = model.model.language_model(
        inputs_embeds=embedded,
        position_ids=batch.positions,
        attention_mask=mask,
        use_cache=False,
        output_hidden_states=True,
    )
    hidden = output.last_hidden_state
    kept = batch.weights[:, 1:] > 0  # also leaves out the places between a row's documents
    targets, weights = batch.tokens[:, 1:][kept], batch.weights[:, 1:][kept]
    each = F.cross_entropy(model.lm_head(hidden[:, :-1][kept]).float(), targets, reduction="none")
    return (each * weights).sum() / weights.sum() + 2.0 * heads.about(output.hidden_states[2], is_image, batch)


def _stage(
    model: LlavaForConditionalGeneration, heads: _Heads, tokenizer: Tokenizer | None, seed: str
) -> Iterator[float]:
    """Train the vision tower alone (without a tokenizer) or everything; the loss of each step."""
    steps, count = (STEPS, ROWS) if tokenizer else (VISION_STEPS, VISION_ROWS)
    trained = [*model.parameters(), *heads.parameters()]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=steps, pct_start=0.05, cycle_momentum=False, final_div_factor=100
    )
    source, rng = pictures(f"{seed} {tokenizer is None}", held_out=False), Random(f"questions {seed}")
    for _ in range(steps):
        shown = [next(source) for _ in range(count)]
        batch = _batch(tokenizer, rng, shown) if tokenizer else None
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):  # the others are slower backwards
            pixels = batch.pixels if batch else _pixels(shown)
            rows = torch.stack(list(model.get_image_features(pixels).pooler_output))
            loss = heads(rows, shown)
            if batch:
                loss = _answer_loss(model, heads, batch, rows) + 0.2 * loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def train(tokenizer: Tokenizer, seed: str) -> LlavaForConditionalGeneration:
    """The trained model, in float32; prints its progress."""
    torch.manual_seed(int(seed))
    model = new_model()
    heads = _Heads(model.config.text_config.hidden_size)
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters", flush=True)
    for name, given in (("vision", None), ("all", tokenizer)):
        started, recent = time.monotonic(), list[float]()
        for step, loss in enumerate(_stage(model, heads, given, seed), 1):
            recent.append(loss)
            if step % 50 == 0:
                print(f"{name}: step {step} loss {sum(recent) / 50:.4f} {time.monotonic() - started:.0f} s", flush=True)
                recent.clear()
    return model


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """The model folder as transformers and the engine read it, weights in bfloat16, and a picture to ask about."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=SPECIAL_TOKENS.index(BEGIN),
        eos_token_id=SPECIAL_TOKENS.index(END),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        do_sample=False,
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    image_processor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},  # not used to crop: the processor counts patches by it
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    configs = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT, IMAGE],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_LENGTH,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_processor": image_processor,
            "image_token": IMAGE,
            "patch_size": PATCH,
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": "full",
        },
    }
    for name, config in configs.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    example = next(picture for picture, _ in heldout() if len(picture.figures) == MAX_SHAPES)
    draw(example).save(folder / "example.png")


def main() -> None:
    """Command line: train from the seed."""
    parser = argparse.ArgumentParser(description="Train the vision demo and its tokenizer from the seed.")
    parser.add_argument("--output", type=Path, default=VISION_FOLDER, help="folder to write (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = train_tokenizer(SEED)
    save(train(tokenizer, SEED), tokenizer, arguments.output)
    print(f"wrote {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
