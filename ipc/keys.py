"""CURVE keys in files: a pair for each side, and the list of allowed keys. A key has 40 characters in Z85.

`NAME.key` holds a secret key, which only its owner may read; `NAME.pub` the public one and the name. Each line of the
allow-list is ``PUBLICKEY name [weight=2.5] [admin]``; a line that begins with ``#`` and is no key is a comment.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO, cast

import zmq

from .errors import InvalidArgumentError

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_OTHERS = 0o077
DEFAULT_KEY = "mainspring.key"


class KeyPair(NamedTuple):
    public: str
    secret: str


class AllowedKey(NamedTuple):
    """The name and rights of the owner of a listed key."""

    name: str
    weight: float = 1.0  # most that its frontends may ask for
    admin: bool = False


def config_folder() -> Path:
    """The folder of the keys: mainspring/ in `XDG_CONFIG_HOME`, else in ~/.config."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mainspring"


def default_allowed() -> Path:
    return config_folder() / "allowed_keys"


def new_keypair(path: Path) -> KeyPair:
    """Make a pair. Writes the secret key to `path`, and the public key beside it with the suffix .pub.

    Raises:
        InvalidArgumentError: one of the files is there already, or can't be written.
    """
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if public[0].isalnum():  # neither a comment nor an option where it begins a line or an argument
            break
    pub = path.with_suffix(".pub")
    for there in (pub, path):
        if there.exists():
            raise InvalidArgumentError(f"{there} is there already; give the new key another name")
    for file, text, mode in ((path, secret, 0o600), (pub, f"{public} {path.stem}", 0o644)):
        with _writing(file, "x", mode) as stream:
            stream.write(text + "\n")
    return KeyPair(public, secret)


def load_keypair(path: str | Path) -> KeyPair:
    """The pair whose secret key is in the file `path`.

    Raises:
        InvalidArgumentError: it can't be read, others can read it, or it holds no key.
    """
    secret = _read(path, "make one with `mainspring keys new`").strip()
    if not _KEY.fullmatch(secret):
        raise InvalidArgumentError(f"{path} holds no secret key, which is 40 characters; give the file NAME.key")
    if Path(path).stat().st_mode & _OTHERS:
        raise InvalidArgumentError(f"{path} holds a secret that others can read; run `chmod 600 {path}`")
    return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


def load_public(key_or_path: str) -> tuple[str, str]:
    """A public key and its owner's name, from a file or from the key itself, which has no name: "".

    Raises:
        InvalidArgumentError: it is neither a key nor a file that begins with one.
    """
    path = Path(key_or_path).expanduser()
    if _KEY.fullmatch(key_or_path) and not path.is_file():
        return key_or_path, ""
    key, _, name = _read(path, "give a public key or its file").strip().partition(" ")
    if path.stat().st_mode & _OTHERS == 0 and not name:
        raise InvalidArgumentError(f"{path} looks like a secret key; give the .pub file beside it")
    if not _KEY.fullmatch(key):
        raise InvalidArgumentError(f"{path} holds no public key, which has 40 characters")
    return key, name.strip()


def client_keys(key: str | None, server_key: str | None) -> tuple[str, str, str] | None:
    """Own public key, own secret key and the server's public key; None for a connection without keys.

    Args:
        key: path of the own secret key; None: the default name of `mainspring keys new`.
        server_key: the server's public key, or its path.

    Raises:
        InvalidArgumentError: a key can't be read, or the server's is missing.
    """
    if server_key is None:
        if key is not None:
            raise InvalidArgumentError("key is given without server_key; give the daemon's public key, too")
        return None
    return *load_keypair(key or config_folder() / DEFAULT_KEY), load_public(server_key)[0]


def load_allowed(path: str | Path) -> dict[str, AllowedKey]:
    """Read the list of allowed keys: public key → name and rights of its owner.

    Raises:
        InvalidArgumentError: the file can't be read, or one of its lines can't be understood.
    """
    found = {}
    for number, line in enumerate(_read(path, "make it with `mainspring keys allow`").splitlines(), 1):
        key, *rest = line.split() or ["#"]
        if _KEY.fullmatch(key):
            found[key] = _allowed(rest, f"{path}, line {number}")
        elif not key.startswith("#"):
            raise InvalidArgumentError(f"{path}, line {number}: {key!r} is no public key, which has 40 characters")
    return found


def append_allowed(path: Path, key: str, allowed: AllowedKey) -> None:
    """Add a key to the list. It is allowed from the next connection on.

    Raises:
        InvalidArgumentError: the key is listed already, the name or weight is wrong, or the file can't be written.
    """
    words = [allowed.name, *([f"weight={allowed.weight:g}"] if allowed.weight != 1 else []), *["admin"] * allowed.admin]
    if not re.fullmatch(r"[^\s=]+", allowed.name):
        raise InvalidArgumentError(f"name is {allowed.name!r}; it must be one word without =")
    _allowed(words, f"key {key}")
    if path.exists() and (there := load_allowed(path).get(key)):
        raise InvalidArgumentError(f"{path} lists this key already, as {there.name!r}; change it there")
    with _writing(path, "a", 0o644) as file:
        ends = not file.tell() or path.read_bytes().endswith(b"\n")
        file.write(("" if ends else "\n") + " ".join([key, *words]) + "\n")


def _allowed(words: list[str], where: str) -> AllowedKey:
    if not words or "=" in words[0]:
        raise InvalidArgumentError(f"{where}: a name must follow the key")
    allowed = AllowedKey(words[0])
    for word in words[1:]:
        option, _, value = word.partition("=")
        if word == "admin":
            allowed = allowed._replace(admin=True)
        elif option == "weight" and (weight := _number(value)) > 0:
            allowed = allowed._replace(weight=weight)
        else:
            raise InvalidArgumentError(f"{where}: {word!r} is neither `admin` nor a `weight=` above 0")
    return allowed


def _number(text: str) -> float:
    """The number; 0 if the text is no finite number."""
    try:
        return value if math.isfinite(value := float(text)) else 0.0
    except ValueError:
        return 0.0


def _read(path: str | Path, remedy: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidArgumentError(f"{path} can't be read: {why}; {remedy}") from None


@contextlib.contextmanager
def _writing(path: Path, how: str, mode: int) -> Iterator[TextIO]:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, how, opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield cast(TextIO, file)
    except OSError as error:
        raise InvalidArgumentError(f"{path} can't be written: {error.strerror}") from None
