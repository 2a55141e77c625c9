#!/usr/bin/env node
// worker.mjs against every file of tests/vectors/: the first thing to do with a new worker.

import assert from "node:assert/strict";
import fs from "node:fs";

import {
  CODES, COMBINE, DTYPES, KINDS, Node, Seal, Session, UdpStream, bytesOf, frame, pack, sha256,
  shareOf, tree, udpHead, unpack,
} from "./worker.mjs";

const load = name => JSON.parse(fs.readFileSync(
  new URL(`../vectors/${name}.json`, import.meta.url)));
const hex = text => Buffer.from(text, "hex");
let checks = 0;
const same = (found, wanted, what) => { checks++; assert.deepEqual(found, wanted, what); };
// Seconds, and the milliseconds of the vectors.
const near = (found, wanted) => found.forEach((x, i) => {
  same(1e3 * x === wanted[i] || Math.abs(1e3 * x - wanted[i]) < 1e-6, true, `${x} ${wanted[i]}`);
});

const KEY = Buffer.from(Array.from({ length: 32 }, (_, i) => i));

class Ear {                                 // a stream that only remembers
  said = [];
  send(data) { this.said.push(data); }
  close() { this.closed = true; }
}

function receiver(state) {                  // an acceptor in the state of a negative vector
  const keyless = state === "joining", checksums = state.includes("checksums");
  const node = new Node({ rank: 0, workers: 3, servers: 0, generation: 0, name: "job-0",
    key: keyless ? null : KEY, checksums, transport: "tcp" });
  node.missed = node.lose = () => {};
  node.deliver = (link, message) => node.got.push(message);
  node.got = [];
  const session = new Session(node, new Ear(), "A");
  session.greeting = Buffer.concat([session.greeting.subarray(0, 28), Buffer.alloc(32, 0xA0),
    session.greeting.subarray(60)]);
  if (state === "greeting") return session;
  const hello = hex(load("greeting").dialer);
  if (keyless) hello[7] = 0;
  if (checksums) hello[19] = 1;
  session.received(hello);
  if (!state.startsWith("open")) return session;
  session.received(frame(1, session.proof("D"), Buffer.alloc(0), { checksums }));
  session.received(frame(2, pack(2, [1, 0, 7, "127.0.0.1:9"]), Buffer.alloc(0), { checksums }));
  same(session.state, "open");
  return session;
}

