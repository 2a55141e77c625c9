"""The protocol machine against its vectors, a liar, a fuzzer and a clock.

No sockets and no threads here: bytes and time go in, bytes and messages come out.
Tests of the case list carry its row in their name; RULES at the end says which
test covers which rule of PROTOCOL.md.
"""
import hashlib
import json
import os
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vectors
from minidist_transports import Config, ProtocolError, conformance, packets
from minidist_transports import protocol as p
from minidist_transports.reliability import Endpoint

ROOT = Path(__file__).parent.parent
KEY = bytes(range(32))


def load(name):
    return json.loads((ROOT / "tests" / "vectors" / f"{name}.json").read_text())


def config(node=0, workers=3, **settings):
    return Config(**{"node": node, "workers": workers, "key": KEY, "job": "job-0", **settings})


def session(node=0, dialer=False, now=0.0, incarnation=0, address="", **settings):
    nonce = vectors.DIAL_NONCE if dialer else vectors.ACCEPT_NONCE
    return p.Session(config(node, **settings), dialer, now, incarnation=incarnation,
                     address=address, random=lambda n: nonce)


def feed(machine, data, now=0.0, size=1 << 20):
    """Bytes into a session, at most `size` at once; the messages that come out."""
    events, data = [], memoryview(data)
    while len(data):
        space = machine.space()
        count = min(len(space), size, len(data))
        space[:count] = data[:count]
        events += machine.received(count, now)
        data = data[count:]
    return events


def said(machine):
    """What a session wants to send."""
    data = b"".join(machine.out)
    machine.out.clear()
    return data


def opened(**settings):
    """An acceptor and its dialer, open."""
    a, d = session(**settings), session(1, True, **settings)
    for _ in range(4):
        feed(a, said(d))
        if a.state == p.DECIDE:
            a.accept()
        feed(d, said(a))
    assert a.state == d.state == p.OPEN
    return a, d


# ---- vectors ------------------------------------------------------------------------

def test_files_and_document_are_what_the_script_makes():
    for path, data in vectors.wanted().items():
        assert path.read_text() == data, f"{path.name}: run python tests/vectors.py --write"


def test_greeting_and_proofs():
    v = load("greeting")
    dialer, acceptor = bytes.fromhex(v["dialer"]), bytes.fromhex(v["acceptor"])
    assert p.greet(config(), b"D", vectors.DIAL_NONCE) == dialer
    assert p.greet(config(), b"A", vectors.ACCEPT_NONCE) == acceptor
    assert p.prove(KEY, dialer, acceptor, b"A").hex() == v["acceptor_proof"]
    assert p.prove(KEY, dialer, acceptor, b"D").hex() == v["dialer_proof"]
    assert len(dialer) == 64 and b"job-0" not in dialer


@pytest.mark.parametrize("case", load("messages")["messages"], ids=lambda c: c["name"])
def test_every_message(case):
    wire, kind = bytes.fromhex(case["frame"]), case["kind"]
    values = [bytes.fromhex(v) if case["name"] == "PROOF" else v for v in case["values"]]
    assert p.MESSAGES[kind].name == case["name"]
    payload = bytes.fromhex(case["payload"])
    assert p.pack_frame(kind, values, payload) == wire
    out = p.Outgoing(kind, values, [payload], 0)
    assert b"".join(out.frame(p.MAX_FRAME, 0, False)) == wire and out.done
    size = p.HEADER.unpack(wire[:32])[3]
    got = p.MESSAGES[kind].unpack(wire[32:32 + size])
    assert [list(v) if isinstance(v, tuple) else v for v in got] == values
    assert case["name"] in p.describe(kind, got)


