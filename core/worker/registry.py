"""The objects that step plans refer to by number: compiled grammars, LoRA adapters, and the user's functions.

The planner assigns the numbers of grammars and adapters, and drops each when it is no longer needed. Threads compile
grammars and read the folders of adapters. Until that is done, no plan contains their requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...ipc.errors import NotSupportedError
from ...ipc.messages import Adapter
from ..model.run.lora import LoRA
from ..plan.control import AdapterFacts
from .adapter_files import LoRALimits, read_lora, read_prompt_adapter
from .grammar import Follower, Grammar, GrammarCompiler

Function = Callable[..., Any]


class Registry:
    """The registry of a worker.

    Args:
        make_compiler: makes the compiler for the first grammar; raises if the checkpoint can't have grammars.
        limits: the limits of LoRA adapters; None: LoRA is disabled.
        hidden_size: the model's hidden size, which prompt adapters must have.
    """

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler] | None = None,
        limits: LoRALimits | None = None,
        hidden_size: int = 0,
    ) -> None:
        self.followers: dict[int, Follower] = {}  # by grammar number, with the state of its request
        self.adapters: dict[int, LoRA] = {}
        self.functions: dict[int, Function] = {}
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._limits, self._hidden_size = limits, hidden_size
        self._thread = ThreadPoolExecutor(1, "mainspring-adapters")
        self._wanted: set[tuple[str, int]] = set()  # numbers prepared or in preparation, and not dropped
        self._lock = threading.Lock()
        self._next_function = 1

    # ------------------------------------------------------------------ grammars

    def prepare_grammar(self, number: int, kind: str, text: str) -> Future[None]:
        """Compile a grammar, and register it under `number`.

        Raises:
            NotSupportedError: this checkpoint can't have grammars.
        """
        if self._compiler is None:
            if self._make_compiler is None:
                raise NotSupportedError("structured outputs are for models that generate")
            self._compiler = self._make_compiler()
        self._wanted.add(("grammar", number))

        def keep(grammar: Grammar) -> None:
            self._keep("grammar", number, self.followers, Follower(grammar.matcher()))

        return _then(self._compiler.submit(kind, text), keep, lambda: self.drop_grammar(number))

    def drop_grammar(self, number: int) -> None:
        self._drop("grammar", number, self.followers)

    # ------------------------------------------------------------------ adapters

    def prepare_adapter(self, number: int, adapter: Adapter) -> Future[AdapterFacts]:
        """Read an adapter's folder, and register a LoRA adapter under `number`. A prompt adapter is not registered: its
        embeddings are part of the returned facts."""
        if adapter.num_virtual_tokens:
            prompt = self._thread.submit(read_prompt_adapter, adapter, self._hidden_size)
            return _then(prompt, lambda found: AdapterFacts(found.digest, found.embeddings))
        if self._limits is None:
            raise NotSupportedError("this core serves no LoRA adapters: start it with enable_lora=True")
        self._wanted.add(("adapter", number))

        def keep(lora: LoRA) -> AdapterFacts:
            self._keep("adapter", number, self.adapters, lora)
            return AdapterFacts(lora.digest)

        return _then(self._thread.submit(read_lora, adapter, self._limits), keep, lambda: self.drop_adapter(number))

    def drop_adapter(self, number: int) -> None:
        self._drop("adapter", number, self.adapters)

    # ------------------------------------------------------------------ functions

    def lend_functions(self, functions: Sequence[Function]) -> tuple[int, ...]:
        """Register functions of this process, and return their numbers."""
        first = self._next_function
        self._next_function += len(functions)
        numbers = tuple(range(first, self._next_function))
        self.functions.update(zip(numbers, functions, strict=True))
        return numbers

    def drop_functions(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.functions.pop(number, None)

    # ------------------------------------------------------------------ inside

    def _keep(self, kind: str, number: int, place: dict[int, Any], value: Any) -> None:
        """Register a value, unless its number was dropped meanwhile. Called in the thread that made the value."""
        with self._lock:
            if (kind, number) in self._wanted:
                place[number] = value

    def _drop(self, kind: str, number: int, place: dict[int, Any]) -> None:
        with self._lock:
            self._wanted.discard((kind, number))
            place.pop(number, None)


def _then(future: Future[Any], make: Callable[[Any], Any], on_error: Callable[[], None] = lambda: None) -> Future[Any]:
    """A future of `make(result)`. `make` runs in the thread that completes `future`; `on_error` runs if that fails."""
    made: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        try:
            made.set_result(make(done.result()))
        except BaseException as error:
            on_error()
            made.set_exception(error)

    future.add_done_callback(settle)
    return made
