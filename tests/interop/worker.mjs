#!/usr/bin/env node
// A minidist worker for Node.js (18 or newer), with nothing but its standard modules.
//
// It follows PROTOCOL.md, whose sections the numbers in brackets name, and tests/vectors/.
// It is an example of a worker in a language with one thread: a connection is a generator that
// asks for bytes, a call awaits its messages.
//
//     RANK=1 WORLD_SIZE=2 MASTER_PORT=29500 MINIDIST_KEY=... node worker.mjs PROGRAM [ARGUMENT ...]
//
//     1 Values and frames      3 TCP and TLS    5 Node               7 Training
//     2 Session                4 UDP            6 Collectives        8 Programs

import crypto from "node:crypto";
import dgram from "node:dgram";
import dns from "node:dns/promises";
import fs from "node:fs";
import net from "node:net";
import tls from "node:tls";
import { fileURLToPath } from "node:url";

const now = () => performance.now() / 1000;
const sleep = seconds => new Promise(resolve => setTimeout(resolve, 1000 * seconds));
const hmac = (key, ...data) => {
  const mac = crypto.createHmac("sha256", key);
  data.forEach(part => mac.update(part));
  return mac.digest();
};
const sha256 = (...data) => {
  const hash = crypto.createHash("sha256");
  data.forEach(part => hash.update(part));
  return hash.digest();
};

// ---- 1 Values and frames -----------------------------------------------------------------------

const CODES = {
  NOT_MINIDIST: 1, VERSION: 2, WRONG_JOB: 3, AUTH_REQUIRED: 4, AUTH_FAILED: 5,
  HANDSHAKE_TIMEOUT: 6, DUPLICATE: 7, WRONG_NODE: 8, GENERATION: 9, BAD_FRAME: 16, TOO_LARGE: 17,
  UNKNOWN_KIND: 18, BAD_FIELDS: 19, UNEXPECTED: 20, CHECKSUM: 21, ABORTED: 32, MISMATCH: 33,
  SILENT: 34, LOST: 35, NOT_READY: 48, BAD_RANGE: 49,
};

class ProtocolError extends Error {
  constructor(code, text) {
    super(typeof code === "string" ? `${text} [${code}]` : text);
    this.code = CODES[code] ?? code;
  }
}
const broken = (name, text) => { throw new ProtocolError(name, text); };

const TABLE = Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xEDB88320 ^ n >>> 1 : n >>> 1;
  return n;
});
function crc32(...parts) {
  let crc = 0xFFFFFFFF;
  for (const data of parts) for (const byte of data) crc = TABLE[(crc ^ byte) & 255] ^ crc >>> 8;
  return ~crc >>> 0;
}

// A u64 that is computed with is below 2^53 [2] and so a number; the others are bigints.
const bytes = (size, write) => { const data = Buffer.alloc(size); write(data); return data; };
const u8 = n => Buffer.of(n);
const u16 = n => bytes(2, b => b.writeUInt16BE(n));
const u32 = n => bytes(4, b => b.writeUInt32BE(n));
const big = n => bytes(8, b => b.writeBigUInt64BE(n));
const u64 = n => big(BigInt(n));
const f64 = x => bytes(8, b => b.writeDoubleBE(x));
const text = s => {
  let data = Buffer.from(s);
  if (data.length > 1000) data = Buffer.from(data.subarray(0, 997).toString().replace(/�$/, ""));
  return Buffer.concat([u16(data.length), data]);
};

class Cursor {
  constructor(data) { this.data = data; this.at = 0; }
  take(count) {
    this.at += count;
    if (this.at > this.data.length) broken("BAD_FIELDS", "the fields end inside a value");
    return this.data.subarray(this.at - count, this.at);
  }
  u8() { return this.take(1)[0]; }
  u16() { return this.take(2).readUInt16BE(); }
  u32() { return this.take(4).readUInt32BE(); }
  big() { return this.take(8).readBigUInt64BE(); }
  u64() { return Number(this.big()); }
  f64() { return this.take(8).readDoubleBE(); }
  hash() { return Buffer.from(this.take(32)); }
  text() {
    const size = this.u16();
    if (size > 1000) broken("TOO_LARGE", `a text of ${size} bytes`);
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.take(size));
    } catch (error) {
      if (error instanceof ProtocolError) throw error;
      broken("BAD_FIELDS", "a text is not UTF-8");
    }
  }
  shape() {
    const count = this.u8();
    if (count > 8) broken("TOO_LARGE", `${count} dimensions`);
    return Array.from({ length: count }, () => this.u32());
  }
  numbers() { return Array.from({ length: this.u8() }, () => [this.text(), this.f64()]); }
}
const PACK = {
  u8, u16, u32, u64, big, f64, text, hash: x => x,
  shape: sizes => Buffer.concat([u8(sizes.length), ...sizes.map(u32)]),
  numbers: pairs => Buffer.concat([u8(pairs.length), ...pairs.flatMap(
    ([name, x]) => [text(name), f64(x)])]),
};

// [8] kind: name, and the types of its fields
const KINDS = {
  1: ["PROOF", "hash"], 2: ["JOIN", "u32 u8 u32 text"], 3: ["WELCOME", "u32 u32"],
  4: ["ROSTER", "u32"], 5: ["PING", "u32 text"], 6: ["PONG", "u32 text"],
  7: ["DEPARTED", "u32 u16 text"], 8: ["GOODBYE", ""], 9: ["ERROR", "u16 text"],
  32: ["COLLECTIVE", "u8 u8 u8 u16 u32 u64 u64 u64"], 33: ["TENSOR", "u32 u8 shape"],
  34: ["INIT", "u8 u64 u64 text numbers"], 35: ["PUSH", "big u64 u64 u64 u32 u8"],
  36: ["APPLIED", "big u64 u8"], 37: ["PULL", "big u64 u64"], 38: ["STATE", "big u64 u64 u64 u8"],
  39: ["REFUSED", "u16 text"], 40: ["OPAQUE", "big"],
};
const KIND = Object.fromEntries(Object.entries(KINDS).map(([kind, [name]]) => [name, +kind]));
const MAX_FRAME = 1 << 20, NOTHING = Buffer.alloc(0);

function pack(kind, values) {
  const types = KINDS[kind][1].split(" ").filter(Boolean);
  return Buffer.concat(types.map((type, i) => PACK[type](values[i])));
}

function unpack(kind, fields) {
  const cursor = new Cursor(fields);
  const values = KINDS[kind][1].split(" ").filter(Boolean).map(type => cursor[type]());
  if (cursor.at < fields.length) broken("BAD_FIELDS", "bytes after the last field");
  return values;
}

// [4.1]
function frame(kind, fields, payload, { more = 0, channel = 0, total = payload.length,
  generation = 0, checksums = false }) {
  const head = Buffer.concat([
    u16(0x4D44), u8(kind), u8(more), u16(fields.length), u16(channel), u32(payload.length),
    u32(generation), u64(total), u32(checksums ? crc32(fields, payload) : crc32(fields))]);
  return Buffer.concat([head, u32(crc32(head)), fields, payload]);
}

// ---- 2 Session ---------------------------------------------------------------------------------
// One end of one connection, over any stream of bytes. `node` decides who may join and takes what
// arrives; see section 5.

const MAGIC = Buffer.from("MDP\x01", "latin1");
const EARLY = 1024, HANDSHAKE = 5;
const LABELS = { D: "minidist1 dialer proof", A: "minidist1 acceptor proof" };

class Session {
  constructor(node, stream, side, link = null) {
    Object.assign(this, { node, job: node.job, stream, side, link, state: "greeting" });
    this.deadline = now() + HANDSHAKE;
    this.heard = this.pinged = now();
    this.saidGoodbye = this.left = this.checksums = this.full = false;
    this.partial = new Map();               // by channel: messages with MORE to come [4.2]
    this.greeting = Buffer.concat([         // [5]
      MAGIC, u8(1), u8(0), Buffer.from(side), u8(this.job.key ? 1 : 0), u32(MAX_FRAME),
      u64(this.job.checksums ? 1 : 0), sha256(this.job.name).subarray(0, 8),
      crypto.randomBytes(32), u32(this.job.generation)]);
    this.waiting = [];                      // bytes that came and are not asked for yet
    this.have = 0;
    this.talk = this.conversation();
    this.need = this.talk.next().value;
    stream.ondata = chunk => this.received(chunk);
    stream.onend = reason => this.ended(reason);
    if (side === "D") stream.send(this.greeting);
  }

  received(chunk) {
    this.heard = now();
    if (this.state === "closed") return;
    this.waiting.push(chunk);
    this.have += chunk.length;
    try {
      while (this.state !== "closed" && this.have >= this.need) {
        const data = this.waiting.length === 1 ? this.waiting[0] : Buffer.concat(this.waiting);
        const rest = data.subarray(this.need);
        this.waiting = rest.length ? [rest] : [];
        this.have = rest.length;
        this.need = this.talk.next(data.subarray(0, this.need)).value;
      }
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      this.fail(error);
    }
  }

  // Everything that may be said on a connection, in order. yield n: the next n bytes.
  *conversation() {
    yield* this.hearGreeting();
    for (;;) {
      const message = yield* this.hearFrame();
      if (message) this.hear(message);
    }
  }

