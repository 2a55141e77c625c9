"""One end of a stream in the lab, over a driver of minidist: "udp", or "tcp", the kernel's.

    peer.py receive TRANSPORT HOST:PORT
    peer.py send TRANSPORT HOST:PORT [OWN HOST:PORT] [tcp's congestion control]

What is sent has no end; the receiver checks every byte, and prints a line of JSON for each stream
ten times a second and when it ends: {"at": monotonic seconds, "stream": count, "bytes": of it so
far} and perhaps {"end": why}. Lines of stream -1 say that the receiver lives.
"""
import json
import random
import select
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import conftest  # noqa: E402, F401 - finds minidist_transports
import minidist_transports as mt  # noqa: E402
from minidist_transports import tcp, udp  # noqa: E402

DRIVERS = {"tcp": tcp.TcpDriver, "udp": udp.UdpDriver}
BLOCK = random.Random(1).randbytes(1 << 20)
TWICE = memoryview(BLOCK * 2)           # any megabyte of the endless stream
EVERY = 0.1                             # s between two lines
PIECE = 1 << 18                         # bytes sent or received at once


def open_driver(transport):
    return DRIVERS[transport](mt.Config(
        key=bytes(range(32)), start_timeout=10.0))


def wait(driver, streams, write, limit):
    due = driver.timeout(time.monotonic())
    readers = [each.read_fd for each in streams if each.read_fd >= 0]
    select.select(readers + [driver] * (driver.fileno() >= 0), readers if write else [], [],
                  limit if due is None else min(due, limit))


def receive(transport, address):
    driver = open_driver(transport)
    driver.listen(*mt.split_address(address))
    view, streams, count, due = memoryview(bytearray(PIECE)), {}, 0, 0.0
    while True:
        now = time.monotonic()
        driver.pump(now)
        while stream := driver.accept():
            streams[stream] = [count, 0]
            count += 1
        if now >= due:
            print(json.dumps({"at": now, "stream": -1, "bytes": 0}), flush=True)
        for stream, (number, total) in list(streams.items()):
            line = {"at": now, "stream": number, "bytes": total}
            try:
                while time.monotonic() < now + EVERY:       # however fast the bytes come
                    if not (size := stream.recv_into(view)):
                        line["end"] = "in order"
                        break
                    at = total % len(BLOCK)
                    assert view[:size] == TWICE[at:at + size], f"bytes after {total} are wrong"
                    total += size
            except BlockingIOError:
                pass
            except OSError as error:
                line["end"] = str(error)
            streams[stream][1] = line["bytes"] = total
            if "end" in line:
                del streams[stream]
                stream.close()
            if "end" in line or now >= due:
                print(json.dumps(line), flush=True)
        due = now + EVERY if now >= due else due
        wait(driver, streams, False, EVERY)


def send(transport, address, own="", control=""):
    driver = open_driver(transport)
    if own:
        driver.listen(*mt.split_address(own))
    stream, at = driver.dial(driver.resolve(address)[0]), 0
    if control:
        stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    while True:
        driver.pump(time.monotonic())
        try:
            while True:
                at = (at + stream.send([TWICE[at:at + PIECE]])) % len(BLOCK)
        except BlockingIOError:
            pass
        wait(driver, [stream], True, 1.0)


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
