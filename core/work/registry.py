"""What step plans name by number: compiled grammars, LoRA adapters, and the user's functions.

The planner gives the numbers, and says when one is no longer needed. Folders of adapters are read, and grammars
compiled, in threads: until that is done, their requests are not in any plan.
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
    """One of a worker.

    Args:
        make_compiler: of grammars, called with the first one; raises where the checkpoint does not allow any.
        limits: what a LoRA adapter must fit; None: there are none.
        hidden_size: of prompt adapters.
    """

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler] | None = None,
        limits: LoRALimits | None = None,
        hidden_size: int = 0,
    ) -> None:
        self.followers: dict[int, Follower] = {}  # where the output of each grammar's request stands
        self.adapters: dict[int, LoRA] = {}
        self.functions: dict[int, Function] = {}
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._limits, self._hidden_size = limits, hidden_size
        self._thread = ThreadPoolExecutor(1, "mainspring-adapters")
        self._wanted: set[tuple[str, int]] = set()  # prepared, or being prepared, and not dropped
        self._lock = threading.Lock()
        self._next_function = 1

    # ------------------------------------------------------------------ grammars

    def prepare_grammar(self, number: int, kind: str, text: str) -> Future[None]:
        """Compile a grammar.

        Raises:
            NotSupportedError: this checkpoint has none.
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
        """Read an adapter's folder. A prompt adapter is not kept: its embeddings are among the facts."""
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
        """Numbers for functions of this process."""
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
        """In a thread: unless it was dropped while it was made."""
        with self._lock:
            if (kind, number) in self._wanted:
                place[number] = value

    def _drop(self, kind: str, number: int, place: dict[int, Any]) -> None:
        with self._lock:
            self._wanted.discard((kind, number))
            place.pop(number, None)


def _then(future: Future[Any], make: Callable[[Any], Any], on_error: Callable[[], None] = lambda: None) -> Future[Any]:
    """What `make` makes of the future's result, in the thread that brings it."""
    made: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        try:
            made.set_result(make(done.result()))
        except BaseException as error:
            on_error()
            made.set_exception(error)

    future.add_done_callback(settle)
    return made