TRANSCRIPTS = load("transcripts")["transcripts"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize("dialer", [True, False])
@pytest.mark.parametrize("talk", TRANSCRIPTS, ids=["sum", "server", "death"])
def test_P6_transcripts_in_pieces_of_any_size(talk, dialer, size):
    join = next(bytes.fromhex(line["bytes"]) for line in talk["lines"] if "JOIN" in line["what"])
    node, role, incarnation, address = p.MESSAGES[p.JOIN].unpack(join[p.HEADER.size:])
    jobs = {"workers": 1, "servers": 1} if role else {"workers": 3}
    one = (session(node, True, incarnation=incarnation, address=address, **jobs,
                   role="server" if role else "worker") if dialer
           else session(incarnation=0x22222222, **jobs))
    heard = []
    for line in talk["lines"]:
        wire = bytes.fromhex(line["bytes"])
        if (line["from"] == "dialer") != dialer:
            heard += [(event.kind, event.fields, bytes(event.payload))
                      for event in feed(one, wire, size=size)]
            continue
        kind = wire[2]
        if line["what"] != "greeting" and not one.out:      # not by itself: the node says it
            fields = wire[32:32 + p.HEADER.unpack(wire[:32])[3]]
            values, payload = p.MESSAGES[kind].unpack(fields), wire[32 + len(fields):]
            if kind == p.WELCOME:
                one.accept()
            elif kind == p.GOODBYE:
                one.leave()
            elif kind == p.ERROR:
                one.fail(ProtocolError(*values))
            elif kind in p.SESSION_KINDS:
                one.tell(kind, values, payload)
            else:
                channel = p.HEADER.unpack(wire[:32])[4]
                one.out.append(b"".join(p.Outgoing(kind, values, [payload], channel)
                                        .frame(one.max_frame, 0, False)))
        assert one.out.popleft() == wire, line["what"]
    assert not one.out
    if "sum" in talk["about"]:
        kinds = [kind for kind, _, _ in heard]
        assert p.COLLECTIVE in kinds and kinds[-1] == p.GOODBYE and one.left
    if dialer:
        roster = next(event for event in heard if event[0] == p.ROSTER)
        members = p.unpack_roster(roster[1][0], roster[2])
        assert members[node] == (node, role, incarnation, address)


def test_P6_every_split_point():
    wire = b"".join(bytes.fromhex(line["bytes"]) for line in TRANSCRIPTS[0]["lines"]
                    if line["from"] == "dialer")
    for at in range(len(wire)):
        one = session(incarnation=0x22222222)
        kinds = []
        for part in (wire[:at], wire[at:]):
            # Everything in one read, and the node's answer to JOIN in the middle of it.
            while part:
                count = min(len(part), 64 if one.state == p.GREET else 1000)
                space = one.space()
                count = min(count, len(space))
                stop = part.find(struct.pack(">HB", 0x4D44, p.COLLECTIVE))
                if one.state not in (p.OPEN, p.CLOSED) and stop > 0:
                    count = min(count, stop)
                space[:count] = part[:count]
                kinds += [event.kind for event in one.received(count, 0.0)]
                if one.state == p.DECIDE:
                    one.accept()
                part = part[count:]
        assert kinds == [p.JOIN, p.COLLECTIVE, p.GOODBYE]


@pytest.mark.parametrize("case", load("tensors")["tensors"],
                         ids=lambda c: f"{c['dtype']} {c['shape']}")
def test_P31_elements(case):
    name, size, form = p.DTYPES[case["code"]]
    data = bytes.fromhex(case["bytes"])
    count = int(np.prod(case["shape"]))
    assert case["dtype"].split()[0] == name and len(data) == size * count
    if form is not None and "NaN" not in str(case["values"]):
        assert np.array_equal(np.frombuffer(data, form), np.ravel(case["values"]))


def test_P31_arrays_in_another_byte_order_do_not_slip_through():
    big = np.array([1.0, -2.5], ">f4")
    with pytest.raises(ValueError, match="byte order"):
        p.Outgoing(p.OPAQUE, (1,), [big], 0)
    native = np.ascontiguousarray(big, "<f4")
    assert bytes(p.Outgoing(p.OPAQUE, (1,), [native], 0).views[0]) == big.byteswap().tobytes()
    frozen = np.arange(6, dtype="i4").reshape(2, 3)
    frozen.flags.writeable = False              # sending needs no right to write
    assert p.Outgoing(p.OPAQUE, (1,), [frozen], 0).total == 24


@pytest.mark.parametrize("row", load("arithmetic")["reductions"], ids=lambda r: r["about"])
def test_reductions_have_the_bits_of_the_document(row):
    import minidist as md
    parts = [np.frombuffer(bytes.fromhex(x), row["dtype"]) for x in row["ranks"]]
    op = md.ReduceOp(row["reduce"])
    with np.errstate(all="ignore"):
        result = md.tree_reduce([x.copy() for x in parts], md.COMBINE[op])
        if row["reduce"] == "avg":
            result = result / result.dtype.type(len(parts))
    if row["result"] == "NaN":
        assert np.isnan(result).all()
    else:
        assert result.tobytes().hex() == row["result"]


@pytest.mark.parametrize("row", load("training")["rules"], ids=lambda r: r["rule"])
def test_rules_of_servers_have_the_bits_of_the_document(row):
    import minidist as md
    server = md.ParameterServer(1)
    server.on_message("INIT", 0, ("float32", 0, 2, row["rule"], {"lr": row["lr"]}),
                      bytes.fromhex(row["before"]))
    for i, (pushed, after) in enumerate(zip(row["pushes"], row["after"], strict=True), 1):
        (answer,) = server.on_message("PUSH", 0, (i, i - 1, 0, 2, 1, "float32"),
                                      bytes.fromhex(pushed))
        assert answer.fields[1:] == (i, 1) and server.values.tobytes().hex() == after


def test_texts_that_ranks_compare_are_those_of_the_document():
    import minidist as md
    given = {"SGD": {"lr": 0.1}}
    for row in load("training")["optimizers"]:
        name, memory = row["lines"][0].split()[0], row.get("momentum_buffers", [])
        parameters = [md.nn.Parameter(md.tensor(np.zeros(shape, "f4"))) for shape in ((2,), ())]
        options = given.get(name, {}) | ({"momentum": 0.9} if memory else {})
        optimizer = getattr(md.optim, name)(parameters, **options)
        for x, data in zip(parameters, memory):     # (after one step it is the gradient)
            x.grad = md.tensor(np.frombuffer(bytes.fromhex(data), "f4").reshape(x.shape).copy())
        if memory:
            optimizer.step()
        assert md.lines_of(optimizer) == row["lines"]
        assert hashlib.sha256("\n".join(row["lines"]).encode()).hexdigest() == row["hash"]
    told = []
    train = md.Synchronous(md.nn.Linear(1, 1), None)
    train.group.agree = lambda what, lines, cure: told.append(lines)
    data = md.utils.data.TensorDataset(md.zeros(23, 1))
    list(train.batches(md.utils.data.DataLoader(data, batch_size=5)))
    assert told == [load("training")["loader"]["lines"]]


def test_a_synchronous_step_has_the_bits_of_the_document():
    import minidist as md
    from minidist import distributed as dist
    from test_transports import cluster, each, values
    row = load("training")["synchronous"]

    def work(node):
        model, mine, vectors_ = md.nn.Module(), row["ranks"][node.node], []
        for name, dtype, data in zip(("scale", "shift"), ("f4", "f8"), row["before"]):
            setattr(model, name, md.nn.Parameter(md.tensor(np.frombuffer(bytes.fromhex(data),
                                                                         dtype).copy())))
        group = dist.ProcessGroup(node, 2)
        train = dist.Synchronous(model, md.optim.SGD(model.parameters(), lr=row["lr"]), group)
        train.steps, train.samples, train.batch = row["step"], mine["samples"], 3
        train.zero_grad()
        for x, data in zip(model.parameters(), mine["gradients"]):
            if data is not None:
                x.grad = md.tensor(np.frombuffer(bytes.fromhex(data),
                                                 x.detach().numpy().dtype).copy())
        reduce = group.all_reduce

        def recorded(x, *rest, **named):
            if x.dtype != np.uint8:             # (those are hashes that are compared before)
                vectors_.append(x.tobytes().hex())
            reduce(x, *rest, **named)
        group.all_reduce = recorded
        train.step()
        assert vectors_ == mine["vectors"]
        assert [x.detach().numpy().tobytes().hex() for x in model.parameters()] == row["after"]
        assert [x.grad.numpy().tobytes().hex() for x in model.parameters()] == row["gradients"]
    with cluster("pipe") as nodes:
        values(each(nodes, work))


@pytest.mark.parametrize("row", load("arithmetic")["shares"], ids=str)
def test_shares(row):
    import minidist as md
    assert [list(md.share_of(row["count"], r, row["ranks"]))
            for r in range(row["ranks"])] == row["shares"]


# ---- what must be refused ---------------------------------------------------------------

def receiver(state):
    """An acceptor in the state in which a negative vector finds it."""
    hello = vectors.greeting(b"D", vectors.DIAL_NONCE)
    if state == "greeting":
        return session()
    if state == "joining":
        one = session(key=None)
        feed(one, vectors.greeting(b"D", vectors.DIAL_NONCE, mechanism=0))
        return one
    if state == "proving":
        one = session()
        feed(one, hello)
        return one
    return opened(checksums="checksums" in state)[0]


NEGATIVE = load("negative")["cases"]


@pytest.mark.parametrize("size", [1, 1 << 16])
@pytest.mark.parametrize("case", NEGATIVE, ids=lambda c: c["about"])
def test_negative_vectors(case, size):
    one = receiver(case["state"])
    said(one)
    if case["error"] is None:
        feed(one, bytes.fromhex(case["bytes"]), size=size)
        assert one.state != p.CLOSED
        return
    with pytest.raises(ProtocolError) as error:
        feed(one, bytes.fromhex(case["bytes"]), size=size)
    assert p.ERRORS[error.value.code].name == case["error"], error.value
    assert one.state == p.CLOSED
    told = said(one)
    if case["error"] == "NOT_MINIDIST" and "reflection" not in case["about"]:
        assert not told                         # strangers learn nothing
    elif "GOODBYE" not in case["about"]:
        at = 64 if case["state"] == "greeting" else 0
        assert told[at + 2] == p.ERROR          # everybody else hears why
        size = p.HEADER.unpack(told[at:at + 32])[3]
        assert p.MESSAGES[p.ERROR].unpack(told[at + 32:at + 32 + size])[0] == error.value.code
    assert one.received(5, 1.0) == []           # and nothing more is heard


def test_P35_every_flipped_bit_of_a_frame_is_found():
    for case in load("messages")["messages"]:
        kind, wire = case["kind"], bytes.fromhex(case["frame"])
        if kind in (p.PROOF, p.JOIN, p.WELCOME):
            continue
        checked = len(wire) - len(case["payload"]) // 2
        for bit in range(0, 8 * checked, 5):
            one, _ = opened()
            bad = bytearray(wire)
            bad[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ProtocolError):
                feed(one, bad)


def test_checksums_cover_the_payload_and_fields_alone_are_a_frame():
    one, _ = opened(checksums=True)
    wire = bytearray(vectors.frame(p.OPAQUE, bytes(8), b"payload", checksums=True))
    assert bytes(feed(one, wire)[0].payload) == b"payload"
    wire[-3] ^= 16
    with pytest.raises(ProtocolError, match="CHECKSUM"):
        feed(one, wire)
    one, _ = opened(checksums=True)
    wire = bytearray(vectors.frame(p.PING, bytes(4) + vectors.text("x")))
    wire[-1] ^= 16
    with pytest.raises(ProtocolError, match="BAD_FRAME"):
        feed(one, wire)
    assert not one.out or one.out[-1][2] == p.ERROR         # no PONG before the check


def test_P35_the_checksum_by_name():
    assert zlib.crc32(b"123456789") == 0xCBF43926


def test_P3_lengths_cost_no_memory_before_they_are_checked():
    tracemalloc.start()
    try:
        for length in (1 << 20 | 1, 1 << 31, (1 << 32) - 1):
            one, _ = opened()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(ProtocolError, match="TOO_LARGE"):
                feed(one, vectors.head(p.OPAQUE, 8, length))
            assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_P37_a_message_that_memory_cannot_hold(monkeypatch):
    def full(*_, **__):
        raise MemoryError
    for name, total in (("bytearray", 8), ("mmap", 1 << 40)):
        one, _ = opened()
        with monkeypatch.context() as patch, pytest.raises(ProtocolError, match="TOO_LARGE"):
            patch.setattr(p, "bytearray", full, raising=False)
            patch.setattr(p.mmap, "mmap", full)
            feed(one, vectors.frame(p.OPAQUE, bytes(8), b"abcd", total, flags=p.MORE))
        assert said(one)[2] == p.ERROR, name


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_P3_a_promise_of_a_gigabyte_costs_no_gigabyte():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    one, _ = opened()
    before = resident()
    feed(one, vectors.frame(p.OPAQUE, bytes(8), bytes(1 << 20), 1 << 30, flags=p.MORE))
    assert one._message is None and resident() - before < 64 << 20


def test_numbers_fit_a_double():
    assert p.MAX_MESSAGE < 2 ** 53              # and with it every count, start, stop and total


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_P37_mutated_frames_give_documented_errors_only(data):
    """Whatever is done to good frames, in whatever pieces: a message, or ProtocolError."""
    frames = [bytes.fromhex(case["frame"]) for case in load("messages")["messages"]]
    wire = bytearray(b"".join(data.draw(st.lists(st.sampled_from(frames), min_size=1,
                                                 max_size=3))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(wire) - 1))
        how = data.draw(st.integers(0, 3))
        if how == 0:
            wire[at] = data.draw(st.integers(0, 255))
        elif how == 1:
            del wire[at:at + data.draw(st.integers(1, 9))]
        elif how == 2:
            wire[at:at] = data.draw(st.binary(max_size=9))
        elif at + 32 <= len(wire):              # a header that is wrong, but checks
            wire[at + 28:at + 32] = struct.pack(">I", zlib.crc32(wire[at:at + 28]))
        if not wire:
            return
    one = receiver(data.draw(st.sampled_from(["greeting", "proving", "joining", "open"])))
    try:
        feed(one, wire, size=data.draw(st.sampled_from([1, 5, 1 << 16])))
    except ProtocolError as error:
        assert error.code in p.ERRORS


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(p.MESSAGES)), st.binary(max_size=80))
def test_P37_fields_of_any_bytes(kind, data):
    try:
        values = p.MESSAGES[kind].unpack(data)
    except ProtocolError as error:
        assert p.ERRORS[error.code].name in ("BAD_FIELDS", "TOO_LARGE")
    else:
        packed = p.MESSAGES[kind].pack(values)
        assert packed == data or "numbers" in p.MESSAGES[kind].types    # (a name given twice)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_P2_strangers_of_any_kind(data):
    one = session()
    try:
        feed(one, data, size=13)
    except ProtocolError as error:
        assert p.ERRORS[error.code].name == "NOT_MINIDIST" or data[:4] == p.MAGIC


