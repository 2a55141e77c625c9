"""2. Train on two processes, then change the transport

One process learns to read digits. Then two processes do it together, and the lesson
is how little changes: one line makes the optimizer a distributed one, and how the
processes reach each other (through pipes, over TCP, over UDP) is a word at launch.
The result does not change at all, down to the last bit.

Run it: `python tutorials/02_train_anywhere.py`. Lines that begin with `#>` are what
it prints; `...` stands for what differs between machines.
"""

# When minidist is not installed, take it from the folder above this one.
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import minidist as md

# ---------------------------------------------------------------------------
# The data and the network
# ---------------------------------------------------------------------------
# 1,797 digits of 8x8 pixels, written by hand, came with this folder. They are split
# once and for all: every fifth, for every digit, is kept for the test.

train_set, test_set = md.load_dataset("digits")
print(len(train_set), "to learn from,", len(test_set), "to test with")
#> 1433 to learn from, 364 to test with
image, label = test_set[0]
print(tuple(image.shape), image.dtype, int(label))
#> (1, 8, 8) float32 0

# LeNet looks for small patterns everywhere in the picture (convolution), keeps the
# strongest of its neighbours (pooling), looks for patterns of patterns, and decides.
# This is the classic one with its kernels scaled from 28x28 pixels down to 8x8.


def lenet():
    nn = md.nn
    return nn.Sequential(                                       # (B, 1, 8, 8)
        nn.Conv2d(1, 20, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),   # (B, 20, 4, 4)
        nn.Conv2d(20, 50, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 50, 2, 2)
        nn.Flatten(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10),
    )


# ---------------------------------------------------------------------------
# One training function, for one process or many
# ---------------------------------------------------------------------------
# Read it as if there were one process: it is the loop that everyone writes. Three
# lines make it work for many:
#
#   init_process_group   joins the others (alone, it is a group of one)
#   Synchronous          stands where the optimizer stood; after backward it adds the
#                        gradients of all ranks up, weighted by their samples
#   train.batches        cuts each batch in shares, one a rank: with 64 samples a batch
#                        and two ranks, each computes 32
#
# All ranks start from the same seed, so they build the same network and draw the
# same batches. Everything is computed in double precision: not needed for learning,
# but rounding shall not blur the comparisons below.


def learn(epochs):
    dist = md.distributed
    dist.init_process_group()
    md.manual_seed(0)
    model = lenet().double()
    optimizer = md.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = dist.Synchronous(model, optimizer)
    train_set, test_set = md.load_dataset("digits")
    loader = md.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
    for _ in range(epochs):
        for x, y in train.batches(loader):
            train.zero_grad()
            md.nn.functional.cross_entropy(model(x.double()), y).backward()
            train.step()
    train.finish()
    images, labels = test_set.tensors
    with md.no_grad():
        right = (model(images.double()).argmax(1) == labels).sum().item()
    transport = train.group.transport                           # None in a group of one
    result = {
        "accuracy": right / len(test_set),
        "parameters": {key: p.detach().numpy() for key, p in model.named_parameters()},
        "sent": transport.stats["bytes_sent"] if transport else 0,
        "messages": transport.stats["messages_sent"] if transport else 0,
    }
    dist.destroy_process_group()
    return result


alone = learn(epochs=4)
print(f"alone: {alone['accuracy']:.0%} right")
#> alone: 9...% right

# ---------------------------------------------------------------------------
# Two processes
# ---------------------------------------------------------------------------
# `launch` starts two of them, calls the function in each, and brings back what each
# returned. (From a terminal `minidist launch` does it with a script, see below.)

two = md.launch(learn, args=(4,), workers=2, transport="tcp")
print([f"{one['accuracy']:.0%} right" for one in two])
#> ['9...% right', '9...% right']

# They never sent each other a weight after the start. They did not need to: both add
# the same gradients in the same order, so both take the same steps. To the bit:


def equal(a, b):
    return all(a["parameters"][key].tobytes() == b["parameters"][key].tobytes()
               for key in a["parameters"])


print(equal(two[0], two[1]))
#> True

# And together they do what one process does with the whole batch. Not to the bit, for
# 32 + 32 numbers added in halves round differently from 64 in a row, but to the last
# digits of double precision.

largest = max(abs(alone["parameters"][key] - two[0]["parameters"][key]).max()
              for key in alone["parameters"])
print(largest < 1e-12)
#> True

# ---------------------------------------------------------------------------
# Another transport
# ---------------------------------------------------------------------------
# TCP makes a stream that loses nothing and keeps the order. A pipe is one too, inside
# one machine. UDP is neither: datagrams get lost, come twice, overtake each other. Its
# transport numbers them, acknowledges them, and sends lost ones again. Above, nobody
# notices: the same messages, the same sums.

for transport in ["pipe", "udp"]:
    other = md.launch(learn, args=(4,), workers=2, transport=transport)
    print(f"{transport}: same bits as over tcp: {equal(two[0], other[0])}")
#> pipe: same bits as over tcp: True
#> udp: same bits as over tcp: True

# What did it cost? Each step sends the gradient once, in halves: that is what both
# ranks have to tell each other at least.

parameters = sum(p.size for p in two[0]["parameters"].values())
steps = 4 * len(range(0, len(train_set), 64))
print(f"{steps} steps of {parameters:,} parameters, 8 bytes each")
#> 92 steps of 30,360 parameters, 8 bytes each
print(f"{two[0]['sent'] / steps / (8 * parameters):.2f} gradients sent a step")
#> 1.0... gradients sent a step

# ---------------------------------------------------------------------------
# The same from a terminal
# ---------------------------------------------------------------------------
# The training loop above is also the main command of minidist. Try
#
#     minidist train --model lenet --data digits --workers 2 --transport tcp
#     minidist train --model lenet --data digits --workers 2 --transport udp
#
# and a script of your own, with the function above in it, runs on two processes with
#
#     minidist launch --nproc-per-node 2 --transport udp script.py
#
# (In a checkout say `python minidist.py` where it says `minidist`.)
