"""vLLM's names: which are offered, how the others are refused, and the command that runs a script with them."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mainspring
import mainspring.compat.vllm as vllm
import pooled
import tiny
from mainspring import EngineArgs, InvalidArgumentError, NotSupportedError, SamplingParams, UnknownArgumentError
from mainspring.cli.main import main
from mainspring.compat.engine_fields import (
    DEFAULT_ONLY,
    IGNORED,
    KNOWN,
    MAPPED,
    RENAMED,
    RESTRICTED,
    VALUES,
    WITHOUT_EFFECT,
    ProfilerConfig,
)
from mainspring.compat.missing import ARGUMENTS, MISSING
from mainspring.compat.vllm.finder import Finder
from mainspring.compat.vllm.helpers import FlexibleArgumentParser, Platform, get_ip, get_open_port, print_embeddings
from mainspring.compat.vllm.names import PLACES, refusal
from mainspring.compat.vllm.without_accelerator import WithoutAccelerator
from mainspring.engine.args import FIELDS, dashed
from mainspring.ipc.errors import MissingNameError

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import vllm_names

NAMES = [(module, name) for module, names in PLACES.items() for name in names]


def run(script: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    command = [sys.executable, "-P", "-m", "mainspring.compat.vllm", *options]
    return subprocess.run([*command, str(script), "--max_tokens", "3"], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_each_offered_name_is_ours(module: str, name: str) -> None:
    here = importlib.import_module(f"{vllm.__name__}.{module}".rstrip("."))
    ours = getattr(here, name)
    place = PLACES[module][name]
    home = importlib.import_module(f"mainspring.{place.module}".rstrip("."))
    assert ours is getattr(home, place.name)
    assert name in dir(here) or module == ""


def test_the_names_are_attributes_of_the_package_too() -> None:
    assert vllm.LLM is mainspring.LLM
    assert vllm.sampling_params.SamplingParams is SamplingParams
    assert vllm.v1.engine.async_llm.AsyncLLM is mainspring.AsyncLLM
    from mainspring.compat.vllm.lora.request import LoRARequest

    assert LoRARequest is mainspring.LoRARequest


def test_a_missing_name_is_refused_as_guards_expect_it() -> None:
    assert not hasattr(vllm, "ModelRegistry")
    assert not hasattr(vllm.config, "KVTransferConfig")
    with pytest.raises(NotSupportedError, match=r"vllm\.ModelRegistry has no counterpart.*AutoModel"):
        _ = vllm.ModelRegistry
    with pytest.raises(NotSupportedError, match=r"vllm\.config\.KVTransferConfig .*kv_offloading_size") as found:
        from mainspring.compat.vllm.config import KVTransferConfig  # noqa: F401
    assert isinstance(found.value, ImportError)
    with pytest.raises(ImportError, match=r"vllm\.assets has no counterpart.*of your own"):
        importlib.import_module("mainspring.compat.vllm.assets.image")


def test_a_refusal_gives_the_reason_of_the_nearest_module() -> None:
    assert "KV connectors" in refusal("distributed.kv_transfer.kv_connector.v1")
    assert "several devices" in refusal("distributed.utils")
    assert refusal("nothing.at.all") == "vllm.nothing.at.all has no counterpart in Mainspring"


def test_the_finder_leaves_other_modules_alone() -> None:
    finder = Finder("vllm")
    assert finder.find_spec("vllm_other") is None
    assert finder.find_spec("torch") is None
    assert finder.find_spec("vllm") is not None
    assert importlib.util.find_spec("vllm") is None, "importing the package installs nothing under vllm's own name"


@pytest.mark.parametrize("there", [False, True])
def test_an_accelerators_cache_may_be_emptied_where_there_is_none(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    emptied: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: bool(emptied.append(True)))
    spec = WithoutAccelerator().find_spec("torch.accelerator.memory", torch.accelerator.__path__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.empty_cache()
    assert emptied == [True] * there
    assert WithoutAccelerator().find_spec("torch.accelerator") is None


def test_a_script_runs_with_our_names_and_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("HERE = 1\n")
    text = """