def test_fields_that_do_not_fit_say_what_the_fields_are():
    with pytest.raises(ProtocolError, match=r"COLLECTIVE has the fields \(op, reduce.*got \(1,\)"):
        p.Outgoing(p.COLLECTIVE, (1,), [], 0)
    with pytest.raises(ProtocolError, match="PING has the fields"):
        p.pack_frame(p.PING, (1,))
    assert len(p.pack_text("ä" * 1000)) == 2 + p.MAX_TEXT       # cut between characters
    p.Cursor(p.pack_text("ä" * 999 + "xx" * 9)).text()
    with pytest.raises(ValueError, match="not contiguous"):
        p.Outgoing(p.OPAQUE, (1,), [np.zeros((4, 4))[:, 1]], 0)


# ---- the table of states (section 9.1) -----------------------------------------------------

GREETED = {side: vectors.greeting(side, nonce) for side, nonce in (
    (b"D", vectors.DIAL_NONCE), (b"A", vectors.ACCEPT_NONCE))}
PROOFS = {side: vectors.frame(p.PROOF, vectors.proof(side, GREETED[b"D"], GREETED[b"A"]))
          for side in (b"D", b"A")}
JOIN_FRAME = vectors.join(1, 0, 7, "127.0.0.1:9")
SAID = {"PROOF, wrong": vectors.frame(p.PROOF, bytes(32)), "JOIN": JOIN_FRAME,
        "WELCOME": vectors.welcome(0, 7),
        "ERROR": vectors.frame(p.ERROR, struct.pack(">H", 32) + vectors.text("why")),
        "PING": vectors.frame(p.PING, bytes(6)), "GOODBYE": vectors.frame(p.GOODBYE),
        "other known kind": vectors.frame(p.OPAQUE, bytes(8))}


