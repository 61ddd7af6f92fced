"""Chat templates: a conversation to the model's own prompt text, rendered as transformers renders it, without it.

Templates come with checkpoints, so they are untrusted: they run in jinja2's immutable sandbox and see nothing but plain
copies of what the caller passed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, get_args

import msgspec

from ...ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, shown
from .chat_media import take_media

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
ContentFormat = Literal["auto", "string", "openai"]  # what a template gets as content: text, or a list of parts
_FORMATS = get_args(ContentFormat)

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")  # types of parts that are text
_MEDIA = re.compile(r"(input_)?(image|audio|video|file)s?(_\w+)?")  # types of parts that are media
_MEDIA_KEYS = re.compile(r"(input_)?(image|audio|video)s?(_url)?")  # in a message, or in a part without type
_PLAIN = {"role", "content", "name"}  # keys of a message that is nothing but text
_SPEAKERS = ("system", "developer", "user", "assistant")  # content of the other roles may be data of any form

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the trailing space shows whether the template trims


def render_chat(
    template: str,
    conversation: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    content_format: ContentFormat = "auto",
    media: Mapping[str, str] | None = None,
) -> str:
    """The prompt text of a conversation. `variables` are what the template sees besides: special tokens, user's own.
    `content_format` "auto": parts stay parts, and text stays text, if the template prints them. `media`: what the model
    takes beside text → the text that stands for it where the template reads only text.

    Raises:
        InvalidArgumentError: there is no such `content_format`.
        InvalidRequestError: the arguments contradict each other, or the template refuses the conversation.
        NotSupportedError: a message has a part that the model does not take, such as an image.
    """
    import jinja2

    if content_format not in _FORMATS:
        raise InvalidArgumentError(
            f"chat_template_content_format is {shown(content_format)}; it must be one of {_FORMATS}"
        )
    media = media or {}
    messages, tools = _checked(take_media(conversation, media)[0]), _checked_tools(tools)

    def render(messages: list[dict[str, Any]]) -> str:
        return _compile(template).render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **_plain(variables)},  # a template may ask whether there are any
        )

    _unify_content(messages, template, render, content_format, media)
    final = ""
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequestError("continue_final_message and add_generation_prompt can't both be set")
        final = _mark_final(messages[-1])
    refused: Exception | None = None
    for form in _forms(messages):
        try:
            text = render(form)
            break
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, SyntaxError) as error:
            refused = refused or error
    else:
        raise InvalidRequestError(f"the chat template refused the conversation: {refused}") from refused
    return _cut_at_mark(text, final) if continue_final_message else text


def check_template(template: str) -> None:
    """Check the syntax of a chat template.

    Raises:
        InvalidArgumentError: it has an error.
    """
    import jinja2

    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidArgumentError(f"chat_template is no template: line {error.lineno}: {error}") from None


def template_messages(messages: Any) -> Any:
    """Messages as chat templates expect them: arguments of calls as objects, which OpenAI's API has as texts, and the
    reasoning under each of its names."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages  # who renders them will say what is wrong
    return [{**message, **_rewritten(message)} if isinstance(message, Mapping) else message for message in messages]


