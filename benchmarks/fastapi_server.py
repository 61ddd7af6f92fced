"""The usual way to serve chat completions, for comparison: FastAPI, pydantic models and uvicorn in front of the same
`AsyncLLMEngine`. benchmarks/http_load.py --fastapi FOLDER starts it.

    python benchmarks/fastapi_server.py ADDRESS TOKENIZER
"""

# No `from __future__ import annotations`: FastAPI evaluates them, also those of a local class.
import socket
import sys
import time
import uuid
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from mainspring import AsyncLLMEngine, SamplingParams


class Message(BaseModel):
    role: str
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)


class ChatRequest(BaseModel):
    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    tools: list[dict[str, Any]] | None = None


class Choice(BaseModel):
    index: int
    message: Message
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


def main() -> None:
    address, tokenizer_path = sys.argv[1:]
    engine = AsyncLLMEngine.connect(address, tokenizer=tokenizer_path)
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> ChatResponse:
        tokenizer = await engine.get_tokenizer()
        ids = tokenizer.apply_chat_template(request.messages, tools=request.tools, add_generation_prompt=True)
        given = {"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        params = SamplingParams(max_tokens=request.max_tokens, stop=request.stop, n=request.n, **options)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        output = None
        async for found in engine.generate({"prompt_token_ids": ids}, params, name):
            output = found
        assert output is not None
        choices = [
            Choice(
                index=one.index, message=Message(role="assistant", content=one.text), finish_reason=one.finish_reason
            )
            for one in output.outputs
        ]
        prompt, generated = len(output.prompt_token_ids or ()), sum(len(one.token_ids) for one in output.outputs)
        usage = Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)
        return ChatResponse(id=name, created=int(time.time()), model=request.model or "", choices=choices, usage=usage)

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(f"ready at http://127.0.0.1:{listener.getsockname()[1]};", flush=True)
        config = uvicorn.Config(app, http="httptools", loop="uvloop", access_log=False, log_level="warning")
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