def sessions_in(column):
    """The sides that can be in that state."""
    if column == "open":
        return opened()
    sides = {"joining, dialer": [True], "joining, acceptor": [False], "deciding": [False]}.get(
        column, [True, False])
    made = [session(int(dialer), dialer) for dialer in sides]
    for one in made:
        if column != "greeting":
            feed(one, GREETED[one.other])
        if column not in ("greeting", "proving"):
            feed(one, PROOFS[one.other])
        if column == "deciding":
            feed(one, JOIN_FRAME)
        said(one)
    return made


def states_table():
    section = (ROOT / "PROTOCOL.md").read_text().split("### 9.1")[1].split("### 9.2")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines() if line.startswith("| ")]
    return [(event, column, cell) for event, *cells in rows[1:]
            for column, cell in zip(rows[0][1:], cells, strict=True)]


@pytest.mark.parametrize("event, column, cell", [
    row for row in states_table() if row[2] != "-" and row[0] not in (
        "greeting, right", "greeting, wrong",           # the vectors; what the node sees:
        "the node refuses", "silence", "end of stream")])
def test_every_cell_of_the_table_of_states(event, column, cell):
    for one in sessions_in(column):
        error = None
        try:
            if event == "the node accepts":
                one.accept()
                events = []
            elif event == "5 s since connect":
                events = one.tick(5.0)
            else:
                events = feed(one, PROOFS[one.other] if event == "PROOF, right" else SAID[event])
        except ProtocolError as raised:
            error = p.ERRORS[raised.code].name
        told = [data[2] for data in one.out if data[:2] == b"MD"]
        if cell.isupper():                      # the name of an error
            assert (error, one.state, told) == (cell, p.CLOSED, [p.ERROR])
        elif event == "5 s since connect":
            assert error == "HANDSHAKE_TIMEOUT" and one.state == p.CLOSED
            assert told == ([p.ERROR] if cell == "ERROR; closed" else [])
        elif cell == "closed" or event == "ERROR":
            assert (error, one.state, told) == (None, p.CLOSED, [])
        elif event == "PROOF, right":
            assert one.state == p.JOINING
            assert told == [p.PROOF, p.JOIN] * (one.side == p.DIALER)
        elif event == "GOODBYE":
            assert one.left and told == [p.GOODBYE]
        else:
            assert (one.state, told) == {
                "deciding": (p.DECIDE, []), "open": (p.OPEN, []), "deliver": (p.OPEN, []),
                "send WELCOME; open": (p.OPEN, [p.WELCOME]),
                "send PONG": (p.OPEN, [p.PONG])}[cell]
            assert cell != "deliver" or [each.kind for each in events] == [p.OPAQUE]


