"""1. Tensors, and why backward sorts topologically

A neural network learns by asking one question over and over: if I change this
number a little, how much does the loss change? The answer is a derivative, and a
library that gives it for any program is the heart of every framework. This
walkthrough builds such a library in a few lines, breaks it on the smallest graph
that can break it, mends it, and then meets the same idea in minidist.

Run it: `python tutorials/01_tensors.py`. Lines that begin with `#>` are what it
prints; the tests compare, and read `...` as anything.
"""

# When minidist is not installed, take it from the folder above this one.
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import minidist as md

# ---------------------------------------------------------------------------
# A tensor is an array that remembers where it came from
# ---------------------------------------------------------------------------
# Without the remembering it is NumPy with PyTorch's names. Numbers with a point
# become float32, and shapes stretch to fit each other.

row = md.tensor([1.0, 2.0, 3.0])
column = md.tensor([[10.0], [20.0]])
print((row + column).numpy())
#> [[11. 12. 13.]
#>  [21. 22. 23.]]
print(row.dtype, tuple((row + column).shape))
#> float32 (2, 3)

# With `requires_grad=True` a tensor is one of the numbers we ask about. `backward`
# answers: it fills `grad` with the derivative of the result by that tensor.

x = md.tensor(3.0, requires_grad=True)
y = x * x + 2 * x
y.backward()
print(x.grad.item())  # 2x + 2 at x = 3
#> 8.0

# Nobody has to believe that: walk a small step and look.

step = 1e-3
print(round(((3 + step) ** 2 + 2 * (3 + step) - y.item()) / step, 2))
#> 8.0

# ---------------------------------------------------------------------------
# A graph by hand
# ---------------------------------------------------------------------------
# How can it know? Every operation knows its own derivative, which is a single
# number once its inputs are known: the slope. For y = a * b the slope by a is b,
# and the slope by b is a; for a sum both are 1. So let each result remember its
# inputs and the slopes.


class Value:
    """A number, what it was computed from, and how steeply it follows each of these."""

    def __init__(self, number, inputs=(), slopes=()):
        self.number, self.inputs, self.slopes = number, inputs, slopes
        self.grad = 0.0

    def __add__(self, other):
        return Value(self.number + other.number, (self, other), (1.0, 1.0))

    def __mul__(self, other):
        return Value(self.number * other.number, (self, other), (other.number, self.number))


# The chain rule does the rest: when the result follows `a` with slope g, and `a`
# follows `x` with slope s, the result follows `x` through `a` with slope g * s; and
# what comes along several ways adds up. That is to say: start at the result with 1,
# and hand each gradient on, times the slope, to where the value came from.


def backward_by_depth(result):
    """Hand gradients on as deep as possible, looking at each node once. It has a mistake."""
    seen = set()

    def visit(node):
        if node in seen:
            return
        seen.add(node)
        for source, slope in zip(node.inputs, node.slopes, strict=True):
            source.grad += node.grad * slope
            visit(source)

    result.grad = 1.0
    visit(result)


x = Value(3.0)
backward_by_depth(x * x + Value(2.0) * x)
print(x.grad)
#> 8.0

# ---------------------------------------------------------------------------
# The diamond
# ---------------------------------------------------------------------------
# It looked right. Now the smallest graph that shows the mistake: a value in the
# middle, used twice, and computed from something itself.
#
#            b = 2a
#          /        \
#   x -- a = x*x      y = b + c          y = 7 x*x, so dy/dx = 14x = 42 at x = 3
#          \        /
#            c = 5a


def diamond(x, two, five):
    a = x * x
    return two * a + five * a


x = Value(3.0)
backward_by_depth(diamond(x, Value(2.0), Value(5.0)))
print(x.grad)
#> 12.0

# 12, not 42. The walk went y, b, a, x: at `a` it knew of b's gradient, 2, and handed
# 2 * 6 = 12 on to x. Only then it came to c, which added its 5 to `a`: too late, `a`
# had been dealt with.
#
# We could deal with `a` again whenever something arrives, handing on only what is
# new. That is right, and hopeless: every way from the result to a leaf is walked by
# itself, and the ways double with every diamond.