  *hearGreeting() {
    const theirs = [];
    for (const byte of MAGIC) {             // strangers leave at the first wrong byte [5-2]
      theirs.push(yield 1);
      if (theirs.at(-1)[0] !== byte) broken("NOT_MINIDIST", "this is no minidist node");
    }
    const greeting = Buffer.concat([...theirs, yield 60]);
    if (this.side === "A") this.stream.send(this.greeting);
    this.answered = this.side === "A";
    const check = (good, name, what) => good || broken(name, `the other side has another ${what}`);
    check(greeting[4] === 1, "VERSION", "major version");
    check(greeting[6] === (this.side === "D" ? 0x41 : 0x44), "NOT_MINIDIST", "side");
    check(greeting[7] === this.greeting[7], "AUTH_REQUIRED", "mechanism: set the key on both");
    check(greeting.subarray(20, 28).equals(this.greeting.subarray(20, 28)), "WRONG_JOB", "job");
    check(greeting.readUInt32BE(60) === this.job.generation, "GENERATION", "generation");
    check(greeting.readUInt32BE(8) >= 4096, "TOO_LARGE", "frame limit, below 4096");
    this.maxFrame = Math.min(MAX_FRAME, greeting.readUInt32BE(8));
    this.checksums = Boolean(greeting[19] & this.greeting[19] & 1);
    this.transcript = sha256(...(this.side === "D" ? [this.greeting, greeting]
      : [greeting, this.greeting]));
    this.state = "proving";
    if (!this.job.key) this.beginJoining();
    else if (this.side === "A") this.say("PROOF", [this.proof("A")]);
  }

  proof(side) {                             // [6]
    const key = crypto.hkdfSync("sha256", this.job.key, this.transcript, LABELS[side], 32);
    return hmac(Buffer.from(key), this.transcript);
  }

  beginJoining() {
    this.state = "joining";
    const { node, incarnation, address } = this.node;
    if (this.side === "D") this.say("JOIN", [node, 0, incarnation, address]);
  }

  *hearFrame() {                            // in the order of [4.1-1]
    const head = yield 32;
    if (crc32(head.subarray(0, 28)) !== head.readUInt32BE(28) || head.readUInt16BE(0) !== 0x4D44) {
      broken("BAD_FRAME", "a header's checksum or magic is wrong");
    }
    const [kind, flags, channel] = [head[2], head[3], head.readUInt16BE(6)];
    const [size, length, generation] = [4, 8, 12].map((at, i) => i ? head.readUInt32BE(at)
      : head.readUInt16BE(at));
    const total = Number(head.readBigUInt64BE(16)), checksum = head.readUInt32BE(24);
    const open = this.state === "open", session = kind > 0 && kind < 32;
    if (size > (open ? 4096 : EARLY) || length > (open ? this.maxFrame : 0) || total > 2 ** 40) {
      broken("TOO_LARGE", `a frame of ${size} and ${length} bytes of a message of ${total}`);
    }
    const fields = Buffer.from(yield size);
    if (!(this.checksums && length) && crc32(fields) !== checksum) broken("BAD_FRAME", "fields are damaged");
    if (flags & ~1 || length > total) broken("BAD_FRAME", `flags ${flags}, ${length} of ${total}`);
    if (generation !== this.job.generation) broken("GENERATION", `generation ${generation}`);
    let message = session ? undefined : this.partial.get(channel);
    if (!message) {
      message = this.begin({ kind, channel, fields, total, parts: [], got: 0 });
      if (session && (channel || flags || length !== total || length && kind !== KIND.ROSTER)) {
        broken("BAD_FRAME", `${KINDS[kind][0]} with channel, flags or payload`);
      }
    } else if (kind !== message.kind || size || total !== message.total) {
      broken("UNEXPECTED", "another message inside one of this channel");
    }
    const stop = message.got + length, more = flags & 1;
    if (stop > total || Boolean(more) !== stop < total || more && !length) {
      broken("BAD_FRAME", `${message.got} + ${length} of ${total}, flags ${flags}`);
    }
    const payload = length ? yield length : NOTHING;
    if (this.checksums && crc32(fields, payload) !== checksum) {
      broken(length ? "CHECKSUM" : "BAD_FRAME", "a payload or fields are damaged");
    }
    message.parts.push(payload);
    message.got = stop;
    if (more) this.partial.set(channel, message);
    else if (!session) this.partial.delete(channel);
    return more || kind >= 128 ? null : { ...message, payload: Buffer.concat(message.parts) };
  }

  begin(message) {
    const { kind } = message;
    const name = KINDS[kind]?.[0] ?? `kind ${kind}`;
    const expected = {
      "proving": ["PROOF", "ERROR"], "joining": [this.side === "D" ? "WELCOME" : "JOIN", "ERROR"],
    }[this.state];
    if (this.left || (expected ? !expected.includes(name)
      : ["PROOF", "JOIN", "WELCOME"].includes(name))) {
      broken("UNEXPECTED", `${name} while ${this.state}`);
    }
    if (!KINDS[kind] && kind < 128) broken("UNKNOWN_KIND", name);
    if (KINDS[kind]) message.values = unpack(kind, message.fields);
    return message;
  }

  hear(message) {                           // [9.1]
    const [name, values] = [KINDS[message.kind][0], message.values];
    if (message.kind >= 32) this.node.deliver(this.link, message);
    else if (name === "PROOF") {
      if (!crypto.timingSafeEqual(values[0], this.proof(this.side === "D" ? "A" : "D"))) {
        broken("AUTH_FAILED", "the keys differ");
      }
      if (this.side === "D") this.say("PROOF", [this.proof("D")]);
      this.beginJoining();
    } else if (name === "JOIN") {
      this.node.decide(this, ...values);
      this.state = "open";
      this.say("WELCOME", [this.node.node, this.node.incarnation]);
      this.node.opened(this, values[2]);
    } else if (name === "WELCOME") {
      if (values[0] !== this.link.peer) broken("WRONG_NODE", `it is node ${values[0]}`);
      this.state = "open";
      this.node.opened(this, values[1]);
    } else if (name === "PING") this.say("PONG", [values[0], this.node.doing]);
    else if (name === "GOODBYE") {
      this.left = true;
      this.leave();
      this.node.lose(this.link, 0, "it said goodbye");
      this.close();
    } else if (name === "ERROR") {
      const open = this.state === "open";
      this.close();
      if (open) this.node.lose(this.link, ...values);
      else this.node.missed(this, ...values);
    } else if (name !== "PONG") this.node.told(this.link, name, values, message.payload);
  }

  say(name, values = [], payload = NOTHING) {
    if (this.saidGoodbye || this.state === "closed") return;
    const { generation } = this.job;
    this.stream.send(frame(KIND[name], pack(KIND[name], values), payload,
      { generation, checksums: this.checksums }));
  }

  async send(kind, values, payload, channel) {
    const total = payload.length, { generation } = this.job, { checksums } = this;
    let fields = pack(kind, values), at = 0;
    do {                                    // a frame is written whole, then others may follow
      const part = payload.subarray(at, at + this.maxFrame);
      at += part.length;
      this.stream.send(frame(kind, fields, part,
        { more: +(at < total), channel, total, generation, checksums }));
      fields = NOTHING;
      await this.stream.drained();
    } while (at < total);
  }

  leave() {
    if (this.state === "open") this.say("GOODBYE");
    this.saidGoodbye = true;
    if (this.left) this.close();
  }

  fail(error) {                             // strangers are told nothing [5-2]
    const open = this.state === "open";
    if (this.state !== "greeting" || this.answered) this.say("ERROR", [error.code, error.message]);
    this.close();
    if (open) this.node.lose(this.link, error.code, error.message);
    else this.node.missed(this, error.code, error.message);
  }

  close() {
    if (this.state === "closed") return;
    this.state = "closed";
    this.node.sessions.delete(this);
    this.stream.close();
  }

  ended(reason) {
    const { state } = this;
    this.close();
    if (state === "open") this.node.lose(this.link, CODES.LOST, reason);
    else if (state !== "closed") this.node.missed(this, CODES.LOST, reason);
  }

  tick() {                                  // [9.5]
    const at = now(), { heartbeat, patience } = this.job;
    if (this.full) this.heard = at;         // its silence is our doing
    if (this.state !== "open") {
      if (at > this.deadline) this.fail(new ProtocolError("HANDSHAKE_TIMEOUT", "too slow to join"));
    } else if (at > this.heard + patience) {
      this.fail(new ProtocolError("SILENT", `nothing heard for ${patience} s`));
    } else if (at > Math.max(this.heard, this.pinged) + heartbeat) {
      this.pinged = at;
      this.say("PING", [0, this.node.doing]);
    }
  }
}

// ---- 3 TCP and TLS -----------------------------------------------------------------------------

class TcpStream {
  constructor(socket) {
    this.socket = socket.setNoDelay(true);
    socket.on("data", chunk => this.ondata(chunk));
    socket.on("end", () => this.onend("connection closed"));
    socket.on("error", error => this.onend(error.message));
  }
  send(data) { this.socket.write(data); }
  pause() { this.socket.pause(); }
  resume() { this.socket.resume(); }
  drained() {
    if (this.socket.writableLength < MAX_FRAME || this.socket.destroyed) return null;
    return new Promise(resolve => ["drain", "close"].forEach(
      event => this.socket.once(event, resolve)));
  }
  close() {
    this.socket.end();                      // what was written still goes out
    setTimeout(() => this.socket.destroy(), 1000).unref();
  }
}

const Tcp = {
  async listen(host, port, accept, job) {
    const taken = socket => accept(new TcpStream(socket));
    if (job.transport === "tls") {          // [3-6]
      const [cert, key, ca] = job.tls.map(file => fs.readFileSync(file));
      this.tls = { cert, key, ca, minVersion: "TLSv1.3", rejectUnauthorized: true };
      this.server = tls.createServer({ ...this.tls, requestCert: true }, taken);
    } else this.server = net.createServer(taken);
    await new Promise((resolve, reject) => this.server.once("error", reject).listen(
      { host, port, ipv6Only: true }, resolve));
    return this.server.address().port;
  },
  dial(place) {
    return new TcpStream(this.tls ? tls.connect({ ...place, ...this.tls }) : net.connect(place));
  },
  async close() { this.server.close(); },
};