def udp_listener(v, opened):
    """An endpoint with the ids and nonces of the vectors, open to a dialler or not."""
    named = [bytes.fromhex(v[name]) for name in (
        "incarnation", "connection_id", "listener_nonce")]
    given = iter([bytes(32), *named])
    endpoint = Endpoint(KEY, random=lambda size: next(given, None) or os.urandom(size))
    if opened:
        (retry,) = udp_answers(endpoint, vectors.udp_init())
        udp_answers(endpoint, vectors.udp_init(cookie=retry[16:40]))
        assert not endpoint.accepted
        ack, *_ = udp_answers(endpoint, vectors.datagram(0xD6, 0, b""))
        assert endpoint.accepted and ack[0] == 0xD4
    return endpoint


def udp_answers(endpoint, data):
    endpoint.receive(memoryview(data), ("10.0.0.1", 1), 1.0)
    return [each for train in endpoint.trains(1.0) for each in train.datagrams]


@pytest.mark.parametrize("case", load("udp_negative")["cases"], ids=lambda c: c["about"])
def test_udp_negative_vectors(case):
    endpoint = udp_listener(load("udp_negative"), case["state"] == "open")
    answers = udp_answers(endpoint, bytes.fromhex(case["datagram"]))
    if case["result"] == "dropped":
        assert not answers and endpoint.stats["dropped"] + endpoint.stats["duplicates"] == 1
        assert all(each.state == "open" for each in endpoint.connections.values())
        return
    (answer,) = answers
    what, *code = case["result"].split()
    assert answer[0] == {"RETRY": 0xD1, "CLOSE": 0xD7}[what]
    if code:
        assert answer[16:18] == getattr(packets, *code).to_bytes(2, "big")


# ---- frames of a message -------------------------------------------------------------------

def test_P11_control_frames_between_the_frames_of_a_message():
    """PINGs in the middle of large messages on two channels, cut anywhere."""
    one, other = opened()
    rng = np.random.default_rng(0)
    data = {channel: rng.bytes(300_000 + channel) for channel in (0, 2)}
    outs = [p.Outgoing(p.OPAQUE, (channel,), [data[channel][:1000], data[channel][1000:]], channel)
            for channel in data]
    wire, pings = [], 0
    while outs:
        out = outs[int(rng.integers(len(outs)))]
        wire.append(b"".join(out.frame(50_000, 0, False)))
        outs = [o for o in outs if not o.done]
        other._say(p.PING, (pings, ""))
        pings += 1
        wire.append(said(other))
    events = []
    for piece in wire:
        events += feed(one, piece, size=int(rng.integers(1, 40_000)))
    assert {e.channel: bytes(e.payload) for e in events} == data
    assert said(one).count(b"MD\x06") == pings


def test_payload_goes_straight_to_its_place():
    one, _ = opened()
    target = bytearray(200_000)

    def place(message):
        message.view, message.payload = memoryview(target), "here"
        return True
    one.place = place
    wire = vectors.frame(p.OPAQUE, bytes(8), bytes(range(250)) * 800)
    feed(one, wire[:1000])
    space = one.space()
    assert space.obj is target and len(space) <= p.PIECE
    (message,) = feed(one, wire[1000:])
    assert message.payload == "here" and target == wire[40:]