import sys
import vllm, neighbour
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.multimodal.utils import fetch_image
except ImportError as error:
    print(type(error).__mro__[1].__name__)
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.add_argument("--max-tokens", type=int)
args = parser.parse_args()
print(__name__, LLM.__module__, args.max_tokens, args.max_num_seqs, neighbour.HERE, "torch" in sys.modules)
"""
    done = run(tmp_path / "script.py", text)
    assert done.stdout == "NotSupportedError\n__main__ mainspring.engine.llm 3 256 1 False\n", done.stderr


def test_vectors_are_tensors_in_scripts(tmp_path: Path) -> None:
    text = f"""
from vllm import LLM
llm = LLM({str(pooled.make("bert", tmp_path / "model"))!r}, skip_tokenizer_init=True)
(found,) = llm.encode([[5, 6, 7]], pooling_task="token_embed", use_tqdm=False)
print(type(found.outputs.data).__name__, found.outputs.data.argmax(dim=-1).shape)
print(len(llm.embed([[5, 6, 7]], use_tqdm=False)[0].outputs.embedding))
print(llm.score([5, 6, 7], [5, 6, 7], use_tqdm=False)[0].outputs.score > 0.999)
"""
    done = run(tmp_path / "script.py", text)
    assert done.stdout == "Tensor torch.Size([3])\n64\nTrue\n", done.stderr


def test_an_installed_vllm_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("LLM = 'the installed one'\n")
    script = "from vllm import LLM\nprint(LLM)\n"
    refused = run(tmp_path / "script.py", script)
    assert refused.returncode == 2
    assert "--replace" in refused.stderr
    assert run(tmp_path / "script.py", script, "--replace").stdout == f"{mainspring.LLM}\n"


def test_names_on_the_hub_are_local_folders(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.make_tokenizer(model)
    table = tmp_path / "models.json"
    table.write_text(json.dumps({"somebody/some-model": str(model)}))
    text = """
from huggingface_hub import snapshot_download
from mainspring.ipc.tokenizer_files import checkpoint_folder
print(sorted(path.name for path in checkpoint_folder("somebody/some-model", None, None).iterdir())[0])
try:
    snapshot_download("somebody/other")
except Exception as error:
    print(type(error).__name__)
