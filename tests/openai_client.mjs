// What the `openai` package of Node.js sees of a server. Usage: node openai_client.mjs '{"url", "embeddings", "says"}'
// It prints one JSON object: for each check what it has found, or {"threw": ...}. tests/test_http_node.py judges it.

import OpenAI from "openai";
import { LengthFinishReasonError } from "openai/error";

const { url, embeddings, says, tool } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Rain in Oslo?" }];
const usual = { model: "tiny", messages, max_tokens: 24, temperature: 0 };
const tools = [{ type: "function", function: tool }];
const schema = {
  type: "object",
  properties: { answer: { type: "boolean" }, city: { enum: ["Oslo", "Rome"] } },
  required: ["answer", "city"],
  additionalProperties: false,
};

async function thrown(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status ?? null, code: error.code ?? null, message: error.message };
  }
}

const checks = {
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return ids;
  },

  async chat() {
    const found = await client.chat.completions.create(usual);
    const [{ message, finish_reason }] = found.choices;
    return { text: message.content, role: message.role, finish_reason, usage: found.usage };
  },

  async streaming() {
    const stream = await client.chat.completions.create({ ...usual, stream: true, stream_options: { include_usage: true } });
    let [text, chunks, reason, usage] = ["", 0, null, null];
    for await (const chunk of stream) {
      chunks += 1;
      text += chunk.choices[0]?.delta.content ?? "";
      reason = chunk.choices[0]?.finish_reason ?? reason;
      usage = chunk.usage ?? usage;
    }
    return { text, chunks, finish_reason: reason, usage };
  },

  async runner() { // the client's own accumulation of a stream
    const runner = client.chat.completions.stream(usual);
    const { choices } = await runner.finalChatCompletion();
    return choices[0].message.content;
  },

  async tools() {
    const found = await client.chat.completions.create({ ...usual, ...says, max_tokens: 600, tools });
    const { message, finish_reason } = found.choices[0];
    return { calls: message.tool_calls, content: message.content, reasoning: message.reasoning, finish_reason };
  },

  async streamedTools() {
    const runner = client.chat.completions.stream({ ...usual, ...says, max_tokens: 600, tools });
    const { choices } = await runner.finalChatCompletion();
    return { calls: choices[0].message.tool_calls, finish_reason: choices[0].finish_reason };
  },

  async required() {
    const choice = { type: "function", function: { name: tool.name } };
    const more = { tools, tool_choice: choice, max_tokens: 600, reasoning_effort: "low", temperature: 1, seed: 3 };
    const found = await client.chat.completions.create({ ...usual, ...more });
    return found.choices[0].message.tool_calls ?? null;
  },

  async structured() {
    const response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    const order = { ...usual, temperature: 1, max_tokens: 600, response_format };
    for (let seed = 0; ; seed += 1) { // the model may reason first, and one of random weights finds no end
      try {
        return (await client.chat.completions.parse({ ...order, seed })).choices[0].message.parsed;
      } catch (error) {
        if (!(error instanceof LengthFinishReasonError) || seed === 15) throw error;
      }
    }
  },

  async response() {
    const found = await client.responses.create({ model: "tiny", input: "Rain?", max_output_tokens: 16, temperature: 0 });
    const kinds = [];
    const stream = await client.responses.create({ model: "tiny", input: "Rain?", max_output_tokens: 16, temperature: 0, stream: true });
    let last = null;
    for await (const event of stream) {
      kinds.push(event.type);
      last = event.response ?? last;
    }
    return { text: found.output_text, kinds: [...new Set(kinds)], output: last.output, stored: (await client.responses.retrieve(found.id)).id === found.id };
  },

  async embeddings() {
    const other = new OpenAI({ baseURL: `${embeddings}/v1`, apiKey: "none", maxRetries: 0 });
    const input = ["the fox jumps", "one two three"];
    const byDefault = await other.embeddings.create({ model: "spring", input }); // the client asks for base64
    const floats = await other.embeddings.create({ model: "spring", input, encoding_format: "float" });
    return { byDefault: byDefault.data.map((one) => one.embedding), floats: floats.data.map((one) => one.embedding) };
  },

  async errors() {
    return {
      badRequest: await thrown(client.chat.completions.create({ ...usual, temperature: -1 })),
      notFound: await thrown(client.chat.completions.create({ ...usual, model: "nothing" })),
      timeout: await thrown(client.chat.completions.create({ ...usual, max_tokens: 3000, ignore_eos: true }, { timeout: 100 })),
      connection: await thrown(new OpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "none", maxRetries: 0 }).models.list()),
    };
  },

  async cancelling() { // of a stream, and of a request in flight
    const long = { ...usual, max_tokens: 3000, ignore_eos: true };
    const stream = await client.chat.completions.create({ ...long, stream: true });
    let chunks = 0;
    for await (const _ of stream) {
      chunks += 1;
      if (chunks === 5) break; // which aborts the request
    }
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 100);
    return { chunks, aborted: await thrown(client.chat.completions.create(long, { signal: controller.signal })) };
  },
};

const results = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    results[name] = await check();
  } catch (error) {
    results[name] = { threw: `${error.constructor.name}: ${error.message}` };
  }
}
console.log(JSON.stringify(results));