def test_a_full_inbox_stops_reading_and_nothing_is_lost():
    one, _ = opened()
    room, hold = [False], one.place
    one.place = lambda message: room[0] and hold(message)
    wire = b"".join(vectors.frame(p.OPAQUE, struct.pack(">Q", i), b"x" * i) for i in range(5))
    assert feed(one, wire) == [] and one.paused
    assert one.parse() == [] and one.paused
    one.tick(1000.0)                            # its silence is our doing
    room[0] = True
    assert [m.fields[0] for m in one.parse()] == list(range(5)) and not one.paused


def test_frames_respect_the_other_sides_limit():
    one = session(1, True)
    feed(one, vectors.greeting(b"A", vectors.ACCEPT_NONCE, max_frame=5000))
    assert one.max_frame == 5000
    out = p.Outgoing(p.OPAQUE, (1,), [bytes(12_000)], 0)
    sizes = []
    while not out.done:
        sizes.append(sum(map(len, out.frame(one.max_frame, 0, False)[1:])))
    assert sizes == [5000, 5000, 2000]
    one, _ = opened()                           # and what is received is held to it too
    one.max_frame = 5000
    assert feed(one, vectors.frame(p.OPAQUE, bytes(8), bytes(5000)))
    with pytest.raises(ProtocolError, match="TOO_LARGE"):
        feed(one, vectors.frame(p.OPAQUE, bytes(8), bytes(5001)))


def test_checksums_only_where_both_want_them():
    a, d = session(checksums=True), session(1, True)
    feed(a, said(d))
    feed(d, said(a))
    assert not a.checksums and not d.checksums
    a, d = opened(checksums=True)
    assert a.checksums and d.checksums
    out = p.Outgoing(p.OPAQUE, (1,), [b"abc" * 100, b"d"], 0)
    for _ in range(4):
        (*_, message) = feed(a, b"".join(out.frame(100, 0, True))) or [None]
    assert bytes(message.payload) == b"abc" * 100 + b"d"


# ---- keys ------------------------------------------------------------------------------------

def test_a_change_of_a_greeting_under_way_is_found():
    """Downgrade: an attacker clears a capability bit of the dialer's greeting."""
    a, d = session(checksums=True), session(1, True, checksums=True)
    hello = bytearray(said(d))
    hello[19] ^= 1
    feed(a, hello)
    with pytest.raises(ProtocolError, match="AUTH_FAILED"):
        feed(d, said(a))


def test_a_recorded_conversation_is_worth_nothing():
    lines = [bytes.fromhex(line["bytes"]) for line in TRANSCRIPTS[0]["lines"]
             if line["from"] == "dialer"]
    fresh = p.Session(config(), False, 0.0)     # with a nonce of its own
    feed(fresh, lines[0])
    with pytest.raises(ProtocolError, match="AUTH_FAILED"):
        feed(fresh, lines[1])


def test_nonces_are_new():
    a, b = (said(p.Session(config(1), True, 0.0)) for _ in range(2))
    assert a[28:60] != b[28:60]


# ---- time ------------------------------------------------------------------------------------

def test_P7_the_handshake_has_one_deadline():
    one = session(now=10.0)
    feed(one, vectors.greeting(b"D", vectors.DIAL_NONCE)[:30], now=14.9)    # a byte buys no time
    assert one.timer == 15.0
    one.tick(14.99)
    with pytest.raises(ProtocolError, match="HANDSHAKE_TIMEOUT"):
        one.tick(15.0)


def run_clock(one, start, stop, step, hear=()):
    """Tick a session as a node would; the times of its PINGs."""
    pings, now = [], start
    while now < stop:
        now = round(now + step, 6)
        if any(now - step < t <= now for t in hear):
            feed(one, vectors.frame(p.PONG, struct.pack(">I", 1) + vectors.text("busy")), now)
        one.tick(now)
        if said(one):
            pings.append(now)
    return pings


def test_P8_silence_is_pinged_and_then_it_is_death():
    one, _ = opened(heartbeat=1.0, heartbeat_timeout=10.0)
    with pytest.raises(ProtocolError, match=r"SILENT"):
        run_clock(one, 0.0, 20.0, 0.25)
    assert one.ticked == 10.0 and one.pings == 9


def test_P26_any_byte_is_life_and_our_own_sleep_is_not_its_death():
    one, _ = opened(heartbeat=1.0, heartbeat_timeout=10.0)
    run_clock(one, 0.0, 100.0, 0.25, hear=range(0, 100, 8))
    assert one.peer_doing == "busy"
    feed(one, vectors.frame(p.OPAQUE, bytes(8))[:10], 105.0)        # part of a frame
    one.tick(110.0)
    one.tick(1000.0)                            # we were stopped for a quarter of an hour
    assert one.state == p.OPEN
    with pytest.raises(ProtocolError, match="SILENT"):
        run_clock(one, 1000.0, 1020.0, 0.25)
    assert one.ticked == 1005.0                 # it had half the timeout to be heard


def test_P17_an_idle_connection_sends_little():
    a, d = opened(heartbeat=1.0, heartbeat_timeout=10.0)
    frames, now = 0, 0.0
    while now < 600.0:
        now += 0.25
        for one, other in ((a, d), (d, a)):
            one.tick(now)
            data = said(one)
            frames += data.count(b"MD")
            feed(other, data, now)
            assert one.timer > now
    assert frames <= 600 * 4


def test_P22_a_flood_of_pings_is_not_answered_without_end():
    one, other = opened()
    ping = vectors.frame(p.PING, struct.pack(">I", 1) + vectors.text("x"))
    feed(one, ping * 10_000)
    assert len(one.out) == p.MAX_CONTROL
    said(one)
    feed(one, ping)
    assert len(one.out) == 1


