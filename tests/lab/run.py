"""The tables of the lab: what real processes get out of a bad wire. As root:

    python tests/lab/run.py [goodput] [share] [faults] [train]      (all of them)
    python tests/lab/soak.py SECONDS

A lab is 100 Mbit/s, 10 ms there and back, a queue of 10 ms unless the table says otherwise. The
wire is a process too: on a machine that does other things, its tables show those as well.
"""
import sys

import experiments
from experiments import LINK, REORDER, goodput, share
from network import missing

LOSSES = {0.0: None, 0.01: 80, 0.05: 70, 0.10: 60}             # and what udp must reach


def table(title, *rows):
    print(f"\n## {title}\n")
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows[1:]:
        print("| " + " | ".join(f"{each:.3g}" if isinstance(each, float) else str(each)
                                for each in row) + " |", flush=True)


def run_goodput():
    flows = [("udp", ""), ("tcp", "cubic"), ("tcp", "bbr")]
    table("Mbit/s at a loss of", ["", *(f"{loss:.0%}" for loss in LOSSES), "10 % reordered"],
          *[[" ".join(flow), *(goodput(*flow, loss=loss) for loss in LOSSES),
             goodput(*flow, **REORDER)] for flow in flows],
          ["udp must", *(most or "" for most in LOSSES.values()), "60 % of the first"])


def run_share():
    rows = []
    for queue in (0.25, 1, 4):
        for first, second in ((("udp", ""), ("tcp", "cubic")), (("udp", ""), ("udp", "")),
                              (("tcp", "bbr"), ("tcp", "cubic"))):
            one, other = share([first, second], 20.0, queue=queue * LINK["queue"])
            rows.append([" ".join(first), " ".join(second), queue, one, other,
                         f"{one / (one + other):.0%}"])
    table("Mbit/s of two flows that share it",
          ["one", "other", "queue / (rate x rtt)", "one", "other", "share of one"], *rows)


def run_faults():
    rows = [[f"nothing passes for {length:g} s", "s until bytes come again",
             experiments.partition(length)] for length in (0.5, 2.0, 8.0)]
    for who, name in enumerate(("receiver", "sender")):
        before, took, after = experiments.pause(who, 5.0)
        rows.append([f"the {name} stops for 5 s",
                     "Mbit/s before, s until 5 MB came, Mbit/s after",
                     f"{before:.0f}, {took:.1f}, {after:.0f}"])
    for took, words in experiments.restart(5):
        rows.append(["kill -9 and a new one on its address", "s until it is there; of the old one",
                     f"{took:.2f}; {words}"])
    took, words = experiments.kill()
    rows.append(["kill -9", "s until it is said", f"{took:.1f}; {words}"])
    table("Faults", ["fault", "", "found"], *rows)


def run_train():
    rows = [[name, *experiments.train(transport, 3, **faults)[:2]] for name, transport, faults in (
        ("tcp", "tcp", {}), ("udp", "udp", {}),
        ("udp, 5 % lost, 10 % reordered", "udp", {"loss": 0.05} | REORDER))]
    table("minidist train, a worker on each host, 3 epochs", ["over", "the model", "s"],
          *[[name, bits[:16], took] for name, bits, took in rows])


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    for name in sys.argv[1:] or ["goodput", "share", "faults", "train"]:
        globals()[f"run_{name}"]()
