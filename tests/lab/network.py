"""Two hosts and a wire on one machine: real kernels' stacks, real processes, faults that we choose.

    with Lab(delay=0.005, rate=12.5e6, loss=0.05) as lab:
        lab.start(0, sys.executable, "server.py")           # a process on host 0, 10.77.0.1
        lab.start(1, sys.executable, "client.py")           # and on host 1, 10.77.0.2
        lab.faults(loss=1.0)                                # from now on

A host is a network namespace with one TUN device; forwarder.py carries packets between the two.
Namespaces, devices and wire have no names and live as long as the processes that hold them, so
nothing remains, whatever is killed. It needs Linux and root, see `missing`.
"""
import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CLONE_NEWNET = 0x40000000                       # sched.h
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000           # linux/if_tun.h
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C      # linux/sockios.h
IFF_UP, IFF_RUNNING = 1, 0x40


def missing():
    """Why there can be no lab here; None if there can."""
    if sys.platform != "linux":
        return "the lab is made of Linux's network namespaces"
    if os.geteuid() != 0:
        return "the lab makes network namespaces, which only root may: sudo -E python -m pytest"
    try:
        for part in Host(ADDRESSES[0]):
            os.close(part)
    except OSError as error:
        return f"this root may not make network namespaces or TUN devices: {error}"
    return None


def Host(address):
    """A new namespace with a device of that address: (its descriptor, the device's)."""
    made = []

    def enter():                                # a namespace belongs to a thread
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"lab", IFF_TUN | IFF_NO_PI))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                for request, text in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
                    place = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
                    fcntl.ioctl(sock, request, struct.pack("16s16s8x", b"lab", place))
                for name in (b"lo", b"lab"):
                    fcntl.ioctl(sock, SIOCSIFFLAGS,
                                struct.pack("16sH22x", name, IFF_UP | IFF_RUNNING))
            made.extend((os.open("/proc/thread-self/ns/net", os.O_RDONLY), device))
        except OSError as error:
            made.append(error)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made


class Lab:
    def __init__(self, seed=1, **faults):
        self.hosts = [Host(address) for address in ADDRESSES]
        self.processes = []
        devices = [device for _, device in self.hosts]
        self.wire = subprocess.Popen(
            [sys.executable, HERE / "forwarder.py", *map(str, devices), str(seed)],
            pass_fds=devices, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.faults(**faults)

    def faults(self, *, back=None, **there):
        """What packets suffer from now on, one way and (unless told otherwise) the other; returns
        what both ways did so far."""
        print(json.dumps([there, there if back is None else back]), file=self.wire.stdin,
              flush=True)
        return json.loads(self.wire.stdout.readline())

    def start(self, host, *command, **options):
        """A process on that host."""
        namespace, _ = self.hosts[host]
        process = subprocess.Popen(
            ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", *map(str, command)], **options)
        self.processes.append(process)
        return process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self.wire.stdin.close()
        self.wire.wait()
        self.wire.stdout.close()
        for host in self.hosts:
            for part in host:
                os.close(part)
