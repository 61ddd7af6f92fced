"""The steps that a core's start skips or finds cached, with no effect on the result."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

import tiny
from mainspring import EngineArgs
from mainspring.core.model.learn import fuse, whole_match
from mainspring.core.model.learn.verify import final_logits
from mainspring.core.model.load import kept_decisions, loader
from mainspring.core.model.load.kept_decisions import KeptDecisions
from mainspring.core.model.load.loader import _WithoutSympy, load_model
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.plan.control import Explain
from mainspring.core.worker import worker as worker_of_one
from mainspring.core.worker.generation_worker import GenerationWorker
from mainspring.core.worker.make_worker import make_worker
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.contract import Backend
from native_here import why_not
from plain import make_engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))


def load(path: Path, kept: KeptDecisions, **fields: Any) -> PagedModel:
    return load_model(ModelConfig(model=str(path), **fields), LoadConfig(), torch.device("cpu"), decisions=kept)


def in_a_new_process(code: str, *arguments: str) -> str:
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Left out -------------------------------------------------------------------------------------

LOADS = """
import sys, torch
from mainspring.core.model.load.loader import load_model
from mainspring.core.plan.control import Explain
from mainspring.core.worker import worker as worker_of_one
from mainspring.core.worker.generation_worker import GenerationWorker
from mainspring.core.worker.make_worker import make_worker
from mainspring.ipc.config import LoadConfig, ModelConfig
load_model(ModelConfig(model=sys.argv[1]), LoadConfig(), torch.device("cpu"))
print(*sys.modules)
"""


@pytest.mark.slow
def test_a_model_is_loaded_without_what_only_compiling_and_training_need(llama: Path) -> None:
    modules = set(in_a_new_process(LOADS, str(llama)).split())
    assert "transformers.models.llama.modeling_llama" in modules
    assert not modules & {"sympy", "scipy", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"}


@pytest.mark.slow
def test_names_of_transformers_models_are_there_when_asked_for() -> None:
    code = """
import mainspring.core.model
import transformers
models = transformers.models
from transformers.models import GemmaConfig
from transformers.models.gemma.configuration_gemma import GemmaConfig as same
assert GemmaConfig is same is models.GemmaConfig is transformers.GemmaConfig
assert models.mixtral.MixtralConfig is transformers.MixtralConfig
assert "LlamaConfig" in models.__all__  # what "import *" gives; to import it all takes 20 s
assert models.LlamaConfig is transformers.LlamaConfig
assert not hasattr(models, "NoSuchConfig")
"""
    in_a_new_process(code)


@pytest.mark.slow
def test_names_in_model_files_are_looked_for_when_one_is_asked_for(llama: Path) -> None:
    code = (
        LOADS
        + """
import transformers
assert not hasattr(transformers, "__wrapped__") and transformers.PreTrainedModel and transformers.models
assert not transformers._is_complete
assert transformers.LlamaForCausalLM.__name__ == "LlamaForCausalLM"
assert transformers._is_complete
assert not hasattr(transformers, "NoSuchName")
print("|", *sorted(transformers.__all__))
"""
    )
    found = in_a_new_process(code, str(llama)).partition("|")[2]
    assert found.split() == in_a_new_process("import transformers; print(*sorted(transformers.__all__))").split()


@pytest.mark.slow
def test_a_loss_that_needs_scipy_finds_it_when_it_is_called() -> None:
    pytest.importorskip("scipy")
    code = """