// ---- 4 UDP -------------------------------------------------------------------------------------
// [10] The reference controller, NewReno, and datagrams of 1200 bytes.

const INIT = 0xD0, RETRY = 0xD1, ACCEPT = 0xD2, STREAM = 0xD3, ACK = 0xD4, GRANT = 0xD5,
  PING = 0xD6, CLOSE = 0xD7;
const SIZE = 1200, WINDOW = 4 << 20, GAPS = 1000, RANGES = 64, DELAY = 0.005, IDLE = 30;
const MALFORMED = 1, FLOW = 2, VERSION = 4, RESTARTED = 5, TIMED_OUT = 6;

class Seal {
  constructor(key, label, ...nonces) {
    this.size = key ? 16 : 4;
    const own = key && hmac(key, label, ...nonces);
    this.tag = data => own ? hmac(own, data).subarray(0, 16) : u32(crc32(data));
  }
  close(data) { return Buffer.concat([data, this.tag(data)]); }
  opens(datagram) {
    const end = datagram.length - this.size;
    return crypto.timingSafeEqual(this.tag(datagram.subarray(0, end)), datagram.subarray(end));
  }
}

const udpHead = (kind, number, id) => Buffer.concat([
  Buffer.of(kind, 1), bytes(6, b => b.writeUIntBE(number, 0, 6)), id]);

class UdpError extends Error {
  constructor(text, code = MALFORMED) { super(text); this.code = code; }
}

class UdpStream {                           // one connection
  constructor(endpoint, place) {
    Object.assign(this, { endpoint, place, id: crypto.randomBytes(8) });
    this.nonce = crypto.randomBytes(32);
    this.state = "opening";
    this.cookie = Buffer.alloc(24);
    this.interval = 0.25;
    this.again = now();
    this.limit = now() + endpoint.patience;
    // out
    this.number = 0;
    this.skipAt = this.skipGap = 256;
    this.skipped = new Set();
    this.flight = new Map();                // by number: packets that ask for acknowledgement
    this.lost = new Map();
    this.inFlight = 0;                      // bytes of the stream
    this.largestAcked = -1;
    this.queue = [];                        // pieces of the stream that wait, oldest first
    this.resend = [];
    this.offset = this.unacked = this.credit = 0;
    this.asked = this.pace = now();
    this.smoothed = 0.333;
    this.variation = 0.1665;
    this.minimum = this.latest = 0;
    this.doublings = this.probes = this.reordering = 0;
    this.threshold = 3;
    this.lossTime = Infinity;
    this.window = 10 * SIZE;
    this.slowUntil = Infinity;              // slow start up to this window
    this.reacted = -1;                      // when the window was last halved
    this.ackedSent = -1;
    this.drains = [];
    // in
    this.seen = [];                         // [first, last] of packet numbers, newest first
    this.floor = 0;
    this.seenTime = this.heard = now();
    this.owed = 0;
    this.ackAt = Infinity;
    this.held = [];                         // [offset, bytes], in order, without overlaps
    this.read = 0;
    this.granted = WINDOW;
    this.pingDue = this.grantDue = this.finishing = this.over = false;
    this.wake();
  }

  hello() {
    return Buffer.concat([this.id, this.endpoint.incarnation, this.nonce, u64(WINDOW)]);
  }

  // -- the stream, for the session

  send(data) {
    const size = SIZE - 24 - this.seal.size;
    for (let at = 0; at < data.length; at += size) {
      const piece = data.subarray(at, at + size);
      this.queue.push({ offset: this.offset, data: piece, acked: false });
      this.offset += piece.length;
      this.unacked++;
    }
    this.wake();
  }
  drained() {
    if (this.queue.length * SIZE < WINDOW || this.over) return null;
    return new Promise(resolve => this.drains.push(resolve));
  }
  close() {
    if (this.state === "opening") this.end("closed", 0, "");
    this.finishing = true;
    this.limit = now() + 3;
    this.wake();
  }

  end(state, code, reason) {                // [10.10]
    const told = this.over;
    Object.assign(this, { state, code, reason, over: true, closeDue: true, again: now() });
    this.limit = now() + 3 * this.timeout();
    this.drains.splice(0).forEach(resolve => resolve());
    if (!told) this.onend(code ? reason : "connection closed");
    this.wake();
  }

  // -- what arrives

  receive(data, place) {
    const at = now(), kind = data[0];
    if (this.place.address !== place.address || this.place.port !== place.port) return;
    const number = data.readUIntBE(2, 6), body = data.subarray(16, data.length - this.theirs.size);
    if (this.state === "opening") return this.handshake(kind, data, body, at);
    if (this.state === "closed" || data[1] !== 1 || kind < STREAM) return;
    if (!this.theirs.opens(data)) return;
    if (number < this.floor || this.seen.some(([a, b]) => a <= number && number <= b)) return;
    this.heard = at;
    if (this.state === "accepted") this.opened();
    else if (this.state !== "open" && kind !== CLOSE) return;
    try {
      if (kind === STREAM) {
        if (!this.onStream(body)) return;
      } else if (kind === ACK || kind === GRANT) this.onFeedback(body, at);
      else if (kind === CLOSE) this.onClose(body);
      else if (kind !== PING) throw new UdpError(`a packet of kind ${kind}`);
    } catch (error) {
      if (!(error instanceof UdpError)) throw error;
      return this.end("closing", error.code, error.message);
    }
    const newest = this.seen.length ? this.seen[0][1] : -1;
    this.note(number);
    if (number > newest) this.seenTime = at;
    if (kind !== ACK && kind !== CLOSE) {   // [10.5-1]
      this.owed++;
      const atOnce = this.owed > 1 || number !== newest + 1 || kind === PING;
      this.ackAt = atOnce ? 0 : Math.min(this.ackAt, at + DELAY);
    }
    this.wake();
  }

  note(number) {
    const ranges = this.seen;
    let i = ranges.findIndex(([first]) => first <= number);
    if (i < 0) i = ranges.length;
    const above = i && ranges[i - 1][0] === number + 1, below = ranges[i]?.[1] === number - 1;
    if (above && below) ranges.splice(i - 1, 2, [ranges[i][0], ranges[i - 1][1]]);
    else if (above) ranges[i - 1][0] = number;
    else if (below) ranges[i][1] = number;
    else ranges.splice(i, 0, [number, number]);
    if (ranges.length > RANGES) {           // forget the oldest gap [10.5-4]
      ranges.pop();
      this.floor = ranges.at(-1)[0];
    }
  }

  onStream(body) {                          // [10.8]
    if (body.length < 9) throw new UdpError("STREAM without bytes");
    const start = Number(body.readBigUInt64BE()), data = Buffer.from(body.subarray(8));
    const stop = start + data.length;
    if (stop > this.granted) throw new UdpError("more bytes than granted", FLOW);
    const fresh = [];
    let at = Math.max(start, this.read);
    for (const [offset, piece] of this.held) {
      const low = Math.max(at, offset), high = Math.min(stop, offset + piece.length);
      if (low >= high) continue;
      if (piece.compare(data, low - start, high - start, low - offset, high - offset)) {
        throw new UdpError("bytes that came twice differ");
      }
      if (at < low) fresh.push([at, data.subarray(at - start, low - start)]);
      at = high;
    }
    if (at < stop) fresh.push([at, data.subarray(at - start)]);
    if (fresh.length && this.held.length >= GAPS && start > this.read) return false;
    this.held = [...this.held, ...fresh].sort((a, b) => a[0] - b[0]);
    this.hand();
    return true;
  }

  pause() { this.paused = true; }
  resume() {
    this.paused = false;
    this.hand();
    this.wake();
  }

  hand() {                                  // what is in order goes to the session
    while (this.held[0]?.[0] === this.read && !this.finishing && !this.paused) {
      const [, piece] = this.held.shift();
      this.read += piece.length;
      this.ondata(piece);
    }
    if (this.read + WINDOW >= this.granted + WINDOW / 4) {
      this.granted = this.read + WINDOW;
      this.grantDue = true;
    }
  }

  onFeedback(body, at) {
    const count = body.length >= 16 ? body.readUInt32BE(12) : 0;
    if (!count || body.length !== 16 + 16 * count) throw new UdpError("feedback of a wrong length");
    const ranges = [];
    for (let i = 0; i < count; i++) {
      const [first, last] = [16, 24].map(where => Number(body.readBigUInt64BE(where + 16 * i)));
      const bound = i ? ranges[i - 1][0] - 1 : 2 ** 47;
      if (first > last || last >= bound) throw new UdpError("ranges that are not in order");
      if ([...this.skipped].some(n => first <= n && n <= last)) throw new UdpError("never sent");
      ranges.push([first, last]);
    }
    const largest = ranges[0][1], inside = n => ranges.some(([a, b]) => a <= n && n <= b);
    if (largest >= this.number) throw new UdpError("a packet that was never sent");
    this.credit = Math.max(this.credit, Number(body.readBigUInt64BE()));
    const newly = [...this.flight.values()].filter(packet => inside(packet.number));
    for (const packet of [...this.lost.values()].filter(each => inside(each.number))) {
      this.lost.delete(packet.number);      // late, not lost [10.6]
      this.threshold = Math.max(this.threshold, Math.min(largest - packet.number + 1,
        Math.floor(this.window / SIZE / 2)));
      this.reordering = Math.min(this.reordering + this.minimum / 4, this.smoothed);
      if (packet.sent <= this.reacted && this.before) {
        [this.window, this.slowUntil] = this.before;
        this.before = null;
      }
      this.delivered(packet);
    }
    if (!newly.length) return;
    const newest = newly.at(-1);
    this.largestAcked = Math.max(this.largestAcked, newest.number);
    if (newest.number === largest) this.sample(at - newest.sent, body.readUInt32BE(8) / 1e6);
    const limited = this.inFlight + SIZE < this.window && !this.queue.length;
    let acknowledged = 0;
    for (const packet of newly) {
      this.flight.delete(packet.number);
      this.inFlight -= packet.length;
      if (packet.sent > this.reacted) acknowledged += packet.length;
      this.delivered(packet);
    }
    this.doublings = 0;
    this.detectLosses(at);
    this.ackedSent = Math.max(this.ackedSent, newest.sent);
    if (!limited) {                         // [10.7] NewReno
      const slow = this.window < this.slowUntil;
      this.window += slow ? acknowledged : SIZE * acknowledged / this.window;
    }
  }