def backward_by_ways(result):
    """Walk every way from the result to a leaf. Returns how many steps that took."""

    def visit(node, gradient):
        node.grad += gradient
        ways = zip(node.inputs, node.slopes, strict=True)
        return 1 + sum(visit(source, gradient * slope) for source, slope in ways)

    return visit(result, 1.0)


x = Value(3.0)
backward_by_ways(diamond(x, Value(2.0), Value(5.0)))
print(x.grad)
#> 42.0

y = x = Value(1.0)
for _ in range(16):  # 16 additions
    y = y + y
print(backward_by_ways(y), "steps")
#> 131071 steps

# A network of a thousand layers would take longer than the universe has.

# ---------------------------------------------------------------------------
# The order that works
# ---------------------------------------------------------------------------
# What we need: a node hands its gradient on once, and not before everything that
# used it has handed on its own. An order with this property is called topological.
# A depth-first walk finds it, if it notes a node down when it *leaves* it, after all
# its sources: read backwards, the notes have every user before its sources.


def topological(result):
    """All nodes behind result, each after the ones that used it."""
    order, seen, stack = [], set(), [(result, False)]
    while stack:
        node, leaving = stack.pop()
        if leaving:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in node.inputs)
    return order[::-1]


def backward(result):
    result.grad = 1.0
    for node in topological(result):
        for source, slope in zip(node.inputs, node.slopes, strict=True):
            source.grad += node.grad * slope


x = Value(3.0)
backward(diamond(x, Value(2.0), Value(5.0)))
print(x.grad)
#> 42.0

y = x = Value(1.0)
for _ in range(16):
    y = y + y
backward(y)
print(x.grad, "in", len(topological(y)), "steps")
#> 65536.0 in 17 steps

# The stack is a list and not a function that calls itself, for Python gives up on
# functions nested about a thousand deep, and a loop over a long text is deeper.

y = x = Value(1.0)
for _ in range(100_000):
    y = y + Value(0.0)
backward(y)
print(x.grad)
#> 1.0

# ---------------------------------------------------------------------------
# The same in minidist
# ---------------------------------------------------------------------------
# Section 1 of minidist.py is this engine, with arrays in the place of numbers: the
# slope becomes a function that turns the gradient of the output into that of an
# input, written beside the formula of each operation in section 2. It finds its order
# in another way, which gives a topological one too: it counts how often each node is
# used, and takes a node when all its users have been taken.

x = md.tensor(3.0, requires_grad=True)
y = diamond(x, 2.0, 5.0)
y.backward()
print(x.grad.item())
#> 42.0

# What else an engine owes its user, and the few lines above do not do:

# Gradients add up from call to call. This is wanted when one batch is computed in
# parts, and it is why a training loop says `zero_grad`.

diamond(x, 2.0, 5.0).backward()
print(x.grad.item())
#> 84.0

# The graph is given up as it is walked, so its memory is free early. Walking it
# again is an error, not a wrong number.

try:
    y.backward()
except RuntimeError as error:
    print(error)
#> backward went through ... a second time, ...: call backward(retain_graph=True) the first time

# A value that a derivative still needs must not change behind its back.

a = x * 1.0
y = a * a
a += 1.0
try:
    y.backward()
except RuntimeError as error:
    print(error)
#> mul saved its input ... for backward ..., but it was changed in place by add_ ...

# Where no derivative is wanted, nothing is remembered.

with md.no_grad():
    print((x * x).requires_grad)
#> False

# And since derivatives are computed with tensors too, they have derivatives of
# their own: x**3, 3x**2, 6x, 6.

x = md.tensor(2.0, requires_grad=True)
y = x * x * x
for _ in range(3):
    (y,) = md.autograd.grad(y, x, create_graph=True)
    print(y.item())
#> 12.0
#> 12.0
#> 6.0

# Next: 02_train_anywhere.py, where a network learns on two processes at once.
