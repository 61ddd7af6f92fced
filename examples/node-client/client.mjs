// A client of Mainspring cores: streams continue after crashes and restarts. Written from docs/protocol.md.
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const VERSION = 1;
const KIND = { HELLO: 1, READY: 2, REFUSED: 3, ADD: 4, ABORT: 5, OUTPUTS: 8, BYE: 9, FAULT: 10 };
const NOBODY = { instance: Buffer.alloc(8), epoch: 0 };
const OVERLOADED = "OverloadedError"; // the only refusal after which another attempt makes sense
const LAST_WORDS = 20; // ms for a socket to deliver received messages or to send queued ones

function pack(kind, body, { instance, epoch }) {
  const header = Buffer.alloc(16);
  header.write("ms");
  header.writeUInt8(VERSION, 2);
  header.writeUInt8(kind, 3);
  instance.copy(header, 4);
  header.writeUInt32BE(epoch, 12);
  return [header, encode(body, { useBigInt64: true })];
}

/** Without a body where it is not of this version of the protocol. */
function unpack([header, body]) {
  const [version, kind, instance, epoch] = [header[2], header[3], header.subarray(4, 12), header.readUInt32BE(12)];
  return { version, kind, instance, epoch, body: version === VERSION && decode(body, { useBigInt64: true }) };
}

/** A session with whichever core listens at an address. What is in flight stands in the ledger until it has ended. */
export class Client {
  epochs = []; // of the cores that accepted this client
  #session = randomBytes(16);
  #ledger = new Map(); // handle → { prompt, sampling, tokens, firstSent, aborted, onToken, resolve, reject }
  #nextHandle = 0;
  #socket = null;
  #core = null; // instance and epoch, while connected
  #fingerprint = null;
  #closed = false;

  constructor(address, { options = {}, reconnectTimeout = 60_000 } = {}) {
    Object.assign(this, { address, options, reconnectTimeout });
  }

  /** Resolves with the end-of-sequence tokens of the model once a core has let us in. */
  connect() {
    return new Promise((resolve, reject) => {
      this.#live(resolve).catch((error) => {
        reject(error);
        for (const entry of this.#ledger.values()) entry.reject(error);
      });
    });
  }

  /** `done` resolves with how the request ended, after `onToken(id)` for each of its tokens. */
  complete(prompt, sampling, onToken) {
    const handle = this.#nextHandle++;
    const done = new Promise((resolve, reject) => {
      this.#ledger.set(handle, { prompt, sampling, onToken, resolve, reject, tokens: [] });
    });
    if (this.#core) this.#add(handle);
    return { handle, done };
  }

  abort(handle) {
    const entry = this.#ledger.get(handle);
    if (entry) entry.aborted = true;
    if (this.#core) this.#send(KIND.ABORT, [[handle]]);
    else this.#end(handle, { reason: "abort" });
  }

  async close() {
    this.#closed = true;
    if (this.#core) this.#send(KIND.BYE, ["done"]);
    await sleep(LAST_WORDS);
    this.#socket.close();
  }

  /** One connection after the other, until closed. */
  async #live(onReady) {
    let [lostAt, pause] = [performance.now(), 50];
    while (!this.#closed) {
      const patience = lostAt + this.reconnectTimeout - performance.now();
      if (patience <= 0) throw new Error(`nobody answers at ${this.address}`);
      const served = await this.#serve(patience, onReady);
      if (served) [lostAt, pause] = [performance.now(), 50];
      for (const [handle, entry] of this.#ledger) if (entry.aborted) this.#end(handle, { reason: "abort" });
      if (!this.#closed) await sleep(pause);
      pause = Math.min(2 * pause, 1000);
    }
  }

  /** One socket, from Hello until the connection is lost. Whether a core let us in. */
  async #serve(patience, onReady) {
    const socket = (this.#socket = new Dealer({ linger: 0, sendHighWaterMark: 0, receiveHighWaterMark: 0 }));
    Object.assign(socket, { tcpKeepalive: 1, tcpKeepaliveIdle: 10, ...this.options });
    let [served, fatal] = [false, null];
    const lose = (error) => {
      this.#core = null;
      fatal ??= error;
      setTimeout(() => socket.close(), LAST_WORDS); // this ends the loop below
    };
    const impatient = setTimeout(lose, patience);
    socket.events.on("handshake", () => clearTimeout(impatient)); // from now on silence means that the core is loading
    socket.events.on("disconnect", () => lose());
    socket.events.on("handshake:error:auth", () => lose(new Error("the core does not know our key")));
    socket.connect(this.address);
    const us = [VERSION, Buffer.alloc(0), `node ${process.pid}`, 1, this.#session];
    await socket.send(pack(KIND.HELLO, us, NOBODY));
    let core = null;
    for await (const frames of socket) {
      const { version, kind, instance, epoch, body } = unpack(frames);
      if (core === null) {
        if (version !== VERSION) lose(new Error(`the core speaks version ${version} of the protocol, not ${VERSION}`));
        else if (kind === KIND.REFUSED) lose(body[0] === OVERLOADED ? null : new Error(`${body[0]}: ${body[1]}`));
        if (fatal || kind !== KIND.READY) continue;
        core = { instance: Buffer.from(body[0]), epoch: body[1], maxFrameBytes: body[5] ?? 2 ** 28 };
        const [, , , , eosTokens = [], fingerprint = ""] = body[2];
        if (fingerprint !== (this.#fingerprint ??= fingerprint)) lose(new Error("another model came back"));
        if (fatal) continue;
        [this.#core, served] = [core, true];
        this.epochs.push(epoch);
        for (const handle of this.#ledger.keys()) this.#add(handle);
        onReady(eosTokens);
      } else if (epoch === core.epoch && core.instance.equals(instance)) {
        if (kind === KIND.OUTPUTS) this.#take(body);
        if (kind === KIND.FAULT) console.error(`the core did not understand us: ${body[1]}`);
        if (kind === KIND.BYE || kind === KIND.REFUSED) lose();
      }
    }
    clearTimeout(impatient);
    if (fatal) throw fatal;
    return served;
  }

  /** Sends a request, for the first time or again. */
  #add(handle) {
    const entry = this.#ledger.get(handle);
    const resumed = entry.firstSent !== undefined;
    entry.firstSent ??= performance.now();
    const age = (performance.now() - entry.firstSent) / 1000;
    const { prompt, sampling, tokens } = entry;
    const body = [handle, `node-${handle}`, prompt, sampling, 0, tokens, "", null, age, resumed];
    const [header, encoded] = pack(KIND.ADD, body, this.#core);
    if (encoded.length <= this.#core.maxFrameBytes) this.#socket.send([header, encoded]);
    else this.#end(handle, { reason: "error", error: "InvalidRequestError", error_text: "the request is too large" });
  }

  #take([handles, tokens, , finished = []]) {
    handles.forEach((handle, row) => {
      const entry = this.#ledger.get(handle);
      entry?.tokens.push(tokens[row]);
      entry?.onToken(tokens[row]);
    });
    for (const [handle, reason, stop_token = null, , error = "", error_text = ""] of finished) {
      this.#end(handle, { reason, stop_token, error, error_text });
    }
  }

  #end(handle, finished) {
    this.#ledger.get(handle)?.resolve(finished);
    this.#ledger.delete(handle);
  }

  /** Done when it returns: without a high-water mark a send finds room at once. */
  #send(kind, body) {
    this.#socket.send(pack(kind, body, this.#core));
  }
}
