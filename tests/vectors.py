"""The golden bytes of PROTOCOL.md, made without the code that they test.

    python tests/vectors.py --write     write tests/vectors/*.json, fill the document
    python tests/vectors.py             say what would change; exit 1 if anything

This is a second, deliberately plain encoder of the protocol: struct calls in the
order of the document. What it writes is committed; the tests compare transports/
with the files, and the files and the document with what this script makes.
"""
import hashlib
import hmac
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FOLDER = HERE / "vectors"
DOCUMENT = HERE.parent / "PROTOCOL.md"
KEY = bytes(range(32))
DIAL_NONCE, ACCEPT_NONCE = b"\xd0" * 32, b"\xa0" * 32
(PROOF, JOIN, WELCOME, ROSTER, PING, PONG, DEPARTED, GOODBYE, ERROR) = range(1, 10)
(COLLECTIVE, TENSOR, INIT, PUSH, APPLIED, PULL, STATE, REFUSED, OPAQUE) = range(32, 41)


# ---- a plain encoder -------------------------------------------------------------

def text(s):
    return struct.pack(">H", len(s.encode())) + s.encode()


def numbers(**named):
    return bytes([len(named)]) + b"".join(text(k) + struct.pack(">d", v) for k, v in named.items())


def shape(*sizes):
    return struct.pack(f">B{len(sizes)}I", len(sizes), *sizes)


def head(kind, fields=0, payload=0, total=None, *, flags=0, channel=0, generation=0, crc=0,
         magic=0x4D44):
    """The 32 bytes of a header from its numbers, right or wrong."""
    first = struct.pack(">HBBHHIIQI", magic, kind, flags, fields, channel, payload, generation,
                        payload if total is None else total, crc)
    return first + struct.pack(">I", zlib.crc32(first))


def frame(kind, fields=b"", payload=b"", total=None, checksums=False, **rest):
    crc = zlib.crc32(fields + (payload if checksums else b""))
    return head(kind, len(fields), len(payload), total, crc=crc, **rest) + fields + payload


def greeting(side, nonce, *, magic=b"MDP\x01", major=1, minor=0, mechanism=1, max_frame=1 << 20,
             capabilities=0, job="job-0", generation=0):
    return struct.pack(">4sBBcBIQ8s32sI", magic, major, minor, side, mechanism, max_frame,
                       capabilities, hashlib.sha256(job.encode()).digest()[:8], nonce, generation)


def proof(side, dialer, acceptor, key=KEY):
    transcript = hashlib.sha256(dialer + acceptor).digest()
    pseudo = hmac.new(transcript, key, "sha256").digest()           # HKDF-Extract
    label = {b"D": b"minidist1 dialer proof", b"A": b"minidist1 acceptor proof"}[side]
    mine = hmac.new(pseudo, label + b"\x01", "sha256").digest()     # HKDF-Expand, one block
    return hmac.new(mine, transcript, "sha256").digest()


def collective(op, reduce, dtype, root, sequence, count, start, stop):
    return struct.pack(">BBBHIQQQ", op, reduce, dtype, root, sequence, count, start, stop)


def push(push_id, version, start, stop, samples, dtype):
    return struct.pack(">QQQQIB", push_id, version, start, stop, samples, dtype)


def state(clock, version, start, stop, dtype):
    return struct.pack(">QQQQB", clock, version, start, stop, dtype)


def floats(*values):
    return np.array(values, "<f4").tobytes()


def join(node, role, incarnation, address):
    return frame(JOIN, struct.pack(">IBI", node, role, incarnation) + text(address))


def welcome(node, incarnation):
    return frame(WELCOME, struct.pack(">II", node, incarnation))


def roster(*members):
    return frame(ROSTER, struct.pack(">I", len(members)), b"".join(
        struct.pack(">IBI", node, role, incarnation) + text(address)
        for node, role, incarnation, address in members))


# ---- the vectors -------------------------------------------------------------------

def greetings():
    dialer, acceptor = greeting(b"D", DIAL_NONCE), greeting(b"A", ACCEPT_NONCE)
    return {"about": "Greetings of both sides and the proofs (section 6).",
            "key": KEY.hex(), "job": "job-0", "dialer": dialer.hex(), "acceptor": acceptor.hex(),
            "transcript": hashlib.sha256(dialer + acceptor).hexdigest(),
            "acceptor_proof": proof(b"A", dialer, acceptor).hex(),
            "dialer_proof": proof(b"D", dialer, acceptor).hex()}


