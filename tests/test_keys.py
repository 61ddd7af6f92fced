"""CURVE keys in files, and the list of allowed keys."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from mainspring.ipc.errors import InvalidArgumentError
from mainspring.ipc.keys import (
    AllowedKey,
    KeyPair,
    append_allowed,
    client_keys,
    config_folder,
    load_allowed,
    load_keypair,
    load_public,
    new_keypair,
)

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
KEY = "k" * 40


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_pair_is_two_files_of_which_only_the_public_one_is_for_others(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "laptop.key"
    pair = new_keypair(path)
    assert (mode(path.parent), mode(path), mode(path.with_suffix(".pub"))) == (0o700, 0o600, 0o644)
    assert load_keypair(path) == pair
    assert load_public(str(path.with_suffix(".pub"))) == (pair.public, "laptop")
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public


def test_public_keys_begin_with_a_letter_or_digit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other first characters would be read as comments or options."""
    pairs = [zmq.curve_keypair() for _ in range(1000)]
    good = next(pair for pair in pairs if pair[0][:1].isalnum())
    drawn = iter([next(pair for pair in pairs if not pair[0][:1].isalnum()), good])
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(drawn))
    assert new_keypair(tmp_path / "a.key") == KeyPair(good[0].decode(), good[1].decode())


@pytest.mark.parametrize("there", ["a.key", "a.pub"])
def test_no_key_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(InvalidArgumentError, match=f"{there} is there already"):
        new_keypair(tmp_path / "a.key")
    assert (tmp_path / there).read_text() == "precious"


def test_a_public_key_in_place_of_the_secret_one_says_so(tmp_path: Path) -> None:
    new_keypair(tmp_path / "a.key")
    with pytest.raises(InvalidArgumentError, match=r"a\.pub holds no secret key.*give the file NAME\.key"):
        load_keypair(tmp_path / "a.pub")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o610])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    new_keypair(path := tmp_path / "a.key")
    path.chmod(bits)
    with pytest.raises(InvalidArgumentError, match="chmod 600"):
        load_keypair(path)


@pytest.mark.parametrize(
    ("text", "words"), [("", "no secret key"), ("short", "no secret key"), (None, "can't be read")]
)
def test_a_file_without_a_secret_key_says_so(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "a.key"
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    with pytest.raises(InvalidArgumentError, match=words):
        load_keypair(path)


def test_a_public_key_is_given_as_text_or_as_a_file_but_a_secret_is_not_taken_for_one(tmp_path: Path) -> None:
    assert load_public(KEY) == (KEY, "")
    new_keypair(path := tmp_path / "a.key")
    with pytest.raises(InvalidArgumentError, match=r"give the \.pub file"):
        load_public(str(path))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InvalidArgumentError, match="no public key"):
        load_public(str(tmp_path / "text"))
    with pytest.raises(InvalidArgumentError, match="give a public key or its file"):
        load_public("nonsense")


def test_a_list_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    odd = "#" + "x" * 39
    path.write_text(f"# who may come in\n#\n#{KEY} gone\n\n{KEY} laptop\n{'b' * 40}  ops weight=2.5 admin\n{odd} odd\n")
    assert load_allowed(path) == {
        KEY: AllowedKey("laptop"),
        "b" * 40: AllowedKey("ops", 2.5, True),
        odd: AllowedKey("odd"),
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("short name", "'short' is no public key"),
        (KEY, "a name must follow"),
        (f"{KEY} weight=2", "a name must follow"),
        (f"{KEY} name weight=0", "'weight=0'"),
        (f"{KEY} name weight=nan", "'weight=nan'"),
        (f"{KEY} name weight=inf", "'weight=inf'"),
        (f"{KEY} name weight=much", "'weight=much'"),
        (f"{KEY} name Admin", "'Admin' is neither"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"# a comment\n{line}\n")
    with pytest.raises(InvalidArgumentError, match="line 2") as caught:
        load_allowed(path)
    assert words in str(caught.value)


@given(
    st.dictionaries(
        st.text(Z85, min_size=40, max_size=40),
        st.builds(
            AllowedKey,
            st.from_regex(r"[a-zA-Z0-9_.@#-]{1,20}", fullmatch=True),
            st.sampled_from([1.0, 0.25, 2.5, 1e6]),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_appended_allowed_keys_are_read_back(keys: dict[str, AllowedKey]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "allowed"
        path.write_text("# no newline at the end of this line")
        for key, allowed in keys.items():
            append_allowed(path, key, allowed)
        assert load_allowed(path) == keys


def test_a_key_is_listed_once_and_under_one_word(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "allowed"
    append_allowed(path, KEY, AllowedKey("laptop"))
    assert mode(path) == 0o644
    before = path.read_text()
    for key, allowed, words in [
        (KEY, AllowedKey("other"), "lists this key already, as 'laptop'"),
        ("b" * 40, AllowedKey("two words"), "'two words'"),
        ("b" * 40, AllowedKey("x", -1.0), "weight=-1"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            append_allowed(path, key, allowed)
    assert path.read_text() == before


def test_keys_live_in_the_configuration_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere")
    assert config_folder() == Path("/somewhere/mainspring")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert config_folder() == Path.home() / ".config" / "mainspring"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match=r"file/a\.key can't be written"):
        new_keypair(file / "a.key")
    with pytest.raises(InvalidArgumentError, match="file/allowed can't be written"):
        append_allowed(file / "allowed", KEY, AllowedKey("laptop"))


def test_a_client_needs_its_own_pair_and_the_servers_public_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert client_keys(None, None) is None
    with pytest.raises(InvalidArgumentError, match=r"can't be read.*mainspring keys new"):
        client_keys(None, KEY)
    own = new_keypair(config_folder() / "mainspring.key")
    other = new_keypair(tmp_path / "other.key")
    assert client_keys(None, KEY) == (*own, KEY)
    assert client_keys(str(tmp_path / "other.key"), str(config_folder() / "mainspring.pub")) == (*other, own.public)
    with pytest.raises(InvalidArgumentError, match="without server_key"):
        client_keys(str(tmp_path / "other.key"), None)