def test_P25_timeouts_are_clamped_and_never_meet_a_wall_clock():
    huge = config(timeout=1e18, heartbeat_timeout=float("inf"))
    assert huge.timeout == huge.heartbeat_timeout == 24 * 3600
    with pytest.raises(ValueError, match="timeout is -1"):
        config(timeout=-1)
    with pytest.raises(ValueError, match="nan"):
        config(timeout=float("nan"))
    for path in (ROOT / "transports").glob("*.py"):
        assert not re.search(r"time\.time\b|datetime\.now|gettimeofday", path.read_text()), path


def test_P27_another_generation_does_not_join():
    for generation in (1, 2 ** 32 - 1):
        one = session(generation=7)
        with pytest.raises(ProtocolError, match="GENERATION"):
            feed(one, vectors.greeting(b"D", vectors.DIAL_NONCE, generation=generation))


def test_after_goodbye_nothing_is_said():
    one, other = opened()
    one.leave()
    one.leave()
    one.tell(p.DEPARTED, (1, 0, ""))
    one.tick(5.0)
    assert said(one) == vectors.frame(p.GOODBYE)
    feed(one, vectors.frame(p.PING, bytes(4) + vectors.text("")))
    assert not one.out and not one.open


# ---- configuration -----------------------------------------------------------------------------

def test_config_from_the_environment():
    env = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000",
           "MINIDIST_SERVERS": "2", "MINIDIST_KEY": KEY.hex(), "MINIDIST_JOB": "j",
           "MINIDIST_PIPES": "0:3:4,2:5:6", "MINIDIST_TIMEOUT": "1.5"}
    c = Config.from_env(env)
    assert (c.node, c.size, c.master, c.key) == (1, 5, ("10.0.0.1", 4000), KEY)
    assert c.pipes == {0: (3, 4), 2: (5, 6)} and c.timeout == 1.5 and c.title(4) == "server 1"
    server = Config.from_env({**env, "MINIDIST_ROLE": "server", "MINIDIST_NODE": "4"})
    assert (server.node, server.role) == (4, "server")
    assert Config.from_env({}).size == 1
    for change, text in [({"RANK": "x"}, "RANK is 'x'"), ({"RANK": "5"}, "nodes 0 to 4"),
                         ({"MINIDIST_KEY": "ab"}, "32 random bytes"),
                         ({"MINIDIST_KEY": "secret"}, "MINIDIST_KEY is set"),
                         ({"MINIDIST_ROLE": "boss"}, "worker or server")]:
        with pytest.raises(ValueError, match=text) as error:
            Config.from_env({**env, **change})
        assert "secret" not in str(error.value)


def test_no_code_travels():
    """No pickle, eval or the like in what reads the network."""
    for path in (ROOT / "transports").glob("*.py"):
        assert not re.search(r"import (pickle|marshal|shelve|yaml)\b|allow_pickle=True|\beval\(",
                             path.read_text()), path


def test_P22_every_limit_is_used():
    source = "".join(path.read_text() for path in (ROOT / "transports").glob("*.py"))
    limits = r"^(MAX_\w+|INBOX|UNASKED|STRANGERS|HANDSHAKE_TIMEOUT) = "
    for name in re.findall(limits, source, re.M):
        assert len(re.findall(rf"\b{name}\b", source)) > 1, f"{name} bounds nothing"


# ---- the document ----------------------------------------------------------------------------