import sys
import mainspring.core.model
from transformers.loss import loss_for_object_detection as loss
assert "scipy.optimize" not in sys.modules
rows, columns = loss.linear_sum_assignment([[1, 0], [0, 1]])
import scipy.optimize
assert columns.tolist() == scipy.optimize.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]
"""
    in_a_new_process(code)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox"])
def test_a_model_built_without_sympy_has_the_same_parameters_and_buffers(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(path)
    with _WithoutSympy():
        ours = AutoModelForCausalLM.from_pretrained(path)
    before, after = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (own, ours))
    assert list(before) == list(after)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_mixes_both_devices_is_made_on_the_meta_device_and_errors_stay() -> None:
    with _WithoutSympy(), torch.device("meta"):
        mixed = torch.arange(4) * torch.ones(4)
        assert mixed.is_meta
        assert torch.nn.Embedding(3, 2).weight.is_meta
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2, device="cpu") + torch.ones(3, device="cpu")


# --- Kept -----------------------------------------------------------------------------------------


def test_the_next_start_follows_what_was_decided_and_verifies_the_whole(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(llama, KeptDecisions(tmp_path))
    monkeypatch.setattr(fuse.Fusion, "decide", None)
    again = load(llama, KeptDecisions(tmp_path))
    assert again.explain() == first.explain()
    assert any(line.startswith("verified") for line in again.explain())
    assert again.decisions.keys() == first.decisions.keys()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("change", ["weights", "dtype", "config"])
def test_another_model_finds_nothing(change: str, llama: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    load(llama, KeptDecisions(kept))
    path = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(llama)
    if change == "weights":
        model.lm_head.weight.data.mul_(2)
    model.save_pretrained(path)
    if change == "config":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    load(path, KeptDecisions(kept), dtype="bfloat16" if change == "dtype" else "auto")
    assert len(list(kept.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "[1]", "3", '{"a": 1}', '{"a": ["x"]}', "{"])
def test_a_file_that_holds_something_else_is_as_none(text: str, llama: Path, tmp_path: Path) -> None:
    first = load(llama, KeptDecisions(tmp_path))
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_text(text)
    assert load(llama, KeptDecisions(tmp_path)).explain() == first.explain()
    assert file.read_bytes() == good


def test_a_start_that_fails_leaves_nothing_to_follow(llama: Path, tmp_path: Path) -> None:
    load(llama, KeptDecisions(tmp_path))
    (file,) = tmp_path.iterdir()
    decision = ["gated MLP", True, "", ["gate", "up", "down", "silu"]]
    file.write_text(json.dumps({"decisions": {"model.layers.7.mlp": decision}}))
    with pytest.raises(UnsupportedModelError, match="does not fit the model"):
        load(llama, KeptDecisions(tmp_path))
    assert not file.exists()
    file.write_text("{")  # nor does a file that can't be read
    assert load(llama, KeptDecisions(tmp_path)).decisions
    assert json.loads(file.read_bytes())


def test_where_nothing_can_be_kept_a_model_loads_all_the_same(llama: Path) -> None:
    assert load(llama, KeptDecisions(Path("/proc/nowhere"))).decisions


# --- Verified by an earlier start -----------------------------------------------------------------


def worker(folder: Path, kept: Path, **fields: Any) -> GenerationWorker:
    args = EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8, **fields)
    made = make_worker(args.create_engine_config(), kept=KeptDecisions(kept))
    assert isinstance(made, GenerationWorker)
    return made


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[PagedModel]:
    """Receives each model that is verified."""
    found: list[PagedModel] = []
    for name in ("verify", "own_logits"):
        usual = getattr(loader, name)

        def noted(model: PagedModel, *backend: Backend, usual: Any = usual) -> Any:
            found.append(model)
            return usual(model, *backend)

        monkeypatch.setattr(loader, name, noted)
    return found


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "deepseek_v32"])  # as a whole, layer by layer, few keys
def test_a_later_start_compares_the_logits_of_the_first(
    architecture: str, tmp_path: Path, verified: list[PagedModel]
) -> None:
    folder = tiny.make(architecture, tmp_path / "model")
    first = worker(folder, tmp_path / "kept").control(Explain())
    assert len(verified) == 1
    assert worker(folder, tmp_path / "kept").control(Explain()) == first
    assert worker(folder, tmp_path / "kept").control(Explain()) == first
    assert len(verified) == 1, "a later start verified the model again"
    worker(folder, tmp_path / "kept", max_model_len=16)
    assert len(verified) == 2, "what depends on the longest sequence was taken from another start"


def test_a_core_in_the_users_process_keeps_them_too(
    llama: Path, tmp_path: Path, verified: list[PagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_decisions, "cache_folder", lambda: tmp_path / "native")
    for _ in range(2):
        make_engine(llama, skip_tokenizer_init=True).shutdown()
    assert len(verified) == 1


def test_other_logits_than_those_of_the_first_start_are_verified_anew(
    llama: Path, tmp_path: Path, verified: list[PagedModel]
) -> None:
    first = worker(llama, tmp_path).control(Explain())
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_bytes())
    kept["verified"]["logits"] = [-x for x in kept["verified"]["logits"]]
    file.write_text(json.dumps(kept))
    assert worker(llama, tmp_path).control(Explain()) == first
    assert len(verified) == 2
    worker(llama, tmp_path)
    assert len(verified) == 2, "the second start left nothing to compare"


def test_a_final_form_with_other_logits_is_compared_step_by_step(
    llama: Path, tmp_path: Path, verified: list[PagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_of_one, "final_logits", lambda model, backend: wrong(model, backend))
    monkeypatch.setattr(whole_match, "final_logits", lambda model, backend: wrong(model, backend))

    def wrong(model: PagedModel, backend: Backend) -> torch.Tensor:
        logits = final_logits(model, backend)
        return logits if model.own is None else logits.roll(1, dims=1)

    lines = worker(llama, tmp_path).control(Explain())
    assert len(verified) == 2
    assert any("the paged path" in line for line in lines)
    assert worker(llama, tmp_path).control(Explain()) == lines
    assert len(verified) == 2


def test_a_model_that_calls_its_layers_in_its_own_way_keeps_their_code(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack refuses the argument, which shows in the final form only."""
    whole, decoder = LlamaForCausalLM.forward, LlamaModel.forward

    @functools.wraps(whole)
    def giving(self: Any, *args: Any, **kwargs: Any) -> Any:
        return whole(self, *args, **kwargs, something=1)

    @functools.wraps(decoder)
    def taking(self: Any, *args: Any, something: int = 0, **kwargs: Any) -> Any:
        return decoder(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", giving)
    monkeypatch.setattr(LlamaModel, "forward", taking)
    lines = worker(llama, tmp_path).control(Explain())
    assert any("takes no something" in line for line in lines)
    assert any("the paged path" in line for line in lines)


def test_one_who_does_not_compare_logits_verifies(llama: Path, tmp_path: Path, verified: list[PagedModel]) -> None:
    load(llama, KeptDecisions(tmp_path))
    load(llama, KeptDecisions(tmp_path))
    assert len(verified) == 2


# --- Memory ---------------------------------------------------------------------------------------

PRIVATE = """
import re, sys, threading, time
from pathlib import Path
from mainspring import EngineArgs
from mainspring.core.model.load.kept_decisions import KeptDecisions
from mainspring.core.worker.make_worker import make_worker

def private():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done:
        seen.append(private())
        time.sleep(0.002)

folder, kept, *dtype = sys.argv[1:]
args = EngineArgs(model=folder, device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=8)
before, seen, done = private(), [], False
watcher = threading.Thread(target=watch)
watcher.start()
worker = make_worker(args.create_engine_config(), kept=KeptDecisions(Path(kept)))
done = True
watcher.join()
packed = {id(w): w.memory.nbytes for w in worker.model.whole.decoder.weights.values()}
print(sum(packed.values()), max(seen) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_checkpoint_is_in_memory_once_at_every_moment(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 8192}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    tiny.make("llama", tmp_path / "model", dtype=torch.bfloat16, **sizes, **heads)
    for _ in range(2):  # the first start decides and verifies, the second follows
        packed, most = map(int, in_a_new_process(PRIVATE, str(tmp_path / "model"), str(tmp_path / "kept")).split())
        assert packed > 200 << 20
        assert most < 1.3 * packed
