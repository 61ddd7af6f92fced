#!/usr/bin/env node
// Streams one completion: token ids in, token ids out, one a line, and a line of JSON at the end.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { Client } from "./client.mjs";

const USAGE = `Usage: node stream.mjs [options] ADDRESS TOKEN_ID...
  --max-tokens N   most tokens of output (16)      --temperature T  0: the likeliest token (0)
  --seed=S         64 bits, signed (random)        --stop ID        a stop token; may be repeated
  --ignore-eos     go on after the model's end     --abort-after N  abort after so many tokens
  --key FILE --server-key FILE                     for tcp: as \`mainspring keys new\` made them`;

const text = (values) => Object.fromEntries(values.map((name) => [name, { type: "string" }]));
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    ...text(["max-tokens", "temperature", "seed", "abort-after", "key", "server-key"]),
    stop: { type: "string", multiple: true, default: [] },
    "ignore-eos": { type: "boolean", default: false },
  },
});
const [address, ...prompt] = positionals;
if (prompt.length === 0) {
  console.error(USAGE);
  process.exit(2);
}
const key = (file) => readFileSync(file, "utf8").slice(0, 40); // a name may follow
const pub = values.key?.replace(/\.key$/, ".pub");
const options = values.key
  ? { curveSecretKey: key(values.key), curvePublicKey: key(pub), curveServerKey: key(values["server-key"]) }
  : {};
const seed = values.seed === undefined ? randomBytes(8).readBigInt64BE() : BigInt(values.seed);
const tokenIds = [];
const client = new Client(address, { options });
try {
  const eosTokens = await client.connect();
  const stop = [...values.stop.map(Number), ...(values["ignore-eos"] ? [] : eosTokens)];
  const sampling = [Number(values["max-tokens"] ?? 16), seed, Number(values.temperature ?? 0), 1, 0, 0, 0, stop];
  const { handle, done } = client.complete(prompt.map(Number), sampling, (token) => {
    console.log(token);
    if (tokenIds.push(token) === Number(values["abort-after"])) client.abort(handle);
  });
  const finished = await done;
  console.log(JSON.stringify({ token_ids: tokenIds, ...finished, epochs: client.epochs }));
  process.exitCode = finished.reason === "error" ? 1 : 0;
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
await client.close();