HERE, THERE = "test_protocol.py", "test_transports.py"
RULES = {
    "2-1": (HERE, "test_numbers_fit_a_double"),
    "2-2": (HERE, "test_negative_vectors"),
    "2-3": (THERE, "test_P7_silent_connections_keep_nobody_waiting"),
    "3-1": (HERE, "test_P6_transcripts_in_pieces_of_any_size"),
    "3-2": (THERE, "test_D1_kill_9_is_seen_by_all_at_once"),
    "3-3": (THERE, "test_a_send_given_up_half_way_ends_the_connection"),
    "3-4": (THERE, "test_P10_mutual_sends_never_deadlock"),
    "3-5": (THERE, "test_listening_beyond_loopback_needs_a_key"),
    "3-6": ("test_security.py", "test_certificates_that_are_refused"),
    "4.1-1": (HERE, "test_negative_vectors"),
    "4.1-2": (HERE, "test_P3_lengths_cost_no_memory_before_they_are_checked"),
    "4.1-3": (HERE, "test_negative_vectors"),
    "4.2-1": (HERE, "test_negative_vectors"),
    "4.2-2": (HERE, "test_negative_vectors"),
    "4.2-3": (HERE, "test_P11_control_frames_between_the_frames_of_a_message"),
    "4.3-1": (HERE, "test_negative_vectors"),
    "4.2-4": (THERE, "test_P1_partial_writes_and_reads_of_any_size"),
    "5-1": (HERE, "test_negative_vectors"),
    "5-2": (HERE, "test_negative_vectors"),
    "5-3": (HERE, "test_a_change_of_a_greeting_under_way_is_found"),
    "5-4": (HERE, "test_checksums_cover_the_payload_and_fields_alone_are_a_frame"),
    "5-5": (HERE, "test_P2_strangers_of_any_kind"),
    "6-1": (THERE, "test_wrong_key_job_generation_are_errors_on_both_sides"),
    "6-2": (HERE, "test_nonces_are_new"),
    "6-3": (HERE, "test_negative_vectors"),
    "7-1": (HERE, "test_P37_fields_of_any_bytes"),
    "7-2": (HERE, "test_P31_elements"),
    "8-1": (HERE, "test_after_goodbye_nothing_is_said"),
    "8-2": (HERE, "test_negative_vectors"),
    "9.1-1": (HERE, "test_every_cell_of_the_table_of_states"),
    "9.2-1": (THERE, "test_P27_the_same_rank_twice_is_refused"),
    "9.2-2": (HERE, "test_P6_transcripts_in_pieces_of_any_size"),
    "9.2-3": (THERE, "test_all_nodes_dial_each_other_at_once_and_nobody_hears_of_it"),
    "9.2-4": (THERE, "test_D6_the_missing_are_named"),
    "9.2-5": (THERE, "test_P27_the_same_rank_twice_is_refused"),
    "9.3-1": (THERE, "test_D4_wrong_length_is_an_error_on_both_sides"),
    "9.3-2": (HERE, "test_reductions_have_the_bits_of_the_document"),
    "9.3-3": (HERE, "test_reductions_have_the_bits_of_the_document"),
    "9.4-1": ("test_downpour.py", "test_an_acknowledged_push_counts_exactly_once"),
    "9.4-2": ("test_downpour.py", "test_only_one_push_is_under_way"),
    "9.4-3": ("test_downpour.py", "test_an_acknowledged_push_counts_exactly_once"),
    "9.8-1": ("test_synchronous.py", "test_D3_the_first_difference_is_named_on_every_rank"),
    "9.8-2": ("test_synchronous.py", "test_ranks_equal_one_process"),
    "9.8-3": ("test_synchronous.py", "test_D13_gradients_are_weighted_by_samples"),
    "9.8-6": ("test_elastic.py",
              "test_sigterm_ends_all_ranks_after_one_step_and_they_go_on_from_there"),
    "9.9-1": ("test_elastic.py", "test_d18_the_same_on_three_ranks_of_which_one_finds_the_file"),
    "9.9-2": ("test_elastic.py", "test_a_state_of_an_abandoned_past_is_not_mixed_in"),
    "9.10-1": ("test_generations.py", "test_a_loss_behind_a_step_that_is_not_complete"),
    "9.10-2": ("test_generations.py", "test_lost_workers_are_replaced_and_bits_stay"),
    "9.10-3": ("test_generations.py", "test_schedules_of_crashes_pauses_and_restarts"),
    "9.10-4": ("test_generations.py", "test_lost_workers_are_replaced_and_bits_stay"),
    "9.10-5": (THERE, "test_wrong_key_job_generation_are_errors_on_both_sides"),
    "9.11-1": ("test_strategies.py", "test_local_sgd_is_its_rule"),
    "9.11-2": ("test_strategies.py", "test_gossip_is_d_psgd"),
    "9.11-3": ("test_strategies.py", "test_asynchronous_gossip_is_ad_psgd"),
    "9.8-4": ("test_synchronous.py",
              "test_D2_an_extra_step_on_one_rank_is_an_error_not_a_wrong_sum"),
    "9.8-5": ("test_interop.py",
              "test_synchronous_training_has_the_same_bits_after_every_step"),
    "9.5-1": (HERE, "test_P8_silence_is_pinged_and_then_it_is_death"),
    "9.5-2": (HERE, "test_P26_any_byte_is_life_and_our_own_sleep_is_not_its_death"),
    "9.5-3": (THERE, "test_D1_P8_a_stopped_node_is_lost_after_heartbeat_timeout"),
    "9.6-1": (THERE, "test_on_lost_lets_the_others_go_on"),
    "9.6-2": (THERE, "test_on_lost_lets_the_others_go_on"),
    "9.6-3": (THERE, "test_D1_kill_9_is_seen_by_all_at_once"),
    "9.7-1": ("test_partner.py", "test_workers_that_keep_the_rules"),
    "13-1": ("test_partner.py", "test_workers_that_keep_the_rules"),
}


def test_every_rule_of_the_document_has_a_test():
    document = (ROOT / "PROTOCOL.md").read_text()
    # (Section 10 is tested by test_reliability.py, which has a table of its own.)
    ids = [rule for rule in re.findall(r"^- \[MDP-([\d.]+-\d+)\]", document, re.M)
           if not rule.startswith("10")]
    assert sorted(set(ids)) == sorted(ids) and set(ids) == set(RULES)
    # And nothing is demanded outside of rules, but by the tables' words.
    for paragraph in re.split(r"\n\n|\n(?=- )", document):
        if re.search(r"\bMUST\b", paragraph) and not paragraph.startswith("- [MDP-"):
            assert paragraph.startswith("MUST, MUST NOT, SHOULD and MAY are"), paragraph
    known = set(re.findall(r"^- \[MDP-([\d.]+-\d+)\]", document, re.M))
    for stage in conformance.STAGES:
        assert set(stage.rules.split()) <= known, stage
    cited = set(re.findall(r'"(\d[\d.]*-\d+)"', Path(conformance.__file__).read_text()))
    assert cited <= known and len(cited) > 30, cited - known
    for rule, (name, test) in RULES.items():
        source = (ROOT / "tests" / name).read_text()
        assert f"def {test}(" in source, f"MDP-{rule} names {test}"
