"""The forms in which models write tool calls and reasoning, as data. `ResponseReader` reads them, `tool_grammar` makes
grammars of them.

A template is text with places for the parts of a call. Whitespace in a template stands for any whitespace or none;
``~`` stands for the same where the model's own form has none.

| place | what is there |
| --- | --- |
| ``$NAME``, ``$ID``, ``$NUMBER`` | the function's name, the call's id, a number that is ignored |
| ``$JSON`` | the arguments, a JSON object |
| ``$PARAMS`` | the arguments, each in the form of `CallForm.params`: ``$KEY`` and ``$VALUE`` |
| ``$CALL`` | a JSON object with name and arguments in any order |
| ``$PYTHON`` | a Python list of calls |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from ...ipc.errors import InvalidArgumentError, shown


class CallForm(NamedTuple):
    """A run of calls: `start`, calls with `between` between them, `end`."""

    call: str
    start: str = ""
    between: str = "\n"
    end: str = ""
    params: tuple[str, ...] = ()
    leads: bool = False  # only the whole output can be calls, and only of functions of the request


class ToolFormat(NamedTuple):
    forms: tuple[CallForm, ...]  # in the order in which they are tried; grammars are made of the first
    marks: tuple[tuple[str, ...], ...]  # the chat template shows the format by all texts of one of these
    dropped: tuple[str, ...] = ()  # marks in the output that belong to no part
    call_id: str = "call_{random:.24}"  # also with {name}, {index}


class ReasoningFormat(NamedTuple):
    opens: tuple[str, ...]
    close: str
    marks: tuple[tuple[str, ...], ...]
    implied: bool = False  # the output begins with reasoning, even if neither prompt nor output opens it
    anywhere: bool = False  # reasoning may begin again after other parts
    after: str = ""  # what stands between reasoning and a call, or content
    content: tuple[str, ...] = ("",)  # what content begins with, if it is held to a form


_JSON_CALL = '{~"name"~: "$NAME"~, "arguments"~: $JSON~}'
_LLAMA_CALL = '{~"name"~: "$NAME"~, "parameters"~: $JSON~}'
# The recipient of a call stands after the channel or before it, with the role, which may be the prompt's.
_HARMONY = tuple(
    CallForm(f"{begin}{kind}<|message|>$JSON<|call|>", between="<|start|>assistant", leads=begin.startswith("to="))
    for channel in ("commentary", "analysis")
    for begin in (
        f"<|channel|>{channel} to=functions.$NAME",
        f"<|start|>assistant to=functions.$NAME<|channel|>{channel}",
        f"to=functions.$NAME<|channel|>{channel}",
    )
    for kind in (" <|constrain|>json", " json", " code", "")
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "gpt_oss": ToolFormat(
        _HARMONY,
        (("<|channel|>", "<|call|>"),),
        (
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>final json<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
    ),
    "deepseek_v3": ToolFormat(
        (
            CallForm(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n$JSON\n```<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "\n",
                "<｜tool▁calls▁end｜>",
            ),
        ),
        (("<｜tool▁call▁begin｜>", "```json"),),
    ),
    "deepseek_v31": ToolFormat(
        (
            CallForm(
                "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$JSON<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "",
                "<｜tool▁calls▁end｜>",
            ),
        ),
        (("<｜tool▁call▁begin｜>",),),
    ),
    "deepseek_v32": ToolFormat(
        (
            CallForm(
                '<｜DSML｜invoke name="$NAME">\n$PARAMS\n</｜DSML｜invoke>',
                "<｜DSML｜function_calls>\n",
                "\n",
                "\n</｜DSML｜function_calls>",
                tuple(
                    f'<｜DSML｜parameter name="$KEY" string="{is_text}">$VALUE</｜DSML｜parameter>'
                    for is_text in ("true", "false")
                ),
            ),
        ),
        (("｜DSML｜",),),
    ),
    "kimi_k2": ToolFormat(
        tuple(
            CallForm(
                f"<|tool_call_begin|>{name}:$NUMBER<|tool_call_argument_begin|>$JSON<|tool_call_end|>",
                "<|tool_calls_section_begin|>",
                "",
                "<|tool_calls_section_end|>",
            )
            for name in ("functions.$NAME", "$NAME")
        ),
        (("<|tool_call_begin|>",),),
        call_id="functions.{name}:{index}",
    ),
    "glm45": ToolFormat(
        (
            CallForm(
                "<tool_call>$NAME\n$PARAMS\n</tool_call>",
                params=("<arg_key>$KEY</arg_key>\n<arg_value>$VALUE</arg_value>",),
            ),
        ),
        (("<arg_key>",),),
    ),
    "qwen3_xml": ToolFormat(
        (
            CallForm(
                "<tool_call>\n<function=$NAME>\n$PARAMS\n</function>\n</tool_call>",
                params=("<parameter=$KEY>\n$VALUE\n</parameter>",),
            ),
            CallForm("<function=$NAME>\n$PARAMS\n</function>", params=("<parameter=$KEY>\n$VALUE\n</parameter>",)),
        ),
        (("<function=", "<parameter="),),
    ),
    "mistral": ToolFormat(
        (
            CallForm("[TOOL_CALLS]$NAME[ARGS]$JSON", between=""),
            CallForm("[TOOL_CALLS]$NAME[CALL_ID]$ID[ARGS]$JSON", between=""),
            CallForm("[TOOL_CALLS]$NAME~$JSON", between=""),
            CallForm(_JSON_CALL, "[TOOL_CALLS] [", ", ", "]"),
            CallForm("$CALL", "[TOOL_CALLS] [", ", ", "]"),
        ),
        (("[TOOL_CALLS]", "[ARGS]"),),
        call_id="{random:.9}",
    ),
    "mistral_list": ToolFormat(
        (CallForm(_JSON_CALL, "[TOOL_CALLS] [", ", ", "]"), CallForm("$CALL", "[TOOL_CALLS] [", ", ", "]")),
        (("[TOOL_CALLS]",),),
        call_id="{random:.9}",
    ),
    "phi4_mini": ToolFormat(
        tuple(CallForm(call, "<|tool_call|>[", ", ", "]<|/tool_call|>") for call in (_JSON_CALL, "$CALL")),
        (("<|tool_call|>", "<|/tool_call|>"),),
    ),
    "minimax_m2": ToolFormat(
        (
            CallForm(
                '<invoke name="$NAME">\n$PARAMS\n</invoke>',
                "<minimax:tool_call>\n",
                "\n",
                "\n</minimax:tool_call>",
                ('<parameter name="$KEY">$VALUE</parameter>',),
            ),
        ),
        (("<minimax:tool_call>",),),
    ),
    "granite": ToolFormat(
        tuple(
            CallForm(call, f"{mark} [", ", ", "]")
            for mark in ("<|tool_call|>", "<tool_call>")
            for call in (_JSON_CALL, "$CALL")
        ),
        (("<|tool_call|>",),),
    ),
    "hermes": ToolFormat(
        tuple(CallForm(f"<tool_call>\n{call}\n</tool_call>") for call in (_JSON_CALL, "$CALL")),
        (("<tool_call>",),),
    ),
    "pythonic": ToolFormat(
        (CallForm("$PYTHON", leads=True), CallForm("$PYTHON", "<|python_start|>", "", "<|python_end|>", leads=True)),
        (("[func_name1(",),),
    ),
    "llama3_json": ToolFormat(
        tuple(
            CallForm(call, mark, "; ", leads=True)
            for mark in ("", "<|python_tag|>")
            for call in (_LLAMA_CALL, _JSON_CALL, "$CALL")
        ),
        (('"parameters":',), ("<|python_tag|>",)),
    ),
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "gpt_oss": ReasoningFormat(
        ("<|channel|>analysis<|message|>",),
        "<|end|>",
        (("<|channel|>", "<|call|>"),),
        anywhere=True,
        after="<|start|>assistant",
        content=("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    ),
    "mistral": ReasoningFormat(("[THINK]",), "[/THINK]", (("[THINK]",),)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        "Here is my response:",
        (("Here is my thought process:",),),
    ),
    "kimi": ReasoningFormat(("◁think▷",), "◁/think▷", (("◁think▷",),)),
    "seed_oss": ReasoningFormat(("<seed:think>",), "</seed:think>", (("<seed:think>",),)),
    "deepseek_r1": ReasoningFormat(("<think>",), "</think>", (("<｜Assistant｜><think>",),), implied=True),
    "qwen3": ReasoningFormat(("<think>",), "</think>", (("<think>",), ("</think>",))),
}

VLLM_NAMES: dict[str, dict[str, str]] = {  # names of the same forms in vLLM, which the options take, too
    "tool_parser": {
        "glm47": "glm45",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "openai": "gpt_oss",
        "phi4_mini_json": "phi4_mini",
        "qwen3_coder": "qwen3_xml",
    },
    "reasoning_parser": {"glm45": "qwen3", "minimax_m2": "deepseek_r1", "openai_gptoss": "gpt_oss"},
}


@functools.lru_cache(maxsize=32)  # because templates are long, and each request asks
def tool_format(name: str, chat_template: str | None) -> ToolFormat | None:
    """The format of this name; ``auto``: the one that the chat template shows; ``none``: None.

    Raises:
        InvalidArgumentError: there is no such format.
    """
    return _format("tool_parser", name, chat_template, TOOL_FORMATS)


@functools.lru_cache(maxsize=32)
def reasoning_format(name: str, chat_template: str | None) -> ReasoningFormat | None:
    """As `tool_format`."""
    return _format("reasoning_parser", name, chat_template, REASONING_FORMATS)


_Format = TypeVar("_Format", ToolFormat, ReasoningFormat)


def _format(what: str, name: str, chat_template: str | None, formats: Mapping[str, _Format]) -> _Format | None:
    if name == "none":
        return None
    if name == "auto":
        text = chat_template or ""
        shown_by = (one for one in formats.values() if any(all(mark in text for mark in way) for way in one.marks))
        return next(shown_by, None)
    name = VLLM_NAMES[what].get(name, name)
    if name not in formats:
        raise InvalidArgumentError(f"{what} is {shown(name)}; it must be auto, none or one of {', '.join(formats)}")
    return formats[name]
