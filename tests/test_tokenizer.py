"""The tokenizer agrees with transformers, without importing it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from mainspring.demo import MODEL_PATH
from mainspring.engine.text.tokenizer import SlowTokenizer, Tokenizer, load_tokenizer
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, ModelNotFoundError, NotSupportedError

TEXTS = ["hello", "Hello, world!  two  spaces", "naïve café 東京 🙂", "a<|end|>b", "\n\ttabs\n", "<extra>x</s>"]


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Write a byte-level tokenizer whose post-processor adds nothing, and a tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.post_processor = processors.ByteLevel(trim_offsets=False)
    rust.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    rust.enable_truncation(3)
    rust.enable_padding(pad_token="<s>", pad_id=256, length=8)
    folder.mkdir(exist_ok=True)
    rust.save(str(folder / "tokenizer.json"))
    base = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}))


CONFIGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False, "unk_token": None},
    {"pad_token": "<new pad>", "additional_special_tokens": ["<extra>"]},
    {"added_tokens_decoder": {"258": {"content": "<extra>", "special": False, "normalized": False}}},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_ids_and_text_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, config)
    # truncation and padding in the file are for training
    hf = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            theirs = hf.encode(text, add_special_tokens=special, truncation=False, padding=False)
            assert ours.encode(text, add_special_tokens=special) == theirs, text
            assert ours.decode(theirs, skip_special_tokens=special) == hf.decode(theirs, skip_special_tokens=special)
    assert (ours.bos_token_id, ours.eos_token_id) == (hf.bos_token_id, hf.eos_token_id)
    assert ours.all_special_ids == hf.all_special_ids
    assert ours.skipped_ids >= set(hf.all_special_ids)
    assert len(ours) == len(hf)


def test_the_embedded_model_is_read_as_transformers_reads_it() -> None:
    from transformers import AutoTokenizer

    hf, ours = AutoTokenizer.from_pretrained(MODEL_PATH), load_tokenizer(MODEL_PATH)
    for text in TEXTS:
        assert ours.encode(text) == hf.encode(text)
        assert ours.decode(hf.encode(text)) == hf.decode(hf.encode(text))
    assert ours.eos_token_id == hf.eos_token_id
    assert ours.convert_ids_to_tokens([1, 300]) == hf.convert_ids_to_tokens([1, 300])


def test_mode_hf_uses_the_rust_part_of_transformers_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"add_bos_token": True, "chat_template": "{{ messages[0].content }}"})
    (tmp_path / "config.json").write_text("{}")
    ours, through_hf = load_tokenizer(tmp_path), load_tokenizer(tmp_path, mode="hf")
    assert not isinstance(through_hf, SlowTokenizer)
    assert through_hf.eos_token_id == ours.eos_token_id
    assert through_hf.chat_template == ours.chat_template
    assert through_hf.decode(ours.encode("é")) == "é"


def test_the_tables_are_read_once_until_a_file_changes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {})
    first, second = load_tokenizer(tmp_path), load_tokenizer(tmp_path)
    assert first.backend is second.backend
    assert first is not second
    write_tokenizer(tmp_path, {"additional_special_tokens": ["<new>"]})
    third = load_tokenizer(tmp_path)
    assert third.backend is not first.backend
    assert third.convert_tokens_to_ids(["<new>"]) != [None]


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(tmp_path)


CHAT_TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "blocks": """
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}
    {%- set system = messages[0]['content'] | trim %}
{%- else %}
    {%- set rest = messages %}
    {%- set system = '' %}
{%- endif %}
{{- bos_token + system }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.last and message.role == 'assistant' %}
        {%- generation %}{{ message.content.strip() }}{% endgeneration %}
        {%- break %}
    {%- endif %}
    {{- '[' ~ message.role ~ ']' ~ message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
""",
    "tools": "{% set ns = namespace(n=0) %}{% if tools %}{% for t in tools %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:"
    "{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}{{ messages | map(attribute='content') | "
    "join('<&>') }}{{ extra | default('none') }}{{ dict(a=1) | tojson }}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<note>' }}{% endfor %}{% endif %}|{{ m.tool_calls is defined }}{% endfor %}",
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'quotes' é"}],
    [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "one\n"},
        {"role": "assistant", "content": "two  "},
    ],
    [{"role": "user", "content": "a", "tool_calls": None}, {"role": "assistant", "content": "the end"}],
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "note"}, {"type": "text", "text": "?"}]}
]
TOOLS = [{"type": "function", "function": {"name": "f<>", "description": "naïve & co", "parameters": {}}}]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_chats_are_rendered_as_transformers_renders_them(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, {"chat_template": CHAT_TEMPLATES[name]})
    hf, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for conversation in CONVERSATIONS + [PARTS] * (name == "parts"):
        for options in (
            {},
            {"add_generation_prompt": True},
            {"tools": TOOLS, "extra": "x<y"},
            {"continue_final_message": True},
        ):
            theirs = hf.apply_chat_template(conversation, tokenize=False, **options)
            assert ours.apply_chat_template(conversation, tokenize=False, **options) == theirs
            ids = ours.apply_chat_template(conversation, **options)
            assert ids == hf.encode(theirs, add_special_tokens=False, truncation=False, padding=False)


def test_a_template_that_refuses_the_conversation_is_a_bad_request(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": CHAT_TEMPLATES["blocks"]})
    ours = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ours.apply_chat_template([{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
    with pytest.raises(InvalidRequestError, match="empty"):
        ours.apply_chat_template([])
    with pytest.raises(InvalidRequestError, match="'role' and 'content'"):
        ours.apply_chat_template([{"content": "x"}])
    with pytest.raises(InvalidRequestError, match="both"):
        ours.apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="drops the final message"):
        ours.apply_chat_template(CONVERSATIONS[0], chat_template="nothing", continue_final_message=True)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ messages[0].content.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_can_not_leave_the_sandbox(attack: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {})
    ours = load_tokenizer(tmp_path)
    try:
        text = ours.apply_chat_template(CONVERSATIONS[0], chat_template=attack, tokenize=False)
    except InvalidRequestError:
        return
    assert text == "", "the sandbox may also make it an undefined value, which prints as nothing"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"content": [{"type": "text", "text": "what is it?"}, IMAGE]}, "image_url"),
        ({"content": [{"type": "image"}]}, "image"),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}, "input_audio"),
        ({"content": [{"type": "video_url", "video_url": {}}]}, "video_url"),
        ({"content": [{"type": "file", "file": {}}]}, "file"),
        ({"content": [{"type": "scent"}]}, "scent"),
        ({"content": [{"image": object()}]}, "image"),
        ({"content": {"audio_url": "x"}}, "audio_url"),
        ({"content": "what is it?", "images": ["AAAA"]}, "images"),
        ({"role": "tool", "content": [IMAGE]}, "image_url"),
    ],
)
def test_a_part_that_is_no_text_is_refused(name: str, message: dict[str, Any], kind: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": CHAT_TEMPLATES[name]})
    conversation = [{"role": "user", "content": "hello"}, {"role": "user", **message}]
    with pytest.raises(NotSupportedError, match=f"message 1 has a part of type '{kind}'.* this model are: text"):
        load_tokenizer(tmp_path).apply_chat_template(conversation)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_parts_that_are_text_are_answered_as_text(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": CHAT_TEMPLATES[name]})
    tokenizer, between = load_tokenizer(tmp_path), "" if name == "parts" else "\n"
    for parts in (
        [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        ["one", {"text": "two", "image": None}],
        [{"type": "input_text", "text": "one"}, {"type": "refusal", "refusal": "two"}],
    ):
        found = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        plain = [{"role": "user", "content": f"one{between}two"}]
        assert found == tokenizer.apply_chat_template(plain, tokenize=False)
    answers = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "so be"}]}]
    found = tokenizer.apply_chat_template(answers, continue_final_message=True, tokenize=False)
    assert str(found).endswith("so be")
    if name != "parts":
        with pytest.raises(InvalidRequestError, match="message 0 has a part that is no text"):
            tokenizer.apply_chat_template([{"role": "user", "content": [{"x": 1}]}])


# prints the content of each message as the template gets it
SHOWS = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
ONLY_PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'text' %}[{{ p['text'] }}]{% endif %}"
    "{% endfor %}{% endfor %}"
)
TWO_TEXTS = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]


@pytest.mark.parametrize(
    ("content_format", "text", "parts", "answer"),
    [
        ("string", "one", "one\ntwo", "one\ntwo"),
        (
            "openai",
            [{"type": "text", "text": "one"}],
            [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            "one\ntwo",  # of tools templates expect a text
        ),
        ("auto", "one", "one\ntwo", "one\ntwo"),
    ],
)
def test_contents_have_the_form_that_is_asked_for(
    content_format: str, text: Any, parts: Any, answer: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, {"chat_template": SHOWS})
    ours = load_tokenizer(tmp_path)

    def seen(content: Any, role: str = "user") -> Any:
        conversation = [{"role": role, "content": content}]
        found = ours.apply_chat_template(conversation, tokenize=False, chat_template_content_format=content_format)
        return json.loads(found)

    assert seen("one") == text
    assert seen(TWO_TEXTS) == parts
    assert seen(TWO_TEXTS, "tool") == answer
    assert seen("one", "tool") == "one"


def test_auto_is_the_form_that_a_template_prints(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": ONLY_PARTS})
    ours = load_tokenizer(tmp_path)
    plain = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert ours.apply_chat_template(plain, tokenize=False) == "[one][two]"
    assert ours.apply_chat_template(plain, tokenize=False, continue_final_message=True) == "[one][two"
    mixed = [{"role": "user", "content": TWO_TEXTS}, {"role": "assistant", "content": "three"}]
    assert ours.apply_chat_template(mixed, tokenize=False) == "[one][two][three]"
    assert ours.apply_chat_template(plain, tokenize=False, chat_template_content_format="string") == ""
    for template in (CHAT_TEMPLATES["parts"], "{{ bos_token + messages[0].content }}"):
        found = ours.apply_chat_template(plain[:1], tokenize=False, chat_template=template)
        assert "one" in str(found), "these read text"


def test_a_content_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": SHOWS})
    with pytest.raises(InvalidArgumentError, match="chat_template_content_format is 'json'; it must be one of"):
        load_tokenizer(tmp_path).apply_chat_template(CONVERSATIONS[0], chat_template_content_format="json")
    with pytest.raises(InvalidRequestError, match="a conversation is 5"):
        load_tokenizer(tmp_path).apply_chat_template([5])


def test_a_tools_answer_may_be_data(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": "{{ messages[0].content | tojson }}"})
    for data in ({"image_url": "x"}, [{"type": "weather", "degrees": 3}], [1, 2]):
        text = load_tokenizer(tmp_path).apply_chat_template([{"role": "tool", "content": data}], tokenize=False)
        assert json.loads(str(text)) == data


TOOL_TEMPLATES = {  # as templates of these models read a message that has calls only
    "granite": (
        "{% for m in messages %}{{ m.role + ':' + m['content'] }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}",
        'user:hi;assistant:{"a": "é"};',
    ),
    "deepseek": (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for c in m['tool_calls'] %}{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
        "{% else %}{{ 'user:' + m['content'] }}{% endif %};{% endfor %}",
        'user:hi;f {"a": "é"};',
    ),
    "plain": (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}"
        "{% endfor %};{% endfor %}",
        "hi;é;",
    ),
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_message_that_has_calls_only_is_read_by_any_template(
    name: str, content: dict[str, None], tmp_path: Path
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    template, wanted = TOOL_TEMPLATES[name]
    write_tokenizer(tmp_path, {"chat_template": template})
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call], **content}]
    assert load_tokenizer(tmp_path).apply_chat_template(messages, tokenize=False) == wanted


def test_messages_are_never_changed_and_other_objects_become_their_type_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": "{{ messages[0].content }}{{ messages[0].extra }}"})
    conversation = [{"role": "user", "content": "hello", "extra": Path("/secret")}]
    text = load_tokenizer(tmp_path).apply_chat_template(conversation, continue_final_message=True, tokenize=False)
    assert text == "hello"
    assert conversation[0]["content"] == "hello"
    assert "Path>" in str(load_tokenizer(tmp_path).apply_chat_template(conversation, tokenize=False))


def test_several_templates_are_chosen_by_name_or_by_tools(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write_tokenizer(tmp_path, {"chat_template": both})
    ours = load_tokenizer(tmp_path)
    conversation = CONVERSATIONS[0]
    assert ours.apply_chat_template(conversation, tokenize=False) == "D"
    assert ours.apply_chat_template(conversation, tools=TOOLS, tokenize=False) == "T"
    assert ours.apply_chat_template(conversation, chat_template="tool_use", tokenize=False) == "T"
    assert ours.apply_chat_template(conversation, chat_template="own text", tokenize=False) == "own text"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).apply_chat_template(conversation, tokenize=False) == "file"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {})
    with pytest.raises(InvalidRequestError, match="no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(CONVERSATIONS[0])


def test_a_python_tokenizer_is_used_where_there_is_no_rust_part(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, SlowTokenizer)
    ids = ours.encode("né")
    assert ours.decode(ids, skip_special_tokens=True) == "né"
    assert ids[-1] == ours.eos_token_id
    assert isinstance(ours, Tokenizer)
    assert len(ours) == len(ours.hf)


@pytest.mark.parametrize("how", ["encode", "encode_first", "decode"])
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(how: str) -> None:
    tokenizer, text = load_tokenizer(Path(MODEL_PATH)), "One two three. " * 50_000
    whole = tokenizer.encode(text)
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: tokenizer.encode(text) == whole,
        "encode_first": lambda: tokenizer.encode_first(text, True, 3) == whole[:3],
        "decode": lambda: tokenizer.decode(whole, skip_special_tokens=True) == text,
    }
    turn, ran = threading.Lock(), list[bool]()

    def other() -> None:
        with turn:
            ran.append(True)

    turn.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # seconds, so that the other thread runs only if a call releases the interpreter lock
    try:
        turn.release()
        assert not ran
        is_right = calls[how]()
        assert ran
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert is_right