def messages():
    """One message of each kind: its values, its frame."""
    one = [
        ("PROOF", PROOF, ["00" * 32], bytes(32), b""),
        ("JOIN", JOIN, [3, 0, 0x01020304, "127.0.0.1:40003"],
         struct.pack(">IBI", 3, 0, 0x01020304) + text("127.0.0.1:40003"), b""),
        ("WELCOME", WELCOME, [0, 0x0A0B0C0D], struct.pack(">II", 0, 0x0A0B0C0D), b""),
        ("ROSTER", ROSTER, [2], struct.pack(">I", 2),
         struct.pack(">IBI", 0, 0, 7) + text("127.0.0.1:29500")
         + struct.pack(">IBI", 1, 1, 8) + text("[::1]:40001")),
        ("PING", PING, [1, "all_reduce #57"], struct.pack(">I", 1) + text("all_reduce #57"), b""),
        ("PONG", PONG, [1, ""], struct.pack(">I", 1) + text(""), b""),
        ("DEPARTED", DEPARTED, [2, 35, "connection closed"],
         struct.pack(">IH", 2, 35) + text("connection closed"), b""),
        ("GOODBYE", GOODBYE, [], b"", b""),
        ("ERROR", ERROR, [5, "the keys differ"], struct.pack(">H", 5) + text("the keys differ"),
         b""),
        ("COLLECTIVE", COLLECTIVE, [1, 1, 1, 0, 57, 10, 5, 7],
         collective(1, 1, 1, 0, 57, 10, 5, 7), floats(1.0, -2.5)),
        ("TENSOR", TENSOR, [9, 1, [1, 2]], struct.pack(">IB", 9, 1) + shape(1, 2),
         floats(1.0, -2.5)),
        ("INIT", INIT, [1, 0, 2, "sgd", {"lr": 0.5}],
         struct.pack(">BQQ", 1, 0, 2) + text("sgd") + numbers(lr=0.5), floats(1.0, -2.5)),
        ("PUSH", PUSH, [(7 << 32) + 1, 4, 0, 2, 32, 1], push((7 << 32) + 1, 4, 0, 2, 32, 1),
         floats(0.5, 0.25)),
        ("APPLIED", APPLIED, [(7 << 32) + 1, 5, 1], struct.pack(">QQB", (7 << 32) + 1, 5, 1), b""),
        ("PULL", PULL, [3, 0, 2], struct.pack(">QQQ", 3, 0, 2), b""),
        ("STATE", STATE, [3, 5, 0, 2, 1], state(3, 5, 0, 2, 1), floats(0.75, -2.625)),
        ("REFUSED", REFUSED, [48, "INIT comes first"], struct.pack(">H", 48)
         + text("INIT comes first"), b""),
        ("OPAQUE", OPAQUE, [77], struct.pack(">Q", 77), b"any bytes"),
    ]
    return {"about": "One frame of each kind (section 8), generation 0, channel 0, no checksums.",
            "messages": [{"name": name, "kind": kind, "values": values, "payload": payload.hex(),
                          "frame": frame(kind, fields, payload).hex()}
                         for name, kind, values, fields, payload in one]}


def transcripts():
    hello_d, hello_a = greeting(b"D", DIAL_NONCE), greeting(b"A", ACCEPT_NONCE)
    proofs = [("acceptor", "PROOF of the acceptor", frame(PROOF, proof(b"A", hello_d, hello_a))),
              ("dialer", "PROOF of the dialer", frame(PROOF, proof(b"D", hello_d, hello_a)))]
    opening = [("dialer", "greeting", hello_d), ("acceptor", "greeting", hello_a), *proofs]
    sums = collective(1, 1, 1, 0, 1, 3, 0, 3)
    one = ("Rank 1 joins rank 0, both sum a tensor of 3 float32, rank 1 leaves.", [
        *opening,
        ("dialer", "JOIN of node 1", join(1, 0, 0x11111111, "127.0.0.1:40001")),
        ("acceptor", "WELCOME", welcome(0, 0x22222222)),
        ("acceptor", "ROSTER", roster((0, 0, 0x22222222, "127.0.0.1:29500"),
                                      (1, 0, 0x11111111, "127.0.0.1:40001"))),
        ("dialer", "COLLECTIVE: rank 1 has 10, 20, 30", frame(COLLECTIVE, sums,
                                                              floats(10, 20, 30))),
        ("acceptor", "COLLECTIVE: rank 0 has 1, 2, 3", frame(COLLECTIVE, sums, floats(1, 2, 3))),
        ("dialer", "GOODBYE", frame(GOODBYE)),
        ("acceptor", "GOODBYE", frame(GOODBYE))])
    push_1 = frame(PUSH, push((0x22222222 << 32) + 1, 0, 0, 2, 8, 1), floats(1.0, -1.0), channel=2)
    applied = frame(APPLIED, struct.pack(">QQB", (0x22222222 << 32) + 1, 1, 1), channel=2)
    last = (1 << 64) - 1
    two = ("Worker 0 (acceptor) and server node 1 (dialer) in a job of 1 worker and 1 server. The "
           "push comes twice and counts once; w = [1, 2] - 0.5 * [1, -1] = [0.5, 2.5].", [
        *opening,
        ("dialer", "JOIN of node 1, a server", join(1, 1, 0x11111111, "127.0.0.1:40001")),
        ("acceptor", "WELCOME", welcome(0, 0x22222222)),
        ("acceptor", "ROSTER", roster((0, 0, 0x22222222, "127.0.0.1:29500"),
                                      (1, 1, 0x11111111, "127.0.0.1:40001"))),
        ("acceptor", "INIT", frame(INIT, struct.pack(">BQQ", 1, 0, 2) + text("sgd")
                                   + numbers(lr=0.5, warm_start=0.0), floats(1, 2), channel=2)),
        ("acceptor", "PULL at clock 0", frame(PULL, struct.pack(">QQQ", 0, 0, 2), channel=2)),
        ("dialer", "STATE, version 0", frame(STATE, state(0, 0, 0, 2, 1), floats(1, 2),
                                             channel=2)),
        ("acceptor", "PUSH 1", push_1),
        ("dialer", "APPLIED, version 1", applied),
        ("acceptor", "PUSH 1 again", push_1),
        ("dialer", "APPLIED, the same answer", applied),
        ("acceptor", "PULL, finished", frame(PULL, struct.pack(">QQQ", last, 0, 2), channel=2)),
        ("dialer", "STATE, version 1", frame(STATE, state(last, 1, 0, 2, 1), floats(0.5, 2.5),
                                             channel=2)),
        ("acceptor", "GOODBYE", frame(GOODBYE)),
        ("dialer", "GOODBYE", frame(GOODBYE))])
    three = ("Rank 2 (dialer) learns from rank 0 that rank 1 died, and gives up.", [
        *opening,
        ("dialer", "JOIN of node 2", join(2, 0, 0x33333333, "127.0.0.1:40002")),
        ("acceptor", "WELCOME", welcome(0, 0x22222222)),
        ("acceptor", "ROSTER", roster((0, 0, 0x22222222, "127.0.0.1:29500"),
                                      (1, 0, 0x11111111, "127.0.0.1:40001"),
                                      (2, 0, 0x33333333, "127.0.0.1:40002"))),
        ("acceptor", "PING", frame(PING, struct.pack(">I", 1) + text("all_reduce #2"))),
        ("dialer", "PONG", frame(PONG, struct.pack(">I", 1) + text(""))),
        ("acceptor", "DEPARTED: node 1, LOST", frame(
            DEPARTED, struct.pack(">IH", 1, 35) + text("connection closed"))),
        ("dialer", "ERROR: ABORTED", frame(ERROR, struct.pack(">H", 32) + text("rank 1 lost")))])
    return {"about": "Whole conversations (appendix A): key 00..1f, job \"job-0\", nonces d0.. and "
                     "a0.. .",
            "transcripts": [{"about": about, "lines": [
                {"from": side, "what": what, "bytes": data.hex()} for side, what, data in lines]}
                for about, lines in (one, two, three)]}


