"""A service for any number of users: each line that a user sends is a question, and the answer is streamed back. If a
user disconnects, the request is aborted.

    python examples/async_service.py [ADDRESS OF A DAEMON]
    nc localhost 8765
"""

import asyncio
import itertools
import sys

from mainspring import AsyncEngineArgs, AsyncLLMEngine, MainspringError, RequestOutputKind, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=256, output_kind=RequestOutputKind.DELTA)
ids = itertools.count()


async def main() -> None:
    # not a coroutine; it blocks until the model is loaded
    engine = AsyncLLMEngine.connect(sys.argv[1]) if sys.argv[1:] else AsyncLLMEngine.from_engine_args(AsyncEngineArgs())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tokenizer = await engine.get_tokenizer()
        try:
            while question := (await reader.readline()).decode().strip():
                messages = [{"role": "user", "content": question}]
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                try:
                    async for output in engine.generate(prompt, PARAMS, f"question-{next(ids)}"):
                        writer.write(output.outputs[0].text.encode())
                        await writer.drain()  # wait for a slow user; new tokens are merged into one output
                except MainspringError as error:
                    writer.write(str(error).encode())
                writer.write(b"\n")
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with engine, await asyncio.start_server(serve, "localhost", 8765) as server:
        print("listening on localhost:8765", flush=True)
        await server.serve_forever()


asyncio.run(main())