const TESTS = {
  greeting() {
    const v = load("greeting"), session = receiver("proving");
    same(session.stream.said[0].toString("hex"), v.acceptor);
    same(session.transcript.toString("hex"), v.transcript);
    same(session.proof("A").toString("hex"), v.acceptor_proof);
    same(session.proof("D").toString("hex"), v.dialer_proof);
  },
  messages() {
    for (const { name, kind, values, payload, frame: wanted } of load("messages").messages) {
      same(KINDS[kind][0], name);
      const types = KINDS[kind][1].split(" ");
      const own = values.map((value, i) => types[i] === "hash" ? hex(value)
        : types[i] === "big" ? BigInt(value)
          : types[i] === "numbers" ? Object.entries(value) : value);
      const fields = pack(kind, own);
      same(frame(kind, fields, hex(payload), {}).toString("hex"), wanted, name);
      same(unpack(kind, fields), own, name);
    }
  },
  arithmetic() {
    const v = load("arithmetic");
    for (const { about, reduce, dtype, ranks, result } of v.reductions) {
      if (!DTYPES[dtype]) continue;         // JavaScript has no float16
      const Type = DTYPES[dtype][1];
      const parts = ranks.map(x => new Type(Uint8Array.from(hex(x)).buffer));
      const all = tree(parts, (a, b) => a.map((x, i) => COMBINE[reduce](x, b[i])));
      const found = reduce === "avg" ? all.map(x => x / parts.length) : all;
      if (result === "NaN") same(Number.isNaN(found[0]), true, about);
      else same(Buffer.from(bytesOf(found)).toString("hex"), result, about);
    }
    for (const { count, ranks, shares } of v.shares) {
      same(shares.map((_, r) => shareOf(count, r, ranks)), shares);
    }
  },
  training() {
    const v = load("training");
    const floats = text => new Float32Array(Uint8Array.from(hex(text)).buffer);
    for (const { lines, hash } of [{ lines: v.manifest, hash: v.hash }, v.loader, ...v.optimizers]) {
      same(sha256(lines.join("\n")).toString("hex"), hash);
    }
    for (const { rule, lr, before, pushes, after } of v.rules) {
      const rate = Math.fround(lr), w = floats(before), s = new Float32Array(2);
      pushes.map(floats).forEach((pushed, i) => {
        const g = rule === "sgd" ? pushed : pushed.map((x, j) => {
          s[j] += Math.fround(x * x);
          return s[j] && x / Math.fround(Math.sqrt(s[j]));
        });
        w.forEach((x, j) => { w[j] = x - Math.fround(rate * g[j]); });
        same(bytesOf(w).toString("hex"), after[i], rule);
      });
    }
  },
  tensors() {
    for (const { dtype, values, bytes } of load("tensors").tensors) {
      if (!DTYPES[dtype] || !Array.isArray(values) || typeof values[0] === "string") continue;
      const Type = DTYPES[dtype][1], convert = dtype === "int64" ? BigInt : Number;
      same(bytesOf(Type.from(values.map(convert))).toString("hex"), bytes, dtype);
    }
  },
  negative() {
    for (const { about, state, bytes, error } of load("negative").cases) {
      for (const size of [1, 7, 1 << 16]) { // in pieces of any size
        const session = receiver(state), said = session.stream.said;
        said.length = 0;
        for (let at = 0; at < hex(bytes).length; at += size) {
          session.received(hex(bytes).subarray(at, at + size));
        }
        if (!error) {
          same(session.state === "closed", false, about);
          continue;
        }
        same(session.state, "closed", about);
        if (about.includes("GOODBYE") || !said.length) continue;      // nothing may be said
        const last = said.at(-1);
        same(last[2], 9, about);
        same(unpack(9, last.subarray(32))[0], CODES[error], about);
      }
    }
  },
  transcripts() {                           // what a dialer says goes into an acceptor
    for (const { about, lines } of load("transcripts").transcripts) {
      const session = receiver("greeting");
      Object.assign(session.node, { needsAll: false, opened() {}, decide(it, peer) {
        it.link = session.node.links[peer];
      } });
      session.received(Buffer.concat(lines.filter(line => line.from === "dialer").map(
        line => hex(line.bytes))));
      same(session.state, "closed", about); // by GOODBYE, or by ERROR
      same(session.node.got.length, lines.filter(line => line.from === "dialer"
        && /COLLECTIVE|STATE|APPLIED/.test(line.what)).length, about);
    }
  },
  udp() {
    const v = load("udp");
    for (const { name, key, label, nonces, kind, number, ...each } of v.sealed) {
      const data = hex(each.datagram), seal = new Seal(hex(key), label, hex(nonces));
      const head = udpHead(kind, number, hex(each.connection_id));
      same(seal.opens(data), true, name);
      same(head.equals(data.subarray(0, 16)), true, name);
      data[data.length - 1] ^= 1;
      same(seal.opens(data), false, name);
    }
    same(new Seal(null).opens(hex(v.insecure.datagram)), true);
    const malformed = body => {
      const stream = connection();
      stream.number = 2 ** 47;           // all of these were sent
      try {
        stream.onFeedback(hex(body), 1);
      } catch (error) {
        return error.code === 1;
      }
      return false;
    };
    v.feedback.forEach(({ body }) => same(malformed(body), false, body));
    v.feedback_malformed.forEach(({ why, body }) => same(malformed(body), true, why));
    const stream = connection();
    for (const row of v.rtt.series) {
      stream.sample(row.sample_ms / 1e3, row.ack_delay_ms / 1e3);
      near([stream.smoothed, stream.variation, stream.timeout()],
        [row.smoothed_ms, row.variation_ms, row.pto_ms]);
    }
  },
  loss() {
    const { rtt_ms: rtt, events } = load("udp").loss, stream = connection();
    Object.assign(stream, { smoothed: rtt / 1e3, latest: rtt / 1e3, minimum: rtt / 1e3,
      sample() {} });
    for (const { at_ms: at, send, ack, lost, timer_ms: timer } of events) {
      const before = stream.lostOnes, time = at / 1e3;
      if (send !== undefined) {
        stream.number = send + 1;
        stream.inFlight += 100;
        stream.flight.set(send, { number: send, sent: time, length: 100,
          piece: { offset: 100 * send, data: Buffer.alloc(100), acked: false } });
      } else if (ack) {
        const body = Buffer.alloc(32);
        body.writeUInt32BE(1, 12);
        ack.forEach((number, i) => body.writeBigUInt64BE(BigInt(number), 16 + 8 * i));
        stream.onFeedback(body, time);
      } else stream.detectLosses(stream.lossTime);
      same(stream.lostOnes - before, lost, `lost at ${at}`);
      near([stream.lossTime], [timer ?? Infinity]);
    }
  },
};

function connection() {                     // one that sends nothing
  const stream = new UdpStream({ patience: 1 }, { address: "", port: 0 });
  stream.run = () => {};
  stream.lostOnes = 0;
  const { set } = stream.lost;
  stream.lost.set = function count(...entry) {
    stream.lostOnes++;
    return set.apply(this, entry);
  };
  return stream;
}

Object.values(TESTS).forEach(test => test());
console.log(`${checks} checks`);
process.exit(0);
