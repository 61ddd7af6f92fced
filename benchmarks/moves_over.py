"""Runs vLLM's own offline examples, unchanged, through `python -m mainspring.compat.vllm`.

    pip download vllm==0.11.0 --no-deps --no-binary vllm    # and unpack it; it is no part of this repository
    python benchmarks/moves_over.py vllm-0.11.0 [vllm-0.33.0 ...] [--only TEXT] [--keep FOLDER]

`left_out` says by rule which scripts are not run. Names on the hub are mapped to small checkpoints with random weights
that are made here, of the kind that the script expects. Each script runs in a process and a folder of its own. It
passes if it ends with exit code 0 and has printed what `EXPECTED` says. The table gives the last error of the others.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]
LIMIT_S = 240  # seconds for one script
VOCAB_SIZE = 2048

# what a script imports or uses → why it is left out; matched against its code without comments and docstrings
RULES = {
    "several devices": (
        r"\b(import|from) (ray|torch\.distributed)\b|nccl|data_parallel_size|VLLM_DP_|\bRDT|"
        r"(tensor|pipeline)_parallel_size['\"]?\s*[=:] *[2-9]"
    ),
    "a TPU": r"import torch_xla",
    "media": r"vllm\.(assets|multimodal)|from PIL|import PIL|multi_modal_data|(image|audio|video)_url",
    "an HTTP server": (
        r"(import|from) (openai|requests|aiohttp|fastapi|uvicorn|httpx|gradio|streamlit|websockets)\b|HTTPVLLM"
    ),
    "a KV connector": r"KVTransferConfig|kv_transfer|kv_cache_utils|lmcache",
    "a downloaded data set": r"vllm\.benchmarks\.datasets|(import|from) datasets\b|urlopen",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Checkpoint(NamedTuple):
    """A small checkpoint: `maker` and `fields` say of which kind."""

    maker: str  # causal, or a class of transformers for models that give vectors; lora: an adapter of `architecture`;
    # trained: one that knows by heart what a script expects the model to say; mistral: the same in Mistral's own form,
    # beside an ordinary one with random weights; awq, gptq: quantized
    architecture: str
    names: str  # on the hub
    fields: Mapping[str, Any] = MappingProxyType({})


CHECKPOINTS = [
    Checkpoint(
        "causal",
        "llama",
        "meta-llama/Llama-3.2-1B-Instruct meta-llama/Llama-3.2-3B-Instruct "
        "meta-llama/Llama-2-13b-chat-hf lmsys/longchat-13b-16k huggyllama/llama-7b",
        {"max_position_embeddings": 16_384},
    ),
    Checkpoint("causal", "llama", "meta-llama/Llama-2-7b-hf", {"vocab_size": 32_064}),  # one uses its token 32003
    Checkpoint("causal", "opt", "facebook/opt-125m", {"max_position_embeddings": 2048}),
    Checkpoint("causal", "qwen2", "Qwen/Qwen2.5-3B-Instruct"),
    Checkpoint("trained", "qwen2", "Qwen/Qwen2-1.5B-Instruct"),
    Checkpoint(
        "causal",
        "qwen3",
        "Qwen/Qwen3-0.6B Qwen/Qwen3-Reranker-0.6B",
        {"max_position_embeddings": 32_768, "architectures": ["Qwen3ForCausalLM"]},
    ),
    Checkpoint(
        "AutoModelForSequenceClassification",
        "llama",
        "nvidia/llama-nemotron-rerank-1b-v2",
        {"num_labels": 1, "max_position_embeddings": 2048},
    ),
    Checkpoint("causal", "qwen3_moe", "Qwen/Qwen3-30B-A3B", {"max_position_embeddings": 4096}),
    Checkpoint("mistral", "mistral", "mistralai/Mistral-7B-Instruct-v0.3 mistralai/Ministral-8B-Instruct-2410"),
    Checkpoint("AutoModelForSequenceClassification", "qwen2", "jason9693/Qwen2.5-1.5B-apeach", {"num_labels": 2}),
    Checkpoint(
        "AutoModelForSequenceClassification",
        "qwen3",
        "Skywork/Skywork-Reward-V2-Qwen3-0.6B tomaarsen/Qwen3-Reranker-0.6B-seq-cls",
        {"num_labels": 1, "max_position_embeddings": 2048},
    ),
    Checkpoint(
        "AutoModelForTokenClassification",
        "qwen2",
        "internlm/internlm2-1_8b-reward",
        {"num_labels": 1, "max_position_embeddings": 2048},
    ),
    Checkpoint("AutoModel", "bert", "intfloat/e5-small"),
    Checkpoint("AutoModel", "bert", "intfloat/multilingual-e5-small", {"max_position_embeddings": 512}),
    Checkpoint("AutoModel", "xlm-roberta", "BAAI/bge-m3 jinaai/jina-embeddings-v3", {"max_position_embeddings": 514}),
    Checkpoint(
        "AutoModelForSequenceClassification",
        "xlm-roberta",
        "BAAI/bge-reranker-v2-m3",
        {"num_labels": 1, "max_position_embeddings": 514},
    ),
    Checkpoint("AutoModelForTokenClassification", "bert", "boltuix/NeuroBERT-NER", {"num_labels": 5}),
    Checkpoint(
        "lora",
        "llama",
        "jeeejeee/llama32-3b-text2sql-spider timdettmers/qlora-flan-7b jashing/tinyllama-colorist-lora",
    ),
    Checkpoint("awq", "llama", "TheBloke/TinyLlama-1.1B-Chat-v0.3-AWQ", {"max_position_embeddings": 2048}),
    Checkpoint("gptq", "llama", "TheBloke/TinyLlama-1.1B-Chat-v0.3-GPTQ", {"max_position_embeddings": 2048}),
    Checkpoint("lora", "qwen3-forsequenceclassification", "AmirMohseni/skywork-qwen3-0.6b-reward-lora"),
    Checkpoint("lora", "llama-2", "yard1/llama-2-7b-sql-lora-test"),
]

# end of a script's path → its arguments; {models} is the folder of checkpoints, {out} a folder of its own
ARGUMENTS = {
    "save_sharded_state.py": "--model {models}/llama --output {models}/sharded",
    "save_sharded_state_offline.py": "--model {models}/llama --output {models}/sharded",
    "load_sharded_state.py": "--model {models}/sharded",
    "load_sharded_state_offline.py": "--model {models}/sharded",
    "routed_experts_e2e.py": "--deterministic",
    "tensorize_vllm_model.py": "--model facebook/opt-125m serialize --serialized-directory {out}",
}

_OUTPUT = r"Output: +(['\"]).+\1"
_REPEATED = r"Output: +(['\"])(.+?)\2{15}\1"  # 16 times the same token
_TEXT = r"Generated text: (['\"]).+\1"
# end of a script's path → patterns of its output, and how often each has to be there at least
EXPECTED: dict[str, list[tuple[str, int]]] = {
    "basic/basic.py": [(_OUTPUT, 4)],
    "offline_inference/basic.py": [(_OUTPUT, 4)],
    "chat.py": [(_TEXT, 11)],
    "classify.py": [(r"Class Probabilities: \[0\.\d+, 0\.\d+\] \(size=2\)", 4)],
    "embed.py": [(r"Embeddings: \[-?\d.*, \.\.\.\] \(size=64\)", 4)],
    "generate.py": [(_TEXT, 4)],
    "reward.py": [(r"Reward: tensor\(\[[^()]*\]\) \(size=\d+\)", 4)],
    "score.py": [(r"Score: 0\.\d+", 2)],
    "async_llm_streaming.py": [(r"Response: .+", 3), (r"Generation complete", 3)],
    "llm_engine_example.py": [(r"RequestOutput\(.*finished=True", 3)],
    "metrics.py": [(_TEXT, 4), (r"\((gauge|counter)\) = ", 10), (r"\(histogram\)", 3)],
    "metrics/offline.py": [(_TEXT, 4), (r"\((gauge|counter)\) = ", 10), (r"\(histogram\)", 3)],
    "/automatic_prefix_caching.py": [(r"Output: .+", 2), (r"Generation time: [\d.]+", 2)],
    "/automatic_prefix_caching_offline.py": [(r"Output: .+", 2), (r"Generation time: [\d.]+", 2)],
    "/prefix_caching": [(_TEXT, 8), (r"Generated answers are the same: True", 1)],
    "structured_outputs": [
        (r"by Choice: (Positive|Negative)\n", 1),
        (r"by Regex: \w", 1),
        (r"by JSON: \{", 1),
        (r"by Grammar: SELECT col_[12]", 1),
    ],
    "context_extension": [(_TEXT, 1)],
    "custom.py": [(_OUTPUT, 4), (_REPEATED, 2)],
    "custom_req.py": [(_OUTPUT, 4), (_REPEATED, 2)],
    "custom_req_init.py": [(_OUTPUT, 4)],  # it masks on a GPU only
    "dry.py": [(r".+", 1)],
    "multilora": [(r"RequestOutput\(.*finished=True", 4), (r"lora_name='sql-lora", 2)],
    "lora_with_quantization": [(r"Output: ", 12), (r"Output: .+", 8)],
    "mlpspeculator": [(r"text: '.+'", 2)],
    "embed_jina": [(r"Embeddings for text matching: \[-?\d.*\(size=64\)", 6)],
    "embed_matryoshka": [(r"Embeddings: .*\(size=32\)", 4)],
    "ner": [(r"→ LABEL_\d", 5)],
    "qwen3_reranker": [(r"(?m)^(Relevance scores: )?\[0?[\d.e-]+, [\d.e-]+\]", 1)],
    "prompt_embed": [(r"A[123]: .+", 3)],
    "reproducibility": [(_TEXT, 4), (r"(?m)^\d+$", 1)],
    "simple_profiling": [(_TEXT, 4)],
    "run_one_batch": [(_TEXT, 1)],
    "reset_kv": [(r"finished=True", 4), (r"Resetting prefix cache", 1)],
    "sharded_state": [],
    "load_sharded_state": [(r"Full output: .+", 1)],
    "tensorize": [],
    "trace_replay": [(r"Replayed tokens match the requested trace exactly", 1)],
    "classification_with_lora": [(r"Class Probabilities: \[", 1)],
    "sequence_reward": [(r"Reward: \[.*\(size=1\)", 4)],
    "token_reward": [(r"Reward: \[\[.*\(size=\d+\)", 4)],
    "using_template": [(r"\[0\.\d+, 0\.\d+, 0\.\d+\]", 1)],
    "jina_reranker": [(r"Score: ", 12)],
    "late_chunking": [(r"Chunk \d", 4)],
    "multi_vector": [(r"torch.Size\(\[\d+, 64\]\)|\(\d+, 64\)", 4), (r"Score: -?\d", 2)],
    "pause_resume": [(r"Test passed", 1)],
    "routed_experts": [  # 2 layers, 2 of 4 experts for a token
        (r"Prompt \d+: shape=\(\d\d+, 2, 2\), min=0, max=3", 20),
        (r"Token ID mismatches: 0/\d{3,4} ", 1),
        (r"Routed experts mismatches: 0/\d{4} ", 1),
        (r"All tests passed!", 1),
    ],
    "tpu.py": [(_TEXT, 3)],
    "chat_with_tools": [(r"The weather in Dallas, TX is 85 degrees", 1)],
}


def code_of(script: Path) -> str:
    """A script's code without comments and docstrings."""
    tree = ast.parse(script.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[:1] = [ast.Pass()]
    return ast.unparse(tree)


def left_out(script: Path) -> str | None:
    """Why a script is not run; None: it is."""
    code = code_of(script)
    if not re.search(r"^\s*(from|import) vllm\b", code, re.MULTILINE):
        return "imports nothing of vLLM"
    if not any(isinstance(node, ast.If | ast.Expr | ast.With | ast.For) for node in ast.parse(code).body):
        return "only defines what other scripts import"
    found = ((reason, re.search(pattern, code)) for reason, pattern in RULES.items())
    return next((f"{reason}: {match[0]}" for reason, match in found if match), None)


def make_tokenizer(folder: Path, pair: bool, more: Sequence[str] = ()) -> None:
    """A byte-level BPE tokenizer trained on our own documents, and on texts that it is to cut into few tokens; `pair`:
    with special tokens around texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    documents = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    documents += ["no", "yes"] * 200  # answers of rerankers, which are to be tokens
    bpe.train_from_iterator([*documents, *list(more) * 200], trainer)
    if pair:
        ids = [("<bos>", 0), ("<eos>", 1)]
        bpe.post_processor = processors.TemplateProcessing("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1", ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


CALL = '[{"name": "get_current_weather", "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}}]'
ANSWER = "The weather in Dallas, TX is 85 degrees fahrenheit."
RESULT = "The weather in Dallas, TX is 85 degrees fahrenheit. It is partly cloudly, with highs in the 90's."
Lesson = tuple[list[int], list[int]]  # token ids of a prompt and of the answer to learn


def texts_by_heart(scripts: Iterable[Path]) -> list[str]:
    """Prompts with their answers, from the lists `prompts` and `answers` of scripts that assert what a model says."""
    found = []
    for script in scripts:
        lists = {}
        for node in ast.parse(script.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                lists[ast.unparse(node.targets[0])] = node.value
        if {"prompts", "answers"} <= lists.keys():
            pairs = zip(ast.literal_eval(lists["prompts"]), ast.literal_eval(lists["answers"]), strict=True)
            found += [prompt + answer for prompt, answer in pairs]
    return found


def tool_lessons(script: Path, tokenizer: Any) -> list[Lesson]:
    """The answers that call the tool of a script, and that tell its result. The id of a call is random."""
    found = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("tools", "messages"):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    asked = found["messages"]
    ids = ("aZ5kQ0xRt", "9uWbGf3Lp", "Hd7vYmJ2c", "s4TnE8iOq")
    call, results = {"role": "assistant", "content": CALL}, {"role": "tool", "content": RESULT}
    told = [[*asked, call, {**results, "tool_call_id": one}] for one in ids]
    return [
        (
            tokenizer.apply_chat_template(messages, tools=found["tools"]),
            [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id],
        )
        for messages, answer in [(asked, CALL), *((messages, ANSWER) for messages in told)]
    ]


def make_mistral(folder: Path, script: Path) -> None:
    """Add Mistral's own files to an ordinary checkpoint; their model knows what `script` expects."""
    import mistral_folders
    import tiny
    from mainspring.engine.text.tokenizer import load_tokenizer

    size = mistral_folders.make_tekken(folder / "tokenizer.json", folder)
    with tempfile.TemporaryDirectory() as place:
        fields = {"vocab_size": size, "max_position_embeddings": 2048}
        trained = tiny.make("mistral", place, bos_token_id=1, eos_token_id=2, **fields)
        train(trained, tool_lessons(script, load_tokenizer(folder, "mistral")))
        mistral_folders.convert(trained, folder)


def train(folder: Path, lessons: list[Lesson]) -> None:
    """Let a checkpoint learn answers by heart."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)  # small products: more threads only wait for each other
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    not_learned = -100
    batch = [
        (torch.tensor([[*prompt, *answer]]), torch.tensor([[*([not_learned] * len(prompt)), *answer]]))
        for prompt, answer in lessons
    ]
    for _ in range(80):
        loss = sum(model(input_ids=ids, labels=labels).loss for ids, labels in batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def make_checkpoints(folder: Path, by_heart: list[str], tool_script: Path | None) -> dict[str, str]:
    """→ hub name → folder."""
    import transformers
    from transformers import AutoTokenizer

    import peft_folders
    import pooled
    import quantized_folders
    import tiny

    pooled.ENCODERS.setdefault("xlm-roberta", {})
    pooled.DECODERS.setdefault("qwen2", {"num_key_value_heads": 2})
    places = {}
    for one in CHECKPOINTS:
        kind = "" if one.maker == "causal" else "-" + one.maker.removeprefix("AutoModel").lower()
        place = folder / f"{one.architecture}{kind}{'-2' if is_second(one) else ''}"
        if not place.exists():
            fields = {"vocab_size": VOCAB_SIZE, **one.fields}
            if one.maker == "lora":
                peft_folders.make_lora(
                    folder / one.architecture, place, seed=1, r=4, target_modules=["q_proj", "v_proj"]
                )
            elif one.maker in ("awq", "gptq"):
                of_layer = getattr(quantized_folders, f"{one.maker}_of")
                config = getattr(quantized_folders, one.maker.upper())
                quantized_folders.make_quantized(place, of_layer, config, one.architecture, **fields)
                make_tokenizer(place / one.maker, pair=False)
            elif one.maker in ("causal", "trained", "mistral"):
                more = {"trained": by_heart, "mistral": [CALL, RESULT]}.get(one.maker, [])
                tiny.make(one.architecture, place, **fields)
                make_tokenizer(place, pair=False, more=more)
                if one.maker == "trained" and by_heart:
                    encode = AutoTokenizer.from_pretrained(place).encode
                    train(place, [([], encode(text)) for text in by_heart])
                if one.maker == "mistral" and tool_script is not None:
                    make_mistral(place, tool_script)
            else:
                auto = getattr(transformers, one.maker)
                pooled.make(one.architecture, place, auto, **fields)
                make_tokenizer(place, pair=one.architecture in ("bert", "xlm-roberta"))
        if one.maker in ("awq", "gptq"):
            place /= one.maker
        places |= dict.fromkeys(one.names.split(), str(place))
    return places


def is_second(one: Checkpoint) -> bool:
    """Whether an earlier entry of the table is of the same kind."""
    same = [other for other in CHECKPOINTS if (other.maker, other.architecture) == (one.maker, one.architecture)]
    return same.index(one) > 0


def lookup(table: dict[str, Any], script: Path, default: Any) -> Any:
    """The entry whose key is the longest that the script's path holds."""
    keys = [key for key in table if key in str(script)]
    return table[max(keys, key=len)] if keys else default


class Result(NamedTuple):
    script: str
    passed: bool
    reason: str
    seconds: float


def run(script: Path, name: str, models: Path, work: Path) -> Result:
    out = work / name.replace("/", "_").removesuffix(".py")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    given = lookup(ARGUMENTS, script, "").format(models=models, out=out).split()
    command = [sys.executable, "-P", "-m", "mainspring.compat.vllm", "--models", str(models / "models.json")]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, str(script), *given], cwd=out, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        code, stdout, stderr = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, stdout, stderr = None, (late.stdout or b"").decode(), (late.stderr or b"").decode()
    seconds = time.monotonic() - started
    (out / "stdout.txt").write_text(stdout)
    (out / "stderr.txt").write_text(stderr)
    if code is None:
        return Result(name, False, f"not done after {LIMIT_S} s", seconds)
    if code != 0:
        errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|error|Exit)\b.*", stderr, re.MULTILINE)
        return Result(name, False, (errors or stderr.splitlines() or [f"exit code {code}"])[-1][:300], seconds)
    expected = lookup(EXPECTED, script, None)
    if expected is None:
        return Result(name, False, "its output is not known here", seconds)
    for pattern, count in expected:
        if (found := len(re.findall(pattern, stdout))) < count:
            return Result(name, False, f"output: {found} times {pattern!r}, not {count}", seconds)
    return Result(name, True, "", seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="folders with an unpacked source distribution")
    parser.add_argument("--only", default="", metavar="TEXT", help="scripts whose path holds it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep checkpoints and outputs here")
    parser.add_argument("--list", action="store_true", help="say what is run and what is left out, and run nothing")
    parser.add_argument("--names", action="store_true", help="run nothing; compare the names, see vllm_names.py")
    args = parser.parse_args()
    if args.names:
        import vllm_names

        return min(1, sum(vllm_names.compare(source) for source in args.sources))
    scripts: dict[str, Path] = {}
    by_heart: list[str] = []
    tool_script: Path | None = None
    for source in args.sources:
        examples = sorted((source / "examples").rglob("*.py"))
        by_heart += texts_by_heart(examples)
        for script in sorted(examples, key=lambda path: "load_" in path.name):  # after those that save
            name = f"{source.name}/{script.relative_to(source / 'examples')}"
            if args.only not in name:
                continue
            if (reason := left_out(script)) is None:
                scripts[name] = script.resolve()
                tool_script = script if "chat_with_tools" in name else tool_script
            elif reason != "imports nothing of vLLM":
                print(f"left out  {name}  {reason}")
    if args.list:
        print(*(f"run       {name}" for name in scripts), sep="\n")
        return 0
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="moves-over-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        models = folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        (models / "models.json").write_text(json.dumps(make_checkpoints(models, by_heart, tool_script)))
        results = []
        for name, script in scripts.items():
            results.append(one := run(script, name, models, folder / "out"))
            print(f"{'pass' if one.passed else 'FAIL'}  {one.seconds:5.1f} s  {name}  {one.reason}", flush=True)
    passed = sum(one.passed for one in results)
    print(f"\n{passed} of {len(results)} pass ({passed / max(1, len(results)):.0%})")
    for reason, count in Counter(one.reason[:120] for one in results if not one.passed).most_common():
        print(f"{count:4}  {reason}")
    return 0 if passed >= 0.9 * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
