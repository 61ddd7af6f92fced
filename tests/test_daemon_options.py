"""Options of a daemon from flags and from a TOML file, the addresses that follow from them, and access rights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from mainspring.engine.args import EngineArgs
from mainspring.ipc.config import EngineConfig
from mainspring.ipc.errors import AddressInUseError, InvalidArgumentError, MainspringError, UnknownArgumentError
from mainspring.ipc.keys import AllowedKey, append_allowed, new_keypair
from mainspring.ipc.transport import Endpoints
from mainspring.serve import daemon_options
from mainspring.serve.daemon import endpoints_of
from mainspring.serve.daemon_options import OPTIONS, DaemonOptions

TCP = "tcp://127.0.0.1:5555"


def read(*arguments: str) -> tuple[DaemonOptions, EngineConfig]:
    parser = argparse.ArgumentParser()
    daemon_options.add_cli_args(parser)
    return daemon_options.from_cli_args(parser.parse_args(arguments))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "daemon.toml"


def test_without_anything_there_are_limits_on_requests_only() -> None:
    options, config = read()
    assert options == DaemonOptions()
    limits = config.scheduler_config
    assert (limits.max_requests_in_flight, limits.max_requests_per_frontend) == (65_536, 16_384)
    assert config.model_config.max_logprobs == 20
    assert (limits.max_tokens_in_flight, limits.max_tokens_per_frontend) == (None, None)


def test_a_file_and_flags_give_the_same_options(file: Path) -> None:
    file.write_text('listen = "ipc:///run/x.sock"\nhttp_port = 0\nmax_num_seqs = 8\nhf_overrides = { a = 1 }\n')
    by_flags = read("--listen=ipc:///run/x.sock", "--http-port=0", "--max-num-seqs=8", '--hf-overrides={"a": 1}')
    assert read("--config", str(file)) == by_flags
    assert by_flags[0].listen == "ipc:///run/x.sock"
    assert by_flags[1].scheduler_config.max_num_seqs == 8


def test_a_file_may_have_a_table_for_each_section(file: Path) -> None:
    file.write_text("[daemon]\ndrain_timeout = 5\n[scheduler_config]\nmax_num_seqs = 8\n[cache_config]\nblock_size = 8")
    assert read("--config", str(file)) == read("--drain-timeout=5", "--max-num-seqs=8", "--block-size=8")


def test_flags_win_over_the_file_and_the_file_over_defaults(file: Path) -> None:
    file.write_text("insecure = true\nmax_num_seqs = 8\nblock_size = 32\nmax_requests_in_flight = 5\n")
    options, config = read("--config", str(file), "--max-num-seqs=9", "--no-insecure")
    assert not options.insecure
    assert config.scheduler_config.max_num_seqs == 9
    assert config.cache_config.block_size == 32
    assert config.scheduler_config.max_requests_in_flight == 5


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("max_num_seq = 8", UnknownArgumentError, "did you mean 'max_num_seqs'?"),
        ("[scheduler]\nmax_num_seqs = 8", UnknownArgumentError, "did you mean 'scheduler_config'?"),
        ("[scheduler_config]\nlisten = 'x'", UnknownArgumentError, "[scheduler_config] in"),
        ("[daemon]\nlissen = 'x'", UnknownArgumentError, "did you mean 'listen'?"),
        ("max_num_seqs = 8\n[scheduler_config]\nmax_num_seqs = 9", InvalidArgumentError, "sets max_num_seqs twice"),
        ("daemon = 3", InvalidArgumentError, "daemon is 3; it must be a table"),
        ("max_num_seqs = 'many'", InvalidArgumentError, "max_num_seqs is 'many'; it must be an int"),
        ("max_num_seqs = 0", InvalidArgumentError, "max_num_seqs is 0"),
        ("insecure = 1", InvalidArgumentError, "insecure is 1; it must be True or False"),
        ("log_format = 'xml'", InvalidArgumentError, "log_format is 'xml'; it must be one of 'text', 'json'"),
        ("http_port = 70000", InvalidArgumentError, "http_port is 70000"),
        ("drain_timeout = -1", InvalidArgumentError, "drain_timeout is -1"),
        ("drain_timeout = inf", InvalidArgumentError, "drain_timeout is inf"),
        ("listen = ", InvalidArgumentError, "is not TOML"),
        ("num_gpu_blocks = 3", UnknownArgumentError, "num_gpu_blocks"),
    ],
)
def test_an_error_in_a_file_is_named(file: Path, text: str, error: type[MainspringError], words: str) -> None:
    file.write_text(text)
    with pytest.raises(error) as caught:
        read("--config", str(file))
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no\.toml, which can't be read: No such file"):
        read("--config", str(tmp_path / "no.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match=r"binary\.toml, which is not TOML"):
        read("--config", str(tmp_path / "binary.toml"))


def test_a_flag_names_no_field_of_the_engine_again() -> None:
    assert not OPTIONS.keys() & EngineArgs.__dataclass_fields__.keys()


# ---------------------------------------------------------------------- where to listen


def endpoints(**options: Any) -> Endpoints:
    return endpoints_of(DaemonOptions(**options))


def test_the_default_is_a_folder_that_only_this_user_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "mainspring"
    assert endpoints() == Endpoints(f"ipc://{folder}/core.sock", f"ipc://{folder}/admin.sock")
    folder.chmod(0o755)
    with pytest.raises(AddressInUseError, match="only you can enter"):
        endpoints()


def test_the_admin_socket_lies_beside_the_other() -> None:
    assert endpoints(listen="ipc:///x/y").admin_address == "ipc:///x/y.admin"
    assert endpoints(listen="ipc:///x/y", admin_listen="ipc:///z").admin_address == "ipc:///z"


def test_an_address_is_the_same_wherever_it_is_used_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert endpoints(listen="ipc://x") == Endpoints(f"ipc://{tmp_path}/x", f"ipc://{tmp_path}/x.admin")
    assert endpoints(listen="ipc://~/x").address == "ipc:///home/me/x"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen": "/run/x.sock"}, "it must be ipc://PATH or tcp://HOST:PORT"),
        ({"listen": "http://localhost:80"}, "it must be ipc://PATH or tcp://HOST:PORT"),
        ({"listen": "tcp://localhost"}, "it must be ipc://PATH or tcp://HOST:PORT"),
        ({"listen": "ipc:///" + "x" * 107}, "the limit is 107"),
        ({"listen": "ipc:///" + "x" * 104}, "the limit is 107"),  # with .admin appended
        ({"listen": TCP, "insecure": True, "admin_listen": "ipc:///x"}, "admin_listen is ipc:///x"),
    ],
)
def test_an_address_that_is_none_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AddressInUseError) as caught:
        endpoints(**options)
    assert words in str(caught.value)


def test_tcp_needs_keys_and_a_list_unless_insecure_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"anybody could come in.*mainspring keys new.*--insecure"):
        endpoints(listen=TCP)
    assert endpoints(listen=TCP, insecure=True) == Endpoints(TCP)
    pair = new_keypair(tmp_path / "daemon.key")
    key = str(tmp_path / "daemon.key")
    with pytest.raises(InvalidArgumentError, match="mainspring keys allow"):
        endpoints(listen=TCP, key=key)
    listed = tmp_path / "mainspring" / "allowed_keys"
    append_allowed(listed, pair.public, AllowedKey("me"))
    assert endpoints(listen=TCP, key=key) == Endpoints(TCP, "", pair.secret, str(listed))
    with pytest.raises(InvalidArgumentError, match="insecure is set beside key"):
        endpoints(listen=TCP, key=key, insecure=True)
    listed.write_text("nonsense")
    with pytest.raises(InvalidArgumentError, match="line 1"):
        endpoints(listen=TCP, key=key)


@pytest.mark.parametrize("name", ["key", "allowed_keys", "insecure"])
def test_options_for_tcp_are_refused_with_a_unix_socket(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is for tcp"):
        endpoints(listen="ipc:///x", **{name: True if name == "insecure" else "file"})
