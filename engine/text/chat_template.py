"""Chat templates: a conversation to the model's own prompt text, rendered as transformers renders it, without it.

Templates come with checkpoints, so they are untrusted: they run in jinja2's immutable sandbox and see nothing but plain
copies of what the caller passed.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ...ipc.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the trailing space shows whether the template trims


def render_chat(
    template: str,
    conversation: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """The prompt text of a conversation. `variables` are what the template sees besides: special tokens, user's own.

    Raises:
        InvalidRequestError: the arguments contradict each other, or the template refuses the conversation.
    """
    import jinja2

    messages = _checked(conversation)
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError("tools must be a list of dicts, each the JSON schema of a function")
    final = ""
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequestError("continue_final_message and add_generation_prompt can't both be set")
        final = _mark_final(messages[-1])
    try:
        text = _compile(template).render(
            messages=messages,
            tools=_plain(tools),
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **_plain(variables)},  # a template may ask whether there are any
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise InvalidRequestError(f"the chat template refused the conversation: {error}") from error
    return _cut_at_mark(text, final) if continue_final_message else text


def _checked(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    if not conversation:
        raise InvalidRequestError("the conversation is empty; give at least one message")
    for message in conversation:
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequestError(f"a message is {shown(message)}; it must be a dict with 'role' and 'content'")
    # a None (as some APIs return) would be printed as "None"; templates expect the key to be missing
    return [{key: value for key, value in _plain(message).items() if value is not None} for message in conversation]


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
    return environment.from_string(template)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"a namespace attribute is {name!r}; it must not start with an underscore")
