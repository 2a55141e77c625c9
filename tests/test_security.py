"""Keys and where they come from, TLS, and what a stranger can make a node hold.

Replays, reflections, downgrades and spoofed addresses are tested beside the machines that refuse
them, in test_protocol.py and test_reliability.py, and from outside by `minidist conformance`.
"""
import contextlib
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

import certificates
import minidist_transports as mt
import vectors
from minidist_transports import keys
from minidist_transports import protocol as p
from test_transports import KEY, cluster, configs, free_port, opaque, together

ROOT = Path(__file__).parent.parent
MINIDIST = [sys.executable, str(ROOT / "minidist.py")]
tls = pytest.mark.skipif(not certificates.AVAILABLE and not os.environ.get("CI"),
                         reason="openssl is missing")


# ---- keys ------------------------------------------------------------------------------

def test_keygen(tmp_path):
    printed = [subprocess.run([*MINIDIST, "keygen"], capture_output=True, text=True).stdout
               for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{64}\n", key) for key in printed) and len(set(printed)) == 2
    path = tmp_path / "key"
    done = subprocess.run([*MINIDIST, "keygen", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.key_of({"MINIDIST_KEY_FILE": str(path)}).hex() == path.read_text().strip()
    again = subprocess.run([*MINIDIST, "keygen", str(path)], capture_output=True, text=True)
    assert again.returncode == 2 and "File exists" in again.stderr      # never overwritten


def test_a_key_file_is_private(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    env = {"MINIDIST_KEY_FILE": str(path)}
    for mode in (0o644, 0o640, 0o602):
        path.chmod(mode)
        with pytest.raises(PermissionError, match=rf"{mode:04o}, expected 0600.*chmod 600"):
            mt.Config.from_env(env)
    path.chmod(0o400)
    assert mt.Config.from_env(env).key == KEY
    other = bytes(32).hex()                     # the variable itself wins
    assert mt.Config.from_env({**env, "MINIDIST_KEY": other}).key == bytes(32)


@pytest.mark.parametrize("text", ["", "secret", "abcd", "0" * 66])
def test_what_is_no_key_is_not_shown(tmp_path, text):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="minidist keygen") as error:
        mt.Config.from_env({"MINIDIST_KEY_FILE": str(path)})
    assert "secret" not in str(error.value) and "0" * 66 not in str(error.value)
    with pytest.raises(FileNotFoundError):
        mt.Config.from_env({"MINIDIST_KEY_FILE": str(tmp_path / "none")})


def test_keys_are_no_arguments():
    for command in (["train"], ["launch"], ["conformance"]):
        text = subprocess.run([*MINIDIST, *command, "--help"], capture_output=True, text=True)
        assert not re.search(r"--(\w+-)?(key|secret)\b", text.stdout), command


# ---- what a stranger can make us hold ---------------------------------------------------------

def test_a_stranger_holds_little_memory():
    """The document says 40 KiB: whatever it sends, before it has joined."""
    hello = vectors.greeting(b"D", vectors.DIAL_NONCE)
    proof = vectors.frame(vectors.PROOF, bytes(32))
    tracemalloc.start()
    try:
        for said in (b"", hello, hello[:63], hello + proof[:40], hello + vectors.head(1, 1024)
                     + bytes(1000)):
            before = tracemalloc.get_traced_memory()[0]
            strangers = [p.Session(mt.Config(workers=2, key=KEY, job="job-0"), False, 0.0)
                         for _ in range(20)]
            for one in strangers:
                one.space()[:len(said)] = said
                one.received(len(said), 0.0)
            held = (tracemalloc.get_traced_memory()[0] - before) / len(strangers)
            assert held < 40 << 10, f"{held:.0f} bytes after {said[:8]!r}"
    finally:
        tracemalloc.stop()


# ---- TLS ---------------------------------------------------------------------------------------

def tls_config(files, node=0, **settings):
    return mt.Config(node=node, workers=2, tls=files, key=KEY, start_timeout=4.0, **settings)


@tls
def test_what_travels_is_not_to_be_read():
    """Through a relay that listens: neither greeting nor payload is there in plain text."""
    seen, secret = bytearray(), b"nobody else shall read this" * 50
    configs_ = configs("tls", 2)
    port = configs_[0].master[1]
    relay = socket.create_server(("127.0.0.1", 0))

    def carry(a, b):
        with contextlib.suppress(OSError):      # they end as they like
            while data := a.recv(1 << 16):
                seen.extend(data)
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)

    def run():
        one, _ = relay.accept()
        until = time.monotonic() + 20
        while True:                             # the other may not listen yet
            try:
                other = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
                time.sleep(0.05)
        back = threading.Thread(target=carry, args=(other, one))
        back.start()
        carry(one, other)
        back.join(5)
        one.close()
        other.close()
    thread = threading.Thread(target=run)
    thread.start()
    configs_[1].master = relay.getsockname()

    def work(config):
        with mt.open("tls", config) as node:
            node.send(1 - node.node, *opaque(), [secret])
            return bytes(node.recv(1 - node.node).payload)
    assert together(*[lambda c=c: work(c) for c in configs_]) == [secret] * 2
    thread.join(10)
    relay.close()
    assert len(seen) > 2 * len(secret) and secret[:20] not in seen and p.MAGIC not in seen


@tls
@pytest.mark.parametrize("name, make, cause", [
    ("another authority", lambda: certificates.certificate("x", signer="another"), "cert"),
    ("another host", lambda: certificates.certificate("y", "DNS:elsewhere"), "mismatch"),
])
def test_certificates_that_are_refused(name, make, cause, caplog):
    good = certificates.certificate()
    bad = make()
    port = free_port("tls")
    place = {"master": ("127.0.0.1", port)}
    # Who listens has the bad one: the dialer finds out; and the other way round.
    for first, second in ((bad, good), (good, bad)):
        if name == "another host" and first is good:
            continue                            # (a dialer's certificate names no place)
        results = together(*[lambda node=node, files=files: mt.open(
            "tls", tls_config(files, node, **place)) for node, files in enumerate((first, second))])
        assert all(isinstance(result, mt.TransportError) for result in results), results
        assert cause in str(results).lower() + caplog.text.lower()


@tls
@pytest.mark.parametrize("change", ["no certificate", "TLS 1.2", "no TLS"])
def test_who_is_not_let_in(change, caplog):
    certificate, key, ca = certificates.certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    if change == "TLS 1.2":
        context.load_cert_chain(certificate, key)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    with cluster("tls") as (a, b):
        host, port = a.config.master
        with socket.create_connection((host, port), 5.0) as raw, pytest.raises(OSError):
            if change == "no TLS":
                raw.sendall(vectors.greeting(b"D", vectors.DIAL_NONCE))
                answer = raw.recv(100)
                assert p.MAGIC not in answer
                raise OSError
            with context.wrap_socket(raw, server_hostname=host) as sock:
                sock.sendall(vectors.greeting(b"D", vectors.DIAL_NONCE))
                assert p.MAGIC not in sock.recv(100)
                raise OSError
        b.send(0, *opaque(7))
        assert a.recv(1).fields == (7,)         # and nobody else notices


@tls
def test_a_silent_stranger_has_five_seconds_for_tls_too(monkeypatch, caplog):
    monkeypatch.setattr(p.Session.__init__, "__kwdefaults__", {
        **p.Session.__init__.__kwdefaults__, "patience": 0.5})
    with cluster("tls") as (a, b), socket.create_connection(a.config.master, 5.0) as stranger:
        stranger.sendall(b"\x16\x03\x01")       # the beginning of a ClientHello
        stranger.settimeout(10.0)
        assert stranger.recv(100) == b""


@tls
def test_files_of_tls(tmp_path):
    certificate, key, ca = certificates.certificate()
    with pytest.raises(ValueError, match="MINIDIST_TLS_CERT.*--tls CERT KEY CA"):
        mt.open("tls", mt.Config(workers=2))
    open_key = tmp_path / "key.pem"
    open_key.write_text(Path(key).read_text())
    open_key.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        mt.open("tls", tls_config((certificate, str(open_key), ca)))
    script = tmp_path / "script.py"
    script.write_text("import numpy as np\nimport minidist\nfrom minidist import distributed as d\n"
                      "d.init_process_group()\nx = np.ones(3)\nd.all_reduce(x)\nprint(x)\n"
                      "d.destroy_process_group()\n")
    run = [*MINIDIST, "launch", "--nproc-per-node", "2", "--tls"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*run, certificate, key, ca, str(script)], env=env, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("[2. 2. 2.]") == 2, done
    done = subprocess.run([*run, certificate, "/no/key", ca, str(script)], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 2 and "there is no file '/no/key'" in done.stderr