  delivered(packet) {
    const { piece } = packet;
    if (piece && !piece.acked) {
      piece.acked = true;
      this.unacked--;
    }
    if (packet.kind === GRANT) {            // the peer knows these ranges [10.5-4]
      this.floor = Math.max(this.floor, packet.reported);
      this.seen = this.seen.filter(([, last]) => last >= this.floor);
    }
  }

  sample(rtt, delay) {                      // [10.6]
    rtt = Math.max(rtt, 1e-6);
    this.latest = rtt;
    if (!this.minimum) {
      Object.assign(this, { smoothed: rtt, minimum: rtt, variation: rtt / 2 });
      return;
    }
    this.minimum = Math.min(this.minimum, rtt);
    delay = Math.min(delay, DELAY);
    const adjusted = rtt >= this.minimum + delay ? rtt - delay : rtt;
    this.variation = 0.75 * this.variation + 0.25 * Math.abs(this.smoothed - adjusted);
    this.smoothed = 0.875 * this.smoothed + 0.125 * adjusted;
  }

  timeout(doublings = 0) {
    const once = this.smoothed + Math.max(4 * this.variation, 0.001) + DELAY;
    return Math.max(once, Math.min(once * 2 ** doublings, 0.5));
  }

  detectLosses(at) {
    const wait = Math.max(9 / 8 * Math.max(this.smoothed, this.latest) + this.reordering, 0.001);
    this.lossTime = Infinity;
    let last = -1;
    for (const packet of [...this.flight.values()]) {
      if (packet.number >= this.largestAcked) break;
      if (packet.number > this.largestAcked - this.threshold && packet.sent + wait > at) {
        this.lossTime = Math.min(this.lossTime, packet.sent + wait);
        continue;
      }
      this.flight.delete(packet.number);
      this.lost.set(packet.number, packet);
      this.inFlight -= packet.length;
      if (packet.piece && !packet.piece.acked) {
        this.resend.push(packet.piece);
        last = packet.sent;
      }
      this.grantDue ||= packet.kind === GRANT;
    }
    const old = at - 2 * this.timeout() - this.smoothed;
    for (const packet of this.lost.values()) if (packet.sent < old) this.lost.delete(packet.number);
    if (last > this.reacted) {
      this.before = [this.window, this.slowUntil];
      this.reacted = at;
      this.window = this.slowUntil = Math.max(this.window / 2, 2 * SIZE);
    }
  }

  onClose(body) {
    if (body.length < 2 || body.length > 202) throw new UdpError("CLOSE of a wrong length");
    const code = body.readUInt16BE();
    if (this.state === "open") this.end("draining", code, body.subarray(2).toString());
    else if (this.state === "closing") this.endpoint.forget(this);
    else this.closeDue = true;
  }

  handshake(kind, data, body, at) {         // the dialling side [10.3]
    const { cookie } = this;
    if (kind === RETRY && body.length === 24 && !body.equals(cookie) && this.seal.opens(data)) {
      Object.assign(this, { cookie: Buffer.from(body), interval: 0.25, again: at });
    } else if (kind === ACCEPT && body.length === 56) {
      const seals = this.endpoint.seals(this.nonce, body.subarray(16, 48));
      if (!seals[1].opens(data)) return;
      const once = this.interval === 0.5, sent = this.again - 0.25;
      this.meet(body, ...seals);
      this.opened();
      if (once) this.sample(at - sent, 0);
      this.pingDue = true;
    } else if (kind === CLOSE && this.seal.opens(data)) {
      this.end("closed", body.readUInt16BE(), body.subarray(2).toString());
    }
    this.wake();
  }

  meet(hello, seal, theirs) {
    Object.assign(this, { seal, theirs, peerId: Buffer.from(hello.subarray(0, 8)) });
    this.peerIncarnation = hello.toString("hex", 8, 16);
    this.credit = Number(hello.readBigUInt64BE(48));
  }

  opened() {
    const accepted = this.state === "accepted";
    Object.assign(this, { state: "open", limit: Infinity });
    if (accepted) this.endpoint.open(this);
    this.endpoint.restarted(this);
  }

  // -- what leaves

  wake() {
    if (this.waking) return;
    this.waking = true;
    setImmediate(() => { this.waking = false; this.run(); });
  }

  run() {
    clearTimeout(this.timer);
    const at = now(), due = { opening: () => this.dial(at), open: () => this.flush(at),
      accepted: () => at > this.limit ? this.endpoint.forget(this) : this.limit,
      closing: () => this.sayClose(at), draining: () => this.sayClose(at),
      closed: () => this.endpoint.forget(this) }[this.state]();
    if (!(due < Infinity)) return;
    this.timer = setTimeout(() => this.run(), Math.max(1, 1000 * (due - now())));
  }

  dial(at) {
    if (at > this.limit) {
      this.end("closed", TIMED_OUT, "no answer: nobody listens there, or it has another key");
      return Infinity;
    }
    if (at >= this.again) {
      this.again = at + this.interval;
      this.interval = Math.min(2 * this.interval, 1);
      const init = Buffer.concat([udpHead(INIT, 0, Buffer.alloc(8)), this.hello(), this.cookie]);
      this.emit(this.seal.close(Buffer.concat([init], SIZE - this.seal.size)));
    }
    return Math.min(this.again, this.limit);
  }

  sayClose(at) {
    if (at > this.limit) return void this.endpoint.forget(this);
    if (this.closeDue || this.state === "closing" && at >= this.again) {
      this.again = at + this.timeout();
      this.closeDue = false;
      const reason = Buffer.from(this.reason).subarray(0, 200);
      this.packet(CLOSE, Buffer.concat([u16(this.code), reason]));
    }
    return this.state === "closing" ? Math.min(this.limit, this.again) : this.limit;
  }

  emit(datagram) { this.endpoint.emit(datagram, this.place); }

  packet(kind, body, memory = null) {
    const number = this.number++;
    this.emit(this.seal.close(Buffer.concat([udpHead(kind, number, this.peerId), body])));
    if (!memory) return;                    // it asks for no acknowledgement
    this.asked = now();
    this.flight.set(number, { kind, number, sent: this.asked, length: 0, ...memory });
    this.inFlight += memory.length ?? 0;
  }

  flush(at) {
    if (at > this.heard + IDLE) return void this.end("closing", TIMED_OUT, "silence");
    if (this.finishing && (!this.unacked || at > this.limit)) {
      this.end("closing", this.unacked ? TIMED_OUT : 0, "closed");
      return this.sayClose(at);
    }
    if (at >= this.lossTime) this.detectLosses(at);
    else if (this.flight.size && at >= this.asked + this.timeout(this.doublings)) this.probe();
    if (at > Math.max(this.heard, this.asked) + IDLE / 3) this.pingDue = true;
    if (this.grantDue || at >= this.ackAt) this.feedback(at);
    if (this.pingDue) {
      this.pingDue = false;
      this.packet(PING, NOTHING, {});
    }
    const rate = 1.25 * this.window / this.smoothed;
    this.pace = Math.max(this.pace, at - Math.max(10 * SIZE / rate, 0.002));
    this.resend = this.resend.filter(piece => !piece.acked);
    let next;
    while ((next = this.resend[0] ?? this.queue[0]) && (this.probes > 0
      || this.inFlight + next.data.length <= this.window && this.pace <= at)) {
      if (!this.resend.length && next.offset + next.data.length > this.credit) break;
      (this.resend.length ? this.resend : this.queue).shift();
      if (this.number >= this.skipAt) {     // whoever acknowledges this one is guessing [10.4-3]
        this.skipped.add(this.number++);
        this.skipGap *= 2;
        this.skipAt = this.number + this.skipGap + crypto.randomInt(256);
      }
      this.packet(STREAM, Buffer.concat([u64(next.offset), next.data]),
        { piece: next, length: next.data.length });
      this.probes--;
      this.pace += next.data.length / rate;
    }
    this.probes = 0;
    if (this.queue.length * SIZE < WINDOW / 2) this.drains.splice(0).forEach(resolve => resolve());
    const timer = this.lossTime < Infinity ? this.lossTime
      : this.flight.size ? this.asked + this.timeout(this.doublings) : Infinity;
    const waits = next && this.inFlight + next.data.length <= this.window;
    return Math.min(timer, this.ackAt, this.limit, waits && this.pace > at ? this.pace : Infinity,
      Math.max(this.heard, this.asked) + IDLE / 3 + 0.001, this.heard + IDLE + 0.001);
  }

