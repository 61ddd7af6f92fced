"""Beam search in rounds. A round is one request for each beam, for one token and the likeliest log probabilities.

The ``2 * width`` likeliest next tokens of each beam are its candidates. A candidate that is a stop token or end of
sequence completes its beam. Of all other candidates, the `width` with the largest sum of log probabilities are the
beams of the next round. The search ends at `max_tokens`, when no beam is left, or, with `early_stopping`, when `width`
beams are complete. The best beams have the largest score ``sum / length ** length_penalty``, where the length counts
prompt and output without the stop token. That is vLLM's formula.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...ipc.messages import AddRequest, Finished, FinishReason
from ...ipc.params import RequestOutputKind
from ..text.tokenizer import Tokenizer
from .input_processor import EngineCoreRequest, core_message
from .outputs import Logprob
from .request_state import Completion, RequestState


@dataclass(slots=True)
class BeamSearchSequence:
    """A continuation that `LLM.beam_search` found."""

    tokens: list[int]  # prompt and output
    logprobs: list[dict[int, Logprob]]  # of the output's tokens
    cum_logprob: float
    text: str  # of prompt and output
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best continuations of one prompt, the best one first."""

    sequences: list[BeamSearchSequence]


class _Beam(NamedTuple):
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]  # for each token: itself first, then the candidates beside it
    total: float
    stop_token: int | None = None  # the token that completed the beam

    def longer(self, token: int, likeliest: dict[int, Logprob], stop: bool = False) -> _Beam:
        scored = likeliest[token]
        logprobs = [*self.logprobs, {token: scored, **likeliest}]
        return _Beam([*self.token_ids, token], logprobs, self.total + scored.logprob, token if stop else None)

    def score(self, prompt_len: int, length_penalty: float) -> float:
        length = max(1, prompt_len + len(self.token_ids) - (self.stop_token is not None))  # 0: it was never sent
        return self.total / float(length**length_penalty)


class BeamRequest(RequestState):
    """A request that is a beam search. It has one output, at the end."""

    def __init__(
        self, source: EngineCoreRequest, handles: Sequence[int], tokenizer: Tokenizer | None, now: float
    ) -> None:
        super().__init__(source, handles, tokenizer, now)
        self.output_kind, self.makes_text_at_end = RequestOutputKind.FINAL_ONLY, True
        self._stops = source.eos_token_ids.union(source.params.stop_token_ids or ())
        self._live = [_Beam([], [], 0.0)]  # beams of the current round, in the order of `completions`
        self._complete: list[_Beam] = []
        self._ended = False

    def next_round(self, handles: Iterator[int]) -> list[AddRequest]:
        if self._ended:
            return []
        params = self.source.params
        failed = next((one for one in self.completions if one.finish_reason not in ("length", "stop")), None)
        if failed is None:
            found: list[tuple[float, _Beam, int, dict[int, Logprob]]] = []
            for beam, completion in zip(self._live, self.completions, strict=True):
                likeliest = completion.logprobs[0]
                for token, scored in likeliest.items():
                    if token in self._stops:
                        self._complete.append(beam.longer(token, likeliest, stop=True))
                    else:
                        found.append((beam.total + scored.logprob, beam, token, likeliest))
            found.sort(key=lambda one: -one[0])
            self._live = [beam.longer(token, likeliest) for _, beam, token, likeliest in found[: params.width]]
        assert params.max_tokens is not None
        done = params.early_stopping is True and len(self._complete) >= params.width
        if failed or done or not self._live or len(self._live[0].token_ids) >= params.max_tokens:
            self._end(failed)
            return []
        age = time.monotonic() - self.added
        messages = [core_message(self.source, next(handles), beam.token_ids, age_s=age) for beam in self._live]
        self.completions = [Completion(self, i, message.handle, None) for i, message in enumerate(messages)]
        return messages

    def _end(self, failed: Completion | None) -> None:
        params, prompt_len = self.source.params, len(self.source.prompt_token_ids)
        beams = [*self._complete, *self._live]
        beams.sort(key=lambda beam: -beam.score(prompt_len, params.length_penalty))
        self.completions, self._ended = [], True
        for index, beam in enumerate(beams[: params.n]):
            completion = Completion(self, index, -1, self._text(), list(beam.token_ids), beam.logprobs, beam.total)
            ended = Finished(-1, "length" if beam.stop_token is None else "stop", beam.stop_token)
            completion.advance(ended)
            if failed is not None:
                completion.finish_reason, completion.error = failed.finish_reason, failed.error
                completion.stop_reason = failed.stop_reason
            self.completions.append(completion)