"""
    done = run(tmp_path / "script.py", text, "--models", str(table))
    assert done.stdout.split() == ["tokenizer.json", "LocalEntryNotFoundError"], done.stderr
    table.write_text(json.dumps({"somebody/some-model": str(tmp_path / "nothing")}))
    assert "no such folder" in run(tmp_path / "script.py", text, "--models", str(table)).stderr


def test_the_argument_parser_takes_underscores_and_fills_in_fields() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--some-text", default="-")
    args = parser.parse_args(["--max_model_len", "32", "--some_text=a_b"])
    assert (args.max_model_len, args.some_text, args.max_num_seqs) == (32, "a_b", EngineArgs().max_num_seqs)
    assert EngineArgs(**{k: v for k, v in vars(args).items() if k != "some_text"}).max_model_len == 32


def test_helpers(capsys: pytest.CaptureFixture[str]) -> None:
    print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0])
    print_embeddings([1.0], "Reward")
    assert capsys.readouterr().out == "Embeddings: [1.0, 2.0, 3.0, 4.0, ...] (size=5)\nReward: [1.0] (size=1)\n"
    assert 0 < get_open_port() < 65_536
    assert get_ip().count(".") == 3


def test_the_platform_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform()
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert (platform.is_cuda_alike(), platform.is_cuda(), platform.is_cpu()) == (there, there, not there)
    assert not platform.is_rocm()
    platform.empty_cache()


# ---------------------------------------------------------------------- fields of EngineArgs


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_fields_without_effect_are_accepted(name: str) -> None:
    assert EngineArgs(**{name: object()}) == EngineArgs()


@pytest.mark.parametrize("name", sorted(RESTRICTED.keys() - FIELDS.keys()))
def test_other_fields_are_accepted_at_their_default(name: str) -> None:
    feature, values = RESTRICTED[name]
    for value in (None, [], *values):
        assert EngineArgs(**{name: value}) == EngineArgs()
    with pytest.raises(NotSupportedError, match=re.escape(f"{name} is 'something', which is not supported ({feature}")):
        EngineArgs(**{name: "something"})


def test_no_field_has_two_rows() -> None:
    tables = [*WITHOUT_EFFECT.values(), *DEFAULT_ONLY.values(), *RENAMED, *MAPPED]
    names = [entry.partition("=")[0] for text in tables for entry in text.split()]
    assert len(names) == len(set(names)) == len(KNOWN)


@pytest.mark.parametrize("name", VALUES)
def test_values_of_vllm_mean_one_of_ours(name: str) -> None:
    for theirs, ours in VALUES[name].items():
        args = EngineArgs(**{name: theirs})
        assert getattr(args, name) == ours
        args.create_engine_config()


def test_a_none_of_vllm_is_our_default() -> None:
    names = "block_size enable_chunked_prefill enable_prefix_caching max_num_batched_tokens max_num_seqs".split()
    assert EngineArgs(**dict.fromkeys(names)) == EngineArgs()  # type: ignore[arg-type]


def test_a_configuration_is_made_with_a_usage_context_as_without() -> None:
    made = EngineArgs().create_engine_config(mainspring.UsageContext.OPENAI_API_SERVER)
    assert made == EngineArgs().create_engine_config()


def test_fields_that_work_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineArgs(compilation_config={"cudagraph_capture_sizes": [4], "mode": 3}).cudagraph_capture_sizes == [4]
    assert EngineArgs(compilation_config=3) == EngineArgs(convert="none") == EngineArgs()
    assert EngineArgs(convert="embed").task == "embed"
    assert EngineArgs(load_format="bitsandbytes").quantization == "bitsandbytes"
    assert EngineArgs(load_format="bitsandbytes", quantization="bitsandbytes").load_format == "auto"
    assert EngineArgs(dtype=type("dtype", (), {"__str__": lambda self: "torch.float16"})()).dtype == "float16"
    assert EngineArgs(served_model_name=["a", "b"]).served_model_name == "a"
    given = {"backend": "xgrammar", "disable_any_whitespace": False, "reasoning_parser": ""}
    assert EngineArgs(structured_outputs_config=given).structured_outputs_config == {}
    with pytest.raises(NotSupportedError, match=r"disable_any_whitespace is True.*StructuredOutputsParams"):
        EngineArgs(structured_outputs_config={"disable_any_whitespace": True})
    with pytest.raises(NotSupportedError, match="convert is 'reward'"):
        EngineArgs(convert="reward")
    monkeypatch.setenv("HF_TOKEN", "before")
    EngineArgs(hf_token=True)
    assert os.environ["HF_TOKEN"] == "before"
    EngineArgs(hf_token="hf_1")
    assert os.environ["HF_TOKEN"] == "hf_1"
    with pytest.raises(NotSupportedError, match="hf_token is False"):
        EngineArgs(hf_token=False)


def test_flags_of_vllm_are_known() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--enable-sleep-mode", "--no-enable_dbo", "--limit-mm-per-prompt", '{"image": 1}', "--convert=embed"]
    args = parser.parse_args(flags)
    assert (args.enable_sleep_mode, args.enable_dbo, args.limit_mm_per_prompt) == (True, False, {"image": 1})
    assert EngineArgs.from_cli_args(args).task == "embed"
    with pytest.raises(NotSupportedError, match="decode_context_parallel_size is 2"):
        EngineArgs.from_cli_args(parser.parse_args(["--decode-context-parallel-size", "2"]))


@pytest.mark.parametrize(
    ("text", "number"),
    [("2048", 2048), ("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("1M", 1 << 20), ("-1", -1)],
)
def test_flags_take_numbers_with_a_unit(text: str, number: int) -> None:
    assert (
        EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args([f"--max-model-len={text}"]).max_model_len
        == number
    )


@pytest.mark.parametrize("text", ["", "k", "1.5K", "16q", "infk"])
def test_other_numbers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args([f"--max-model-len={text}"])
    assert "is not a number like 1024, 16k or 16K" in capsys.readouterr().err


def test_flags_take_vllms_values_and_have_its_short_names() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = "--dtype half --load-format bitsandbytes --attention-backend FLASH_ATTN -tp 2 -dp 3"
    args = EngineArgs.from_cli_args(parser.parse_args([*given.split(), "-pp", "4", "--generation-config=vllm"]))
    assert args == EngineArgs(
        dtype="float16", quantization="bitsandbytes", generation_config="none", tensor_parallel_size=2,
        data_parallel_size=3, pipeline_parallel_size=4,
    )  # fmt: skip
    assert EngineArgs.from_cli_args(parser.parse_args(["-q", "awq_marlin"])).quantization == "awq"
    shown = parser.format_help()
    assert "{auto,float32,bfloat16,float16}" in shown
    assert "half" not in shown
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", "none"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("generate --max-modle-len 3 Hi", "did you mean --max-model-len?"),
        ("generate --enable-sleep-mod Hi", "did you mean --enable-sleep-mode?"),
        ("status --jsno", "did you mean --json?"),
        ("generate --xyzzy Hi", "unrecognized arguments: --xyzzy\n"),
    ],
)
def test_the_nearest_flag_is_suggested(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert said in capsys.readouterr().err


def test_the_command_line_refuses_what_the_fields_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--decode-context-parallel-size", "2", "Hi"]) != 0
    said = "decode_context_parallel_size is 2, which is not supported (several devices)"
    assert said in capsys.readouterr().err
    assert dashed(["--a_b=c_d", "--", "--a_b"]) == ["--a-b=c_d", "--", "--a_b"]


def test_fields_that_have_another_name_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {*RENAMED, *MAPPED} <= KNOWN
    assert EngineArgs(cuda_graph_sizes=[1, 2]).cudagraph_capture_sizes == [1, 2]
    assert EngineArgs(rope_theta=2.0, hf_overrides={"a": 1}).hf_overrides == {"a": 1, "rope_theta": 2.0}
    given: dict[str, Any] = {"spec_method": "ngram", "spec_tokens": 3}
    assert EngineArgs(**given).speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    monkeypatch.setenv("MAINSPRING_PROFILE_DIR", "before")
    EngineArgs(profiler_config=ProfilerConfig("torch", str(tmp_path)))
    assert Path(os.environ["MAINSPRING_PROFILE_DIR"]) == tmp_path
    with pytest.raises(NotSupportedError, match="delay_iterations"):
        EngineArgs(profiler_config={"delay_iterations": 3})
    with pytest.raises(InvalidArgumentError, match="its other name"):
        EngineArgs(cuda_graph_sizes=[1], cudagraph_capture_sizes=[2])


def test_unknown_fields_are_still_unknown() -> None:
    with pytest.raises(UnknownArgumentError, match="did you mean 'tensor_parallel_size'"):
        EngineArgs(tensor_paralel_size=1)
    assert mainspring.AsyncEngineArgs(enable_log_requests=True).enable_log_requests, "a field of this class"


# ---------------------------------------------------------------------- members and arguments of classes


@pytest.mark.parametrize("owner", MISSING)
def test_a_missing_member_says_what_to_do_instead(owner: str) -> None:
    cls: Any = getattr(mainspring, owner)
    one = cls.__new__(cls)
    for name, reason in MISSING[owner].items():
        assert not hasattr(cls, name), f"{owner} has {name}: take it from the table"
        assert not hasattr(one, name)
        with pytest.raises(MissingNameError, match=re.escape(f"has no {name}, which vLLM's {owner} has: {reason}")):
            getattr(one, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'") as found:
        _ = one.nothing
    assert not isinstance(found.value, NotSupportedError)


@pytest.mark.parametrize("dotted", ARGUMENTS)
def test_arguments_that_are_not_supported_are_refused_by_name(dotted: str) -> None:
    owner, _, method = dotted.partition(".")
    cls: Any = getattr(mainspring, owner)
    call = getattr(cls, method)
    for name, entry in ARGUMENTS[dotted].items():
        ours = inspect.signature(call).parameters
        if isinstance(entry, str):
            assert entry in ours
            continue
        assert name not in ours, f"{dotted} has {name}: take it from the table"
        given = () if inspect.ismethod(call) else (cls.__new__(cls),)
        if "x" not in entry[0] and set(map(repr, entry[0])) != {"True", "False"}:
            with pytest.raises(
                NotSupportedError, match=re.escape(f"{name} is 'x', which is not supported ({entry[1]}")
            ):
                call(*given, **{name: "x"})


def test_fields_of_params_that_only_vllm_has() -> None:
    params = SamplingParams(skip_clone=True, flat_logprobs=True, thinking_token_budget=-1, watermarking=None)  # type: ignore[call-arg]
    assert params == SamplingParams()
    for name in ("logprob_token_ids", "repetition_detection", "thinking_token_budget", "skip_reading_prefix_cache"):
        with pytest.raises(NotSupportedError, match=f"{name} is True"):
            SamplingParams(**{name: True})
    params.thinking_token_budget = 5  # type: ignore[attr-defined]
    with pytest.raises(NotSupportedError, match="thinking_token_budget is 5"):
        params.validate()
    assert mainspring.PoolingParams(activation=False).use_activation is False  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="softmax is the older name of use_activation"):
        mainspring.PoolingParams(softmax=False, use_activation=True)  # type: ignore[call-arg]
    with pytest.raises(NotSupportedError, match="output_kind"):
        mainspring.PoolingParams(output_kind=mainspring.RequestOutputKind.DELTA)  # type: ignore[call-arg]


def test_a_generation_config_adds_the_ids_that_end_a_request() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"temperature": 0.5})
    params.update_from_generation_config({"eos_token_id": 2}, 2)
    assert params == SamplingParams(stop_token_ids=[9]), "2 ends the request anyway"
    params.update_from_generation_config({"eos_token_id": [2, 7, 3]}, model_eos_token_id=2)  # type: ignore[call-arg]
    assert params.stop_token_ids == [3, 7, 9]
    params = SamplingParams(ignore_eos=True)
    params.update_from_generation_config({"eos_token_id": [2, 7]}, 2)
    assert params.stop_token_ids == []


def test_temperatures_are_clamped_as_in_vllm() -> None:
    greedy = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    low = SamplingParams(temperature=0.001, top_p=0.5)
    assert (low.temperature, low.top_p) == (0.01, 0.5)
    assert SamplingParams(temperature=0.01).temperature == 0.01
    with pytest.raises(InvalidArgumentError, match="top_p is 2"):
        SamplingParams(temperature=0.0, top_p=2.0)


VLLM = {
    "__init__.py": "__all__ = ['LLM', 'Nothing']",
    "config/model.py": "class ModelConfig:\n    dtype: str = 'auto'\n    seed: int = Field(default=-1.5)\n",
    "engine/arg_utils.py": (
        "class EngineArgs:\n    dtype: str = ModelConfig.dtype\n    seed: int = ModelConfig.seed\n    other: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    ),
    "entrypoints/llm.py": (
        "class MoreMixin:\n    def release_kv_cache_memory(self, any): pass\n    def unheard_of(self): pass\n"
        "class LLM(MoreMixin):\n    def __init__(self, model, nnodes, wrong): pass\n"
        "    def generate(self, prompts, mm_processor_kwargs, wrong): pass\n"
    ),
    "engine.py": "class LLMEngine: pass\nclass AsyncLLM: pass\nclass PoolingParams: pass\n",
    "sampling_params.py": "class SamplingParams:\n    n: int = 1\n    skip_clone: bool = False\n    wrong: int = 0\n",
}


def test_names_of_a_source_that_are_unknown_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in VLLM.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True)
    assert vllm_names.compare(tmp_path) == 7
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines if not line.startswith(tmp_path.name)] == [
        "EngineArgs.seed",
        "EngineArgs.other",
        "vllm.Nothing",
        "LLM.unheard_of",
        "LLM.__init__(wrong)",
        "LLM.generate(wrong)",
        "SamplingParams.wrong",
    ]
