"""The small files of a checkpoint that a frontend needs: tokenizer, chat template, generation config.

A daemon sends them to frontends that do not have its checkpoint. A frontend caches them in a folder named by their
digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from .config import ModelConfig
from .errors import InvalidArgumentError, ModelNotFoundError, ProtocolError

PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.model.v*",
    "tekken.json",
    "*.jinja",
    "chat_template.json",
    "chat_templates/*.jinja",
)
GENERATION = "generation_config.json"
MODEL_PATTERNS = ("config.json", GENERATION)
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.model.v*", "*.txt", "*.tiktoken", "*.py"]
_WEIGHT_INDEXES = ["*.index.json"]


def checkpoint_folder(name: str, revision: str | None, download_dir: str | None) -> Path:
    """The folder with a checkpoint's config and tokenizer files. For a hub id only these files are downloaded.

    Raises:
        ModelNotFoundError: no such folder, no such id, or no way to reach the hub.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_SMALL_FILES,
            ignore_patterns=_WEIGHT_INDEXES,
        )
    except (OSError, ValueError, RuntimeError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"{name!r}{at} is neither a folder here nor a model that the Hugging Face hub gave us "
            f"({type(error).__name__}): check the spelling and the network, log in if it is gated, or give a folder"
        ) from error
    return Path(found)


def read_files(model: ModelConfig, download_dir: str | None) -> dict[str, bytes]:
    """The files that a frontend of this model needs: name → content.

    Raises:
        ModelNotFoundError, InvalidArgumentError: as `checkpoint_folder` and `generation_folder`.
    """
    folder = checkpoint_folder(str(model.model), model.revision, download_dir)
    tokenizer = folder
    if model.tokenizer is not None:
        tokenizer = checkpoint_folder(model.tokenizer, model.tokenizer_revision, download_dir)
    found = {}
    for place, patterns in ((folder, MODEL_PATTERNS), (tokenizer, PATTERNS)):
        for path in sorted(path for pattern in patterns for path in place.glob(pattern) if path.is_file()):
            found[path.relative_to(place).as_posix()] = path.read_bytes()
    if model.generation_config not in ("auto", "none"):
        place = generation_folder(model.generation_config)
        found.pop(GENERATION, None)
        if (path := place / GENERATION).is_file():
            found[GENERATION] = path.read_bytes()
    return found


def generation_folder(given: str) -> Path:
    """The folder that `generation_config` names.

    Raises:
        InvalidArgumentError: there is none.
    """
    if not (folder := Path(given).expanduser()).is_dir():
        raise InvalidArgumentError(f"generation_config is {given!r}; it must be 'auto', 'none' or a folder")
    return folder


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw  # the part that every tokenizer.json has


def check_tokenizer(files: Mapping[str, bytes]) -> None:
    """Check that tokenizer.json, if there is one, is complete. It is parsed but not kept, which takes a fraction of the
    time and memory of reading it as a tokenizer.

    Raises:
        ModelNotFoundError: it is truncated, empty, or something else.
    """
    try:
        msgspec.json.decode(files.get("tokenizer.json", b'{"model": null}'), type=_TokenizerFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelNotFoundError(
            f"the checkpoint's tokenizer.json can't be read ({error}): get the file again, or set "
            "skip_tokenizer_init=True and use token ids"
        ) from None


def digest_of(files: Mapping[str, bytes]) -> str:
    """BLAKE2b-128 over names and contents, each with its length before it, in order of the names."""
    from hashlib import blake2b  # imported here, because the import is slow and few frontends need it

    digest = blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def cached_folder(digest: str, fetch: Callable[[], Mapping[str, bytes]]) -> Path:
    """The cache folder with the files of this digest. If it does not exist, `fetch` gets the files.

    Raises:
        ModelNotFoundError: the core has no such files.
        ProtocolError: the fetched files have another digest.
    """
    if not digest:
        raise ModelNotFoundError(
            "the core has no tokenizer files to give; give tokenizer=FOLDER, or set skip_tokenizer_init=True and use "
            "token ids"
        )
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mainspring", "tokenizers")
    if not digest.isalnum():
        raise ProtocolError(f"the core named its tokenizer files {digest!r}, which is no digest")
    folder = base / digest
    if folder.is_dir():
        return folder
    import tempfile

    files = fetch()
    if digest_of(files) != digest:
        raise ProtocolError(f"the core sent other tokenizer files than those of digest {digest}")
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as place:
        for name, content in files.items():
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                raise ProtocolError(f"the core sent a tokenizer file named {name!r}")
            Path(place, name).parent.mkdir(parents=True, exist_ok=True)
            Path(place, name).write_bytes(content)
        try:
            os.rename(place, folder)
        except OSError:
            if not folder.is_dir():  # else another frontend was first
                raise
    return folder