  probe() {
    this.doublings++;
    this.probes = 2;
    const [oldest] = this.flight.values();
    if (oldest.kind === GRANT) this.grantDue = true;
    else if (oldest.piece && !oldest.piece.acked) this.resend.unshift(oldest.piece);
    else this.pingDue = true;
  }

  feedback(at) {
    const prune = this.seen.length > 8 && at > (this.pruned ?? 0) + this.smoothed;
    const kind = this.grantDue || prune ? GRANT : ACK;
    const delay = Math.min(Math.round(1e6 * (at - this.seenTime)), 2 ** 32 - 1);
    const body = Buffer.concat([u64(this.granted), u32(delay), u32(this.seen.length),
      ...this.seen.flatMap(([first, last]) => [u64(Math.max(first, this.floor)), u64(last)])]);
    this.packet(kind, body, kind === GRANT ? { reported: this.seen[0][1] } : null);
    if (kind === GRANT) this.pruned = at;
    Object.assign(this, { grantDue: false, owed: 0, ackAt: Infinity });
  }
}

const Udp = {                               // one socket for all connections
  connections: new Map(), half: new Map(), incarnation: crypto.randomBytes(8),
  secret: crypto.randomBytes(32), patience: 60,

  async listen(host, port, accept, { key }) {
    Object.assign(this, { key, accept, handshake: new Seal(key, "minidist udp handshake") });
    this.socket = dgram.createSocket(
      net.isIPv6(host) ? { type: "udp6", ipv6Only: true } : "udp4");
    this.socket.on("message", (data, place) => this.receive(data, place));
    await new Promise((resolve, reject) => {
      this.socket.once("error", reject).bind(port, host, resolve);
    });
    this.socket.setRecvBufferSize(WINDOW);
    return this.socket.address().port;
  },
  dial({ host, port }) {
    const stream = new UdpStream(this, { address: host, port });
    stream.seal = stream.theirs = this.handshake;
    this.connections.set(stream.id.toString("hex"), stream);
    return stream;
  },
  seals(dialler, listener) {
    return ["c2s", "s2c"].map(way => new Seal(this.key, `minidist udp ${way}`, dialler, listener));
  },
  emit(datagram, place) { this.socket.send(datagram, place.port, place.address); },

  receive(data, place) {
    if (data.length < 16 + this.handshake.size) return;
    const stream = this.connections.get(data.toString("hex", 8, 16));
    if (stream) stream.receive(data, place);
    else if (data[0] === INIT && data.length === SIZE && this.handshake.opens(data)) {
      this.onInit(data, place);
    }
  },

  onInit(data, place) {                     // nothing is kept before the cookie comes back
    const hello = data.subarray(16, 72), cookie = data.subarray(72, 96), id = hello.subarray(0, 8);
    const nonce = hello.toString("hex", 16, 48), at = now();
    const made = Number(cookie.readBigUInt64BE()), age = at - made / 1e6;
    const cookieOf = us => Buffer.concat([u64(us), hmac(
      this.secret, u64(us), `${place.address} ${place.port}`, hello).subarray(0, 16)]);
    const answer = (kind, body, seal = this.handshake) => {
      const datagram = seal.close(Buffer.concat([udpHead(kind, 0, id), body]));
      this.emit(datagram, place);
      return datagram;
    };
    if (data[1] !== 1) answer(CLOSE, Buffer.concat([u16(VERSION), Buffer.from("version 1 is")]));
    else if (hello.subarray(8, 16).equals(this.incarnation) || !id.readBigUInt64BE()) return;
    else if (!(age >= 0 && age <= 10 && crypto.timingSafeEqual(cookie, cookieOf(made)))) {
      answer(RETRY, cookieOf(Math.floor(at * 1e6)));
    } else if (this.half.has(nonce)) this.emit(this.half.get(nonce).reply, place);
    else if (this.half.size < 64) {
      const stream = new UdpStream(this, place);
      const [theirs, ours] = this.seals(hello.subarray(16, 48), stream.nonce);
      stream.meet(hello, ours, theirs);
      Object.assign(stream, { state: "accepted", limit: at + 10, halfOpen: nonce });
      if (age < 0.25) stream.sample(age, 0);
      stream.reply = answer(ACCEPT, stream.hello(), ours);
      this.half.set(nonce, stream);
      this.connections.set(stream.id.toString("hex"), stream);
    }
  },
  open(stream) {
    this.half.delete(stream.halfOpen);
    this.accept(stream);
  },
  restarted(stream) {                       // [10.3-9]
    for (const other of this.connections.values()) {
      if (other.place.address === stream.place.address && other.place.port === stream.place.port
        && other.peerIncarnation && other.peerIncarnation !== stream.peerIncarnation) {
        other.end("closed", RESTARTED, "the peer has restarted");
        this.forget(other);
      }
    }
  },
  forget(stream) {
    stream.state = "closed";
    clearTimeout(stream.timer);
    this.half.delete(stream.halfOpen);
    this.connections.delete(stream.id.toString("hex"));
  },
  async close() {
    for (const stream of this.half.values()) this.forget(stream);
    while (this.connections.size) await sleep(0.01);
    this.socket.close();
  },
};

// ---- 5 Node ------------------------------------------------------------------------------------
// Who is in the job, and the messages of each [9.2, 9.6, 9.7].

const INBOX = 64 << 20;

class Link {
  constructor(peer) {
    Object.assign(this, { peer, session: null, dialing: false, lost: null, address: "" });
    this.held = 0;                          // bytes of messages that nobody has asked for
    this.inbox = new Map();                 // by channel: messages, and who waits for them
  }
  get open() { return this.session?.state === "open"; }
  box(channel) {
    if (!this.inbox.has(channel)) this.inbox.set(channel, { messages: [], waits: [] });
    return this.inbox.get(channel);
  }
}

class Node {
  constructor(job) {
    Object.assign(this, { job, node: job.rank, workers: job.workers });
    this.size = job.workers + job.servers;
    this.incarnation = crypto.randomInt(2 ** 32);
    this.sessions = new Set();
    this.doing = "";
    this.driver = job.transport === "udp" ? Udp : Tcp;
    this.links = Array.from({ length: this.size }, (_, peer) => new Link(peer));
    this.changes = [];                      // to be called when somebody opens, or fails
  }

  async join() {
    const { host, port } = this.job.master;
    const [local, at] = this.node ? [await towards(host, port), 0] : [host, port];
    const loopback = /^(127\.|::1$|localhost$)/.test(local);
    if (!this.job.key && !loopback) throw new Error(`will not listen on ${local} without a key`);
    const own = await this.driver.listen(local, at, stream => {
      this.sessions.add(new Session(this, stream, "A"));
    }, this.job);
    this.address = net.isIPv6(local) ? `[${local}]:${own}` : `${local}:${own}`;
    this.timer = setInterval(() => this.sessions.forEach(session => session.tick()), 250);
    this.giveUp = now() + this.job.startTimeout;
    if (this.node) {
      this.links[0].address = net.isIPv6(host) ? `[${host}]:${port}` : `${host}:${port}`;
      this.reach(this.links[0]);
    }
    // Node 0 gives up first: it alone knows who is missing, and tells the others [9.2-4].
    const late = setTimeout(() => {
      const missing = this.links.filter(link => link.peer && !link.open).map(link => link.peer);
      this.failure ??= new ProtocolError("ABORTED", this.node ? "node 0 sent no roster"
        : `nodes ${missing} did not join in ${this.job.startTimeout} s`);
      this.wakeAll();
    }, 1000 * (this.job.startTimeout + Math.sign(this.node)));
    await this.until(() => this.ready || this.size === 1);
    clearTimeout(late);
  }

  async until(done) {
    while (!done()) {
      if (this.failure) throw this.failure;
      await new Promise(resolve => this.changes.push(resolve));
    }
  }
  changed() { this.changes.splice(0).forEach(resolve => resolve()); }

  // -- connections

  async reach(link) {                       // dial until it is open [3, 9.2-3]
    if (link.dialing || link.session || link.lost) return;
    link.dialing = true;
    const colon = link.address.lastIndexOf(":"), port = +link.address.slice(colon + 1);
    const host = link.address.slice(0, colon).replace(/^\[|\]$/g, "");
    for (let round = 0; !link.session && !this.failure && now() < this.giveUp; round++) {
      for (const { address } of await dns.lookup(host, { all: true })) {
        if (link.session || link.waits) break;
        const session = new Session(this, this.driver.dial({ host: address, port }), "D", link);
        link.dial = session;
        this.sessions.add(session);
        await new Promise(resolve => { session.settled = resolve; });
        link.dial = null;
      }
      if (link.session || link.waits) break;      // or the other one is dialling us
      await sleep(Math.min(0.05 * 2 ** round, 2) * (0.5 + Math.random() / 2));
    }
    link.dialing = false;
    if (!link.session && !link.waits) this.lose(link, CODES.LOST, `cannot be reached: ${link.why}`);
  }

  missed(session, code, reason) {           // a connection that never opened
    const { link } = session;
    if (!link) return console.error(`rank ${this.node} dropped a stranger: ${reason}`);
    link.why = reason;
    if (code === CODES.DUPLICATE && link.peer !== 0) link.waits = true;
    else if (![CODES.LOST, CODES.HANDSHAKE_TIMEOUT, CODES.GENERATION].includes(code)) {
      this.lose(link, code, reason);
    }
    session.settled();
  }

