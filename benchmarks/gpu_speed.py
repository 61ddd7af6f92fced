"""Speed of kernels, and of whole engines with dummy weights of real shapes, relative to the limits of this GPU.

The two limits, copy bandwidth and bf16 matrix rate, are measured again in each part, on random numbers. A kernel is
timed in a CUDA graph of many calls over more data than a cache holds, so launches cost nothing.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig

from gpu_models import BLOCK_SIZE, Bar, Request, Say, Setup, complete, release, send, with_client
from mainspring.core.loop import EngineCore
from mainspring.core.worker.kv_layout import plan_layout
from mainspring.ipc import codec
from mainspring.ipc.client import CoreClient
from mainspring.ipc.inproc_client import InprocClient
from mainspring.ipc.messages import Sampling
from mainspring.kernels.contract import AttentionSpec, Backend, DeviceBatch, LayerCache, PagedBatch, Scans
from mainspring.kernels.decoder_contract import Experts
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from mainspring.kernels.reference.reference_scans import ReferenceScans

BF16 = torch.bfloat16
CACHE_BYTES = 512 << 20  # several times the size of any L2 cache


class Ceilings(NamedTuple):
    bandwidth: float  # bytes read and written a second
    flops: float  # operations a second in a large bf16 matrix product

    @classmethod
    def measure(cls, setup: Setup) -> Ceilings:
        n, size = setup.pick((4 << 30, 8192), (4 << 20, 256))
        source = torch.empty(n // 4, dtype=torch.int32, device=setup.device).random_()
        target = torch.empty_like(source)
        # Not `copy_`: in a graph it is a copy node, which is slower than a kernel.
        bandwidth = 2 * n / seconds(setup, lambda: torch.bitwise_not(source, out=target))
        a, b = (torch.randn(size, size, dtype=BF16, device=setup.device) for _ in range(2))
        return cls(bandwidth, 2 * size**3 / seconds(setup, lambda: torch.mm(a, b), 60))

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e12:.2f} TB/s, {self.flops / 1e12:.0f} TFLOP/s"


def seconds(setup: Setup, run: Callable[[], Any], repeats: int = 7) -> float:
    """Median time of `run`, on a GPU as a graph."""
    if setup.device.type != "cuda":
        run()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


# ------------------------------------------------------------------ kernels

SPECS = {
    "Llama-3.1-8B": AttentionSpec(32, 8, 128, 128, 128**-0.5),
    "Qwen3-0.6B": AttentionSpec(16, 8, 128, 128, 128**-0.5),
    "DeepSeek-V3": AttentionSpec(128, 1, 576, 512, 192**-0.5, latent=True),
}
CLOSE_TO_FP32 = {"": "Llama-3.1-8B", " over latents": "DeepSeek-V3"}
DECODE_BATCHES = (1, 64, 256)
CLOSE = 1e-2  # ‖bf16 - fp32‖ / ‖fp32‖
_groups = itertools.count()  # within a group each plan uses its own memory


class Paged(NamedTuple):
    """Requests over a cache of random numbers, with shuffled blocks."""

    spec: AttentionSpec
    batch: PagedBatch
    caches: list[LayerCache]
    query: torch.Tensor

    @classmethod
    def make(cls, setup: Setup, backend: Backend, spec: AttentionSpec, lengths: list[int], rows: int) -> Paged:
        """Each request computes its last `rows` tokens; the layers together exceed any cache."""
        if reason := backend.refuses(spec, BF16, BF16):
            raise RuntimeError(f"{backend.name} refuses attention with {reason}")
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        layer_bytes = sum(blocks) * BLOCK_SIZE * _kv_bytes(spec)
        layers = setup.pick(max(1, min(64, -(-CACHE_BYTES // layer_bytes))), 2)
        layout = plan_layout([spec] * layers, list(range(layers)), BLOCK_SIZE, BF16, backend.cache_dims)
        pool = torch.empty(1 + sum(blocks), layout.block_elements, dtype=BF16, device=setup.device).normal_()
        arrays = [
            torch.tensor([0, *itertools.accumulate(blocks)], dtype=torch.int32),
            1 + torch.randperm(sum(blocks)).int(),
            torch.tensor([(length - 1) % BLOCK_SIZE + 1 for length in lengths], dtype=torch.int32),
        ]
        twins = DeviceBatch(*(a.to(setup.device) for a in arrays)) if setup.device.type == "cuda" else None
        queries = torch.arange(len(lengths) + 1, dtype=torch.int32) * rows
        singles = len(lengths) if rows == 1 else 0
        batch = PagedBatch(queries, *arrays, BLOCK_SIZE, singles, next(_groups), twins)
        shape = (len(lengths) * rows, spec.num_q_heads, spec.key_dim)
        return cls(spec, batch, layout.caches(pool), torch.randn(shape, device=setup.device).to(BF16))

    def seconds(self, setup: Setup, backend: Backend, graph: bool) -> float:
        """Seconds of one layer."""
        plan = backend.plan(self.spec, self.batch, setup.device, graph=graph)

        def run() -> None:
            for cache in self.caches:
                backend.run(plan, self.query, cache)

        return seconds(setup, run) / len(self.caches)


def _kv_bytes(spec: AttentionSpec) -> int:
    """Of a token."""
    return 2 * spec.num_kv_heads * (spec.key_dim + (0 if spec.latent else spec.value_dim))


def check_kernels(setup: Setup, say: Say) -> None:
    backend, top = setup.backend(), Ceilings.measure(setup)
    release(setup)
    say("device copy, bytes read and written", f"{top.bandwidth / 1e12:.2f} TB/s")
    say("bf16 matrix product, 8192 × 8192 × 8192", f"{top.flops / 1e12:.0f} TFLOP/s")
    _check_close(setup, say, backend)
    contexts = setup.pick((1024, 4096, 8192), (32, 64))
    for name, spec in SPECS.items():
        for requests in DECODE_BATCHES:
            shares = []
            for context in contexts:
                paged = Paged.make(setup, backend, spec, [context] * setup.pick(requests, 2), 1)
                kv_bytes = context * len(paged.query) * _kv_bytes(spec)
                took = paged.seconds(setup, backend, graph=backend.graph_max_kv_len is None)
                shares.append(f"{context:,}: {kv_bytes / took / top.bandwidth:.0%} ({took * 1e6:,.0f} µs)")
                del paged
                release(setup)
            say(f"decode attention, {name}, batch {requests}", "; ".join(shares))
        shares = []
        for tokens in setup.pick((4096, 8192), (64,)):
            paged = Paged.make(setup, backend, spec, [tokens], tokens)
            took = paged.seconds(setup, backend, graph=False)
            flops = 2 * spec.num_q_heads * (spec.key_dim + spec.value_dim) * tokens * (tokens + 1) / 2
            shares.append(f"{tokens:,}: {flops / took / top.flops:.0%} ({took * 1e3:.2f} ms)")
            del paged
            release(setup)
        say(f"prefill attention, {name}", "; ".join(shares))
    _say_scans(setup, say, backend, top)
    _say_elementwise(setup, say, backend, top)
    _say_experts(setup, say, backend, top)
    release(setup)
    _say_choice(setup, say, backend, top)


def _check_close(setup: Setup, say: Say, backend: Backend) -> None:
    """Long contexts, in which keys are split; tiny models do not reach them."""
    r, longest = random.Random(2), setup.pick(8192, 100)
    cases = {"decode": ([r.randint(1, longest) for _ in range(setup.pick(16, 3))], 1)}
    cases["prefill"] = ([longest], setup.pick(1024, 20))
    for (over, model), (name, (lengths, rows)) in itertools.product(CLOSE_TO_FP32.items(), cases.items()):
        spec = SPECS[model]
        paged, reference = Paged.make(setup, backend, spec, lengths, rows), ReferenceBackend()
        ours = backend.run(backend.plan(spec, paged.batch, setup.device), paged.query, paged.caches[0]).float()
        plan = reference.plan(spec, paged.batch, setup.device)
        exact = reference.run(plan, paged.query.float(), paged.caches[0])
        error = float((ours - exact).norm() / exact.norm())
        say(f"{name} attention{over} against fp32, up to 8,192 tokens", f"{error:.1e}", error <= CLOSE)
        del paged
        release(setup)


def _say_scans(setup: Setup, say: Say, backend: Backend, top: Ceilings) -> None:
    """Recurrent scans: against the reference, the same rows whole and in parts, and their time."""
    tokens, few, requests = setup.pick((4096, 40, 64), (12, 6, 2))
    for name, scan in SCANS.items():
        inputs, run = scan(setup, tokens)
        scans, reference = backend.scans, ReferenceScans()
        state = torch.randn(1 + requests, *run.shape, device=setup.device)

        def rows(these: slice, scans: Any, states: torch.Tensor, each: int) -> torch.Tensor:
            """The scan over `these` rows, in sequences of `each`."""
            count = (these.stop - these.start) // each
            starts = torch.arange(count + 1, dtype=torch.int32, device=setup.device) * each
            slots = 1 + torch.arange(count, dtype=torch.int32, device=setup.device)
            fresh = torch.zeros(count, dtype=torch.bool, device=setup.device)
            return run.call(scans, [x[these] for x in inputs], states, starts, slots, fresh)  # noqa: B023

        whole, parts, exact = state.clone(), state.clone(), state.clone()
        ours = rows(slice(0, few), scans, whole, few)
        cut = torch.cat([rows(slice(0, 3), scans, parts, 3), rows(slice(3, few), scans, parts, few - 3)])
        want = rows(slice(0, few), reference, exact, few)
        error = float((ours.float() - want.float()).norm() / want.float().norm())
        same = torch.equal(ours, cut) and torch.equal(whole, parts)
        say(f"{name} against the reference", f"{error:.1e}", error <= CLOSE)
        say(f"{name} in parts", "the same bits" if same else "other bits", same)
        long = seconds(setup, lambda: rows(slice(0, tokens), scans, whole, tokens))  # noqa: B023
        short = seconds(setup, lambda: rows(slice(0, requests), scans, whole, 1))  # noqa: B023
        moved = 2 * state[1:].nbytes
        told = f"{long / tokens * 1e6:.1f} µs a token of a prompt; {short * 1e6:,.0f} µs for 64 single tokens"
        say(f"{name}, time", f"{told}, {moved / short / top.bandwidth:.0%} of the bandwidth")
        release(setup)


class Scan(NamedTuple):
    shape: tuple[int, ...]  # of a state
    call: Callable[..., torch.Tensor]  # scans, inputs by row, state, starts, slots, fresh → by row


def _noise(setup: Setup, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=setup.device).to(dtype)


def _gated_delta(setup: Setup, rows: int) -> tuple[list[torch.Tensor], Scan]:
    """The shapes of Qwen3-Next."""
    heads, key_heads, dim = setup.pick((32, 16, 128), (4, 2, 16))
    q, k, v = (_noise(setup, rows, n, dim, dtype=BF16) for n in (key_heads, key_heads, heads))
    g, beta = -_noise(setup, rows, heads).abs(), _noise(setup, rows, heads).sigmoid()
    scan = Scan((heads, dim, dim), lambda scans, given, *where: scans.gated_delta(*given, *where, dim**-0.5, True))
    return [q, k, v, g, beta], scan


def _mamba2(setup: Setup, rows: int) -> tuple[list[torch.Tensor], Scan]:
    """The shapes of Nemotron-H 8B."""
    heads, dim, groups, states = setup.pick((128, 64, 8, 128), (4, 8, 2, 16))
    A, D = -_noise(setup, heads).abs(), _noise(setup, heads)
    by_row = [_noise(setup, rows, heads, dim), _noise(setup, rows, heads).abs()]
    by_row += [_noise(setup, rows, groups, states) for _ in range(2)]

    def call(scans: Scans, given: list[torch.Tensor], *where: torch.Tensor) -> torch.Tensor:
        x, dt, B, C = given
        return scans.mamba2(x, dt, A, B, C, D, *where)  # type: ignore[call-arg]

    return by_row, Scan((heads, dim, states), call)


SCANS = {"gated delta rule, Qwen3-Next": _gated_delta, "Mamba 2, Nemotron-H": _mamba2}


def _say_elementwise(setup: Setup, say: Say, backend: Backend, top: Ceilings) -> None:
    """Bandwidth over many rows, and the time of a decode step's few."""
    hidden, inner, heads, kv_heads, dim = setup.pick((4096, 14_336, 32, 8, 128), (64, 96, 4, 2, 16))
    weight = torch.randn(hidden, dtype=BF16, device=setup.device)
    layout = plan_layout([AttentionSpec(heads, kv_heads, dim, dim, 1.0)], [0], BLOCK_SIZE, BF16, backend.cache_dims)

    def random_rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, device=setup.device).to(dtype)

    def calls(rows: int) -> dict[str, tuple[Callable[[], Any], int]]:
        """Each kernel with separate inputs, and the bytes it has to move."""
        x, residual = random_rows(rows, hidden), random_rows(rows, hidden)
        y, gate_up = random_rows(rows, hidden), random_rows(rows, 2 * inner)
        query, key, value = (random_rows(rows, h, dim) for h in (heads, kv_heads, kv_heads))
        cos_sin = random_rows(rows, dim, dtype=torch.float32).clamp(-1, 1)
        blocks = 1 + torch.randperm(-(-rows // BLOCK_SIZE), device=setup.device)
        pool = torch.zeros(1 + len(blocks), layout.block_elements, dtype=BF16, device=setup.device)
        at = torch.arange(rows, device=setup.device)
        into = layout.caches(pool)[0], key, value, blocks[at // BLOCK_SIZE].int(), (at % BLOCK_SIZE).int()
        return {
            "rms_norm": (lambda: backend.rms_norm(x, weight, 1e-5), 2 * x.nbytes),
            "add_rms_norm": (lambda: backend.add_rms_norm(y, residual, weight, 1e-5), 4 * x.nbytes),
            "act_and_mul": (lambda: backend.act_and_mul(gate_up, "silu"), 3 * gate_up.nbytes // 2),
            "rotate": (
                lambda: backend.rotate(query, key, cos_sin),
                2 * (query.nbytes + key.nbytes) + cos_sin.nbytes,
            ),
            "append": (lambda: backend.append(*into), 2 * (key.nbytes + value.nbytes)),
        }

    many, copies = setup.pick((8192, 8), (32, 2))
    sets = [calls(many) for _ in range(copies)]
    few = calls(setup.pick(64, 8))
    for name in sets[0]:
        took = seconds(setup, lambda: [each[name][0]() for each in sets]) / copies  # noqa: B023  # runs at once
        short = seconds(setup, lambda: [few[name][0]() for _ in range(20)]) / 20  # noqa: B023
        share = sets[0][name][1] / took / top.bandwidth
        say(f"{name}, bandwidth", f"{share:.0%} over 8,192 rows; 64 rows take {short * 1e6:.1f} µs")
    release(setup)


def _say_choice(setup: Setup, say: Say, backend: Backend, top: Ceilings) -> None:
    rows, vocab = setup.pick((256, 128_256), (4, 500))
    scores = [torch.randn(rows, vocab, device=setup.device) for _ in range(4)]
    seeds = torch.arange(rows, device=setup.device)
    sampled = torch.ones(rows, dtype=torch.bool, device=setup.device)
    took = seconds(setup, lambda: [backend.choose(s, seeds, seeds, sampled) for s in scores]) / len(scores)
    say("keyed choice, [256, 128256]", f"{scores[0].nbytes / took / top.bandwidth:.0%} ({took * 1e6:,.0f} µs)")


def _say_experts(setup: Setup, say: Say, backend: Backend, top: Ceilings) -> None:
    """A layer of Qwen3-30B-A3B: the same rows one expert after another, and the time for several numbers of rows."""
    experts, hidden, inner, chosen = setup.pick((128, 2048, 768, 8), (4, 32, 16, 2))

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=setup.device) * shape[-1] ** -0.5).to(BF16)

    def given(rows: int) -> tuple[torch.Tensor, ...]:
        shares, numbers = torch.rand(rows, experts, device=setup.device).topk(chosen)
        return torch.randn(rows, hidden, device=setup.device).to(BF16), numbers, shares

    layers = [Experts(weight(experts, 2 * inner, hidden), weight(experts, hidden, inner), "silu") for _ in range(3)]
    rows = given(setup.pick(300, 20))
    want = ReferenceBackend().experts(*rows, layers[0]).float()
    error = float((backend.experts(*rows, layers[0]).float() - want).norm() / want.norm())
    say("experts against the reference", f"{error:.1e}", error <= 0.01)
    shares = []
    for count in setup.pick((1, 64, 256, 4096), (1, 8)):
        steps = [(given(count), layer) for layer in layers * 2]
        took = seconds(setup, lambda: [backend.experts(*x, layer) for x, layer in steps]) / len(steps)  # noqa: B023
        sizes = hidden * inner * 3
        touched = sum(len(x[1].unique()) for x, _ in steps) / len(steps)
        limit = max(touched * sizes * 2 / top.bandwidth, count * chosen * sizes * 2 / top.flops)
        shares.append(f"{count:,}: {limit / took:.0%} ({took * 1e6:,.0f} µs)")
    say("experts, Qwen3-30B-A3B, rows", "; ".join(shares))


# ------------------------------------------------------------------ engine


class Work:
    """Bytes to read and operations to compute for a model shape, from its config. Norms, biases and activations are
    left out, so the true limit is a little lower than what this gives."""

    def __init__(self, shape: dict[str, Any]) -> None:
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        self.heads, kv_heads, self.dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
        self.layers = layers
        self.experts, self.chosen = shape.get("num_experts", 1), shape.get("num_experts_per_tok", 1)
        self.expert = layers * 3 * hidden * shape.get("moe_intermediate_size", shape["intermediate_size"])
        attention = layers * hidden * self.dim * 2 * (self.heads + kv_heads)
        self.always = attention + (layers * hidden * self.experts if self.experts > 1 else 0)
        self.head = hidden * shape["vocab_size"]
        self.kv_bytes = layers * kv_heads * self.dim * 2 * 2  # of a token

    def weight_bytes(self, tokens: int) -> float:
        """Bytes read for this many tokens at once, if all experts are equally likely."""
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        return 2 * (self.always + touched * self.expert + self.head)

    def flops(self, tokens: int, logits: int, attended: float) -> float:
        """`attended`: keys that all queries of a layer and head see together."""
        products = tokens * (self.always + self.chosen * self.expert) + logits * self.head
        return 2 * products + 4 * self.layers * self.heads * self.dim * attended

    def step_seconds(self, requests: int, context: float, top: Ceilings) -> tuple[float, str]:
        """The lower bound of a decode step's time, and the limiting resource."""
        reads = (self.weight_bytes(requests) + requests * context * self.kv_bytes) / top.bandwidth
        products = self.flops(requests, requests, requests * context) / top.flops
        return max((reads, "bandwidth"), (products, "matrix rate"))


class HostClock:
    """Time of each step during which the core's thread was busy, in ms, without waits for device events. It includes
    the encoding of outputs."""

    def __init__(self) -> None:
        self.busy: list[float] = []
        self._waited = 0.0

    @contextmanager
    def watch(self, client: CoreClient) -> Iterator[None]:
        assert isinstance(client, InprocClient)
        core: Any = client.core
        step, synchronize = core.step, torch.cuda.Event.synchronize

        def timed_wait(event: torch.cuda.Event) -> None:
            began = time.perf_counter()
            synchronize(event)
            self._waited += time.perf_counter() - began

        def timed_step() -> Any:
            self._waited, began = 0.0, time.perf_counter()
            outputs = step()
            for message in outputs.values():
                codec.encode(message, codec.NO_INSTANCE, 1)
            self.busy.append(1e3 * (time.perf_counter() - began - self._waited))
            return outputs

        core.step, torch.cuda.Event.synchronize = timed_step, timed_wait  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del core.step
            torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]


class Decoding:
    """Requests of equal length that all decode."""

    def __init__(self, client: CoreClient, vocab: int, requests: int, context: int, most: int) -> None:
        """Sends the requests, and steps until each step gives every request a token. `most`: maximum tokens of each."""
        r = random.Random(requests)
        self._client, self._requests, self.generated = client, requests, 0
        self._handles = [
            send(client, [r.randrange(vocab) for _ in range(context)], Sampling(most)) for _ in range(requests)
        ]
        self._context = context
        full = 0
        while full < 8:
            full = full + 1 if self._step() == requests else 0

    @property
    def context(self) -> float:
        """Mean tokens of a request by now."""
        return self._context + self.generated / self._requests

    def seconds(self, steps: int) -> float:
        """Median of a step."""
        times = [time.perf_counter()]
        for _ in range(steps):
            if self._step() != self._requests:
                raise RuntimeError("a decode step did not bring a token of each request")
            times.append(time.perf_counter())
        return median(after - before for before, after in itertools.pairwise(times))

    def end(self) -> None:
        self._client.abort(self._handles)
        left = set(self._handles)
        while left:
            outputs = self._client.get_outputs()
            left -= {finished.handle for finished in outputs.finished} if outputs else set()
        self._client.call("reset_prefix_cache")

    def _step(self) -> int:
        outputs = self._client.get_outputs()
        tokens = len(outputs.handles) if outputs else 0
        self.generated += tokens
        return tokens


TITLES = {"llama-3.1-8b": "Llama-3.1-8B", "qwen3-0.6b": "Qwen3-0.6B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
LEAST_DECODE, LEAST_PREFILL, MOST_IDLE, MOST_HOST_MS = 0.8, 0.65, 0.03, 1.0
GAP_NS = 5_000  # ns; gaps between two kernels of one graph are one or two microseconds
BATCHES = {1: (1024, 100), 64: (1024, 60), 256: (512, 40)}  # context, measured steps
SPARE_TOKENS = 120  # tokens that requests may get while others' prompts are computed
BUDGET, PROMPT = 8192, 4096


def check_engine(name: str) -> Callable[[Setup, Say], None]:
    """The part for one shape."""

    def check(setup: Setup, say: Say) -> None:
        title, top = TITLES[name], Ceilings.measure(setup)
        release(setup)
        say(f"{title}: ceilings in this part", str(top))
        options: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_num_seqs": setup.pick(256, 8),
            "max_num_batched_tokens": setup.pick(BUDGET, 256),
            "max_model_len": setup.pick(PROMPT + 256, 256),
            "cudagraph_capture_sizes": list(BATCHES),
        }
        if setup.rehearse:
            options["kv_cache_memory_bytes"] = 1 << 24
        folder = setup.config_only(name)
        step = with_client(setup, folder, lambda client: _measure(setup, say, client, name, top), **options)
        if name == "qwen3-0.6b":  # in a short step the overhead around it is visible

            def through_sockets(client: CoreClient) -> float:
                decoding = _decoding(setup, client, name, 64)
                try:
                    return decoding.seconds(setup.pick(BATCHES[64][1], 4))
                finally:
                    decoding.end()

            apart = with_client(setup, folder, through_sockets, multiprocess=True, **options)
            say(
                f"{title}: a step at batch 64, in two processes and in one",
                f"{apart * 1e3:.2f} and {step * 1e3:.2f} ms",
            )

    return check


def _decoding(setup: Setup, client: CoreClient, name: str, requests: int) -> Decoding:
    context, steps = setup.pick(BATCHES[requests], (24, 4))
    vocab, most = setup.shape(name)["vocab_size"], 3 * steps + setup.pick(SPARE_TOKENS, 60)
    return Decoding(client, vocab, setup.pick(requests, min(requests, 8)), context, most)


def _measure(setup: Setup, say: Say, client: CoreClient, name: str, top: Ceilings) -> float:
    """All measurements except the start; → seconds of a decode step at batch 64."""
    title, work, clock = TITLES[name], Work(setup.shape(name)), HostClock()
    of_64 = 0.0
    for requests in BATCHES:
        decoding = _decoding(setup, client, name, requests)
        count, steps = setup.pick(requests, min(requests, 8)), setup.pick(BATCHES[requests][1], 4)
        before = decoding.context
        took = decoding.seconds(steps)
        least, want = work.step_seconds(count, (before + decoding.context) / 2, top)
        judged = requests > 1 or name == "llama-3.1-8b"
        say(
            f"{title}: decode at batch {requests}",
            f"{least / took:.0%} of what the {want} allows: {took * 1e3:.3f} ms a step, {count / took:,.0f} tokens/s",
            setup.judge(least / took >= LEAST_DECODE) if judged else None,
        )
        if requests == 64:
            of_64 = took
            _say_idle(setup, say, title, decoding)
        if requests == 256:
            with clock.watch(client):
                decoding.seconds(steps)
            busy = median(clock.busy)
            say(f"{title}: host time at batch 256", f"{busy:.2f} ms a step", setup.judge(busy < MOST_HOST_MS))
        decoding.end()
    _say_prefill(setup, say, client, name, work, top)
    if isinstance(client, InprocClient) and isinstance(client.core, EngineCore) and setup.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        say(f"{title}: GPU memory in use", f"{(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB")
    else:
        say(f"{title}: GPU memory in use", "none in a rehearsal")
    return of_64


def _say_idle(setup: Setup, say: Say, title: str, decoding: Decoding) -> None:
    """Report the idle time from the timestamps of all kernels and copies of some steps."""
    cuda = setup.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        decoding.seconds(setup.pick(24, 3))
        if cuda:
            torch.cuda.synchronize()
    where = DeviceType.CUDA if cuda else DeviceType.CPU
    spans = [
        (1e3 * event.time_range.start, 1e3 * event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == where
    ]
    name = f"{title}: GPU idle between steps at batch 64"
    if len(spans) < 10:
        say(name, "not measured: the profiler saw no kernels", setup.judge(False))
        return
    long, all_gaps = idle_shares(spans)
    say(name, f"{long:.1%}; with the gaps between kernels of a step {all_gaps:.1%}", setup.judge(long < MOST_IDLE))


def idle_shares(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the time from the first to the last of `spans` (start and end, ns), the first fifth left out: the share that
    lies in gaps of more than `GAP_NS`, and in all gaps."""
    ordered = sorted(spans)[len(spans) // 5 :]
    end, long, total = ordered[0][0], 0.0, 0.0
    for start, stop in ordered:
        gap = max(0.0, start - end)
        total += gap
        long += gap if gap > GAP_NS else 0.0
        end = max(end, stop)
    return long / (end - ordered[0][0]), total / (end - ordered[0][0])


def _say_prefill(setup: Setup, say: Say, client: CoreClient, name: str, work: Work, top: Ceilings) -> None:
    length, vocab = setup.pick(PROMPT, 64), setup.shape(name)["vocab_size"]
    count = setup.pick(32 if name == "qwen3-0.6b" else 12, 3)
    r = random.Random(11)

    def prompts(n: int) -> list[Request]:
        return [([r.randrange(vocab) for _ in range(length)], Sampling(1)) for _ in range(n)]

    complete(client, prompts(2))
    times = []
    for _ in range(2):
        requests = prompts(count)
        began = time.perf_counter()
        complete(client, requests)
        times.append(time.perf_counter() - began)
    took = min(times)
    share = work.flops(count * length, count, count * length * (length + 1) / 2) / took / top.flops
    say(
        f"{TITLES[name]}: prefill",
        f"{share:.0%} of the matrix rate, {count * length / took:,.0f} tokens/s",
        setup.judge(share >= LEAST_PREFILL),
    )


# ------------------------------------------------------------------ beside transformers

PEER = "llama-3.1-8b"
PEER_BAR = "faster than transformers' continuous batching, Llama-3.1-8B"
LEAST_RATIO = 5.0


def check_peer(setup: Setup, say: Say) -> None:
    """The same requests through Mainspring and through `generate_batch`, without the start of the latter."""
    folder, r = setup.config_only(PEER), random.Random(9)
    count, tokens, vocab = setup.pick(64, 4), setup.pick(128, 4), setup.shape(PEER)["vocab_size"]
    lengths = setup.pick((64, 512), (5, 20))
    prompts = [[r.randrange(vocab) for _ in range(r.randint(*lengths))] for _ in range(count)]

    def ours(client: CoreClient) -> float:
        complete(client, [(prompt, Sampling(4)) for prompt in prompts])
        client.call("reset_prefix_cache")
        began = time.perf_counter()
        complete(client, [(prompt, Sampling(tokens)) for prompt in prompts])
        return time.perf_counter() - began

    options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 1024}
    options |= {"max_num_seqs": setup.pick(64, 4), "cudagraph_capture_sizes": [8, 16, 32, 48, 64]}
    options |= {"kv_cache_memory_bytes": 1 << setup.pick(34, 24)}
    mine = with_client(setup, folder, ours, **options)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(setup.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    model.generation_config.eos_token_id = -1  # no token has this id
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    # by default it fills the memory: on a CPU all that the machine has
    batching = setup.pick(None, ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64))
    why = ""
    for attention in (None, "paged|sdpa"):  # its default is any installed kernel package, or a download
        try:
            if attention:
                model.set_attn_implementation(attention)
            theirs = _peer_seconds(model, prompts, tokens, batching)
        except Exception as error:  # any error of that version on this machine
            why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"
            continue
        each = " and ".join(f"{count * tokens / s:,.0f}" for s in (mine, theirs))
        how = attention or "the attention it chooses"
        say(PEER_BAR, f"{theirs / mine:.1f}×: {each} tokens/s, with {how}", setup.judge(theirs / mine >= LEAST_RATIO))
        return
    say(
        PEER_BAR,
        f"not measured: transformers' own did not run here ({why}); ours {count * tokens / mine:,.0f} tokens/s",
    )


def _peer_seconds(
    model: Any, prompts: list[list[int]], tokens: int, batching: ContinuousBatchingConfig | None
) -> float:
    """Seconds from the submission of the first request to the end of the last, as recorded by transformers."""
    found = model.generate_batch(prompts, None, batching, max_new_tokens=tokens, progress_bar=False)
    outputs = list(found.values())
    if [len(output.generated_tokens) for output in outputs] != [tokens] * len(prompts):
        raise RuntimeError("generate_batch gave outputs of wrong lengths")
    return float(max(output.lifespan[1] for output in outputs) - min(output.created_time for output in outputs))


def _engine_bars(title: str) -> list[Bar]:
    return [
        Bar(f"{title}: ceilings in this part"),
        Bar(f"{title}: decode at batch 1", "≥ 80%" if title.startswith("Llama") else ""),
        Bar(f"{title}: decode at batch 64", "≥ 80%"),
        Bar(f"{title}: decode at batch 256", "≥ 80%"),
        Bar(f"{title}: prefill", "≥ 65%"),
        Bar(f"{title}: GPU idle between steps at batch 64", "< 3%"),
        Bar(f"{title}: host time at batch 256", "< 1 ms"),
        Bar(f"{title}: GPU memory in use"),
    ]


KERNEL_BARS = [
    Bar("device copy, bytes read and written"),
    Bar("bf16 matrix product, 8192 × 8192 × 8192"),
    *(
        Bar(f"{kind} attention{over} against fp32, up to 8,192 tokens", "≤ 0.01")
        for over in CLOSE_TO_FP32
        for kind in ("decode", "prefill")
    ),
    *(
        Bar(name)
        for spec in SPECS
        for name in (*(f"decode attention, {spec}, batch {n}" for n in DECODE_BATCHES), f"prefill attention, {spec}")
    ),
    *(
        bar
        for name in SCANS
        for bar in (
            Bar(f"{name} against the reference", "≤ 0.01"),
            Bar(f"{name} in parts", "the same bits"),
            Bar(f"{name}, time"),
        )
    ),
    *(Bar(f"{name}, bandwidth") for name in ("rms_norm", "add_rms_norm", "act_and_mul", "rotate", "append")),
    Bar("experts against the reference", "≤ 0.01"),
    Bar("experts, Qwen3-30B-A3B, rows"),
    Bar("keyed choice, [256, 128256]"),
]
BARS: dict[str, list[Bar]] = {
    "kernels": KERNEL_BARS,
    **{name: _engine_bars(title) for name, title in TITLES.items()},
    "transformers": [Bar(PEER_BAR, "≥ 5×")],
}
BARS["qwen3-0.6b"].append(Bar("Qwen3-0.6B: a step at batch 64, in two processes and in one"))
PARTS: dict[str, Callable[[Setup, Say], None]] = {
    "kernels": check_kernels,
    **{name: check_engine(name) for name in TITLES},
    "transformers": check_peer,
}