def _rewritten(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "tool_calls" in message:  # templates ask whether it is there, so an empty list is as bad as a None
        found["tool_calls"] = _calls(calls) if (calls := message["tool_calls"]) else None
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        found |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if not message.get("content"):  # the template of gpt-oss, which calls it so, refuses both together
            found["thinking"] = reasoning
    return found


def _calls(calls: Any) -> Any:
    if not isinstance(calls, list):
        raise InvalidRequestError("tool_calls of a message must be a list")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments") or "{}", str):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):  # a model wrote it; it is shown as it is
                call = {**call, "function": {**function, "arguments": msgspec.json.decode(text)}}
        found.append(call)
    return found


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """A conversation, and forms of it for templates that refuse it: some read the content of a message that has calls
    only, as None (DeepSeek) or as a text (Granite, Phi), and some put the arguments of calls together with texts."""
    contents: list[dict[str, Any]] = [{}]
    if any("content" not in message for message in messages):
        contents += {"content": None}, {"content": ""}
    for content in contents:
        form = [{**content, **message} for message in messages]
        yield form
        if (as_texts := list(map(_with_texts, form))) != form:
            yield as_texts


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as text, as in OpenAI's API."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(_as_text, calls))} if isinstance(calls, list) else message


def _as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _checked(conversation: Any) -> list[dict[str, Any]]:
    if isinstance(conversation, str) or not isinstance(conversation, Sequence):
        raise InvalidRequestError(f"a conversation is {shown(conversation)}; it must be a list of messages")
    if not conversation:
        raise InvalidRequestError("the conversation is empty; give at least one message")
    for message in conversation:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequestError(f"a message is {shown(message)}; it must be a dict with 'role' and 'content'")
    # a None (as some APIs return) would be printed as "None"; templates expect the key to be missing
    return [{key: value for key, value in _plain(message).items() if value is not None} for message in conversation]


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError("tools must be a list of dicts, each the JSON schema of a function")
    return cast("list[dict[str, Any]] | None", _plain(tools))


def text_messages(
    conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Plain copies of messages and tools for an encoder that is no template. Parts that are text are joined.

    Raises: as `render_chat`.
    """
    messages = _checked(conversation)
    _unify_content(messages, "", lambda tried: "", "string", {})
    return messages, _checked_tools(tools)


def _unify_content(
    messages: list[dict[str, Any]],
    template: str,
    render: Callable[..., str],
    content_format: ContentFormat,
    media: Mapping[str, str],
) -> None:
    """Refuse parts of messages that the model does not take. Give all contents the form that the template reads."""
    lists: dict[int, list[str | None]] = {}  # index of a message → the texts of its parts; None: a part is no text
    for at, message in enumerate(messages):
        if isinstance(message.get("content"), str) and message.keys() <= _PLAIN:
            continue
        content, speaks = message.get("content"), message["role"] in _SPEAKERS
        parts = content if isinstance(content, list) else [content] if isinstance(content, dict) and speaks else None
        for part in ({**message, "type": None}, *(parts or ())):
            if not _is_media(part, media) and (name := _no_text(part, template, speaks)) is not None:
                takes = ", ".join(("text", *media))
                raise NotSupportedError(
                    f"message {at} has a part of type {shown(name)}; the modalities of this model are: {takes}"
                )
        texts = list(map(_text, parts or ()))
        if parts is not None and (speaks or None not in texts):
            lists[at] = texts
            both = zip(parts, texts, strict=True)
            message["content"] = [part if text is None else _text_part(text) for part, text in both]
    texts_at = [at for at, one in enumerate(messages) if isinstance(one.get("content"), str) and one["role"] != "tool"]
    if content_format == "auto":
        join = bool(lists) and (
            not _reads_parts(messages, lists, render) or _passes_over(messages, lists, render, media)
        )
        split = not (join or _reads_text(template)) and _reads_only_parts(messages, texts_at, render)
    else:
        join, split = content_format == "string", content_format == "openai"
    for at, texts in lists.items():
        is_answer = messages[at]["role"] == "tool" and None not in texts  # of which templates expect a text
        if join or (is_answer and content_format == "openai"):
            parts = messages[at]["content"]
            for place, part in enumerate(parts):
                if _is_media(part, media):
                    texts[place] = media[part["type"]] or None
            if None in texts:
                raise InvalidRequestError(
                    f"message {at} has a part that is no text, but the chat template reads only text"
                )
            messages[at]["content"] = "\n".join(cast(list[str], texts))
    for at in texts_at if split else ():
        messages[at]["content"] = [_text_part(messages[at]["content"])]


def _is_media(part: Any, media: Mapping[str, str]) -> bool:
    """Whether a part stands for media that the model takes, see `take_media`."""
    return isinstance(part, dict) and len(part) == 1 and part.get("type") in media


def _no_text(part: Any, template: str, speaks: bool) -> str | None:
    """The type of a part that is media, or that the template does not mention; None: the part may be used."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str):
        known = kind in _TEXT_TYPES or (not _MEDIA.fullmatch(kind) and (kind in template or not speaks))
        return None if known else kind
    return next((key for key in part if speaks and part[key] and _MEDIA_KEYS.fullmatch(str(key))), None)


def _text(part: Any) -> str | None:
    """The text of a part; None: the part is no text."""
    if isinstance(part, dict):
        kind = part.get("type", "text")
        part = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_TYPES else None
    return part if isinstance(part, str) else None


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _reads_parts(messages: Sequence[Message], at: Iterable[int], render: Callable[..., str]) -> bool:
    """Whether a template prints the text of parts. Others print a list as Python or JSON, leave it out, or fail."""
    marks = {index: f"TEXT_OF_MESSAGE_{index}." for index in at}
    text = _tried(messages, {index: [_text_part(mark)] for index, mark in marks.items()}, render)
    return all(mark in text and not re.search(rf"""['"]: ?['"]{mark}""", text) for mark in marks.values())


def _passes_over(
    messages: Sequence[Message], at: Iterable[int], render: Callable[..., str], media: Mapping[str, str]
) -> bool:
    """Whether a template prints nothing for media, and there is a text that stands for them."""
    for index in at:
        for part in messages[index]["content"]:
            if _is_media(part, media) and media[part["type"]]:
                mark = _text_part("TEXT_OF_MESSAGE.")
                shown = [_tried(messages, {index: parts}, render) for parts in ([part, mark], [mark])]
                return shown[0] == shown[1]
    return False


def _reads_only_parts(messages: Sequence[Message], at: Sequence[int], render: Callable[..., str]) -> bool:
    """Whether a template prints no content that is text, but would if it were a list of parts."""
    marks = {index: f"TEXT_OF_MESSAGE_{index}." for index in at}
    text = _tried(messages, marks, render)
    return not any(mark in text for mark in marks.values()) and bool(at) and _reads_parts(messages, at, render)


@functools.lru_cache(maxsize=32)
def _reads_text(template: str) -> bool:
    """Whether a template certainly prints content that is text."""
    ask: Message = {"role": "user", "content": "TEXT_OF_MESSAGE_0."}
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    return ask["content"] in _tried([ask], {}, lambda messages: _compile(template).render(messages=messages, **tokens))


def _tried(messages: Sequence[Message], contents: Mapping[int, Any], render: Callable[..., str]) -> str:
    """The prompt with these contents of messages; empty if the template refuses them."""
    try:
        return render(
            [
                {**message, "content": contents[index]} if index in contents else message
                for index, message in enumerate(messages)
            ]
        )
    except Exception:  # whatever is wrong with the conversation is raised when it is rendered
        return ""


def _plain(value: Any) -> Any:
    """A copy made of dicts, lists and scalars alone; other objects become their type's name."""
    return msgspec.to_builtins(value, enc_hook=_plain_other)


def _plain_other(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    for scalar in (str, int, float):  # subclasses carry methods the sandbox knows nothing of
        if isinstance(value, scalar):
            return scalar(value)
    return f"<{type(value).__name__}>"


def _mark_final(message: dict[str, Any]) -> str:
    """Append the tag to the message's text, in place; the text as it was."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _TAG
            return text
    raise InvalidRequestError("continue_final_message is set, but the final message has no text to continue")


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequestError("continue_final_message is set, but the chat template drops the final message's text")
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class SafeNamespace(Namespace):
        """A namespace that keeps no underscore attributes: they would be a way out of the sandbox."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            for name in dict(*args[1:], **kwargs):
                _refuse_underscore(name)
            Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            super().__setitem__(name, value)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja2's own filter escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
        dict=lambda *args, **kwargs: dict(*args, **kwargs),  # without the class's attributes
        namespace=SafeNamespace,
    )
    compiled = environment.from_string(template)
    compiled.globals = dict(environment.globals)  # each rendering copies them, a dict faster than jinja2's ChainMap
    return compiled


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"a namespace attribute is {name!r}; it must not start with an underscore")
