"""The objects that step plans refer to by number: compiled grammars, LoRA adapters, and the user's functions.

The planner assigns the numbers of grammars and adapters, and drops each when it is no longer needed. Threads compile
grammars and read the folders of adapters. Until that is done, no plan contains their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ...ipc.errors import NotSupportedError
from ...ipc.messages import Adapter
from ...ipc.structured import TOKENS, trace_of
from ..plan.control import AdapterFacts
from .adapter_files import LoRALimits, read_lora, read_prompt_adapter
from .grammar import GrammarCompiler, Matcher, Replay
from .processors import Processors
from .turns import TurnThread

Function = Callable[..., Any]


class Registry:
    """The registry of a worker.

    Args:
        make_compiler: makes the compiler for the first grammar; raises if the checkpoint can't have grammars.
        limits: the limits of LoRA adapters; None: LoRA is disabled.
        hidden_size: the model's hidden size, which prompt adapters must have.
        processors: the classes of logits processors.
    """

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler] | None = None,
        limits: LoRALimits | None = None,
        hidden_size: int = 0,
        processors: Processors | None = None,
    ) -> None:
        self.processors = processors or Processors()
        self.matchers: dict[int, Future[Matcher | Replay]] = {}  # by grammar number, with the state of its request
        self.adapters: dict[int, Future[Any]] = {}  # `LoRA`, or of a prompt adapter the facts
        self.functions: dict[int, Function] = {}
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self.limits, self._hidden_size = limits, hidden_size
        self._thread = TurnThread("mainspring-adapters")
        self._next_function = 1

    def prepare_grammar(self, number: int, kind: str, text: str, frontend: int = 0) -> Future[None]:
        """Compile a grammar for a request of `frontend`, and register it under `number`.

        Raises:
            NotSupportedError: this checkpoint can't have grammars.
        """
        if kind == TOKENS:
            ready: Future[Matcher | Replay] = Future()
            self.matchers[number] = ready
            ready.set_result(Replay(trace_of(text)))
            return _then(ready, lambda _: None)
        if self._compiler is None:
            if self._make_compiler is None:
                raise NotSupportedError("structured outputs are for models that generate")
            self._compiler = self._make_compiler()
        compiled = self._compiler.submit(kind, text, frontend)
        self.matchers[number] = made = _then(compiled, lambda grammar: grammar.matcher())
        return _then(made, lambda _: None)

    def drop_grammar(self, number: int) -> None:
        if (made := self.matchers.pop(number, None)) is not None:
            made.cancel()

    def prepare_adapter(self, number: int, adapter: Adapter, frontend: int = 0) -> Future[AdapterFacts]:
        """Read an adapter's folder for `frontend`, and register the adapter under `number`. The embeddings of a prompt
        adapter are part of the returned facts."""
        if adapter.num_virtual_tokens:
            reading = self._thread.submit(frontend, read_prompt_adapter, adapter, self._hidden_size)
        elif self.limits is None:
            raise NotSupportedError("this core serves no LoRA adapters: start it with enable_lora=True")
        else:
            reading = self._thread.submit(frontend, read_lora, adapter, self.limits)
        self.adapters[number] = reading
        return _then(reading, lambda found: found if adapter.num_virtual_tokens else AdapterFacts(found.digest))

    def drop_adapter(self, number: int) -> None:
        if (reading := self.adapters.pop(number, None)) is not None:
            reading.cancel()

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


def _then(future: Future[Any], make: Callable[[Any], Any]) -> Future[Any]:
    """A future of `make(result)`. `make` runs in the thread that completes `future`. If it is cancelled, so is
    `future`."""
    made: Future[Any] = Future()
    made.add_done_callback(lambda done: done.cancelled() and future.cancel())

    def settle(done: Future[Any]) -> None:
        if not made.set_running_or_notify_cancel():
            return
        try:
            made.set_result(make(done.result()))
        except BaseException as error:
            made.set_exception(error)

    future.add_done_callback(settle)
    return made
