"""Prompts with images from the user's call to the tokens, with real processors: the tokens are those that transformers
generates, in each engine, whatever the steps are and whatever dies."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from daemons import Daemon, short_folder
from mainspring import LLM, AsyncEngineArgs, AsyncLLMEngine, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from mainspring.cli.main import main
from mainspring.ipc.errors import InvalidRequestError, NotPermittedError, NotSupportedError
from media_folders import file_of, picture, tone
from media_models import COUNT, GREEDY, HEARS, PLACEHOLDER, Reference, ids, make, run

MODELS = ["llava", "qwen2_vl", "glmasr", "qwen2_audio"]
SIZES = {"max_model_len": 256, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "block_size": 16}
CAT, DOG = picture(1), picture(2, 64, 100)
MEOW, BARK = tone(1.0), tone(0.6, hertz=200.0)


class Model:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, make(name, folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.reference = Reference(name, self.folder)
        torch.set_num_threads(threads)
        self.tokens = cache(lambda case, count: self.reference.tokens(*self.case(case), count))
        # the processor of the one that hears takes one sound in a prompt
        self.cases = [case for case in CASES if name != "glmasr" or case.index(":") < 2]

    def case(self, case: str) -> tuple[str, list[Any]]:
        """A prompt and its items, by name: a letter for each item, then what is asked."""
        letters, _, text = case.partition(":")
        named: dict[str, Any] = {"c": CAT, "d": DOG} if self.name not in HEARS else {"c": MEOW, "d": BARK}
        return PLACEHOLDER[self.name] * len(letters) + text, [named[letter] for letter in letters]

    def prompt(self, case: str) -> Any:
        text, items = self.case(case)
        if self.name in HEARS:
            return {"prompt": text, "multi_modal_data": {"audio": [(samples, 16_000) for samples in items]}}
        return {"prompt": text, "multi_modal_data": {"image": [file_of(image) for image in items]}}


CASES = ["c:what is it?", "d:what is it?", "cd:which one is the cat?", ":no picture", "dc:and now?", "c:what else?"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("llava", tmp_path_factory.mktemp("models") / "llava")


def engine_of(model: Model, **options: Any) -> LLMEngine:
    args = EngineArgs(str(model.folder), **{**SIZES, **options})
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("budget", [256, 16], ids=["whole", "chunked"])
def test_a_batch_has_the_tokens_of_transformers(model: Model, budget: int) -> None:
    with engine_of(model, max_num_batched_tokens=budget) as engine:
        found = run(engine, {case: model.prompt(case) for case in model.cases})
        for case in model.cases:
            assert ids(found[case]) == model.tokens(case, COUNT), case
            assert found[case].prompt_token_ids == model.reference.prompt_ids(*model.case(case))
            assert found[case].prompt == model.case(case)[0]
        assert engine.get_supported_tasks() == ("generate",)
        assert set(engine.get_tokenizer().media) >= {"audio" if model.name in HEARS else "image"}


def test_a_prefix_with_the_same_image_is_found_and_one_with_another_is_not(model: Model) -> None:
    with engine_of(model) as engine:
        first = run(engine, {"a": model.prompt("c:what is it? " * 3)})["a"]
        again = run(engine, {"b": model.prompt("c:what is it? " * 3)})["b"]
        other = run(engine, {"c": model.prompt("d:what is it? " * 3)})["c"]
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens >= 16
        assert ids(again) == ids(first) == model.tokens("c:what is it? " * 3, COUNT)
        assert other.num_cached_tokens == 0
        assert ids(other) == model.tokens("d:what is it? " * 3, COUNT)
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        engine.reset_prefix_cache()
        assert ids(run(engine, {"d": model.prompt("c:what is it? " * 3)})["d"]) == ids(first)


def test_each_form_of_an_image_and_of_a_prompt(llava: Model) -> None:
    text, _ = llava.case("c:what is it?")
    url = "data:image/png;base64," + base64.b64encode(file_of(CAT)).decode()
    pixels = np.asarray(CAT)
    with engine_of(llava) as engine:
        forms = [CAT, pixels, torch.from_numpy(pixels.copy()).permute(2, 0, 1), url, file_of(CAT), [CAT]]
        prompts: dict[str, Any] = {
            str(at): {"prompt": text, "multi_modal_data": {"image": form}} for at, form in enumerate(forms)
        }
        token_ids = engine.get_tokenizer().encode(text)
        prompts["ids"] = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": CAT}}
        prompts["uuid"] = {**prompts["0"], "multi_modal_uuids": {"image": ["cat"]}}
        prompts["known"] = {"prompt": text, "multi_modal_uuids": {"image": ["cat"]}}
        for name, output in run(engine, prompts).items():
            assert ids(output) == llava.tokens("c:what is it?", COUNT), name


def test_several_completions_and_beams_share_their_images(llava: Model) -> None:
    prompt = llava.prompt("cd:which one is the cat?")
    with engine_of(llava) as engine:
        several = SamplingParams(n=3, temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        output = run(engine, {"n": prompt}, several)["n"]
        assert [one.token_ids for one in output.outputs] == [llava.tokens("cd:which one is the cat?", COUNT)] * 3
        beam = BeamSearchParams(beam_width=1, max_tokens=COUNT, ignore_eos=True).sampling_params()
        assert ids(run(engine, {"beam": prompt}, beam)["beam"]) == llava.tokens("cd:which one is the cat?", COUNT)


def test_a_beam_search_goes_on_when_its_images_were_forgotten_between_two_rounds(
    llava: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(llava) as engine:
        send = engine.engine_core.add_request

        def forget_and_send(*args: Any, **options: Any) -> None:
            engine.reset_encoder_cache()
            send(*args, **options)

        monkeypatch.setattr(engine.engine_core, "add_request", forget_and_send)
        beam = BeamSearchParams(beam_width=1, max_tokens=COUNT, ignore_eos=True).sampling_params()
        output = run(engine, {"beam": llava.prompt("c:what is it?")}, beam)["beam"]
        assert ids(output) == llava.tokens("c:what is it?", COUNT)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"image": [file_of(CAT), file_of(CAT)]}, InvalidRequestError, "'<image>'"),
        ({"image": b"no image"}, InvalidRequestError, "image"),
        ({"image": file_of(CAT)[:200]}, InvalidRequestError, "image"),
        ({"image": "http://127.0.0.1/x.png"}, InvalidRequestError, "allowed_media_domains"),
        ({"image": "file:///etc/passwd"}, InvalidRequestError, "allowed_local_media_path"),
        ({"video": b""}, NotSupportedError, "this model takes: text, image"),
        ({"image": [file_of(CAT)] * 33}, InvalidRequestError, "limit_mm_per_prompt"),
    ],
)
def test_wrong_media_are_refused_and_others_go_on(llava: Model, data: Any, error: Any, words: str) -> None:
    engine = wrong_engine(llava)
    engine.add_request("good", llava.prompt("c:what is it?"), GREEDY)
    with pytest.raises(error, match=words):
        engine.add_request("bad", {"prompt": "<image>?", "multi_modal_data": data}, GREEDY)
    assert ids(run(engine, {})["good"]) == llava.tokens("c:what is it?", COUNT)


@cache
def wrong_engine(llava: Model) -> LLMEngine:
    return engine_of(llava)


# ------------------------------------------------------------------ processes


def runs_media(process: psutil.Process) -> bool:
    return "mainspring.media" in process.cmdline()


def children(name: str) -> list[psutil.Process]:
    """Processes below this one that run a module."""
    mine = psutil.Process().children(recursive=True)
    return [one for one in mine if one.is_running() and name in one.cmdline()]


@pytest.fixture(scope="module")
def llm(llava: Model) -> Iterator[LLM]:
    made = LLM(str(llava.folder), media_workers=1, **SIZES)
    yield made
    made.shutdown()


def test_an_llm_generates_and_chats_about_images(llm: LLM, llava: Model) -> None:
    assert not children("mainspring.media"), "workers start when they are needed"
    outputs = llm.generate([llava.prompt(case) for case in CASES], GREEDY, use_tqdm=False)
    assert [ids(output) for output in outputs] == [llava.tokens(case, COUNT) for case in CASES]
    parts = [{"type": "image", "image": CAT}, {"type": "text", "text": "what is it?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert output.prompt == "[user]<image>what is it?"
    (told,) = llm.preprocess_chat([{"role": "user", "content": parts}])
    (again,) = llm.generate([told], GREEDY, use_tqdm=False)
    assert (ids(again), again.prompt_token_ids) == (ids(output), output.prompt_token_ids)
    (found,) = llm.beam_search([llava.prompt("c:what is it?")], BeamSearchParams(beam_width=1, max_tokens=COUNT))
    first = llava.tokens("c:what is it?", COUNT)
    assert found.sequences[0].tokens[-len(first) :][:4] == first[:4]
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*'<image>'"):
        llm.generate([llava.prompt("c:x"), {**llava.prompt("c:x"), "prompt": "none"}], GREEDY, use_tqdm=False)


@pytest.mark.slow
def test_the_death_of_a_media_worker_costs_no_request(llm: LLM, llava: Model) -> None:
    def ask(seed: int) -> list[list[int]]:
        prompts = [
            {"prompt": "<image>?", "multi_modal_data": {"image": file_of(picture(seed + at))}} for at in range(6)
        ]
        return [ids(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    before = ask(100)
    (worker,) = children("mainspring.media")
    worker.send_signal(signal.SIGKILL)
    llm.reset_prefix_cache()
    assert ask(100) == before
    (after,) = children("mainspring.media")
    assert after.pid != worker.pid


async def streamed(engine: AsyncLLMEngine, name: str, prompt: Any, params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, name):
        tokens = ids(output)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio"])  # llava is in test_media_chaos.py
def test_streams_go_on_with_the_same_tokens_when_the_core_dies(name: str, tmp_path: Path) -> None:
    """With positions that have several axes, and with sounds."""
    model, count = Model(name, tmp_path / name), 100
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    args = AsyncEngineArgs(str(model.folder), **SIZES)

    async def test() -> None:
        async with AsyncLLMEngine.from_engine_args(args) as engine:
            streams = [asyncio.create_task(streamed(engine, case, model.prompt(case), params)) for case in model.cases]
            seen = engine.generate(model.prompt("c:first"), params, "first")
            for _ in range(3):
                await anext(seen)
            supervisor: Any = engine.engine_core._connection._core.supervisor  # other tests may have a core too
            os.kill(supervisor.core_pid, signal.SIGKILL)
            tokens: list[int] = []
            async for output in seen:
                tokens = ids(output)
            found = await asyncio.gather(*streams)
            assert tokens == model.tokens("c:first", count)
            assert found == [model.tokens(case, count) for case in model.cases]

    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.mark.slow
def test_frontends_of_a_daemon_share_its_media_workers(llava: Model) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    parts = [{"type": "image", "image": CAT}, {"type": "text", "text": "what is it?"}]
    with short_folder() as folder:
        daemon = Daemon(folder, "--model", str(llava.folder), *flags)
        try:
            daemon.ready_line()
            with LLM(connect=daemon.address) as one, LLM(connect=daemon.address) as other:
                (first,) = one.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
                (second,) = other.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
                assert first.prompt == "[user]<image>what is it?"
                assert ids(first) == ids(second)
                assert (second.num_cached_tokens or 0) >= 16
                found = other.generate([llava.prompt(case) for case in CASES], GREEDY, use_tqdm=False)
                assert [ids(output) for output in found] == [llava.tokens(case, COUNT) for case in CASES]
                one.reset_mm_cache()
                with pytest.raises(NotPermittedError):
                    one.reset_encoder_cache()
            assert len(list(filter(runs_media, psutil.Process(daemon.process.pid).children(recursive=True)))) == 1
        finally:
            daemon.end()


@pytest.mark.slow
def test_media_go_on_over_tcp_when_another_daemon_takes_the_place(llava: Model) -> None:
    """Without keys, too. The media workers of the next daemon have another port."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    started: list[Daemon] = []

    def start(folder: Path) -> None:
        started.append(Daemon(folder, "--model", str(llava.folder), "--insecure", *flags, listen=address))
        started[-1].ready_line()

    async def test(folder: Path) -> None:
        start(folder)
        async with AsyncLLMEngine.connect(address) as engine:
            count = 200
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            tokens: list[int] = []
            async for output in engine.generate(llava.prompt("c:first"), params, "first"):
                tokens = ids(output)
                if len(started) == 1:
                    started[0].end()
                    await asyncio.to_thread(start, folder)
            assert tokens == llava.tokens("c:first", count)
            async for output in engine.generate(llava.prompt("d:what is it?"), GREEDY, "second"):
                tokens = ids(output)
            assert tokens == llava.tokens("d:what is it?", COUNT)

    with short_folder() as folder:
        try:
            asyncio.run(asyncio.wait_for(test(folder), 300))
        finally:
            started[-1].end()


@pytest.mark.slow
def test_the_command_line_takes_files(llava: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cat.png").write_bytes(file_of(CAT))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    greedy = ["--temperature=0", f"--max-tokens={COUNT}", "--ignore-eos"]
    asked = ["generate", "--model", str(llava.folder), *flags, *greedy, "--image", str(tmp_path / "cat.png")]
    assert main([*asked, "what is it?"]) == 0
    shown = capsys.readouterr().out
    with engine_of(llava) as engine:
        prompt = {"prompt": "[user]<image>what is it?", "multi_modal_data": {"image": CAT}}
        engine.add_request("a", prompt, GREEDY, tokenization_kwargs={"add_special_tokens": False})
        (output,) = run(engine, {}).values()
    assert shown.strip() == output.outputs[0].text.strip()
