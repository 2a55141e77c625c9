"""The wire between the hosts of the lab: packets of two TUN devices, and faults in real time.

    forwarder.py FD FD SEED

Each line of standard input is JSON, [faults one way, faults the other way] with the names of
simnet.Faults; it counts from then on, and is answered by a line with what happened so far. The
wire ends with its input, so none outlives who made it.
"""
import contextlib
import heapq
import json
import os
import random
import select
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import simnet  # noqa: E402

BATCH = 64                          # packets of one device in a row
LARGEST = 2048                      # bytes of a packet


def main(first, second, seed):
    devices = int(first), int(second)
    paths = [simnet.Path(simnet.Faults(), random.Random(f"{seed} {way}"), overhead=0)
             for way in range(2)]
    waiting, order = [], 0          # (when it arrives, for packets of one time, device, packet)
    while True:
        for way, device in enumerate(devices):
            for _ in range(BATCH):
                try:
                    packet = os.read(device, LARGEST)
                except BlockingIOError:
                    break
                if packet[0] >> 4 != 4:     # IPv6 looks for neighbours: not our business
                    continue
                for due, arrived in paths[way].arrivals(packet, time.monotonic()):
                    order += 1
                    heapq.heappush(waiting, (due, order, devices[1 - way], arrived))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):      # damaged so that it is no packet any more
                os.write(device, packet)
        wait = max(0.0, waiting[0][0] - now) if waiting else None
        if sys.stdin in select.select([*devices, sys.stdin], [], [], wait)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            for path, faults in zip(paths, json.loads(line), strict=True):
                path.faults = simnet.Faults(**faults)
            print(json.dumps([path.stats for path in paths]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
