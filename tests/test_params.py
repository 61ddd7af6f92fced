"""SamplingParams of a request and EngineArgs of an engine. A wrong value gives one sentence that names it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing

import pytest

from mainspring import EngineArgs, RequestOutputKind, SamplingParams
from mainspring.demo import MODEL_PATH
from mainspring.engine.text.model_files import default_sampling_params, eos_token_ids, generation_config
from mainspring.ipc import config
from mainspring.ipc.errors import InvalidArgumentError, ModelNotFoundError, NotSupportedError, UnknownArgumentError

SETTABLE = [field for field in config.fields() if not field.set_by_core]


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "from 1 to"),
        ("n", 1.5, "an int"),
        ("n", True, "an int"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at least 0"),
        ("temperature", "hot", "a number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_k", -2, "from -1 to"),
        ("min_p", 1.5, "at least 0 and at most 1"),
        ("seed", 2**63, "from"),
        ("max_tokens", 0, "1"),
        ("min_tokens", -1, "0"),
        ("stop", [""], "non-empty"),
        ("stop", 3, "list"),
        ("stop_token_ids", [-1], "0"),
        ("stop_token_ids", ["a"], "an int"),
        ("ignore_eos", 1, "True or False"),
        ("output_kind", "delta", "RequestOutputKind"),
        ("cache_salt", "", "non-empty"),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name_value_and_limit(
    field: str, value: object, limit: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        SamplingParams(**{field: value})
    assert limit in str(caught.value)


def test_contradictions_between_sampling_values_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="min_tokens is 5 but max_tokens is only 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidArgumentError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_sampling_parameter_names_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_sampling_defaults_are_those_of_vllm_and_copies_are_deep() -> None:
    params = SamplingParams(stop="a")
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    copy = params.clone()
    assert copy == params
    assert copy.stop is not params.stop


def test_engine_args_are_the_settable_fields_of_the_configuration() -> None:
    hints = typing.get_type_hints(EngineArgs)
    assert [field.name for field in dataclasses.fields(EngineArgs)] == [field.name for field in SETTABLE]
    args = EngineArgs()
    for field in SETTABLE:
        nested = not field.section
        expected = field.type | dict[str, typing.Any] if nested else field.type
        if field.name == "logits_processors":  # a class travels as its name
            expected = list[str | type]
        assert hints[field.name] == expected, field.name
        assert getattr(args, field.name) == field.default, field.name


def test_engine_args_land_in_the_section_that_owns_the_field() -> None:
    made = EngineArgs(max_num_seqs=3, block_size=32, dtype="float32").create_engine_config()
    assert made.scheduler_config.max_num_seqs == 3
    assert made.cache_config.block_size == 32
    assert made.model_config.dtype == "float32"
    assert made.cache_config.num_gpu_blocks is None


def test_no_model_means_the_embedded_one_and_a_folder_becomes_absolute(
    tmp_path: typing.Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EngineArgs().create_engine_config().model_config.model == str(MODEL_PATH)
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    assert EngineArgs("checkpoint").create_engine_config().model_config.model == str(tmp_path / "checkpoint")
    assert EngineArgs("org/name").create_engine_config().model_config.model == "org/name"


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder") as caught:
        EngineArgs(name).create_engine_config()
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_num_batched_tokens": 0}, InvalidArgumentError, "max_num_batched_tokens is 0; it must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, InvalidArgumentError, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": 0.0}, InvalidArgumentError, "above 0"),
        ({"block_size": 7}, InvalidArgumentError, "block_size is 7; it must be one of 8, 16, 32, 64"),
        ({"dtype": "int4"}, InvalidArgumentError, "'bfloat16'"),
        ({"max_num_seqs": "many"}, InvalidArgumentError, "max_num_seqs is 'many'; it must be an int"),
        ({"enable_prefix_caching": 1}, InvalidArgumentError, "True or False"),
        ({"max_model_len": 1.5}, InvalidArgumentError, "an int or None"),
        ({"pipeline_parallel_size": 17}, InvalidArgumentError, "pipeline_parallel_size is 17; it may be at most 16"),
        ({"pipeline_parallel_size": 2, "cpu_offload_gb": 1.0}, NotSupportedError, "does not go with cpu_offload_gb"),
        ({"tensor_parallel_size": 2, "cpu_offload_gb": 1.0}, NotSupportedError, "only with one rank"),
        (
            {"distributed_executor_backend": "roy"},
            NotSupportedError,
            "'uni' and 'mp' and 'ray' and 'external_launcher'",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 128},
            InvalidArgumentError,
            "max_num_batched_tokens is 64, less than max_model_len, 128",
        ),
    ],
)
def test_a_wrong_engine_argument_is_one_sentence(
    arguments: dict[str, typing.Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        EngineArgs(**arguments).create_engine_config()
    assert words in str(caught.value)


def test_an_unknown_engine_argument_names_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match="did you mean 'max_model_len'"):
        EngineArgs(max_model_length=5)  # type: ignore[call-arg]


def test_every_engine_argument_has_a_flag_that_sets_it() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = [
        "--model=m", "--no-enable-prefix-caching", "--block-size=32", "--max-model-len=9",
        '--hf-overrides={"a": 1}', "--gpu-memory-utilization=0.5", "--scheduling-policy=priority",
    ]  # fmt: skip
    args = EngineArgs.from_cli_args(parser.parse_args(given))
    assert args == EngineArgs(
        "m", enable_prefix_caching=False, block_size=32, max_model_len=9, hf_overrides={"a": 1},
        gpu_memory_utilization=0.5, scheduling_policy="priority",
    )  # fmt: skip
    flags = {action.dest for action in parser._actions}
    assert flags >= {field.name for field in SETTABLE}
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()


def test_default_sampling_params_come_from_the_generation_config() -> None:
    found = default_sampling_params({"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True})
    assert (found.temperature, found.top_k, found.max_tokens, found.top_p) == (0.6, 20, 99, 1.0)
    assert default_sampling_params({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert default_sampling_params({}) == SamplingParams()


def test_generation_config_can_be_taken_from_elsewhere_overridden_or_left_out(tmp_path: typing.Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "top_p": 0.5}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"eos_token_id": 9}')
    model = EngineArgs(str(tmp_path), override_generation_config={"top_p": 0.7}).create_engine_config().model_config
    assert generation_config(tmp_path, model) == {"eos_token_id": [3, 4], "top_p": 0.7}
    model = EngineArgs(generation_config="none").create_engine_config().model_config
    assert generation_config(tmp_path, model) == {}
    model = EngineArgs(generation_config=str(tmp_path / "other")).create_engine_config().model_config
    assert eos_token_ids(generation_config(tmp_path, model)) == [9]
    model = EngineArgs(generation_config="somewhere").create_engine_config().model_config
    with pytest.raises(InvalidArgumentError, match="generation_config is 'somewhere'"):
        generation_config(tmp_path, model)
