"""The small files of a checkpoint, sent by a core to a frontend that does not have them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mainspring
from mainspring.core.loop import EngineCore
from mainspring.ipc.config import EngineConfig, ModelConfig
from mainspring.ipc.errors import InvalidArgumentError, ModelNotFoundError, ProtocolError
from mainspring.ipc.tokenizer_files import cached_folder, digest_of, read_files

DEMO = Path(mainspring.__path__[0]) / "demo" / "model"
FILES = {"tokenizer.json": b"{}", "config.json": b"[]", "chat_templates/tool.jinja": b"x"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mainspring" / "tokenizers"


def no_fetch() -> Mapping[str, bytes]:
    raise AssertionError("fetched")


def test_a_checkpoints_small_files_are_read_and_its_weights_are_not() -> None:
    files = read_files(ModelConfig(model=str(DEMO)), None)
    assert {"config.json", "tokenizer.json"} <= set(files)
    assert not [name for name in files if name.endswith((".safetensors", ".bin", ".py")) or "index" in name]
    assert files["tokenizer.json"] == (DEMO / "tokenizer.json").read_bytes()


def test_another_tokenizers_files_stand_in_for_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("other")
    (tmp_path / "config.json").write_text("not this one")
    files = read_files(ModelConfig(model=str(DEMO), tokenizer=str(tmp_path)), None)
    assert files["tokenizer.json"] == b"other"
    assert files["config.json"] == (DEMO / "config.json").read_bytes()


def test_another_folders_generation_config_stands_in_for_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    files = read_files(ModelConfig(model=str(DEMO), generation_config=str(tmp_path)), None)
    assert files["generation_config.json"] == b"{}"
    with pytest.raises(InvalidArgumentError, match="it must be 'auto', 'none' or a folder"):
        read_files(ModelConfig(model=str(DEMO), generation_config="/nowhere"), None)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"null", "half"])
def test_a_core_does_not_start_with_a_broken_tokenizer(content: bytes | str, tmp_path: Path) -> None:
    whole = (DEMO / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    model = ModelConfig(model=str(DEMO), tokenizer=str(tmp_path))

    def load(_: EngineConfig) -> Any:
        raise AssertionError("the model is loaded")

    with pytest.raises(
        ModelNotFoundError, match=r"tokenizer.json can't be read.*: get the file again, or set"
    ) as error:
        EngineCore(EngineConfig(model_config=model), load)
    assert "\n" not in str(error.value)
    for config in (msgspec.structs.replace(model, skip_tokenizer_init=True), ModelConfig(model=str(DEMO))):
        with pytest.raises(AssertionError, match="the model is loaded"):
            EngineCore(EngineConfig(model_config=config), load)


def test_the_digest_tells_names_and_contents_apart_in_any_order() -> None:
    assert digest_of(FILES) == digest_of(dict(reversed(FILES.items())))
    different = [{}, {"a": b"bc"}, {"ab": b"c"}, {"a": b"b", "c": b""}, {"a": b"", "b": b"c"}, FILES]
    assert len({digest_of(files) for files in different}) == len(different)
    expected = blake2b(bytes(7) + b"\x01a" + bytes(7) + b"\x02bc", digest_size=16).hexdigest()
    assert digest_of({"a": b"bc"}) == expected


def test_files_are_fetched_once_and_kept_under_their_digest(cache: Path) -> None:
    digest = digest_of(FILES)
    folder = cached_folder(digest, lambda: FILES)
    assert folder == cache / digest
    assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")} == FILES
    assert cached_folder(digest, no_fetch) == folder
    assert [entry.name for entry in cache.iterdir()] == [digest]


def test_files_of_another_digest_are_refused_and_not_kept(cache: Path) -> None:
    with pytest.raises(ProtocolError, match="the core sent other tokenizer files than those of digest"):
        cached_folder(digest_of(FILES), lambda: {**FILES, "tokenizer.json": b"!"})
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil.json", "a/../../evil.json"])
def test_a_file_that_would_lie_elsewhere_is_refused_and_nothing_is_kept(cache: Path, name: str) -> None:
    files = {"tokenizer.json": b"{}", name: b"x"}
    with pytest.raises(ProtocolError, match="the core sent a tokenizer file named"):
        cached_folder(digest_of(files), lambda: files)
    assert list(cache.iterdir()) == []
    assert not list(cache.parent.rglob("evil.json"))


def test_a_core_without_such_files_is_an_error_that_says_what_to_give(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="give tokenizer=FOLDER, or set skip_tokenizer_init=True"):
        cached_folder("", no_fetch)


def test_when_another_frontend_was_first_its_folder_is_used(cache: Path) -> None:
    digest = digest_of(FILES)

    def slow_fetch() -> Mapping[str, bytes]:
        cached_folder(digest, lambda: FILES)
        return FILES

    assert cached_folder(digest, slow_fetch) == cache / digest
    assert [entry.name for entry in cache.iterdir()] == [digest]


def test_an_unknown_folder_or_id_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match="'no/such' at revision 'main' is neither a folder here nor a model"):
        read_files(ModelConfig(model="no/such", revision="main"), None)