  decide(session, node, role, incarnation, address) {       // the acceptor's side [9.2-1]
    const link = this.links[node];
    if (!link || node === this.node || role !== +(node >= this.workers)) {
      broken("WRONG_NODE", `no node ${node} with role ${role} is expected`);
    }
    if (link.lost || link.open) broken("DUPLICATE", `node ${node} is lost or connected already`);
    if (link.dial) {                        // both dialled: the smaller one wins
      if (this.node < node) broken("DUPLICATE", `node ${this.node} is dialling already`);
      link.dial.close();
      link.dial.settled();
    }
    Object.assign(link, { address, session });
    session.link = link;
  }

  opened(session, incarnation) {
    const { link } = session;
    Object.assign(link, { session, incarnation, waits: false });
    session.settled?.();
    for (const { peer, lost } of this.links) {
      if (lost?.[0]) session.say("DEPARTED", [peer, ...lost]);
    }
    if (this.node === 0 && !this.ready && this.links.every(each => each.open || !each.peer)) {
      const members = this.links.map(({ peer, incarnation: theirs, address }) => Buffer.concat([
        u32(peer), u8(+(peer >= this.workers)), u32(peer ? theirs : this.incarnation),
        text(peer ? address : this.address)]));
      this.links.forEach(each => each.session?.say("ROSTER", [this.size], Buffer.concat(members)));
      this.ready = true;
    }
    this.changed();
  }

  told(from, name, values, payload) {
    if (name === "ROSTER") {
      if (from.peer !== 0) broken("UNEXPECTED", `ROSTER from node ${from.peer}`);
      if (this.ready) broken("UNEXPECTED", "a second roster");
      const cursor = new Cursor(payload), nodes = new Set();
      for (let i = 0; i < values[0]; i++) {
        const [node, , incarnation, address] = [
          cursor.u32(), cursor.u8(), cursor.u32(), cursor.text()];
        if (!this.links[node]) broken("WRONG_NODE", `a roster with node ${node}`);
        Object.assign(this.links[node], { incarnation, address });
        nodes.add(node);
      }
      if (values[0] !== this.size || nodes.size !== this.size) {
        broken("BAD_FIELDS", `a roster of the nodes ${[...nodes]} in a job of ${this.size}`);
      }
      this.ready = true;
      return this.changed();
    }
    const [node, code, reason] = values, gone = this.links[node];     // DEPARTED [9.6-1]
    if (!gone || node === this.node || code === 0 && gone.open) return;
    if (this.needsAll || !from.peer || !node) this.lose(gone, code, reason);
  }

  lose(link, code, reason) {
    if (link.lost) return;
    link.lost = [code, reason];
    if (!this.node || !link.peer || code && this.needsAll) {
      for (const other of this.links) {
        if (other.open && other !== link) other.session.say("DEPARTED", [link.peer, code, reason]);
      }
    }
    if (code && !this.parting && (this.needsAll || !this.ready)) {
      this.failure ??= new ProtocolError(code,
        `node ${link.peer} lost (${reason}) while rank ${this.node} was in ${this.doing}`);
    }
    this.wakeAll();
  }

  // -- messages

  needsAll = true;                          // does the loss of any node end our work?

  deliver(link, message) {
    const { messages, waits } = link.box(message.channel);
    if (waits.length) return waits.shift().resolve(message);
    messages.push(message);
    link.held += message.total;
    this.balance(link);
  }

  take(link, messages) {
    link.held -= messages[0].total;
    this.balance(link);
    return messages.shift();
  }

  balance(link) {                           // a full inbox is not read into [2-3, 9.6]
    const full = link.held > INBOX, { session } = link;
    if (!session || full === session.full) return;
    session.full = full;
    session.stream[full ? "pause" : "resume"]();
  }

  async connection(peer) {
    const link = this.links[peer];
    if (this.failure) throw this.failure;
    this.giveUp = Math.max(this.giveUp, link.open ? 0 : now() + this.job.startTimeout);
    if (!link.open) this.reach(link);
    await this.until(() => link.open || link.lost);
    if (!link.open) throw new Error(`node ${peer} is gone: ${link.lost[1]}`);
    return link.session;
  }

  async send(peer, name, values, payload = NOTHING, channel = 0) {
    await (await this.connection(peer)).send(KIND[name], values, payload, channel);
  }

  async recv(peer, channel = 0) {
    const link = this.links[peer], { messages, waits } = link.box(channel);
    if (messages.length) return this.take(link, messages);      // complete ones come first [9.6-2]
    await this.connection(peer);
    if (messages.length) return this.take(link, messages);
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => reject(new Error(
        `rank ${this.node} has waited ${this.job.timeout} s for node ${peer} in ${this.doing}`)),
      1000 * this.job.timeout);
      const settle = done => value => { clearTimeout(late); done(value); };
      waits.push({ resolve: settle(resolve), reject: settle(reject) });
      this.wakeAll();
    });
  }

  wakeAll() {
    for (const link of this.links) {
      for (const { waits } of link.inbox.values()) {
        const error = this.failure ?? (link.lost && new Error(
          `node ${link.peer} is gone: ${link.lost[1]}`));
        if (error) waits.splice(0).forEach(({ reject }) => reject(error));
      }
    }
    this.changed();
  }

  // -- the end

  async close(error = null) {
    this.parting = true;
    for (const session of [...this.sessions]) {
      if (!error) session.leave();
      else if (session.state === "open") {
        session.fail(new ProtocolError(error.own ?? "ABORTED", error.message));
      } else session.close();
    }
    const until = now() + (error ? 1 : 5);
    while (this.sessions.size && now() < until) await sleep(0.005);
    [...this.sessions].forEach(session => session.close());
    clearInterval(this.timer);
    await this.driver.close();
  }
}

async function towards(host, port) {        // the local address that leads there
  const [{ address, family }] = await dns.lookup(host, { all: true });
  const probe = dgram.createSocket(`udp${family}`);
  await new Promise((resolve, reject) => {
    probe.once("error", reject).connect(port, address, resolve);
  });
  const local = probe.address().address;
  probe.close();
  return local;
}

// ---- 6 Collectives -----------------------------------------------------------------------------
// [9.3] on typed arrays. A schedule says which elements go where; arithmetic is that of the dtype:
// a sum of two float32 in a double, rounded once, is the sum in float32.

const DTYPES = {
  float32: [1, Float32Array], float64: [2, Float64Array], int8: [5, Int8Array],
  uint8: [6, Uint8Array], int16: [7, Int16Array], int32: [8, Int32Array], int64: [9, BigInt64Array],
};
const OPS = { all_reduce: 1, broadcast: 2, all_gather: 3, reduce_scatter: 4, barrier: 5 };
const REDUCTIONS = { none: 0, sum: 1, avg: 2, min: 3, max: 4, product: 5 };
const sum = (a, b) => a + b;
const COMBINE = {
  sum, avg: sum, min: (a, b) => a < b || a !== a ? a : b, max: (a, b) => a > b || a !== a ? a : b,
  product: (a, b) => a * b,
};
const dtypeOf = array => Object.keys(DTYPES).find(name => array instanceof DTYPES[name][1]);
const bytesOf = array => Buffer.from(array.buffer, array.byteOffset, array.byteLength);

function shareOf(count, rank, size) {
  const start = r => r * Math.floor(count / size) + Math.min(r, count % size);
  return [start(rank), start(rank + 1)];
}
const powerBelow = size => 2 ** Math.floor(Math.log2(size));

function tree(parts, combine) {             // the definition of a reduction
  const all = [...parts], core = powerBelow(all.length);
  for (let i = core; i < all.length; i++) all[i - core] = combine(all[i - core], all[i]);
  for (let d = 1; d < core; d *= 2) {
    for (let left = 0; left < core; left += 2 * d) all[left] = combine(all[left], all[left + d]);
  }
  return all[0];
}

const SCHEDULES = {
  *all_reduce(rank, size, count, root, small) {
    const core = powerBelow(size), all = [0, count], back = [];
    if (rank >= core) {
      yield { to: rank - core, send: all };
      yield { from: rank - core, take: all };
      return;
    }
    if (rank + core < size) yield { from: rank + core, take: all, combine: true };
    let [low, high] = all;
    for (let d = 1; d < core; d *= 2) {
      const peer = rank ^ d, middle = Math.floor((low + high) / 2);
      const halves = [[low, middle], [middle, high]];
      const [mine, theirs] = small ? [all, all] : rank < peer ? halves : halves.reverse();
      yield { to: peer, send: theirs, from: peer, take: mine, combine: true };
      if (!small) back.unshift({ to: peer, send: mine, from: peer, take: theirs });
      [low, high] = mine;
    }
    yield* back;
    if (rank + core < size) yield { to: rank + core, send: all };
  },
  *broadcast(rank, size, count, root) {
    const place = (rank - root + size) % size;
    let d = 1;
    while (d < size && !(place & d)) d *= 2;
    if (place) yield { from: (rank - d + size) % size, take: [0, count] };
    for (d /= 2; d >= 1; d /= 2) {
      if (place + d < size) yield { to: (rank + d) % size, send: [0, count] };
    }
  },
  *all_gather(rank, size, count) {
    const share = r => shareOf(count, (r + 2 * size) % size, size);
    for (let i = 0; i < size - 1; i++) {
      yield { to: (rank + 1) % size, send: share(rank - i),
        from: (rank - 1 + size) % size, take: share(rank - i - 1) };
    }
  },
  *reduce_scatter(rank, size, count) {
    for (let i = 1; i < size; i++) {
      const to = (rank + i) % size, from = (rank - i + size) % size;
      yield { to, send: shareOf(count, to, size), from, take: shareOf(count, from, size) };
    }
  },
};
SCHEDULES.barrier = SCHEDULES.all_reduce;

