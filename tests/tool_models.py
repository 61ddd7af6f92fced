"""A tiny model of random weights whose chat template has tools and reasoning, in the form of Qwen's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import tiny

TEMPLATE = """
{%- if tools %}<|im_start|>system
Call functions as <tool_call>
{"name": ..., "arguments": ...}
</tool_call>. They are:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def make(folder: Path, special: Sequence[str] = ()) -> Path:
    """Write the checkpoint; → its folder.

    Args:
        special: further special tokens of the tokenizer.
    """
    size = tiny.VOCAB_SIZE + len(special)
    tiny.make("llama", folder, tokenizer=True, max_position_embeddings=8192, vocab_size=size)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(file))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def says(text: str) -> dict[str, Any]:
    """Fields of a body with which a model of any weights answers this. Before a grammar there is no reasoning."""
    return {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}