def tensors():
    names = ["float32 <f4", "float64 <f8", "float16 <f2", "bfloat16", "int8 |i1", "uint8 |u1",
             "int16 <i2", "int32 <i4", "int64 <i8", "bool |b1"]
    rows = []
    for code, (name, *form) in enumerate(map(str.split, names), 1):
        values = [1, 0] if name == "bool" else [1, 2] if name[0] == "u" else [1, -2]
        if form and form[0][1] == "f":
            values = [1.0, -2.5]
        data = (np.array(values, form[0]).tobytes() if form else       # bfloat16: half a float32
                b"".join(floats(v)[2:] for v in (1.0, -2.5)))
        rows.append({"dtype": name, "code": code, "shape": [2],
                     "values": values if form else [1.0, -2.5], "bytes": data.hex()})
    rows += [{"dtype": "float32", "code": 1, "shape": [], "values": 1.0, "bytes": "0000803f"},
             {"dtype": "float32", "code": 1, "shape": [0, 3], "values": [], "bytes": ""},
             {"dtype": "float32", "code": 1, "shape": [1], "values": ["NaN 0x7f800001"],
              "bytes": "0100807f"}]
    return {"about": "Elements on the wire (section 7): little-endian, row-major.",
            "tensors": rows}


def tree(parts, combine):
    """The definition of a reduction (section 9.3), once more and as literally as possible."""
    parts = list(parts)
    core = 1
    while core * 2 <= len(parts):
        core *= 2
    for extra in range(core, len(parts)):
        parts[extra - core] = combine(parts[extra - core], parts[extra])
    distance = 1
    while distance < core:
        for left in range(0, core, 2 * distance):
            parts[left] = combine(parts[left], parts[left + distance])
        distance *= 2
    return parts[0]