class Group {
  constructor(node) {
    Object.assign(this, { node, rank: node.node, size: node.workers, sequence: 0 });
  }

  async run(op, out, into, reduce = "none", root = 0) {
    if (this.size === 1) return;
    const [code] = DTYPES[dtypeOf(into)], width = into.BYTES_PER_ELEMENT;
    const head = [OPS[op], REDUCTIONS[reduce], code, root, ++this.sequence, into.length];
    this.node.doing = `${op} #${this.sequence}`;
    for (const step of SCHEDULES[op](this.rank, this.size, into.length, root,
      into.byteLength <= 65536)) {
      const { to, send, from, take, combine } = step;
      const piece = to === undefined ? null : Buffer.from(bytesOf(out.slice(...send)));
      const sent = piece && this.node.send(to, "COLLECTIVE", [...head, ...send], piece);
      sent?.catch(() => {});                // it is looked at below, if recv does not fail first
      if (from !== undefined) {
        const message = await this.node.recv(from);
        const place = into.subarray(...take);
        await this.check(message, from, head, place.length * width);
        const arrived = new into.constructor(place.length);
        message.payload.copy(bytesOf(arrived));
        const f = COMBINE[reduce];          // the lower rank's operand stands on the left
        place.set(!combine ? arrived : arrived.map((x, i) => this.rank < from
          ? f(place[i], x) : f(x, place[i])));
      }
      await sent;
    }
    this.node.doing = "";
  }

  async check(message, from, head, length) {
    const same = message.kind === KIND.COLLECTIVE && head.every((x, i) => x === message.values[i]);
    if (same && message.payload.length === length) return;
    const error = new ProtocolError("MISMATCH", `rank ${this.rank} is in call ${head}, rank `
      + `${from} in ${message.values} with ${message.payload.length} bytes, not ${length}`);
    error.own = "MISMATCH";
    throw error;
  }

  async all_reduce(array, reduce = "sum") {
    await this.run("all_reduce", array, array, reduce);
    if (reduce === "avg") array.set(array.map(x => x / this.size));
  }
  broadcast(array, root = 0) { return this.run("broadcast", array, array, "none", root); }
  barrier() { return this.run("barrier", new Uint8Array(0), new Uint8Array(0), "sum"); }
  async all_gather(array) {                 // one row of the result for each rank
    const rows = new array.constructor(array.length * this.size);
    for (let r = 0; r < this.size; r++) rows.set(array, r * array.length);
    await this.run("all_gather", rows, rows);
    return rows;
  }
  async reduce_scatter(array, reduce = "sum") {
    const arrived = array.slice(), [start, stop] = shareOf(array.length, this.rank, this.size);
    await this.run("reduce_scatter", array, arrived, reduce);
    const parts = Array.from({ length: this.size }, (_, r) => arrived.subarray(
      ...shareOf(array.length, r, this.size)));
    const result = tree(parts, (a, b) => a.map((x, i) => COMBINE[reduce](x, b[i])));
    return result.slice(0, stop - start).map(x => reduce === "avg" ? x / this.size : x);
  }
}

// ---- 7 Training --------------------------------------------------------------------------------
// [9.8] on a network of three layers, Linear, ReLU, Linear, and the mean square of its error. All
// numbers are float32, and every product is rounded and added in the order of its index.

class Model {
  constructor(inputs, hidden, outputs) {
    this.shapes = { "0.weight": [hidden, inputs], "0.bias": [hidden],
      "2.weight": [outputs, hidden], "2.bias": [outputs] };
    this.names = Object.keys(this.shapes);
    const sizes = this.names.map(name => this.shapes[name].reduce((a, b) => a * b));
    this.vector = new Float32Array(sizes.reduce(sum));
    this.gradient = new Float32Array(this.vector.length);
    let at = 0;
    this.ranges = sizes.map(size => [at, at += size]);
    [this.parameters, this.gradients] = [this.vector, this.gradient].map(
      flat => this.ranges.map(range => flat.subarray(...range)));
    Object.assign(this, { inputs, hidden, outputs });
  }

  backward(xs, ys) {                        // fills the gradient of the mean over these samples
    const [w1, b1, w2, b2] = this.parameters, [g1, c1, g2, c2] = this.gradients;
    const { inputs, hidden, outputs } = this, f = Math.fround;
    const linear = (w, b, x) => b.map((bias, i) => {
      let total = 0;
      x.forEach((value, j) => { total = f(total + f(w[i * x.length + j] * value)); });
      return total + bias;
    });
    this.gradient.fill(0);
    xs.forEach((x, k) => {
      const h = linear(w1, b1, x).map(z => Math.max(z, 0)), y = linear(w2, b2, h);
      const dy = y.map((value, i) => f(2 * f(value - ys[k][i])) / (xs.length * outputs));
      for (let i = 0; i < outputs; i++) {
        c2[i] += dy[i];
        for (let j = 0; j < hidden; j++) g2[i * hidden + j] += f(dy[i] * h[j]);
      }
      for (let j = 0; j < hidden; j++) {
        let dh = 0;
        for (let i = 0; i < outputs; i++) dh = f(dh + f(dy[i] * w2[i * hidden + j]));
        if (h[j] <= 0) continue;
        c1[j] += dh;
        for (let i = 0; i < inputs; i++) g1[j * inputs + i] += f(dh * x[i]);
      }
    });
  }

  descend(lr) {                             // the rule sgd [9.4]
    const rate = Math.fround(lr);
    this.vector.forEach((w, i) => { this.vector[i] = w - Math.fround(rate * this.gradient[i]); });
  }

  fingerprint() { return sha256(bytesOf(this.vector)).toString("hex").slice(0, 16); }
}

async function agree(group, what, lines) {  // [9.8-1]
  const own = Buffer.from(lines.join("\n")), digest = new Uint8Array(sha256(own));
  const extremes = new Uint8Array([...digest, ...digest.map(byte => 255 - byte)]);
  await group.all_reduce(extremes, "max");
  if (digest.every((_, i) => extremes[i] === 255 - extremes[32 + i])) return;
  const hashes = await group.all_gather(digest);
  const hash = r => Buffer.from(hashes.subarray(32 * r, 32 * r + 32));
  const odd = Array.from({ length: group.size }, (_, r) => r).find(r => !hash(r).equals(hash(0)));
  const texts = [];
  for (const rank of [0, odd]) {
    const length = new BigInt64Array([BigInt(own.length)]);
    await group.broadcast(length, rank);
    const data = new Uint8Array(Number(length[0]));
    data.set(own.subarray(0, data.length));
    await group.broadcast(data, rank);
    texts.push(Buffer.from(data).toString().split("\n"));
  }
  const place = texts[0].findIndex((line, i) => line !== texts[1][i]);
  throw new Error(`${what} differs between ranks: rank 0 has ${texts[0][place]}, rank ${odd} has `
    + `${texts[1][place]}`);
}

async function begin(group, model) {        // [9.8-1, 9.8-2]
  await agree(group, "the model", model.names.map(name => {
    const sizes = model.shapes[name];
    return `${name} (${sizes.join(", ")}${sizes.length === 1 ? "," : ""}) float32`;
  }));
  for (const parameter of model.parameters) await group.broadcast(parameter, 0);
}

const loaderLines = (samples, size) => [
  `${samples} samples in ${Math.ceil(samples / size)} batches`,
  `a first batch of [${Array.from({ length: Math.min(size, samples) }, (_, i) => i).join(", ")}]`];

const sgdLines = (lr, count) => [`SGD with lr=${lr}, momentum=0.0, dampening=0.0, `
  + "weight_decay=0.0, nesterov=False, maximize=False, "
  + `params=[${Array.from({ length: count }, (_, i) => i).join(", ")}]`];

async function* batches(group, xs, ys, size, lockstep) {      // this rank's share of each batch
  if (lockstep) await agree(group, "the loader", loaderLines(xs.length, size));
  for (let at = 0; at < xs.length; at += size) {
    const whole = Math.min(size, xs.length - at);
    const [start, stop] = shareOf(whole, group.rank, group.size);
    if (lockstep || start < stop) {
      yield [xs.slice(at + start, at + stop), ys.slice(at + start, at + stop), whole];
    }
  }
}

async function synchronous(group, model, xs, ys, { epochs, size, lr, onStep }) {
  await begin(group, model);
  const count = model.vector.length, places = model.names.length;
  const vector = new Float32Array(count + 2 + group.size + places);
  for (let steps = 0, epoch = 0; epoch < epochs; epoch++) {
    for await (const [x, y, whole] of batches(group, xs, ys, size, true)) {
      if (!steps) await agree(group, "the optimizer", sgdLines(lr, places));
      model.backward(x, y);
      const bad = model.gradients.findIndex(g => !g.every(Number.isFinite));
      vector.fill(0);
      vector.set(model.gradient.map(g => x.length ? g * x.length : 0));
      vector.set([x.length, steps % 32], count);
      vector[count + 2 + group.rank] = 1 + bad;
      vector.fill(+(x.length > 0), count + 2 + group.size);
      await group.all_reduce(vector);
      const [samples, together] = vector.subarray(count);
      const flags = vector.subarray(count + 2, count + 2 + group.size);
      if (samples !== whole || together !== group.size * (steps % 32)) {
        throw new Error(`step ${steps}: the ranks are not at the same step of the same batch`);
      }
      const culprit = flags.findIndex(flag => flag > 0);
      if (culprit >= 0) {
        throw new Error(`step ${steps}: non-finite gradient from rank ${culprit} in `
          + model.names[flags[culprit] - 1]);
      }
      model.gradient.set(vector.subarray(0, count).map(g => g / whole));
      model.descend(lr);
      onStep?.(steps++);
      if (flags.some(flag => flag < 0)) return;     // a rank was asked to end, so all do
    }
  }
}

const FINISHED = 2n ** 64n - 1n;

async function downpour(group, model, xs, ys, { epochs, size, lr, onStep }) {   // [9.4]
  const { node } = group, { servers } = node.job;
  node.needsAll = false;
  await begin(group, model);
  const slices = Array.from({ length: servers }, (_, k) => [node.workers + k,
    ...shareOf(model.vector.length, k, servers)]);
  const versions = new Map();
  const ask = async (to, name, values, payload, answer) => {
    await node.send(to, name, values, payload, 2);
    const message = await node.recv(to, 2), got = KINDS[message.kind][0];
    if (got !== answer) throw new Error(`server ${to}: ${got} ${message.values}`);
    return message;
  };
  const pull = clock => Promise.all(slices.map(async ([to, start, stop]) => {
    const { values, payload } = await ask(to, "PULL", [clock, start, stop], NOTHING, "STATE");
    versions.set(to, values[1]);
    payload.copy(bytesOf(model.vector.subarray(start, stop)));
  }));
  if (group.rank === 0) {
    for (const [to, start, stop] of slices) {
      await node.send(to, "INIT", [1, start, stop, "sgd", [["lr", lr], ["warm_start", 0]]],
        Buffer.from(bytesOf(model.vector.slice(start, stop))), 2);
    }
  }
  await pull(0n);
  let clock = 0n;
  for (let epoch = 0; epoch < epochs; epoch++) {
    for await (const [x, y] of batches(group, xs, ys, size, false)) {
      model.backward(x, y);
      const id = (BigInt(node.incarnation) << 32n) + ++clock;
      await Promise.all(slices.map(([to, start, stop]) => ask(to, "PUSH",
        [id, versions.get(to), start, stop, x.length, 1],
        Buffer.from(bytesOf(model.gradient.slice(start, stop))), "APPLIED")));
      await pull(clock);
      onStep?.(Number(clock) - 1);
    }
  }
  await pull(FINISHED);
}

// ---- 8 Programs --------------------------------------------------------------------------------

// Numbers that every language makes alike: no generator, no library.
const noise = (i, rank) => ((i * 7919 + rank * 104729 + 13) % 1009) / 7 - 72;

function task() {                           // 26 samples of a function to learn
  const xs = Array.from({ length: 26 }, (_, k) => Float32Array.from([0, 1, 2].map(
    j => (k * (j + 3) * 7 + j) % 11 / 11 - 0.5)));
  return [xs, xs.map(x => Float32Array.of(x[0] * x[1] + x[2], x[0] - x[2]))];
}

function initial(model) {                   // rank 0's values count; the others' are replaced
  model.vector.forEach((_, i) => { model.vector[i] = noise(i, 0) / 144; });
}

// What `minidist conformance` asks for by numbers below -1 [13].
async function reductions(group, n) {
  const [name, [, Type] = []] = Object.entries(DTYPES).find(each => each[1][0] === -1 - n) ?? [];
  if (!name) throw new Error(`there is no array of dtype ${-1 - n} here`);
  const whole = !name.startsWith("f"), convert = name === "int64" ? BigInt : Number;
  const make = () => Type.from({ length: 6 }, (_, i) => convert(
    (i + 1) * (group.rank + 3) % 7 / (whole ? 1 : 7)));
  for (const op of ["sum", ...(whole ? [] : ["avg"]), "min", "max", "product"]) {
    const array = make();
    await group.all_reduce(array, op);
    await group.all_gather(array);
    await group.all_gather(await group.reduce_scatter(make(), op));
  }
}

const ASKED = {
  [-20]: async group => {                   // [9.8] with the numbers of training.json
    const first = 1 - group.rank, f = Math.fround;      // rank 0's values count
    const scale = Float32Array.of(first, -first), shift = Float64Array.of(first / 2);
    const [samples, gradient, other] = [[2, [0.5, -0.1], 0], [1, [0.25, 0.3], 0.7]][group.rank];
    await agree(group, "the model", ["scale (2,) float32", "shift (1,) float64"]);
    for (const array of [scale, shift]) await group.broadcast(array, 0);
    await agree(group, "the loader", loaderLines(102, 3));
    await agree(group, "the optimizer", sgdLines(0.1, 2));
    for (let step = 0; step < 34; step++) {
      const a = Float64Array.of(other * samples, samples, step % 32, 0, 0, group.rank, 1);
      const b = Float32Array.from(gradient, g => f(g) * samples);
      await group.all_reduce(a);
      await group.all_reduce(b);
      if (a[1] !== 3 || a[2] !== 2 * (step % 32) || a[3] > 0 || a[4] > 0) {
        throw new Error(`step ${step}: ${a}`);
      }
      shift[0] -= 0.1 * (a[0] / 3);
      b.forEach((g, i) => { scale[i] -= f(f(0.1) * f(g / 3)); });
    }
    await group.all_gather(scale);
    await group.all_gather(shift);
  },
  [-21]: async group => {                   // [9.4]
    const w = Float32Array.of(1, 2, 4), gradient = new Float32Array(3), samples = Array(8).fill(0);
    const model = { names: ["w"], shapes: { w: [3] }, parameters: [w], vector: w, gradient,
      backward() { gradient.set(w.map(x => x / 2)); } };
    await downpour(group, model, samples, samples, { epochs: 1, size: 2, lr: 0.25 });
    await group.all_gather(w);
  },
};

const PROGRAMS = {
  async collectives(group) {
    const say = (name, array) => console.log(name, sha256(bytesOf(array)).toString("hex"));
    for (const [name, [, Type]] of Object.entries(DTYPES)) {
      const whole = !name.startsWith("f"), convert = name === "int64" ? BigInt : Number;
      for (const count of [0, 1, 3, 1000, 70000]) {
        const make = rank => Type.from({ length: count }, (_, i) => convert(
          whole ? Math.floor(noise(i, rank)) : noise(i, rank)));
        for (const op of ["sum", "min", "max", ...(whole ? [] : ["avg", "product"])]) {
          const array = make(group.rank);
          await group.all_reduce(array, op);
          say(`${op} ${name} ${count}`, array);
        }
        const array = make(group.rank), root = count % group.size;
        await group.broadcast(array, root);
        say(`broadcast ${name} ${count}`, array);
        say(`all_gather ${name} ${count}`, await group.all_gather(make(group.rank)));
        if (count % group.size === 0) {
          say(`reduce_scatter ${name} ${count}`, await group.reduce_scatter(make(group.rank)));
        }
        await group.barrier();
      }
    }
  },
  async conformance(group) {                // [13]
    for (;;) {
      const count = new BigInt64Array(1);
      await group.broadcast(count, 1 - group.rank);
      const n = Number(count[0]);
      if (n === -1) return;
      if (n < 0) {
        await (ASKED[n] ?? reductions)(group, n);
        continue;
      }
      await group.all_reduce(Float32Array.from({ length: n }, (_, i) => i % 1000 / 7 + group.rank));
      await group.all_gather(Float32Array.from({ length: n }, (_, i) => i + group.rank));
      await group.barrier();
    }
  },
  async mismatch(group) {                   // worker.py sums more elements
    await group.all_reduce(new Float32Array(4));
  },
  async wait(group) {
    await group.barrier();
    console.log("ready");
    for (;;) await group.all_reduce(new Float32Array(100000));
  },
};
for (const [name, strategy] of Object.entries({ sync: synchronous, downpour })) {
  PROGRAMS[name] = async (group, epochs = "4", lr = "0.1") => {
    const model = new Model(3, 8, 2);
    initial(model);
    await strategy(group, model, ...task(), { epochs: +epochs, size: 6, lr: +lr,
      onStep: step => console.log("step", step, model.fingerprint()) });
    console.log("end", model.fingerprint());
  };
}

function job(env) {
  const number = (name, fallback) => env[name] ? +env[name] : fallback;
  return {
    rank: number("RANK", 0), workers: number("WORLD_SIZE", 1),
    servers: number("MINIDIST_SERVERS", 0),
    master: { host: env.MASTER_ADDR || "127.0.0.1", port: number("MASTER_PORT", 29500) },
    key: env.MINIDIST_KEY ? Buffer.from(env.MINIDIST_KEY, "hex") : null,
    name: env.MINIDIST_JOB || "minidist", generation: number("MINIDIST_GENERATION", 0),
    tls: ["CERT", "KEY", "CA"].map(name => env[`MINIDIST_TLS_${name}`]),
    transport: env.MINIDIST_TRANSPORT || "tcp", checksums: env.MINIDIST_CHECKSUMS === "1",
    startTimeout: number("MINIDIST_START_TIMEOUT", 60), timeout: number("MINIDIST_TIMEOUT", 300),
    heartbeat: number("MINIDIST_HEARTBEAT", 1), patience: number("MINIDIST_HEARTBEAT_TIMEOUT", 10),
  };
}

async function main() {
  const node = new Node(job(process.env));
  let error = null;
  try {
    await node.join();
    const [program = "sync", ...rest] = process.argv.slice(2);
    await PROGRAMS[program](new Group(node), ...rest);
  } catch (failure) {
    error = failure;
    console.error(`rank ${node.node}: ${failure.stack}`);
  }
  await node.close(error);
  process.exitCode = error ? 1 : 0;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) main();

export {
  CODES, COMBINE, DTYPES, KINDS, Node, Seal, Session, UdpStream, bytesOf, frame, pack, sha256,
  shareOf, tree, udpHead, unpack,
};