def arithmetic():
    tiny, rows = 2.0 ** -24, []

    def add(about, op, dtype, values):
        kind = np.dtype(dtype).type
        parts = [np.array([v], dtype) for v in values]
        combine = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum,
                   "product": np.multiply}[op]
        with np.errstate(all="ignore"):
            result = tree(parts, combine)
            if op == "avg":
                result = result / kind(len(parts))
        rows.append({"about": about, "reduce": op, "dtype": np.dtype(dtype).name,
                     "ranks": [x.tobytes().hex() for x in parts], "result": result.tobytes().hex()})
    add("one rank: unchanged", "sum", "<f4", [0.1])
    add("two ranks", "sum", "<f4", [0.1, 0.2])
    add("three: rank 2 folds into rank 0 first; each sum rounds to float32", "sum", "<f4",
        [1.0, tiny, tiny])
    add("the same where the small ones meet first", "sum", "<f4", [tiny, 1.0, tiny])
    add("five ranks: 4 into 0, then 0+1, 2+3, then both", "sum", "<f4",
        [0.1, 0.2, 0.3, 0.4, 0.5])
    add("six ranks: 4 into 0, 5 into 1", "sum", "<f4", [1e8, 1.0, -1e8, 1.0, 0.5, 0.25])
    add("seven ranks, float64", "sum", "<f8", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    add("the mean divides once, at the end", "avg", "<f4", [1.0, 1.0, 2.0])
    add("float16 rounds at each node", "sum", "<f2", [2048.0, 1.0, 1.0])
    add("infinities cancel to NaN", "sum", "<f4", [np.inf, -np.inf])
    add("int32 wraps", "sum", "<i4", [2 ** 31 - 1, 1])
    add("uint8 wraps", "product", "|u1", [16, 17])
    add("minimum", "min", "<f4", [3.0, -1.0, 2.0])
    add("maximum", "max", "<i8", [3, -1, 2])
    # A NaN's sign and payload differ between processors: any NaN is right.
    for row in rows:
        if np.isnan(np.frombuffer(bytes.fromhex(row["result"]),
                                  row["dtype"]).astype("f8")).any():
            row["result"] = "NaN"
    shares = [{"count": n, "ranks": w, "shares": [
        [r * (n // w) + min(r, n % w), (r + 1) * (n // w) + min(r + 1, n % w)] for r in range(w)]}
        for n, w in [(10, 4), (2, 4), (0, 2), (7, 1)]]
    return {"about": "Reductions (section 9.3): one element of each rank, in rank order, and the "
                     "result; shares of a range.", "reductions": rows, "shares": shares}


def training():
    """The vectors of a synchronous step (section 9.8), and the rules of servers (9.4)."""
    f4, f8 = np.float32, np.float64
    lines = ["scale (2,) float32", "shift (1,) float64"]
    ranks = [  # samples, gradient of scale, gradient of shift or None
        (2, np.array([0.5, -0.1], f4), None), (1, np.array([0.25, 0.3], f4), np.array([0.7]))]
    step, batch, sent = 33, sum(samples for samples, _, _ in ranks), []
    for samples, scale, shift in ranks:
        has = [shift is not None, True]         # float64 first: so shift stands before scale
        wide = np.concatenate([shift * f8(samples) if has[0] else [0.0],
                               [samples, step % 32, 0, 0, *has]]).astype(f8)
        sent.append((wide, scale * f4(samples)))
    sums = [a + b for a, b in zip(*sent)]
    shift, scale = sums[0][:1] / f8(batch), sums[1] / f4(batch)
    before = np.array([1.0, -1.0], f4), np.array([0.5])
    after = before[0] - f4(0.1) * scale, before[1] - 0.1 * shift
    synchronous = {
        "step": step, "lr": 0.1, "before": [x.tobytes().hex() for x in before],
        "ranks": [{"samples": samples, "gradients": [scale_.tobytes().hex(), None if shift_ is None
                                                     else shift_.tobytes().hex()],
                   "vectors": [x.tobytes().hex() for x in vectors]}
                  for (samples, scale_, shift_), vectors in zip(ranks, sent)],
        "sums": [x.tobytes().hex() for x in sums],
        "gradients": [x.tobytes().hex() for x in (scale, shift)],
        "after": [x.tobytes().hex() for x in after]}

    rules, pushes = [], [np.array(p, f4) for p in ([0.3, 0.0], [-0.2, 1e-3], [0.7, 0.1])]
    for rule in ("sgd", "adagrad"):
        w, s, lr, states = np.array([1.0, 2.0], f4), np.zeros(2, f4), f4(0.1), []
        for g in pushes:
            if rule == "adagrad":
                s = s + g * g
                g = np.array([a / np.sqrt(b) if b else f4(0) for a, b in zip(g, s)], f4)
            w = w - lr * g
            states.append(w.tobytes().hex())
        rules.append({"rule": rule, "lr": 0.1, "before": np.array([1.0, 2.0], f4).tobytes().hex(),
                      "pushes": [g.tobytes().hex() for g in pushes], "after": states})
    def hashed(lines, **more):
        return {"lines": lines, **more,
                "hash": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
    loader = hashed(["23 samples in 5 batches", "a first batch of [0, 1, 2, 3, 4]"])
    memory = [np.array([0.5, 0.25], f4), np.array(0.125, f4)]
    digest = hashlib.sha256(memory[0].tobytes()).hexdigest()[:16]
    optimizers = [hashed([f"{name}, params=[0, 1]"]) for name in (
        "SGD with lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, "
        "maximize=False",
        "Adam with lr=0.001, betas=[0.9, 0.999], eps=1e-08, weight_decay=0.0, amsgrad=False, "
        "maximize=False, decoupled_weight_decay=False",
        "AdamW with lr=0.001, betas=[0.9, 0.999], eps=1e-08, weight_decay=0.01, amsgrad=False, "
        "maximize=False, decoupled_weight_decay=True",
        "Adagrad with lr=0.01, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, "
        "eps=1e-10, maximize=False",
        "RMSprop with lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0.0, momentum=0.0, "
        "centered=False, maximize=False",
        "Adadelta with lr=1.0, rho=0.9, eps=1e-06, weight_decay=0.0, maximize=False")]
    optimizers.append(hashed([
        "SGD with lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, "
        "maximize=False, params=[0, 1]",
        f"parameter 0: momentum_buffer=float32 {digest}, step=1",
        "parameter 1: momentum_buffer=float32 [0.125], step=1"],
        momentum_buffers=[x.tobytes().hex() for x in memory]))
    return {"about": "A manifest, texts about loaders and optimizers, their hashes, a synchronous "
                     "step of two ranks (section 9.8), and the rules of parameter servers (9.4).",
            "manifest": lines, "hash": hashed(lines)["hash"], "loader": loader,
            "optimizers": optimizers, "synchronous": synchronous, "rules": rules}


def negative():
    """What must be refused, and how. state: what the receiver is in when the bytes come."""
    rows = []

    def bad(about, state, data, error):
        rows.append({"about": about, "state": state, "bytes": data.hex(), "error": error})
    hello = greeting(b"D", DIAL_NONCE)
    bad("an HTTP request", "greeting", b"GET / HTTP/1.1\r\n\r\n", "NOT_MINIDIST")
    bad("a TLS client", "greeting", bytes.fromhex("16030100a5010000a1"), "NOT_MINIDIST")
    bad("zeros", "greeting", bytes(64), "NOT_MINIDIST")
    bad("another major version", "greeting", greeting(b"D", DIAL_NONCE, major=2), "VERSION")
    bad("an acceptor's greeting sent to an acceptor (reflection)", "greeting",
        greeting(b"A", DIAL_NONCE), "NOT_MINIDIST")
    bad("no key where one is needed", "greeting", greeting(b"D", DIAL_NONCE, mechanism=0),
        "AUTH_REQUIRED")
    bad("a mechanism that is not known", "greeting", greeting(b"D", DIAL_NONCE, mechanism=9),
        "AUTH_REQUIRED")
    bad("another job", "greeting", greeting(b"D", DIAL_NONCE, job="job-1"), "WRONG_JOB")
    bad("another generation", "greeting", greeting(b"D", DIAL_NONCE, generation=1), "GENERATION")
    bad("a frame limit below 4096", "greeting", greeting(b"D", DIAL_NONCE, max_frame=4095),
        "TOO_LARGE")
    bad("a higher minor version and unknown capabilities are no error", "greeting",
        greeting(b"D", DIAL_NONCE, minor=7, capabilities=0xF0F0F0F0F0F0F0F0), None)
    hello_a = greeting(b"A", ACCEPT_NONCE)
    bad("a proof with another key", "proving",
        frame(PROOF, proof(b"D", hello, hello_a, bytes(32))), "AUTH_FAILED")
    bad("the acceptor's own proof sent back", "proving",
        frame(PROOF, proof(b"A", hello, hello_a)), "AUTH_FAILED")
    bad("JOIN before PROOF", "proving", join(1, 0, 1, ""), "UNEXPECTED")
    bad("a tensor before PROOF", "proving", head(COLLECTIVE, 33, 8), "TOO_LARGE")
    bad("1025 bytes of fields before WELCOME", "proving", head(PROOF, 1025), "TOO_LARGE")
    bad("PING before WELCOME", "joining", frame(PING, struct.pack(">I", 1) + text("")),
        "UNEXPECTED")

    fields = collective(1, 1, 1, 0, 1, 2, 0, 2)
    good = frame(COLLECTIVE, fields, floats(1, 2))
    bad("a header with another magic", "open", head(PING, magic=0x4D45), "BAD_FRAME")
    bad("a header whose checksum is wrong", "open", good[:31] + bytes([good[31] ^ 1]), "BAD_FRAME")
    bad("a length changed, the checksum not", "open", good[:11] + b"\xff" + good[12:], "BAD_FRAME")
    bad("fields of 4097 bytes", "open", head(OPAQUE, 4097), "TOO_LARGE")
    bad("a frame of 2^20 + 1 bytes", "open", head(OPAQUE, 8, (1 << 20) + 1), "TOO_LARGE")
    bad("a frame of 2^31 bytes", "open", head(OPAQUE, 8, 1 << 31), "TOO_LARGE")
    bad("a message of 2^40 + 1 bytes", "open",
        head(OPAQUE, 8, 8, (1 << 40) + 1, flags=1), "TOO_LARGE")
    bad("a reserved flag", "open", frame(OPAQUE, bytes(8), flags=2), "BAD_FRAME")
    bad("a frame larger than its message", "open",
        frame(OPAQUE, bytes(8), b"12345678", total=7), "BAD_FRAME")
    bad("a last frame that ends too soon", "open",
        frame(OPAQUE, bytes(8), b"12345678", total=9), "BAD_FRAME")
    bad("MORE on a frame that completes its message", "open",
        frame(OPAQUE, bytes(8), b"12345678", flags=1), "BAD_FRAME")
    bad("MORE without a byte", "open", frame(OPAQUE, bytes(8), b"", total=9, flags=1), "BAD_FRAME")
    bad("another generation", "open", frame(OPAQUE, bytes(8), generation=1), "GENERATION")
    bad("fields that do not match their checksum", "open",
        head(OPAQUE, 8, crc=1) + bytes(8), "BAD_FRAME")
    bad("kind 0", "open", frame(0), "UNKNOWN_KIND")
    bad("an unknown kind below 128", "open", frame(99), "UNKNOWN_KIND")
    bad("an unknown kind from 128 is skipped", "open", frame(200, b"abc", b"defg"), None)
    bad("COLLECTIVE with a byte too few", "open", frame(COLLECTIVE, fields[:-1]), "BAD_FIELDS")
    bad("COLLECTIVE with a byte too many", "open", frame(COLLECTIVE, fields + b"\0"), "BAD_FIELDS")
    bad("a text that is not UTF-8", "open", frame(PING, bytes(4) + b"\0\2\xff\xfe"), "BAD_FIELDS")
    bad("a text that ends outside the fields", "open", frame(PING, bytes(4) + b"\0\5ab"),
        "BAD_FIELDS")
    bad("a text of 1001 bytes", "open", frame(PING, bytes(4) + text("x" * 1001)), "TOO_LARGE")
    bad("bytes after the last field", "open", frame(PING, bytes(4) + text("") + b"\0"),
        "BAD_FIELDS")
    bad("nine dimensions", "open", frame(TENSOR, bytes(4) + b"\1" + shape(*[1] * 9)), "TOO_LARGE")
    bad("a number without its value", "open",
        frame(INIT, struct.pack(">BQQ", 1, 0, 2) + text("sgd") + b"\1" + text("lr")), "BAD_FIELDS")
    bad("PROOF when open", "open", frame(PROOF, bytes(32)), "UNEXPECTED")
    bad("JOIN when open", "open", join(1, 0, 1, ""), "UNEXPECTED")
    bad("WELCOME when open", "open", welcome(0, 1), "UNEXPECTED")
    bad("PING on channel 1", "open",
        frame(PING, struct.pack(">I", 1) + text(""), channel=1), "BAD_FRAME")
    bad("PING with a payload", "open", frame(PING, struct.pack(">I", 1) + text(""), b"x"),
        "BAD_FRAME")
    bad("GOODBYE in two frames", "open", frame(GOODBYE, b"", b"x", total=2, flags=1), "BAD_FRAME")
    first = frame(OPAQUE, bytes(8), b"1234", total=8, flags=1)
    bad("another kind inside a message of the channel", "open", first + frame(STATE, bytes(33)),
        "UNEXPECTED")
    bad("fields in a later frame", "open", first + frame(OPAQUE, bytes(8), b"5678", total=8),
        "UNEXPECTED")
    bad("another total in a later frame", "open", first + frame(OPAQUE, b"", b"5678", total=9),
        "UNEXPECTED")
    bad("a later frame that is too long", "open", first + frame(OPAQUE, b"", b"56789", total=8),
        "BAD_FRAME")
    bad("a control frame and another channel inside a message are no error", "open",
        first + frame(PING, struct.pack(">I", 1) + text("")) +
        frame(OPAQUE, bytes(8), b"x", channel=1) + frame(OPAQUE, b"", b"5678", total=8), None)
    bad("anything after GOODBYE", "open", frame(GOODBYE) + good, "UNEXPECTED")
    damaged = bytearray(frame(OPAQUE, bytes(8), b"payload", checksums=True))
    damaged[-1] ^= 1
    bad("a damaged payload", "open, with checksums", bytes(damaged), "CHECKSUM")
    return {"about": "Bytes that must be refused (appendix C), with the error; null: no error. "
                     "The receiver is an acceptor of job \"job-0\" with key 00..1f.",
            "cases": rows}


# ---- datagrams -------------------------------------------------------------------------

LISTENER, DIALLER_NONCE, LISTENER_NONCE = b"QRSTUVWX", b"\xc0" * 32, b"\x50" * 32
OWN_INCARNATION, HELLO = b"\x99" * 8, b"\xc1" * 8 + b"\xaa" * 8 + DIALLER_NONCE + struct.pack(
    ">Q", 1 << 22)


def datagram(kind, number, body, to=LISTENER, *, version=1, way="c2s", key=KEY):
    label = b"minidist udp handshake"
    if way:
        label = b"minidist udp " + way.encode() + DIALLER_NONCE + LISTENER_NONCE
    data = bytes([kind, version]) + number.to_bytes(6, "big") + to + body
    return data + hmac.new(hmac.new(key, label, "sha256").digest(), data, "sha256").digest()[:16]


def udp_init(hello=HELLO, cookie=bytes(24), size=1200, **rest):
    return datagram(0xD0, 0, (hello + cookie).ljust(size - 32, b"\0"), bytes(8), way="", **rest)


def feedback(*ranges, count=None, credit=1 << 22):
    return struct.pack(">QII", credit, 0, len(ranges) if count is None else count) + b"".join(
        struct.pack(">QQ", *pair) for pair in ranges)


def udp_negative():
    """What arrives, and what must come of it: dropped, a RETRY, or a CLOSE with a code."""
    stream, ack, grant, ping, close = 0xD3, 0xD4, 0xD5, 0xD6, 0xD7
    good = datagram(stream, 5, bytes(8) + b"hello")
    offset = struct.Struct(">Q").pack
    cases = [
        ("listening", "an INIT without a cookie", "RETRY", udp_init()),
        ("listening", "a cookie that is not ours", "RETRY", udp_init(cookie=b"\1" * 24)),
        ("listening", "an INIT of 1199 bytes", "dropped", udp_init(size=1199)),
        ("listening", "an INIT of 1201 bytes", "dropped", udp_init(size=1201)),
        ("listening", "an INIT with another key", "dropped", udp_init(key=bytes(32))),
        ("listening", "an INIT of version 2", "CLOSE VERSION", udp_init(version=2)),
        ("listening", "our own incarnation: reflected", "dropped",
         udp_init(HELLO[:8] + OWN_INCARNATION + HELLO[16:])),
        ("listening", "connection id 0", "dropped", udp_init(bytes(8) + HELLO[8:])),
        ("listening", "a packet of an earlier life", "dropped", good),
        ("listening", "an ACCEPT", "dropped", datagram(0xD2, 0, HELLO, way="s2c")),
        ("open", "shorter than head and tag", "dropped", good[:31]),
        ("open", "a damaged tag", "dropped", good[:-1] + bytes([good[-1] ^ 1])),
        ("open", "a damaged body", "dropped", good[:20] + b"x" + good[21:]),
        ("open", "the listener's own packet, reflected", "dropped",
         datagram(stream, 5, bytes(8) + b"hello", way="s2c")),
        ("open", "made with the handshake key", "dropped",
         datagram(stream, 5, bytes(8) + b"hello", way="")),
        ("open", "another connection's id", "dropped", datagram(ping, 5, b"", b"\1" * 8)),
        ("open", "version 2", "dropped", datagram(ping, 5, b"", version=2)),
        ("open", "packet 0 again", "dropped", datagram(ping, 0, b"")),
        ("open", "an unknown kind", "CLOSE MALFORMED", datagram(0xD8, 5, b"")),
        ("open", "STREAM without bytes", "CLOSE MALFORMED", datagram(stream, 5, bytes(8))),
        ("open", "STREAM without an offset", "CLOSE MALFORMED", datagram(stream, 5, bytes(7))),
        ("open", "STREAM beyond the credit", "CLOSE FLOW",
         datagram(stream, 5, offset(1 << 22) + b"x")),
        ("open", "STREAM at the end of all numbers", "CLOSE FLOW",
         datagram(stream, 5, offset((1 << 64) - 1) + b"x")),
        ("open", "feedback cut short", "CLOSE MALFORMED", datagram(ack, 5, bytes(15))),
        ("open", "no range", "CLOSE MALFORMED", datagram(ack, 5, feedback())),
        ("open", "a range less than promised", "CLOSE MALFORMED",
         datagram(ack, 5, feedback((0, 0), count=2))),
        ("open", "2^32 - 1 ranges promised", "CLOSE MALFORMED",
         datagram(grant, 5, feedback((0, 0), count=(1 << 32) - 1))),
        ("open", "a range that runs backwards", "CLOSE MALFORMED",
         datagram(ack, 5, feedback((1, 0)))),
        ("open", "ranges that touch", "CLOSE MALFORMED",
         datagram(ack, 5, feedback((1, 1), (0, 0)))),
        ("open", "oldest first", "CLOSE MALFORMED", datagram(ack, 5, feedback((0, 0), (2, 2)))),
        ("open", "a number of 2^47", "CLOSE MALFORMED",
         datagram(ack, 5, feedback((1 << 47, 1 << 47)))),
        ("open", "a packet that was never sent", "CLOSE MALFORMED",
         datagram(ack, 5, feedback((0, 1000)))),
        ("open", "CLOSE without a code", "CLOSE MALFORMED", datagram(close, 5, b"\0")),
        ("open", "CLOSE with 201 bytes of text", "CLOSE MALFORMED",
         datagram(close, 5, bytes(203))),
    ]
    return {"about": "Datagrams that come to a listener (section 10.12), and what comes of them.",
            "key": KEY.hex(), "incarnation": OWN_INCARNATION.hex(), "hello": HELLO.hex(),
            "connection_id": LISTENER.hex(), "dialler_nonce": DIALLER_NONCE.hex(),
            "listener_nonce": LISTENER_NONCE.hex(),
            "cases": [{"state": state, "about": about, "result": result, "datagram": data.hex()}
                      for state, about, result, data in cases]}


# ---- files and document --------------------------------------------------------------

FILES = {"greeting": greetings, "messages": messages, "transcripts": transcripts,
         "tensors": tensors, "arithmetic": arithmetic, "negative": negative,
         "training": training, "udp_negative": udp_negative}
# (udp.json is written by hand: traces of the formulas of section 10.6.)

ROLES = [
    ("PROOF", "both, with a key", "proving", "dialer: PROOF, JOIN", "no"),
    ("JOIN", "dialer", "joining", "WELCOME", "no"),
    ("WELCOME", "acceptor", "deciding", "", "no"),
    ("ROSTER", "node 0", "open, when all have joined", "", "no"),
    ("PING", "both", "open", "PONG", "yes"),
    ("PONG", "both", "open, after a PING", "", "yes"),
    ("DEPARTED", "both", "open", "", "no"),
    ("GOODBYE", "both", "open, as the last", "GOODBYE", "no"),
    ("ERROR", "both", "behind the greeting, as the last", "", "no"),
    ("COLLECTIVE", "worker", "open, in a collective", "", "no"),
    ("TENSOR", "worker", "open", "", "no"),
    ("INIT", "worker 0, to a server", "open", "none, or REFUSED", "yes: the first counts"),
    ("PUSH", "worker, to a server", "open, no other PUSH unanswered", "APPLIED or REFUSED",
     "yes: push_id"),
    ("APPLIED", "server", "open, after a PUSH", "", "with its PUSH"),
    ("PULL", "worker, to a server", "open", "STATE or REFUSED", "yes"),
    ("STATE", "server", "open, after a PULL", "", "with its PULL"),
    ("REFUSED", "server", "open, after a message to it", "", "with its message"),
    ("OPAQUE", "anyone", "open", "", "the application's affair"),
]


def wrapped(data, width=64):
    return "\n".join(data[i:i + width] for i in range(0, len(data), width))


def blocks():
    """What the document includes, by the name in its markers."""
    sys.path[:0] = [str(HERE)]
    import conftest  # noqa: F401 - finds minidist_transports
    from minidist_transports import protocol as p
    made = {"kinds": "| kind | name | fields |\n|---|---|---|\n" + "\n".join(
        f"| {kind} | {m.name} | " + (" ".join(f"`{n}:{t}`" for n, t in zip(m.names, m.types))
                                     or "none") + " |" for kind, m in p.MESSAGES.items())}
    made["roles"] = ("| message | from | when | answer | again? |\n|---|---|---|---|---|\n"
                     + "\n".join(f"| {' | '.join(row)} |" for row in ROLES))
    u = json.loads((FOLDER / "udp.json").read_text())
    made["udp"] = (
        "`rtt`, in ms:\n\n| sample | delay | smoothed | variation | PTO(0) |\n"
        "|---|---|---|---|---|\n"
        + "\n".join("| {sample_ms} | {ack_delay_ms} | {smoothed_ms:.6g} | {variation_ms:.6g} | "
                    "{pto_ms:.6g} |".format(**row) for row in u["rtt"]["series"])
        + f"\n\n`loss`, {u['loss']['about']}\nLosses are those of the event.\n\n"
        "| at, ms | event | lost | loss timer, ms |\n|---|---|---|---|\n" + "\n".join(
            "| {} | {} | {} | {} |".format(
                row["at_ms"], f"send {row['send']}" if "send" in row else
                "acknowledged {}..{}".format(*row["ack"]) if "ack" in row else "timer",
                row["lost"], "-" if row["timer_ms"] is None else row["timer_ms"])
            for row in u["loss"]["events"]))
    made["udp_negative"] = "| state | datagram | result |\n|---|---|---|\n" + "\n".join(
        "| {state} | {about} | {result} |".format(**case) for case in udp_negative()["cases"])
    made["errors"] = ("| code | name | scope | retry? | meaning |\n|---|---|---|---|---|\n"
                      + "\n".join(f"| {code} | {e.name} | {e.scope} | "
                                  f"{'yes' if e.retriable else 'no'} | {e.meaning} |"
                                  for code, e in p.ERRORS.items()))
    made["dtypes"] = "| code | dtype | bytes |\n|---|---|---|\n" + "\n".join(
        f"| {code} | {name} | {size} |" for code, (name, size, _) in p.DTYPES.items())
    made["codes"] = "\n".join(
        f"- {title}: " + ", ".join(f"{code} {name}" for code, name in table.items())
        for title, table in (("`op`", p.OPS), ("`reduce`", p.REDUCTIONS)))
    g = greetings()
    made["greeting"] = "```\n" + "\n\n".join(
        f"{name.replace('_', ' ')}\n{wrapped(g[name])}" for name in (
            "key", "dialer", "acceptor", "transcript", "acceptor_proof", "dialer_proof")) + "\n```"
    made["messages"] = "```\n" + "\n\n".join(
        f"{m['name']} {json.dumps(m['values'])}\n{wrapped(m['frame'])}"
        for m in messages()["messages"]) + "\n```"
    made["transcripts"] = "\n\n".join(
        f"**{t['about']}**\n\n```\n" + "\n".join(
            f"{line['from']:8s} {line['what']}\n{wrapped(line['bytes'])}" for line in t["lines"])
        + "\n```" for t in transcripts()["transcripts"])
    made["tensors"] = "| dtype | shape | values | bytes |\n|---|---|---|---|\n" + "\n".join(
        f"| {t['dtype']} | {t['shape']} | {t['values']} | `{t['bytes']}` |"
        for t in tensors()["tensors"])
    a = arithmetic()
    made["arithmetic"] = (
        "| what | reduce | dtype | ranks | result |\n|---|---|---|---|---|\n" + "\n".join(
            f"| {r['about']} | {r['reduce']} | {r['dtype']} | {' '.join(r['ranks'])} | "
            f"{r['result']} |" for r in a["reductions"])
        + "\n\n| elements | ranks | shares |\n|---|---|---|\n" + "\n".join(
            f"| {s['count']} | {s['ranks']} | {s['shares']} |" for s in a["shares"]))
    t = training()
    s = t["synchronous"]
    made["training"] = (
        "The manifest of a model whose parameters are\n\n" + "\n".join(
            f"    {line}" for line in t["manifest"])
        + f"\n\nhas the SHA-256 `{t['hash']}`.\nA step of it on two ranks, after {s['step']} "
        f"others, with `SGD` and lr = {s['lr']}; float64 is the larger\ndtype, so `shift` stands "
        "first:\n\n"
        "| | rank 0 | rank 1 |\n|---|---|---|\n" + "\n".join(
            f"| {what} | " + " | ".join(f"{cell(rank)}" for rank in s["ranks"]) + " |"
            for what, cell in (
                ("samples", lambda rank: rank["samples"]),
                ("gradient of scale", lambda rank: f"`{rank['gradients'][0]}`"),
                ("gradient of shift", lambda rank: f"`{rank['gradients'][1]}`"
                 if rank["gradients"][1] else "none"),
                ("first vector", lambda rank: "`" + wrapped(rank["vectors"][0], 16).replace(
                    "\n", " ") + "`"),
                ("second vector", lambda rank: f"`{rank['vectors'][1]}`")))
        + "\n\n| | scale | shift |\n|---|---|---|\n" + "\n".join(
            f"| {what} | `{s[name][0]}` | `{s[name][1]}` |" for what, name in (
                ("before", "before"), ("gradient of the whole batch", "gradients"),
                ("after", "after"))))
    made["texts"] = "\n\n".join(
        "\n".join(f"    {line}" for line in text["lines"]) + f"\n\n`{text['hash']}`"
        for text in (t["loader"], *t["optimizers"]))
    made["rules"] = ("| rule | lr | before | pushed | after |\n|---|---|---|---|---|\n" + "\n".join(
        f"| {r['rule']} | {r['lr']} | `{r['before']}` | {' '.join(r['pushes'])} | "
        f"{' '.join(r['after'])} |" for r in t["rules"]))
    made["negative"] = "| state | bytes | what | error |\n|---|---|---|---|\n" + "\n".join(
        "| {} | `{}` | {} | {} |".format(
            c["state"], c["bytes"] if len(c["bytes"]) <= 80 else c["bytes"][:72] + "...",
            c["about"], c["error"] or "none") for c in negative()["cases"])
    return made


def filled(document):
    """The document with every <!-- include NAME --> ... <!-- end --> up to date."""
    for name, block in blocks().items():
        start = document.index(f"<!-- include {name} -->")
        stop = document.index("<!-- end -->", start)
        document = (document[:start] + f"<!-- include {name} -->\n{block}\n" + document[stop:])
    return document


def wanted():
    """Every file that this script answers for, and what it must hold."""
    files = {FOLDER / f"{name}.json": json.dumps(make(), indent=1) + "\n"
             for name, make in FILES.items()}
    files[DOCUMENT] = filled(DOCUMENT.read_text())
    return files


def main(write):
    stale = [path for path, data in wanted().items()
             if not path.exists() or path.read_text() != data]
    for path in stale:
        print("wrote" if write else "differs:", path)
        if write:
            path.write_text(wanted()[path])
    return 0 if write else len(stale)


if __name__ == "__main__":
    sys.exit(bool(main("--write" in sys.argv)))
