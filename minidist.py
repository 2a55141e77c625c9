"""minidist: tensors, automatic differentiation and distributed training in one readable file.

    import minidist as md
    import minidist.nn as nn

    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    train = md.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        x = md.randn(32, 2)
        loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True))
        train.zero_grad()
        loss.backward()
        train.step()

Names and meanings are PyTorch's. The file needs NumPy and nothing else: copy it into a project
and import it. With the folder `transports/` beside it, the same script trains on many processes
(section 7). Licence: MIT.

Contents (search for the ruled headings):
    1 Tensor and backward   the graph, and how gradients flow through it
    2 Ops                   each formula beside its derivatives, and the methods made of them
    3 Functional            layers and losses as functions
    4 Modules               layers that own parameters
    5 Optimizers            update rules and learning-rate schedules
    6 Data                  data sets, samplers, loaders, checkpoints
    7 Distributed           process groups, collectives, strategies
    8 Namespaces            minidist.nn, minidist.optim and the others, as PyTorch names them
    9 Command line          python minidist.py --help
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import collections
import contextlib
import contextvars
import copy
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

__version__ = "0.1.0"

# Run as a script the file would exist twice, as __main__ and as minidist, with two Tensor
# classes that do not know each other. So the script is registered under its own name first.
sys.modules.setdefault("minidist", sys.modules[__name__])


# =================================================================================================
# 1 Tensor and backward
# =================================================================================================
#
# Every operation on tensors computes its result at once with NumPy and, where a gradient is
# wanted, leaves a Node behind: which op it was, which nodes its inputs came from, and the few
# values its derivatives need. The nodes form a graph that only points backwards, from results to
# inputs. `backward` walks it from the result: each node turns the gradient of its output into
# gradients of its inputs by the derivatives written beside the op's formula in section 2.
#
# Nodes are apart from Tensors, so that dropping a tensor frees its array unless a derivative
# needs it; and nothing points forwards, so that there are no reference cycles and memory falls
# as soon as the last name goes, without the garbage collector.

_grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)


class Storage:
    """What all tensors that view one buffer share: how often it was changed in place.

    A saved tensor remembers the version it was saved at; backward compares."""

    version = 0
    changed_by = ""  # the name of the last change, for the error message
    saved = False  # whether a derivative ever saved it
    handles: Sequence[weakref.ref] = ()  # what numpy() gave away

    def save(self) -> None:
        """From now on a derivative relies on the elements: nobody may write past us."""
        self.saved = True
        for handle in self.handles:
            if (array := handle()) is not None:
                array.flags.writeable = False


class Tensor:
    """An n-dimensional array that remembers how it was computed.

    `Tensor(data)` holds float32, as in PyTorch; `minidist.tensor(data)` infers the dtype.
    `grad` is filled by `backward` on leaves, the tensors made by the user with
    `requires_grad=True`."""

    # Class attributes are defaults; an instance carries only what differs from them.
    grad: Tensor | None = None
    _array: np.ndarray
    _storage: Storage
    _edge: Node | Tensor | None = None  # where backward goes from here (see edge_of)
    _leaf = False  # a leaf that wants a gradient
    _view: View | None = None  # set on views, so that writing through them is recorded
    _hooks: dict[int, Callable] | None = None
    _after_grad: dict[int, Callable] | None = None
    edges: Sequence = ()  # a leaf is where the graph ends
    number = 0

    def __init__(self, *data: Any) -> None:
        if len(data) == 1 and not isinstance(data[0], (int, np.integer)):
            self._array = np.array(to_array(data[0]), dtype=np.float32)
        else:
            self._array = np.zeros(data, np.float32)
        self._storage = Storage()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing("Tensor", name, dict(vars(Tensor))))

    if TYPE_CHECKING:  # methods arrive with the ops of section 2
        _any: Any = None
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _any
        __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _any
        __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = __invert__ = _any
        __getitem__ = __setitem__ = __float__ = __int__ = _any

    # -- what it is ------------------------------------------------------------------------------

    @property
    def shape(self) -> Size:
        return Size(self._array.shape)

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def requires_grad(self) -> bool:
        return edge_of(self) is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if self._edge is not None:
            if not wanted:
                raise RuntimeError(
                    "requires_grad can only be changed on leaf tensors; this one was computed by "
                    f"{name_of(self._edge)}: use .detach() for a tensor without a gradient"
                )
        elif wanted and self.dtype.kind != "f":
            raise RuntimeError(
                f"only floating point tensors can require gradients, this one is {self.dtype}: "
                "convert it with .float() first"
            )
        else:
            self._leaf = bool(wanted)

    @property
    def is_leaf(self) -> bool:
        return refreshed(self)._edge is None

    @property
    def grad_fn(self) -> Node | None:
        edge = refreshed(self)._edge
        return edge if isinstance(edge, Node) else None

    @property
    def data(self) -> Tensor:
        """The same memory outside the graph. Changes through it are noticed by backward."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._array = to_array(value)
        self._storage = value._storage if isinstance(value, Tensor) else Storage()

    def detach(self) -> Tensor:
        return wrap(self._array, storage=self._storage)

    def numpy(self) -> np.ndarray:
        """The same memory as an array; read-only from when a derivative saves it, since backward
        could not notice what NumPy code changes."""
        if self.requires_grad:
            raise RuntimeError(
                "numpy() on a tensor that requires grad would leave the graph silently: "
                "use .detach().numpy()"
            )
        array = self._array.view()
        if self._storage.saved:
            array.flags.writeable = False
        alive = [handle for handle in self._storage.handles if handle() is not None]
        self._storage.handles = [*alive, weakref.ref(array)]
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    # NumPy's protocols: np.exp(tensor) is our exp. This is what lets a derivative written with
    # NumPy run on arrays (fast) or on tensors (recorded, for higher derivatives): section 2.
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and not options:
            function = numpy_to_op.get(ufunc)
        else:
            function = numpy_to_op.get(getattr(ufunc, method))
        return NotImplemented if function is None else function(*inputs, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        replacement = numpy_to_op.get(function)
        return NotImplemented if replacement is None else replacement(*args, **options)

    # -- gradients -------------------------------------------------------------------------------

    def backward(self, gradient: Tensor | None = None, retain_graph: bool | None = None,
                 create_graph: bool = False, inputs: Sequence[Tensor] | None = None) -> None:
        """Add d(self)/d(leaf) to the `.grad` of every leaf that self was computed from, by the
        chain rule (see `walk`)."""
        run_backward([self], [gradient], retain_graph, create_graph, inputs)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> Tensor:
        self._edge, self._leaf = None, False
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Handle:
        """Call hook(gradient) when this tensor's gradient is known; what it returns, if
        anything, takes the gradient's place."""
        owner = edge_of(self)
        if owner is None:
            raise RuntimeError("cannot register a hook on a tensor that requires no gradient")
        if owner._hooks is None:
            owner._hooks = {}
        return Handle(owner._hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Handle:
        """Call hook(self) each time backward has added to this leaf's `.grad`."""
        if not self._leaf:
            raise RuntimeError("post accumulate grad hooks belong to leaves that require grad")
        if self._after_grad is None:
            self._after_grad = {}
        return Handle(self._after_grad, hook)

    def retain_grad(self) -> None:
        """Fill `.grad` of a tensor that is not a leaf, too."""
        if self.is_leaf:
            return
        me = weakref.ref(self)  # the node must not keep the tensor alive

        def keep(gradient: Tensor) -> None:
            tensor = me()
            if tensor is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

        self.register_hook(keep)

    # -- Python's side ---------------------------------------------------------------------------

    __hash__ = object.__hash__  # tensors are dictionary keys by identity; == compares elements

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d tensor")
        return len(self._array)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d tensor")
        return iter([self[i] for i in range(len(self))])

    def __bool__(self) -> bool:
        if self._array.size != 1:
            raise RuntimeError(
                f"the truth value of a tensor of shape {tuple(self.shape)} is ambiguous: "
                "use .any(), .all() or a comparison of one element"
            )
        return bool(self._array.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iub" or self._array.size != 1:
            raise TypeError("only integer tensors of a single element can be used as an index")
        return int(self._array.item())

    def __contains__(self, value: Any) -> bool:
        return bool((self._array == to_array(value)).any())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else str(self)

    def __repr__(self) -> str:
        finite = self._array[np.isfinite(self._array)]
        whole = (finite == np.trunc(finite)).all()
        text = np.array2string(self._array, precision=4, separator=", ", prefix="tensor(",
                               threshold=1000, floatmode="maxprec" if whole else "fixed",
                               suppress_small=True)
        notes = ""
        if self.dtype not in (np.float32, np.int64, np.bool_):
            notes += f", dtype={self.dtype}"
        if isinstance(self._edge, Node):
            notes += f", grad_fn=<{name_of(self._edge)}>"
        elif self._leaf:
            notes += ", requires_grad=True"
        return f"tensor({text}{notes})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied: use .detach().clone()")
        copy = wrap(self._array.copy())
        copy.__class__, copy._leaf = self.__class__, self._leaf
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def item(self) -> Any:
        """The one element as a Python number."""
        if self._array.size != 1:
            raise RuntimeError(
                f"a tensor with {self._array.size} elements cannot become one number: "
                "reduce it first, for example with .mean()"
            )
        return self._array.item()

    def to(self, *args: Any, **options: Any) -> Tensor:
        """`to(dtype)`, `to(device)`, `to(other)`; the only device is the CPU."""
        dtype = dtype_in(*args, **options)
        if dtype is None or self.dtype == dtype:
            return self.clone() if options.get("copy") else self
        return cast(self, dtype=dtype)

    @property
    def device(self) -> device:
        return device("cpu")

    is_cuda = False


def dtype_in(*args: Any, dtype: Any = None, device: Any = "cpu", **ignored: Any) -> Any:
    """The dtype that arguments of `to` ask for, or None; a device other than the CPU is refused."""
    for arg in args:
        if isinstance(arg, Tensor):
            dtype = arg.dtype
        elif isinstance(arg, (np.dtype, type)):
            dtype = arg
        elif isinstance(arg, str):
            device = arg
    globals()["device"](device or "cpu")
    return None if dtype is None else np.dtype(dtype)


class Size(tuple):
    """A shape: a tuple that counts its elements and prints as PyTorch's."""

    def numel(self) -> int:
        return math.prod(self)

    def __repr__(self) -> str:
        return f"minidist.Size({list(self)})"


class device(str):  # noqa: N801 - PyTorch's name
    """The CPU, the only device there is. Other names raise at once instead of misleading."""

    type, index = "cpu", None  # type: ignore[assignment] # a str's index() is not missed

    def __new__(cls, name: Any = "cpu", index: int = 0) -> device:
        if str(name).partition(":")[0] != "cpu":
            raise RuntimeError(f"device {name!r} is not available: minidist computes on 'cpu'")
        return super().__new__(cls, "cpu")

    def __repr__(self) -> str:
        return "device(type='cpu')"


class Handle:
    """What registering a hook returns; `remove()` takes the hook away again."""

    numbers = itertools.count()

    def __init__(self, hooks: dict[int, Callable], hook: Callable) -> None:
        self.hooks, self.key = hooks, next(Handle.numbers)
        hooks[self.key] = hook

    def remove(self) -> None:
        self.hooks.pop(self.key, None)


def to_array(x: Any) -> np.ndarray:
    return x._array if isinstance(x, Tensor) else np.asarray(x)


def wrap(array: Any, edge: Node | Tensor | None = None, storage: Storage | None = None) -> Tensor:
    """A Tensor around an array, without copying it."""
    tensor = Tensor.__new__(Tensor)
    # NumPy turns results of no dimensions into scalars; a tensor always holds an array.
    tensor._array = array if type(array) is np.ndarray else np.asarray(array)
    tensor._storage = storage or Storage()
    tensor._edge = edge
    return tensor


def edge_of(x: Tensor) -> Node | Tensor | None:
    """Where backward goes from x: the node that made it, or x itself if it is a leaf that wants
    a gradient, or nowhere. (A leaf does not point to itself: that would be a cycle.)"""
    if x._view is not None:
        refreshed(x)
    return x._edge if x._edge is not None else x if x._leaf else None


def name_of(edge: Node | Tensor) -> str:
    return edge.op.name if isinstance(edge, Node) else "a leaf"


class Node:
    """One recorded operation, and what it saved of its inputs and result for backward."""

    __slots__ = ("op", "plan", "number", "edges", "saved", "guards", "shape", "dtype", "_hooks",
                 "where", "__weakref__")

    op: Op
    plan: Plan  # what is saved, and which derivatives run
    number: int  # nodes are numbered as they are made
    edges: Sequence  # for each input: its Node, its leaf Tensor, or None where no gradient goes
    saved: list | None  # the values that the plan names; None once consumed
    guards: list[tuple]  # for each that is a tensor's (which, edge, storage, version)
    shape: tuple[int, ...]  # of the output
    dtype: np.dtype
    _hooks: dict[int, Callable] | None
    where: str  # the user's line that called the op, in anomaly mode

    numbers = itertools.count(2, 2)  # even ones: see topological_order

    def values(self, as_tensors: bool) -> list:
        """What the derivatives name: saved arrays, or saved tensors in their place in the graph
        when the derivatives themselves are to be differentiated."""
        if self.saved is None:
            raise RuntimeError(
                f"backward went through {self.op.name} a second time, but its saved values were "
                "freed by the first: call backward(retain_graph=True) the first time"
            )
        names = self.plan.names
        for k, _, storage, version in self.guards:
            if storage is not None and storage.version != version:
                what = "result" if names[k] == "out" else f"input {names[k]}"
                raise RuntimeError(
                    f"{self.op.name} saved its {what} (shape {self.saved[k].shape}) for backward "
                    f"at version {version}, but it was changed in place by {storage.changed_by} "
                    f"and is at version {storage.version}: change a .clone(), or use the form of "
                    "the change that makes a new tensor"
                )
        if not as_tensors:
            return self.saved
        values = list(self.saved)
        for k, edge, _, _ in self.guards:
            if isinstance(values[k], np.ndarray):
                values[k] = tensor_at(values[k], self if names[k] == "out" else edge)
        for k, name in enumerate(names):  # a residual's formula gives it a place in the graph
            residual = self.op.residuals.get(name)
            if residual is not None:
                values[k] = residual(*[values[names.index(n)] for n in names_of(residual)])
        return values


def tensor_at(array: np.ndarray, edge: Node | Tensor | None) -> Tensor:
    """The tensor that stood at this place of the graph."""
    if isinstance(edge, Tensor) and edge._array is array:
        return edge
    return wrap(array, edge)


def topological_order(roots: Iterable[Node | Tensor], since: int = 0) -> list[Node | Tensor]:
    """All nodes behind the roots (of number `since` and later), each after every node that uses it.

    A node may pass its gradient on only when it is complete, when all consumers have added
    their part. Visiting nodes as they are met would do the paths of a diamond one by one: wrong
    if each node runs once, exponential if it runs once a path. But a node can only use what was
    there before it, so the order in which nodes were made, turned round, will do. A leaf comes
    right after the first node that used it, whose gradient completes its own: a hook may then
    send it to other processes while the rest is computed.

    Iterative, since a graph is deeper than Python's stack: a loop of a hundred thousand steps is
    a chain of as many nodes."""
    stack = list(dict.fromkeys(roots))
    place = {root: root.number for root in stack}
    while stack:
        node = stack.pop()
        for edge in node.edges:
            if edge.__class__ is Node:
                if edge not in place and edge.number >= since:
                    place[edge] = edge.number
                    stack.append(edge)
            elif edge is not None and place.get(edge, node.number) >= node.number:
                place[edge] = node.number - 1
    return sorted(place, key=place.__getitem__, reverse=True)


_anomaly: ContextVar[bool] = ContextVar("anomaly", default=False)
_callbacks: ContextVar[list | None] = ContextVar("callbacks", default=None)


def queue_callback(callback: Callable[[], None]) -> None:
    """During backward (from a hook): call back once when this backward pass is complete."""
    callbacks = _callbacks.get()
    if callbacks is None:
        raise RuntimeError("queue_callback belongs into a hook that runs during backward")
    callbacks.append(callback)


class Pending:
    """The gradients that one backward pass has found so far, by edge."""

    def __init__(self) -> None:
        self.gradients: dict[Any, Any] = {}
        self.lent: set[Any] = set()  # whose array is somebody else's too: not to be written to

    def add(self, node: Any, edge: Any, part: Any, gradient: Any = None) -> None:
        """Add a part, which the node's derivative made of its gradient, to the edge's gradient."""
        if edge is None or part is None:
            return
        like = edge if edge.__class__ is Node else edge._array
        if part.shape != like.shape or part.dtype is not like.dtype:
            part = fitted(part, like, node)
        if node.where and np.isnan(to_array(part)).any():
            raise RuntimeError(f"{node.op.name} made the first NaN of this backward, in the "
                               f"gradient of its input {node.edges.index(edge)}. It was called "
                               f"here:\n{node.where}")
        known = self.gradients.get(edge)
        if known is None:
            self.gradients[edge] = part
            # An array that owns its memory and is not the incoming gradient was made by the
            # derivative (which by rule returns no saved value itself, and nothing twice).
            if part is gradient or part.__class__ is not np.ndarray or part.base is not None:
                self.lent.add(edge)
        elif edge in self.lent:
            self.gradients[edge] = known = known + part
            if known.__class__ is np.ndarray:  # not a tensor, nor a scalar
                self.lent.remove(edge)
        else:
            np.add(known, part, known)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None],
                 retain_graph: bool | None, create_graph: bool,
                 inputs: Sequence[Tensor] | None = None, accumulate: bool = True) -> dict[Any, Any]:
    """Carry gradients from the outputs back through the graph.

    With `accumulate` they are added to `.grad` of the leaves (of `inputs` only, if given), else
    those of `inputs` are returned by their edge. Under `create_graph` the derivatives run on
    tensors and are recorded themselves; the graph is consumed unless retained."""
    pending = Pending()
    for output, gradient in zip(outputs, gradients):
        edge = edge_of(output)
        if edge is None:
            raise RuntimeError(
                "backward on a tensor that was not computed from any that requires grad: "
                "set requires_grad=True on the leaves, and do not compute under no_grad()"
            )
        seed: Any = first_gradient(output, gradient)
        seed = seed if create_graph else seed._array
        known = pending.gradients.get(edge)
        pending.gradients[edge] = seed if known is None else known + seed
        pending.lent.add(edge)
    targets = None if inputs is None else {edge_of(x): x for x in inputs}
    # What was there before the first target cannot have been made from it.
    oldest = min((edge.number for edge in targets or () if edge is not None), default=0)
    order: list[Any] = topological_order(pending.gradients, oldest)
    captured: dict[Any, Any] = {}
    callbacks: list[Callable[[], None]] = []
    reset = _callbacks.set(callbacks)
    mode = _grad_enabled.set(create_graph)
    try:
        with np.errstate(all="ignore"):  # as IEEE 754 has it, the slope of sqrt at 0 is infinite
            walk(order, pending, targets, captured, accumulate, create_graph,
                 create_graph if retain_graph is None else retain_graph)
    finally:
        _grad_enabled.reset(mode)
        _callbacks.reset(reset)
    for callback in callbacks:
        callback()
    if accumulate and targets is not None:
        for edge, tensor in targets.items():
            if edge is not tensor and edge in captured:  # an input that is not a leaf
                accumulate_grad(tensor, captured[edge], owned=False)
    return captured


def walk(order: list[Any], pending: Pending, targets: dict | None, captured: dict,
         accumulate: bool, create_graph: bool, retain_graph: bool) -> None:
    """The chain rule: each node in turn makes gradients of its inputs from its own, which is
    complete by then."""
    wanted = None if targets is None else leading_to(targets, order)
    for node in order:
        gradient = pending.gradients.pop(node, None)
        if gradient is None:
            continue
        if node._hooks:
            gradient = apply_hooks(node, gradient)
        if targets is not None and node in targets:
            captured[node] = gradient
        if node.__class__ is not Node:
            if accumulate and (targets is None or node in targets):
                accumulate_grad(node, gradient, node not in pending.lent and not node._hooks)
            continue
        edges = node.edges
        if wanted is not None:
            edges = [edge if edge in wanted else None for edge in edges]
            if all(edge is None for edge in edges):
                continue  # no input lies behind it; what it saved stays for a later pass
        values = node.values(create_graph)
        for i, rule, start, stop in node.plan.steps:
            if i is None:  # one for all inputs
                for edge, part in zip(edges, rule(gradient, *values[start:stop])):
                    pending.add(node, edge, part, gradient)
            elif edges[i] is not None:
                pending.add(node, edges[i], rule(gradient, *values[start:stop]), gradient)
        if not retain_graph:
            node.saved = None


def first_gradient(output: Tensor, gradient: Any) -> Tensor:
    if gradient is None:
        if output._array.size != 1:
            raise RuntimeError(
                "backward without a gradient needs an output of one element, this one has shape "
                f"{tuple(output.shape)}: reduce it (.sum(), .mean()) or pass gradient="
            )
        return wrap(np.ones_like(output._array))
    if to_array(gradient).shape != output._array.shape:
        raise RuntimeError(
            f"the gradient's shape {to_array(gradient).shape} is not the output's "
            f"{output._array.shape}"
        )
    if not isinstance(gradient, Tensor):
        gradient = wrap(np.asarray(gradient))
    return gradient if gradient.dtype is output.dtype else gradient.to(output.dtype)


def leading_to(targets: Iterable, order: list) -> set:
    """The nodes from which a target can be reached; the others need not run."""
    wanted = set(targets)
    for node in reversed(order):
        if any(edge in wanted for edge in node.edges):
            wanted.add(node)
    return wanted


def fitted(gradient: Any, like: Any, node: Node) -> Any:
    """The one place where a gradient gets the shape and dtype of what it belongs to.

    Where an input was broadcast, its one element was used many times: the gradients of the
    copies are summed. Where it was cast, the gradient is cast back."""
    if gradient.shape != like.shape:
        gradient = unbroadcast(gradient, like.shape, node)
    return gradient if gradient.dtype == like.dtype else cast(gradient, dtype=like.dtype)


def unbroadcast(gradient: Any, shape: tuple[int, ...], node: Node) -> Any:
    """The gradient of a broadcast is summed here: over the dimensions along which the input was
    repeated."""
    extra = gradient.ndim - len(shape)
    repeated = tuple(
        i for i, n in enumerate(gradient.shape) if i < extra or (shape[i - extra] == 1 and n != 1)
    )
    if repeated:
        gradient = np.add.reduce(gradient, axis=repeated, keepdims=True)
    if extra > 0:
        gradient = gradient.reshape(gradient.shape[extra:])
    if gradient.shape != shape:
        raise RuntimeError(
            f"the derivative of {node.op.name} has shape {gradient.shape}, which does not "
            f"broadcast from its input's shape {shape}"
        )
    return gradient


def apply_hooks(node: Node | Tensor, gradient: Any) -> Any:
    is_tensor = isinstance(gradient, Tensor)
    for hook in list((node._hooks or {}).values()):
        replaced = hook(gradient if is_tensor else wrap(gradient))
        if replaced is not None:
            gradient = replaced if is_tensor else to_array(replaced)
    return gradient


def accumulate_grad(leaf: Tensor, gradient: Any, owned: bool) -> None:
    if isinstance(gradient, Tensor):  # under create_graph: the gradient is part of a graph
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    elif leaf.grad is None:  # copied unless it is ours alone: two leaves must not share memory
        leaf.grad = wrap(gradient if owned else np.array(gradient))
    elif leaf.grad.requires_grad:
        leaf.grad = leaf.grad + wrap(gradient)
    else:
        np.add(leaf.grad._array, gradient, out=leaf.grad._array)
        touch(leaf.grad, "the accumulation of gradients")
    for hook in list((leaf._after_grad or {}).values()):
        hook(leaf)


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
         create_graph: bool = False, allow_unused: bool = False,
         materialize_grads: bool = False) -> tuple[Tensor | None, ...]:
    """The gradients of the outputs with respect to the inputs, leaving every `.grad` alone.

    The inputs may be any tensors of the graph, leaves or not. An input that the outputs do not
    depend on is an error, or None under `allow_unused`, or zeros under `materialize_grads`."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if grad_outputs is None or isinstance(grad_outputs, Tensor):
        grad_outputs = [grad_outputs] * len(outputs)
    for i, x in enumerate(inputs):
        if not x.requires_grad:
            raise RuntimeError(f"input {i} of grad() does not require grad")
    captured = run_backward(
        outputs, grad_outputs, retain_graph, create_graph, inputs, accumulate=False
    )
    results: list[Tensor | None] = []
    for i, x in enumerate(inputs):
        found = captured.get(edge_of(x))
        if found is None and materialize_grads:
            found = np.zeros_like(x._array)
        if found is None and not allow_unused:
            raise RuntimeError(
                f"the outputs do not depend on input {i} of grad(): pass allow_unused=True if "
                "that is meant"
            )
        results.append(found if found is None or isinstance(found, Tensor) else wrap(found))
    return tuple(results)


class grad_mode:  # noqa: N801 - as the classes below
    """Record operations or not, inside a `with` block or a decorated function."""

    def __init__(self, mode: bool) -> None:
        self.mode = bool(mode)
        self.before: list[bool] = []  # a stack: the same object may be entered again inside

    def __enter__(self) -> None:
        self.before.append(_grad_enabled.get())
        _grad_enabled.set(self.mode)

    def __exit__(self, *error: object) -> None:
        _grad_enabled.set(self.before.pop())

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with grad_mode(self.mode):
                return function(*args, **options)

        @functools.wraps(function)
        def generator(*args: Any, **options: Any) -> Any:
            inner = function(*args, **options)
            resume = functools.partial(inner.send, None)
            while True:
                try:
                    with grad_mode(self.mode):  # while it runs, not while its caller does
                        value = resume()
                except StopIteration as stop:
                    return stop.value
                try:
                    resume = functools.partial(inner.send, (yield value))
                except BaseException as error:
                    resume = functools.partial(inner.throw, error)

        return generator if inspect.isgeneratorfunction(function) else call


class set_grad_enabled(grad_mode):  # noqa: N801 - PyTorch's name
    """grad_mode that holds from the moment it is made: also as a statement."""

    def __init__(self, mode: bool) -> None:
        super().__init__(mode)
        super().__enter__()

    def __enter__(self) -> None:
        pass

    def __call__(self, function: Callable) -> Callable:
        self.__exit__()
        return super().__call__(function)


class no_grad(grad_mode):  # noqa: N801
    """Do not record: for evaluation and for updates of parameters."""

    mode = False

    def __new__(cls, function: Callable | None = None) -> Any:
        made = super().__new__(cls)
        made.before = []
        return made if function is None else made(function)  # `@no_grad` without parentheses

    def __init__(self, function: Callable | None = None) -> None:
        pass


class enable_grad(no_grad):  # noqa: N801
    """Record again inside a `no_grad` block."""

    mode = True


inference_mode = no_grad


def is_grad_enabled() -> bool:
    return _grad_enabled.get()


# -- changing tensors in place ---------------------------------------------------------------------
#
# A change in place makes a new value at the old address. The graph sees it as such: the tensor's
# edge moves to the node of the new value, while nodes that saved the old value find the version
# moved and refuse (Node.values). A view shares its base's memory; writing through a view is, for
# the base, the op `overwrite`: everything as before except the part that the view shows.


class View:
    """How a tensor looks at its base: the movement ops that lead from the base to it."""

    def __init__(self, base: Tensor, path: tuple) -> None:
        self.base, self.path = base, path
        self.seen = base._edge  # the base's place in the graph when this view's edge was made


def follow(x: Any, path: tuple) -> Any:
    for function, static in path:
        x = function(x, **static)
    return x


def refreshed(x: Tensor) -> Tensor:
    """x with its edge up to date: if its base was written to since, it is looked at anew."""
    view = x._view
    if view is not None and view.base._edge is not view.seen:
        with enable_grad():
            x._edge = follow(view.base, view.path)._edge
        view.seen = view.base._edge
    return x


def touch(x: Tensor, change: str) -> None:
    x._storage.version += 1
    x._storage.changed_by = change


def write(x: Tensor, value: Tensor, change: str, derived: bool = False) -> Tensor:
    """Put value's elements into x's memory and move x's place in the graph to value's, which may
    be derived from what x was: else that is overwritten, and its gradient is 0."""
    base = x._view.base if x._view is not None else x
    recording = _grad_enabled.get() and (value.requires_grad or edge_of(x) is not None)
    if _grad_enabled.get() and (base._leaf or x._leaf):
        raise RuntimeError(
            f"{change} would change a leaf that requires grad in place, which no gradient can "
            "describe: do it under no_grad(), or change a .clone()"
        )
    if value._array.shape != x._array.shape:
        value = value.expand(*x._array.shape)
    if not x._array.flags.writeable:
        raise RuntimeError(
            f"{change} on an expanded tensor, several elements of which are one: .clone() it first"
        )
    if recording:
        value = value.to(x.dtype)
        if base is x and derived:
            x._edge = edge_of(value)
        else:
            path = x._view.path if x._view is not None else ()
            fresh = overwrite.op.recorded((base, value), (None, None), {"path": path}, base._array)
            base._edge = fresh._edge
    np.copyto(x._array, value._array, casting="unsafe")
    touch(x, change)
    return x


# =================================================================================================
# 2 Ops
# =================================================================================================
#
# An op is a NumPy formula with its derivatives beside it:
#
#     mul = op(np.multiply, x=lambda g, y: g * y, y=lambda g, x: g * x)
#
# `g` is the gradient of the result; the other parameters of a derivative say what it needs: an
# input (x, y), the result (out), a residual (a further value that the formula returned), an
# argument that is not a tensor, or the shape of an input (x_shape). Exactly what the derivatives
# name is saved, and only for inputs that want a gradient. Broadcasting and casts are undone in
# one place (`fitted`), so no derivative mentions them.
#
# Tensors speak NumPy's protocols, so the same derivative runs on arrays, or, when higher
# derivatives are wanted, on tensors that record it. An op called on arrays alone is its formula.


@functools.cache
def names_of(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class Plan(NamedTuple):
    """How an op records when certain of its inputs want a gradient."""

    names: tuple[str, ...]  # of the values that its derivatives need
    sources: tuple[tuple, ...]  # where each is found: see Op.source
    steps: tuple[tuple, ...]  # (input or None for all, derivative, its first value, and its last)


class Op:
    """A formula, its derivatives, and what to save for them.

    Positional parameters of the formula are tensors, keyword-only ones are not. `residuals`
    names the values returned after the result; beside each stands its formula in terms of what
    the op saves, or None if it is a constant to the derivative (an index, a mask)."""

    def __init__(self, formula: Callable, derivatives: dict[str, Callable],
                 residuals: dict[str, Callable | None], view: bool = False, floats: bool = False,
                 joint: Callable | None = None) -> None:
        self.formula, self.residuals, self.view, self.floats = formula, residuals, view, floats
        self.joint = joint
        self.name = getattr(formula, "__name__", "op").strip("_")
        if isinstance(formula, np.ufunc):
            self.inputs: tuple[str, ...] = ("x", "y")[: formula.nin]
            self.defaults: dict[str, Any] = {}
            self.variadic = False
        else:
            parameters = inspect.signature(formula).parameters.values()
            kinds = inspect.Parameter
            self.inputs = tuple(p.name for p in parameters if p.kind is not kinds.KEYWORD_ONLY)
            self.defaults = {p.name: p.default for p in parameters if p.kind is kinds.KEYWORD_ONLY}
            self.variadic = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
        self.derivatives = derivatives
        # Inputs that promote each other's dtypes: the differentiable ones (where's condition and
        # gather's index are not numbers to compute with), or all of an op without derivatives.
        self.promoting = tuple(
            i for i, n in enumerate(self.inputs) if n in derivatives or not derivatives
        )
        self.plans: dict[int, Plan] = {}
        self.function: Callable = self.apply  # replaced by what users call (see op)

    def apply(self, args: tuple, static: dict[str, Any]) -> Any:
        inputs, static = self.bind(args, static)
        for x in inputs:
            if isinstance(x, Tensor):
                break
        else:
            out = self.formula(*inputs, **static)
            return out[0] if self.residuals else out
        arrays = self.arrays(inputs)
        try:
            out, extra = self.formula(*arrays, **static), ()
        except (ValueError, IndexError) as error:
            raise self.failure(error, arrays) from None
        if self.residuals:
            out, *extra = out
        return self.recorded(inputs, arrays, static, out, extra)

    def failure(self, error: Exception, arrays: Sequence) -> Exception:
        """NumPy's error, which knows neither the op nor the tensors, with both."""
        shapes = ", ".join(str(np.shape(a)) for a in arrays if a is not None)
        kind = IndexError if isinstance(error, IndexError) else RuntimeError
        return kind(f"{self.name} of shapes {shapes}: {error}")

    def bind(self, args: tuple, static: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Split arguments into tensors and the rest, as PyTorch's signatures allow: the rest may
        be positional, and tensors may be named `input` and `other`."""
        if self.variadic:
            return args, {**self.defaults, **static} if self.defaults else static
        count = len(self.inputs)
        if len(args) > count:
            args, rest = args[:count], args[count:]
            if len(rest) > len(self.defaults):
                raise TypeError(f"{self.name} takes {count} tensors and "
                                f"{list(self.defaults)}, got {len(rest)} further arguments")
            static = {**dict(zip(self.defaults, rest)), **static}
        elif len(args) < count:
            for name, alias in zip(self.inputs[len(args):], ("input", "other", "")[len(args):]):
                key = name if name in static else alias
                if key not in static:
                    raise TypeError(f"{self.name} misses its argument {name!r}")
                args += (static.pop(key),)
        if self.defaults:
            static = {**self.defaults, **static}
            if len(static) > len(self.defaults):
                unknown = [n for n in static if n not in self.defaults]
                raise TypeError(f"{self.name} has no argument {unknown[0]!r}")
            for name, value in static.items():
                if value is inspect.Parameter.empty:
                    raise TypeError(f"{self.name} misses its argument {name!r}")
                if isinstance(value, np.floating):
                    static[name] = value.item()  # NumPy's numbers would impose their dtype
        elif static:
            raise TypeError(f"{self.name} has no argument {next(iter(static))!r}")
        return args, static

    def arrays(self, inputs: tuple) -> list:
        """The inputs as arrays of the dtype that they compute in."""
        if self.variadic:
            return promoted(inputs)
        arrays: list[Any] = [x._array if isinstance(x, Tensor) else x for x in inputs]
        if len(self.promoting) == len(inputs) > 1:
            arrays = promoted(inputs)
        elif len(self.promoting) > 1:
            together = promoted([inputs[i] for i in self.promoting])
            for i, array in zip(self.promoting, together):
                arrays[i] = array
        if self.floats:
            arrays = [a.astype(default_dtype()) if isinstance(a, np.ndarray) and a.dtype.kind != "f"
                      else a for a in arrays]
        return arrays

    def recorded(self, inputs: Sequence, arrays: Sequence, static: dict, out: Any,
                 extra: Sequence = ()) -> Tensor:
        """The result as a Tensor, with a Node behind it where a gradient is wanted."""
        result = wrap(out)
        if self.view:
            self.remember_view(inputs[0], static, result)
        dtype = out.dtype
        if not _grad_enabled.get() or dtype.kind != "f":
            return result
        edges: list[Any] = []
        mask, bit = 0, 1  # a bit for each input that wants a gradient
        for x in inputs:
            edge = None
            if isinstance(x, Tensor):  # edge_of(x), for speed
                edge = x._edge if x._view is None else refreshed(x)._edge
                if edge is None and x._leaf:
                    edge = x
                if edge is not None:
                    mask |= bit
            edges.append(edge)
            bit += bit
        if not mask:
            return result
        plan = self.plans.get(mask) or self.plan(mask, len(edges))
        if not plan.steps:
            return result
        node = Node()
        node.op, node.plan, node.number, node.edges = self, plan, next(Node.numbers), edges
        node.shape, node.dtype, node._hooks = out.shape, dtype, None
        node.where = called_from() if _anomaly.get() else ""
        saved: list[Any] = []
        guards: list[tuple] = []
        node.saved, node.guards = saved, guards
        for kind, key in plan.sources:
            if kind == "input":
                x, value = inputs[key], arrays[key]
                if isinstance(x, Tensor) and value is x._array:
                    storage = x._storage
                    if not storage.saved:
                        storage.save()
                    guards.append((len(saved), edges[key], storage, storage.version))
                else:  # a cast copy, which nobody else can change, a number, or None
                    guards.append((len(saved), edges[key], None, 0))
            elif kind == "out":
                value = result._array
                result._storage.saved = True  # nobody has a handle yet
                guards.append((len(saved), None, result._storage, 0))
            elif kind == "residual":
                value = extra[key]
                guards.append((len(saved), None, None, 0))
            elif kind == "static":
                value = static[key]
            elif kind == "shape":
                value = np.shape(to_array(inputs[key]))
            elif kind == "shapes":
                value = tuple(np.shape(to_array(x)) for x in inputs)
            else:
                value = key
            saved.append(value)
        result._edge = node
        return result

    def plan(self, mask: int, count: int) -> Plan:
        """What to save and which derivatives to run when these of `count` inputs want gradients."""
        needs = tuple(bool(mask >> i & 1) for i in range(count))
        rules: list[tuple] = [(i, self.derivatives.get(self.inputs[0 if self.variadic else i]))
                              for i, want in enumerate(needs) if want]
        if self.joint is not None and mask:
            rules = [(None, self.joint)]
        names: list[str] = []
        sources: list[tuple] = []
        steps = []

        def need(wanted: Iterable[str], i: int | None) -> None:
            for name in wanted:
                names.append(name)
                sources.append(self.source(name, i, needs))

        for i, derivative in rules:
            if derivative is not None:
                start = len(names)
                need(names_of(derivative)[1:], i)
                steps.append((i, derivative, start, len(names)))
        for name in names:  # grows: a residual's formula names more
            residual = self.residuals.get(name)
            if residual is not None:
                need([n for n in names_of(residual) if n not in names], None)
        self.plans[mask] = Plan(tuple(names), tuple(sources), tuple(steps))
        return self.plans[mask]

    def source(self, name: str, i: int | None, needs: tuple[bool, ...]) -> tuple[str, Any]:
        """Where a derivative finds what it names."""
        if name == "out":
            return "out", None
        if name in self.residuals:
            return "residual", list(self.residuals).index(name)
        if name in self.defaults:
            return "static", name
        if name in self.inputs:
            return "input", self.inputs.index(name)
        if name == "shapes":
            return "shapes", None
        if name.removesuffix("_shape") in self.inputs:
            return "shape", self.inputs.index(name.removesuffix("_shape"))
        if name in ("i", "needs"):  # the position of the input; which inputs want a gradient
            return "constant", i if name == "i" else needs
        raise TypeError(f"a derivative of {self.name} names {name!r}, which the op does not have")

    def remember_view(self, x: Tensor, static: dict, result: Tensor) -> None:
        """Results that share their input's memory share its version, and writing through them
        reaches it (section 1, View)."""
        if result._array.size and not np.may_share_memory(result._array, x._array):
            return  # a reshape that had to copy
        result._storage = x._storage
        step = (self.function, static)
        if x._view is not None:
            refreshed(x)
            result._view = View(x._view.base, (*x._view.path, step))
        else:
            result._view = View(x, (step,))


numpy_to_op: dict[Callable, Callable] = {}  # for NumPy's protocols: np.exp -> exp


def op(formula: Any = None, *, residuals: dict[str, Callable | None] | None = None,
       view: bool = False, floats: bool = False, quiet: bool | None = None,
       numpy: Callable | None = None, joint: Callable | None = None,
       **derivatives: Callable) -> Any:
    """Make a function on tensors from a NumPy formula and a derivative for each input.

    view: the result shares the input's memory. floats: integers become float32 first. quiet: 1 / 0
    and its like give infinities and NaN without NumPy's warning, as in PyTorch (by default for
    floats; it costs half a microsecond, so only where it can happen). numpy: the NumPy function
    (a ufunc by itself) that this op is on tensors. joint: one derivative for all inputs, where
    they share most of their work: joint(g, needs, ...) returns a tuple, with None for each input
    that `needs`, a tuple of booleans, does not mark. Also a decorator."""
    if formula is None:
        return functools.partial(op, residuals=residuals, view=view, floats=floats, quiet=quiet,
                                 numpy=numpy, joint=joint, **derivatives)
    this = Op(formula, derivatives, residuals or {}, view, floats, joint)
    if floats if quiet is None else quiet:
        this.formula = np.errstate(all="ignore")(formula)
    simple = not (this.defaults or this.residuals or this.variadic or view)
    function: Any = (short_cuts[len(this.inputs)] if simple else general)(this)
    this.function = function
    function.op = this
    function.__name__ = this.name
    function.__doc__ = formula.__doc__ if not isinstance(formula, np.ufunc) else None
    parameters = {**dict.fromkeys(this.inputs, inspect.Parameter.empty), **this.defaults}
    function.__signature__ = inspect.Signature([
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in parameters.items()])
    if isinstance(formula, np.ufunc):
        numpy_to_op.setdefault(formula, function)
    if numpy is not None:
        numpy_to_op[numpy] = function
    return function


# Most calls are of one or two tensors of one dtype. They need none of what Op.apply does first,
# which costs more than the arithmetic on a few numbers. `short` is for Python's operators.


def general(this: Op) -> Callable:
    return lambda *args, **static: this.apply(args, static)

def unary(this: Op) -> Any:
    def function(*args: Any, **static: Any) -> Any:
        if len(args) == 1 and not static and isinstance(args[0], Tensor):
            array = args[0]._array
            if not this.floats or array.dtype.kind == "f":
                return this.recorded(args, (array,), static, this.formula(array))
        return this.apply(args, static)

    return function

def binary(this: Op) -> Any:
    compute, floats, recorded = this.formula, this.floats, this.recorded
    if len(this.promoting) < 2:
        return general(this)

    def short(x: Tensor, y: Any) -> Any:
        a, b = x._array, y
        if isinstance(y, Tensor):
            b = y._array
            same = b.dtype is a.dtype and (not floats or a.dtype.kind == "f")
        else:
            same = type(y) is float and a.dtype.kind == "f"  # a weak number
        if not same:
            return this.apply((x, y), {})
        try:
            out = compute(a, b)
        except ValueError as error:
            raise this.failure(error, (a, b)) from None
        return recorded((x, y), (a, b), {}, out)

    def function(*args: Any, **static: Any) -> Any:
        if len(args) == 2 and not static and isinstance(args[0], Tensor):
            return short(*args)
        return this.apply(args, static)

    function.short = short  # type: ignore[attr-defined]
    return function


short_cuts: dict[int, Callable] = collections.defaultdict(lambda: general, {1: unary, 2: binary})


# -- dtypes ----------------------------------------------------------------------------------------

float16, float32, float64 = (np.dtype(n) for n in ("float16", "float32", "float64"))
half, double = float16, float64
uint8, int8, int16, int32, int64 = (np.dtype(n) for n in "uint8 int8 int16 int32 int64".split())
short, long = int16, int64
channels_last = "channels_last"  # for PyTorch programs: a memory format, which changes nothing here
_default_dtype: ContextVar[np.dtype] = ContextVar("default_dtype", default=float32)


def default_dtype() -> np.dtype:
    return _default_dtype.get()

def get_default_dtype() -> np.dtype:
    return _default_dtype.get()

def set_default_dtype(dtype: Any) -> None:
    """The dtype that Python floats become: float32, unless changed here."""
    if np.dtype(dtype).kind != "f":
        raise TypeError(f"the default dtype must be floating point, not {dtype}")
    _default_dtype.set(np.dtype(dtype))


CATEGORY = {"b": 0, "u": 1, "i": 1, "f": 2}  # bool < integers < floating point


def promoted(inputs: Sequence[Any]) -> list:
    """The inputs as arrays of one dtype, by PyTorch's rule.

    Tensors with dimensions decide; tensors of none (0-d) matter only if theirs is a higher
    category (bool < integer < float), and Python and NumPy scalars likewise after these. So
    float32 * 2.0 and float32 * np.float64(2) stay float32, and int64 * float32 is float32."""
    first = inputs[0]
    if isinstance(first, Tensor):
        dtype = first._array.dtype
        for x in inputs:
            if x is None or (isinstance(x, Tensor) and x._array.dtype is dtype):
                continue
            if type(x) is float and dtype.kind == "f" or type(x) is int and dtype.kind in "fi":
                continue  # NumPy treats Python's own numbers as weak, as we do
            break
        else:
            return [x._array if isinstance(x, Tensor) else x for x in inputs]
    common = result_type(*[x for x in inputs if x is not None])
    return [None if x is None else to_array(x).astype(common, copy=False) for x in inputs]


def result_type(*inputs: Any) -> np.dtype:
    """The dtype of an operation on these tensors, arrays and numbers."""
    ranks: tuple[list, list, list] = ([], [], [])  # with dimensions, 0-d tensors, scalars
    for x in inputs:
        if isinstance(x, (float, int, np.generic)):
            kind = np.asarray(x).dtype.kind
            ranks[2].append({"b": np.dtype(np.bool_), "f": default_dtype()}.get(kind, int64))
        else:
            array = to_array(x)
            if array.dtype.kind not in CATEGORY:
                raise TypeError(f"cannot compute with dtype {array.dtype}: minidist has bool, "
                                "integers and floating point")
            ranks[0 if array.ndim else 1].append(array.dtype)
    result: np.dtype | None = None
    for rank in ranks:
        highest = max((CATEGORY[d.kind] for d in rank), default=-1)
        if result is None or highest > CATEGORY[result.kind]:
            peers = [d for d in rank if CATEGORY[d.kind] == highest]
            result = functools.reduce(np.promote_types, peers) if peers else result
    return result if result is not None else default_dtype()


@op(x=lambda g: g)
def cast(x, *, dtype):
    return x.astype(dtype)


# -- unary -----------------------------------------------------------------------------------------

exp = op(np.exp, floats=True, x=lambda g, out: g * out)
expm1 = op(np.expm1, floats=True, x=lambda g, out: g * (out + 1))
log = op(np.log, floats=True, x=lambda g, x: g / x)
log1p = op(np.log1p, floats=True, x=lambda g, x: g / (x + 1))
log2 = op(np.log2, floats=True, x=lambda g, x: g / (x * math.log(2)))
log10 = op(np.log10, floats=True, x=lambda g, x: g / (x * math.log(10)))
sqrt = op(np.sqrt, floats=True, x=lambda g, out: g / (out * 2))
sin = op(np.sin, floats=True, x=lambda g, x: g * np.cos(x))
cos = op(np.cos, floats=True, x=lambda g, x: -g * np.sin(x))
tan = op(np.tan, floats=True, x=lambda g, out: g * (1 + out * out))
tanh = op(np.tanh, floats=True, quiet=False, x=lambda g, out: g * (1 - out * out))
neg = op(np.negative, x=lambda g: -g)
_abs = op(np.absolute, x=lambda g, x: g * np.sign(x))  # sign(0) = 0: no NaN at the kink
floor, ceil, trunc = (op(f, x=lambda g: np.zeros_like(g)) for f in (np.floor, np.ceil, np.trunc))
isnan, isfinite, isinf = op(np.isnan), op(np.isfinite), op(np.isinf)
logical_not, bitwise_not = op(np.logical_not), op(np.invert)


@op(numpy=np.sign, x=lambda g: np.zeros_like(g))
def sign(x):
    return x if x.dtype == bool else np.sign(x)

@op(numpy=np.square, x=lambda g, x: g * (x * 2))
def square(x):
    return np.square(x.astype(np.int64) if x.dtype == bool else x)

@op(x=lambda g: np.zeros_like(g))
def _round(x, *, decimals=0):
    return np.round(x, decimals)

@op(floats=True, x=lambda g, out: -g * out * out)
def reciprocal(x):
    return 1 / x

@op(floats=True, x=lambda g, out: g * (out * out * out) * -0.5)
def rsqrt(x):
    return 1 / np.sqrt(x)

@op(floats=True, x=lambda g, out: g * (out * (1 - out)))
def sigmoid(x):
    return 1 / (1 + np.exp(-x))  # for large negative x exp overflows, rightly: 1 / inf is 0

@op(floats=True, x=lambda g, x: g * (np.exp(-x * x) * (2 / math.sqrt(math.pi))))
def erf(x):
    """The error function. float64: the C library's, element by element. float32: a rational
    function of x on [-4, 4] (the coefficients that Eigen and XLA use), within 5e-7."""
    if x.dtype == np.float64:
        return np.vectorize(math.erf, otypes=[np.float64])(x)
    x = np.clip(x, -4, 4)
    square = x * x
    return x * polynomial(square, ERF_ABOVE) / polynomial(square, ERF_BELOW)


ERF_ABOVE = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06,
             -5.69250639462346e-05, -7.34990630326855e-04, -2.95459980854025e-03,
             -1.60960333262415e-02)
ERF_BELOW = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03,
             -7.37332916720468e-03, -1.42647390514189e-02)


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Horner's rule, the coefficient of the highest power first."""
    return functools.reduce(lambda total, coefficient: total * x + coefficient, coefficients)

@op(x=lambda g, x, min, max: g * (  # at the bounds it passes through (PyTorch's choice)
    (x >= (-math.inf if min is None else min)) & (x <= (math.inf if max is None else max))))
def _clamp(x, *, min=None, max=None):
    return np.clip(x, min, max)

def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        input = input if min is None else maximum(input, min)
        return input if max is None else minimum(input, max)
    if input.dtype.kind != "f" and any(isinstance(bound, float) for bound in (min, max)):
        input = input.to(default_dtype())
    return _clamp(input, min=min, max=max)


# -- binary ----------------------------------------------------------------------------------------

_add = op(np.add, x=lambda g: g, y=lambda g: g)
_sub = op(np.subtract, x=lambda g: g, y=lambda g: -g)
mul = op(np.multiply, x=lambda g, y: g * y, y=lambda g, x: g * x)
true_divide = op(np.true_divide, floats=True, x=lambda g, y: g / y,
                 y=lambda g, y, out: -g * out / y)
arctan2 = op(np.arctan2, floats=True, x=lambda g, x, y: g * y / (x * x + y * y),
             y=lambda g, x, y: -g * x / (x * x + y * y))
# floor((x / y)) moves in jumps; the remainder is x - y * floor(x / y).
floor_divide = op(np.floor_divide, quiet=True, x=lambda g: np.zeros_like(g),
                  y=lambda g: np.zeros_like(g))
remainder = op(np.remainder, quiet=True, x=lambda g: g, y=lambda g, x, y: -g * np.floor(x / y))
fmod = op(np.fmod, quiet=True, x=lambda g: g, y=lambda g, x, y: -g * np.trunc(x / y))
# Where both are equal each gets half, so that the gradient sums to g.
maximum = op(np.maximum, x=lambda g, x, y: g * (x > y) + g * (x == y) * 0.5,
             y=lambda g, x, y: g * (y > x) + g * (x == y) * 0.5)
minimum = op(np.minimum, x=lambda g, x, y: g * (x < y) + g * (x == y) * 0.5,
             y=lambda g, x, y: g * (y < x) + g * (x == y) * 0.5)
logaddexp = op(np.logaddexp, floats=True, x=lambda g, x, out: g * np.exp(x - out),
               y=lambda g, y, out: g * np.exp(y - out))
eq, ne = op(np.equal), op(np.not_equal)
lt, le, gt, ge = op(np.less), op(np.less_equal), op(np.greater), op(np.greater_equal)
logical_and, logical_or, logical_xor = op(np.logical_and), op(np.logical_or), op(np.logical_xor)
bitwise_and, bitwise_or, bitwise_xor = op(np.bitwise_and), op(np.bitwise_or), op(np.bitwise_xor)


def add(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return _add(input, other if alpha == 1 else other * alpha)

def sub(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    return _sub(input, other if alpha == 1 else other * alpha)

def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode not in (None, "trunc", "floor"):
        raise ValueError(f"rounding_mode must be None, 'trunc' or 'floor', not {rounding_mode!r}")
    if rounding_mode == "trunc":
        return trunc(true_divide(input, other)).to(result_type(input, other))
    return (floor_divide if rounding_mode else true_divide)(input, other)


@op(quiet=True, numpy=np.power, x=lambda g, x, y: g * (y * power(x, y - (y != 0))),
    y=lambda g, x, out: g * out * np.log(np.where(x == 0, 1, x)))
def power(x, y):
    # The slopes avoid 0 * inf: x**0 is flat in x, also at x = 0, and where x = 0 the result
    # does not depend on y > 0, so its logarithm is taken of 1 there.
    if isinstance(y, (int, float)):  # NumPy's power is 300 times slower than products
        if y in (2, 3):
            return x * x if y == 2 else x * x * x
        if y == 0.5:
            return np.sqrt(x)
    return np.power(x, y)


@op(numpy=np.where, x=lambda g, condition: np.where(condition, g, 0),
    y=lambda g, condition: np.where(condition, 0, g))
def _where(condition, x, y):
    return np.where(condition, x, y)

def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """Elements of input where the condition holds, else of other. (An infinite or NaN branch
    that is not selected still multiplies its own gradient by zero: give the inner op a safe
    input with a where of its own.)"""
    if input is None:
        return tuple(wrap(i) for i in np.nonzero(np.atleast_1d(to_array(condition))))
    if not any(isinstance(x, Tensor) for x in (input, other)):
        input = tensor(input)
    return _where(condition, input, other)


# -- movement: the same elements elsewhere ---------------------------------------------------------
#
# Movement ops come in adjoint pairs: what one copies the other adds up.


@op(view=True, numpy=np.reshape, x=lambda g, x_shape: np.reshape(g, x_shape))
def _reshape(x, *, shape):
    return np.reshape(x, shape)

@op(view=True, numpy=np.transpose, x=lambda g, axes: np.transpose(g, tuple(np.argsort(axes))))
def _permute(x, *, axes=None):
    return np.transpose(x, axes)

@op(view=True, numpy=np.broadcast_to, x=lambda g: g)  # `fitted` sums what was repeated
def _expand(x, *, shape):
    return np.broadcast_to(x, shape)

@op(view=True, x=lambda g, x_shape, index: index_add_to(g, shape=x_shape, index=index))
def _getitem(x, *, index):
    return x[index]

@op(x=lambda g, index: g[index])
def index_add_to(x, *, shape, index):
    """Zeros of the shape, with x added at the index: what x[index] is the adjoint of."""
    out = np.zeros(shape, x.dtype)
    if any(isinstance(i, (np.ndarray, list)) and np.asarray(i).dtype != bool for i in index):
        np.add.at(out, index, x)  # a position may occur several times
    else:
        out[index] = x
    return out

def without(g: Any, path: tuple) -> Any:
    g = np.copy(g)
    follow(g, path)[...] = 0
    return g

@op(base=lambda g, path: without(g, path), value=lambda g, path: follow(g, path))
def overwrite(base, value, *, path):
    """base with the part that the movement ops of `path` show replaced by value."""
    base = base.copy()
    follow(base, path)[...] = value
    return base

@op(x=lambda g, index: replaced(g, np.zeros(1, g.dtype), index=index),
    value=lambda g, index: g[index])
def replaced(x, value, *, index):
    x = np.copy(x)
    x[index] = value
    return x

@op(xs=lambda g, i, shapes, axis: part(g, i, shapes, axis))
def _cat(*xs, axis=0):
    return np.concatenate(xs, axis)

def part(g: Any, i: int, shapes: Sequence[tuple], axis: int) -> Any:
    start = sum(shape[axis] for shape in shapes[:i])
    return g[(slice(None),) * axis + (slice(start, start + shapes[i][axis]),)]

@op(numpy=np.flip, x=lambda g, axis: np.flip(g, axis))
def _flip(x, *, axis):
    return np.flip(x, axis).copy()

@op(x=lambda g, axis, shift: _roll(g, shift=tuple(-s for s in shift), axis=axis))
def _roll(x, *, shift, axis):
    return np.roll(x, shift, axis)

@op(x=lambda g, widths: g[tuple(slice(a, g.shape[i] - b) for i, (a, b) in enumerate(widths))])
def _pad(x, *, widths, value=0.0):
    return np.pad(x, widths, constant_values=value)

@op(x=lambda g, x_shape, index, dim: scatter_add_to(g, shape=x_shape, index=index, dim=dim))
def _gather(x, *, index, dim):
    return x[along(index, dim)]

@op(x=lambda g, index, dim: _gather(g, index=index, dim=dim))
def scatter_add_to(x, *, shape, index, dim):
    out = np.zeros(shape, x.dtype)
    np.add.at(out, along(index, dim), x)
    return out

def along(index: np.ndarray, dim: int) -> tuple:
    """The full index whose dimension `dim` is taken from index, the others from where it is."""
    grid = list(np.ogrid[tuple(slice(n) for n in index.shape)])
    grid[dim] = index
    return tuple(grid)

@op(view=True, x=lambda g, x_shape, offset, dim1, dim2:
    on_diagonal(g, shape=x_shape, offset=offset, dim1=dim1, dim2=dim2))
def _diagonal(x, *, offset, dim1, dim2):
    line = np.diagonal(x, offset, dim1, dim2)
    line.flags.writeable = x.flags.writeable  # NumPy says no, without need
    return line

@op(x=lambda g, offset, dim1, dim2: _diagonal(g, offset=offset, dim1=dim1, dim2=dim2))
def on_diagonal(x, *, shape, offset, dim1, dim2):
    out = np.zeros(shape, x.dtype)
    line = np.diagonal(out, offset, dim1, dim2)
    line.flags.writeable = True
    line[...] = x
    return out


@op(view=True, x=lambda g, x_shape, kernel, stride, dilation:
    fold(g, size=x_shape[-len(kernel):], stride=stride, dilation=dilation))
def windows(x, *, kernel, stride, dilation):
    """All windows of x (..., *size) over its last dimensions: (..., *places, *kernel), a view.

    The place p and the offset k in the kernel show the element p * stride + k * dilation."""
    n = len(kernel)
    span = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation))
    views = np.lib.stride_tricks.sliding_window_view(x, span, tuple(range(x.ndim - n, x.ndim)))
    return views[(..., *(slice(None, None, s) for s in (*stride, *dilation)))]


@op(x=lambda g, x_shape, stride, dilation:
    windows(g, kernel=x_shape[-len(stride):], stride=stride, dilation=dilation))
def fold(x, *, size, stride, dilation):
    """Add the windows (..., *places, *kernel) up where they came from: (..., *size)."""
    n = len(size)
    places, kernel = x.shape[-2 * n : -n], x.shape[-n:]
    out = np.zeros(x.shape[: -2 * n] + tuple(size), x.dtype)
    for offset in np.ndindex(*kernel):
        where = tuple(
            slice(k * d, k * d + (p - 1) * s + 1, s) if p else slice(0, 0)
            for k, d, p, s in zip(offset, dilation, places, stride)
        )
        out[(..., *where)] += x[(..., *offset)]
    return out


# -- reduce ----------------------------------------------------------------------------------------

Dims = int | Sequence[int] | None


def axes_of(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The dimensions that a reduction runs over, counted from 0; none given means all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    for d in dims:
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"dimension {d} is out of range for a tensor of {ndim} dimensions")
    axes = tuple(d % ndim for d in dims) if ndim else ()
    if len(set(axes)) != len(axes):
        raise RuntimeError(f"a dimension appears twice in {tuple(dims)}")
    return axes


def spread(g: Any, shape: tuple[int, ...], axes: Any, keepdims: bool = False) -> Any:
    """Give each element the gradient of the reduction that it went into."""
    if not keepdims:
        axes = axes_of(axes, len(shape))
        g = np.reshape(g, tuple(1 if i in axes else n for i, n in enumerate(shape)))
    return np.broadcast_to(g, shape)

def count(shape: tuple[int, ...], axis: Any) -> int:
    return math.prod(shape[a] for a in axes_of(axis, len(shape)))

def sum_dtype(x: Any) -> np.dtype:
    return x.dtype if x.dtype.kind == "f" else int64

@op(numpy=np.sum, x=lambda g, x_shape, axis, keepdims: spread(g, x_shape, axis, keepdims))
def _sum(x, *, axis=None, keepdims=False):
    # np.sum calls this, and takes twice as long about it when there are few elements.
    return np.add.reduce(x, axis=axis, keepdims=keepdims, dtype=sum_dtype(x))

@op(numpy=np.mean, x=lambda g, x_shape, axis, keepdims:
    spread(g / count(x_shape, axis), x_shape, axis, keepdims))
def _mean(x, *, axis=None, keepdims=False):
    if count(x.shape, axis) == 0:  # as 0 / 0, but without NumPy's warning
        return np.sum(x, axis=axis, keepdims=keepdims) * x.dtype.type(math.nan)
    return np.mean(x, axis=axis, keepdims=keepdims)

@op(x=lambda g, x, out, axis, keepdims:
    spread(g, x.shape, axis, keepdims) * others(x, out, axis, keepdims))
def _prod(x, *, axis=None, keepdims=False):
    return np.prod(x, axis=axis, keepdims=keepdims, dtype=sum_dtype(x))


def others(x: Any, out: Any, axis: Any, keepdims: bool) -> Any:
    """For each element the product of all the others: out / x, except that 0 / 0 says nothing,
    so where there is a zero each row is multiplied anew without the element in question."""
    if to_array(x).all():
        return spread(out, x.shape, axis, keepdims) / x
    one = len(axis) == 1
    rows = np.swapaxes(x, axis[0], -1) if one else np.reshape(x, (1, -1))
    n = rows.shape[-1]
    rows = np.broadcast_to(np.expand_dims(rows, -2), rows.shape[:-1] + (n, n))
    product = _prod(np.where(np.eye(n, dtype=bool), 1, rows), axis=(rows.ndim - 1,))
    return np.swapaxes(product, axis[0], -1) if one else np.reshape(product, x.shape)


def evenly(g: Any, x: Any, out: Any, axis: Any, keepdims: bool) -> Any:
    """Split the gradient between all elements that are the extreme, so that it sums to g."""
    ties = (x == spread(out, x.shape, axis, keepdims)) * 1.0
    return spread(g, x.shape, axis, keepdims) * (ties / np.sum(ties, axis=axis, keepdims=True))

@op(numpy=np.max, x=lambda g, x, out, axis, keepdims: evenly(g, x, out, axis, keepdims))
def _amax(x, *, axis=None, keepdims=False):
    return np.max(x, axis=axis, keepdims=keepdims)

@op(numpy=np.min, x=lambda g, x, out, axis, keepdims: evenly(g, x, out, axis, keepdims))
def _amin(x, *, axis=None, keepdims=False):
    return np.min(x, axis=axis, keepdims=keepdims)

@op(numpy=np.cumsum, x=lambda g, axis: np.flip(np.cumsum(np.flip(g, axis), axis), axis))
def _cumsum(x, *, axis):
    return np.cumsum(x, axis=axis, dtype=sum_dtype(x))

@op(floats=True, x=lambda g, x, out, axis, keepdims: spread(g, x.shape, axis, keepdims)
    * np.exp(x - spread(out, x.shape, axis, keepdims)))
def _logsumexp(x, *, axis, keepdims=False):
    # Shifted by the maximum, so that exp cannot overflow; an infinite one cannot be subtracted.
    top = np.max(x, axis=axis, keepdims=True, initial=-math.inf)
    top = np.where(np.isfinite(top), top, 0).astype(x.dtype)
    out = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return out if keepdims else np.squeeze(out, axis)

@op(quiet=True, x=lambda g, out, dim:
    out * (g - np.add.reduce(g * out, axis=dim, keepdims=True)))
def _softmax(x, *, dim):
    e = np.exp(x - np.maximum.reduce(x, axis=dim, keepdims=True, initial=-math.inf))
    e /= np.add.reduce(e, axis=dim, keepdims=True)
    return e

@op(quiet=True, x=lambda g, out, dim:
    g - np.exp(out) * np.add.reduce(g, axis=dim, keepdims=True))
def _log_softmax(x, *, dim):
    shifted = x - np.maximum.reduce(x, axis=dim, keepdims=True, initial=-math.inf)
    return shifted - np.log(np.add.reduce(np.exp(shifted), axis=dim, keepdims=True))


# Norms are ops of their own because sqrt(sum(x * x)) has slope 0 * inf = NaN at zero; here it is 0.


@op(x=lambda g, x, out, axis, keepdims: spread(g, x.shape, axis, keepdims)
    * (x / spread(np.where(out == 0, 1, out), x.shape, axis, keepdims)))
def _norm2(x, *, axis=None, keepdims=False):
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims))

@op(x=lambda g, x, out, p, axis, keepdims: spread(g, x.shape, axis, keepdims) * np.sign(x)
    * (np.where(x == 0, 1, np.abs(x))
       / spread(np.where(out == 0, 1, out), x.shape, axis, keepdims)) ** (p - 1))
def _norm(x, *, p, axis=None, keepdims=False):
    return np.sum(np.abs(x) ** p, axis=axis, keepdims=keepdims) ** (1 / p)


# -- products --------------------------------------------------------------------------------------


@op(numpy=np.matmul, x=lambda g, y: g @ np.swapaxes(y, -1, -2), y=lambda g, x, y_shape:
    all_rows(x).T @ all_rows(g) if len(y_shape) == 2 else np.swapaxes(x, -1, -2) @ g)
def _matmul(x, y):
    return np.matmul(x, y)

def all_rows(x: Any) -> Any:
    """All rows of a batch of matrices as one matrix: one product then sums over the batch."""
    return x if x.ndim == 2 else np.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def matmul(input: Any, other: Any) -> Tensor:
    """Products of matrices (..., n, k) @ (..., k, m); a vector counts as a row or a column."""
    x, y = (v if isinstance(v, Tensor) else wrap(v) for v in (input, other))
    if not x.ndim or not y.ndim:
        raise RuntimeError("matmul needs tensors of at least one dimension: use * for numbers")
    if x.dtype != y.dtype:
        raise RuntimeError(f"matmul of {x.dtype} and {y.dtype}: convert one with .to(dtype)")
    if x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
        raise RuntimeError(
            f"matmul of shapes {tuple(x.shape)} and {tuple(y.shape)}: the last dimension of the "
            f"first ({x.shape[-1]}) must be the {'second to last' if y.ndim > 1 else 'only'} "
            f"of the second ({y.shape[-2 if y.ndim > 1 else 0]})"
        )
    out = _matmul(x.unsqueeze(0) if x.ndim == 1 else x, y.unsqueeze(1) if y.ndim == 1 else y)
    if y.ndim == 1:
        out = out.squeeze(-1)
    return out.squeeze(-1 if y.ndim == 1 else -2) if x.ndim == 1 else out


def product(name: str, *dims: int) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul for inputs of exactly these numbers of dimensions."""

    def multiply(input: Tensor, other: Tensor) -> Tensor:
        if (input.ndim, other.ndim) != dims:
            kinds = ("", "vectors", "matrices", "batches of matrices")
            what = " and ".join(dict.fromkeys(kinds[n] for n in dims))
            raise RuntimeError(f"{name} takes {what}, not shapes {tuple(input.shape)} and "
                               f"{tuple(other.shape)}: use matmul")
        return matmul(input, other)

    return multiply


def einsum(equation: str, *operands: Any) -> Tensor:
    """Sums of products by index letters: einsum("bij,bjk->bik", x, y) is a batch of products.

    The operands are taken two at a time; an index that later operands and the result do not
    mention is summed at once."""
    tensors = list(operands[0] if isinstance(operands[0], (list, tuple)) else operands)
    terms, result = einsum_terms(equation, tensors)
    for k, (term, x) in enumerate(zip(terms, tensors)):
        for letter in set(term):
            while term.count(letter) > 1:  # a repeated index walks along a diagonal
                first, second = term.index(letter), term.rindex(letter)
                x = x.diagonal(0, first, second)
                term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
        terms[k], tensors[k] = term, x
    term, x = terms[0], tensors[0]
    for k in range(1, len(terms)):
        later = "".join(terms[k + 1 :]) + result
        x, term = sum_alone(x, term, terms[k] + later)
        y, other = sum_alone(tensors[k], terms[k], term + later)
        out = "".join(dict.fromkeys(i for i in term + other if i in later))
        x, term = _einsum(x, y, a=term, b=other, c=out), out
    x, term = sum_alone(x, term, result)
    return permute(x, [term.index(i) for i in result])


def einsum_terms(equation: str, tensors: list[Tensor]) -> tuple[list[str], str]:
    """The index letters of each operand and of the result, with the ellipsis spelled out."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise RuntimeError(f"einsum {equation!r} names {len(terms)} operands, got {len(tensors)}")
    named = [len(t.replace("...", "")) for t in terms]
    extra = max((x.ndim - n for x, n, t in zip(tensors, named, terms) if "..." in t), default=0)
    spare = [c for c in map(chr, range(65, 123)) if c.isalpha() and c not in equation][:extra]
    for i, (term, x, n) in enumerate(zip(terms, tensors, named)):
        if x.ndim != n and not ("..." in term and x.ndim > n):
            raise RuntimeError(f"einsum {equation!r}: operand {i} has {x.ndim} dimensions")
        terms[i] = term.replace("...", "".join(spare[extra - (x.ndim - n):]))
    if not arrow:
        letters = "".join(terms)
        result = "..." + "".join(sorted(c for c in set(letters) - set(spare)
                                        if letters.count(c) == 1))
    return terms, result.replace("...", "".join(spare))


def sum_alone(x: Tensor, term: str, others: str) -> tuple[Tensor, str]:
    alone = [i for i, letter in enumerate(term) if letter not in others]
    return (x.sum(alone) if alone else x), "".join(c for c in term if c in others)

@op(x=lambda g, y, a, b, c: _einsum(g, y, a=c, b=b, c=a),
    y=lambda g, x, a, b, c: _einsum(x, g, a=a, b=c, c=b))
def _einsum(x, y, *, a, b, c):
    return np.einsum(f"{a},{b}->{c}", x, y, optimize=True)


# NumPy's names for movement, as the derivatives above use them on tensors.
numpy_to_op |= {
    np.add.reduce: _sum,
    np.expand_dims: lambda x, axis: x.unsqueeze(axis),
    np.squeeze: lambda x, axis: x.squeeze(axis),
    np.concatenate: lambda xs, axis=0: _cat(*xs, axis=axis),
    np.swapaxes: lambda x, a, b: x.transpose(a, b),
    np.zeros_like: lambda x: x.new_zeros(x.shape),
    np.copy: lambda x: x.clone(),
}


# -- making tensors --------------------------------------------------------------------------------


def tensor(data: Any, *, dtype: Any = None, device: Any = None,
           requires_grad: bool = False) -> Tensor:
    """A tensor with a copy of the data. Python floats become the default dtype (float32)."""
    dtype_in(device=device)
    if isinstance(data, (list, tuple)) and data and isinstance(first_leaf(data), Tensor):
        data = np.stack([to_array(tensor(item)) for item in data])
        python_numbers = False
    else:
        python_numbers = not isinstance(first_leaf(data), (np.ndarray, np.generic, Tensor))
    found = to_array(data)
    if python_numbers and dtype is not None and np.dtype(dtype).kind in "iu" and found.size:
        limits = np.iinfo(dtype)  # as PyTorch has it, -1 stands for the largest unsigned number
        if not ((limits.min or -limits.max) <= found.min() and found.max() <= limits.max):
            raise OverflowError(f"numbers from {found.min()} to {found.max()} do not fit into "
                                f"{limits.dtype}, which holds {limits.min} to {limits.max}")
    array = np.array(found, dtype=dtype)
    if array.dtype.kind not in CATEGORY:
        raise TypeError(f"cannot make a tensor of {array.dtype} from {type(data).__name__}: "
                        "nested lists must be regular and hold numbers")
    if dtype is None and python_numbers and array.dtype == np.float64:
        array = array.astype(default_dtype())
    return wrap(array).requires_grad_(requires_grad)


def first_leaf(data: Any) -> Any:
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return data

def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Like tensor, but without a copy where none is needed."""
    dtype_in(device=device)
    if isinstance(data, Tensor):
        return data if dtype is None else data.to(dtype)
    if isinstance(data, np.ndarray):
        return wrap(data if dtype is None else data.astype(dtype, copy=False))
    return tensor(data, dtype=dtype)

def from_numpy(array: np.ndarray) -> Tensor:
    """A tensor that shares the array's memory."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"from_numpy takes an ndarray, not {type(array).__name__}")
    return wrap(array)

def sizes(args: Sequence[Any]) -> tuple[int, ...]:
    """(2, 3) from f(2, 3), f((2, 3)) and f([2, 3])."""
    if len(args) == 1 and not isinstance(args[0], (int, np.integer, Tensor)):
        args = args[0]
    return tuple(int(n) for n in args)


def factory(make: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
    """A function that makes tensors, with dtype, device and requires_grad, from one that makes
    arrays; `size` is then given as (2, 3) or as 2, 3."""
    takes_size = names_of(make)[:2] == ("size", "dtype")

    def create(*args: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False,
               **options: Any) -> Tensor:
        dtype_in(device=device)  # refuses all but the CPU
        if takes_size:
            args = (sizes(args or (options.pop("size"),)),)
        args = tuple(a.item() if isinstance(a, Tensor) else a for a in args)
        return wrap(make(*args, dtype=dtype, **options)).requires_grad_(requires_grad)

    return create


zeros = factory(lambda size, dtype: np.zeros(size, dtype or default_dtype()))
ones = factory(lambda size, dtype: np.ones(size, dtype or default_dtype()))
empty = factory(lambda size, dtype: np.empty(size, dtype or default_dtype()))
eye = factory(lambda n, m=None, dtype=None: np.eye(n, m, dtype=dtype or default_dtype()))


@factory
def full(size, fill_value, dtype):
    return np.full(size, to_array(fill_value), dtype or result_type(fill_value))

@factory
def arange(start, end=None, step=1, dtype=None):
    start, end = (0, start) if end is None else (start, end)
    whole = all(isinstance(b, (int, np.integer)) for b in (start, end, step))
    dtype = dtype or (int64 if whole else default_dtype())
    if np.dtype(dtype).kind in "iu":  # as PyTorch: the bounds are cut to integers first
        start, end, step = int(start), int(end), int(step)
    return np.arange(start, end, step).astype(dtype)

@factory
def linspace(start, end, steps, dtype):
    dtype = np.dtype(dtype or default_dtype())
    if dtype.kind in "iu":
        start, end = int(start), int(end)
    return np.trunc(np.linspace(start, end, steps)).astype(dtype) if dtype.kind in "iu" else \
        np.linspace(start, end, steps).astype(dtype)


# -- random numbers --------------------------------------------------------------------------------


class Generator:
    """A stream of random numbers of our own: NumPy's global state is neither read nor moved."""

    def __init__(self, device: Any = "cpu") -> None:
        self.numpy = np.random.default_rng()

    def manual_seed(self, seed: Any) -> Generator:
        self.numpy = np.random.default_rng(seed)
        return self

    def get_state(self) -> Any:
        return self.numpy.bit_generator.state

    def set_state(self, state: dict) -> None:
        self.numpy.bit_generator.state = state


_generator: ContextVar[Generator] = ContextVar("generator", default=Generator())  # noqa: B039


def manual_seed(seed: int) -> Generator:
    """Start the default generator at the seed: the same seed gives the same run."""
    # A new one: threads that are ranks of a simulated run each set their own.
    _generator.set(Generator().manual_seed(seed))
    return _generator.get()

def get_rng_state() -> Any:
    """The default generator's, for set_rng_state; `save` takes it."""
    return _generator.get().get_state()

def set_rng_state(state: Any) -> None:
    _generator.get().set_state(state)

def rng(generator: Generator | None = None) -> np.random.Generator:
    return (generator or _generator.get()).numpy

def drawn(draw: Callable, size: tuple, dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype or default_dtype())  # float16 is drawn as float32 and rounded
    return np.asarray(draw(size, np.float64 if dtype == float64 else np.float32)).astype(dtype)

@factory
def rand(size, dtype, generator=None):
    return drawn(rng(generator).random, size, dtype)

@factory
def randn(size, dtype, generator=None):
    return drawn(rng(generator).standard_normal, size, dtype)

@factory
def randint(low, high, size=None, dtype=None, generator=None):
    low, high, size = (0, low, high) if size is None else (low, high, size)  # or (high, size)
    return np.asarray(rng(generator).integers(low, high, tuple(size))).astype(dtype or int64)

@factory
def randperm(n, dtype=None, generator=None):
    return rng(generator).permutation(n).astype(dtype or int64)

def normal(mean: Any, std: Any = 1.0, size: Any = None, *, generator: Generator | None = None,
           **options: Any) -> Tensor:
    shape = np.broadcast_shapes(*(to_array(x).shape for x in (mean, std))) if size is None else size
    dtypes = [x.dtype for x in (mean, std) if isinstance(x, Tensor)]
    options = {"dtype": dtypes[0], **options} if dtypes else options
    return randn(shape, generator=generator, **options) * std + mean

def bernoulli(input: Tensor, *, generator: Generator | None = None) -> Tensor:
    return wrap((rng(generator).random(input.shape) < input._array).astype(input.dtype))

def multinomial(input: Tensor, num_samples: int, replacement: bool = False, *,
                generator: Generator | None = None) -> Tensor:
    """Draw indices with probabilities proportional to each row of input."""
    weights = np.atleast_2d(input._array).astype(np.float64)
    if (weights < 0).any() or not np.isfinite(weights).all() or not (weights.sum(-1) > 0).all():
        raise RuntimeError("multinomial needs weights that are finite, not negative, and not all 0")
    draws = np.stack([rng(generator).choice(len(row), num_samples, replacement, row / row.sum())
                      for row in weights])
    return wrap(draws if input.ndim > 1 else draws[0])


def like(make: Callable[..., Any]) -> Callable[..., Tensor]:
    """zeros_like from zeros, and so on: the shape and dtype of another tensor."""

    def create(input: Tensor, *args: Any, dtype: Any = None, **options: Any) -> Tensor:
        return make(input.shape, *args, dtype=dtype or input.dtype, **options)

    return create


def new(make: Callable[..., Any]) -> Callable[..., Tensor]:
    """x.new_zeros(2, 3) from zeros: another shape, the same dtype."""
    return lambda self, *args, dtype=None, **options: \
        make(*args, dtype=dtype or self.dtype, **options)


zeros_like, ones_like, empty_like, full_like, rand_like, randn_like = map(
    like, (zeros, ones, empty, full, rand, randn))
randint_like = like(lambda shape, low, high=None, **options: randint(
    *((0, low) if high is None else (low, high)), shape, **options))


# -- functions and methods -------------------------------------------------------------------------
#
# What follows gives the ops above PyTorch's signatures. Each is written once, as a function of a
# tensor, and becomes a method too. Names that would hide Python's own (sum, max, abs ...) exist
# only as methods and as `minidist.sum` (section 8), never as globals of this file.


class ValuesIndices(tuple):
    """What max(dim), sort and topk return: (values, indices)."""

    def __new__(cls, values: Tensor, indices: Tensor) -> ValuesIndices:
        return super().__new__(cls, (values, indices))

    values = property(lambda self: self[0])
    indices = property(lambda self: self[1])


def scalars_too(function: Callable) -> Callable:
    """The function also for a tensor of no dimensions, as if it had one, of one element."""

    @functools.wraps(function)
    def method(self: Tensor, *args: Any, **options: Any) -> Any:
        if self.ndim:
            return function(self, *args, **options)
        args = tuple(a.reshape(-1) if isinstance(a, Tensor) else a for a in args)
        result = function(self.reshape(1), *args, **options)
        return result.reshape(()) if isinstance(result, Tensor) else \
            ValuesIndices(*(r.reshape(()) for r in result))

    return method


def reduction(reduce: Callable, floats: bool = False) -> Callable[..., Tensor]:
    """sum(dim, keepdim) from the op with NumPy's axis and keepdims (as PyTorch takes, too)."""

    def method(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None,
               axis: Dims = None, keepdims: bool = False) -> Tensor:
        dim, keepdim = axis if dim is None else dim, keepdim or keepdims
        x = self if dtype is None else self.to(dtype)
        if floats and x.dtype.kind != "f":
            raise RuntimeError(f"{reduce.__name__.strip('_')} needs a floating point tensor, this "
                               f"one is {x.dtype}: convert it with .float() first")
        result = reduce(x, axis=axes_of(dim, x.ndim), keepdims=keepdim)
        return result if dtype is None else result.to(dtype)

    return method


def extreme(amax: Callable, arg: Callable, pairwise: Callable) -> Callable[..., Any]:
    """max(): the largest of all; max(dim): values and indices; max(other): elementwise."""

    @scalars_too
    def along_dim(self: Tensor, dim: int, keepdim: bool = False) -> ValuesIndices:
        index = wrap(arg(self._array, axis=dim, keepdims=True))
        found = ValuesIndices(gather(self, dim, index), index)
        return found if keepdim else ValuesIndices(*(t.squeeze(dim) for t in found))

    def method(self: Tensor, dim: Any = None, keepdim: bool = False, *,
               other: Any = None) -> Any:
        if isinstance(dim, Tensor) or other is not None:
            return pairwise(self, dim if other is None else other)
        return amax(self) if dim is None else along_dim(self, dim, keepdim)

    return method


def arg_extreme(arg: Callable) -> Callable[..., Tensor]:
    return lambda self, dim=None, keepdim=False: \
        wrap(arg(self._array, axis=dim, keepdims=keepdim))

def logical(reduce: Callable) -> Callable[..., Tensor]:
    return lambda self, dim=None, keepdim=False: \
        wrap(reduce(self._array != 0, axis=axes_of(dim, self.ndim), keepdims=keepdim))


def spread_out(size: Callable[..., Tensor], scale: Callable) -> Callable[..., Tensor]:
    """var and std: the size of the distances from the mean, in two passes, since
    E[x^2] - E[x]^2 cancels; divided by n - correction (1 unless given)."""

    def method(self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
               correction: float | None = None) -> Tensor:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        correction = int(unbiased) if correction is None else correction
        distance = self - self.mean(dim, keepdim=True)
        axes = axes_of(dim, self.ndim)
        free = max(count(self.shape, axes) - correction, 0)
        return size(distance, axis=axes, keepdims=keepdim) / scale(free)

    return method


var = spread_out(lambda x, **options: _sum(square(x), **options), float)
std = spread_out(_norm2, math.sqrt)


def norm(self: Tensor, p: Any = 2, dim: Dims = None, keepdim: bool = False, *,
         dtype: Any = None) -> Tensor:
    self = self if dtype is None else self.to(dtype)
    axes = axes_of(dim, self.ndim)
    if p in (2, "fro", None):
        return _norm2(self, axis=axes, keepdims=keepdim)
    if isinstance(p, str):
        raise ValueError(f"norm has p as a number or 'fro', not {p!r}")
    if abs(p) == math.inf:
        return (_amax if p > 0 else _amin)(_abs(self), axis=axes, keepdims=keepdim)
    if p == 0:
        return sign(_abs(self)).sum(axes, keepdim)
    return _norm(self, p=p, axis=axes, keepdims=keepdim)


def sized(function: Callable) -> Callable:
    """For functions of sizes: f(x, 2, 3), f(x, (2, 3)), or by name."""

    @functools.wraps(function)
    def call(self: Tensor, *args: Any, **named: Any) -> Tensor:
        return function(self, sizes(args or tuple(named.values())))

    return call


@sized
def reshape(self: Tensor, shape: tuple) -> Tensor:
    try:
        return _reshape(self, shape=shape)
    except RuntimeError:
        raise RuntimeError(f"cannot reshape {self.numel()} elements of shape {tuple(self.shape)} "
                           f"to {shape}") from None

@sized
def view(self: Tensor, shape: tuple) -> Tensor:
    """reshape that never copies: an error where the memory does not allow a view."""
    result = reshape(self, shape)
    if result._view is None:
        raise RuntimeError(f"view of shape {shape} would have to copy this tensor, whose "
                           "elements are not in order in memory: use .reshape() or .contiguous()")
    return result

def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if not self.ndim:
        return reshape(self, 1)
    start, end = start_dim % self.ndim, end_dim % self.ndim
    middle = math.prod(self.shape[start : end + 1])
    return reshape(self, *self.shape[:start], middle, *self.shape[end + 1 :])

def unflatten(self: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= self.ndim
    return reshape(self, *self.shape[:dim], *sizes, *self.shape[dim + 1 :])

@sized
def permute(self: Tensor, dims: tuple) -> Tensor:
    return _permute(self, axes=tuple(d % self.ndim for d in dims))

def transpose(self: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(self.ndim))
    if order:
        dim0, dim1 = axes_of(dim0, self.ndim)[0], axes_of(dim1, self.ndim)[0]
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(self, axes=tuple(order))

def squeeze(self: Tensor, dim: Dims = None) -> Tensor:
    axes = axes_of(dim, self.ndim) if dim != () else ()
    return _reshape(self, shape=tuple(n for i, n in enumerate(self.shape)
                                      if n != 1 or i not in axes))

def unsqueeze(self: Tensor, dim: int) -> Tensor:
    if not -self.ndim - 1 <= dim <= self.ndim:
        raise IndexError(f"unsqueeze({dim}) of a tensor of {self.ndim} dimensions")
    dim %= self.ndim + 1
    return _reshape(self, shape=(*self.shape[:dim], 1, *self.shape[dim:]))

@sized
def expand(self: Tensor, shape: tuple) -> Tensor:
    own = (1,) * (len(shape) - self.ndim) + tuple(self.shape)
    return _expand(self, shape=tuple(o if n == -1 else n for n, o in zip(shape, own)))

@sized
def repeat(self: Tensor, counts: tuple) -> Tensor:
    x = reshape(self, (1,) * (len(counts) - self.ndim) + tuple(self.shape))
    paired = [n for pair in zip(counts, x.shape) for n in pair]
    spaced = [n for size in x.shape for n in (1, size)]
    copies = reshape(x, spaced).expand(paired).clone()
    return copies.reshape([c * n for c, n in zip(counts, x.shape)])

def repeat_interleave(self: Tensor, repeats: Any, dim: int | None = None, *,
                      output_size: int | None = None) -> Tensor:
    x, dim = (self.reshape(-1), 0) if dim is None else (self, dim)
    return x.index_select(dim, wrap(np.repeat(np.arange(x.shape[dim]), to_array(repeats))))

def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    tensors = list(tensors)
    if not tensors:
        raise RuntimeError("cat needs at least one tensor")
    # PyTorch lets an empty vector stand for nothing beside tensors of any shape.
    tensors = [t for t in tensors if t.shape != (0,)] or tensors[:1]
    return _cat(*tensors, axis=dim % max(tensors[0].ndim, 1))

def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return cat([unsqueeze(t, dim) for t in tensors], dim)


concat = cat


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat([t.reshape(-1) if t.ndim < 1 else t for t in tensors], int(tensors[0].ndim > 1))

def vstack(tensors: Sequence[Tensor]) -> Tensor:
    return cat([t.reshape(1, -1) if t.ndim < 2 else t for t in tensors], 0)

def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    vectors = list(tensors[0]) if not isinstance(tensors[0], Tensor) else list(tensors)
    order = list(range(len(vectors)))
    if indexing == "xy":  # the first vector runs along the second dimension
        order[:2] = order[1::-1]
    shape = [vectors[k].numel() for k in order]
    return tuple(v.reshape([-1 if k == i else 1 for k in order]).expand(shape)
                 for i, v in enumerate(vectors))

def slices(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """x.unfold(): the slices of this size, each `step` after the last; their elements come
    last."""
    dim = axes_of(dimension, self.ndim)[0]
    if size > self.shape[dim]:
        raise RuntimeError(f"slices of {size} from a dimension of size {self.shape[dim]}")
    found = windows(transpose(self, dim, -1), kernel=(size,), stride=(step,), dilation=(1,))
    return transpose(found, dim, -2)

def split(self: Tensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    total, parts = self.shape[dim], split_size_or_sections
    if isinstance(parts, int):
        parts = [min(parts, total - i) for i in range(0, max(total, 1), parts)]
    if sum(parts) != total:
        raise RuntimeError(f"split sections {list(parts)} do not add up to {total}")
    starts = itertools.accumulate(parts, initial=0)
    return tuple(narrow(self, dim, start, n) for start, n in zip(starts, parts))

def chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return split(self, max(-(-self.shape[dim] // chunks), 1), dim)

def at(self: Tensor, dim: int, index: Any) -> Tensor:
    """x[:, :, index] with as many colons as dim says."""
    return self[(slice(None),) * axes_of(dim, self.ndim)[0] + (index,)]

def narrow(self: Tensor, dim: int, start: Any, length: int) -> Tensor:
    start = int(start) + (self.shape[dim] if start < 0 else 0)
    if not 0 <= start <= start + length <= self.shape[dim]:
        raise RuntimeError(f"elements {start} to {start + length} of a dimension of size "
                           f"{self.shape[dim]}")
    return at(self, dim, slice(start, start + length))

def gather(self: Tensor, dim: int, index: Tensor) -> Tensor:
    if not self.ndim:
        return gather(self.reshape(1), 0, index.reshape(-1)).reshape(index.shape)
    return _gather(self, index=to_array(index), dim=dim % self.ndim)

@scalars_too
def scatter(self: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Tensor:
    src = as_tensor(value if src is None else src, dtype=self.dtype)
    src = src[tuple(slice(n) for n in index.shape)] if src.ndim else src
    return replaced(self, src, index=along(to_array(index), dim % self.ndim))

@scalars_too
def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    src = src[tuple(slice(n) for n in index.shape)]
    return self + scatter_add_to(src, shape=self.shape, index=to_array(index), dim=dim % self.ndim)

def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    mask_array, x = np.broadcast_arrays(to_array(mask), self._array)
    return expand(self, *x.shape)[mask_array]

def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    rows, columns = self.shape[-2:]
    return _where(np.tri(rows, columns, diagonal, dtype=bool), self, False)

def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    rows, columns = self.shape[-2:]
    return _where(np.tri(rows, columns, diagonal - 1, dtype=bool), False, self)

def diag(self: Tensor, diagonal: int = 0) -> Tensor:
    if self.ndim == 2:
        return _diagonal(self, offset=diagonal, dim1=0, dim2=1)
    n = self.shape[0] + abs(diagonal)
    return on_diagonal(self, shape=(n, n), offset=diagonal, dim1=0, dim2=1)

def roll(self: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    if dims is None:
        return roll(self.reshape(-1), shifts, 0).reshape(self.shape)
    return _roll(self, shift=shifts, axis=(dims,) if isinstance(dims, int) else tuple(dims))

@scalars_too
def argsort(self: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    x = self._array
    if descending:  # flipped twice, so that equal elements keep their order
        back = np.flip(np.argsort(np.flip(x, dim), axis=dim, kind="stable"), dim)
        return wrap(x.shape[dim] - 1 - back)
    return wrap(np.argsort(x, axis=dim, kind="stable"))

@scalars_too
def sort(self: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    index = argsort(self, dim, descending)
    return ValuesIndices(gather(self, dim, index), index)

@scalars_too
def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if k > self.shape[dim]:
        raise RuntimeError(f"topk({k}) of a dimension of size {self.shape[dim]}")
    return ValuesIndices(*(narrow(t, dim, 0, k) for t in sort(self, dim, descending=largest)))

def softmax(self: Tensor, dim: int | None = None, dtype: Any = None) -> Tensor:
    return _softmax(self if dtype is None else self.to(dtype), dim=dim_of_classes(self, dim))

def log_softmax(self: Tensor, dim: int | None = None, dtype: Any = None) -> Tensor:
    return _log_softmax(self if dtype is None else self.to(dtype), dim=dim_of_classes(self, dim))

def dim_of_classes(x: Tensor, dim: int | None) -> int:
    if dim is None:
        raise TypeError(f"softmax of a tensor of shape {tuple(x.shape)} needs dim: the one whose "
                        "values shall add up to 1, most often -1")
    return dim

@op(x=lambda g: g)
def _clone(x):
    return x.copy()


# -- indexing --------------------------------------------------------------------------------------


def index_steps(index: Any) -> list[tuple]:
    """An index as NumPy takes it: tensors as arrays, single integers as integers. In two steps
    where integers stand beside arrays: NumPy would count them among the arrays and, if a slice
    stands between, put the arrays' dimensions first; PyTorch does the integers before."""
    first: list[Any] = []  # integers, slices, None and Ellipsis
    then: list[Any] = []  # arrays, in the dimensions that the first step leaves
    for i in index if isinstance(index, tuple) else (index,):
        if isinstance(i, (Tensor, list, np.ndarray, bool)):
            i = to_array(i)
            i = i.astype(np.int64) if not i.size and i.dtype.kind == "f" else i  # []
            if i.dtype.kind not in "iub":
                raise IndexError(f"an index must be of integers or booleans, not {i.dtype}")
        if isinstance(i, np.ndarray) and (i.ndim or i.dtype.kind == "b"):
            first += [slice(None)] * (i.ndim if i.dtype.kind == "b" else 1)
            then.append(i)
            continue
        if isinstance(i, np.ndarray):
            i = int(i)
        elif i is None or i is Ellipsis or isinstance(i, slice):
            then.append(Ellipsis if i is Ellipsis else slice(None))
        first.append(i)
    if not any(isinstance(i, np.ndarray) for i in then):
        return [tuple(first) if Ellipsis in first else (*first, ...)]  # with ... always a view
    if all(i is Ellipsis or i == slice(None) for i in first):
        return [tuple(then)]
    return [tuple(first), tuple(then)]


def getitem(self: Tensor, index: Any) -> Tensor:
    for step in index_steps(index):
        self = _getitem(self, index=step)
    return self


def setitem(self: Tensor, index: Any, value: Any) -> None:
    *views, index = index_steps(index)
    for step in views:
        self = _getitem(self, index=step)
    if not isinstance(value, Tensor):
        value = wrap(np.asarray(value, self.dtype))
    if not any(isinstance(i, np.ndarray) for i in index):
        write(_getitem(self, index=index), value, "an assignment to a slice")
    elif _grad_enabled.get() and (value.requires_grad or edge_of(self) is not None):
        before = wrap(self._array.copy(), edge_of(self))
        write(self, replaced(before, value, index=index), "an assignment to an index", True)
    else:
        self._array[index] = value._array
        touch(self, "an assignment to an index")


# -- methods in place, and all methods -------------------------------------------------------------


def in_place(function: Callable, name: str) -> Callable[..., Tensor]:
    """x.relu_() from relu(x): the new value takes the place of the old.

    While recording, the op works on a copy of x: its derivative may need what we overwrite."""

    def method(self: Tensor, *args: Any, **options: Any) -> Tensor:
        recording = _grad_enabled.get() and any(
            isinstance(x, Tensor) and x.requires_grad for x in (self, *args)
        )
        before = wrap(self._array.copy(), edge_of(self)) if recording else self
        value = function(before, *args, **options)
        if CATEGORY[value.dtype.kind] > CATEGORY[self.dtype.kind]:
            raise RuntimeError(f"{name} would give {value.dtype}, which {self.dtype} cannot hold")
        return write(self, value, name, derived=True)

    return method


def filled(draw: Callable[..., np.ndarray], name: str) -> Callable[..., Tensor]:
    """x.normal_() and its like from a NumPy generator's method."""

    def method(self: Tensor, *args: float, generator: Generator | None = None,
               **named: float) -> Tensor:
        array = np.asarray(draw(rng(generator), self._array.shape, *args, **named))
        return write(self, wrap(array.astype(self.dtype)), name)

    return method


def operator(function: Callable, swapped: bool = False) -> Callable:
    """As a method for Python's operators: others than numbers and arrays get their own turn."""

    short = getattr(function, "short", function)

    def method(self: Tensor, other: Any) -> Any:
        if not isinstance(other, (Tensor, float, int, np.ndarray, np.generic)):
            return NotImplemented
        return function(other, self) if swapped else short(self, other)

    return method


# Ops take their names from here, for error messages.
for _name, _function in list(globals().items()):
    if isinstance(getattr(_function, "op", None), Op):
        _function.op.name = _function.__name__ = _name.strip("_")

METHODS: dict[str, Callable] = {f.__name__: f for f in (
    exp, expm1, log, log1p, log2, log10, sqrt, square, sin, cos, tan, tanh, neg, sign, floor, ceil,
    trunc, isnan, isfinite, isinf, reciprocal, rsqrt, sigmoid, erf, clamp, add, sub, mul, div,
    floor_divide, remainder, fmod, maximum, minimum, logaddexp, eq, ne, lt, le, gt, ge,
    logical_not, logical_and, logical_or, logical_xor, bitwise_not, bitwise_and, bitwise_or,
    bitwise_xor, matmul, norm, reshape, view, flatten, unflatten, permute, transpose, squeeze,
    unsqueeze, expand, repeat, repeat_interleave, split, chunk, narrow, gather, scatter,
    scatter_add, masked_select, tril, triu, diag, roll, sort, argsort, topk, softmax, log_softmax,
    bernoulli, multinomial,
)}  # fmt: skip
METHODS |= {
    "sum": reduction(_sum), "mean": reduction(_mean, floats=True), "prod": reduction(_prod),
    "amax": reduction(_amax), "amin": reduction(_amin), "logsumexp": reduction(_logsumexp),
    "max": extreme(_amax, np.argmax, maximum), "min": extreme(_amin, np.argmin, minimum),
    "argmax": arg_extreme(np.argmax), "argmin": arg_extreme(np.argmin),
    "any": logical(np.any), "all": logical(np.all),
    "var": var, "std": std,
    "cumsum": scalars_too(lambda self, dim, *, dtype=None:
                          _cumsum(self if dtype is None else self.to(dtype), axis=dim)),
    "unbind": lambda self, dim=0: tuple(at(self, dim, i) for i in range(self.shape[dim])),
    "select": lambda self, dim, index: at(self, dim, index),
    "index_select": scalars_too(lambda self, dim, index: at(self, dim, index.reshape(-1))),
    "masked_fill": lambda self, mask, value:
        _where(mask, as_tensor(value, dtype=self.dtype), self),
    "diagonal": lambda self, offset=0, dim1=0, dim2=1:
        _diagonal(self, offset=offset, dim1=dim1 % self.ndim, dim2=dim2 % self.ndim),
    "tile": sized(lambda self, dims: repeat(self, (1,) * (self.ndim - len(dims)) + dims)),
    "flip": sized(lambda self, dims: _flip(self, axis=axes_of(dims, self.ndim)
                                           if dims and self.ndim else ())),
    "abs": _abs, "round": _round, "pow": power, "true_divide": true_divide, "clone": _clone,
    "multiply": mul, "divide": div, "subtract": sub, "negative": neg, "absolute": _abs,
    "arctan2": arctan2, "atan2": arctan2, "clip": clamp, "broadcast_to": expand,
    "mm": product("mm", 2, 2), "bmm": product("bmm", 3, 3), "mv": product("mv", 2, 1),
    "dot": product("dot", 1, 1),
    "outer": lambda self, vec2: self.unsqueeze(1) * vec2.unsqueeze(0),
    "addmm": lambda self, mat1, mat2, *, beta=1, alpha=1:
        self * beta + matmul(mat1, mat2) * alpha,
    "baddbmm": lambda self, batch1, batch2, *, beta=1, alpha=1:
        self * beta + matmul(batch1, batch2) * alpha,
    "lerp": lambda self, end, weight: self + weight * (end - self),
    "isclose": lambda self, other, rtol=1e-5, atol=1e-8, equal_nan=False:
        wrap(np.isclose(to_array(self), to_array(other), rtol, atol, equal_nan)),
    "allclose": lambda self, other, rtol=1e-5, atol=1e-8, equal_nan=False:
        bool(np.allclose(to_array(self), to_array(other), rtol, atol, equal_nan)),
    "equal": lambda self, other: np.array_equal(to_array(self), to_array(other)),
    "numel": lambda self: self._array.size, "detach": Tensor.detach,
    "nonzero": lambda self, *, as_tuple=False:
        where(self) if as_tuple else wrap(np.argwhere(self._array)),
    "t": lambda self: transpose(self, 0, 1) if self.ndim > 1 else self,
    "is_floating_point": lambda self: self.dtype.kind == "f",
}
for _name, _function in METHODS.items():
    if _function.__name__ in ("<lambda>", "method", "multiply"):
        _function.__name__ = _function.__qualname__ = _name
    setattr(Tensor, _name, _function)

for _name in (
    "abs add ceil clamp clip cos div erf exp expm1 floor fmod lerp log log10 log1p log2 "
    "masked_fill mul multiply neg pow reciprocal remainder round rsqrt scatter scatter_add "
    "sigmoid sign sin sqrt square sub tan tanh tril triu trunc floor_divide"
).split():
    setattr(Tensor, _name + "_", in_place(METHODS[_name], _name + "_"))

for _name, _function in {
    "add": _add, "sub": _sub, "mul": mul, "truediv": true_divide, "floordiv": floor_divide,
    "mod": remainder, "pow": power, "matmul": matmul, "and": bitwise_and, "or": bitwise_or,
    "xor": bitwise_xor,
}.items():
    setattr(Tensor, f"__{_name}__", operator(_function))
    setattr(Tensor, f"__r{_name}__", operator(_function, swapped=True))
    setattr(Tensor, f"__i{_name}__", in_place(_function, _name.replace("true", "") + "_"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tensor, f"__{_name}__", operator(METHODS[_name]))

for _name, _value in {  # what exists as methods only
    "__neg__": neg, "__pos__": lambda self: self, "__abs__": _abs, "__invert__": bitwise_not,
    "__getitem__": getitem, "__setitem__": setitem,
    "__float__": lambda self: float(self.item()), "__int__": lambda self: int(self.item()),
    "tolist": lambda self: self._array.tolist(), "dim": lambda self: self._array.ndim,
    "element_size": lambda self: self._array.itemsize, "nelement": METHODS["numel"],
    "is_contiguous": lambda self: self._array.flags.c_contiguous,
    "contiguous": lambda self: self if self._array.flags.c_contiguous else self.clone(),
    "size": lambda self, dim=None: self.shape if dim is None else self._array.shape[dim],
    "cpu": lambda self: self, "pin_memory": lambda self: self, "unfold": slices,
    "cuda": lambda self, device="cuda": self.to(device),
    "type": lambda self, dtype=None: self.to(dtype) if dtype else f"minidist.{self.dtype}",
    "stride": lambda self: tuple(n // self._array.itemsize for n in self._array.strides),
    "fill_": lambda self, value: write(self, as_tensor(value, dtype=self.dtype), "fill_"),
    "copy_": lambda self, source, non_blocking=False: write(self, as_tensor(source), "copy_"),
    "zero_": lambda self: self.fill_(0),
    "normal_": filled(lambda g, shape, mean=0.0, std=1.0: g.normal(mean, std, shape), "normal_"),
    "uniform_": filled(lambda g, shape, a=0.0, b=1.0, **to:
                       g.uniform(to.get("from", a), to.get("to", b), shape), "uniform_"),
    "bernoulli_": filled(lambda g, shape, p=0.5: g.random(shape) < p, "bernoulli_"),
    "where": lambda self, condition, other: where(condition, self, other),
    "expand_as": lambda self, other: expand(self, other.shape),
    "view_as": lambda self, other: view(self, other.shape),
    "reshape_as": lambda self, other: reshape(self, other.shape),
    "type_as": lambda self, other: self.to(other.dtype),
    **{f"new_{name}": new(make) for name, make in {
        "zeros": zeros, "ones": ones, "empty": empty, "full": full, "tensor": tensor}.items()},
    "T": property(lambda self: _permute(self, axes=tuple(reversed(range(self.ndim))))),
    "mT": property(lambda self: transpose(self, -1, -2)),
    "astype": lambda self, dtype: self.to(dtype),
    **{name: functools.partialmethod(Tensor.to, dtype=dtype) for name, dtype in {
        "float": float32, "double": float64, "half": float16, "int": int32, "long": int64,
        "short": int16, "bool": np.dtype(bool)}.items()},
}.items():
    setattr(Tensor, _name, _value)


# -- derivatives of one's own, checks and tools ----------------------------------------------------


class Context:
    """What a Function's forward leaves for its backward."""

    outputs: list[Tensor]  # those that a gradient can reach, and their ids
    ids: list[int]
    joined: np.ndarray  # all of them, end to end
    node: Any  # a weak reference to the Node of the joined outputs
    last: Any = None  # the last gradient that came in, and what backward made of it

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        self.function = function
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        self.kept: tuple = ()
        self.constant: set[int] = set()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.kept = tuple((t, None if t is None else t._storage.version) for t in tensors)

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.constant = {id(o) for o in outputs}

    @property
    def saved_tensors(self) -> tuple:
        for tensor, version in self.kept:
            if tensor is not None and tensor._storage.version != version:
                raise RuntimeError(f"{self.function.__name__} saved a tensor of shape "
                                   f"{tuple(tensor.shape)} that was changed in place since by "
                                   f"{tensor._storage.changed_by}")
        # An output that was saved stands in the graph where the derivative is differentiated.
        return tuple(self.cut(wrap(self.joined, self.node()), self.ids.index(id(t)))
                     if id(t) in self.ids and is_grad_enabled() else t for t, _ in self.kept)

    def cut(self, whole: Tensor, k: int) -> Tensor:
        start = sum(o.numel() for o in self.outputs[:k])
        return whole[start : start + self.outputs[k].numel()].reshape(self.outputs[k].shape)

    def gradients(self, g: Any) -> tuple:
        """backward's results, computed once for all inputs."""
        if self.last is None or self.last[0] is not g:
            whole = g if isinstance(g, Tensor) else wrap(g)
            parts = [self.cut(whole, k) for k in range(len(self.outputs))]
            results = self.function.backward(self, *parts)
            results = results if isinstance(results, tuple) else (results,)
            if len(results) != len(self.needs_input_grad):
                raise RuntimeError(f"{self.function.__name__}.backward returned {len(results)} "
                                   f"gradients for {len(self.needs_input_grad)} inputs")
            if not isinstance(g, Tensor):  # copies: the engine may add into what it gets
                results = tuple(None if r is None else np.array(to_array(r)) for r in results)
            self.last = (g, results)
        return self.last[1]


class Function:
    """An operation with a derivative of one's own: static forward(ctx, ...) and
    backward(ctx, *gradients), called by Function.apply(...)."""

    @classmethod
    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        ctx = Context(cls, args)
        with no_grad():
            results = cls.forward(ctx, *args, **options)
        outputs = results if isinstance(results, tuple) else (results,)
        ctx.outputs = [o for o in outputs if o.dtype.kind == "f" and id(o) not in ctx.constant]
        ctx.ids = [id(o) for o in ctx.outputs]
        if not (is_grad_enabled() and any(ctx.needs_input_grad) and ctx.outputs):
            return results
        # A node has one result. Several travel as one, end to end, and are cut out of it again.
        ctx.joined = np.concatenate([o._array.ravel() for o in ctx.outputs])
        this = Op(lambda *xs: None, {"xs": lambda g, i: ctx.gradients(g)[i]}, {})
        this.name = cls.__name__
        whole = this.recorded(args, args, {}, ctx.joined)
        ctx.node = weakref.ref(whole._edge)
        made = tuple(ctx.cut(whole, ctx.ids.index(id(o))) if id(o) in ctx.ids else o
                     for o in outputs)
        return made if isinstance(results, tuple) else made[0]


def checkpoint(function: Callable, *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """function(*args), whose inner values are computed again in backward instead of kept (Chen et
    al., 2016): memory for time. Random numbers are drawn the same the second time."""
    state = _generator.get().get_state()

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx: Any, anchor: Tensor, *args: Any) -> Any:
            ctx.args = args
            return function(*args, **options)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if is_grad_enabled():
                raise RuntimeError("checkpoint has no second derivatives: call function directly")
            now = _generator.get().get_state()
            _generator.get().set_state(state)
            with enable_grad():
                args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
                        for a in ctx.args]
                results = function(*args, **options)
            _generator.get().set_state(now)
            results = as_tuple(results)
            pairs = [(r, g) for r, g in zip(results, gradients) if r.requires_grad]
            run_backward([r for r, _ in pairs], [g for _, g in pairs], False, False)
            return (None, *(getattr(a, "grad", None) for a in args))

    # The function's parameters are not among its arguments; the anchor makes it be recorded.
    return Checkpoint.apply(zeros(0, requires_grad=True), *args)


def as_tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)

def gradient_rows(y: Tensor, xs: Sequence[Tensor], create_graph: bool = False) -> list[Any]:
    """For each element of y its gradients to the xs: row after row of the Jacobians."""
    if not y.requires_grad:
        return [[zeros_like(x) for x in xs]] * y.numel()
    return [grad(y, xs, one.reshape(y.shape), retain_graph=True, create_graph=create_graph,
                 materialize_grads=True) for one in eye(y.numel(), dtype=y.dtype)]

def jacobian(func: Callable, inputs: Any, create_graph: bool = False) -> Any:
    """d func(inputs)[i] / d inputs[j], of shape (*output, *input), a tuple for several inputs."""
    xs = [x if create_graph else x.detach().requires_grad_() for x in as_tuple(inputs)]
    y = func(*xs)
    rows = gradient_rows(y, xs, create_graph)
    columns = tuple(stack([row[k] for row in rows]).reshape(*y.shape, *x.shape)
                    for k, x in enumerate(xs))
    return columns if isinstance(inputs, tuple) else columns[0]

def hvp(func: Callable, inputs: Any, v: Any) -> tuple[Tensor, Any]:
    """func(inputs) and its Hessian times v, without forming the Hessian (Pearlmutter, 1994)."""
    xs = [x.detach().requires_grad_() for x in as_tuple(inputs)]
    y = func(*xs)
    first = grad(y, xs, create_graph=True, materialize_grads=True)
    along_v: Any = sum((g * w).sum() for g, w in zip(first, as_tuple(v)))
    products = grad(along_v, xs, materialize_grads=True) if along_v.requires_grad else \
        tuple(zeros_like(x) for x in xs)
    return y.detach(), products if isinstance(inputs, tuple) else products[0]


def gradcheck(func: Callable, inputs: Any, eps: float = 1e-6, atol: float = 1e-5,
              rtol: float = 1e-3, raise_exception: bool = True) -> bool:
    """Compare gradients with differences (f(x + eps) - f(x - eps)) / 2 eps, in float64."""
    inputs = as_tuple(inputs)

    def outputs() -> list[Tensor]:
        return [y for y in as_tuple(func(*inputs)) if y.dtype.kind == "f"]

    for k, x in enumerate(inputs):
        if not (isinstance(x, Tensor) and x.requires_grad):
            continue
        if x.dtype != float64:
            raise ValueError(f"gradcheck needs float64, input {k} is {x.dtype}")
        slopes = []
        for i in np.ndindex(x.shape):
            before, sides = x._array[i], []
            for x._array[i] in (before + eps, before - eps):
                with no_grad():
                    sides.append([y._array.ravel().copy() for y in outputs()])
            x._array[i] = before
            slopes.append([(up - down) / (2 * eps) for up, down in zip(*sides)])
        for j, y in enumerate(outputs()):
            exact = np.array([row[0]._array.ravel() for row in gradient_rows(y, [x])])
            numeric = np.array([slope[j] for slope in slopes]).reshape(x.numel(), y.numel()).T
            exact = exact.reshape(numeric.shape)
            if np.allclose(exact, numeric, rtol, atol, equal_nan=True):
                continue
            if not raise_exception:
                return False
            worst = np.unravel_index(np.argmax(np.abs(exact - numeric)), exact.shape)
            raise RuntimeError(f"gradient of output {j} to input {k} differs: at element "
                               f"{worst[0]} to {worst[1]} the derivative is {exact[worst]:.8g}, "
                               f"the difference quotient {numeric[worst]:.8g}")
    return True


def gradgradcheck(func: Callable, inputs: Any, grad_outputs: Any = None, **options: Any) -> bool:
    """gradcheck of the gradient, also with respect to the gradients that flow in."""
    inputs = as_tuple(inputs)
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    seeds = [randn_like(y).requires_grad_() for y in as_tuple(func(*inputs)) if y.requires_grad]

    @enable_grad()
    def gradient(*args: Any) -> tuple:
        ys = [y for y in as_tuple(func(*args[: len(inputs)])) if y.requires_grad]
        return grad(ys, wanted, args[len(inputs):], create_graph=True, materialize_grads=True)

    return gradcheck(gradient, (*inputs, *seeds), **options)


class detect_anomaly(contextlib.ContextDecorator):  # noqa: N801
    """Remember where each op was called, and stop backward at the first NaN, naming the op and
    that line."""

    def __init__(self, check_nan: bool = True) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(_anomaly.get())
        _anomaly.set(True)

    def __exit__(self, *error: object) -> None:
        _anomaly.set(self.before.pop())


def called_from() -> str:
    """The innermost line of the stack that is not of this file."""
    import traceback

    lines = [f for f in traceback.extract_stack() if f.filename != __file__]
    return "".join(traceback.format_list(lines[-1:])).rstrip()


def graph(self: Tensor) -> Graph:
    """The graph behind a tensor, as text in the DOT language of graphviz; a picture in a
    notebook where graphviz is installed."""
    lines, numbers = ["digraph {", "  rankdir=BT; node [shape=box, fontname=monospace]"], {}
    for k, node in enumerate(topological_order(filter(None, [edge_of(self)]))):
        numbers[node] = k
        shape = tuple(node.shape)
        style = ", style=filled" if isinstance(node, Tensor) else ""
        lines.append(f'  n{k} [label="{name_of(node)} {shape}"{style}]')
    for node, k in numbers.items():
        lines += [f"  n{numbers[edge]} -> n{k}" for edge in node.edges if edge is not None]
    return Graph("\n".join([*lines, "}"]))


class Graph(str):
    def _repr_svg_(self) -> str | None:
        import shutil
        import subprocess

        if shutil.which("dot") is None:
            return None
        return subprocess.run(["dot", "-Tsvg"], input=self, text=True, capture_output=True,
                              check=True).stdout


Tensor.graph = graph  # type: ignore[attr-defined]

# -- distributions ---------------------------------------------------------------------------------


class Categorical:
    """One of several classes, by probabilities or by logits in the last dimension."""

    def __init__(self, probs: Any = None, logits: Any = None) -> None:
        if (probs is None) == (logits is None):
            raise ValueError("Categorical takes either probs or logits")
        self.logits = log_softmax(logits, -1) if probs is None else \
            log(clamp(probs / probs.sum(-1, keepdim=True), min=np.finfo(probs.dtype).eps))
        self.probs = softmax(logits, -1) if probs is None else probs / probs.sum(-1, keepdim=True)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = (*sample_shape, *self.probs.shape[:-1])
        edges = np.cumsum(self.probs._array, -1)
        draws = rng().random((*shape, 1)) * edges[..., -1:]
        return wrap((draws >= edges).sum(-1))

    def log_prob(self, value: Tensor) -> Tensor:
        index = value.to(int64).unsqueeze(-1)
        logits = expand(self.logits, *value.shape, self.logits.shape[-1])
        return gather(logits, -1, index).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.probs * self.logits).sum(-1)


class Normal:
    """Normal numbers with mean loc and standard deviation scale."""

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = as_tensor(loc), as_tensor(scale)
        if not (self.scale._array > 0).all():
            raise ValueError("Normal needs a scale above 0")
        self.mean, self.stddev, self.variance = self.loc, self.scale, square(self.scale)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = np.broadcast_shapes(self.loc.shape, self.scale.shape)
        return self.loc + self.scale * randn((*sample_shape, *shape), dtype=self.scale.dtype)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        distance = square((value - self.loc) / self.scale)
        return -distance * 0.5 - log(self.scale) - 0.5 * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        return log(self.scale) + 0.5 + 0.5 * math.log(2 * math.pi)


# =================================================================================================
# 3 Functional
# =================================================================================================
#
# Layers as functions of their input and parameters: minidist.nn.functional, `F` for short.


def with_parameter(function: Callable, name: str, default: Any) -> Callable:
    """Make a further parameter known: help() shows it, and the modules of section 4 take it."""
    signature, kind = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
    parameter = inspect.Parameter(name, kind, default=default)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), parameter])
    return function


# -- fused ops -------------------------------------------------------------------------------------
#
# A layer like layer norm is a composition of ops. Computed one op after the other, each of a dozen
# intermediate results goes out to memory and comes back. A fused op computes the same block by
# block, in arrays that stay in the cache, and so does its derivative. The composition remains: it
# is what the op means, what tests compare with, and what is differentiated for higher orders.


def composed(plain: Callable, residuals: str = "") -> Callable:
    """An op with a formula and a joint derivative that say the same as the composition `plain`:
    a decorator for the derivative, which makes one for the formula.

    The derivative takes (g, needs, ...) and names all that plain takes. Where it is called on
    tensors, for higher derivatives, plain is called on the op's inputs and differentiated."""
    taken = names_of(plain)

    def with_derivative(fast: Callable) -> Callable:
        names = names_of(fast)[2:]

        @functools.wraps(fast)
        def derivative(g: Any, needs: tuple, *values: Any) -> tuple:
            if not isinstance(g, Tensor):
                return fast(g, needs, *values)
            known = dict(zip(names, values))
            # Each input gets a node of its own, at which its gradient ends: two may be the same
            # tensor, or one may have been computed from another.
            inputs = {n: known[n].view(known[n].shape) for n, need in zip(taken, needs) if need}
            found = grad(plain(**{n: inputs.get(n, known[n]) for n in taken}), inputs.values(), g,
                         create_graph=True, allow_unused=True)
            gradients = dict(zip(inputs, found))
            return tuple(gradients.get(n) for n, _ in zip(taken, needs))

        return op(joint=derivative, residuals=dict.fromkeys(residuals.split()), quiet=True)

    return with_derivative


def blocks(n: int, width: int = 1) -> list[slice]:
    """Slices of n rows, each of about 32 K elements: with a few arrays beside it, a block stays
    in a second-level cache. (One after the other: shared out between two threads on two cores,
    beside those of BLAS, the step of bench.py's CNN took 1.2 times as long.)"""
    step = max(1, 2**15 // max(width, 1))
    return [slice(i, i + step) for i in range(0, n, step)]


# -- activations -----------------------------------------------------------------------------------


def activation(function: Callable) -> Callable:
    """The function with PyTorch's argument `inplace`: the result takes the place of the input."""

    position = len(names_of(function)) - 1

    @functools.wraps(function)
    def call(input: Tensor, *args: Any, inplace: bool = False, **options: Any) -> Tensor:
        if inplace or len(args) > position and args[position]:
            return in_place(function, function.__name__ + "_")(input, *args[:position], **options)
        return function(input, *args[:position], **options)

    return with_parameter(call, "inplace", False)


@activation
@op(x=lambda g, out: g * (out > 0))  # at 0 the slope is 0
def relu(x):
    return np.maximum(x, 0)


Tensor.relu, Tensor.relu_ = relu, in_place(relu, "relu_")  # type: ignore[attr-defined]


@activation
@op(x=lambda g, x, negative_slope: g * np.where(x > 0, 1, negative_slope).astype(g.dtype))
def leaky_relu(x, *, negative_slope=0.01):
    return np.where(x > 0, x, x * negative_slope)

@activation
@op(x=lambda g, x, alpha: g * np.where(x > 0, 1, alpha * np.exp(np.minimum(x, 0))))
def elu(x, *, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))

@activation  # flat at the bounds, unlike clamp
@op(x=lambda g, x, min_val, max_val: g * ((x > min_val) & (x < max_val)))
def hardtanh(x, *, min_val=-1.0, max_val=1.0):
    return np.clip(x, x.dtype.type(min_val), x.dtype.type(max_val))

@activation
def relu6(input: Tensor) -> Tensor:
    return hardtanh(input, 0.0, 6.0)

@activation
def selu(input: Tensor) -> Tensor:
    """Klambauer et al., 2017: the constants keep mean 0 and variance 1 through the layers."""
    return elu(input, 1.6732632423543772) * 1.0507009873554805

@activation
def silu(input: Tensor) -> Tensor:
    return input * sigmoid(input)

@activation
def mish(input: Tensor) -> Tensor:
    return input * tanh(_softplus(input))

@op(quiet=True, x=lambda g, x: g * sigmoid(x))
def _softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))  # never overflows

def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, and x itself where that is the same to the last digit."""
    return where(input * beta > threshold, input, _softplus(input * beta) / beta)

def logsigmoid(input: Tensor) -> Tensor:
    return -_softplus(-input)

def softsign(input: Tensor) -> Tensor:
    return input / (_abs(input) + 1)

def gelu_plain(x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        return x * (tanh(x * (1 + x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1) * 0.5
    return x * (erf(x * math.sqrt(0.5)) + 1) * 0.5

@composed(gelu_plain, "slope")
def gelu_to_x(g, needs, x, slope, approximate):
    return (g * slope,)

@gelu_to_x
def _gelu(x, *, approximate):
    """The value and, from the same exponentials, the slope: backward is one product."""
    x = np.asarray(x, order="C")
    out, slope = np.empty_like(x), np.empty_like(x)
    flat = x.reshape(-1), out.reshape(-1), slope.reshape(-1)
    for block in blocks(x.size):
        z, cdf, pdf = (a[block] for a in flat)
        square = z * z
        if approximate == "tanh":
            c = math.sqrt(2 / math.pi)
            np.multiply(square, 0.044715 * c, out=cdf)
            cdf += c
            cdf *= z
            np.tanh(cdf, out=cdf)
            np.multiply(square, 3 * 0.044715 * c, out=pdf)  # the slope of what is in tanh
            pdf += c
            pdf *= (1 - cdf * cdf) * 0.5
            cdf += 1
            cdf *= 0.5
        else:
            square *= -0.5
            np.exp(square, out=pdf)
            pdf *= 1 / math.sqrt(2 * math.pi)
            normal_cdf(z, pdf, out=cdf)
        pdf *= z
        pdf += cdf
        cdf *= z
    return out, slope

def normal_cdf(x: np.ndarray, pdf: np.ndarray, out: np.ndarray) -> None:
    """The probability of a standard normal number below x, beside its density at x. float32:
    Abramowitz and Stegun 26.2.17, within 1e-7, in half the time of the error function."""
    if x.dtype == np.float64:
        out[...] = (erf.op.formula(x * math.sqrt(0.5)) + 1) * 0.5
        return
    t = np.abs(x)
    t *= 0.2316419
    t += 1
    np.reciprocal(t, out=t)
    np.multiply(t, 1.330274429, out=out)
    for coefficient in (-1.821255978, 1.781477937, -0.356563782, 0.319381530):
        out += coefficient
        out *= t
    out *= pdf  # the probability beyond |x|
    np.subtract(0.5, out, out=out)
    np.copysign(out, x, out=out)
    out += 0.5

def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """x times the probability that a standard normal number is below x (Hendrycks and Gimpel,
    2016); approximate="tanh" is the form that GPT-2 was trained with."""
    return _gelu(input, approximate=approximate)

def prelu(input: Tensor, weight: Tensor) -> Tensor:
    if input.ndim < 2:
        weight = weight.reshape((1,) * input.ndim)
    else:
        weight = weight.reshape(-1, *(1,) * (input.ndim - 2))
    return where(input > 0, input, input * weight)

def glu(input: Tensor, dim: int = -1) -> Tensor:
    if input.shape[dim] % 2:
        raise RuntimeError(f"glu halves dimension {dim}, of odd size {input.shape[dim]}")
    a, b = chunk(input, 2, dim)
    return a * sigmoid(b)


# -- linear and convolution ------------------------------------------------------------------------


@op(x=lambda g, w: np.reshape(all_rows(g) @ w, (*g.shape[:-1], w.shape[1])),
    w=lambda g, x: all_rows(g).T @ all_rows(x), b=lambda g: column_sums(g))
def _linear(x, w, b):
    # One op: a product of its own for the bias would cost a pass and a node more.
    out = all_rows(x) @ w.T
    if b is not None:
        out += b
    return out.reshape(*x.shape[:-1], len(w))

def column_sums(x: Any) -> Any:
    """The sum of all rows, as a product with ones: BLAS is 3 to 9 times faster than np.sum."""
    rows = all_rows(x)
    return np.reshape(np.ones((1, len(rows)), x.dtype) @ rows, (rows.shape[1],))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input (..., in) @ weight (out, in) transposed + bias (out)."""
    x, w = input._array, weight._array  # (properties of tensors are a third of a small step)
    if x.shape[-1] != w.shape[-1]:
        raise RuntimeError(f"linear takes {w.shape[-1]} features in the last dimension, the "
                           f"input has shape {x.shape}")
    if w.ndim != 2 or x.dtype != w.dtype:  # a vector; an error that says more
        out = matmul(input, weight.T)
        return out if bias is None else out + bias
    return _linear(input, weight, bias)

def numbers(value: Any, n: int) -> tuple[int, ...]:
    """One number for all dimensions, or one for each."""
    values = (int(value),) if isinstance(value, (int, np.integer)) else tuple(value)
    return values * n if len(values) == 1 else values

def padded(x: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Widen the last dimensions by (before, after)."""
    if not any(a or b for a, b in widths):
        return x
    return _pad(x, widths=((0, 0),) * (x.ndim - len(widths)) + tuple(widths), value=value)


def batched(n: int, name: str) -> Callable[[Callable], Callable]:
    """For functions of (batch, channels, n sizes): one sample without the batch will do, too."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(input: Tensor, *args: Any, **options: Any) -> Any:
            if input.ndim != n + 1:
                return function(input, *args, **options)
            out = function(input.unsqueeze(0), *args, **options)
            return tuple(o.squeeze(0) for o in out) if isinstance(out, tuple) else out.squeeze(0)

        call.__name__ = call.__qualname__ = name
        return call

    return decorate


# Convolution is a product: the kernels as rows, times every window of the images as a column
# (im2col). It is linear in the images and in the kernels, and so are its two derivatives: each of
# the three ops below has the other two as its own, and no more rules are needed for any order.
#
# The columns are as many times larger than the images as a kernel has places. So they are made
# for a few images at a time, which stay in the cache until the product has used them, and anew in
# backward. And a window of 3 x 3 is not copied as nine elements: columns hold its rows of three,
# and the kernel's three rows meet the same memory, each a row of the image further on, in products
# that are added up (a convolution of 32 channels: 0.7 of the time of nine).


class Windows(NamedTuple):
    """The geometry of a convolution; one number for each dimension of the images."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after; below 0 cuts away
    dilation: tuple[int, ...]
    groups: int

    @property
    def span(self) -> tuple[int, ...]:
        """From a window's first place to its last."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation))

    def places(self, size: Sequence[int]) -> tuple[int, ...]:
        return tuple((n + a + b - span) // s + 1 for n, s, (a, b), span in
                     zip(size, self.stride, self.padding, self.span))

    def inside(self, size: Sequence[int]) -> tuple[Any, ...]:
        """Where images lie in padded ones."""
        return tuple(slice(a, a + n) for n, (a, _) in zip(size, self.padding))

    def shown(self, size: Sequence[int]) -> tuple[Any, ...]:
        """What of images lies in padded ones: less than all only for padding below 0."""
        return tuple(slice(0, n + min(b, 0)) for n, (_, b) in zip(size, self.padding))

    def shifted(self, channels: int) -> int:
        """How many of the kernel's dimensions, from the first, columns do not hold: all but the
        last, unless its products would be too thin."""
        thin = self.kernel[-1] * channels < 32
        return 0 if thin else len(self.kernel) - 1

    def columns(self, x: np.ndarray) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """For some images at a time, and for each offset in the kernel's shifted dimensions, what
        all windows show there: (groups, rest of the kernel * channels / groups, places)."""
        batch, channels, *size = x.shape
        inner = channels // self.groups
        m, places = self.shifted(inner), self.places(size)
        wide = [n + a + b for n, (a, b) in zip(size, self.padding)]
        how = (wide, self.kernel, self.stride, self.dilation)
        first = list(kth_elements(*(numbers[:m] for numbers in how)))
        last = list(kth_elements(*(numbers[m:] for numbers in how)))
        one = self.groups * len(last) * inner * math.prod((*wide[:m], *places[m:]))
        step = max(1, min(batch, 2**17 // max(one, 1)))
        images = np.zeros((self.groups, inner, *wide[:m], step, *wide[m:]), x.dtype)
        rows = np.empty((self.groups, len(last), inner, *wide[:m], step, *places[m:]), x.dtype)
        inside, before = self.inside(size), (slice(None),) * (2 + m)
        for start in range(0, batch, step):
            part = self.joined(x[start : start + step][(..., *self.shown(size))], inner)
            n = part.shape[2 + m]
            framed, copies = images[(*before, slice(n))], rows[(slice(None), *before, slice(n))]
            framed[(..., *inside[:m], slice(None), *inside[m:])] = part
            for k, where in enumerate(last):
                copies[:, k] = framed[where]
            yield slice(start, start + n), [
                copies[(slice(None), slice(None), slice(None), *where)].reshape(
                    self.groups, len(last) * inner, n * math.prod(places)) for _, *where in first]

    def joined(self, x: np.ndarray, inner: int) -> np.ndarray:
        """A view of images (batch, channels, *places) in the order of `columns`: (groups,
        channels / groups, *shifted places, batch, *others)."""
        x = x.reshape(len(x), self.groups, x.shape[1] // self.groups, *x.shape[2:])
        axes = list(range(1, x.ndim))
        axes.insert(2 + self.shifted(inner), 0)
        return x.transpose(axes)

    def matrices(self, w: np.ndarray) -> np.ndarray:
        """Kernels (out, in / groups, *kernel) for each shifted offset: (offsets, groups,
        out / groups, rest of the kernel * in / groups)."""
        first = math.prod(self.kernel[: self.shifted(w.shape[1])])
        w = w.reshape(self.groups, len(w) // self.groups, w.shape[1], first, -1)
        return w.transpose(3, 0, 1, 4, 2).reshape(first, *w.shape[:2], -1)

    def kernels(self, matrices: np.ndarray, inner: int) -> np.ndarray:
        """matrices turned back."""
        first, groups, out, _ = matrices.shape
        w = matrices.reshape(first, groups, out, -1, inner).transpose(1, 2, 4, 0, 3)
        return w.reshape(groups * out, inner, *self.kernel)


def kth_elements(size: Sequence[int], kernel: Any, stride: Any, dilation: Any) -> Iterator[tuple]:
    """For each place in the kernel the index of what all windows show there, a strided view."""
    places = [(m - (k - 1) * d - 1) // s + 1 for m, k, s, d in zip(size, kernel, stride, dilation)]
    for offset in np.ndindex(*kernel):
        yield (..., *(slice(k * d, k * d + (p - 1) * s + 1, s)
                      for k, d, p, s in zip(offset, dilation, places, stride)))

@op(x=lambda g, w, x_shape, how: _conv_to_input(g, w, size=x_shape[2:], how=how),
    w=lambda g, x, how: _conv_to_weight(g, x, how=how),
    b=lambda g: channel_sums(g))
def _conv(x, w, b, *, how):
    out = np.empty((len(x), len(w), *how.places(x.shape[2:])), x.dtype)
    matrices = how.matrices(w)
    for block, columns in how.columns(x):
        total = matrices[0] @ columns[0]
        for k in range(1, len(matrices)):
            total += matrices[k] @ columns[k]
        if b is not None:
            total += b.reshape(how.groups, -1, 1)
        part = how.joined(out[block], w.shape[1])
        part[...] = total.reshape(part.shape)
    return out

@op(g=lambda u, w, how: _conv(u, w, None, how=how),
    w=lambda u, g, how: _conv_to_weight(g, u, how=how))
def _conv_to_input(g, w, *, size, how):
    """Spread the gradient of each place over the window that it saw."""
    n, groups, places = len(size), how.groups, g.shape[2:]
    channels = w.shape[1] * groups
    if set(how.stride) == {1} and math.prod(size) * len(w) <= 4 * math.prod(places) * channels:
        # Turned round: each element sums what the places around it got, by the kernels mirrored.
        # Another convolution, whose columns are copied seven times faster than they are added up.
        padding = tuple((s - 1 - a, s - 1 - b) for s, (a, b) in zip(how.span, how.padding))
        if min(map(min, padding)) >= 0:
            turned = np.flip(w, tuple(range(2, 2 + n)))
            turned = turned.reshape(groups, -1, *w.shape[1:]).swapaxes(1, 2)
            return _conv.op.formula(g, turned.reshape(channels, -1, *how.kernel), None,
                                    how=how._replace(padding=padding))
    out = np.zeros((len(g), channels, *size), g.dtype)
    wide = tuple(m + a + b for m, (a, b) in zip(size, how.padding))
    offsets = list(kth_elements(wide, how.kernel, how.stride, how.dilation))
    rows = w.reshape(groups, -1, w.shape[1], len(offsets)).transpose(0, 3, 2, 1)
    rows = rows.reshape(groups, len(offsets) * w.shape[1], len(w) // groups)
    step = max(1, 2**20 // max(math.prod(places) * channels * len(offsets), 1))
    for start in range(0, len(g), step):
        block = slice(start, start + step)
        part = g[block]
        columns = rows @ part.reshape(len(part), groups, -1, math.prod(places))
        columns = columns.reshape(-1, groups, len(offsets), w.shape[1], *places)
        images = np.zeros((len(columns), groups, w.shape[1], *wide), g.dtype)
        for k, where in enumerate(offsets):
            images[where] += columns[:, :, k]
        images = images.reshape(-1, channels, *wide)
        out[(block, ..., *how.shown(size))] = images[(..., *how.inside(size))]
    return out

@op(g=lambda u, x, how: _conv(x, u, None, how=how),
    x=lambda u, g, x_shape, how: _conv_to_input(g, u, size=x_shape[2:], how=how))
def _conv_to_weight(g, x, *, how):
    inner = x.shape[1] // how.groups
    total = how.matrices(np.zeros((g.shape[1], inner, *how.kernel), x.dtype))
    for block, columns in how.columns(x):
        part = how.joined(g[block], inner).reshape(*total.shape[1:3], -1)
        for k, shown in enumerate(columns):
            total[k] += part @ shown.swapaxes(-1, -2)
    return how.kernels(total, inner)

def channel_sums(x: Any) -> Any:
    """Sums over all but the channels of (batch, channels, ...), by a product with ones."""
    n = math.prod(x.shape[2:])
    sums = np.reshape(x, (x.shape[0] * x.shape[1], n)) @ np.ones((n, 1), x.dtype)
    return np.sum(np.reshape(sums, x.shape[:2]), axis=0)


def convolution(n: int) -> Callable[..., Tensor]:
    @batched(n, f"conv{n}d")
    def conv(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
             padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Tensor:
        """Cross-correlation of input (batch, in, *size) with weight (out, in / groups, *kernel).

        The result has floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1 places
        in each dimension. padding="same" keeps the size at stride 1, "valid" adds none."""
        how = Windows(tuple(weight.shape[2:]), numbers(stride, n), (), numbers(dilation, n), groups)
        if input.ndim != n + 2 or input.shape[1] != weight.shape[1] * groups:
            raise RuntimeError(
                f"conv{n}d with a weight of shape {tuple(weight.shape)} and groups={groups} takes "
                f"inputs (batch, {weight.shape[1] * groups}, {n} sizes), this one has shape "
                f"{tuple(input.shape)}"
            )
        if weight.shape[0] % groups:
            raise RuntimeError(f"{weight.shape[0]} output channels do not divide into {groups} "
                               "groups")
        if padding == "same":
            if set(how.stride) != {1}:
                raise RuntimeError("padding='same' needs stride 1")
            widths = tuple(((s - 1) // 2, s // 2) for s in how.span)
        else:
            widths = tuple((p, p) for p in numbers(0 if padding == "valid" else padding, n))
        how = how._replace(padding=widths)
        if min(how.places(input.shape[2:])) < 1:
            raise RuntimeError(f"the kernel spans {how.span}, more than the padded input's "
                               f"{tuple(m + a + b for m, (a, b) in zip(input.shape[2:], widths))}")
        return _conv(input, weight, bias, how=how)

    return conv


def transposed_convolution(n: int) -> Callable[..., Tensor]:
    @batched(n, f"conv_transpose{n}d")
    def conv_transpose(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                       padding: Any = 0, output_padding: Any = 0, groups: int = 1,
                       dilation: Any = 1) -> Tensor:
        """The adjoint of convolution: input (batch, in, *size), weight (in, out / groups,
        *kernel)."""
        extra, padding = numbers(output_padding, n), numbers(padding, n)
        how = Windows(tuple(weight.shape[2:]), numbers(stride, n),
                      tuple((p, p - e) for p, e in zip(padding, extra)),
                      numbers(dilation, n), groups)
        if input.ndim != n + 2 or input.shape[1] != weight.shape[0]:
            raise RuntimeError(f"conv_transpose{n}d with a weight of shape {tuple(weight.shape)} "
                               f"takes inputs (batch, {weight.shape[0]}, {n} sizes), this one has "
                               f"shape {tuple(input.shape)}")
        if any(e >= max(s, d) for e, s, d in zip(extra, how.stride, how.dilation)):
            raise RuntimeError(f"output_padding {extra} must be smaller than stride or dilation")
        size = tuple((m - 1) * s + span - a - b for m, s, span, (a, b) in
                     zip(input.shape[2:], how.stride, how.span, how.padding))
        return per_channel(_conv_to_input(input, weight, size=size, how=how), None, bias)

    return conv_transpose


conv1d, conv2d = convolution(1), convolution(2)
conv_transpose1d, conv_transpose2d = transposed_convolution(1), transposed_convolution(2)


# -- pooling ---------------------------------------------------------------------------------------
#
# Pooling compares the first, second, third ... elements of all windows, each a strided view of
# the input: a dozen times faster than windows one by one.


@op(residuals={"index": None}, x=lambda g, x_shape, index, kernel, stride, dilation:
    unpicked(g, index=to_array(index), size=x_shape[2:], kernel=kernel, stride=stride,
             dilation=dilation))
def _max_pool(x, *, kernel, stride, dilation):
    first, *others = kth_elements(x.shape[2:], kernel, stride, dilation)
    out = x[first].copy()
    index = np.zeros(out.shape, np.min_scalar_type(len(others)))  # which one won
    for k, where in enumerate(others, 1):
        other = x[where].copy()  # three times faster than to read a strided view thrice
        larger = other > out
        if x.dtype.kind == "f":
            larger |= other != other  # NaN wins
        np.maximum(out, other, out=out)
        np.maximum(index, larger * index.dtype.type(k), out=index)
    return out, index

@op(g=lambda u, index, kernel, stride, dilation:
    picked(u, index=index, kernel=kernel, stride=stride, dilation=dilation))
def unpicked(g, *, index, size, kernel, stride, dilation):
    """Each gradient goes to the element that won its window."""
    out = np.zeros((*g.shape[:2], *size), g.dtype)
    apart = all(s >= k and d == 1 for s, k, d in zip(stride, kernel, dilation))
    for k, where in enumerate(kth_elements(size, kernel, stride, dilation)):
        if apart:
            np.multiply(g, index == k, out=out[where])  # half the time of adding to zeros
        else:
            out[where] += g * (index == k)
    return out

@op(x=lambda g, x_shape, index, kernel, stride, dilation:
    unpicked(g, index=index, size=x_shape[2:], kernel=kernel, stride=stride, dilation=dilation))
def picked(x, *, index, kernel, stride, dilation):
    out = np.zeros(index.shape, x.dtype)
    for k, where in enumerate(kth_elements(x.shape[2:], kernel, stride, dilation)):
        np.copyto(out, x[where], where=index == k)
    return out


def pooled(input: Tensor, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any,
           ceil_mode: bool, fill: Any) -> tuple[Tensor, dict[str, tuple], tuple]:
    """The padded input of a pooling layer, its windows, and the padding for each dimension.

    ceil_mode rounds the number of places up, but a window must start inside the input or its
    left padding."""
    kernel, dilation, padding = numbers(kernel, n), numbers(dilation, n), numbers(padding, n)
    stride = kernel if stride is None or stride == () else numbers(stride, n)
    if any(2 * p > k for p, k in zip(padding, kernel)):
        raise RuntimeError(f"padding {padding} should be at most half of the kernel {kernel}")
    widths: list[tuple[int, int]] = []
    for size, k, s, p, d in zip(input.shape[-n:], kernel, stride, padding, dilation):
        reach = size + 2 * p - d * (k - 1) - 1
        if reach < 0 and not ceil_mode or reach + s < 0:
            raise RuntimeError(f"a pooling window of {k} does not fit into an input of size {size}")
        places = reach // s + 1
        if ceil_mode and reach % s and places * s < size + p:
            places += 1
        widths.append((p, max(p, (places - 1) * s + d * (k - 1) + 1 - size - p)))
    return (padded(input, widths, fill),
            {"kernel": kernel, "stride": stride, "dilation": dilation}, padding)


def max_pooling(n: int) -> Callable[..., Any]:
    @batched(n, f"max_pool{n}d")
    def max_pool(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
                 dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False) -> Any:
        """The largest element of each window; padding never wins. Indices count the elements of
        a channel of the input."""
        lowest = -math.inf if input.dtype.kind == "f" else np.iinfo(input.dtype).min
        x, how, padding = pooled(input, n, kernel_size, stride, padding, dilation, ceil_mode,
                                 lowest)
        out = _max_pool(x, **how)
        if not return_indices:
            return out
        size = input.shape[2:]
        number = np.broadcast_to(np.arange(math.prod(size)).reshape(size), input.shape)
        widths = [(p, wide - p - own) for p, wide, own in zip(padding, x.shape[2:], size)]
        index = _max_pool.op.formula(x._array, **how)[1]
        return out, wrap(picked(padded(wrap(number), widths)._array, index=index, **how))

    return max_pool


def avg_pooling(n: int) -> Callable[..., Tensor]:
    def avg_pool(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
                 ceil_mode: bool = False, count_include_pad: bool = True,
                 divisor_override: int | None = None) -> Tensor:
        """The mean of each window. Padding counts as zeros, or not at all."""
        x, how, padding = pooled(input, n, kernel_size, stride, padding, 1, ceil_mode, 0)
        total = windows(x, **how).sum(tuple(range(-n, 0)))
        # Elements that ceil_mode added past the padding never count.
        edges = padding if count_include_pad else (0,) * n
        inside = np.zeros(x.shape[-n:], input.dtype)
        inside[tuple(slice(p - e, p + size + e) for p, e, size in
                     zip(padding, edges, input.shape[-n:]))] = 1
        counts = wrap(windows(inside, **how).sum(tuple(range(-n, 0)), dtype=input.dtype))
        return div(total, divisor_override or counts,
                   rounding_mode=None if input.dtype.kind == "f" else "trunc")

    avg_pool.__name__ = f"avg_pool{n}d"
    return avg_pool


def resized(input: Tensor, dim: int, shares: np.ndarray) -> Tensor:
    """Each place of the result along dim is a weighted sum of input's: a product with a matrix."""
    return transpose(matmul(transpose(input, dim, -1), wrap(shares.astype(input.dtype))), dim, -1)

def spans(n: int, size: int) -> np.ndarray:
    """(n, size): column i holds the mean over floor(i n / size) .. ceil((i + 1) n / size)."""
    place, i = np.arange(n)[:, None], np.arange(size)
    inside = (place >= i * n // size) & (place < -(-(i + 1) * n // size))
    return inside / inside.sum(0)


def adaptive_avg_pooling(n: int) -> Callable[..., Tensor]:
    def pool(input: Tensor, output_size: Any) -> Tensor:
        """Means of output_size windows that cover the input as evenly as whole numbers allow."""
        for dim, size in zip(range(-n, 0), numbers((output_size,) if output_size is None
                                                   else output_size, n)):
            input = input if size is None else resized(input, dim, spans(input.shape[dim], size))
        return input

    pool.__name__ = f"adaptive_avg_pool{n}d"
    return pool


max_pool1d, max_pool2d = max_pooling(1), max_pooling(2)
avg_pool1d, avg_pool2d = avg_pooling(1), avg_pooling(2)
adaptive_avg_pool1d, adaptive_avg_pool2d = adaptive_avg_pooling(1), adaptive_avg_pooling(2)


# -- normalisation, dropout, embedding -------------------------------------------------------------


def standardized(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    """(x - mean) / sqrt(variance + eps) over the axes."""
    x = x - np.mean(x, axis=axes, keepdims=True)  # two passes: E[x^2] - E[x]^2 cancels
    return x * rsqrt(np.mean(x * x, axis=axes, keepdims=True) + eps)

def per_channel(out: Any, weight: Any, bias: Any) -> Any:
    """out (batch, channels, ...) * weight (channels) + bias (channels)."""
    shape = (-1, *(1,) * (out.ndim - 2))
    out = out if weight is None else out * np.reshape(weight, shape)
    return out if bias is None else out + np.reshape(bias, shape)


# The derivative of both norms below, for out = (x - mean) * scale: mean and scale follow x, which
# takes away what of the gradient lies along the ones and along out,
#     scale * (g - mean(g) - out * mean(g * out)).
# Sums along rows are products with ones, sums of squares np.vecdot: 3 to 9 times np.sum's speed.


@composed(lambda x, w, b, mean, scale, eps:
          per_channel(standardized(x, (0, *range(2, x.ndim)), eps), w, b))
def batch_norm_backward(g, needs, x, w, b, mean, scale, eps):
    dx, n = np.empty(x.shape, x.dtype), x.size // x.shape[1]
    x, g, out = (a.reshape(*x.shape[:2], -1) for a in (x, g, dx))
    along_ones = channel_sums(g)[:, None]
    along_out = scale * sum(np.vecdot(g[block], x[block] - mean).sum(0)
                            for block in blocks(len(x), x[0].size))[:, None]
    factor = scale if w is None else scale * w[:, None]
    slope, shift = -factor * scale * along_out / n, -factor * along_ones / n
    for block in blocks(len(x), x[0].size) if needs[0] else ():
        part, distance = out[block], x[block] - mean
        distance *= slope
        np.multiply(g[block], factor, out=part)
        part += distance
        part += shift
    results = dx, along_out[:, 0], along_ones[:, 0]
    return tuple(r if need else None for r, need in zip(results, needs))

@batch_norm_backward
def _batch_norm(x, w, b, *, mean, scale, eps):
    out = np.empty(x.shape, x.dtype)
    x, result = (a.reshape(*x.shape[:2], -1) for a in (x, out))
    factor = scale if w is None else scale * w[:, None]
    for block in blocks(len(x), x[0].size):
        part = result[block]
        np.subtract(x[block], mean, out=part)
        part *= factor
        if b is not None:
            part += b[:, None]
    return out

def channel_variance(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    x, total = x.reshape(*x.shape[:2], -1), np.zeros(x.shape[1], x.dtype)
    for block in blocks(len(x), x[0].size):
        distance = x[block] - mean[:, None]
        total += np.vecdot(distance, distance).sum(0)
    return total / (len(x) * x.shape[2])


def batch_norm(input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
               weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
               momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    """Normalise each channel of input (batch, channels, ...) over everything else.

    In training by the batch's own mean and (biased) variance, while the running statistics
    follow the mean and the unbiased variance; else by the running statistics (Ioffe and
    Szegedy, 2015)."""
    if not training and running_mean is not None and running_var is not None:
        scale = rsqrt(running_var + eps)
        scale = scale if weight is None else scale * weight
        shift = -running_mean * scale
        return per_channel(input, scale, shift if bias is None else shift + bias)
    n = count(input.shape, (0, *range(2, input.ndim)))
    if n == 1:
        raise ValueError(f"batch norm in training needs more than one value a channel, the "
                         f"input has shape {tuple(input.shape)}: use a larger batch or eval()")
    if n == 0:
        return per_channel(input, weight, bias)
    x = input._array
    mean = channel_sums(x) / n
    var = channel_variance(x, mean)
    for running, value in ((running_mean, mean), (running_var, var * (n / (n - 1)))):
        if running is not None:
            running._array += (value - running._array) * momentum
            touch(running, "batch norm")
    return _batch_norm(input, weight, bias, mean=mean[:, None], eps=eps,
                       scale=(1 / np.sqrt(var + eps))[:, None])


@composed(lambda x, w, b, eps: scaled(standardized(x, (x.ndim - 1,), eps), w, b), "mean scale")
def layer_norm_backward(g, needs, x, w, b, eps, mean, scale):
    dx, n = np.empty(x.shape, x.dtype), x.shape[-1]
    rows, gradients, result = all_rows(x), all_rows(g), all_rows(dx)
    weight = np.ones((n, 1), x.dtype) if w is None else w[:, None]
    dw, db = np.zeros((2, n), x.dtype)
    for block in blocks(*rows.shape):
        part, distance, s, g = result[block], rows[block] - mean[block], scale[block], \
            gradients[block]
        product = g * distance  # out is distance * s; the products below scale it, in fewer passes
        dw += (s.T @ product)[0]
        db += column_sums(g)
        np.multiply(g, weight.T, out=part)
        distance *= product @ weight * (s * s / n)
        part -= distance
        part -= g @ weight / n
        part *= s
    return tuple(r if need else None for r, need in zip((dx, dw, db), needs))

@layer_norm_backward
def _layer_norm(x, w, b, *, eps):
    out, n = np.empty(x.shape, x.dtype), x.shape[-1]
    rows, result, ones = all_rows(x), all_rows(out), np.ones((n, 1), x.dtype)
    mean, scale = np.empty((2, len(rows), 1), x.dtype)
    for block in blocks(*rows.shape):
        part = result[block]
        mean[block] = rows[block] @ ones / n
        np.subtract(rows[block], mean[block], out=part)
        scale[block] = 1 / np.sqrt(np.vecdot(part, part)[:, None] / n + eps)
        part *= scale[block]
        if w is not None:
            part *= w
        if b is not None:
            part += b
    return out, mean, scale

def scaled(out: Any, weight: Any, bias: Any) -> Any:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def instance_norm(input: Tensor, running_mean: Tensor | None = None,
                  running_var: Tensor | None = None, weight: Tensor | None = None,
                  bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
                  eps: float = 1e-5) -> Tensor:
    """Normalise each channel of each sample by itself: batch norm in which each is a channel."""
    n, channels = input.shape[:2]
    stats = [None if s is None else repeat(s, n) for s in (running_mean, running_var)]
    out = batch_norm(input.reshape(1, n * channels, *input.shape[2:]), stats[0], stats[1],
                     training=use_input_stats, momentum=momentum, eps=eps)
    for running, moved in zip((running_mean, running_var), stats):
        if running is not None and moved is not None and use_input_stats:
            running.data.copy_(moved.reshape(n, channels).mean(0))
    return per_channel(out.reshape(input.shape), weight, bias)


def layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
               bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise over the last dimensions, which have the given shape (Ba et al., 2016)."""
    shape = numbers(normalized_shape, 1)
    if tuple(input.shape[-len(shape):]) != shape:
        raise RuntimeError(f"layer_norm over {shape} got an input of shape {tuple(input.shape)}")
    if len(shape) == 1:
        return _layer_norm(input, weight, bias, eps=eps)
    rows = input.flatten(-len(shape))
    weight, bias = (None if p is None else p.reshape(-1) for p in (weight, bias))
    return _layer_norm(rows, weight, bias, eps=eps).reshape(input.shape)

def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None,
               bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise groups of channels of each sample (Wu and He, 2018)."""
    n, channels, *size = input.shape
    if channels % num_groups:
        raise RuntimeError(f"{channels} channels do not divide into {num_groups} groups")
    grouped = input.reshape(n, num_groups, channels // num_groups * math.prod(size))
    return per_channel(_layer_norm(grouped, None, None, eps=eps).reshape(input.shape), weight, bias)

def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
             eps: float | None = None) -> Tensor:
    """Divide by the root mean square (Zhang and Sennrich, 2019)."""
    axes = tuple(range(-len(numbers(normalized_shape, 1)), 0))
    eps = float(np.finfo(input.dtype).eps) if eps is None else eps
    out = input * rsqrt(square(input).mean(axes, keepdim=True) + eps)
    return out if weight is None else out * weight

def normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Tensor:
    return input / clamp(norm(input, p, dim, keepdim=True), min=eps)

def check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability must be between 0 and 1, not {p}")

def drop(input: Tensor, shape: Sequence[int], p: float, training: bool) -> Tensor:
    """Zero with probability p and scale what is left by 1 / (1 - p), in training; one draw for
    each element of the shape, which broadcasts to the input's."""
    check_probability(p)
    if not training or p == 0:
        return input
    mask = rng().random(shape, np.float32) >= p  # drawn outside the op: rules are pure
    return input * wrap(mask * input.dtype.type(1 / (1 - p) if p < 1 else 0))

@activation
def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return drop(input, input.shape, p, training)

@activation
def dropout2d(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Dropout of whole channels."""
    kept = max(input.ndim - 2, 1)
    return drop(input, (*input.shape[:kept], *(1,) * (input.ndim - kept)), p, training)


@op(w=lambda g, w_shape, index: sum_rows(g, index=index, count=w_shape[0]))
def _rows(w, *, index):
    return np.take(w, index, axis=0)

@op(g=lambda u, index: _rows(u, index=index))
def sum_rows(g, *, index, count):
    """What _rows is the adjoint of. Sorted by row, so that each is summed in one go: twenty times
    faster than np.add.at."""
    out = np.zeros((count, g.shape[-1]), g.dtype)
    order = np.argsort(index, axis=None, kind="stable")
    if len(order):
        rows, starts = np.unique(index.reshape(-1)[order], return_index=True)
        out[rows] = np.add.reduceat(all_rows(g)[order], starts, axis=0)
    return out

def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of weight (words, width) by index. The padding row gets no gradient."""
    if input.dtype.kind not in "iu":
        raise TypeError(f"embedding takes integer indices, not {input.dtype}")
    indices = input._array
    if indices.size and not (0 <= indices.min() and indices.max() < weight.shape[0]):
        raise IndexError(f"embedding indices run from {indices.min()} to {indices.max()}, the "
                         f"table has rows 0 to {weight.shape[0] - 1}")
    rows = _rows(weight, index=indices)
    if padding_idx is None:
        return rows
    padding = (indices == padding_idx % weight.shape[0])[..., None]
    return where(padding, rows.detach(), rows)


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    classes = int(input._array.max()) + 1 if num_classes < 0 else num_classes
    if input.numel() and not (0 <= input._array.min() and input._array.max() < classes):
        raise RuntimeError(f"one_hot of values from {input._array.min()} to {input._array.max()} "
                           f"in {classes} classes: they count from 0")
    return wrap((input._array[..., None] == np.arange(classes)).astype(np.int64))


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant",
        value: float | None = None) -> Tensor:
    """Widen the last dimensions by constants: pad = (left, right, top, bottom, ...)."""
    if mode != "constant":
        raise ValueError(f"pad mode {mode!r} is not available: 'constant' is")
    pairs = list(zip(pad[::2], pad[1::2]))[::-1]
    for dim, (left, right) in zip(range(-len(pairs), 0), pairs):  # negative widths cut away
        start = max(-left, 0)
        input = narrow(input, dim, start, input.shape[dim] - start - max(-right, 0))
    return padded(input, [(max(a, 0), max(b, 0)) for a, b in pairs], value or 0)


# -- images and distances --------------------------------------------------------------------------


def interpolate(input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
                align_corners: bool | None = None,
                recompute_scale_factor: bool | None = None) -> Tensor:
    """Resize the last dimensions. Each is a product with a matrix of shares: one 1 a column for
    nearest, two neighbours by distance for (bi)linear."""
    n = input.ndim - 2
    if mode not in ("nearest", "linear", "bilinear"):
        raise ValueError(f"interpolate mode {mode!r} is not available: nearest, linear, bilinear")
    factors = [None] * n if scale_factor is None else \
        [scale_factor] * n if isinstance(scale_factor, (int, float)) else list(scale_factor)
    targets = [int(m * f) for m, f in zip(input.shape[2:], factors)] if size is None else \
        numbers(size, n)
    for dim, target, factor in zip(range(2, input.ndim), targets, factors):
        source, i = input.shape[dim], np.arange(target)
        step = 1 / factor if factor and not recompute_scale_factor else source / target
        if mode == "nearest":
            place = np.minimum(np.floor(i * step), source - 1)
        elif align_corners:
            place = i * ((source - 1) / max(target - 1, 1))
        else:
            place = np.clip((i + 0.5) * step - 0.5, 0, source - 1)
        distance = np.abs(np.arange(source)[:, None] - place)
        input = resized(input, dim, np.clip(1 - distance, 0, None))
    return input


@batched(2, "unfold")
def unfold(input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0,
            stride: Any = 1) -> Tensor:
    """Windows of images as columns: (batch, channels * kh * kw, places)."""
    kernel, dilation, padding, stride = (numbers(v, 2) for v in
                                         (kernel_size, dilation, padding, stride))
    view = windows(padded(input, [(p, p) for p in padding]), kernel=kernel, stride=stride,
                   dilation=dilation)
    batch, channels, *places = view.shape[:4]
    return permute(view, 0, 1, 4, 5, 2, 3).reshape(batch, channels * math.prod(kernel),
                                                   math.prod(places))


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    r, (*batch, channels, height, width) = upscale_factor, input.shape
    x = input.reshape(math.prod(batch), channels // (r * r), r, r, height, width)
    return permute(x, 0, 1, 4, 2, 5, 3).reshape(*batch, channels // (r * r), height * r, width * r)

def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = np.broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = (expand(x, *shape) for x in (x1, x2))
    lengths = clamp(norm(x1, 2, dim), min=eps) * clamp(norm(x2, 2, dim), min=eps)
    return (x1 * x2).sum(dim) / lengths

def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6,
                      keepdim: bool = False) -> Tensor:
    return norm(x1 - x2 + eps, p, -1, keepdim)


# -- losses ----------------------------------------------------------------------------------------


def reduced(losses: Tensor, reduction: str, weights: np.ndarray | None = None) -> Tensor:
    """All losses as one number. Weighted ones are averaged by the sum of their weights."""
    if reduction == "mean":
        return losses.mean() if weights is None else losses.sum() / float(weights.sum())
    if reduction in ("sum", "batchmean"):
        return losses.sum() / (losses.shape[0] if reduction == "batchmean" and losses.ndim else 1)
    if reduction == "none":
        return losses
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")

def same_shape(name: str, input: Tensor, target: Tensor) -> None:
    """A prediction (n, 1) beside a target (n,) would broadcast to (n, n), and train, wrongly."""
    if input.shape != target.shape:
        raise ValueError(
            f"{name} compares element by element, but the input has shape {tuple(input.shape)} "
            f"and the target {tuple(target.shape)}: reshape one of them, for example with "
            ".view_as() or .unsqueeze(1)"
        )


def elementwise(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss with PyTorch's argument `reduction`, from what it is for each element."""

    @functools.wraps(loss)
    def function(input: Tensor, target: Tensor, *args: Any, reduction: str = "mean",
                 **options: Any) -> Tensor:
        same_shape(loss.__name__, input, target)
        return reduced(loss(input, target, *args, **options), reduction)

    return with_parameter(function, "reduction", "mean")


@elementwise
def mse_loss(input: Tensor, target: Tensor) -> Tensor:
    return square(input - target)

@elementwise
def l1_loss(input: Tensor, target: Tensor) -> Tensor:
    return _abs(input - target)

@elementwise
def huber_loss(input: Tensor, target: Tensor, *, delta: float = 1.0) -> Tensor:
    distance = _abs(input - target)
    return where(distance < delta, square(distance) * 0.5, (distance - 0.5 * delta) * delta)

@elementwise
def smooth_l1_loss(input: Tensor, target: Tensor, *, beta: float = 1.0) -> Tensor:
    return huber_loss(input, target, delta=beta, reduction="none") / beta if beta else \
        _abs(input - target)

@elementwise
def binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    losses = -clamp(log(input), min=-100) * target - clamp(log1p(-input), min=-100) * (1 - target)
    return losses if weight is None else losses * weight

@elementwise
def binary_cross_entropy_with_logits(input: Tensor, target: Tensor, weight: Tensor | None = None,
                                     *, pos_weight: Tensor | None = None) -> Tensor:
    scale = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    losses = input * (1 - target) + scale * _softplus(-input)
    return losses if weight is None else losses * weight

@elementwise
def kl_div(input: Tensor, target: Tensor, *, log_target: bool = False) -> Tensor:
    """target * (log(target) - input), for input in logarithms; 0 where the target is 0."""
    if log_target:
        return exp(target) * (target - input)
    return target * log(where(target == 0, 1.0, target)) - target * input


def class_targets(input: Tensor, target: Tensor, weight: Tensor | None,
                  ignore_index: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The target classes and their weights, 0 (and any class) where they are to be ignored; None
    if all count the same."""
    axis = min(input.ndim - 1, 1)
    classes, index = input.shape[axis], target._array
    if target.shape != (shape := (*input.shape[:axis], *input.shape[axis + 1 :])):
        raise ValueError(f"class targets for an input of shape {tuple(input.shape)} have shape "
                         f"{shape}, not {tuple(target.shape)}")
    inside = target.dtype.kind in "iu" and (
        not index.size or index.min() >= 0 and index.max() < classes)
    if inside and weight is None and not 0 <= ignore_index < classes:
        return index, None
    ignored = index == ignore_index
    if not inside and (target.dtype.kind not in "iu"
                       or ((index < 0) | (index >= classes))[~ignored].any()):
        raise IndexError(f"class targets are integers from 0 to {classes - 1} (or ignore_index "
                         f"{ignore_index}): found {target.dtype} from {index.min()} to "
                         f"{index.max()}")
    safe = np.where(ignored, 0, index)
    weights = ~ignored * (1 if weight is None else weight._array[safe])
    return safe, weights.astype(input.dtype)


def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, *,
             ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """The negative log-probability of the target classes; input (batch, classes, ...)."""
    index, weights = class_targets(input, target, weight, ignore_index)
    return reduced(minus_picked(input, index, weights), reduction, weights)

def minus_picked(logs: Tensor, index: np.ndarray, weights: np.ndarray | None) -> Tensor:
    axis = min(logs.ndim - 1, 1)
    losses = -gather(logs, axis, wrap(np.expand_dims(index, axis))).squeeze(axis)
    return losses if weights is None else where(weights == 0, 0.0, losses) * wrap(weights)

def class_losses_plain(x: Any, index: Any, weights: Any, divisor: float | None) -> Any:
    losses = minus_picked(_log_softmax(x, dim=1), index, weights)
    return losses if divisor is None else losses.sum() / divisor

@composed(class_losses_plain, "shares")
def class_losses_to_x(g, needs, x, index, weights, divisor, shares):
    scale = g if divisor is None else np.full(len(x), g / divisor)
    if weights is not None:  # where all are ignored their mean is 0 / 0, but its slope is 0
        scale = np.where(weights == 0, 0, scale * weights)
    dx = shares * scale[:, None]
    dx[np.arange(len(x)), index] -= scale
    return (dx,)

@class_losses_to_x
def _class_losses(x, *, index, weights, divisor):
    """log(sum(exp(x))) - x[index] for each row of x, or their sum over a divisor. The softmax is
    kept for the derivative. (As five ops it is a tenth of a small network's step.)"""
    shares = x - x.max(axis=1, keepdims=True)
    picked = shares[np.arange(len(x)), index]
    np.exp(shares, out=shares)
    total = shares @ np.ones((x.shape[1], 1), x.dtype)
    shares /= total
    losses = np.log(total[:, 0]) - picked
    if weights is not None:
        losses = np.where(weights == 0, 0, losses * weights)  # also where infinite
    return losses if divisor is None else losses.sum() / losses.dtype.type(divisor), shares


def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, *,
                  ignore_index: int = -100, reduction: str = "mean",
                  label_smoothing: float = 0.0) -> Tensor:
    """The cross entropy between softmax(input) and the target: class indices (batch, ...), or
    probabilities of input's shape (batch, classes, ...).

    Label smoothing mixes the target with the uniform distribution: (1 - s) target + s / classes
    (Szegedy et al., 2016)."""
    axis = min(input.ndim - 1, 1)
    classes, indices = input.shape[axis], target.dtype.kind != "f"
    if indices:
        index, weights = class_targets(input, target, weight, ignore_index)
        if input.ndim == 2 and classes and not label_smoothing:
            count = len(index) if weights is None else float(weights.sum())
            divisor = {"mean": count, "sum": 1.0}.get(reduction)
            losses = _class_losses(input, index=index, weights=weights, divisor=divisor)
            return losses if divisor is not None else reduced(losses, reduction)
    logs = _log_softmax(input, dim=axis)
    weighted = logs if weight is None else \
        logs * weight.reshape(-1, *(1,) * (input.ndim - axis - 1))
    if not indices:
        same_shape("cross_entropy with probabilities", input, target)
        smooth = target * (1 - label_smoothing) + label_smoothing / classes
        losses = -(weighted * smooth).sum(axis)
        return reduced(losses, reduction, np.ones(max(losses.numel(), 1)))
    losses = minus_picked(logs, index, weights)
    if label_smoothing:
        everywhere = where(target == ignore_index, 0.0, -weighted.sum(axis))
        losses = losses * (1 - label_smoothing) + everywhere * (label_smoothing / classes)
    return reduced(losses, reduction, weights)


def triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0,
                        p: float = 2.0, eps: float = 1e-6, swap: bool = False, *,
                        reduction: str = "mean") -> Tensor:
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduced(relu(pairwise_distance(anchor, positive, p, eps) - far + margin), reduction)


# -- attention -------------------------------------------------------------------------------------


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor,
                                 attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(query @ key.T / sqrt(width)) @ value (Vaswani et al., 2017).

    A boolean mask says who may be looked at; a query that may look at nothing gives 0."""
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and \
        query.dtype == key.dtype == value.dtype and query.ndim > 2
    if alike and attn_mask is None and not dropout_p and query.numel() and key.numel():
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return _attention(query, key, value, scale=float(scale), causal=is_causal)
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale)[0]


# Scores are as many as the square of the time: 4 MB for each layer of a small GPT. So, as in
# FlashAttention (Dao et al., 2022), a few rows of them are made at a time, used while they are in
# the cache, and made again in backward, from the queries, the keys and each row's logarithm of
# the sum of exponentials. Causal rows end with the last key that they may look at.


def score_blocks(q: np.ndarray, k: np.ndarray, scale: float, causal: bool) -> Iterator[tuple]:
    """scale * queries @ keys.T for (..., heads, time, width), some rows of some samples at a
    time: the indices of these rows and of the keys that they look at, and their scores."""
    *batch, heads, time, _ = q.shape
    # Causal blocks have fewer rows: each skips what is past its last.
    step = max(16, 2 ** (14 if causal else 15) // (heads * k.shape[-2]))
    corner = (min(step, time), min(step, k.shape[-2])) if causal else (0, 0)
    future = np.triu(np.full(corner, -math.inf, q.dtype), 1)
    # Where one sample's are few, several samples share the cost of NumPy's calls.
    together = max(1, 2**16 // (heads * min(step, time) * k.shape[-2]))
    groups = -(-batch[-1] // together) if batch else 1
    for (*sample, group, start) in np.ndindex(*batch[:-1], groups, -(-time // step)):
        start *= step
        if batch:
            sample.append(slice(group * together, (group + 1) * together))
        rows = (*sample, slice(None), slice(start, start + step))
        keys = (*sample, slice(None), slice(0, start + step if causal else None))
        scores = (q[rows] * q.dtype.type(scale)) @ k[keys].swapaxes(-1, -2)
        if causal:
            diagonal = scores[..., start:]
            diagonal += future[: diagonal.shape[-2], : diagonal.shape[-1]]
        yield rows, keys, scores

def heads_last(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory for (..., heads, time, width) in which the heads of one time lie side by side, as
    the layers before and after have them: neither split nor joined by a copy."""
    *batch, heads, time, width = shape
    return np.empty((*batch, time, heads, width), dtype).swapaxes(-2, -3)

@composed(lambda q, k, v, scale, causal:
          attend(q, k, v, None, 0.0, causal, scale)[0], "sums")
def attention_backward(g, needs, q, k, v, scale, causal, out, sums):
    dq, dk, dv = (heads_last(a.shape, a.dtype) for a in (q, k, v))
    dk[...] = dv[...] = 0
    along_out = np.vecdot(g, out)[..., None]
    for rows, keys, weights in score_blocks(q, k, scale, causal):
        weights -= sums[rows]
        np.exp(weights, out=weights)
        dv[keys] += weights.swapaxes(-1, -2) @ g[rows]
        slopes = g[rows] @ v[keys].swapaxes(-1, -2)
        slopes -= along_out[rows]
        slopes *= weights
        dq[rows] = slopes @ k[keys]
        dk[keys] += slopes.swapaxes(-1, -2) @ q[rows]
    dq *= q.dtype.type(scale)
    dk *= q.dtype.type(scale)
    return tuple(d if need else None for d, need in zip((dq, dk, dv), needs))

@attention_backward
def _attention(q, k, v, *, scale, causal):
    out = heads_last((*q.shape[:-1], v.shape[-1]), q.dtype)
    sums = np.zeros((*q.shape[:-1], 1), q.dtype)
    # A product of vectors is at most that of their lengths. Where exp of that is below the fourth
    # root of what overflows, it can be summed and multiplied by values as it is, and the maxima
    # need not be found first.
    bound = abs(scale) * math.sqrt(np.vecdot(q, q).max() * np.vecdot(k, k).max())
    bounded = bound < math.log(np.finfo(q.dtype).max) / 4
    for rows, keys, weights in score_blocks(q, k, scale, causal):
        if not bounded:
            sums[rows] = np.max(weights, axis=-1, keepdims=True)
            weights -= sums[rows]
        np.exp(weights, out=weights)
        total = weights @ np.ones((weights.shape[-1], 1), q.dtype)
        np.divide(weights @ v[keys], total, out=out[rows])
        sums[rows] += np.log(total)
    return out, sums


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float,
           is_causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The result and the weights, which may be masked and dropped."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(query * scale, transpose(key, -1, -2))
    if is_causal:
        mask = wrap(np.tri(*scores.shape[-2:], dtype=bool))
    alone: Any = False
    if mask is not None:
        boolean = mask.dtype.kind == "b"
        scores = where(mask, scores, -math.inf) if boolean else scores + mask
        seen = mask._array if boolean else mask._array != -math.inf
        alone = ~seen.any(-1, keepdims=True)
    if np.any(alone):  # rows of -inf alone would become NaN
        weights = where(alone, 0.0, softmax(where(alone, 0.0, scores), -1))
    else:
        weights = softmax(scores, -1)
    return matmul(dropout(weights, p), value), weights


# =================================================================================================
# 4 Modules
# =================================================================================================


class Parameter(Tensor):
    """A tensor that a module owns and an optimizer changes."""

    def __init__(self, data: Any = None, requires_grad: bool = True) -> None:
        data = zeros(0) if data is None else data
        self._array = to_array(data)
        self._storage = data._storage if isinstance(data, Tensor) else Storage()
        self.requires_grad = requires_grad

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"


class Buffer(Tensor):
    """A tensor that belongs to a module's state but is not trained: assign one to register it."""

    def __init__(self, data: Tensor, persistent: bool = True) -> None:
        self._array, self._storage, self.persistent = data._array, data._storage, persistent


# What a module registers, by attribute; "_modules": Module comes below.
REGISTRIES: dict[str, type] = {"_parameters": Parameter, "_buffers": Buffer}


class Module:
    """A part of a model: parameters, buffers and further modules, found by attribute name."""

    training = True
    shown = ""  # what repr tells, see extra_repr
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Any]

    def __init__(self) -> None:
        for registry in (*REGISTRIES, "_forward_hooks", "_forward_pre_hooks"):
            object.__setattr__(self, registry, {})
        object.__setattr__(self, "_transient", set())  # buffers that state_dict leaves out

    def forward(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._forward_pre_hooks and not self._forward_hooks:
            return self.forward(*args, **options)
        for hook in list(self._forward_pre_hooks.values()):
            replaced = hook(self, args)
            if replaced is not None:
                args = replaced if isinstance(replaced, tuple) else (replaced,)
        result = self.forward(*args, **options)
        for hook in list(self._forward_hooks.values()):
            replaced = hook(self, args, result)
            result = result if replaced is None else replaced
        return result

    def register_forward_hook(self, hook: Callable) -> Handle:
        return Handle(self._forward_hooks, hook)

    def register_forward_pre_hook(self, hook: Callable) -> Handle:
        return Handle(self._forward_pre_hooks, hook)

    # -- registration: attributes that are parameters, buffers or modules ------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        kind = next((r for r, cls in REGISTRIES.items() if isinstance(value, cls)), None)
        if "_parameters" not in self.__dict__:
            if kind is not None:
                raise AttributeError(f"{type(self).__name__} assigns {name!r} before "
                                     "super().__init__()")
            return object.__setattr__(self, name, value)
        for registry in REGISTRIES:
            found = self.__dict__[registry]
            if name in found:
                if kind == registry or value is None or (
                    registry == "_buffers" and isinstance(value, Tensor)
                ):
                    found[name] = value
                    return
                if kind is None and registry != "_buffers":
                    raise TypeError(f"cannot assign {type(value).__name__} to {name!r}, which is "
                                    f"registered as a {registry[1:-1]}: assign one, or None")
                del found[name]
        if kind is None:
            refuse_hidden(type(self).__name__, name, value)
            return object.__setattr__(self, name, value)
        self.__dict__.pop(name, None)
        self.__dict__[kind][name] = value
        if kind == "_buffers" and not value.persistent:
            self._transient.add(name)

    def __getattr__(self, name: str) -> Any:
        for registry in REGISTRIES:
            found = self.__dict__.get(registry, {})
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        for registry in REGISTRIES:
            if name in self.__dict__[registry]:
                del self.__dict__[registry][name]
                return
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._parameters, *self._modules, *self._buffers]

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        self._parameters[name] = parameter

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._buffers[name] = tensor
        if not persistent:
            self._transient.add(name)

    def register_module(self, name: str, module: Module | None) -> None:
        self._modules[name] = module

    add_module = register_module

    # -- walking the tree ------------------------------------------------------------------------

    def named_modules(self, memo: set | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        for name, value in self.__dict__.items():
            if name not in ("_parameters", "_modules"):  # a list may have been filled since
                refuse_hidden(type(self).__name__, name, value)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                path = f"{prefix}.{name}" if prefix else name
                yield from module.named_modules(memo, path, remove_duplicate)

    def _named(self, registry: str, prefix: str, recurse: bool,
               remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()  # a tensor shared by two modules is one tensor
        modules = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, module in modules if recurse else [(prefix, self)]:
            for name, tensor in getattr(module, registry).items():
                if tensor is None or (remove_duplicate and id(tensor) in seen):
                    continue
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, Parameter]]:
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True,
                      remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((n, m) for n, m in self._modules.items() if m is not None)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        return (p for _, p in self.named_parameters(recurse=recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return (b for _, b in self.named_buffers(recurse=recurse))

    def modules(self) -> Iterator[Module]:
        return (m for _, m in self.named_modules())

    def children(self) -> Iterator[Module]:
        return (m for _, m in self.named_children())

    def get_submodule(self, path: str) -> Module:
        module: Any = self
        for name in filter(None, path.split(".")):
            module = module._modules[name]
        return module

    def apply(self, function: Callable[[Module], None]) -> Module:
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def train(self, mode: bool = True) -> Module:
        for module in self.modules():
            object.__setattr__(module, "training", mode)
        return self

    def eval(self) -> Module:
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """With False the parameters are frozen: they get no gradient, and no update."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            clear_grad(parameter, set_to_none)

    def to(self, *args: Any, **options: Any) -> Module:
        """Cast floating point parameters and buffers to a dtype; the device is always the CPU."""
        dtype = dtype_in(*args, **options)
        for _, tensor in itertools.chain(self.named_parameters(), self.named_buffers()):
            if dtype is not None and tensor.dtype.kind == "f":
                tensor.data = tensor.detach().to(dtype)
                tensor.grad = None if tensor.grad is None else tensor.grad.to(dtype)
        return self

    float = functools.partialmethod(to, dtype=float32)
    double = functools.partialmethod(to, dtype=float64)
    half = functools.partialmethod(to, dtype=float16)

    def cpu(self) -> Module:
        return self

    def cuda(self, device: Any = "cuda") -> Module:
        return self.to(device)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self, prefix: str = "") -> OrderedDict[str, Tensor]:
        """Parameters and buffers by name: tensors outside the graph that share their memory."""
        state: OrderedDict[str, Tensor] = OrderedDict()
        for path, module in self.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and name not in module._transient:
                    state[prefix + (f"{path}.{name}" if path else name)] = tensor.detach()
        return state

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> LoadResult:
        """Copy values in by name. Under `strict`, names must be the same; shapes always."""
        own = self.state_dict()
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        problems = [f"{what}: {', '.join(names)}" for what, names in
                    (("missing", missing), ("unexpected", unexpected)) if strict and names]
        problems += [f"{name} has shape {tuple(tensor.shape)} in the model and "
                     f"{np.shape(to_array(state_dict[name]))} in the state"
                     for name, tensor in own.items() if name in state_dict
                     and np.shape(to_array(state_dict[name])) != tensor.shape]
        if problems:
            raise RuntimeError(f"cannot load this state into {type(self).__name__}: "
                               + "; ".join(problems))
        with no_grad():
            for name, tensor in own.items():
                if name in state_dict:
                    tensor.copy_(as_tensor(state_dict[name]))
        return LoadResult(missing, unexpected)

    # -- printing --------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """What `shown` lists: `name` for the value alone, `name=` for both, `name=!` with quotes
        around text, `name=,` as a tuple, `name=?` if it differs from the constructor's default."""
        parts = []
        for item in self.shown.split():
            name = item.rstrip("=!?,")
            value = getattr(self, name)
            value = numbers(value, 1) if "," in item else value
            if name == "bias" and not isinstance(value, bool):
                value = value is not None
            if "?" in item:
                default = inspect.signature(type(self)).parameters[name].default
                if value == default or isinstance(value, tuple) and set(value) == {default}:
                    continue
            text = repr(value) if "!" in item else str(value)
            parts.append(f"{name}={text}" if "=" in item else text)
        return ", ".join(parts)

    def __repr__(self) -> str:
        children = [(f"({name})", repr(module)) for name, module in self._modules.items()]
        if isinstance(self, ModuleList):  # runs of equal children are counted
            runs = [[k for k, _ in run] for _, run in
                    itertools.groupby(enumerate(children), lambda item: item[1][1])]
            children = [(f"({r[0]}-{r[-1]}): {len(r)} x" if len(r) > 1 else f"({r[0]})",
                         children[r[0]][1]) for r in runs]
        extra = self.extra_repr()
        if not children and "\n" not in extra:
            return f"{type(self).__name__}({extra})"
        lines = [extra] if extra else []
        lines += [f"{name}{' ' if name.endswith('x') else ': '}{text}" for name, text in children]
        inner = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {inner}\n)"


REGISTRIES["_modules"] = Module


class LoadResult(tuple):
    """What load_state_dict found: (missing_keys, unexpected_keys)."""

    def __new__(cls, missing: list[str], unexpected: list[str]) -> LoadResult:
        return super().__new__(cls, (missing, unexpected))

    missing_keys = property(lambda self: self[0])
    unexpected_keys = property(lambda self: self[1])

    def __repr__(self) -> str:
        return "<All keys matched successfully>" if not any(self) else super().__repr__()


def holds_layers(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(holds_layers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (Module, Parameter))

def refuse_hidden(owner: str, name: str, value: Any) -> None:
    """Layers in a plain list or dict would be neither trained nor saved, without a word."""
    if isinstance(value, (list, tuple, dict)) and holds_layers(value):
        raise TypeError(
            f"{owner}.{name} is a {type(value).__name__} of modules or parameters, which would "
            "not be registered, trained or saved: use nn.ModuleList, nn.ModuleDict or "
            "nn.ParameterList"
        )

def clear_grad(parameter: Tensor, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad = parameter.grad.detach()
        parameter.grad.zero_()


# -- containers ------------------------------------------------------------------------------------


class _List(Module):
    """What lists of modules share; the names are the places."""

    registry = "_modules"

    def items(self) -> dict[str, Any]:
        return self.__dict__[self.registry]

    def append(self, item: Any) -> Any:
        self.items()[str(len(self))] = item
        return self

    def extend(self, items: Iterable[Any]) -> Any:
        for item in items:
            self.append(item)
        return self

    def insert(self, index: int, item: Any) -> None:
        items = list(self)
        items.insert(index, item)
        self.items().clear()
        self.extend(items)

    def __len__(self) -> int:
        return len(self.items())

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.items().values()))

    def __getitem__(self, index: Any) -> Any:
        found: Any = list(self)[index]
        make: Any = type(self)
        return make(found) if isinstance(index, slice) else found

    def __setitem__(self, index: int, item: Any) -> None:
        setattr(self, list(self.items())[index], item)


class ModuleList(_List):
    """A list of modules that are registered."""

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(modules)


class ParameterList(ModuleList):
    """A list of parameters that are registered."""

    registry = "_parameters"

    def append(self, parameter: Any) -> ParameterList:
        return super().append(parameter if isinstance(parameter, Parameter)
                              else Parameter(parameter))

    def extra_repr(self) -> str:
        return "\n".join(f"  ({k}): Parameter containing: [torch.{p.dtype} of size "
                         f"{'x'.join(map(str, p.shape))}]" for k, p in enumerate(self))


class Sequential(_List):
    """Modules one after the other, each taking the result of the one before."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], dict):
            self._modules.update(modules[0])
        else:
            self.extend(modules)

    def forward(self, input: Any) -> Any:
        for module in self._modules.values():
            input = module(input)
        return input

    def __getitem__(self, index: Any) -> Any:
        found = list(self.items().items())[index]
        return type(self)(dict(found)) if isinstance(index, slice) else found[1]


class ModuleDict(Module, collections.abc.MutableMapping):
    """A dict of modules that are registered."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # not by what they hold

    def __init__(self, modules: Any = ()) -> None:
        super().__init__()
        self.update(modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]


# -- initial values --------------------------------------------------------------------------------


def initializer(values: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that fills a tensor, from one that says with what."""

    @functools.wraps(values)
    def fill(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        with no_grad():
            return tensor.copy_(as_tensor(values(tensor, *args, **options)))

    return fill


@initializer
def constant_(tensor: Tensor, val: float) -> Any:
    return val

@initializer
def zeros_(tensor: Tensor) -> Any:
    return 0.0

@initializer
def ones_(tensor: Tensor) -> Any:
    return 1.0

@initializer
def eye_(tensor: Tensor) -> Any:
    return np.eye(*tensor.shape)

@initializer
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0,
             generator: Generator | None = None) -> Any:
    return rng(generator).uniform(a, b, tensor.shape)

@initializer
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0,
            generator: Generator | None = None) -> Any:
    return rng(generator).normal(mean, std, tensor.shape)

@initializer
def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0,
                  b: float = 2.0) -> Any:
    """Normal numbers between a and b: those outside are drawn again."""
    array = rng().normal(mean, std, tensor.shape)
    while (outside := (array < a) | (array > b)).any():
        array[outside] = rng().normal(mean, std, int(outside.sum()))
    return array

@initializer
def orthogonal_(tensor: Tensor, gain: float = 1.0) -> Any:
    """Rows (or columns, if there are more rows) of length gain at right angles (Saxe et al.,
    2014)."""
    n, m = tensor.shape[0], math.prod(tensor.shape[1:])
    q, r = np.linalg.qr(rng().standard_normal((max(n, m), min(n, m))))
    q = q * np.sign(np.diag(r))  # else not all orthogonal matrices are equally likely
    return (gain * (q.T if n < m else q)).reshape(tensor.shape)


def fans(tensor: Tensor) -> tuple[int, int]:
    """How many inputs and outputs each unit of a weight (out, in, *kernel) has."""
    if tensor.ndim < 2:
        raise ValueError("fan in and fan out need a weight of at least two dimensions, this one "
                         f"has shape {tuple(tensor.shape)}")
    places = math.prod(tensor.shape[2:])
    return tensor.shape[1] * places, tensor.shape[0] * places


GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    return 1.0 if nonlinearity.startswith("conv") else GAINS[nonlinearity]

def xavier_std(tensor: Tensor, gain: float = 1.0) -> float:
    """Glorot and Bengio, 2010: variance 2 / (fan in + fan out)."""
    return gain * math.sqrt(2 / sum(fans(tensor)))

def kaiming_std(tensor: Tensor, a: float = 0, mode: str = "fan_in",
                nonlinearity: str = "leaky_relu") -> float:
    """He et al., 2015: variance gain^2 / fan."""
    fan = fans(tensor)[0 if mode == "fan_in" else 1]
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)

def with_std(std: Callable[..., float], uniform: bool) -> Callable[..., Tensor]:
    """Uniform numbers reach sqrt(3) standard deviations to both sides."""

    @functools.wraps(std)
    def fill(tensor: Tensor, *args: Any, generator: Any = None, **options: Any) -> Tensor:
        scale = std(tensor, *args, **options)
        bound = math.sqrt(3) * scale
        return uniform_(tensor, -bound, bound, generator) if uniform else \
            normal_(tensor, 0.0, scale, generator)

    return fill


xavier_uniform_, xavier_normal_ = with_std(xavier_std, True), with_std(xavier_std, False)
kaiming_uniform_, kaiming_normal_ = with_std(kaiming_std, True), with_std(kaiming_std, False)


# -- layers ----------------------------------------------------------------------------------------


def bind(name: str, signature: inspect.Signature, args: tuple, options: dict) -> dict[str, Any]:
    """The arguments by name, with defaults for those not given."""
    try:
        bound = signature.bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"{name} takes {signature}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def remembering(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose arguments become attributes of the same names before it runs, and which
    takes PyTorch's `device` and `dtype` besides."""
    itself, *others = inspect.signature(init).parameters.values()
    signature = inspect.Signature(others)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, device: Any = None, dtype: Any = None,
                 **options: Any) -> None:
        if "_parameters" not in self.__dict__:
            Module.__init__(self)
        arguments = bind(type(self).__name__, signature, args, options)
        for name, value in arguments.items():
            setattr(self, name, value)
        init(self, **arguments)
        self.to(device=device, dtype=dtype)

    return __init__


def uniform_parameter(*shape: int, fan: int) -> Parameter:
    """PyTorch's initial values for linear and convolution layers: uniform within
    1 / sqrt(fan in)."""
    bound = 1 / math.sqrt(fan) if fan else 0.0
    return Parameter(uniform_(zeros(shape), -bound, bound))

def variant(base: type, name: str, **members: Any) -> Any:
    """A subclass that differs in a few class attributes."""
    members = {k: staticmethod(v) if callable(v) and k != "__init__" else v
               for k, v in members.items()}
    return type(name, (base,), {"__module__": __name__, "__doc__": base.__doc__, **members})


class _Layer(Module):
    """A function of section 3 and its arguments after the inputs: attributes of these names, some
    of which a subclass makes parameters."""

    function: Callable
    inputs = 1

    def forward(self, *inputs: Any, **named: Any) -> Any:
        function, owned = self.function, self._parameters  # not through __getattr__: ten times
        further = {name: owned[name] if name in owned else getattr(self, name)
                   for name in names_of(function)[self.inputs :]}
        return function(*inputs, **(further | named))


class Linear(_Layer):
    """x @ weight.T + bias, for x (..., in_features)."""

    function, shown = staticmethod(linear), "in_features= out_features= bias="

    @remembering
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        self.weight = uniform_parameter(out_features, in_features, fan=in_features)
        self.bias = uniform_parameter(out_features, fan=in_features) if bias else None

class _Conv(_Layer):
    shown = "in_channels out_channels kernel_size= stride= padding=? dilation=? groups=? bias=?"
    n: int
    transposed = False
    output_padding: Any = 0

    @remembering
    def __init__(self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1, bias: bool = True) -> None:
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide the {in_channels} input and "
                             f"{out_channels} output channels")
        for name in "kernel_size stride padding dilation output_padding".split():
            if not isinstance(value := getattr(self, name), str):
                setattr(self, name, numbers(value, self.n))
        channels = (out_channels, in_channels)[:: -1 if self.transposed else 1]
        fan = channels[1] // groups * math.prod(self.kernel_size)
        self.weight = uniform_parameter(channels[0], channels[1] // groups, *self.kernel_size,
                                        fan=fan)
        self.bias = uniform_parameter(out_channels, fan=fan) if bias else None

class _ConvTranspose(_Conv):
    shown = _Conv.shown.replace("groups", "output_padding=? groups")
    transposed = True

    @remembering
    def __init__(self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1,
                 padding: Any = 0, output_padding: Any = 0, groups: int = 1, bias: bool = True,
                 dilation: Any = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups,
                         bias)


Conv1d, Conv2d = (variant(_Conv, f"Conv{n}d", n=n, function=function)
                  for n, function in ((1, conv1d), (2, conv2d)))
ConvTranspose1d, ConvTranspose2d = (
    variant(_ConvTranspose, f"ConvTranspose{n}d", n=n, function=function)
    for n, function in ((1, conv_transpose1d), (2, conv_transpose2d)))


class _Norm(_Layer):
    """What normalisation layers share: a weight of ones and a bias of zeros."""

    def affine_parameters(self, shape: Any, weight: bool, bias: bool) -> None:
        self.weight = Parameter(ones(shape)) if weight else None
        self.bias = Parameter(zeros(shape)) if weight and bias else None


class _BatchNorm(_Norm):
    shown = "num_features eps= momentum= affine= bias= track_running_stats="
    dims: tuple[int, ...]
    single = False  # whether the smaller number of dimensions means one sample without a batch

    @remembering
    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1,
                 affine: bool = True, track_running_stats: bool = True, *,
                 bias: bool = True) -> None:
        self.affine_parameters(num_features, affine, bias)
        track = track_running_stats
        self.register_buffer("running_mean", zeros(num_features) if track else None)
        self.register_buffer("running_var", ones(num_features) if track else None)
        self.register_buffer("num_batches_tracked", tensor(0) if track else None)

    def forward(self, input: Tensor) -> Tensor:
        single = self.single and input.ndim == self.dims[0]
        if input.ndim not in self.dims or input.shape[0 if single else 1] != self.num_features:
            raise ValueError(f"{type(self).__name__}({self.num_features}) takes inputs of "
                             f"{' or '.join(map(str, self.dims))} dimensions with "
                             f"{self.num_features} channels second, not shape "
                             f"{tuple(input.shape)}")
        momentum = self.momentum
        if self.training and self.track_running_stats and not self.single:
            self.num_batches_tracked += 1
            if momentum is None:  # the plain average over all batches
                momentum = 1 / self.num_batches_tracked.item()
        out = type(self).function(
            input.unsqueeze(0) if single else input, self.running_mean, self.running_var,
            self.weight, self.bias, self.training or not self.track_running_stats,
            momentum or 0.0, self.eps)
        return out.squeeze(0) if single else out


class _InstanceNorm(_BatchNorm):
    single = True

    @remembering
    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1,
                 affine: bool = False, track_running_stats: bool = False, *,
                 bias: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, bias=bias)


BatchNorm1d, BatchNorm2d = (variant(_BatchNorm, f"BatchNorm{n}d", dims=dims, function=batch_norm)
                            for n, dims in ((1, (2, 3)), (2, (4,))))
InstanceNorm1d, InstanceNorm2d = (
    variant(_InstanceNorm, f"InstanceNorm{n}d", dims=dims, function=instance_norm)
    for n, dims in ((1, (2, 3)), (2, (3, 4))))


class LayerNorm(_Norm):
    function: Callable = staticmethod(layer_norm)
    shown = "normalized_shape eps= elementwise_affine= bias="

    @remembering
    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True) -> None:
        self.normalized_shape = numbers(normalized_shape, 1)
        self.affine_parameters(self.normalized_shape, elementwise_affine, bias)

class RMSNorm(LayerNorm):
    function = staticmethod(rms_norm)
    shown = "normalized_shape eps= elementwise_affine="

    @remembering
    def __init__(self, normalized_shape: Any, eps: Any = None,
                 elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias=False)

class GroupNorm(_Norm):
    function = staticmethod(group_norm)
    shown = "num_groups num_channels eps= affine= bias="

    @remembering
    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5,
                 affine: bool = True, *, bias: bool = True) -> None:
        if num_channels % num_groups:
            raise ValueError(f"{num_groups} groups do not divide {num_channels} channels")
        self.affine_parameters(num_channels, affine, bias)

class Embedding(_Layer):
    function = staticmethod(embedding)
    shown = "num_embeddings embedding_dim padding_idx=?"

    @remembering
    def __init__(self, num_embeddings: int, embedding_dim: int,
                 padding_idx: int | None = None) -> None:
        self.weight = Parameter(randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            self.weight._array[padding_idx] = 0

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True,
                        padding_idx: int | None = None) -> Embedding:
        made = cls(*embeddings.shape, padding_idx)
        made.weight = Parameter(embeddings, not freeze)
        return made

class PReLU(_Layer):
    function, shown = staticmethod(prelu), "num_parameters="

    @remembering
    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.weight = Parameter(full((num_parameters,), init))

class Dropout(_Layer):
    function, shown = staticmethod(dropout), "p= inplace="

    @remembering
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        check_probability(p)


Dropout2d = variant(Dropout, "Dropout2d", function=dropout2d)


class Identity(Module):
    def __init__(self, *ignored: Any, **also_ignored: Any) -> None:
        super().__init__()

    def forward(self, input: Any) -> Any:
        return input


# -- layers without parameters ---------------------------------------------------------------------
#
# The constructor takes what the function takes after its inputs, with the same names and defaults.


def layer(name: str, function: Callable, shown: str = "", inputs: int = 1,
          **defaults: Any) -> Any:
    parameters = [p.replace(kind=p.POSITIONAL_OR_KEYWORD, default=defaults.get(p.name, p.default))
                  for p in list(inspect.signature(function).parameters.values())[inputs:]]
    signature = inspect.Signature(parameters)

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        Module.__init__(self)
        arguments = bind(name, signature, args, options)
        if isinstance(arguments.get("scale_factor"), int):  # printed as 2.0
            arguments["scale_factor"] = float(arguments["scale_factor"])
        if "stride" in arguments and arguments["stride"] is None:
            arguments["stride"] = arguments["kernel_size"]
        for key, value in arguments.items():
            if isinstance(value, Tensor):  # the weight of a loss is part of its state
                self.register_buffer(key, value)
            else:
                setattr(self, key, value)

    return variant(_Layer, name, function=function, shown=shown, inputs=inputs, __init__=__init__,
                   __signature__=signature, __doc__=function.__doc__)


Tanh, Sigmoid = layer("Tanh", tanh), layer("Sigmoid", sigmoid)
LogSigmoid, Softsign = layer("LogSigmoid", logsigmoid), layer("Softsign", softsign)
ReLU, ReLU6, SELU, SiLU, Mish = (
    layer(name, function, "inplace=?") for name, function in
    (("ReLU", relu), ("ReLU6", relu6), ("SELU", selu), ("SiLU", silu), ("Mish", mish)))
LeakyReLU = layer("LeakyReLU", leaky_relu, "negative_slope= inplace=?")
ELU = layer("ELU", elu, "alpha= inplace=?")
Hardtanh = layer("Hardtanh", hardtanh, "min_val= max_val= inplace=?")
GELU = layer("GELU", gelu, "approximate=!")
Softplus = layer("Softplus", softplus, "beta= threshold=")
GLU = layer("GLU", glu, "dim=")
Softmax, LogSoftmax = layer("Softmax", softmax, "dim="), layer("LogSoftmax", log_softmax, "dim=")
MaxPool1d, MaxPool2d = (
    layer(f"MaxPool{n}d", function, "kernel_size= stride= padding= dilation= ceil_mode=")
    for n, function in ((1, max_pool1d), (2, max_pool2d)))
AvgPool1d = layer("AvgPool1d", avg_pool1d, "kernel_size=, stride=, padding=,")
AvgPool2d = layer("AvgPool2d", avg_pool2d, "kernel_size= stride= padding=")
AdaptiveAvgPool1d, AdaptiveAvgPool2d = (
    layer(f"AdaptiveAvgPool{n}d", function, "output_size=")
    for n, function in ((1, adaptive_avg_pool1d), (2, adaptive_avg_pool2d)))
Flatten = layer("Flatten", flatten, "start_dim= end_dim=", start_dim=1)
Unflatten = layer("Unflatten", lambda input, dim, unflattened_size:
                  unflatten(input, dim, unflattened_size), "dim= unflattened_size=")
Upsample = layer("Upsample", interpolate, "scale_factor=? size=? mode=!")
Unfold = layer("Unfold", unfold, "kernel_size= dilation= padding= stride=")
PixelShuffle = layer("PixelShuffle", pixel_shuffle, "upscale_factor=")
CosineSimilarity = layer("CosineSimilarity", cosine_similarity, inputs=2)
PairwiseDistance = layer("PairwiseDistance", pairwise_distance, inputs=2)
(MSELoss, L1Loss, SmoothL1Loss, HuberLoss, NLLLoss, CrossEntropyLoss, BCELoss, BCEWithLogitsLoss,
 KLDivLoss) = (layer(name, function, inputs=2) for name, function in (
     ("MSELoss", mse_loss), ("L1Loss", l1_loss), ("SmoothL1Loss", smooth_l1_loss),
     ("HuberLoss", huber_loss), ("NLLLoss", nll_loss), ("CrossEntropyLoss", cross_entropy),
     ("BCELoss", binary_cross_entropy), ("BCEWithLogitsLoss", binary_cross_entropy_with_logits),
     ("KLDivLoss", kl_div)))
TripletMarginLoss = layer("TripletMarginLoss", triplet_margin_loss, inputs=3)


# -- recurrent networks ----------------------------------------------------------------------------


def rnn_step(x: Tensor, state: tuple, weight: Tensor, bias: Any, act: Callable) -> tuple:
    return (act(x + linear(state[0], weight, bias)),)

def lstm_step(x: Tensor, state: tuple, weight: Tensor, bias: Any, act: Callable) -> tuple:
    """Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000."""
    i, f, g, o = chunk(x + linear(state[0], weight, bias), 4, -1)
    cell = sigmoid(f) * state[1] + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(cell), cell

def unrolled(step: Callable, x: Tensor, state: tuple, w_ih: Tensor, w_hh: Tensor, b_ih: Any,
             b_hh: Any, act: Callable, reverse: bool) -> tuple[Tensor, tuple]:
    """One layer in one direction: the outputs of all steps and the last state. The inputs' share
    of all steps is one product."""
    outputs, order = [], -1 if reverse else 1
    for projected in linear(x, w_ih, b_ih).unbind()[::order]:
        state = step(projected, state, w_hh, b_hh, act)
        outputs.append(state[0])
    return stack(outputs[::order]), state

def lstm_plain(x: Any, h: Any, c: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any,
               reverse: bool) -> Any:
    outputs, (_, last) = unrolled(lstm_step, x, (h, c), w_ih, w_hh, b_ih, b_hh, tanh, reverse)
    return cat([outputs, last.unsqueeze(0)])

@composed(lstm_plain, "gates cells")
def lstm_backward(g, needs, x, h, c, w_ih, w_hh, b_ih, b_hh, reverse, out, gates, cells):
    time, batch, width = out[:-1].shape
    i, f, o, new = gates.reshape(4, time, batch, width)
    before = cells[1:] if reverse else cells[:-1]
    tanh_c = np.tanh(cells[:-1] if reverse else cells[1:])
    # What the gradients of cell and output are multiplied by, for all steps at once.
    to_gates = np.stack([new * i * (1 - i), before * f * (1 - f), i * (1 - new * new)])
    to_o, to_cell = tanh_c * o * (1 - o), o * (1 - tanh_c * tanh_c)
    slopes = np.empty((time, batch, 4, width), x.dtype)  # of the gates before their sigmoids
    dh, dc = np.zeros_like(h), g[-1].copy()
    for t in range(time) if reverse else range(time - 1, -1, -1):
        dh = dh + g[t]
        dc += dh * to_cell[t]
        planes = slopes[t].swapaxes(0, 1)
        np.multiply(to_gates[:, t], dc, out=planes[:3])
        np.multiply(to_o[t], dh, out=planes[3])
        dc *= f[t]
        dh = slopes[t].reshape(batch, 4 * width) @ w_hh
    slopes = slopes.reshape(time * batch, 4 * width)
    hidden = np.concatenate([out[1:-1], h[None]] if reverse else [h[None], out[:-2]])
    db = column_sums(slopes)
    return tuple(make() if need else None for need, make in zip(needs, (
        lambda: (slopes @ w_ih).reshape(x.shape), lambda: dh, lambda: dc,
        lambda: slopes.T @ all_rows(x), lambda: slopes.T @ all_rows(hidden),
        lambda: db, lambda: db.copy())))

@lstm_backward
def _lstm(x, h, c, w_ih, w_hh, b_ih, b_hh, *, reverse):
    """All steps of one layer: the outputs (time, batch, width), and the last cell after them.

    One op a sequence instead of a dozen a step. The four gates are planes (4, time * batch,
    width), so that each is contiguous (a tenth faster than side by side); the input's share of
    all steps is one product."""
    (time, batch, _), width = x.shape, h.shape[1]
    order = [0, 1, 3, 2]  # input, forget and output gates beside each other: all sigmoids
    w_ih, w_hh = (w.reshape(4, width, -1)[order].swapaxes(1, 2) for w in (w_ih, w_hh))
    gates = all_rows(x) @ w_ih
    for b in (b_ih, b_hh):
        if b is not None:
            gates += b.reshape(4, 1, width)[order]
    out, cells = np.empty((2, time + 1, batch, width), x.dtype)
    cells[-1 if reverse else 0] = c
    for t in range(time - 1, -1, -1) if reverse else range(time):
        now = gates[:, t * batch : (t + 1) * batch]
        now += h @ w_hh
        sigmoids, new = now[:3], now[3]
        np.negative(sigmoids, out=sigmoids)
        np.exp(sigmoids, out=sigmoids)
        sigmoids += 1
        np.reciprocal(sigmoids, out=sigmoids)
        np.tanh(new, out=new)
        cell = cells[t if reverse else t + 1]
        np.multiply(sigmoids[1], c, out=cell)
        cell += sigmoids[0] * new
        h, c = out[t], cell
        np.multiply(sigmoids[2], np.tanh(cell), out=h)
    out[-1] = c
    return out, gates, cells


def gru_step(x: Tensor, state: tuple, weight: Tensor, bias: Any, act: Callable) -> tuple:
    """Cho et al., 2014, with the reset gate after the product, as cuDNN and PyTorch have it."""
    xr, xz, xn = chunk(x, 3, -1)
    hr, hz, hn = chunk(linear(state[0], weight, bias), 3, -1)
    update = sigmoid(xz + hz)
    new = tanh(xn + sigmoid(xr + hr) * hn)
    return ((state[0] - new) * update + new,)


class _Recurrent(Module):
    """Layers of one kind of step, over sequences (time, batch, features)."""

    shown = "input_size hidden_size num_layers=? bias=? batch_first=? dropout=? bidirectional=?"
    gates: int
    states = 1
    step: Callable

    @remembering
    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
                 nonlinearity: str = "tanh", proj_size: int = 0) -> None:
        if proj_size:
            raise ValueError("proj_size is not available: put a Linear layer after the LSTM")
        for k in range(num_layers):
            for suffix in self.suffixes(k):
                self.add_weights(suffix, hidden_size * (1 + bidirectional) if k else input_size)

    def suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]

    def add_weights(self, suffix: str, width: int) -> None:
        h = self.hidden_size
        rows = self.gates * h
        setattr(self, "weight_ih" + suffix, uniform_parameter(rows, width, fan=h))
        setattr(self, "weight_hh" + suffix, uniform_parameter(rows, h, fan=h))
        for name in ("bias_ih", "bias_hh"):
            setattr(self, name + suffix, uniform_parameter(rows, fan=h) if self.bias else None)

    def weights(self, suffix: str) -> Any:
        return [getattr(self, name + suffix) for name in
                ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

    def flatten_parameters(self) -> None:
        """For PyTorch programs; GPUs need it."""

    @property
    def act(self) -> Callable:
        return {"tanh": tanh, "relu": relu}[self.nonlinearity]

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        x, batched = input, input.ndim == 3
        if not batched:
            x = x.unsqueeze(0 if self.batch_first else 1)
            hx = None if hx is None else self.packed(s.unsqueeze(1) for s in self.unpacked(hx))
        if x.shape[-1] != self.input_size:
            raise RuntimeError(f"{type(self).__name__} takes {self.input_size} features in the "
                               f"last dimension, the input has shape {tuple(x.shape)}")
        x = transpose(x, 0, 1) if self.batch_first else x
        shape = (self.num_layers * (1 + self.bidirectional), x.shape[1], self.hidden_size)
        starts = [zeros(shape, dtype=x.dtype)] * self.states if hx is None else self.unpacked(hx)
        if any(s.shape != shape for s in starts):
            raise RuntimeError(f"{type(self).__name__} takes an initial state of shape {shape}, "
                               f"found {[tuple(s.shape) for s in starts]}")
        finals: list[tuple] = []
        for k in range(self.num_layers):
            x = dropout(x, self.dropout, self.training) if k else x
            outputs = []
            for suffix in self.suffixes(k):
                out, final = self.run(x, tuple(s[len(finals)] for s in starts), suffix)
                outputs.append(out)
                finals.append(final)
            x = cat(outputs, -1) if self.bidirectional else outputs[0]
        last = [stack([final[k] for final in finals]) for k in range(self.states)]
        x = transpose(x, 0, 1) if self.batch_first else x
        if not batched:
            x, last = x.squeeze(0 if self.batch_first else 1), [s.squeeze(1) for s in last]
        return x, self.packed(last)

    def run(self, x: Tensor, state: tuple, suffix: str) -> tuple[Tensor, tuple]:
        w_ih, w_hh, b_ih, b_hh = self.weights(suffix)
        return unrolled(type(self).step, x, state, w_ih, w_hh, b_ih, b_hh, self.act,
                        suffix.endswith("_reverse"))

    def packed(self, states: Iterable[Tensor]) -> Any:
        states = tuple(states)
        return states if self.states > 1 else states[0]

    def unpacked(self, hx: Any) -> list[Tensor]:
        return list(hx) if self.states > 1 else [hx]


class _Cell(_Recurrent):
    """One step of one layer."""

    shown = "input_size hidden_size bias=? nonlinearity=?"

    @remembering
    def __init__(self, input_size: int, hidden_size: int, bias: bool = True,
                 nonlinearity: str = "tanh") -> None:
        super().__init__(input_size, hidden_size, 1, bias, nonlinearity=nonlinearity)

    def suffixes(self, layer: int) -> list[str]:
        return [""]

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        empty = zeros(*input.shape[:-1], self.hidden_size, dtype=input.dtype)
        state = (empty,) * self.states if hx is None else tuple(self.unpacked(hx))
        w_ih, w_hh, b_ih, b_hh = self.weights("")
        return self.packed(type(self).step(linear(input, w_ih, b_ih), state, w_hh, b_hh, self.act))


class _LSTM(_Recurrent):
    def run(self, x: Tensor, state: tuple, suffix: str) -> tuple[Tensor, tuple]:
        if not x.numel():
            return super().run(x, state, suffix)
        reverse = suffix.endswith("_reverse")
        out = _lstm(x, *state, *self.weights(suffix), reverse=reverse)
        return out[:-1], (out[0 if reverse else -2], out[-1])


RNN, RNNCell = (variant(base, name, gates=1, step=rnn_step)
                for base, name in ((_Recurrent, "RNN"), (_Cell, "RNNCell")))
GRU, GRUCell = (variant(base, name, gates=3, step=gru_step)
                for base, name in ((_Recurrent, "GRU"), (_Cell, "GRUCell")))
LSTM, LSTMCell = (variant(base, name, gates=4, states=2, step=lstm_step)
                  for base, name in ((_LSTM, "LSTM"), (_Cell, "LSTMCell")))


# -- attention -------------------------------------------------------------------------------------


# PyTorch's name for the last layer of its attention, so that models print alike.
_Out = variant(Linear, "NonDynamicallyQuantizableLinear")


class MultiheadAttention(Module):
    """Attention of num_heads heads (Vaswani et al., 2017). Here, other than in
    scaled_dot_product_attention, a boolean mask says who may NOT be looked at (as PyTorch)."""

    @remembering
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
                 add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
                 vdim: int | None = None, batch_first: bool = False) -> None:
        if add_bias_kv or add_zero_attn or {kdim, vdim} - {None, embed_dim}:
            raise ValueError("MultiheadAttention has no add_bias_kv and add_zero_attn, and keys "
                             "and values are as wide as queries")
        if embed_dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide a width of {embed_dim}")
        self.in_proj_weight = Parameter(xavier_uniform_(zeros(3 * embed_dim, embed_dim)))
        self.in_proj_bias = Parameter(zeros(3 * embed_dim)) if bias else None
        self.out_proj = _Out(embed_dim, embed_dim, bias)
        if bias:
            zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor,
                key_padding_mask: Tensor | None = None, need_weights: bool = True,
                attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            query, key, value = (transpose(x, 0, 1) for x in (query, key, value))
        length, batch, width = query.shape
        biases = (None,) * 3 if self.in_proj_bias is None else chunk(self.in_proj_bias, 3)
        q, k, v = (
            # (time, batch, width) -> (batch, heads, time, width / heads)
            permute(linear(x, w, b).reshape(x.shape[0], batch, self.num_heads, -1), 1, 2, 0, 3)
            for x, w, b in zip((query, key, value), chunk(self.in_proj_weight, 3), biases)
        )
        mask = None if attn_mask is None else additive(attn_mask, q.dtype)
        if mask is not None and mask.ndim == 3:
            mask = mask.reshape(batch, self.num_heads, *mask.shape[1:])
        if key_padding_mask is not None:
            padding = additive(key_padding_mask, q.dtype).reshape(batch, 1, 1, -1)
            mask = padding if mask is None else mask + padding
        p = self.dropout if self.training else 0.0
        if need_weights:
            out, weights = attend(q, k, v, mask, p, False)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out, weights = scaled_dot_product_attention(q, k, v, mask, p), None
        out = self.out_proj(permute(out, 2, 0, 1, 3).reshape(length, batch, width))
        if not batched:
            return out.squeeze(1), None if weights is None else weights.squeeze(0)
        return transpose(out, 0, 1) if self.batch_first else out, weights


def additive(mask: Tensor, dtype: Any) -> Tensor:
    """A mask of what to leave out, as numbers to add to the scores."""
    if mask.dtype.kind != "b":
        return mask.to(dtype)
    return wrap(np.where(mask._array, -math.inf, 0).astype(dtype))


class TransformerEncoderLayer(Module):
    """Self-attention and a feed-forward network, each with a residual connection and a layer
    norm: after it, or before it with norm_first."""

    attentions: tuple[str, ...] = ("self_attn",)

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 activation: Any = "relu", layer_norm_eps: float = 1e-5, batch_first: bool = False,
                 norm_first: bool = False, bias: bool = True, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        for name in self.attentions:
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout, bias,
                                                   batch_first=batch_first))
        self.linear1 = Linear(d_model, dim_feedforward, bias)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias)
        self.norm_first = norm_first
        parts = range(1, len(self.attentions) + 2)
        for k in parts:
            setattr(self, f"norm{k}", LayerNorm(d_model, layer_norm_eps, bias=bias))
        for k in parts:
            setattr(self, f"dropout{k}", Dropout(dropout))
        self.activation = {"relu": relu, "gelu": gelu}.get(activation, activation)
        self.to(device=device, dtype=dtype)

    def residual(self, k: int, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """x with what the k-th part of the layer makes of it."""
        norm, drop = getattr(self, f"norm{k}"), getattr(self, f"dropout{k}")
        return x + drop(part(norm(x))) if self.norm_first else norm(x + drop(part(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def forward(self, src: Tensor, src_mask: Tensor | None = None,
                src_key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = self.residual(1, src, lambda x: self.self_attn(
            x, x, x, src_key_padding_mask, False, src_mask)[0])
        return self.residual(2, x, self.feed_forward)


class TransformerDecoderLayer(TransformerEncoderLayer):
    """An encoder layer that between the two also attends to `memory`, what an encoder found."""

    attentions = ("self_attn", "multihead_attn")

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Any = None,  # type: ignore[override]
                memory_mask: Any = None, tgt_key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None, tgt_is_causal: bool = False,
                memory_is_causal: bool = False) -> Tensor:
        x = self.residual(1, tgt, lambda x: self.self_attn(
            x, x, x, tgt_key_padding_mask, False, tgt_mask)[0])
        x = self.residual(2, x, lambda x: self.multihead_attn(
            x, memory, memory, memory_key_padding_mask, False, memory_mask)[0])
        return self.residual(3, x, self.feed_forward)


class TransformerEncoder(Module):
    """The layer num_layers times over, each a copy with weights of its own."""

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None,
                 enable_nested_tensor: bool = True, mask_check: bool = True) -> None:
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(encoder_layer) for _ in range(num_layers))
        self.num_layers, self.norm = num_layers, norm

    def forward(self, src: Tensor, mask: Tensor | None = None,
                src_key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        for encoder in self.layers:
            src = encoder(src, mask, src_key_padding_mask)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(TransformerEncoder):
    """The decoder layer num_layers times over; all attend to the same memory."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    def forward(self, tgt: Tensor, memory: Tensor, *masks: Any,  # type: ignore[override]
                **named: Any) -> Tensor:
        for decoder in self.layers:
            tgt = decoder(tgt, memory, *masks, **named)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder and a decoder that attends to what it found (Vaswani et al., 2017)."""

    def __init__(self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6,
                 num_decoder_layers: int = 6, dim_feedforward: int = 2048, dropout: float = 0.1,
                 activation: Any = "relu", custom_encoder: Any = None, custom_decoder: Any = None,
                 layer_norm_eps: float = 1e-5, batch_first: bool = False,
                 norm_first: bool = False, bias: bool = True, device: Any = None,
                 dtype: Any = None) -> None:
        super().__init__()
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
                   batch_first, norm_first, bias)
        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(*options), num_encoder_layers,
            LayerNorm(d_model, layer_norm_eps, bias=bias))
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(*options), num_decoder_layers,
            LayerNorm(d_model, layer_norm_eps, bias=bias))
        for p in self.parameters():
            if p.ndim > 1:
                xavier_uniform_(p)
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        self.to(device=device, dtype=dtype)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Any = None, tgt_mask: Any = None,
                memory_mask: Any = None, src_key_padding_mask: Any = None,
                tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None) -> Tensor:
        memory = self.encoder(src, src_mask, src_key_padding_mask)
        return self.decoder(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask,
                            memory_key_padding_mask)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """Minus infinity above the diagonal: nobody looks ahead."""
        return METHODS["triu"](full((sz, sz), -math.inf, dtype=dtype), 1)


# =================================================================================================
# 5 Optimizers
# =================================================================================================
#
# An optimizer is its rule, a few lines of NumPy below. What all share stands first: groups of
# parameters with options of their own, the state that is kept and saved, the loop of `step`. A
# learning-rate schedule is a formula; it changes the "lr" of the optimizer's groups.


class Optimizer:
    """Changes parameters by their gradients.

    `params` is an iterable of parameters, or of groups: dicts with "params" and options that
    differ from `defaults`. `state[p]` keeps what the rule remembers of the parameter p. A subclass
    gives `step`; see Rule for the short way."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.state: dict[Tensor, dict[str, Any]] = collections.defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = []
        self.schedules: list[Any] = []  # weak references: a checkpoint of the run has them too
        params = [params] if isinstance(params, Tensor) else list(params)
        if not params:
            raise ValueError("the optimizer got no parameters: were the layers registered?")
        for group in params if isinstance(params[0], dict) else [{"params": params}]:
            self.add_param_group(group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        params = [p[1] if isinstance(p, tuple) else p for p in params]  # from named_parameters()
        group = {**self.defaults, **group, "params": params}
        for name, end in OPTION_ENDS.items():
            values = to_array(group.get(name, 0.0))
            if not ((values >= 0) & (values < end)).all():
                raise ValueError(f"{name} must lie in [0, {end}), found {group[name]}")
        known = {p for g in self.param_groups for p in g["params"]}
        for p in params:
            if not isinstance(p, Tensor) or not p.is_leaf:
                raise TypeError("optimizers change leaf tensors, not results of computations or "
                                f"{type(p).__name__}")
            if p in known:
                raise ValueError("a parameter appears in more than one group, or twice in one")
            known.add(p)
        self.param_groups.append(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                clear_grad(p, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no step")

    def state_dict(self) -> dict[str, Any]:
        """State by the number of the parameter, and the options of the groups."""
        number = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        return {"state": {number[p]: entries for p, entries in self.state.items()},
                "param_groups": [{**g, "params": [number[p] for p in g["params"]]}
                                 for g in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, state = state_dict["param_groups"], copy.deepcopy(state_dict["state"])
        found, own = ([len(g["params"]) for g in gs] for gs in (groups, self.param_groups))
        if found != own:
            raise ValueError(f"the state has parameter groups of sizes {found}, the optimizer "
                             f"of {own}")
        for group, saved in zip(self.param_groups, groups):
            group.update({k: v for k, v in saved.items() if k != "params"})
        params = [p for g in self.param_groups for p in g["params"]]
        self.state.clear()
        for number, entries in state.items():
            p = params[int(number)]
            self.state[p].update({k: v.to(p.dtype) if isinstance(v, Tensor) and k != "step" else v
                                  for k, v in entries.items()})

    def __repr__(self) -> str:
        options = {k: v for g in self.param_groups for k, v in g.items() if k != "params"}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in options.items())})"


# Where an option must lie: from 0 up to this. (NaN fails every comparison.)
OPTION_ENDS = {"betas": 1.0, "rho": 1.0, "alpha": math.inf, "lr": math.inf, "eps": math.inf,
               "momentum": math.inf, "weight_decay": math.inf, "lr_decay": math.inf,
               "initial_accumulator_value": math.inf}
PIECE = 2**18  # elements


def pieces(*arrays: np.ndarray) -> Iterator[Sequence[np.ndarray]]:
    """Arrays of one shape, cut alike into pieces that stay in the cache while a formula passes
    over them again and again (Adam on 8 million elements: a third of the time), and that bound
    the memory for its temporaries. Much smaller ones would cost more in calls than they save."""
    if len({a.shape for a in arrays}) > 1:
        raise ValueError("a parameter, its gradient and its state differ in shape: "
                         f"{', '.join(str(a.shape) for a in arrays)}")
    # To flatten another order would be to copy: what changes in place would be lost. (Results of
    # no dimensions are NumPy scalars, which `out=` refuses: these are flattened too.)
    small = arrays[0].ndim and arrays[0].size <= PIECE
    if small or not all(a.flags.c_contiguous for a in arrays):
        yield arrays
        return
    flat = [a.reshape(-1) for a in arrays]
    for start in range(0, len(flat[0]), PIECE):
        yield [a[start : start + PIECE] for a in flat]


REQUIRED = inspect.Parameter.empty  # stands where an argument has no default


def arguments_of(function: Callable) -> dict[str, Any]:
    """The names of a function's arguments with their defaults."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}

def signature(arguments: dict[str, Any]) -> inspect.Signature:
    return inspect.Signature([
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in arguments.items()])


class Rule(Optimizer):
    """An optimizer that is one function, written in NumPy element by element:

        rule(p, g, step, ..., lr=1e-3, ...) changes the array p in place by its gradient g.

    It is step number `step` for p, from 1. The next arguments, those without a default, are
    arrays that are kept from step to step, zeros at first (None where `kept_with` names an option
    for them that is off). Those with a default are the constructor's options. Three of these are
    dealt with before the rule is called: `maximize` turns g round; `weight_decay` adds its share
    of p to g (L2), or with `decoupled_weight_decay` shrinks p by itself."""

    kept_with: dict[str, str] = {}
    kept: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    rule: Any
    __signature__: inspect.Signature

    def __init_subclass__(cls) -> None:
        if "rule" in vars(cls):
            arguments = arguments_of(cls.rule)
            cls.kept = tuple(n for n, default in arguments.items() if default is REQUIRED)[3:]
            cls.options = {n: d for n, d in arguments.items() if d is not REQUIRED}
        if "options" in vars(cls):
            cls.__signature__ = signature({"params": REQUIRED, **cls.options})

    def __init__(self, *args: Any, **options: Any) -> None:
        # How PyTorch shall compute it, not what: without meaning here.
        for name in ("foreach", "fused", "capturable", "differentiable"):
            if options.pop(name, None) and name == "differentiable":
                raise ValueError("differentiable=True is not available: steps are not recorded")
        defaults = bind(type(self).__name__, self.__signature__, args, options)
        super().__init__(defaults.pop("params"), defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A parameter whose gradient is None is left
        alone altogether: no decay, no momentum."""
        loss = None if closure is None else enable_grad()(closure)()
        for group in self.param_groups:
            kept = [k for k in self.kept if k not in self.kept_with or group[self.kept_with[k]]]
            arguments: dict[str, Any] = {k: None for k in self.kept if k not in kept}
            arguments |= {name: group[name] for name in self.options}
            arguments["lr"] = float(group["lr"])  # a NumPy number would make float64 of float32
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, kept, arguments)
        return loss

    def change(self, p: Any, kept: Sequence[str], arguments: dict[str, Any]) -> None:
        step, state = 1, self.state[p] if kept else {}
        if kept:
            fresh = [k for k in kept if state.get(k) is None]
            for name in fresh:
                state[name] = wrap(np.zeros_like(p._array))
            # (PyTorch's SGD keeps momentum without counting steps.)
            step = state["step"] = int(state.get("step", not fresh)) + 1
        maximize, decay = arguments.get("maximize"), arguments.get("weight_decay")
        for q, g, *arrays in pieces(p._array, p.grad._array, *[state[k]._array for k in kept]):
            if maximize:
                g = -g
            if decay and arguments.get("decoupled_weight_decay"):
                q *= 1 - arguments["lr"] * decay
            elif decay:
                g = g + q * decay
            self.rule(q, g, step, **dict(zip(kept, arrays)), **arguments)
        touch(p, f"{type(self).__name__}.step")


# -- update rules ----------------------------------------------------------------------------------


class SGD(Rule):
    """Stochastic gradient descent, with momentum (Polyak) or Nesterov's form of it."""

    kept_with = {"momentum_buffer": "momentum"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.defaults["nesterov"] and (self.defaults["momentum"] <= 0
                                          or self.defaults["dampening"] != 0):
            raise ValueError("Nesterov momentum needs momentum > 0 and dampening = 0")

    @staticmethod
    def rule(p, g, step, momentum_buffer, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0,
             nesterov=False, maximize=False):
        if momentum:
            momentum_buffer *= momentum
            momentum_buffer += g * (1 - dampening) if dampening and step > 1 else g
            g = g + momentum_buffer * momentum if nesterov else momentum_buffer
        p -= g * lr


class Adam(Rule):
    """Kingma and Ba, 2015: steps of a size that depends on the gradient's mean over its root
    mean square, both corrected for their start at zero. `weight_decay` is added to the gradient
    (L2), unlike AdamW's."""

    kept_with = {"max_exp_avg_sq": "amsgrad"}

    @staticmethod
    def rule(p, g, step, exp_avg, exp_avg_sq, max_exp_avg_sq, lr=1e-3, betas=(0.9, 0.999),
             eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False,
             decoupled_weight_decay=False):
        # One temporary, used again and again, is a fifth faster than one for every result.
        change = g - exp_avg
        change *= 1 - betas[0]
        exp_avg += change
        np.multiply(g, g, out=change)
        change *= 1 - betas[1]
        exp_avg_sq *= betas[1]
        exp_avg_sq += change
        if amsgrad:
            exp_avg_sq = np.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        # The bias: averages that began at zero are too small; their weights sum to this, not 1.
        weight, weight_sq = (1 - beta**step for beta in betas)
        # p -= lr * (exp_avg / weight) / (sqrt(exp_avg_sq / weight_sq) + eps), in fewer passes
        root = math.sqrt(weight_sq)
        np.sqrt(exp_avg_sq, out=change)
        change += eps * root
        np.divide(exp_avg, change, out=change)
        change *= lr * root / weight
        p -= change


class AdamW(Adam):
    """Adam with weight decay apart from the gradient (Loshchilov and Hutter, 2019)."""

    options = Adam.options | {"weight_decay": 1e-2, "decoupled_weight_decay": True}


class Adagrad(Rule):
    """Duchi et al., 2011: each element's rate falls with the root of its summed squares."""

    @staticmethod
    def rule(p, g, step, sum, lr=1e-2, lr_decay=0.0, weight_decay=0.0,
             initial_accumulator_value=0.0, eps=1e-10, maximize=False):
        if step == 1:
            sum += initial_accumulator_value
        sum += g * g
        p -= g / (np.sqrt(sum) + eps) * (lr / (1 + (step - 1) * lr_decay))


class RMSprop(Rule):
    """Tieleman and Hinton, 2012: divide by the root of a running mean of squares."""

    kept_with = {"grad_avg": "centered", "momentum_buffer": "momentum"}

    @staticmethod
    def rule(p, g, step, square_avg, grad_avg, momentum_buffer, lr=1e-2, alpha=0.99, eps=1e-8,
             weight_decay=0.0, momentum=0.0, centered=False, maximize=False):
        square_avg *= alpha
        square_avg += g * g * (1 - alpha)
        if centered:
            grad_avg += (g - grad_avg) * (1 - alpha)
            square_avg = square_avg - grad_avg * grad_avg
        change = g / (np.sqrt(square_avg) + eps)
        if momentum:
            momentum_buffer *= momentum
            momentum_buffer += change
            change = momentum_buffer
        p -= change * lr


class Adadelta(Rule):
    """Zeiler, 2012: steps in the units of the parameter, from running means of both squares."""

    @staticmethod
    def rule(p, g, step, square_avg, acc_delta, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0,
             maximize=False):
        square_avg *= rho
        square_avg += g * g * (1 - rho)
        change = np.sqrt((acc_delta + eps) / (square_avg + eps)) * g
        acc_delta *= rho
        acc_delta += change * change * (1 - rho)
        p -= change * lr


# -- gradients as a whole --------------------------------------------------------------------------


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """Scale all gradients by one factor, so that their joint norm is at most max_norm; returns
    the norm before."""
    grads = gradients(parameters)
    if norm_type == 2:
        total = math.sqrt(sum(sum_of_squares(x) for g in grads for (x,) in pieces(g._array)))
    else:
        norms = [np.linalg.norm(g._array.astype(np.float64).ravel(), norm_type) for g in grads]
        total = float(np.linalg.norm(norms, norm_type)) if norms else 0.0
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total}: clipping would spread it to "
                           "every parameter. Look for a NaN or an overflow in the loss")
    scale = max_norm / (total + 1e-6)
    if not scale >= 1:  # NaN scales too, as in PyTorch
        with np.errstate(invalid="ignore"):  # inf * 0
            for g in grads:
                g._array *= scale
                touch(g, "clip_grad_norm_")
    return tensor(total, dtype=np.result_type(np.float32, *(g.dtype for g in grads)))

def sum_of_squares(x: np.ndarray) -> float:
    """In float64 where float32 would overflow (from 1e19) or lose all digits."""
    x = x.ravel()
    with np.errstate(over="ignore", under="ignore"):
        total = 0.0 if x.dtype == np.float16 else float(np.vecdot(x, x))
    if not 1e-30 < total < math.inf:
        x = x.astype(np.float64)
        total = float(np.vecdot(x, x))
    return total

def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    for g in gradients(parameters):
        np.clip(g._array, -clip_value, clip_value, out=g._array)
        touch(g, "clip_grad_value_")

def gradients(parameters: Any) -> list[Tensor]:
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p.grad for p in parameters if p.grad is not None]

def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    return cat([p.reshape(-1) for p in parameters])

@no_grad()
def vector_to_parameters(vector: Tensor, parameters: Iterable[Tensor]) -> None:
    start = 0
    for p in parameters:
        p.copy_(vector[start : start + p.numel()].reshape(p.shape))
        start += p.numel()


# -- LBFGS -----------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """A point of a line search: how far along, the loss there, its gradient, its slope."""

    t: float
    loss: np.float64  # NumPy's numbers divide by zero without an exception
    g: Tensor
    slope: np.float64


class LBFGS(Optimizer):
    """Limited-memory BFGS (Nocedal and Wright, algorithm 7.5), with a line search that ensures
    the strong Wolfe conditions, or a fixed step. `step(closure)` evaluates the closure several
    times, each giving the loss and fresh gradients."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, max_iter: int = 20,
                 max_eval: int | None = None, tolerance_grad: float = 1e-7,
                 tolerance_change: float = 1e-9, history_size: int = 100,
                 line_search_fn: str | None = None) -> None:
        super().__init__(params, {
            "lr": lr, "max_iter": max_iter, "max_eval": max_eval or max_iter * 5 // 4,
            "tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change,
            "history_size": history_size, "line_search_fn": line_search_fn})
        if len(self.param_groups) != 1:
            raise ValueError("LBFGS takes one parameter group: its directions span all parameters")
        if line_search_fn not in (None, "strong_wolfe"):
            raise ValueError(f"line_search_fn is None or 'strong_wolfe', not {line_search_fn!r}")

    @no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise TypeError("LBFGS.step needs a closure that computes the loss and its gradients")
        group = self.param_groups[0]
        params, lr, tiny = group["params"], float(group["lr"]), group["tolerance_change"]
        state = self.state[params[0]]
        evaluations = 0

        def evaluate() -> tuple[Any, np.float64, Tensor]:
            nonlocal evaluations
            evaluations += 1
            with enable_grad():
                loss = closure()
            return loss, np.float64(float(loss)), parameters_to_vector(
                [zeros_like(p) if p.grad is None else p.grad for p in params])

        def at(t: float) -> Probe:
            vector_to_parameters(start + t * d, params)
            _, loss, g = evaluate()
            return Probe(t, loss, g, np.float64((g @ d).item()))

        first, loss, g = evaluate()
        for iteration in range(1, group["max_iter"] + 1):
            if g.abs().max() <= group["tolerance_grad"]:
                break
            if "d" not in state:
                state.update(pairs=[], H_diag=1.0, n_iter=0)
                t = min(1.0, 1.0 / g.abs().sum().item()) * lr
            else:  # what the last step s taught about the curvature
                y, s, t = g - state["prev_flat_grad"], state["d"] * state["t"], lr
                if (ys := (y @ s).item()) > 1e-10:  # else no longer positive definite
                    state["pairs"] = [*state["pairs"], (y, s, 1 / ys)][-group["history_size"] :]
                    state["H_diag"] = ys / (y @ y).item()
            d = two_loop(-g, state["pairs"], state["H_diag"])
            state.update(d=d, t=t, prev_flat_grad=g, n_iter=state["n_iter"] + 1)
            here = begin = Probe(0.0, loss, g, np.float64((g @ d).item()))
            if begin.slope > -tiny:
                break
            start = parameters_to_vector(params)
            if group["line_search_fn"]:
                here = strong_wolfe(at, t, begin, d.abs().max().item(),
                                    group["max_eval"] - evaluations)
                t = here.t
            elif iteration < group["max_iter"]:
                here = at(t)
            vector_to_parameters(start + t * d, params)
            state["t"], loss, g = t, here.loss, here.g
            if (evaluations >= group["max_eval"] or (t * d).abs().max() <= tiny
                    or abs(loss - begin.loss) < tiny):
                break
        state["func_evals"] = state.get("func_evals", 0) + evaluations
        return first


def two_loop(direction: Tensor, pairs: list, scale: float) -> Tensor:
    """The inverse Hessian's approximation by the last pairs (y, s, 1 / y.s), times -gradient."""
    d, alphas = direction, []
    for y, s, rho in reversed(pairs):
        alphas.append(rho * (s @ d).item())
        d = d - alphas[-1] * y
    d = d * scale
    for (y, s, rho), alpha in zip(pairs, reversed(alphas)):
        d = d + (alpha - rho * (y @ d).item()) * s
    return d


def strong_wolfe(at: Callable[[float], Probe], t: float, begin: Probe, width: float, most: int,
                 c1: float = 1e-4, c2: float = 0.9, change: float = 1e-9) -> Probe:
    """A point that lowers the loss enough and flattens its slope (Nocedal and Wright, algorithms
    3.5 and 3.6). The details are PyTorch's, so that the paths are the same."""

    def too_high(x: Probe) -> bool:
        return bool(x.loss > begin.loss + c1 * x.t * begin.slope)

    def flat(x: Probe) -> bool:
        return bool(abs(x.slope) <= -c2 * begin.slope)

    # Go on until there is a good point between the last two.
    before, here = begin, at(t)
    for tries in range(most):
        if too_high(here) or (tries > 1 and here.loss >= before.loss):
            break
        if flat(here):
            return here
        if here.slope >= 0:
            break
        t = cubic_minimum(before, here, here.t + 0.01 * (here.t - before.t), 10 * here.t)
        before, here = here, at(t)
    else:
        before, tries = begin, most

    # Narrow the interval between them; its end with the lower loss is the best point so far.
    ends = [before, here]
    best, stalled = int(before.loss > here.loss), False
    for _ in range(tries, most):
        low, high = sorted(x.t for x in ends)
        if (high - low) * width < change:
            break
        t, margin = cubic_minimum(ends[0], ends[1], low, high), 0.1 * (high - low)
        near = min(high - t, t - low) < margin
        if near and (stalled or not low < t < high):  # twice so near an end is no progress
            t, near = high - margin if high - t < t - low else low + margin, False
        stalled, here = near, at(t)
        if too_high(here) or here.loss >= ends[best].loss:
            ends[1 - best] = here
            best = int(ends[0].loss > ends[1].loss)
            continue
        if here.slope * (ends[1 - best].t - ends[best].t) >= 0:
            ends[1 - best] = ends[best]
        ends[best] = here
        if flat(here):
            break
    return ends[best]


def cubic_minimum(a: Probe, b: Probe, low: float, high: float) -> float:
    """Where the cubic with the losses and slopes at a and b is least, between low and high."""
    a, b = sorted((a, b), key=lambda x: x.t)
    with np.errstate(all="ignore"):
        d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t)
        square = d1 * d1 - a.slope * b.slope
        if not square >= 0:
            return (low + high) / 2
        d2 = np.sqrt(square)
        t = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2))
    return float(min(max(t, low), high))


# -- learning-rate schedules -----------------------------------------------------------------------


class LRScheduler:
    """Sets the learning rate of every group from the number of steps done.

    A subclass gives `rate(base, step, ...)`, the rate after so many steps of a group that began
    with `base`: a pure function, so that the schedule is the same however the run was cut into
    pieces. What follows base and step are the constructor's arguments."""

    chains = True
    optimizer: Any
    last_epoch: int
    options: dict[str, Any] = {}
    rate: Any
    __signature__: inspect.Signature

    def __init_subclass__(cls) -> None:
        if "rate" in vars(cls):
            cls.options = dict(list(arguments_of(cls.rate).items())[2:])
            cls.__signature__ = signature({"optimizer": REQUIRED, **cls.options, "last_epoch": -1})

    def __init__(self, *args: Any, **options: Any) -> None:
        vars(self).update(bind(type(self).__name__, self.__signature__, args, options))
        self.start()

    def start(self) -> None:
        self.optimizer.schedules.append(weakref.ref(self))
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.step()

    def rates(self, step: int) -> list[float]:
        options = {name: getattr(self, name) for name in self.options}
        return [self.rate(base, step, **options) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Where something else moved the rates since, as a second schedule does, and the schedule
        `chains`, then they change by the ratio that the formula changes by."""
        groups = self.optimizer.param_groups
        found = [group["lr"] for group in groups]
        old = (found if epoch is not None or not self.chains else
               self.rates(self.last_epoch) if self.last_epoch >= 0 else self.base_lrs)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        for group, new, was, now in zip(groups, self.rates(self.last_epoch), old, found):
            group["lr"] = new if now == was or not was else new / was * now
        self._last_lr = self.get_last_lr()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("optimizer", "lr_lambdas")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Unlike PyTorch's, this sets the optimizer's rates too."""
        vars(self).update(state_dict)
        self.rates(self.last_epoch)  # OneCycleLR sets the momentum here
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            group["lr"] = rate


def per_group(optimizer: Any, value: Any) -> list:
    """One value for each parameter group: those given, or the one for all."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
    if len(values) != groups:
        raise ValueError(f"{len(values)} values for {groups} parameter groups")
    return values


def schedule(name: str, rate: Callable[..., float], chains: bool = True) -> Any:
    return type(name, (LRScheduler,), {"rate": staticmethod(rate), "chains": chains,
                                       "__doc__": rate.__doc__, "__module__": __name__})

def cosine(start: float, end: float, part: float) -> float:
    """Half a cosine from start (part = 0) to end (part = 1)."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2

def line(start: float, end: float, part: float) -> float:
    return start + (end - start) * part

def warm_restarts(base: float, step: int, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> float:
    """Cosines of lengths T_0, T_0 T_mult, T_0 T_mult^2 ... (Loshchilov and Hutter, 2017)."""
    length = T_0
    while step >= length:
        step -= length
        length *= T_mult
    return cosine(base, eta_min, step / length)


StepLR = schedule("StepLR", lambda base, step, step_size, gamma=0.1:
                  base * gamma ** (step // step_size))
MultiStepLR = schedule("MultiStepLR", lambda base, step, milestones, gamma=0.1:
                       base * gamma ** sum(step >= m for m in milestones))
ExponentialLR = schedule("ExponentialLR", lambda base, step, gamma: base * gamma**step)
ConstantLR = schedule("ConstantLR", lambda base, step, factor=1 / 3, total_iters=5:
                      base * (factor if step < total_iters else 1))
LinearLR = schedule("LinearLR", lambda base, step, start_factor=1 / 3, end_factor=1.0,
                    total_iters=5: base * line(
                        start_factor, end_factor, min(step, total_iters) / total_iters))
PolynomialLR = schedule("PolynomialLR", lambda base, step, total_iters=5, power=1.0:
                        base * (1 - min(step, total_iters) / total_iters) ** power)
CosineAnnealingLR = schedule("CosineAnnealingLR", lambda base, step, T_max, eta_min=0.0:
                             cosine(base, eta_min, step / T_max))
CosineAnnealingWarmRestarts = schedule("CosineAnnealingWarmRestarts", warm_restarts, chains=False)


class LambdaLR(LRScheduler):
    """The base rate times lr_lambda(step); one function, or one for each group."""

    chains = False

    def __init__(self, optimizer: Any, lr_lambda: Any, last_epoch: int = -1) -> None:
        self.optimizer, self.last_epoch = optimizer, last_epoch
        self.lr_lambdas = per_group(optimizer, lr_lambda)
        self.start()

    def rates(self, step: int) -> list[float]:
        return [base * factor(step) for base, factor in zip(self.base_lrs, self.lr_lambdas)]


class OneCycleLR(LRScheduler):
    """Up to max_lr and down to almost nothing, while momentum goes the other way (Smith and
    Topin, 2019)."""

    chains = False

    def __init__(self, optimizer: Any, max_lr: Any, total_steps: int | None = None,
                 epochs: int | None = None, steps_per_epoch: int | None = None,
                 pct_start: float = 0.3, anneal_strategy: str = "cos",
                 cycle_momentum: bool = True, base_momentum: float = 0.85,
                 max_momentum: float = 0.95, div_factor: float = 25.0,
                 final_div_factor: float = 1e4, three_phase: bool = False,
                 last_epoch: int = -1) -> None:
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ValueError("OneCycleLR needs total_steps, or epochs and steps_per_epoch")
            total_steps = epochs * steps_per_epoch
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"anneal_strategy is 'cos' or 'linear', not {anneal_strategy!r}")
        self.optimizer, self.last_epoch, self.total_steps = optimizer, last_epoch, total_steps
        self.anneal_strategy = anneal_strategy
        up = pct_start * total_steps - 1
        self.ends = [0.0, up, *[2 * up] * three_phase, total_steps - 1]  # of the phases
        self.curves = []  # for each group: its rate at these steps
        for group, top in zip(optimizer.param_groups, per_group(optimizer, max_lr)):
            low = group["initial_lr"] = top / div_factor
            self.curves.append([low, top, *[low] * three_phase, low / final_div_factor])
        self.momenta = [max_momentum, base_momentum, *[max_momentum] * three_phase, max_momentum]
        self.cycle_momentum = cycle_momentum
        self.start()

    def at(self, step: int, curve: list[float]) -> float:
        phase = min(sum(step > end for end in self.ends[1:]), len(self.ends) - 2)
        begin, end = self.ends[phase : phase + 2]
        move = cosine if self.anneal_strategy == "cos" else line
        return move(curve[phase], curve[phase + 1], (step - begin) / (end - begin))

    def rates(self, step: int) -> list[float]:
        if step > self.total_steps:
            raise ValueError(f"OneCycleLR was made for {self.total_steps} steps, this is one more")
        for group in self.optimizer.param_groups if self.cycle_momentum else ():
            momentum = self.at(step, self.momenta)
            group.update({"betas": (momentum, *group["betas"][1:])} if "betas" in group
                         else {"momentum": momentum})
        return [self.at(step, curve) for curve in self.curves]


class SequentialLR(LRScheduler):
    """One schedule after the other, each counting its steps from its milestone."""

    def __init__(self, optimizer: Any, schedulers: Sequence[Any], milestones: Sequence[int],
                 last_epoch: int = -1) -> None:
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(f"{len(schedulers)} schedules need {len(schedulers) - 1} milestones")
        self.optimizer, self.schedulers = optimizer, list(schedulers)
        self.milestones, self.last_epoch = list(milestones), last_epoch
        optimizer.schedules.append(weakref.ref(self))
        self.step()

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        current = sum(self.last_epoch >= m for m in self.milestones)
        begin = [0, *self.milestones][current]
        self.schedulers[current].step(
            self.last_epoch - begin if epoch is not None or self.last_epoch == begin else None)
        self._last_lr = self.get_last_lr()

    def rates(self, step: int) -> list[float]:
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedulers": [s.state_dict() for s in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"]):
            scheduler.load_state_dict(state)
        super().load_state_dict({**state_dict, "schedulers": self.schedulers})


class ReduceLROnPlateau(LRScheduler):
    """Multiply the rates by `factor` when the metric has not improved for `patience` steps."""

    def __init__(self, optimizer: Any, mode: str = "min", factor: float = 0.1, patience: int = 10,
                 threshold: float = 1e-4, threshold_mode: str = "rel", cooldown: int = 0,
                 min_lr: Any = 0.0, eps: float = 1e-8) -> None:
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs") or not factor < 1:
            raise ValueError("ReduceLROnPlateau takes mode 'min' or 'max', threshold_mode 'rel' or "
                             f"'abs', and a factor below 1, not {mode}, {threshold_mode}, {factor}")
        self.optimizer, self.factor, self.patience, self.eps = optimizer, factor, patience, eps
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.cooldown, self.min_lrs = cooldown, per_group(optimizer, min_lr)
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = self.last_epoch = 0
        self._last_lr = self.get_last_lr()
        optimizer.schedules.append(weakref.ref(self))

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        value, up = float(metrics), 1 if self.mode == "max" else -1
        margin = up * self.threshold
        if up * value > up * (self.best * (1 + margin) if self.threshold_mode == "rel"
                              else self.best + margin):
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            for group, least in zip(self.optimizer.param_groups, self.min_lrs):
                lower = max(group["lr"] * self.factor, least)
                if group["lr"] - lower > self.eps:
                    group["lr"] = lower
        self.last_epoch, self._last_lr = self.last_epoch + 1, self.get_last_lr()

    def rates(self, step: int) -> list[float]:
        return self._last_lr


# =================================================================================================
# 6 Data
# =================================================================================================


class Dataset:
    """Anything with __len__ and __getitem__."""

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} defines no __len__")


class IterableDataset(Dataset):
    """A stream of samples: __iter__ instead of __getitem__."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} defines no __iter__")


class TensorDataset(Dataset):
    """Tensors with one row per sample; a sample is the tuple of their rows."""

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(t) for t in tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors have {lengths} rows: one per sample means equal numbers")
        self.tensors = tensors

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


class Subset(Dataset):
    """The samples of a dataset at the given indices."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)


def random_split(dataset: Any, lengths: Sequence[float],
                 generator: Generator | None = None) -> list[Subset]:
    """Cut a dataset into random parts of the given lengths, or fractions that sum to 1."""
    if abs(sum(lengths) - 1) < 1e-9 and all(0 <= n <= 1 for n in lengths):
        parts = [int(n * len(dataset)) for n in lengths]
        for i in range(len(dataset) - sum(parts)):
            parts[i % len(parts)] += 1
    else:
        parts = [int(n) for n in lengths]
    if sum(parts) != len(dataset):
        raise ValueError(f"the lengths {list(lengths)} do not add up to the {len(dataset)} samples")
    order = rng(generator).permutation(len(dataset)).tolist()
    starts = itertools.accumulate(parts, initial=0)
    return [Subset(dataset, order[start : start + n]) for start, n in zip(starts, parts)]


# -- orders ----------------------------------------------------------------------------------------


class Sampler:
    """Anything that gives the indices of samples."""

    def __init__(self, data_source: Any = None) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} defines no __iter__")


class SequentialSampler(Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(SequentialSampler):
    """Shuffles anew every epoch; the order is a function of (seed, epoch), so that two loaders
    with one seed, and all ranks of a distributed run, agree epoch by epoch."""

    def __init__(self, data_source: Any, replacement: bool = False, num_samples: int | None = None,
                 generator: Generator | None = None) -> None:
        super().__init__(data_source)
        self.replacement = replacement
        self.num_samples = len(data_source) if num_samples is None else num_samples
        self.seed = int(rng(generator).integers(2**63))
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        draw = np.random.default_rng([self.seed, self.epoch])
        self.epoch += 1
        n = len(self.data_source)
        if self.replacement:
            return iter(draw.integers(n, size=self.num_samples).tolist())
        rounds = range(0, self.num_samples, max(n, 1))
        return iter([i for _ in rounds for i in draw.permutation(n).tolist()][: self.num_samples])

    def __len__(self) -> int:
        return self.num_samples


class WeightedRandomSampler(Sampler):
    """num_samples indices, each drawn with a probability proportional to its weight."""

    def __init__(self, weights: Sequence[float], num_samples: int, replacement: bool = True,
                 generator: Generator | None = None) -> None:
        self.weights, self.num_samples = np.asarray(weights, np.float64), num_samples
        self.replacement, self.generator = replacement, generator

    def __iter__(self) -> Iterator[int]:
        share = self.weights / self.weights.sum()
        picks = rng(self.generator).choice(len(share), self.num_samples, self.replacement, share)
        return iter(picks.tolist())

    def __len__(self) -> int:
        return self.num_samples


class SubsetRandomSampler(RandomSampler):
    """The given indices in random order."""

    def __init__(self, indices: Sequence[int], generator: Generator | None = None) -> None:
        super().__init__(indices, generator=generator)

    def __iter__(self) -> Iterator[int]:
        return (self.data_source[i] for i in super().__iter__())


class DistributedSampler(Sampler):
    """This rank's share of the samples, in an order that all ranks agree on.

    The shares are disjoint and complete: some ranks get one sample more. PyTorch repeats samples
    until all shares are equal, which `pad=True` does too; drop_last cuts instead."""

    def __init__(self, dataset: Any, num_replicas: int | None = None, rank: int | None = None,
                 shuffle: bool = True, seed: int = 0, drop_last: bool = False,
                 pad: bool = False) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.num_replicas = DISTRIBUTED["get_world_size"]() if num_replicas is None \
            else num_replicas
        self.rank = DISTRIBUTED["get_rank"]() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas} replicas")
        self.drop_last, self.pad, self.epoch = drop_last, pad, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        surplus = len(order) % self.num_replicas
        if self.drop_last:
            order = order[: len(order) - surplus]
        elif self.pad and surplus:
            order = np.resize(order, len(order) + self.num_replicas - surplus)
        return iter(order[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        n, parts = len(self.dataset), self.num_replicas
        if self.drop_last:
            return n // parts
        return -(-n // parts) if self.pad else (n - self.rank + parts - 1) // parts


class BatchSampler(Sampler):
    """Groups of batch_size indices; the last may be shorter, unless drop_last."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def __len__(self) -> int:
        n = len(self.sampler)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


# -- batches ---------------------------------------------------------------------------------------


def default_collate(samples: Sequence[Any]) -> Any:
    """One batch from many samples: tensors are stacked; tuples, lists and dicts by position."""
    first = samples[0]
    if isinstance(first, Tensor):
        return stack(list(samples))
    if isinstance(first, (np.ndarray, np.generic)):
        return wrap(np.stack(samples))
    if isinstance(first, (float, int)):  # Python's floats keep their 64 bits, as in PyTorch
        return tensor(list(samples), dtype=float64 if isinstance(first, float) else None)
    if isinstance(first, dict):
        return {key: default_collate([s[key] for s in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        if any(len(s) != len(first) for s in samples):
            raise RuntimeError("the samples of a batch have different lengths: pass collate_fn")
        columns = [default_collate(column) for column in zip(*samples)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    return list(samples)


class DataLoader:
    """Batches of a dataset, in order or shuffled anew every epoch. With num_workers, threads
    fetch the next batches meanwhile; the random numbers they draw depend on the batch alone.
    (Without meaning here: pin_memory, timeout, multiprocessing_context, persistent_workers,
    pin_memory_device; batches always come in order.)"""

    def __init__(self, dataset: Any, batch_size: int | None = 1, shuffle: bool | None = False,
                 sampler: Any = None, batch_sampler: Any = None, num_workers: int = 0,
                 collate_fn: Callable[[list], Any] | None = None, pin_memory: bool = False,
                 drop_last: bool = False, timeout: float = 0, worker_init_fn: Any = None,
                 multiprocessing_context: Any = None, generator: Generator | None = None, *,
                 prefetch_factor: int | None = 2, persistent_workers: bool = False,
                 pin_memory_device: str = "", in_order: bool = True) -> None:
        if batch_size is None or batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}; for samples one "
                             "by one, iterate over the dataset itself")
        if sampler is not None and shuffle:
            raise ValueError("a sampler decides the order: leave out shuffle")
        if isinstance(dataset, IterableDataset) and (shuffle or sampler or batch_sampler):
            raise ValueError("an IterableDataset has its own order: leave out shuffle and samplers")
        if sampler is None:
            sampler = getattr(batch_sampler, "sampler", None) or (
                RandomSampler(dataset, generator=generator) if shuffle else
                SequentialSampler(dataset))
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.sampler, self.num_workers, self.worker_init_fn = sampler, num_workers, worker_init_fn
        self.ahead = num_workers * (prefetch_factor or 2)
        self.batch_sampler = batch_sampler or BatchSampler(sampler, batch_size, drop_last)
        self.collate_fn = collate_fn or default_collate

    def fetch(self, indices: Sequence[int]) -> Any:
        """The batch of these samples. Rows of a TensorDataset are taken all at once."""
        if isinstance(self.dataset, TensorDataset) and self.collate_fn is default_collate:
            return list(self.dataset[np.asarray(indices, np.int64)])
        return self.collate_fn([self.dataset[i] for i in indices])

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDataset):
            return map(self.collate_fn, BatchSampler(self.dataset, self.batch_size, self.drop_last))
        return self.prefetched() if self.num_workers else map(self.fetch, self.batch_sampler)

    def prefetched(self) -> Iterator[Any]:
        from concurrent.futures import ThreadPoolExecutor

        seed = int(rng().integers(2**63))

        def work(number: int, indices: Sequence[int]) -> Any:
            _generator.set(Generator().manual_seed([seed, number]))
            return self.fetch(indices)

        ids = itertools.count()
        start = self.worker_init_fn and (lambda: self.worker_init_fn(next(ids)))
        with ThreadPoolExecutor(self.num_workers, initializer=start) as pool:
            pending: collections.deque = collections.deque()
            for number, indices in enumerate(self.batch_sampler):
                context = contextvars.copy_context()
                pending.append(pool.submit(context.run, work, number, indices))
                if len(pending) > self.ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def __len__(self) -> int:
        return len(self.batch_sampler)


# -- checkpoints -----------------------------------------------------------------------------------
#
# The safetensors format: the length of a JSON header (u64, little-endian), the header with name,
# dtype, shape and byte range of each tensor, then the bytes. Reading one never runs code.

SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
               "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
               "BF16": "<u2"}
HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference implementation


def save(obj: Any, path: Any) -> None:
    """Write a state to a safetensors file. A flat dict of tensors becomes the file that other
    programs expect; numbers, strings, lists and nested dicts go into its metadata as JSON, and
    the tensors inside are named by their path: {"model": model.state_dict()} has "model.0.weight".
    PyTorch reads that with

        state = safetensors.torch.load_file(path)
        model.load_state_dict({name.removeprefix("model."): tensor
                               for name, tensor in state.items() if name.startswith("model.")})

    Saving is atomic: the file appears under its name only when it is complete. (Or `path` is a
    file that is open for writing bytes.)"""
    tensors: dict[str, np.ndarray] = {}
    tree = flattened(obj, "", tensors)
    is_flat = (isinstance(obj, dict) and list(obj) == list(tensors)
               and all(isinstance(v, (Tensor, np.ndarray)) for v in obj.values()))
    header: dict[str, Any] = {} if is_flat else {"__metadata__": {"minidist": json.dumps(tree)}}
    codes = {np.dtype(code): name for name, code in SAFETENSORS.items() if name != "BF16"}
    start = 0
    # By falling item size, so that every tensor starts at a multiple of its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, array in ordered:
        code = codes.get(array.dtype.newbyteorder("<"))
        if code is None:
            raise TypeError(f"cannot save {name}: the format has no dtype {array.dtype}")
        header[name] = {"dtype": code, "shape": list(array.shape),
                        "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:  # in order of elements, whatever their order in memory
            file.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        file.flush()

    if hasattr(path, "write"):
        return write(path)
    path = os.path.realpath(path)  # a link stays, what it leads to is replaced
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"cannot save to {path}: it is a folder or a device, not a file")
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            write(file)
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise


def packed(obj: Any) -> bytes:
    """What `save` would write."""
    file = io.BytesIO()
    save(obj, file)
    return file.getvalue()


def flattened(value: Any, path: str, tensors: dict[str, np.ndarray]) -> Any:
    """The value as JSON. A tensor is replaced by its name in `tensors`, as {"$tensor": name}, an
    array as {"$array": name}; {"$tuple": ...}, {"$dtype": ...} and {"$dict": ...} are what JSON
    does not know either."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.dtype):
        return {"$dtype": value.name}
    if isinstance(value, (Tensor, np.ndarray)):
        name = path or "tensor"
        while name in tensors or name == "__metadata__":
            name += "_"
        tensors[name] = to_array(value)
        return {"$tensor" if isinstance(value, Tensor) else "$array": name}
    prefix = path and path + "."
    if isinstance(value, (list, tuple)):
        items = [flattened(v, f"{prefix}{i}", tensors) for i, v in enumerate(value)]
        return {"$tuple": items} if type(value) is tuple else items
    if isinstance(value, dict) and all(isinstance(k, (str, int, float)) for k in value):
        items = [[k, flattened(v, f"{prefix}{k}", tensors)] for k, v in value.items()]
        plain = all(isinstance(k, str) and not k.startswith("$") for k in value)
        return dict(items) if plain else {"$dict": items}
    raise TypeError(f"cannot save {path or 'this'}: a {type(value).__name__} is not a tensor, "
                    "number or string, nor a list or dict of these (keys: text and numbers)")


def load(path: Any, map_location: Any = None, weights_only: bool = True) -> Any:
    """Read what `save` wrote, or any safetensors file (a dict of its tensors).

    Every length and offset is checked against the file before memory is taken."""

    def broken(what: str) -> ValueError:
        name = getattr(path, "name", path)
        return ValueError(f"{name} is not a valid safetensors file: {what}")

    opened = contextlib.nullcontext(path) if hasattr(path, "readinto") else open(path, "rb")
    with opened as file:
        begin = file.tell()
        size = file.seek(0, os.SEEK_END) - begin
        file.seek(begin)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            file.seek(begin)
            if file.read(2)[:1] in (b"P", b"\x80"):  # a zip archive ("PK"), a pickle
                raise broken("it looks like one of torch.save's, which may run code when read. In "
                             "PyTorch, safetensors.torch.save_file(torch.load(path), new_path) "
                             "writes a dict of tensors as safetensors")
            raise broken(f"it has {size} bytes and claims a header of {length}")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            entries = sorted(
                (*entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"]))
                for name, entry in header.items()
            )
            numbers = [n for e in entries for n in (e[0], e[1], *e[4])]
            if any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError("sizes and offsets must be whole numbers")
            if not isinstance(metadata, dict):
                raise ValueError("its metadata is not an object")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise broken(f"its header cannot be read ({error})") from None
        end = 0
        for start, stop, name, dtype, shape in entries:
            if not isinstance(dtype, str) or dtype not in SAFETENSORS:
                raise broken(f"{name} has dtype {dtype}, known are {', '.join(SAFETENSORS)}")
            if start != end or stop - start != math.prod(shape) * np.dtype(
                SAFETENSORS[dtype]).itemsize:
                raise broken(f"{name} of shape {shape} claims bytes {start} to {stop}, after {end}")
            end = stop
        if end != size - 8 - length:
            raise broken(f"its tensors take {end} bytes, the file holds {size - 8 - length}")
        tensors = {}
        for _, _, name, dtype, shape in entries:
            try:
                array = np.empty(shape, SAFETENSORS[dtype])
            except ValueError as error:
                raise broken(f"{name}: {error}") from None
            if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise broken(f"it ended while {name} was read")
            if dtype == "BF16":  # the upper half of a float32
                array = (array.astype("<u4") << 16).view("<f4")
            tensors[name] = wrap(array)
    if "minidist" not in metadata:
        return {name: tensors[name] for name in header}
    try:
        return json.loads(metadata["minidist"],
                          object_hook=lambda item: restored(item, tensors))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(f"its metadata cannot be read ({error!r})") from None


def restored(item: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """One JSON object read back: a dict, or what `flattened` wrote for something else."""
    kind = next(iter(item), "")
    if not kind.startswith("$"):
        return item
    value = item[kind]
    if kind == "$dtype" and np.dtype(value).kind in CATEGORY:
        return np.dtype(value)
    if kind in ("$tensor", "$array"):
        return tensors[value] if kind == "$tensor" else tensors[value]._array
    if kind not in ("$tuple", "$dict"):
        raise ValueError(f"unknown kind {kind}")
    return tuple(value) if kind == "$tuple" else dict(value)


# -- datasets --------------------------------------------------------------------------------------


def load_dataset(name: str, folder: Any = None) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test part of digits, mnist, fashion-mnist, cifar10 or segments: images
    (N, channels, height, width) as float32 from 0 to 1, and labels (N,).

    Segments are made on the spot. Where the others are searched, and how their files are read,
    is the business of tutorials/datasets.py."""
    if name == "segments":
        parts = make_segments()
    else:
        parts = companion("tutorials", "datasets").load(name, folder, Progress)
    train, test = (TensorDataset(wrap(images), wrap(labels)) for images, labels in parts)
    return train, test


def companion(folder: str, module: str) -> ModuleType:
    """A module of the folder that lies beside this file, or of the installed minidist_<folder>."""
    package, place = f"minidist_{folder}", pathlib.Path(__file__).resolve().with_name(folder)
    if package not in sys.modules and (place / "__init__.py").exists():
        spec: Any = importlib.util.spec_from_file_location(
            package, place / "__init__.py", submodule_search_locations=[str(place)])
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    try:
        return importlib.import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(f"minidist's folder {folder}/ is needed: copy it to "
                                  f"{place.parent}, or `pip install .` in a checkout") from None


def make_segments() -> list[tuple[np.ndarray, np.ndarray]]:
    """For who has this file and nothing else: digits of a pocket calculator, moved about under
    noise; 1,200 to learn from and 300 for the test."""
    segments = {"a": np.s_[0, 2:6], "b": np.s_[0:4, 5], "c": np.s_[3:7, 5], "d": np.s_[6, 2:6],
                "e": np.s_[3:7, 2], "f": np.s_[0:4, 2], "g": np.s_[3, 2:6]}
    lit = "abcdef bc abged abgcd fgbc afgcd afgedc abc abcdefg abcdfg".split()
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 1500)
    images = generator.uniform(0, 0.3, (1500, 1, 8, 8)).astype(np.float32)
    for image, label in zip(images, labels):
        for segment in lit[label]:
            image[0][segments[segment]] = generator.uniform(0.5, 1)
        image[:] = np.roll(image, (generator.integers(2), generator.integers(-2, 3)), (1, 2))
    return [(images[:1200], labels[:1200]), (images[1200:], labels[1200:])]


class Progress:
    """A progress bar: tqdm's where that is installed, else one line that is written over. Into
    what is not a terminal: a line every few seconds."""

    def __init__(self, total: int, what: str, unit: str = "it", done: int = 0) -> None:
        self.total, self.what, self.unit, self.done, self.due = total, what, unit, done, 0.0
        # (The launcher draws the bars of its workers itself, where it has a terminal.)
        self.live = sys.stderr.isatty() or "MINIDIST_JOB" in os.environ
        self.bar: Any = None
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=what, unit=unit, initial=done, ncols=90,
                            unit_scale=unit == "B") if self.live else None

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(steps)
        elif time.monotonic() > self.due or self.done == self.total:
            self.due = time.monotonic() + (0.1 if self.live else 5)
            text = f"{self.what}: {self.done:,} of {self.total:,} {self.unit} {note}"
            sys.stderr.write(f"\r{text} " if self.live else f"{text}\n")
            sys.stderr.flush()

    def close(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.live:
            sys.stderr.write("\n")

    __enter__, __exit__ = (lambda self: self), close


# =================================================================================================
# 7 Distributed
# =================================================================================================
#
# Several processes train one model. Each has its rank, 0 .. size-1, and a transport: something
# that carries messages between any two of them, whole, in order and once, or says who was lost.
# How it does that, over pipes, shared memory, TCP or lossy UDP, is the business of the folder
# `transports/`; what the messages mean is told here. First the collectives, what all ranks do
# together: sum a tensor, pass one on, wait for each other. Then strategies, which stand in the
# optimizer's place:
#
#     train = dist.Synchronous(model, optim.SGD(model.parameters(), lr=0.1))
#     for x, y in train.batches(loader):          # this rank's share of each batch
#         train.zero_grad()
#         loss(model(x), y).backward()
#         train.step()
#     train.finish()
#
# They are used alike, and differ in what travels, when, and for whom a rank waits:
#
#     Synchronous           gradients, added up at every step              waits for all
#     LocalSGD, DiLoCo      parameters, averaged every so many steps       waits for all, seldom
#     Gossip                parameters, averaged with neighbours           waits for neighbours
#       asynchronous        the same, in pairs                             for one answer
#     Downpour              gradients to servers, parameters from them     waits for servers alone
#     StaleSynchronous      the same                                       and for who is far behind
#
# What they share comes first: state to go on from (Resumable), the model made equal and the batch
# cut in shares (Strategy), compression of what travels (Compressor).


def transports() -> Any:
    """transports/training.py, loaded when it is needed: this file alone trains on one process."""
    return companion("transports", "training")


# -- what a sum over ranks is ----------------------------------------------------------------------
#
# Floating-point addition is not associative, so "the sum" must say in which order. Here it is a
# balanced tree: ranks 0 and 1, 2 and 3, ... are added, then these sums in pairs, and so on; ranks
# beyond the largest power of two are first added to ranks 0, 1, ... Each sum is rounded to the
# tensor's dtype; a mean divides once, at the end. Every algorithm yields those bits, whatever the
# transport and however the tensor is cut.


class ReduceOp(enum.Enum):
    """How the elements of different ranks become one."""

    SUM, AVG, MIN, MAX, PRODUCT = "sum", "avg", "min", "max", "product"


COMBINE: dict[Any, np.ufunc] = {
    ReduceOp.SUM: np.add, ReduceOp.AVG: np.add, ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply,
}


def power_below(size: int) -> int:
    """The largest power of two that is not above size."""
    return 1 << (size.bit_length() - 1)


def tree_reduce(parts: Any, combine: Callable) -> np.ndarray:
    """The definition: one array of each rank, in rank order, combined by the balanced tree."""
    core = power_below(len(parts))
    surplus = len(parts) - core
    parts = [combine(a, b) for a, b in zip(parts, parts[core:])] + list(parts[surplus:core])
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def share_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """The range of `count` things that is the rank's: contiguous, the lengths equal up to one.
    All ranks' shares together are everything, once."""
    base, longer = divmod(count, size)
    start = rank * base + min(rank, longer)
    return start, start + base + (rank < longer)


# -- schedules -------------------------------------------------------------------------------------
#
# A collective is a schedule: which elements a rank sends to whom while it takes which from whom.
# Schedules are integers and know no network, so they can be printed, checked and simulated.
# (All take the same arguments, so that they can stand in one table.)


class Exchange(NamedTuple):
    """Send elements [send) to one rank while taking [take) from another; None: nobody."""

    to: int | None = None
    send: tuple[int, int] = (0, 0)
    source: int | None = None
    take: tuple[int, int] = (0, 0)
    combine: bool = False  # add what arrives to what is there, instead of replacing it


SMALL = 65536  # bytes: up to here all_reduce prefers few messages, above it few bytes


def all_reduce_schedule(rank: int, size: int, count: int, root: int,
                        small: bool) -> Iterator[Exchange]:
    """Small tensors: recursive doubling, log2(size) exchanges of everything. Large ones: each
    exchange halves the range that a rank is responsible for, and the same way back collects the
    finished pieces; so each element is sent about twice, however many ranks there are."""
    core, everything = power_below(size), (0, count)
    if rank >= core:  # surplus: hand in, and get the result at the end
        yield Exchange(to=rank - core, send=everything)
        yield Exchange(source=rank - core, take=everything)
        return
    if rank + core < size:
        yield Exchange(source=rank + core, take=everything, combine=True)
    (start, stop), way_back = everything, []
    for peer in [rank ^ 1 << level for level in range(core.bit_length() - 1)]:
        if small:
            yield Exchange(peer, everything, peer, everything, combine=True)
            continue
        middle = (start + stop) // 2
        lower, upper = (start, middle), (middle, stop)
        mine, theirs = (lower, upper) if rank < peer else (upper, lower)
        yield Exchange(peer, theirs, peer, mine, combine=True)
        way_back.append(Exchange(peer, mine, peer, theirs))
        start, stop = mine
    yield from reversed(way_back)
    if rank + core < size:
        yield Exchange(to=rank + core, send=everything)


def broadcast_schedule(rank: int, size: int, count: int, root: int,
                       small: bool) -> Iterator[Exchange]:
    """A binomial tree: whoever has the tensor passes it on, so their number doubles each time."""
    place, distance = (rank - root) % size, 1  # the root stands at place 0
    while distance < size and not place & distance:
        distance *= 2
    if place:
        yield Exchange(source=(rank - distance) % size, take=(0, count))
    while distance > 1:
        distance //= 2
        if place + distance < size:
            yield Exchange(to=(rank + distance) % size, send=(0, count))


def all_gather_schedule(rank: int, size: int, count: int, root: int,
                        small: bool) -> Iterator[Exchange]:
    """A ring: each rank passes on to its right what last came from its left."""
    for i in range(size - 1):
        send, take = (share_of(count, (rank - k) % size, size) for k in (i, i + 1))
        yield Exchange((rank + 1) % size, send, (rank - 1) % size, take)


def reduce_scatter_schedule(rank: int, size: int, count: int, root: int,
                            small: bool) -> Iterator[Exchange]:
    """Everyone sends everyone their part; the receiver adds them up by the tree."""
    for i in range(1, size):
        to, source = (rank + i) % size, (rank - i) % size
        yield Exchange(to, share_of(count, to, size), source, share_of(count, source, size))


SCHEDULES: dict[str, Callable] = {
    "all_reduce": all_reduce_schedule, "barrier": all_reduce_schedule,  # of no elements
    "broadcast": broadcast_schedule, "all_gather": all_gather_schedule,
    "reduce_scatter": reduce_scatter_schedule,
}


# -- process groups --------------------------------------------------------------------------------


def call_text(op: str, reduce: str, dtype: str, root: int, sequence: int, count: int) -> str:
    """A collective for people. Its messages carry all of this, and ranks must agree in it."""
    if op == "barrier":
        return f"{op} #{sequence}"
    how = f"from rank {root}, " if op == "broadcast" else f"{reduce} of ".replace("none of ", "")
    return f"{op} #{sequence} ({how}{count} {dtype})"


@functools.lru_cache(maxsize=4096)
def planned(op: str, reduce: ReduceOp | None, dtype: np.dtype, root: int, count: int, rank: int,
            size: int, small: bool) -> tuple:
    """All that a call does not change. Training makes the same calls over and over."""
    words = op, reduce.value if reduce else "none", dtype.name, root, 0, count
    kind, head = transports().encode("COLLECTIVE", (*words, 0, 0))
    steps = tuple(SCHEDULES[op](rank, size, count, root, small))
    return steps, kind, head[:4], call_text(*words).partition("#0")[2]


class ProcessGroup:
    """The ranks that act together. Its methods are the functions of `torch.distributed`; they
    take tensors or NumPy arrays. Without a transport it is a group of one, which sends nothing."""

    def __init__(self, transport: Any = None, size: int = 1) -> None:
        self.transport, self.size = transport, size
        self.rank = 0 if transport is None else transport.node
        self.sequence = 0
        self.inherited = ""  # a file: the state that this process's predecessor left, if it did
        self.kept: bytes | None = None  # the state that it will leave itself
        self._landing = np.empty(0, np.uint8)  # where what is to be combined arrives
        self._unclaimed: list[tuple] = []  # tensors whose tag recv has not asked for yet

    def get_rank(self) -> int:
        """This process's number, 0 .. get_world_size() - 1."""
        return self.rank

    def get_world_size(self) -> int:
        """How many processes train together."""
        return self.size

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, what: str = "") -> None:
        """Replace the tensor on every rank by the sum (mean, minimum, ...) over all ranks."""
        x = elements_of(tensor)
        self._check_average("all_reduce", x, op)
        own = None if self.transport is None else self.transport.all_reduce
        if own is not None and x.dtype.kind in "iuf" and x.itemsize > 2:
            own(x, op.value)
        else:
            self._run("all_reduce", x, x, op, what=what)
        if op is ReduceOp.AVG:
            np.divide(x, self.size, out=x)
        put_back(tensor, x, "all_reduce")

    def broadcast(self, tensor: Any, src: int = 0, what: str = "") -> None:
        """Replace the tensor on every rank by that of rank src."""
        self._check_rank(src)
        x = elements_of(tensor)
        self._run("broadcast", x, x, root=src, what=what)
        put_back(tensor, x, "broadcast")

    def all_gather(self, tensor_list: Sequence[Any], tensor: Any, what: str = "") -> None:
        """Fill tensor_list[r] with the tensor of rank r, on every rank."""
        self._check_list("all_gather", tensor_list, tensor)
        rows = np.stack([elements_of(tensor)] * self.size)
        self._run("all_gather", rows.reshape(-1), rows.reshape(-1), what=what)
        for row, place in zip(rows, tensor_list):
            put_back(place, row, "all_gather")

    def reduce_scatter(self, output: Any, input_list: Sequence[Any],
                       op: ReduceOp = ReduceOp.SUM) -> None:
        """Fill output with the sum over all ranks of their input_list[this rank]."""
        self._check_list("reduce_scatter", input_list, output)
        self._check_average("reduce_scatter", to_array(output), op)
        x = tree_reduce(self._swap(input_list, op), COMBINE[op])
        put_back(output, x / x.dtype.type(self.size) if op is ReduceOp.AVG else x, "reduce_scatter")

    def all_to_all(self, output_tensor_list: Sequence[Any],
                   input_tensor_list: Sequence[Any]) -> None:
        """Fill output_tensor_list[r] with rank r's input_tensor_list[this rank]."""
        self._check_list("all_to_all", input_tensor_list, output_tensor_list[0])
        for x, place in zip(self._swap(input_tensor_list), output_tensor_list):
            put_back(place, x, "all_to_all")

    def _swap(self, tensors: Sequence[Any], op: ReduceOp | None = None) -> np.ndarray:
        parts = np.stack([elements_of(x) for x in tensors])
        arrived = parts.copy()
        self._run("reduce_scatter", parts.reshape(-1), arrived.reshape(-1), op)
        return arrived

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        nothing = np.empty(0, np.uint8)
        self._run("barrier", nothing, nothing, ReduceOp.SUM)

    def _run(self, op: str, out: np.ndarray, into: np.ndarray, reduce: ReduceOp | None = None,
             root: int = 0, what: str = "") -> None:
        """Carry out a schedule: send pieces of `out`, take or combine pieces into `into`."""
        if self.size == 1:
            return
        self.sequence += 1
        transport = self.transport
        steps, kind, codes, detail = planned(op, reduce, into.dtype, root, into.size, self.rank,
                                             self.size, into.nbytes <= SMALL)
        head = *codes, self.sequence, into.size
        transport.doing = f"{op} #{self.sequence}{detail} {what}".rstrip()
        for to, send, source, take, combines in steps:
            piece, place = out[send[0] : send[1]], into[take[0] : take[1]]
            if source is None:
                transport.send(to, kind, head + send, (piece,))
                continue
            landing, merge, landed = place, None, None
            if combines:
                landing = self._room_for(place)
                merge = merger(place, landing, COMBINE[reduce], mine_first=self.rank < source)
                if send[1] <= take[0] or take[1] <= send[0]:
                    landed = merge  # combine while the rest is in flight: what is being sent
                    #                 lies elsewhere and does not change under way
            if to is None:
                message = transport.recv(source, into=landing)
            else:
                message = transport.exchange(to, kind, head + send, piece, source, landing,
                                             landed=landed)
            if message.kind != kind or message.fields[:-2] != head:
                self._mismatch(f"{op} #{self.sequence}{detail}", message)
            if merge is not None:
                merge(0, landing.nbytes)
        transport.doing = ""

    def _room_for(self, place: np.ndarray) -> np.ndarray:
        if self._landing.nbytes < place.nbytes:
            self._landing = np.empty(place.nbytes, np.uint8)
        return self._landing[: place.nbytes].view(place.dtype)

    def _mismatch(self, call: str, message: Any) -> None:
        kind, peer, fields, _ = transports().decode(message)
        text = (f"rank {self.rank} called {call} but rank {peer} called "
                f"{call_text(*fields[:-2]) if kind == 'COLLECTIVE' else kind}: every rank must "
                f"make the same calls in the same order. Rank {self.rank} is at {caller()}")
        error = transports().protocol.broken("MISMATCH", text)
        self.transport.abort(str(error), error.code)  # so that all hear of it, instead of waiting
        raise error

    def pass_on(self, data: bytes, src: int) -> bytes:
        """The bytes that rank src gives, on every rank."""
        size = np.array([len(data)])
        self.broadcast(size, src)
        room = np.resize(np.frombuffer(data, np.uint8), size[0])
        self.broadcast(room, src)
        return room.tobytes()

    def agree(self, what: str, mine: list[str], cure: str) -> None:
        """Raise on every rank unless these lines are the same on all; name the first difference.
        Found here it has a name; later it is a hang, or a model that learns nonsense."""
        text = "\n".join(mine).encode()
        digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
        extremes = np.concatenate([digest, 255 - digest])  # maxima of both: maximum and minimum
        self.all_reduce(extremes, ReduceOp.MAX, what)
        if (extremes[:32] == 255 - extremes[32:]).all():
            return
        hashes = np.zeros((self.size, 32), np.uint8)
        self.all_gather(list(hashes), digest, what)
        odd = np.flatnonzero((hashes != hashes[0]).any(axis=1)).tolist()
        lists = [self.pass_on(text, rank).decode().split("\n") for rank in (0, odd[0])]
        place, (a, b) = next((i, pair) for i, pair in enumerate(itertools.zip_longest(
            *lists, fillvalue="nothing more")) if pair[0] != pair[1])
        raise RuntimeError(f"{what} differs between ranks, first at #{place}: rank 0 has {a}, rank "
                           f"{odd[0]} has {b}. This is rank {self.rank}: {cure}")

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send a tensor to rank dst, whose recv with the same tag takes it."""
        self._check_rank(dst)
        if dst == self.rank:
            raise ValueError(f"rank {self.rank}: send to itself")
        array = to_array(tensor)
        kind, fields = transports().encode("TENSOR", (tag, array.dtype.name, array.shape))
        self.transport.send(dst, kind, fields, (elements_of(array),), channel=1)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        """Fill the tensor with one that rank src (None: any rank) sends; returns the sender."""
        if src is not None:
            self._check_rank(src)
        self.transport.doing = f"recv from {'anyone' if src is None else f'rank {src}'}, tag {tag}"
        waiting = self._unclaimed
        while not (found := [m for m in waiting if m[2][0] == tag and src in (None, m[1])]):
            message = (self.transport.recv_any(channel=1) if src is None
                       else self.transport.recv(src, channel=1))
            waiting += [m for m in [transports().decode(message)] if m[0] == "TENSOR"]
        waiting.remove(found[0])
        _, peer, (_, dtype, shape), payload = found[0]
        place = to_array(tensor)
        if (dtype, tuple(shape)) != (place.dtype.name, place.shape):
            raise ValueError(
                f"rank {self.rank}: recv from rank {peer}, tag {tag}: it sent {dtype} of shape "
                f"{tuple(shape)}, the tensor to fill is {place.dtype} of shape {place.shape}")
        put_back(tensor, np.frombuffer(payload, dtype), "recv")
        self.transport.doing = ""
        return peer

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank}: there is no rank {rank}, the group has ranks 0 to "
                             f"{self.size - 1}")

    def _check_average(self, what: str, x: np.ndarray, op: ReduceOp) -> None:
        if op is ReduceOp.AVG and x.dtype.kind != "f":
            raise TypeError(f"{what}: the average of {x.dtype} would be rounded: use "
                            "ReduceOp.SUM and divide, or convert to a floating dtype first")

    def _check_list(self, op: str, tensors: Sequence[Any], like: Any) -> None:
        shapes = [f"{a.shape} {a.dtype}" for a in map(to_array, [like, *tensors])]
        if shapes[1:] != shapes[:1] * self.size:
            raise ValueError(f"rank {self.rank}: {op} needs a list of {self.size} tensors of "
                             f"{shapes[0]}, one for each rank; found {shapes[1:]}")


def caller() -> str:
    """The file and line of the program that called us."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def merger(place: np.ndarray, arrived: np.ndarray, combine: Any, mine_first: bool) -> Callable:
    """merge(start, stop) is called as the bytes start..stop of `arrived` come in, and combines
    their elements into `place`. The lower rank's operand stands on the left."""
    left, right = (place, arrived) if mine_first else (arrived, place)
    done = 0

    def merge(start: int, stop: int) -> None:
        nonlocal done
        fresh = slice(done, stop // place.itemsize)
        done = fresh.stop
        combine(left[fresh], right[fresh], out=place[fresh])

    return merge


def elements_of(tensor: Any) -> np.ndarray:
    """The elements as one flat array: a view where the memory allows it, else a copy."""
    array = to_array(tensor)
    if not (array.flags.c_contiguous and array.dtype.isnative):
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    return array.reshape(-1)


def put_back(tensor: Any, elements: np.ndarray, change: str) -> None:
    """Write them into the tensor, if they are not its own memory, and note that it changed."""
    array = to_array(tensor)
    if not np.may_share_memory(array, elements):
        array[...] = elements.reshape(array.shape)
    if isinstance(tensor, Tensor):
        touch(tensor, change)


# The default group is in a context variable, so that the ranks of a simulated cluster, threads of
# one process, each see their own.

_default_group: ContextVar[ProcessGroup | None] = ContextVar("default_group", default=None)


def init_process_group(backend: Any = None, init_method: str = "env://", timeout: Any = None,
                       world_size: int = -1, rank: int = -1) -> None:
    """Join the other processes of this job; returns when all are there.

    Who they are stands in the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which
    `minidist launch`, torchrun, mpiexec, srun and their like set (or others that say the same);
    arguments win over it. Without them the process is a group of one, so the same script also
    runs alone. `backend` names a transport
    ("pipe", "shm", "tcp", "udp"; by default the launcher's) or is one."""
    if is_initialized():
        raise RuntimeError("init_process_group was called twice: call destroy_process_group first")
    group = ProcessGroup()
    if backend is not None and not isinstance(backend, str):
        group = ProcessGroup(backend, backend.size if world_size < 0 else world_size)
    elif rank >= 0 or launched():
        transport, config = transports().join(backend, init_method, timeout, world_size, rank)
        group = ProcessGroup(transport, config.workers)
    if "MINIDIST_STATE" in os.environ:
        group.inherited = os.environ["MINIDIST_STATE"]
        on_meeting(group)
    _default_group.set(group)


def launched() -> bool:
    """Whether a launcher that we know (see transports.LAUNCHERS) started this process."""
    return any(name in os.environ for name in (
        "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS"))


def on_meeting(group: ProcessGroup) -> None:
    """However the program ends, its successor in the next generation goes on from its last step.
    SIGUSR1 ends it: a worker was lost, and all are called."""
    main = threading.current_thread() is threading.main_thread()

    def leave() -> None:
        if main:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if group.kept is not None:
            pathlib.Path(group.inherited + "~").write_bytes(group.kept)
            os.replace(group.inherited + "~", group.inherited)

    def handler(number: int, frame: Any) -> None:
        leave()
        raise SystemExit(75)  # EX_TEMPFAIL: the launcher starts it again

    atexit.register(leave)
    if main:
        signal.signal(signal.SIGUSR1, handler)


def is_initialized() -> bool:
    """Whether init_process_group was called."""
    return _default_group.get() is not None


def destroy_process_group() -> None:
    """Say goodbye to the other ranks and leave."""
    group = _default_group.get()
    if group is not None and group.transport is not None:
        group.transport.close()
    _default_group.set(None)


def on_default_group(method: Callable) -> Callable:
    """The function of torch.distributed that a method of ProcessGroup is."""

    @functools.wraps(method)
    def function(*args: Any, group: ProcessGroup | None = None, **options: Any) -> Any:
        group = group or _default_group.get()
        if group is None:
            raise RuntimeError(f"{method.__name__}: there is no process group yet: call "
                               "minidist.distributed.init_process_group() first")
        return method(group, *args, **options)

    return function


# -- strategies ------------------------------------------------------------------------------------


class FlatVector:
    """Tensors of one dtype, end to end in one vector: one message carries them all. `tail` is room
    for a few more numbers behind them."""

    def __init__(self, named: dict[str, Tensor], tail: int = 0) -> None:
        self.names, self.tensors = list(named), list(named.values())
        stops = list(itertools.accumulate(x.numel() for x in self.tensors))
        self.vector = np.zeros(stops[-1] + tail, self.tensors[0].dtype)
        self.data, self.tail = np.split(self.vector, [stops[-1]])
        self.starts = [stop - x.numel() for x, stop in zip(self.tensors, stops)]
        self.views = [self.data[start:stop].reshape(x.shape)
                      for x, start, stop in zip(self.tensors, self.starts, stops)]

    def adopt(self) -> FlatVector:
        """From now on the tensors live in the vector."""
        for x, view in zip(self.tensors, self.views):
            np.copyto(view, x._array)
            x._array = view
        return self

    def like(self, tail: int = 0) -> FlatVector:
        """Another one, of the same layout; the tensors stay where they are."""
        return FlatVector(dict(zip(self.names, self.tensors)), tail)

    def changed(self, how: str) -> None:
        for x in self.tensors:
            touch(x, how)

    def cut(self, start: int, stop: int, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Elements start .. stop of a vector laid out like this one, tensor by tensor:
        {"fc.weight": ..., "fc.bias[0:3]": ...}"""
        pieces = {}
        for name, first, x in zip(self.names, self.starts, self.tensors):
            a, b = max(start - first, 0), min(stop - first, x.numel())
            if a < b:
                pieces[name if b - a == x.numel() else f"{name}[{a}:{b}]"] = \
                    vector[first + a : first + b]
        return pieces


def start_equal(group: ProcessGroup, model: Any) -> None:
    """See that all ranks built the same model, and give all of them the values of rank 0."""
    tensors = [*model.named_parameters(), *model.named_buffers()]  # tied ones once
    group.agree("the model", [
        f"{name} {tuple(x.shape)} {x.dtype}" +
        " frozen" * (x._array.dtype.kind == "f" and not x.requires_grad)
        for name, x in tensors], "build it by the same code in the same order on every rank")
    for name, x in tensors:
        group.broadcast(x, 0, name)


# -- going on where a run stopped ------------------------------------------------------------------
#
# A run is more than its parameters: the optimizer's memory, the schedules, the random numbers, the
# place in the data. All of it is kept between two steps, and a run that goes on from there makes
# the bits that it would have made. That serves thrice: a checkpoint that a later run resumes;
# SIGTERM, after which all ranks end at one step; and the loss of a worker, after which the others
# and its successor begin as the next generation, from the last step that any of them completed.


class Resumable:
    """Loops that know where they are, and a state to go on from.

        train.checkpoint("run.safetensors", every=100)      # resumes, if the file is there
        for epoch in train.epochs(10):                      # from the epoch that was under way
            for x, y in train.batches(loader):              # and in it, from the next batch
                ...

    What a step has not completed is done again. So is whatever the program does before the first
    loop, which therefore must not depend on when it runs; a loop that makes no steps (a test)
    inside the epoch begins at its beginning."""

    model: Any
    optimizer: Any
    group: Any
    lockstep = True  # does every step need every rank? If not, the loss of one stops nobody
    drifts = False  # do replicas differ between steps?
    adds_up = False  # does each rank's step count whole, instead of by its share of the batch?
    lost: Any = frozenset()  # the ranks that are gone
    steps = epoch = 0
    finish: Callable
    own_state: Callable
    load_own_state: Callable

    def __init__(self) -> None:
        self._others: dict[str, Any] = {}
        self._path: Any = None
        self._resume_from: Any = None
        self._every = 0
        self._begun = self._resumed = False
        self._looping = False
        self._age = 0  # of the state: one more than that of the state it went on from
        self._loops: list[dict[str, Any]] = []  # of this epoch, and how far each has come
        self._loop = 0  # which one is next
        self._samplers: list[Any] = []  # of the loops
        self._epoch_rng = get_rng_state()
        self._restored: dict[str, Any] | None = None  # what of a state waits for its loop
        self._kept_at = (-1, -1)
        self._stop = False  # SIGTERM has come
        self._all_stop = False  # and all ranks know it

    def checkpoint(self, path: Any, every: int = 0, resume: Any = True, **others: Any) -> None:
        """Keep the state of the run in a file: after each epoch, after every so many steps, and on
        SIGTERM, which then ends the program, with success, after the same step on all ranks.

        The first loop resumes what the file holds, if it is there (or what `resume`, another path,
        holds; nothing if it is False). `others` are kept too, under their names: objects with
        state_dict and load_state_dict, lists and dicts. Model, optimizer and its schedules are
        known. Rank 0 writes the file; only one rank needs to find it when the run resumes."""
        taken = {"model", "optimizer", "schedules", "run", "ranks"} & others.keys()
        if taken:
            raise ValueError(f"checkpoint: the name {taken.pop()!r} is taken")
        self._path, self._every, self._others = path, every, others
        self._resume_from = path if resume is True else resume

    # Loops.

    def epochs(self, count: int) -> Iterator[int]:
        """0 .. count-1, or from the epoch that the state is in."""
        self._go_on()
        while self.epoch < count:
            self._loop = 0
            if self._restored:  # in the middle of it: what came before its loops comes again
                set_rng_state(self._restored["epoch_rng"])
            self._epoch_rng = get_rng_state()
            yield self.epoch
            self.epoch, self._epoch_rng = self.epoch + 1, get_rng_state()
            self._loops = [new_place(sampler) for sampler in self._samplers]
            self._keep(epoch_ends=True)

    def _begin_loop(self, loader: Any) -> tuple[dict[str, Any], Iterator[list[int]]]:
        """The loop's place, and the batches of its loader behind those whose steps are complete."""
        self._go_on()
        sampler, at = loader.sampler, self._loop
        if at == len(self._loops):
            self._loops.append(new_place(sampler))
        self._samplers[at:] = [sampler]
        place, self._loop = self._loops[at], at + 1
        # A shuffle is a function of seed and epoch; a loader made anew has another seed.
        if self._resumed and getattr(sampler, "seed", self) == place["seed"]:
            sampler.epoch = max(sampler.epoch, place["epoch"])
        if place["rng"] is None:
            place.update(new_place(sampler), rng=get_rng_state())
        set_rng_state(place["rng"])
        order = iter(loader.batch_sampler)
        collections.deque(itertools.islice(order, place["done"]), maxlen=0)
        if self._restored and not any(later["done"] for later in self._loops[at + 1 :]):
            self._load_rank_state(self._restored)
            self._restored = None
        return place, order

    # Keeping.

    @property
    def leads(self) -> bool:
        """Does this rank write files and reports? Rank 0 does, or the first that is left."""
        return self.group.rank == min(set(range(self.group.size)) - self.lost)

    def _rank_state(self) -> dict[str, Any]:
        """What is this rank's own."""
        return {"rng": get_rng_state(), "epoch_rng": self._epoch_rng, "loops": self._loops,
                "own": self.own_state()}

    def _load_rank_state(self, state: dict[str, Any]) -> None:
        set_rng_state(state["rng"])
        self.load_own_state(state["own"])

    def _all_ranks(self, own: Any) -> list[bytes]:
        """What each rank calls its own, in the order of ranks; where they are not in lockstep,
        what this one does."""
        if not self.lockstep:
            return [packed(own)]
        return [self.group.pass_on(packed(own), rank) for rank in range(self.group.size)]

    def _keep(self, epoch_ends: bool = False) -> None:
        """Between two steps: keep what is due, and end if all were asked to."""
        if self._kept_at == (self.steps, self.epoch):
            return  # no step since
        self._kept_at = self.steps, self.epoch
        if self.group.inherited:
            self.group.kept = packed(self._run_state([packed(self._rank_state())]))
        alone = self.group.size == 1 or not self.lockstep
        ending = self._stop if alone else self._all_stop
        if ending and not self.lockstep:
            self.finish()
        if self._path and (ending or epoch_ends or self._every and self.steps % self._every == 0):
            if self.lockstep or self.leads:
                ranks = self._all_ranks(self._rank_state())
            if self.leads:
                save(self._run_state(ranks), self._path)
        if ending:
            if self.leads and self._path:
                print(f"minidist: SIGTERM: ended after step {self.steps}; {self._path} has the "
                      "state to go on from", file=sys.stderr)
            raise SystemExit(0)

    def _run_state(self, ranks: list[bytes]) -> dict[str, Any]:
        others = {name: getattr(x, "state_dict", lambda x=x: x)()
                  for name, x in self._others.items()}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "schedules": [x.state_dict() for x in self._schedules()], **others,
                "run": {"age": self._age, "steps": self.steps, "epoch": self.epoch},
                "ranks": arrays_of(ranks)}

    def _schedules(self) -> list[Any]:
        return [x for x in (ref() for ref in self.optimizer.schedules) if x is not None]

    # Going on.

    def _go_on(self) -> None:
        """Before the first loop: all ranks adopt the state of the one that got furthest."""
        if self._begun:
            return
        self._begun = True
        if self._path or self._resume_from or self.group.inherited:
            self._exchange()
        if self._path or self._resume_from:
            on_sigterm(self)

    def _exchange(self) -> None:
        """All ranks adopt the state of the one that got furthest; see PROTOCOL.md, 9.9."""
        def reach(state: Any) -> tuple:
            return tuple(state["run"][key] for key in ("age", "steps", "epoch"))

        found = [load(path) for path in (self._resume_from, self.group.inherited)
                 if path and os.path.exists(path)]
        best = max(found, key=reach, default=None)
        furthest = reach(best) if best else (-1, -1, -1)
        rows = np.zeros((self.group.size, 3), np.int64)
        self.group.all_gather(list(rows), np.array(furthest), "the state to go on from")
        places = [tuple(row) for row in rows.tolist()]
        source = places.index(max(places))
        self._age = places[source][0] + 1
        if self._age == 0:
            if self._resume_from not in (None, False, self._path):
                raise FileNotFoundError(f"no rank has {self._resume_from}, to resume from")
            return
        if len(set(places)) > 1:
            data = self.group.pass_on(packed(best) if self.group.rank == source else b"", source)
            best = best if furthest == places[source] else load(io.BytesIO(data))
        if self.group.inherited:
            self.group.kept = packed(best)
        self._adopt(best)
        if not self.drifts:
            self.group.agree("the state to go on from", lines_of(self.optimizer) + [
                f"{name} {text_of(x)}" for name, x in self.model.named_parameters()],
                "all of it must be in the files, or be made from them alike")

    def _adopt(self, state: Any) -> None:
        schedules = self._schedules()
        if len(schedules) != len(state["schedules"]):
            raise ValueError(f"the state to go on from has {len(state['schedules'])} schedules, "
                             f"the optimizer {len(schedules)}: make them before the first loop")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for schedule, saved in zip(schedules, state["schedules"]):
            schedule.load_state_dict(saved)
        for name, x in self._others.items():
            if hasattr(x, "load_state_dict"):
                x.load_state_dict(state[name])
            else:
                x.clear()
                (x.update if isinstance(x, dict) else x.extend)(state[name])
        self.steps, self.epoch = state["run"]["steps"], state["run"]["epoch"]
        restored = self._mine(state["ranks"])
        self._load_rank_state(restored)
        self._loops, self._resumed = restored["loops"], True
        if any(place["done"] for place in self._loops):
            self._restored = restored

    def _mine(self, ranks: list[Any]) -> Any:
        return load(io.BytesIO(to_array(ranks[self.group.rank % len(ranks)]).tobytes()))


def arrays_of(files: list[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(data, np.uint8) for data in files]


def new_place(sampler: Any) -> dict[str, Any]:
    """A loop's place at its beginning."""
    return {"done": 0, "rng": None, "seed": getattr(sampler, "seed", None),
            "epoch": getattr(sampler, "epoch", None)}


def on_sigterm(run: Resumable) -> None:
    """Have SIGTERM end the run between two steps, unless the program has plans of its own."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    run = weakref.proxy(run)

    def handler(number: int, frame: Any) -> None:
        with contextlib.suppress(ReferenceError):
            if run._looping and not run._stop:
                run._stop = True
                return
        signal.signal(number, signal.SIG_DFL)  # outside a loop, or the second time
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, handler)


class Strategy(Resumable):
    """What all data-parallel strategies share: the model starts equal on all ranks, each works
    on its share of every batch, and train.step() stands where optimizer.step() stood.

    A subclass defines `step`, and says by `lockstep` and `drifts` how it behaves; own_state and
    load_own_state add what it remembers to checkpoints. `compress` names a Compressor for what
    travels (or is one), where the strategy knows how."""

    name = ""  # of the flag --strategy

    def __init__(self, model: Any, optimizer: Any, group: ProcessGroup | None = None,
                 compress: Any = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.group = group or _default_group.get() or ProcessGroup()
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())  # tied ones once
        self.compressor = plugin(compress, Compressor)() if isinstance(compress, str) else compress
        self.samples, self.batch = 1, self.group.size  # this rank's part of the whole
        self.turn, self.turns = 0, 1  # the passes that make one batch
        self.last_turn = True
        self._seen = 0  # samples that this rank's buffers have seen since they were equal
        start_equal(self.group, model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """To be called once, after the last step: what is still under way arrives."""

    def batches(self, loader: Any) -> Iterator[Any]:
        """This rank's share of each of the loader's batches, which must be the same everywhere
        (same data, same seed). Shares are disjoint and complete: nothing is padded or dropped. In
        a batch smaller than the number of ranks some have no samples; they get a batch of 0 rows,
        so that the loop takes as many turns on all ranks."""
        group, turns = self.group, self.turns
        place, order = self._begin_loop(loader)
        first = list(itertools.islice(order, 1))
        if self.lockstep:
            group.agree("the loader", [f"{len(loader.dataset)} samples in {len(loader)} batches",
                                       f"a first batch of {[int(i) for b in first for i in b]}"],
                        "give all ranks the same data, batch size, seed and epoch")
        self._looping = True
        try:
            for number, batch in enumerate(itertools.chain(first, order), place["done"] + 1):
                steps = self.steps
                for self.turn in range(turns):
                    self.last_turn = self.turn == turns - 1
                    start, stop = share_of(len(batch), group.rank * turns + self.turn,
                                           group.size * turns)
                    self.samples, self.batch = stop - start, len(batch)
                    if group.transport is not None:
                        group.transport.work(self.samples)
                    try:
                        yield (loader.fetch(batch[start:stop]) if start < stop else
                               without_rows(loader.fetch(batch[:1])))
                    finally:
                        if self.steps > steps:
                            place["done"] = number
                self._keep()
        finally:
            self._looping = False
            self.samples, self.batch, self.turn, self.last_turn = 1, group.size, 0, True
        if self.lockstep:
            self.sync_buffers()

    def sync_buffers(self) -> None:
        """Make buffers (running statistics of batch norm) equal: floating ones become the mean
        over ranks, weighted by the samples each has seen since the last time; others those of
        rank 0. `batches` ends with it; call it before evaluating in the middle of an epoch."""
        buffers = dict(self.model.named_buffers())  # by name, now: modules may replace them
        if self.group.size == 1 or not buffers:
            return
        seen = self.total(self._seen)
        for name, buffer in buffers.items():
            if buffer._array.dtype.kind != "f" or not seen:
                self.group.broadcast(buffer, 0, name)
                continue
            np.copyto(buffer._array, buffer._array * (self._seen / seen) if self._seen else 0)
            self.group.all_reduce(buffer, what=name)
        self._seen = 0

    def in_one_vector(self, tail: int = 0) -> FlatVector:
        """All trainable parameters as one vector, in which they live from now on."""
        trainable = {name: x for name, x in self.parameters.items() if x.requires_grad}
        dtypes = sorted({x.dtype.name for x in trainable.values()})
        if len(dtypes) != 1:
            raise TypeError(f"{type(self).__name__} keeps all trainable parameters in one vector: "
                            f"they must have one dtype, found {dtypes}")
        return FlatVector(trainable, tail).adopt()

    def total(self, *numbers: float) -> Any:
        """Sums over all ranks, exact for integers: `correct, seen = train.total(correct, seen)`.
        So a test set cut in shares is counted once, whatever the number of ranks."""
        exact = all(isinstance(x, (int, np.integer)) for x in numbers)
        sums = np.array(numbers, np.int64 if exact else np.float64)
        self.group.all_reduce(sums, what="totals")
        return sums.tolist() if len(numbers) > 1 else sums.item()

    def mean(self, loss: Any) -> float:
        """The mean over a whole batch of what `loss` is over this rank's share of it."""
        value, samples = self.total(float(loss) * self.samples if self.samples else 0.0,
                                    float(self.samples))
        return value / samples

    # For checkpoints that the program makes itself, beside the model's and the optimizer's state.

    def state_dict(self) -> dict[str, Any]:
        """Steps, and what each rank has of its own. In lockstep all ranks must call it together,
        and get the same; else it is this rank's, and rank 0 should."""
        return {"steps": self.steps, "ranks": arrays_of(self._all_ranks(self.own_state()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what state_dict returned, before the first step; every rank is given the
        same. Exact where the strategy is."""
        self.steps = state["steps"]
        self.load_own_state(self._mine(state["ranks"]))

    def own_state(self) -> dict[str, Any]:
        """What may differ between ranks: buffers, residuals of a compressor, and if replicas drift
        their parameters and optimizers. Subclasses add to it."""
        own: dict[str, Any] = {"seen": self._seen, "buffers": dict(self.model.named_buffers())}
        if self.compressor is not None:
            own["residuals"] = self.compressor.memory
        if self.drifts:
            own |= {"parameters": self.parameters, "optimizer": self.optimizer.state_dict()}
        return own

    def load_own_state(self, own: dict[str, Any]) -> None:
        self._seen = own["seen"]
        pairs = [(dict(self.model.named_buffers()), own["buffers"])]
        if self.compressor is not None:
            self.compressor.memory = {n: to_array(x).copy() for n, x in own["residuals"].items()}
        if self.drifts:
            pairs.append((self.parameters, own["parameters"]))
            self.optimizer.load_state_dict(own["optimizer"])
        for tensors, saved in pairs:
            for name, x in tensors.items():
                np.copyto(x._array, to_array(saved[name]))
                touch(x, "load_state_dict")


def lines_of(optimizer: Any) -> list[str]:
    """What its steps depend on, for comparison between ranks: arrays by their hash."""

    state = optimizer.state_dict()
    return [f"{type(optimizer).__name__} with {text_of(group)}"
            for group in state["param_groups"]] + [
        f"parameter {i}: {text_of(entries)}" for i, entries in state["state"].items() if entries]


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={text_of(x)}" for name, x in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = elements_of(value)
        many = hashlib.sha256(array.data).hexdigest()[:16]
        return f"{array.dtype} {many if array.size > 1 else array.tolist()}"
    return repr(value)


def without_rows(batch: Any) -> Any:
    """The batch with 0 rows: the same structure, dtypes and further dimensions."""
    if isinstance(batch, dict):
        return {name: without_rows(x) for name, x in batch.items()}
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], (str, bytes)):
        return type(batch)([without_rows(x) for x in batch])
    return batch[:0]


def plugin(name: str, kind: Any) -> Any:
    """The subclass of `kind` (Strategy, Compressor, ServerSGD) that is called so: one of this file,
    or of tutorials/strategies/NAME.py, or of the entry point group minidist.strategies, or, as
    "path/to/my.py:Mine", of a file of yours."""
    path, colon, wanted = name.rpartition(":")
    if colon:
        spec: Any = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
        if spec is None:
            raise ValueError(f"{name!r} is not path/to/file.py:Class")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, wanted, None)
        if isinstance(found, type) and issubclass(found, kind):
            return found
        raise ValueError(f"{path} has no {kind.__name__} called {wanted}")
    if name not in named(kind) and name.isidentifier():  # a file that has it defines it by name
        for entry in importlib.metadata.entry_points(group="minidist.strategies", name=name):
            entry.load()
        try:
            companion("tutorials", f"strategies.{name}")
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("minidist_tutorials") and error.name is not None:
                raise
    if name in named(kind):
        return named(kind)[name]
    raise ValueError(f"there is no {kind.__name__} called {name!r}: minidist.py has "
                     f"{', '.join(named(kind))}; further ones are in tutorials/strategies/, and "
                     "path/to/file.py:Class names one of yours")


def named(kind: Any) -> dict[str, Any]:
    """The class and its subclasses that have been defined, by name."""
    found = {kind.name: kind} if kind.name else {}
    for subclass in kind.__subclasses__():
        found |= named(subclass)
    return found


# -- compression -----------------------------------------------------------------------------------
#
# Fewer bytes for what travels, at the price of exactness. A sum over ranks cannot be taken of sign
# bits or of lists of indices: ranks gather what all have encoded, decode it, and add that up. What
# an encoder leaves out it may keep, by the tensor's name, and add to what it encodes next time.


class Compressor:
    """How tensors become bytes and, roughly, themselves again. A subclass defines encode and
    decode; strategies call pack, unpack and sum. `memory` is what encoding remembers."""

    name = ""  # of the flag --compress

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}
        self.before = self.after = 0  # bytes that were to travel, and that did

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """The flat array x, a piece of the tensor called `name`, as an array of bytes (uint8)."""
        raise NotImplementedError

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` numbers from such bytes; ValueError if they cannot be that."""
        raise NotImplementedError

    def pack(self, named: dict[str, np.ndarray]) -> np.ndarray:
        """Several tensors, each behind its numbers of elements and of bytes."""
        parts = []
        for name, x in named.items():
            data = self.encode(name, x.reshape(-1))
            self.before, self.after = self.before + x.nbytes, self.after + data.nbytes
            parts += [np.array([x.size, data.size], "<u8").view(np.uint8), data]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def unpack(self, data: np.ndarray, count: int, dtype: Any) -> np.ndarray:
        """What pack was given, as one vector of `count` numbers."""
        vector, done, at = np.zeros(count, dtype), 0, 0
        while at < len(data):
            size, length = data[at : at + 16].view("<u8").tolist()  # fewer bytes: a ValueError
            if size > count - done or length > len(data) - at - 16:
                raise ValueError(f"{size} numbers in {length} bytes do not fit")
            piece = data[at + 16 : at + 16 + length]
            vector[done : done + size] = self.decode(piece, size, vector.dtype)
            done, at = done + size, at + 16 + length
        if done != count:
            raise ValueError(f"{done} numbers arrived, {count} were expected")
        return vector

    def sum(self, group: ProcessGroup, flat: FlatVector) -> None:
        """Replace the vector by the sum over all ranks of what each has encoded."""
        mine = self.pack(dict(zip(flat.names, flat.views)))
        sizes = np.zeros(group.size, np.int64)
        group.all_gather(list(np.split(sizes, group.size)), np.array([len(mine)]))
        rows = np.zeros((group.size, sizes.max()), np.uint8)
        group.all_gather(list(rows), np.resize(mine, rows.shape[1]))
        flat.data[:] = tree_reduce([self.unpack(row[:size], flat.data.size, flat.data.dtype)
                                    for row, size in zip(rows, sizes)], np.add)


class FP16(Compressor):
    """Each number as a float16: 11 significant bits, from 6e-8 to 65504 (larger ones become that).
    A sum is taken in full precision: ranks send each other their shares of the vector, add what
    has come, and gather the sums."""

    name, code = "fp16", "<f2"

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.clip(x, -65504, 65504).astype("<f2").view(np.uint8)

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        if data.size != 2 * count:
            raise ValueError(f"{count} numbers of 2 bytes are not {data.size} bytes")
        return data.view("<f2").astype(dtype)

    def sum(self, group: ProcessGroup, flat: FlatVector) -> None:
        size, data = group.size, flat.data
        width = -(-data.size // size)  # of a share; the last ones are padded with zeros
        shares = np.pad(data, (0, width * size - data.size)).reshape(size, width)
        arrived = [np.empty(2 * width, np.uint8) for _ in shares]
        group.all_to_all(arrived, [self.encode("", x) for x in shares])
        sums = tree_reduce([self.decode(x, width, data.dtype) for x in arrived], np.add)
        group.all_gather(arrived, self.encode("", sums))
        data[:] = np.concatenate([self.decode(x, width, data.dtype) for x in arrived])[: data.size]
        self.before += 2 * (size - 1) * width * data.itemsize  # what an all_reduce sends
        self.after += 2 * (size - 1) * width * 2


class BF16(FP16):
    """The upper half of a float32: its whole range, with 8 significant bits, rounded to nearest."""

    name = "bf16"

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        bits = np.clip(x.astype("<f4"), -3.3895e38, 3.3895e38).view("<u4")
        bits = bits + 0x7FFF + (bits >> 16 & 1)  # half way: to even
        return (bits >> 16).astype("<u2").view(np.uint8)

    def decode(self, data: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        halves = super().decode(data, count, np.dtype("<f2")).view("<u2")
        return (halves.astype("<u4") << 16).view("<f4").astype(dtype)


# -- synchronous -----------------------------------------------------------------------------------


class Synchronous(Strategy):
    """Every step uses the mean gradient over the whole batch, as if one process had computed it.

    When backward ends, the ranks' gradients are summed, each weighted by its number of samples,
    and divided by the samples of the whole batch. So before train.step() `.grad` holds the same
    bits on all ranks, clipping sees what one process would see, and the replicas stay equal
    without ever exchanging parameters.

    With the sum travel a few more numbers: who has a gradient for which parameter (one that has
    none anywhere keeps None, and no decay or momentum moves it), whose is not finite (then all
    ranks raise), and a check that all are at the same step of the same batch.

    `accumulate=k` computes each batch in k passes, so that a large one needs little memory: the
    loop takes k turns a batch, and only the last sums and steps. `shards=8` does so in a way that
    does not depend on the number of ranks: the batch is always cut in 8, each piece has random
    numbers of its own, and gradients add up in a tree over the pieces, so 1, 2, 4 or 8 workers
    yield the same bits (Li et al. 2023, EasyScale). Buffers alone are still each rank's.

    `noise_scale`, a NoiseScale, is told the norms of all gradients.

    `.grad` shows a vector that the next backward reuses: clone it to keep it. Buffers are each
    rank's own until sync_buffers, called after each epoch."""

    name = "sync"

    def __init__(self, model: Any, optimizer: Any, group: ProcessGroup | None = None, *,
                 accumulate: int = 1, shards: int = 0, compress: Any = None,
                 noise_scale: NoiseScale | None = None) -> None:
        super().__init__(model, optimizer, group, compress)
        size = self.group.size
        if shards and (shards & (shards - 1) or shards % size or accumulate != 1):
            raise ValueError(f"shards={shards}, {size} ranks, accumulate={accumulate}: shards must "
                             "be 1, 2, 4, 8, ..., the number of ranks divide it, and accumulate "
                             "stay 1")
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: it counts passes, from 1")
        self.turns = shards // size or accumulate
        if noise_scale is not None and size * self.turns == 1:
            raise ValueError("noise_scale compares gradients of parts with that of the whole "
                             "batch: it needs several ranks, or accumulate=2 or more")
        self.noise_scale = noise_scale
        self._norms = np.zeros(3)  # of this step's passes: see NoiseScale.update
        self._seed: int | None = None  # of the random numbers of shards
        if shards:
            seed = rng().integers(2**62, size=1)
            self.group.broadcast(seed)
            self._seed = seed.item()
        self._reduced = False  # has this step's gradient been reduced?
        self._queued = False  # will it be, when the backward pass under way ends?
        self._no_sync = False  # inside no_sync
        self._agreed = optimizer is None  # do the ranks' optimizers start equal?
        self._counted: dict[int, int] = {}  # samples of the passes of this batch
        self._held_for = 0  # the size of the batch that was set aside
        self._hooked: set[str] = set()
        self._order: list[str] = []  # names in the order of the flat vectors
        self._lay_out()

    def _lay_out(self) -> None:
        """One flat vector a dtype for the gradients of what is trainable at present."""
        trainable = {name: x for name, x in self.parameters.items() if x.requires_grad}
        if trainable.keys() == set(self._order):
            return
        groups: dict[tuple, dict[str, Tensor]] = {}
        for name, x in trainable.items():
            groups.setdefault((-x.dtype.itemsize, x.dtype.str), {})[name] = x
            if name not in self._hooked:
                self._hooked.add(name)
                x.register_post_accumulate_grad_hook(self._on_leaf)
        # A few numbers about the step travel behind the first vector. 16 bits would not hold them
        # (float16 counts to 2048, bfloat16 to 256): then they travel alone, as what is compressed.
        tail = 2 + self.group.size + len(trainable)
        held = any(-size > 2 for size, _ in groups)
        tails = itertools.chain([tail * held], itertools.repeat(0))
        self._flats = [FlatVector(groups[key], tail) for key, tail in zip(sorted(groups), tails)]
        self._tail = self._flats[0].tail if held else np.zeros(tail, np.float32)
        self._tail_alone = not held or self.compressor is not None
        self._order = [name for flat in self._flats for name in flat.names]
        self._begin()

    # When: as backward ends, or at the latest in step().

    @property
    def _alone(self) -> bool:
        """One rank alone, with one pass a batch, needs none of this."""
        return self.group.size * self.turns == 1

    def _on_leaf(self, parameter: Tensor) -> None:
        if not self._queued and not self._alone:
            self._queued = True
            queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._queued = False
        self._reduce() if self.last_turn and not self._no_sync else self._set_aside()

    def _reduce(self) -> None:
        if not self._agreed:  # now, as a checkpoint may have been loaded until now
            self._agreed = True
            self.group.agree("the optimizer", lines_of(self.optimizer),
                             "give it the same options, and load a checkpoint, on every rank")
        for i, vector in enumerate(self.on_gradient()):
            self.group.all_reduce(vector, what=f"gradients of step {self.steps}, part {i}")
        if self.noise_scale is not None:
            self.group.all_reduce(self._norms, what="squared norms")
        self.on_sum()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes in this block send nothing. Their gradients are set aside
        (`.grad` is None meanwhile) and join those of the first backward outside."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def batches(self, loader: Any) -> Iterator[Any]:
        before = _generator.get()
        try:
            for batch in super().batches(loader):
                if self._seed is not None:
                    piece = self.group.rank * self.turns + self.turn
                    _generator.set(Generator().manual_seed([self._seed, self.steps, piece]))
                yield batch
        finally:
            _generator.set(before)
            if self.turns > 1:
                self._begin()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._lay_out()
        if self.turns == 1:
            self._begin()

    def step(self) -> None:
        if not self.last_turn:
            return
        if not self._reduced and not self._alone:
            self._reduce()  # no parameter took part in this rank's loss, but others wait for us
        self.optimizer.step()
        self.steps += 1
        self._begin()

    def _begin(self) -> None:
        self._reduced = self._queued = False
        self._held: list[tuple[int, list[np.ndarray]]] = []  # sums over so many earlier passes
        self._present = [False] * len(self._order)  # which parameters have a gradient
        self._norms[:] = 0

    def finish(self) -> None:
        self.sync_buffers()

    def own_state(self) -> dict[str, Any]:
        noise = self.noise_scale
        return super().own_state() | {"seed": self._seed} | (
            {} if noise is None else {"noise_scale": [noise.signal, noise.noise]})

    def load_own_state(self, own: dict[str, Any]) -> None:
        super().load_own_state(own)
        self._seed = own["seed"]
        if self.noise_scale is not None and "noise_scale" in own:
            self.noise_scale.signal, self.noise_scale.noise = own["noise_scale"]

    # What: the weighted mean. The machine, without the network: vectors to sum, and the sums.

    def on_gradient(self) -> list[np.ndarray]:
        """This rank's part: vectors that are to be summed over all ranks."""
        self._lay_out()
        if self._reduced and self.turns > 1:
            raise RuntimeError("with accumulate or shards, backward is called once a turn")
        self._reduced = True
        flags = np.zeros(self.group.size)
        with np.errstate(all="ignore"):  # what is not finite is all ranks' business: see on_sum
            self._collect()
            while self._held:
                for flat, earlier in zip(self._flats, self._held.pop()[1]):
                    np.add(earlier, flat.data, out=flat.data)
            flags[self.group.rank] = 1 + self._first_not_finite() or -self._stop
        if not self._flats:
            return []
        self._tail[:] = np.concatenate([[sum(self._counted.values()), self.steps % 32], flags,
                                        self._present])
        exact = self._flats if self.compressor is None else ()
        return [self._tail] * self._tail_alone + [flat.vector for flat in exact]

    def on_sum(self) -> None:
        """The vectors hold the sums now: check them, divide, and put them in place."""
        self._seen += self.samples
        if not self._flats:
            return
        size, where = self.group.size, f"rank {self.group.rank}, step {self.steps}: "
        (samples, steps), flags, counts = np.split(self._tail, [2, 2 + size])
        if (samples, steps) != (self.batch, size * (self.steps % 32)):
            raise RuntimeError(
                f"{where}the ranks are not at the same step of the same batch (their samples add "
                f"up to {samples:g}, this rank's batch has {self.batch}): call backward and step "
                "equally often everywhere, on batches of train.batches(loader)")
        self._all_stop = bool((flags < 0).any())
        if (flags > 0).any():
            culprits = ", ".join(f"from rank {rank} in {self._order[int(flag) - 1]}"
                                 for rank, flag in enumerate(flags) if flag > 0)
            raise FloatingPointError(f"{where}non-finite gradient {culprits}. The parameters are "
                                     "untouched: lower the learning rate or look at that batch")
        present = iter(counts.tolist())
        for flat in self._flats:
            np.divide(flat.data, self.batch, out=flat.data)
            if self.compressor is not None:  # what it sums are the ranks' parts of the mean
                self.compressor.sum(self.group, flat)
            for parameter, view in zip(flat.tensors, flat.views):
                parameter.grad = wrap(view) if next(present) else None
        if self.noise_scale is not None:
            self.noise_scale.update(self._norms, self._square(), self.batch)

    def _collect(self) -> None:
        """The gradients of the pass that ended, times its samples, into the flat vectors. A rank
        without samples contributes zeros: the gradient of the mean of nothing is NaN."""
        if self.turn == 0:
            self._counted = {}
        self._counted[self.turn] = self.samples
        if self._held and self.batch != self._held_for:  # no_sync: they count as in their batch
            for vector in itertools.chain(*[vectors for _, vectors in self._held]):
                vector *= self.batch / self._held_for
        self._held_for = self.batch
        place = itertools.count()
        for flat in self._flats:
            for parameter, view, i in zip(flat.tensors, flat.views, place):
                gradient = parameter.grad if self.samples else None
                self._present[i] |= gradient is not None
                if gradient is None:
                    view[...] = 0
                else:
                    np.multiply(gradient._array, self.samples, out=view)
        if self.noise_scale is not None and self.samples:
            self._norms += self._square() / self.samples**2, 1 / self.samples, 1

    def _set_aside(self) -> None:
        """What this pass found waits for the passes to come. Sums of equally many passes are
        added at once: a balanced tree, of which few are held at a time."""
        self._collect()
        count, vectors = 1, [flat.data.copy() for flat in self._flats]
        while self._held and self._held[-1][0] == count:
            _, earlier = self._held.pop()
            count, vectors = 2 * count, [a + b for a, b in zip(earlier, vectors)]
        self._held.append((count, vectors))
        for parameter in self.parameters.values():
            parameter.grad = None
        self._seen += self.samples

    def _square(self) -> float:
        return sum(float(np.vecdot(flat.data, flat.data)) for flat in self._flats)

    def _first_not_finite(self) -> int:
        """The place in self._order of the first gradient that is not finite, or -1."""
        if np.isfinite(self._square()):  # at the price of one look, says that no other is needed
            return -1
        views = [view for flat in self._flats for view in flat.views]
        return next((i for i, view in enumerate(views) if not np.isfinite(view).all()), -1)


class DistributedDataParallel(Module):
    """PyTorch's face of synchronous training: it wraps the model, and the optimizer stays as it
    was. After backward `.grad` holds the mean over all ranks, the same bits on each.

    Gradients travel while backward computes others (Li et al. 2020, PyTorch Distributed). They are
    gathered in buckets, in the order in which backward finds them: the last layer's first. A
    thread sums each bucket that is full; the caller the last one, behind which nothing is left to
    compute. The first is small, so that the network is soon at work.

    All ranks must call forward and backward equally often. A parameter that no rank used keeps the
    `.grad` it had (`find_unused_parameters` has nothing left to do). `.grad` shows a bucket: the
    next backward writes there again, as with PyTorch's `gradient_as_bucket_view`. Forward first
    gives all ranks the buffers of rank 0 (statistics of batch norm), unless the forward before
    was in no_sync or without gradients. To evaluate on one rank alone, call `.module`."""

    FIRST = 2**20  # bytes of the first bucket

    def __init__(self, module: Module, device_ids: Any = None, output_device: Any = None,
                 dim: int = 0, broadcast_buffers: bool = True, *,
                 process_group: ProcessGroup | None = None, bucket_cap_mb: float = 25,
                 find_unused_parameters: bool = False, gradient_as_bucket_view: bool = True,
                 static_graph: bool = False) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers, self.bucket_cap_mb = broadcast_buffers, bucket_cap_mb
        self._group = process_group or _default_group.get() or ProcessGroup()
        self._sync = True  # will the next backward send its gradients?
        self._no_sync = False  # inside no_sync
        self._stale = True  # may the ranks' buffers differ?
        self._buckets: list[FlatVector] = []
        self._place: dict[Tensor, int] = {}  # the bucket of each parameter
        self._handles: list[Handle] = []
        start_equal(self._group, module)

    def forward(self, *args: Any, **options: Any) -> Any:
        if self._group.size > 1:
            self._share_out()
            self._begin()
            if self._stale and self.broadcast_buffers:
                self._pass_on_buffers()
            self._stale = is_grad_enabled() and not self._no_sync
            if is_grad_enabled():
                self._sync = not self._no_sync
        return self.module(*args, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: what goes forward in this block comes back without sending anything. The
        next backward sends the sum."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def _share_out(self) -> None:
        """What is trainable at present, in buckets."""
        trainable = {name: x for name, x in self.module.named_parameters() if x.requires_grad}
        if self._place.keys() == set(trainable.values()):
            return
        sizes = itertools.chain([self.FIRST], itertools.repeat(self.bucket_cap_mb * 2**20))
        parts: list[dict[str, Tensor]] = []
        room, dtype = 0.0, None
        for name, x in reversed(trainable.items()):
            if room <= 0 or x.dtype != dtype:
                parts.append({})
                room, dtype = next(sizes), x.dtype
            parts[-1][name] = x
            room -= x._array.nbytes
        self._buckets = [FlatVector(part, tail=len(part)) for part in parts]
        self._place = {x: i for i, part in enumerate(parts) for x in part.values()}
        for handle in self._handles:
            handle.remove()
        self._handles = [x.register_post_accumulate_grad_hook(self._on_leaf) for x in self._place]

    def _pass_on_buffers(self) -> None:
        """In one message."""
        buffers = list(self.module.buffers())
        if not buffers:
            return
        data = np.concatenate([x._array.reshape(-1).view(np.uint8) for x in buffers])
        self._group.broadcast(data, 0, "the buffers")
        stops = np.cumsum([x._array.nbytes for x in buffers])
        for x, part in zip(buffers, np.split(data, stops)):
            x._array[...] = part.view(x._array.dtype).reshape(x.shape)
            touch(x, "DistributedDataParallel")

    def _begin(self) -> None:
        self._found: set[Tensor] = set()  # what this backward has found a gradient for
        self._missing = [len(bucket.names) for bucket in self._buckets]
        self._threads: list[threading.Thread] = []  # one for each bucket on its way
        self._error: BaseException | None = None  # of such a thread

    def _on_leaf(self, parameter: Tensor) -> None:
        if not self._sync:
            return
        if not self._found:
            queue_callback(self._on_backward_end)
        self._found.add(parameter)
        self._missing[self._place[parameter]] -= 1
        # In order, so that all ranks make the same calls.
        while not self._missing[len(self._threads)] and len(self._threads) < len(self._buckets) - 1:
            thread = threading.Thread(target=self._carry, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, number: int) -> None:
        if number:
            self._threads[number - 1].join()
        if self._error is None:
            try:
                self._sum(number)
            except BaseException as error:
                self._error = error

    def _sum(self, number: int) -> None:
        """Make the mean over all ranks of a bucket's gradients, and of how many ranks have them."""
        bucket = self._buckets[number]
        for x, view in zip(bucket.tensors, bucket.views):
            view[...] = 0 if x.grad is None else x.grad._array
        bucket.tail[:] = [x in self._found for x in bucket.tensors]
        with np.errstate(all="ignore"):  # what is not finite, the program sees in .grad
            self._group.all_reduce(bucket.vector, what=f"bucket {number} of the gradients")
            np.divide(bucket.data, self._group.size, out=bucket.data)

    def _on_backward_end(self) -> None:
        for thread in self._threads[-1:]:
            thread.join()
        if self._error is not None:
            raise self._error
        for number in range(len(self._threads), len(self._buckets)):
            self._sum(number)
        for bucket in self._buckets:
            for x, view, count in zip(bucket.tensors, bucket.views, bucket.tail):
                if count:
                    x.grad = wrap(view)
        self._begin()


# -- how noisy a gradient is -----------------------------------------------------------------------


class NoiseScale:
    """The gradient noise scale tr(Sigma) / |G|^2 of McCandlish et al. 2018: about the batch size
    above which more samples a step hardly help. `value` is it, once there were steps.

    A mean over b samples has an expected squared norm of |G|^2 + tr(Sigma)/b. So the norms of
    parts of a batch and of the whole are two equations for the two unknowns. Either solution is
    noisy, and may be negative; what is divided are their averages (decay=0.99: the last hundred
    steps count; 1: all steps alike). Momentum and clipping must not have touched the gradients."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay, self.signal, self.noise = decay, 0.0, 0.0

    def update(self, parts: np.ndarray, square: float, batch: int) -> None:
        """One step: the sums over parts of |gradient|^2, of 1/samples and of 1; the whole batch's
        |gradient|^2 and samples."""
        small, inverse = parts[:2] / parts[2]
        if inverse > 1 / batch:  # else one part had all samples
            noise = (small - square) / (inverse - 1 / batch)
            keep = self.decay
            self.noise = keep * self.noise + noise
            self.signal = keep * self.signal + square - noise / batch

    @property
    def value(self) -> float:
        return self.noise / self.signal if self.signal > 0 else math.nan


class AdaptiveBatch:
    """A batch_sampler whose batches follow the noise scale, as sqrt(r * noise scale) between
    `smallest` and `largest` (McCandlish et al. 2018, appendix D): small while the gradient is plain
    to see, larger as it drowns in noise. The last batch of an epoch has what is left.

        noise = dist.NoiseScale()
        train = dist.Synchronous(model, optimizer, noise_scale=noise)
        batches = dist.AdaptiveBatch(RandomSampler(data), noise)
        train.checkpoint(path, batches=batches)
        loader = DataLoader(data, batch_sampler=batches)"""

    def __init__(self, sampler: Any, noise: NoiseScale, r: float = 1.0, smallest: int = 8,
                 largest: int = 1024) -> None:
        self.sampler, self.noise, self.r = sampler, noise, r
        self.smallest, self.largest = smallest, largest
        self._sizes: list[int] = []  # of this epoch's batches
        self._again: list[int] = []  # and of those that a resumed epoch has had already

    @property
    def batch_size(self) -> int:
        wanted = math.sqrt(max(self.r * self.noise.value, 0.0))
        return round(min(max(wanted, self.smallest), self.largest)) \
            if math.isfinite(wanted) else self.smallest

    def __iter__(self) -> Iterator[list[int]]:
        indices, again = iter(self.sampler), iter(self._again)
        self._sizes, self._again = [], []
        while batch := list(itertools.islice(indices, next(again, None) or self.batch_size)):
            self._sizes.append(len(batch))
            yield batch
        self._sizes = []

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)  # at the present size

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self._sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._again = list(state["sizes"])


def critical_batch(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float, float]:
    """(B_crit, S_min, E_min) of training runs to one target loss: run i took steps[i] of
    batches[i] samples. They are fitted, by least squares of logarithms, to the hyperbola

        (S / S_min - 1) (E / E_min - 1) = 1,    E = S * B,    B_crit = E_min / S_min

    (McCandlish et al. 2018, 2.11): S_min steps are needed however large the batch, E_min samples
    however small; batches of B_crit need twice both."""
    inverse, logs = 1 / np.asarray(batches, np.float64), np.log(np.asarray(steps, np.float64))
    if len(set(inverse.tolist())) < 2 or len(logs) != len(inverse):
        raise ValueError(f"batches={batches}, steps={steps}: runs with at least two different "
                         "batch sizes are needed, and the steps of each")

    # With S = S_min (1 + B_crit / B) the best S_min is known for each B_crit. What is left is one
    # number, found by looking closer and closer around the best of a grid.
    def misfit(log_b: float) -> float:
        return float(np.var(logs - np.log1p(np.exp(log_b) * inverse)))

    low, high = np.log(1e-3 / inverse.max()), np.log(1e3 / inverse.min())
    while high - low > 1e-9:
        grid = np.linspace(low, high, 65)
        best = min(grid, key=misfit)
        low, high = best - (grid[1] - grid[0]), best + (grid[1] - grid[0])
    critical = float(np.exp(best))
    least = float(np.exp(np.mean(logs - np.log1p(critical * inverse))))
    return critical, least, critical * least


# -- machines --------------------------------------------------------------------------------------
#
# Where ranks are not in step a message may come at any time. What it does is decided by a machine
# without sockets: packets and ticks of a clock in, packets out. A thin loop drives it over a
# transport; tests and simulators drive it directly.

TICK = 5.0  # seconds without news after which a machine may look what to send again


class Packet(NamedTuple):
    """A message, in words."""

    kind: str
    peer: int  # to whom; for on_message: from whom
    fields: tuple = ()
    payload: Any = b""


class Machine:
    """What one node says, and does when it is spoken to."""

    lost: set[int]  # nodes that are gone

    def on_message(self, kind: str, peer: int, fields: tuple = (),
                   payload: Any = b"") -> list[Packet]:
        raise NotImplementedError

    def on_lost(self, peer: int, why: tuple = ()) -> list[Packet]:
        raise NotImplementedError

    def on_tick(self, now: float) -> list[Packet]:
        return []  # who only answers sends nothing again


def drive(machine: Machine, wire: Any, done: Callable[[], bool], doing: str) -> None:
    """The thin loop: carry packets and the ticks of a clock to a machine, and its answers away."""
    waited = 0.0
    while not done():
        try:
            feed(machine, wire, wire.recv(TICK, doing))
        except TimeoutError:
            waited += TICK
            wire.send(machine.on_tick(waited))


def feed(machine: Machine, wire: Any, packet: Any) -> None:
    gone = packet[0] in ("GOODBYE", "LOST")
    wire.send(machine.on_lost(*packet[1:3]) if gone else machine.on_message(*packet))


# -- local steps and gossip ------------------------------------------------------------------------


class LocalSGD(Strategy):
    """Each rank makes `sync_every` steps of its own; then all replicas become their mean (Stich
    2019). So many times fewer messages; the price is that replicas wander apart in between.

    Written as one step of an outer optimizer on the parameters of the last meeting, with what the
    ranks have moved since, in the mean, as its gradient. Plain averaging is SGD(lr=1). Inner
    optimizers keep what they remember."""

    name, drifts = "local", True
    outer: dict[str, Any] = {"lr": 1.0}

    def __init__(self, model: Any, optimizer: Any, sync_every: int = 8, *, compress: Any = None,
                 group: ProcessGroup | None = None) -> None:
        super().__init__(model, optimizer, group, compress)
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every}: it counts steps, from 1")
        self.sync_every = sync_every
        self._weights = self.in_one_vector()
        self._moved = self._weights.like(tail=self.group.size)
        self._shared = wrap(self._weights.data.copy())  # the parameters of the last meeting
        self._outer = SGD([self._shared.requires_grad_()], **self.outer)

    def step(self) -> None:
        if self.samples:
            self.optimizer.step()
        self._seen += self.samples
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.meet()

    def meet(self) -> None:
        moved, shared = self._moved, self._shared._array
        moved.tail[:] = 0
        with np.errstate(all="ignore"):  # what is not finite is all ranks' business
            np.subtract(shared, self._weights.data, out=moved.data)
            moved.tail[self.group.rank] = -self._stop if np.isfinite(moved.data).all() else 1
            self.group.all_reduce(moved.vector if self.compressor is None else moved.tail,
                                  what=f"moves of step {self.steps}")
        self._all_stop = bool((moved.tail < 0).any())
        if (moved.tail > 0).any():
            raise FloatingPointError(f"rank {self.group.rank}, step {self.steps}: the parameters of"
                                     f" ranks {np.flatnonzero(moved.tail > 0)} are not finite: "
                                     "lower the learning rate")
        if self.compressor is not None:
            self.compressor.sum(self.group, moved)
        self._shared.grad = wrap(moved.data / self.group.size)
        self._outer.step()
        self._weights.data[:] = shared
        self._weights.changed("a meeting of all ranks")

    def finish(self) -> None:
        if self.steps % self.sync_every:
            self.meet()
        self.sync_buffers()

    def own_state(self) -> dict[str, Any]:
        return super().own_state() | {"shared": self._shared, "outer": self._outer.state_dict()}

    def load_own_state(self, own: dict[str, Any]) -> None:
        super().load_own_state(own)
        self._shared._array[:] = to_array(own["shared"])
        self._outer.load_state_dict(own["outer"])


class DiLoCo(LocalSGD):
    """Few meetings, far apart, with momentum over meetings (Douillard et al. 2023): the outer
    optimizer is Nesterov's. The paper's inner one is AdamW, with sync_every=500."""

    name = "diloco"

    def __init__(self, model: Any, optimizer: Any, sync_every: int = 500, outer_lr: float = 0.7,
                 outer_momentum: float = 0.9, *, compress: Any = None,
                 group: ProcessGroup | None = None) -> None:
        self.outer = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": True}
        super().__init__(model, optimizer, sync_every, compress=compress, group=group)


def ring_graph(rank: int, size: int, step: int) -> tuple[list[int], list[int]]:
    """To whom a rank sends at a step, and from whom it takes: both neighbours."""
    both = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return both, both


def exponential_graph(rank: int, size: int, step: int) -> tuple[list[int], list[int]]:
    """One partner a step, at distance 1, 2, 4, ..., 1, ...: log2(size) steps reach everyone."""
    distance = 1 << step % max((size - 1).bit_length(), 1)
    return ([(rank + distance) % size], [(rank - distance) % size]) if size > 1 else ([], [])


GRAPHS: dict[str, Callable] = {"ring": ring_graph, "exponential": exponential_graph}


class Gossip(Strategy):
    """No sum over all ranks, no server: each rank averages with neighbours only, and what one has
    learned spreads from neighbour to neighbour.

    By default D-PSGD (Lian et al. 2017): before each step a rank's parameters become the mean of
    its own and its neighbours', and then it applies its gradient, which it computed before. As
    many take from a rank as it takes from (W is doubly stochastic), so the mean over all ranks is
    kept. `graph` is "ring" or "exponential" (Assran et al. 2019).

    `asynchronous=True` is AD-PSGD (Lian et al. 2018): nobody keeps in step. Ranks of even number
    are active: they ask a neighbour at random, of odd number, to average with them while they
    compute. Ranks of odd number answer at the end of each step and never ask; so no two wait for
    each other. The loss of a rank stops nobody.

    `finish` makes all replicas equal: the mean of those that are there."""

    name, drifts = "gossip", True

    def __init__(self, model: Any, optimizer: Any, graph: str = "ring", asynchronous: bool = False,
                 group: ProcessGroup | None = None) -> None:
        super().__init__(model, optimizer, group)
        if graph not in GRAPHS:
            raise ValueError(f"graph={graph!r}: known are {', '.join(GRAPHS)}")
        self.graph, self.lockstep = GRAPHS[graph], not asynchronous
        self._weights = self.in_one_vector()
        self._peer: Any = None
        self._left = math.inf  # steps, once somebody was asked to stop
        rank, size = self.group.rank, self.group.size
        if asynchronous and size > 1:
            reach = {peer for step in range(size.bit_length()) for peers in
                     self.graph(rank, size, step) for peer in peers if (peer - rank) % 2}
            self._peer = GossipPeer(rank, size, self._weights.data, sorted(reach))
            self._wire = transports().Wire(self.group.transport)

    def _go_on(self) -> None:  # at the first loop or step, as a checkpoint may come until then
        if not self._begun:
            super()._go_on()
            if self._peer is not None:
                self._wire.send(self._peer.on_step())

    def step(self) -> None:
        self._go_on()
        if self._peer is not None:
            self._until(lambda: not self._peer.waits_for, "a neighbour's answer")
        else:
            self._mix()
        self._weights.changed("an average with neighbours")
        if self.samples:
            self.optimizer.step()
        self._seen += self.samples
        self.steps += 1
        if self._peer is not None:
            self._wire.send(self._peer.on_step())

    @property
    def lost(self) -> set[int]:
        """The ranks that are gone."""
        return self._peer.lost if self._peer is not None else set()

    def _mix(self) -> None:
        group, mine = self.group, self._weights.data
        to, sources = self.graph(group.rank, group.size, self.steps)
        # A wish to stop spreads as a number of steps, in which it will have reached everyone.
        left = min(self._left, group.size if self._stop else math.inf)
        for peer in to:
            group.send(np.append(mine, mine.dtype.type(left)), peer, tag=self.steps % 2**32)
        arrived = np.empty((len(sources), mine.size + 1), mine.dtype)
        for peer, row in zip(sources, arrived):
            group.recv(row, peer, tag=self.steps % 2**32)
            if not np.isfinite(row[:-1]).all():
                raise FloatingPointError(f"rank {group.rank}, step {self.steps}: the parameters of "
                                         f"rank {peer} are not finite: lower the learning rate")
        mine += arrived[:, :-1].sum(0)
        mine /= 1 + len(sources)
        self._left = float(min([left, *arrived[:, -1]])) - 1
        self._all_stop = self._left <= 0

    def finish(self) -> None:
        if self._peer is not None:
            self._until(lambda: not self._peer.waits_for, "a neighbour's answer")
            self._wire.send(self._peer.on_finish())
            self._until(lambda: self._peer.done, "the end of all ranks")
        elif self.group.size > 1:
            self.group.all_reduce(self._weights.data, ReduceOp.AVG, "parameters")
            self.sync_buffers()
        self._weights.changed("the mean of all ranks")

    def _until(self, done: Callable[[], bool], doing: str) -> None:
        """Carry messages until done; then take what has come meanwhile, too."""
        drive(self._peer, self._wire, done, f"{doing}, step {self.steps}")
        with contextlib.suppress(TimeoutError):
            while True:
                feed(self._peer, self._wire, self._wire.recv(0.0, doing))


class GossipPeer(Machine):
    """A rank of AD-PSGD.

    An active rank does not change its parameters between its question, which carries them, and
    the answer, which is the average; the passive one averages at one blow. So both end with the
    same values, and their sum is what it was."""

    ASK, AVERAGE, REFUSAL, FINAL = range(4)  # what a TENSOR is, by its tag

    def __init__(self, rank: int, size: int, parameters: np.ndarray, neighbours: list[int]) -> None:
        self.rank, self.parameters, self.neighbours = rank, parameters, neighbours
        self.active = rank % 2 == 0
        self.waits_for: set[int] = set()
        self.lost: set[int] = set()
        self.rejected = 0  # averages that did not happen, as one side was not finite
        self.done = False
        self._others = set(range(size)) - {rank}
        self._final: dict[int, np.ndarray] = {}  # what each rank ended with
        self._ending = False
        self._choice = np.random.default_rng(rank)

    def on_step(self) -> list[Packet]:
        """A step begins: ask somebody, to have the answer when it ends."""
        there = [peer for peer in self.neighbours if peer in self._others]
        if not self.active or not there:
            return []
        self.waits_for = {int(self._choice.choice(there))}
        return [self._tensor(peer, self.ASK) for peer in self.waits_for]

    def on_message(self, kind: str, peer: int, fields: tuple = (),
                   payload: Any = b"") -> list[Packet]:
        (tag, dtype, shape), mine = fields, self.parameters
        if kind != "TENSOR" or dtype != mine.dtype.name or tuple(shape) != mine.shape:
            raise RuntimeError(f"rank {self.rank}: rank {peer} sent {kind} {fields}, not "
                               f"{mine.size} {mine.dtype}: run the same program on all ranks")
        theirs = np.frombuffer(payload, mine.dtype)
        if tag == self.ASK:
            with np.errstate(all="ignore"):
                mean = (mine + theirs) / 2
            if not np.isfinite(mean).all():
                self.rejected += 1
                return [self._tensor(peer, self.REFUSAL)]
            mine[:] = mean
            return [self._tensor(peer, self.AVERAGE)]
        if tag == self.FINAL:
            self._final[peer] = theirs.copy()
            return self._last_words()
        self.waits_for.discard(peer)
        self.rejected += tag == self.REFUSAL
        if tag == self.AVERAGE:
            mine[:] = theirs
        return []

    def on_lost(self, peer: int, why: tuple = ()) -> list[Packet]:
        self.lost |= {peer} - self._final.keys()
        self._others.discard(peer)
        self.waits_for.discard(peer)
        return self._last_words()

    def on_finish(self) -> list[Packet]:
        self._ending = True
        return self._last_words()

    def _last_words(self) -> list[Packet]:
        """Tell all what we end with. A passive rank's parameters are not final before all active
        ones are at their end."""
        packets: list[Packet] = []
        awaited = self._others - self._final.keys()
        if self._ending and self.rank not in self._final and (
                self.active or not any(peer % 2 == 0 for peer in awaited)):
            self._final[self.rank] = self.parameters.copy()
            packets = [self._tensor(peer, self.FINAL) for peer in sorted(self._others)]
        if self.rank in self._final and not awaited and not self.done:
            self.done = True
            finals = [x for _, x in sorted(self._final.items())]
            self.parameters[:] = tree_reduce(finals, np.add) / len(finals)
        return packets

    def _tensor(self, peer: int, tag: int) -> Packet:
        return Packet("TENSOR", peer, (tag, self.parameters.dtype.name, self.parameters.shape),
                      self.parameters.copy())


# -- parameter servers -----------------------------------------------------------------------------
#
# DistBelief's asynchronous SGD (Dean et al. 2012, algorithm 1). The parameters, as one vector, are
# cut in slices; each server keeps one. A worker adds its gradients up and pushes the sum every
# n_push steps, fetches the parameters every n_fetch steps and goes on by itself in between; servers
# apply what comes in the order it comes. Nobody waits for a slow or dead worker; the price is that
# gradients are stale: computed on parameters that have moved on since.

SNAPSHOT, FINISHED = 2**64 - 2, 2**64 - 1  # clocks: "all you have", "I have done my last step"
SERVER_SETTINGS = ("warm_start", "gather", "bound")  # others are the rule's


class ServerSGD:
    """w <- w - lr * pushed. With staleness_aware, lr is divided by the push's staleness, if that
    is above 1 (Zhang et al. 2016)."""

    name = "sgd"
    memory: tuple[str, ...] = ()  # attributes, one number for each parameter, that it remembers

    def __init__(self, lr: float, staleness_aware: float = 0) -> None:
        self.settings = {"lr": float(lr)}
        if staleness_aware:
            self.settings["staleness_aware"] = 1.0

    def apply(self, values: np.ndarray, pushed: np.ndarray, staleness: int = 0,
              peer: int = 0) -> None:
        aware = "staleness_aware" in self.settings
        values -= self.settings["lr"] / (max(staleness, 1) if aware else 1) * pushed

    def sent(self, values: np.ndarray, peer: int) -> None:
        """The worker `peer` is sent these values now, to compute with them: for rules that want
        to know."""


class ServerAdagrad(ServerSGD):
    """w <- w - lr * pushed / sqrt(sum of the squares of all pushed so far), for each element.
    The paper has no epsilon in it: where nothing was ever pushed, 0 / 0 is no change."""

    name, memory = "adagrad", ("squares",)
    squares: Any = 0.0

    def apply(self, values: np.ndarray, pushed: np.ndarray, staleness: int = 0,
              peer: int = 0) -> None:
        self.squares = self.squares + pushed * pushed
        root = np.sqrt(self.squares)
        step = np.divide(pushed, root, out=np.zeros_like(pushed), where=root > 0)
        super().apply(values, step, staleness)


class ParameterServer(Machine):
    """One slice of the parameters, and the rule that changes it.

    - Rank 0 sends the initial values (INIT); whoever asks earlier waits for them.
    - A PUSH is applied, then acknowledged (APPLIED). One that comes twice is acknowledged twice
      and applied once: its id tells. One that is not finite is not applied, but counted.
    - With `gather=n` in the settings, pushes are held until n workers' gradients of one version
      are there; then their mean, weighted by samples, is one step, and all n are acknowledged. One
      that comes later than its round is dropped, and told so.
    - A PULL is answered (STATE) when it may: other ranks than 0 wait until `warm_start` pushes
      are applied; with `bound=s` a worker waits that is more than s steps ahead of the slowest;
      those that have finished wait for each other, so that all end with the same parameters.
      Nobody waits for the lost."""

    def __init__(self, workers: int) -> None:
        self.workers = set(range(workers))
        self.values: Any = None
        self.version = 0  # steps of the rule
        self.settings: dict[str, float] = {}
        self.clocks = dict.fromkeys(range(workers), 0)  # steps that each worker has done
        self.finished: set[int] = set()
        self.lost: set[int] = set()
        self.staleness: collections.Counter[int] = collections.Counter()
        self.rejected = self.late = self.samples = 0
        self._asked: set[int] = set()  # workers that ever pulled
        self._pulls: dict[int, int] = {}  # worker: its clock, of questions not answered yet
        self._round: dict[int, tuple] = {}  # worker: push_id, gradient, samples, held
        self._acknowledged: dict[tuple, Packet] = {}  # (worker, incarnation): its last APPLIED

    @property
    def done(self) -> bool:
        """Every worker has finished or is lost, and nobody waits for an answer; or rank 0 is lost
        and has not said what to begin with, so that nobody will ever get one."""
        if self.values is None and 0 in self.lost:
            return True
        return self.gone >= self.workers and not self._pulls

    @property
    def gone(self) -> set[int]:
        """Workers for whom nobody waits. Who is lost is told by rank 0: once it is gone itself,
        one that has not asked anything yet may never do so."""
        return self.finished | self.lost | (self.workers - self._asked if 0 in self.lost else set())

    def on_message(self, kind: str, peer: int, fields: tuple = (),
                   payload: Any = b"") -> list[Packet]:
        handle = {"INIT": self._on_init, "PUSH": self._on_push, "PULL": self._on_pull}.get(kind)
        try:
            if handle is None:
                raise Refused("UNEXPECTED", "a server takes INIT, PUSH and PULL")
            return handle(peer, fields, payload) + self._answers()
        except Refused as error:
            code, text = error.args
            return [Packet("REFUSED", peer, (code, f"{kind} of rank {peer}: {text}"))]

    def on_lost(self, peer: int, why: tuple = ()) -> list[Packet]:
        """A worker died or left. What it pushed stays, and nobody waits for it any more."""
        self.lost.add(peer)
        self._pulls.pop(peer, None)
        return self._answers()

    def _on_init(self, peer: int, fields: tuple, payload: Any) -> list[Packet]:
        dtype, start, stop, rule, settings = fields
        if peer != 0:
            raise Refused("UNEXPECTED", "only rank 0 sends the initial parameters")
        if self.values is None:  # else it is an echo: the first counts
            try:
                rule, plus, compressor = rule.partition("+")
                if not (rule + compressor).isidentifier():  # by names only, never by paths
                    raise ValueError("that is no name")
                options = {k: v for k, v in settings.items() if k not in SERVER_SETTINGS}
                self.rule = plugin(rule, ServerSGD)(**options)
                self.compressor = plugin(compressor, Compressor)() if plus else None
                numbers, count = np.frombuffer(payload, dtype), stop - start
                remembered = len(self.rule.memory) if numbers.size > count else 0
                vectors = numbers.reshape(1 + remembered, count)
            except (ImportError, TypeError, ValueError) as error:
                raise Refused("UNEXPECTED", f"no start with {dtype} {start}..{stop} and rule {rule}"
                              f" {settings}: {error}") from None
            for name, vector in zip(self.rule.memory, vectors[1:]):
                setattr(self.rule, name, vector.copy())
            self.settings, self.slice = settings, (start, stop, dtype)
            self.values = vectors[0].copy()
        return []

    def _on_push(self, peer: int, fields: tuple, payload: Any) -> list[Packet]:
        push_id, version, start, stop, samples, dtype = fields
        if self.values is None:
            raise Refused("NOT_READY", "rank 0 has not sent the parameters yet")
        if (start, stop, dtype) != self.slice:
            raise Refused("BAD_RANGE", f"it has {dtype} {start}..{stop}, this server has "
                                       "{2} {0}..{1}".format(*self.slice))
        last = self._acknowledged.get((peer, push_id >> 32))
        if last is not None and push_id <= last.fields[0]:
            return [last]  # seen before: the answer was lost, or this is an echo
        if peer in self._round and self._round[peer][0] == push_id:
            return []  # an echo of one that waits for its round
        pushed = self._decoded(payload)
        if not np.isfinite(pushed).all():
            self.rejected += 1
            return self._acknowledge(peer, push_id, 0)
        if "gather" not in self.settings:
            self._apply(pushed, samples, self.version - version, peer)
            return self._acknowledge(peer, push_id, 1)
        if version < self.version:
            self.late += 1
            return self._acknowledge(peer, push_id, 2)
        self._round[peer] = push_id, pushed * samples, samples
        return []

    def _decoded(self, payload: Any) -> np.ndarray:
        data = np.frombuffer(payload, np.uint8)
        try:
            if self.compressor is not None:
                return self.compressor.unpack(data, self.values.size, self.values.dtype)
            if data.size == self.values.nbytes:
                return data.view(self.values.dtype)
            raise ValueError(f"{data.size} bytes")
        except ValueError as error:
            raise Refused("BAD_RANGE", f"it has {error}, this server has "
                                       "{2} {0}..{1}".format(*self.slice)) from None

    def _apply(self, pushed: np.ndarray, samples: int, staleness: int, peer: int) -> None:
        self.staleness[staleness] += 1
        self.rule.apply(self.values, pushed, staleness, peer)
        self.version += 1
        self.samples += samples

    def _acknowledge(self, peer: int, push_id: int, accepted: int) -> list[Packet]:
        answer = Packet("APPLIED", peer, (push_id, self.version, accepted))
        self._acknowledged[peer, push_id >> 32] = answer
        return [answer]

    def _on_pull(self, peer: int, fields: tuple, payload: Any) -> list[Packet]:
        if self.values is not None and fields[1:] != self.slice[:2]:
            raise Refused("BAD_RANGE", "it asks for {}..{}, ".format(*fields[1:]) +
                          "this server has {2} {0}..{1}".format(*self.slice))
        clock = self._pulls[peer] = fields[0]
        self._asked.add(peer)
        if clock == FINISHED:
            self.finished.add(peer)
        elif clock != SNAPSHOT:
            self.clocks[peer] = clock
        return []

    def _answers(self) -> list[Packet]:
        """What everyone who waits may have by now: a complete round, a STATE."""
        if self.values is None:
            return []
        gone, answers = self.gone, []
        running = self.workers - gone
        if self._round and len(self._round) >= min(self.settings["gather"], len(running)):
            ranks, parts = zip(*sorted(self._round.items()))
            self._round = {}
            samples = sum(part[2] for part in parts)
            if samples:  # as in a synchronous step: the sum is the tree's, then one division
                self._apply(tree_reduce([part[1] for part in parts], np.add) / samples, samples, 0,
                            ranks[0])
            for peer, part in zip(ranks, parts):
                answers += self._acknowledge(peer, part[0], 1)
        warm = self.version >= self.settings.get("warm_start", 0) or 0 in gone
        limit = math.inf
        if "bound" in self.settings:
            limit = min([self.clocks[peer] for peer in running], default=0) + self.settings["bound"]

        def may_know(peer: int, clock: int) -> bool:
            if clock == FINISHED:
                return not running
            return clock == SNAPSHOT or (
                peer not in self._round and clock <= limit and (warm or peer == 0))

        start, stop, dtype = self.slice
        for peer, clock in [pull for pull in self._pulls.items() if may_know(*pull)]:
            del self._pulls[peer]
            vectors = [self.values.copy()]
            if clock == SNAPSHOT:
                vectors += [np.broadcast_to(getattr(self.rule, name), self.values.shape)
                            for name in self.rule.memory]
            if clock != SNAPSHOT:
                self.rule.sent(vectors[0], peer)
            answers.append(Packet("STATE", peer, (clock, self.version, start, stop, dtype),
                                  np.concatenate(vectors)))
        return answers


class Refused(Exception):
    """A server's reason not to do what a message asks: code and text."""


class DownpourWorker(Machine):
    """The worker's side of algorithm 1.

    `parameters` is the flat vector in which fetched ones arrive; `servers` says which node keeps
    which range of it. What a server does not answer is sent again, so that an update is neither
    lost nor counted twice even over a network that does both to messages."""

    def __init__(self, rank: int, parameters: np.ndarray, servers: dict[int, tuple[int, int]],
                 n_push: int = 1, n_fetch: int = 1, incarnation: int = 0) -> None:
        self.rank, self.parameters, self.servers = rank, parameters, servers
        self.n_push, self.n_fetch = n_push, n_fetch
        self.accrued = np.zeros_like(parameters)
        self.samples = 0  # whose gradients are in `accrued`
        self.clock = 0  # steps done
        self.push_id = incarnation << 32  # so that a restarted process repeats no id
        self.versions = dict.fromkeys(servers, 0)  # of the parameters we compute with
        self.staleness: collections.Counter[int] = collections.Counter()
        self.rejected = self.late = 0
        self.lost: set[int] = set()
        self.snapshot: dict[int, np.ndarray] = {}  # server: all it has, when it was asked
        self.encode: Callable = lambda pushed, start, stop: pushed[start:stop]
        self._finishing = False
        self._unanswered: dict[tuple[int, str], Packet] = {}
        self._ticks: dict[tuple[int, str], int] = {}  # that an answer has been waited for

    def waits_for(self, *kinds: str) -> bool:
        """Is a packet of such a kind unanswered?"""
        return any(kind in kinds for _, kind in self._unanswered)

    def on_start(self, rule: ServerSGD, compressor: str = "", vectors: Any = None,
                 **settings: float) -> list[Packet]:
        """Ask for the parameters; rank 0 says first what they are and how they shall change.
        `vectors`: the parameters, and behind them what the rule remembers of earlier steps."""
        vectors = [self.parameters] if vectors is None else vectors
        name = f"{rule.name}+{compressor}" if compressor else rule.name
        numbers = rule.settings | {k: float(v) for k, v in settings.items()}
        packets = [Packet("INIT", node, (self.parameters.dtype.name, start, stop, name, numbers),
                          np.concatenate([x[start:stop] for x in vectors]))
                   for node, (start, stop) in self.servers.items() if self.rank == 0]
        return self._asking(packets) + self._pull(self.clock)

    def on_step(self) -> list[Packet]:
        """A step begins: fetch when it is time. This forgets local steps whose gradients are not
        pushed yet, as the paper has it."""
        return self._pull(self.clock) if self.clock % self.n_fetch == 0 else []

    def on_gradient(self, gradient: np.ndarray, samples: int) -> list[Packet]:
        """Add it to what is accrued; push that when it is time."""
        self.accrued += gradient
        self.samples += samples
        due = self.clock % self.n_push == 0  # as in the paper: also after the very first step
        self.clock += 1
        return self._push() if due else []

    def on_snapshot(self) -> list[Packet]:
        """Ask the servers for all they have; it arrives in `snapshot`."""
        return self._pull(SNAPSHOT)

    def on_flush(self) -> list[Packet]:
        """Push what is left."""
        return self._push() if self.samples else []

    def on_finish(self) -> list[Packet]:
        """Push what is left, and when that is applied ask for what all end with."""
        self._finishing = True
        return self.on_flush() + self._last_pull()

    def on_message(self, kind: str, peer: int, fields: tuple = (),
                   payload: Any = b"") -> list[Packet]:
        if kind == "REFUSED":
            raise RuntimeError(f"rank {self.rank}: server node {peer} refused: {fields[1]} "
                               f"[{fields[0]}]")
        asked = {"APPLIED": "PUSH", "STATE": "PULL"}[kind]
        question = self._unanswered.get((peer, asked))
        if question is None or question.fields[0] != fields[0]:  # push id, or clock
            return []  # an echo
        del self._unanswered[peer, asked]
        if kind == "STATE":
            self._unanswered.pop((peer, "INIT"), None)
            clock, version, start, stop, _ = fields
            values = np.frombuffer(payload, self.parameters.dtype)
            if clock == SNAPSHOT:
                self.snapshot[peer] = values.reshape(-1, stop - start) if stop > start else values
            else:
                self.versions[peer], self.parameters[start:stop] = version, values
        elif fields[2] == 1:
            self.staleness[fields[1] - 1 - question.fields[1]] += 1
        else:
            self.late += fields[2] == 2
            self.rejected += fields[2] == 0
        return self._last_pull()

    def on_lost(self, peer: int, why: tuple = ()) -> list[Packet]:
        """That another worker is gone stops nobody, nor a server that owes us nothing."""
        self.lost.add(peer)
        owed = [kind for node, kind in self._unanswered if node == peer]
        if owed:
            raise RuntimeError(f"rank {self.rank}, step {self.clock}: server node {peer} is gone "
                               f"and has not answered {' and '.join(owed)}: "
                               f"{' '.join(map(str, why))}")
        return []

    def on_tick(self, now: float) -> list[Packet]:
        """Send again what has waited 2, 4, 8, ... ticks."""
        again = []
        for key, packet in self._unanswered.items():
            ticks = self._ticks[key] = self._ticks[key] + 1
            if ticks > 1 and ticks & (ticks - 1) == 0:
                again.append(packet)
        return again

    def _push(self) -> list[Packet]:
        if self.waits_for("PUSH"):
            raise RuntimeError("one push at a time: the last one is not acknowledged yet")
        self.push_id += 1
        pushed, self.accrued = self.accrued, np.zeros_like(self.accrued)
        samples, self.samples = self.samples, 0
        return self._asking([Packet("PUSH", node, (self.push_id, self.versions[node], start, stop,
                                                   samples, pushed.dtype.name),
                                    self.encode(pushed, start, stop))
                             for node, (start, stop) in self.servers.items()])

    def _pull(self, clock: int) -> list[Packet]:
        return self._asking([Packet("PULL", node, (clock, start, stop))
                             for node, (start, stop) in self.servers.items()])

    def _last_pull(self) -> list[Packet]:
        if not self._finishing or self.waits_for("PUSH"):
            return []
        self._finishing = False
        return self._pull(FINISHED)

    def _asking(self, packets: list[Packet]) -> list[Packet]:
        for packet in packets:
            self._unanswered[packet.peer, packet.kind] = packet
            self._ticks[packet.peer, packet.kind] = 0
        return packets


class Downpour(Strategy):
    """Asynchronous training with parameter servers (algorithm 1 of DistBelief).

    `optimizer` makes the worker's own steps between fetches. What a push does to the shared
    parameters is the servers' `rule`: ServerSGD (the default, with the optimizer's lr) or
    ServerAdagrad, for which the paper advises a rate ten times as large. Schedules work: pushed
    gradients are scaled as the optimizer's lr has changed since the start. With `warm_start=n`
    rank 0 trains alone until the servers have applied n pushes. `staleness_aware` divides the
    step of a push by how many versions old its parameters were.

    Each push is a step of its own: n workers go up to n times the learning rate, on parameters
    some versions old; `staleness` counts how many. Buffers stay each worker's own. A worker that
    is lost stops nobody; a lost server ends training."""

    name, lockstep, adds_up = "downpour", False, True
    elastic = False  # shall fetched parameters arrive in `fetched`, instead of in the model?

    def __init__(self, model: Any, optimizer: Any, n_push: int = 1, n_fetch: int = 1,
                 rule: ServerSGD | None = None, warm_start: int = 0,
                 staleness_aware: bool = False, group: ProcessGroup | None = None,
                 compress: Any = None) -> None:
        super().__init__(model, optimizer, group, compress)
        if n_push < 1 or n_fetch < 1:
            raise ValueError(f"n_push={n_push}, n_fetch={n_fetch}: both count steps, from 1")
        rates = sorted({float(g["lr"]) for g in optimizer.param_groups})
        if rule is None and len(rates) > 1:
            raise ValueError(f"the optimizer has learning rates {rates}: say which rule the "
                             "servers follow, for example rule=ServerSGD(lr=0.1)")
        if rule is not None and staleness_aware:
            raise ValueError("staleness_aware is the rule's business: give it to the rule, for "
                             "example rule=ServerSGD(lr=0.1, staleness_aware=True)")
        if not rates[0]:
            raise ValueError("the optimizer's lr is 0 at the start: pushes are scaled as it changes"
                             ", so begin with the full rate, and warm up after this")
        self.rule = rule or ServerSGD(rates[0], staleness_aware)
        self._rate = float(optimizer.param_groups[0]["lr"])
        self.weights = self.in_one_vector()
        self._gradient = self.weights.like()
        self.fetched = self.weights.data.copy() if self.elastic else self.weights.data
        transport, workers = self.group.transport, self.group.size
        if transport is not None and transport.size == workers:
            raise RuntimeError(f"rank {self.group.rank}: {type(self).__name__} needs parameter "
                               "servers: launch with --servers 1 or more")
        self._wire = InProcess() if transport is None else transports().Wire(transport)
        nodes = range(workers, self._wire.size)
        slices = {node: share_of(len(self.fetched), i, len(nodes)) for i, node in enumerate(nodes)}
        self._worker = DownpourWorker(self.group.rank, self.fetched, slices, n_push, n_fetch,
                                      getattr(transport, "incarnation", 0))
        if self.compressor is not None:
            self._worker.encode = lambda pushed, start, stop: self.compressor.pack(
                self.weights.cut(start, stop, pushed))
        self.staleness = self._worker.staleness  # pushes that met parameters so much newer
        self.warm_start = warm_start
        self._vectors: Any = None  # of the servers, before they start and when they are gone
        self._ended = False

    def settings(self) -> dict[str, float]:
        """What the servers are told, besides their rule's own."""
        return {"warm_start": self.warm_start}

    def _go_on(self) -> None:  # at the first loop or step, as a checkpoint may come until then
        if not self._begun:
            super()._go_on()
            if self.elastic:
                self.fetched[:] = self.weights.data  # the model may have been loaded since
            self._wire.send(self._worker.on_start(
                self.rule, "" if self.compressor is None else self.compressor.name, self._vectors,
                **self.settings()))
            here = self.weights.data.copy()
            self._until_answered("PULL")
            if self._vectors is not None:
                self.weights.data[:] = here  # it may be some steps ahead of the last fetch

    @property
    def rejected(self) -> int:
        """How many pushes of this worker were not applied because they were not finite."""
        return self._worker.rejected

    @property
    def lost(self) -> set[int]:
        """The nodes that are gone."""
        return self._worker.lost

    def gradient(self) -> np.ndarray:
        """This step's gradient as one vector, scaled as the optimizer's lr has changed."""
        scale = self.optimizer.param_groups[0]["lr"] / self._rate
        for x, view in zip(self._gradient.tensors, self._gradient.views):
            if x.grad is None or not self.samples:  # the mean of nothing is NaN
                view[...] = 0
            else:
                np.multiply(x.grad._array, scale, out=view)
        return self._gradient.data

    def push(self, vector: np.ndarray) -> None:
        """Add to what is accrued, and send that to the servers every n_push calls. One push at
        most is under way, while the next is computed."""
        self._go_on()
        self._until_answered("PUSH")
        self._wire.send(self._worker.on_gradient(vector, self.samples))

    def fetch(self) -> None:
        """The servers' parameters, every n_fetch pushes."""
        self._go_on()
        self._wire.send(self._worker.on_step())
        self._until_answered("PULL")

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._go_on()

    def step(self) -> None:
        self.push(self.gradient())
        if self.samples:
            self.optimizer.step()
        self.fetch()  # for the next step: forward needs its parameters
        self.steps += 1

    def finish(self) -> None:
        """Push what is left and end, together with all other workers, on the same parameters."""
        if self._ended:
            return
        self._go_on()
        self._until_answered("PUSH")
        self._wire.send(self._worker.on_flush())
        self._until_answered("PUSH")
        if self.group.rank == 0:
            self._vectors = self._snapshot()
        self._wire.send(self._worker.on_finish())
        self._until_answered("PULL")
        self._ended = True

    def _until_answered(self, *kinds: str) -> None:
        drive(self._worker, self._wire, lambda: not self._worker.waits_for(*kinds),
              f"{' and '.join(kinds)} of step {self.steps}")
        self.weights.changed("a fetch from the parameter servers")

    def own_state(self) -> dict[str, Any]:
        """With the servers' vectors, and what this worker has not pushed yet."""
        worker, vectors = self._worker, self._vectors
        if self._begun and not self._ended:
            vectors = self._snapshot()
        elif self._ended and vectors is not None:
            vectors = [self.fetched, *vectors[1:]]
        return super().own_state() | {"servers": vectors, "accrued": worker.accrued,
                                      "clock": worker.clock, "samples": worker.samples}

    def load_own_state(self, own: dict[str, Any]) -> None:
        """Rank 0 will tell the servers. What the others had accrued is lost."""
        if pushes := self._worker.push_id % 2**32:
            raise RuntimeError("a state is loaded before the first step: the servers have been "
                               f"changed by {pushes} pushes already")
        super().load_own_state(own)
        self._worker.clock, self.warm_start = own["clock"], 0
        if self.group.rank == 0:
            self._vectors = own["servers"] and [to_array(x).copy() for x in own["servers"]]
            self._worker.accrued[:] = to_array(own["accrued"])
            self._worker.samples = own["samples"]

    def _snapshot(self) -> list[np.ndarray]:
        """The servers' parameters, and what their rule remembers."""
        self._until_answered("PUSH")
        self._wire.send(self._worker.on_snapshot())
        self._until_answered("PULL")
        slices = [self._worker.snapshot[node] for node, (start, stop)
                  in self._worker.servers.items() if start < stop]
        return list(np.concatenate(slices, axis=1))


class StaleSynchronous(Downpour):
    """Bounded staleness (Ho et al. 2013): a worker may be at most `bound` steps ahead of the
    slowest. It waits if it would be more; so it computes on parameters that hold all updates up to
    bound + 1 steps ago, and its own. A step of all workers together is one on the mean over the
    whole batch: each push counts by its share of the samples.

    bound=0 is synchronous: servers gather the gradients of all workers, and their mean is one step,
    with the bits of Synchronous. `backup=b` then takes the first N of N + b gradients and drops
    those that come too late (Chen et al. 2016), so that stragglers are not waited for."""

    name, adds_up = "ssp", False

    def __init__(self, model: Any, optimizer: Any, bound: int = 3, backup: int = 0,
                 rule: ServerSGD | None = None, group: ProcessGroup | None = None,
                 compress: Any = None) -> None:
        self.bound, self.backup = bound, backup
        if bound < 0 or backup < 0 or (bound and backup):
            raise ValueError(f"bound={bound}, backup={backup}: both count from 0, and backup needs "
                             "bound=0")
        super().__init__(model, optimizer, rule=rule, group=group, compress=compress)
        if backup >= self.group.size:
            raise ValueError(f"backup={backup}: of {self.group.size} workers at least one must "
                             "count")

    def settings(self) -> dict[str, float]:
        return {"bound": self.bound} if self.bound else {"gather": self.group.size - self.backup}

    def gradient(self) -> np.ndarray:
        gradient = super().gradient()
        if self.bound:
            gradient *= self.samples / self.batch
        return gradient


class InProcess:
    """For a worker that is alone: its parameter server is an object of the same process."""

    size = 2

    def __init__(self) -> None:
        self.server, self.inbox = ParameterServer(1), collections.deque[Packet]()

    def send(self, packets: list[Packet]) -> None:
        for kind, _, fields, payload in packets:
            self.inbox.extend(self.server.on_message(kind, 0, fields, payload))

    def recv(self, timeout: float, doing: str) -> Packet:
        return self.inbox.popleft()._replace(peer=1)


def serve(transport: Any = None, server: Any = None) -> None:
    """Be a parameter server, by default the one that the environment tells this process to be;
    returns when all workers have finished or are lost."""
    if transport is None:
        transport, config = transports().join()
        server = ParameterServer(config.workers)
    drive(server, transports().Wire(transport), lambda: server.done, "serving")
    transport.close()


DISTRIBUTED = {name: on_default_group(getattr(ProcessGroup, name)) for name in (
    "get_rank", "get_world_size", "all_reduce", "broadcast", "all_gather", "reduce_scatter",
    "all_to_all", "barrier", "send", "recv")}  # with those below: minidist.distributed
DISTRIBUTED |= {x.__name__: x for x in (
    ReduceOp, ProcessGroup, init_process_group, is_initialized, destroy_process_group, Strategy,
    Synchronous, LocalSGD, DiLoCo, Gossip, Downpour, StaleSynchronous, ServerSGD, ServerAdagrad,
    Compressor, FP16, BF16, NoiseScale, AdaptiveBatch, critical_batch)}


# =================================================================================================
# 8 Namespaces
# =================================================================================================
#
# `import minidist.nn as nn` works from one file: each namespace is a module made of names above.


def namespace(path: str, names: dict[str, Any]) -> ModuleType:
    """A module of these names, importable as minidist.<path>."""
    full = f"minidist.{path}"
    module = ModuleType(full, f"PyTorch's torch.{path}, as far as minidist has it.")

    def absent(name: str) -> Any:
        raise AttributeError(missing(full, name, vars(module)))

    # A package by its __path__: it may have namespaces inside.
    vars(module).update(names, __path__=[], __getattr__=absent)
    sys.modules[full] = module
    parent, _, name = path.rpartition(".")
    if parent:
        setattr(sys.modules[f"minidist.{parent}"], name, module)
    return module


def missing(owner: str, name: str, names: Iterable[str]) -> str:
    """What to say of a name that is not there: where it is, which one may have been meant, or
    all that there are."""
    import difflib

    if name.startswith("_"):  # asked for by tools, not people
        return f"{owner} has no {name!r}"
    known = {n.lower(): n for n in sorted(names) if not n.startswith("_")}
    places = [m for m, module in sys.modules.items()
              if m.startswith("minidist.") and vars(module).get(name) is not None]
    near = difflib.get_close_matches(name.lower(), known, 1, 0.67)
    hints = ([NEAREST[name]] if name in NEAREST else [f"it is in {places[0]}"] if places else
             [f"the nearest is {known[lower]!r}" for lower in near] +
             [f"NumPy has np.{name}, and x.numpy() is a tensor's array"] * hasattr(np, name))
    if not hints and len(known) <= 12:
        hints = [f"there are {', '.join(known.values())}"]
    hint = f": {'; '.join(hints)}" if hints else ""
    return f"{owner} has no {name!r} (of PyTorch, it holds a chosen part){hint}"


# What spelling does not tell.
NEAREST = {
    "amp": "all is computed in float32, or in the dtype that the model was cast to",
    "autocast": "all is computed in float32, or in the dtype that the model was cast to",
    "bfloat16": "float16 and float32 are there; files with bfloat16 are read as float32",
    "compile": "there is nothing to compile: call the model itself",
    "jit": "there is nothing to compile: call the model itself",
    "matrix_norm": "norm gives the Frobenius norm",
    "complex64": "complex numbers are not there", "complex128": "complex numbers are not there",
    "DataParallel": "nn.parallel.DistributedDataParallel is, and distributed.Synchronous",
    "multiprocessing": "minidist.launch starts processes, `minidist launch` scripts",
    "onnx": "save writes safetensors, which PyTorch reads",
    "swapaxes": "transpose exchanges two dimensions", "movedim": "permute orders dimensions",
    "tensorboard": "`minidist train --plot` draws the curve",
    "use_deterministic_algorithms": "results are deterministic already",
    "profiler": "cProfile shows where the time goes",
    "vmap": "operations take batches in their leading dimensions",
}


def classes(*bases: type) -> dict[str, Any]:
    return {n: v for n, v in globals().items()
            if isinstance(v, type) and issubclass(v, bases) and not n.startswith("_")}


def pick(names: str) -> dict[str, Any]:
    return {name: globals()[name] if name in globals() else METHODS[name] for name in names.split()}


nn = namespace("nn", classes(Module) | {"Parameter": Parameter, "Buffer": Buffer})
namespace("nn.functional", pick(
    "relu relu6 leaky_relu prelu elu selu gelu silu mish softplus softsign logsigmoid hardtanh glu "
    "tanh sigmoid softmax log_softmax linear conv1d conv2d conv_transpose1d conv_transpose2d "
    "max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "batch_norm layer_norm group_norm instance_norm rms_norm dropout dropout2d embedding one_hot "
    "pad interpolate unfold pixel_shuffle normalize cosine_similarity pairwise_distance "
    "scaled_dot_product_attention mse_loss l1_loss smooth_l1_loss huber_loss nll_loss "
    "cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "triplet_margin_loss"))
namespace("nn.init", pick(
    "calculate_gain uniform_ normal_ constant_ zeros_ ones_ eye_ orthogonal_ trunc_normal_ "
    "xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_"))
namespace("nn.utils", pick(
    "clip_grad_norm_ clip_grad_value_ parameters_to_vector vector_to_parameters"))
namespace("nn.parameter", {"Parameter": Parameter})
optim = namespace("optim", classes(Optimizer))
namespace("optim.lr_scheduler", classes(LRScheduler, SequentialLR, ReduceLROnPlateau))
utils = namespace("utils", {})
namespace("utils.data", classes(Dataset, Sampler, DataLoader)
          | pick("random_split default_collate"))
namespace("utils.data.distributed", pick("DistributedSampler"))
namespace("utils.checkpoint", pick("checkpoint"))
autograd = namespace("autograd", pick(
    "grad queue_callback Function gradcheck gradgradcheck detect_anomaly no_grad "
    "enable_grad set_grad_enabled inference_mode"))
namespace("autograd.functional", pick("jacobian hvp"))
distributions = namespace("distributions", pick("Categorical Normal"))
# Programs ask what there is besides the CPU; here that is nothing.
nothing: dict[str, Any] = {
    "is_available": lambda: False, "device_count": lambda: 0, "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None, "empty_cache": lambda: None, "synchronize": lambda: None}
cuda, accelerator, backends = (namespace(name, dict(nothing)) for name in
                               ("cuda", "accelerator", "backends"))
namespace("backends.mps", dict(nothing))
namespace("backends.cudnn", {"deterministic": False, "benchmark": False, "enabled": False})
linalg = namespace("linalg", {"vector_norm": lambda x, ord=2, dim=None, keepdim=False:
                              norm(x, ord, dim, keepdim)})
distributed = namespace("distributed", DISTRIBUTED)
namespace("nn.parallel", pick("DistributedDataParallel"))


# -- the package itself ----------------------------------------------------------------------------


def typed(dtype: np.dtype) -> Callable[..., Tensor]:
    """PyTorch's old constructors: LongTensor([1, 2]) holds these, LongTensor(2, 3) zeros."""
    return lambda *data: (zeros(*data, dtype=dtype) if all(isinstance(n, int) for n in data) else
                          tensor(*data, dtype=dtype))


def tune() -> bool:
    """Speed up this whole process; our command line and launcher call it, importing does not.

    glibc gives freed blocks of more than a few hundred kilobytes back to the kernel and gets them
    again, page by page, a moment later: for chains of large arrays five times the cost of the
    arithmetic. From here on it keeps them. True where that worked (Linux with glibc)."""
    import ctypes

    trim_threshold, mmap_max, arena_max = -1, -4, -8  # mallopt's names for them, malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(option, value) for option, value in
                   ((mmap_max, 0), (trim_threshold, 2**31 - 1), (arena_max, 1)))
    except (OSError, AttributeError, TypeError):
        return False


@functools.cache
def openblas(action: str) -> Callable | None:
    """OpenBLAS's functions to "get" or "set" its number of threads, where NumPy brought it."""
    import ctypes

    numpy = pathlib.Path(np.__file__).parent
    for path in (*numpy.with_name("numpy.libs").glob("*openblas*"),
                 *(numpy / ".dylibs").glob("*openblas*")):
        library = ctypes.CDLL(str(path))  # NumPy has loaded it: this finds the same one
        for name in (f"{prefix}openblas_{action}_num_threads{suffix}"
                     for prefix in ("scipy_", "") for suffix in ("64_", "")):
            if hasattr(library, name):
                return getattr(library, name)
    return None


def set_num_threads(threads: int) -> None:
    """How many threads a matrix product uses: those of BLAS. All else uses one."""
    change = openblas("set")
    if threads < 1:
        raise ValueError(f"set_num_threads needs a number from 1, not {threads}")
    if change is None:
        raise RuntimeError("the threads of this NumPy's BLAS cannot be changed while it runs: set "
                           "OPENBLAS_NUM_THREADS, MKL_NUM_THREADS or VECLIB_MAXIMUM_THREADS "
                           "before Python starts")
    change(int(threads))

def get_num_threads() -> int:
    """The threads of BLAS; the number of cores, where it cannot be asked."""
    ask = openblas("get")
    return os.cpu_count() or 1 if ask is None else ask()


# What is meant for users, by name. Some would hide Python's own in this file (sum, float ...):
# these are found here only, through __getattr__.
PUBLIC: dict[str, Any] = METHODS | pick(
    "Tensor Size Generator device tensor as_tensor from_numpy zeros ones empty full eye arange "
    "linspace zeros_like ones_like empty_like full_like rand randn randint randperm normal "
    "rand_like randn_like randint_like manual_seed get_rng_state set_rng_state cat concat stack "
    "hstack vstack meshgrid einsum where relu dropout result_type no_grad enable_grad "
    "inference_mode set_grad_enabled is_grad_enabled set_default_dtype get_default_dtype float16 "
    "float32 float64 int8 int16 int32 int64 uint8 half double short long channels_last save load "
    "set_num_threads get_num_threads nn optim utils autograd distributions cuda accelerator "
    "backends linalg distributed tune load_dataset Synchronous Downpour")
PUBLIC |= {"float": float32, "int": int32, "bool": np.dtype(bool), "dtype": np.dtype,
           "pi": math.pi, "inf": math.inf, "nan": math.nan, "finfo": np.finfo, "iinfo": np.iinfo,
           "is_tensor": lambda x: isinstance(x, Tensor)}
PUBLIC |= {f"{name}Tensor": typed(np.dtype(code)) for name, code in zip(
    "Float Double Half Byte Char Short Int Long Bool".split(), "f4 f8 f2 u1 i1 i2 i4 i8 ?".split())}
__all__ = ["launch", *(name for name in PUBLIC if not hasattr(builtins, name))]


def __dir__() -> list[str]:
    return sorted({*PUBLIC, *__all__})

def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return PUBLIC[name]
    raise AttributeError(missing("minidist", name, PUBLIC))


# =================================================================================================
# 9 Command line
# =================================================================================================
#
# `minidist train` is an example as much as a tool: it uses only what stands above. When it needs
# more than one process, it has transports/launch.py start it once more in each.


def mlp(shape: Sequence[int]) -> Module:
    return Sequential(Flatten(), Linear(math.prod(shape), 256), ReLU(), Linear(256, 128), ReLU(),
                      Linear(128, 10))


def lenet(shape: Sequence[int]) -> Module:
    """LeNet for images (channels, height, width); (1, 28, 28) in the original. Smaller ones get
    kernels of 3x3 with a border, so that something is left of them."""
    channels, *sides = shape
    kernel, border = (5, 0) if min(sides) >= 28 else (3, 1)
    for _ in range(2):
        sides = [(side + 2 * border - kernel + 1) // 2 for side in sides]
    return Sequential(
        Conv2d(channels, 20, kernel, padding=border), MaxPool2d(2), Tanh(),
        Conv2d(20, 50, kernel, padding=border), MaxPool2d(2), Tanh(),
        Flatten(), Linear(50 * math.prod(sides), 500), ReLU(), Linear(500, 10),
    )


MODELS: dict[str, Callable] = {"mlp": mlp, "lenet": lenet}
OPTIMIZERS: dict[str, tuple[type[Optimizer], float]] = {  # with learning rates to begin from
    "sgd": (SGD, 0.3), "adam": (Adam, 1e-3), "adamw": (AdamW, 1e-3), "adagrad": (Adagrad, 1e-2),
}


def distorted(images: np.ndarray, amounts: np.ndarray) -> Tensor:
    """Each image turned, stretched and moved a little, by its own five amounts from -1 to 1: what
    another hand might have written."""
    n, _, height, width = images.shape
    limits = np.array([math.radians(10), 0.1, 0.1, height / 16, width / 16])
    turn, tall, wide, down, right = (amounts * limits).T[:, :, None, None]
    y, x = np.mgrid[:height, :width] - np.array([height - 1, width - 1])[:, None, None] / 2
    # Where in the old image does each pixel of the new one come from? Between four pixels, most
    # often; each counts the more, the nearer it is. Outside there is paper.
    rows = (1 + tall) * (y * np.cos(turn) - x * np.sin(turn)) + (height - 1) / 2 + down
    columns = (1 + wide) * (y * np.sin(turn) + x * np.cos(turn)) + (width - 1) / 2 + right
    paper = np.pad(images.transpose(0, 2, 3, 1), [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge")
    result: Any = 0
    for r in np.floor(rows) + 1, np.floor(rows) + 2:
        for c in np.floor(columns) + 1, np.floor(columns) + 2:
            weight = (1 - abs(rows + 1 - r)) * (1 - abs(columns + 1 - c))
            place = (np.clip(r, 0, height + 1).astype(int), np.clip(c, 0, width + 1).astype(int))
            result += weight[..., None] * paper[(np.arange(n)[:, None, None], *place)]
    return wrap(result.transpose(0, 3, 1, 2).astype(images.dtype))


def correct(model: Module, data: TensorDataset) -> int:
    """How many of the samples the model gets right."""
    model.eval()
    with no_grad():
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, 256))


def train(flags: argparse.Namespace) -> None:
    """What every worker runs, and the whole program if there is one worker."""
    init_process_group()
    manual_seed(flags.seed)
    data, test = load_dataset(flags.data, flags.data_dir)
    images, labels = data.tensors
    # A sample brings its number along, by which it finds its distortion: the same one however
    # many workers share the work.
    data = TensorDataset(images, labels, arange(len(labels)))
    loader = DataLoader(data, flags.batch_size, shuffle=True)
    model = MODELS[flags.model](images.shape[1:])
    optimizer = OPTIMIZERS[flags.optimizer][0](model.parameters(), **flags.options)
    if flags.compress:
        flags.strategy_options["compress"] = flags.compress
    if flags.noise_scale:
        flags.strategy_options["noise_scale"] = noise = NoiseScale()
    if issubclass(flags.kind, Downpour) and not flags.kind.elastic and flags.optimizer != "sgd":
        flags.strategy_options["rule"] = named(ServerSGD)[flags.optimizer](flags.options["lr"])
    try:
        strategy = flags.kind(model, optimizer, **flags.strategy_options)
    except ValueError as error:
        raise SystemExit(f"minidist train: error: --strategy {flags.strategy}: {error}") from None
    curve: list = []
    strategy.checkpoint(flags.save, resume=flags.resume, curve=curve,
                        kind=[flags.model, flags.data])
    rank, size = strategy.group.get_rank(), strategy.group.get_world_size()

    # A test set cut in shares is looked at once, by all together, if they are together.
    share = share_of(len(test), rank, size) if strategy.lockstep else (0, len(test))
    mine = TensorDataset(*test[slice(*share)])
    total, samples, seconds = flags.epochs * len(loader), 0, 0.0
    clock = strategy.group.transport.clock if size > 1 else time.perf_counter
    with Progress(total, f"{flags.model} on {flags.data}", "steps") \
            if rank == 0 else contextlib.nullcontext() as bar:
        for epoch in strategy.epochs(flags.epochs):
            start, losses = clock(), []
            model.train()
            amounts = np.random.default_rng([flags.seed, epoch]).uniform(-1, 1, (len(data), 5))
            for x, y, number in strategy.batches(loader):
                # The rate falls from its full height to 0 along a cosine.
                rate = 0.5 * (1 + math.cos(math.pi * strategy.steps / total))
                x = distorted(x.numpy(), amounts[number.numpy()])
                # Smoothed labels keep it from certainty: with few images a third fewer mistakes.
                loss = cross_entropy(model(x), y, label_smoothing=0.1)
                strategy.zero_grad()
                loss.backward()
                optimizer.param_groups[0]["lr"] = flags.options["lr"] * rate
                strategy.step()
                losses.append(loss.item())
                samples += strategy.batch
                if size == 1 and not math.isfinite(losses[-1]):  # of many, the strategy says so
                    raise FloatingPointError(f"epoch {epoch + 1}: the loss is {losses[-1]}: "
                                             "a smaller --lr may help")
                if bar:
                    bar.advance(strategy.steps - bar.done,
                                f"epoch {epoch + 1}, loss {losses[-1]:.3f}")
            if epoch == flags.epochs - 1:
                strategy.finish()
            seconds += clock() - start
            if strategy.lockstep or strategy.leads:
                # The loss is the mean over what this process has seen of the epoch.
                numbers = [np.nansum(losses), np.isfinite(losses).sum(), correct(model, mine)]
                loss, count, right = strategy.total(*numbers) if strategy.lockstep else numbers
                curve.append([float(loss / count) if count else math.nan, right / len(test)])
                if flags.noise_scale:
                    curve[-1].append(noise.value)
    counts = np.zeros((size, 5), np.int64)
    if strategy.compressor is not None:
        counts[rank, 3:] = strategy.compressor.before, strategy.compressor.after
    if size > 1:
        stats = strategy.group.transport.stats
        counts[rank, :3] = [stats[n] for n in ("bytes_sent", "bytes_received", "retransmissions")]
        with contextlib.nullcontext() if strategy.lockstep else \
                contextlib.suppress(transports().PeerLost):  # then each knows its own
            strategy.group.all_reduce(counts)
    if strategy.leads:
        report(flags, curve, len(test), samples, seconds, counts)
    destroy_process_group()


def report(flags: argparse.Namespace, curve: list, tests: int, samples: int, seconds: float,
           counts: np.ndarray) -> None:
    right = round(curve[-1][1] * tests)
    print(f"test accuracy {right / tests:.2%} ({right} of {tests})")
    if flags.noise_scale:
        first, *_, last = [noise for _, _, noise in curve] * 2
        print(f"gradient noise scale {first:,.0f} after epoch 1, {last:,.0f} at the end (about "
              f"where larger batches stop helping; here they have {flags.batch_size})")
    print(f"{samples / (seconds or 1):,.0f} samples/s, {seconds:.1f} s of training")
    told = flags.transport != "sim"  # which ends with a report of its own
    for rank, (sent, received, again, before, after) in enumerate(counts if told else ()):
        if sent:
            print(f"rank {rank}: {sent / 1e6:,.1f} MB sent, {received / 1e6:,.1f} MB received, "
                  f"{again:,} retransmissions")
        if before:
            print(f"rank {rank}: {flags.compress} made {before / 1e6:,.1f} MB of tensors "
                  f"{after / 1e6:,.1f} MB")
    if flags.save:
        print(f"model saved to {flags.save}")
    if flags.plot:
        from matplotlib.figure import Figure  # not pyplot: no window, no display needed

        figure = Figure(figsize=(7, 4), layout="constrained")
        left = figure.subplots()
        right_axis = left.twinx()
        epochs, (losses, shares, *noise) = range(1, len(curve) + 1), zip(*curve)
        left.plot(epochs, losses, color="tab:blue", label="training loss")
        for scales in noise:
            left.plot(epochs, scales, color="tab:green", label="gradient noise scale (samples)")
        right_axis.plot(epochs, [100 * share for share in shares], color="tab:orange")
        left.set(xlabel="epoch", yscale="log")
        left.legend()
        right_axis.set_ylabel("right on the test images (%)", color="tab:orange")
        left.set_title(f"{flags.model} on {flags.data}, {flags.strategy}, "
                       f"{len(counts)} worker{'s'[:len(counts) > 1]}")
        figure.savefig(flags.plot)
        print(f"curve drawn to {flags.plot}")


PICTURES = (".png", ".svg", ".pdf", ".jpg")


def prepared(flags: argparse.Namespace, workers: int) -> None:
    """Completes the flags. Whatever can be wrong with them is found here, before work begins."""
    for name, number, least in (
            ("workers", workers, 1), ("epochs", flags.epochs, 1), ("seed", flags.seed, 0),
            ("lr", flags.lr or 0.0, 0), ("momentum", flags.momentum, 0),
            ("weight-decay", flags.weight_decay, 0)):
        if not least <= number < math.inf:
            raise ValueError(f"--{name} is {number}: it must be at least {least}")
    if workers > flags.batch_size:
        raise ValueError(f"--batch-size {flags.batch_size} is that of all {workers} workers "
                         "together: each needs one sample at least")
    if flags.data is None:
        try:
            load_dataset("digits", flags.data_dir)
            flags.data = "digits"
        except ModuleNotFoundError as error:
            print(f"no handwritten digits here, so the segments of a pocket calculator are "
                  f"learned. For the digits: {error}", file=sys.stderr)
            flags.data = "segments"
    load_dataset(flags.data, flags.data_dir)  # downloads it, if need be
    rate = OPTIMIZERS[flags.optimizer][1]
    if flags.kind.adds_up:
        rate /= workers
    flags.strategy_options = {name: getattr(flags, name) for name in words_of(flags.kind)}
    flags.options = {"lr": rate if flags.lr is None else flags.lr,
                     "weight_decay": flags.weight_decay}
    if flags.momentum:
        if flags.optimizer != "sgd":
            raise ValueError(f"--momentum belongs to --optimizer sgd, not {flags.optimizer}")
        flags.options["momentum"] = flags.momentum
    served = issubclass(flags.kind, Downpour)
    rules = ["sgd", "adagrad"] if "rule" in inspect.signature(flags.kind).parameters else ["sgd"]
    if served and not flags.kind.elastic and (
            flags.optimizer not in rules or flags.momentum or flags.weight_decay):
        raise ValueError(f"with --strategy {flags.strategy} servers change the parameters; they "
                         f"know --optimizer {' and '.join(rules)}, without momentum and decay")
    if flags.servers and not served:
        raise ValueError("--servers belong to --strategy downpour, ssp and others of their kind, "
                         f"not to {flags.strategy}")
    if flags.compress:
        plugin(flags.compress, Compressor)
    for option in "compress", "noise_scale":
        if getattr(flags, option) and option not in inspect.signature(flags.kind).parameters:
            raise ValueError(f"--strategy {flags.strategy} knows no --{option.replace('_', '-')}")
    if flags.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    if flags.plot and pathlib.Path(flags.plot).suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {flags.plot}: a picture's name ends in {', '.join(PICTURES)}")
    for path in filter(None, (flags.save, flags.plot)):
        if not pathlib.Path(path).absolute().parent.is_dir():
            raise ValueError(f"there is no folder to write {path} to")
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"cannot write {path}: it is a folder or a device, not a file")
        if not os.access(pathlib.Path(path).absolute().parent, os.W_OK):
            raise ValueError(f"cannot write {path}: its folder is read-only")
    if flags.resume:
        state = load(flags.resume)
        if not isinstance(state, dict) or not {"kind", "run"} <= state.keys():
            raise ValueError(f"{flags.resume} was not written by `minidist train --save`")
        if state["kind"] != [flags.model, flags.data]:
            model, data = state["kind"]
            raise ValueError(f"{flags.resume} holds {model} on {data}: give --model {model} "
                             f"--data {data}")
        if (done := state["run"]["epoch"]) >= flags.epochs:
            raise ValueError(f"{flags.resume} has {done} epochs behind it; --epochs "
                             f"{flags.epochs} counts these too, so nothing is left to do")


EXAMPLES = """examples:
  minidist train --workers 2 --transport tcp --save lenet.safetensors --plot curve.png
  minidist train --data fashion-mnist --epochs 3 --workers 2 --transport udp
  minidist train --workers 3 --strategy downpour --servers 2
  minidist train --workers 4 --strategy local --sync-every 16 --compress bf16
  minidist train --strategy gossip --help
  minidist launch --nproc-per-node 4 train.py --lr 0.1

Without installation: python minidist.py train. Each command answers --help."""


def words_of(kind: Any) -> dict[str, Any]:
    """The options of a strategy that have a number or a word as default."""
    return {name: x.default for name, x in inspect.signature(kind).parameters.items()
            if isinstance(x.default, (bool, int, float, str))}


def least_and_most(text: str) -> tuple[int, int]:
    """Of "4" or "2:4"."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def arguments(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command line; `argv` says of which strategy it shall know the options."""
    parser = argparse.ArgumentParser(
        "minidist", description=str(__doc__).splitlines()[0], epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"minidist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    training = commands.add_parser(
        "train", help="train a small network on pictures, on one process or many",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = training.add_argument
    add("--model", choices=MODELS, default="lenet", help="the network (%(default)s)")
    add("--data", metavar="NAME",
        help="digits, mnist, fashion-mnist, cifar10 or segments (digits, where they are)")
    add("--data-dir", metavar="DIR", help="where the data set's files are; else they are searched "
        "in $MINIDIST_DATA, /usr/share/datasets and your cache, and downloaded")
    add("--workers", type=least_and_most, default=(1, 1), metavar="N",
        help="processes that share each batch; MIN:MAX begins with MAX and goes on with fewer when "
        "some are lost (1)")
    add("--max-restarts", type=int, default=0, metavar="N",
        help="so many lost workers are replaced (%(default)s)")
    add("--transport", metavar="NAME", help="how they are joined: pipe, shm (shared memory), tcp, "
        "udp, or tls, whose files MINIDIST_TLS_CERT, MINIDIST_TLS_KEY and MINIDIST_TLS_CA name; or "
        "sim, simulated in this process (tcp)")
    add("--cluster", metavar="FILE", help="what sim assumes: speeds, links, failures (TOML, "
        "described in transports/cluster.py)")
    add("--assume", action="append", default=[], metavar="NAME=VALUE", help="one setting of "
        "such a file, as link.latency=0.01 or compute.noise=0.5 or seed=1; may be repeated")
    add("--strategy", metavar="NAME", default="sync", help="how they work together: "
        f"{', '.join(named(Strategy))}; one of tutorials/strategies/; or my.py:Mine, a class of "
        "your own (%(default)s). With --help, explains it and its options")
    add("--servers", type=int, metavar="K", help="parameter servers of downpour, ssp and their "
        "like (1)")
    add("--compress", metavar="NAME", help="send fewer bytes: fp16, bf16, one of "
        "tutorials/strategies/, or my.py:Mine")
    add("--epochs", type=int, default=60, metavar="N",
        help="passes over the training images (%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N",
        help="images in a step of all workers together (%(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="the rule of a step (%(default)s)")
    add("--lr", type=float, metavar="X", help="learning rate at the start; it falls to 0 (" +
        ", ".join(f"{rate} for {name}" for name, (_, rate) in OPTIMIZERS.items()) +
        "; shared among the workers where their steps add up, as in downpour)")
    add("--momentum", type=float, default=0.0, metavar="X", help="of sgd (%(default)s)")
    add("--weight-decay", type=float, default=0.0, metavar="X",
        help="how much weights shrink by themselves (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same run (%(default)s)")
    add("--save", metavar="PATH", help="keep the run here, as safetensors, after each epoch and "
        "on SIGTERM, which then ends it after the same step on all workers")
    add("--resume", metavar="PATH", help="go on from what --save kept, to the same bits")
    add("--noise-scale", action="store_true", help="measure the gradient noise scale, of sync with "
        "two workers or more (or --accumulate 2), print and plot it")
    add("--plot", metavar="PATH", help="draw the learning curve to this picture")
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument("--strategy", default="sync")
    kind = plugin(chosen.parse_known_args(argv)[0].strategy, Strategy)
    training.set_defaults(kind=kind)
    group = training.add_argument_group(f"the strategy {kind.name or kind.__name__}",
                                        inspect.getdoc(kind))
    forms: dict[Any, dict[str, Any]] = {
        bool: {"action": argparse.BooleanOptionalAction}, int: {"type": int, "metavar": "N"},
        float: {"type": float, "metavar": "X"}, str: {"metavar": "NAME"}}
    for name, default in words_of(kind).items():
        group.add_argument("--" + name.replace("_", "-"), default=default, help=f"({default})",
                           **forms[type(default)])
    commands.add_parser("launch", help="run your own script on many processes", add_help=False)
    data = commands.add_parser("data", help="list data sets, or fetch and describe some")
    data.add_argument("names", nargs="*", metavar="NAME", help="fetch and describe these")
    data.add_argument("--data-dir", metavar="DIR", help="where the files are")
    commands.add_parser("serve", help="a parameter server; the other commands start it")
    commands.add_parser("calibrate", help="measure this machine for --transport sim",
                        add_help=False)
    commands.add_parser("keygen", help="make the secret key of a job", add_help=False)
    commands.add_parser("conformance", help="test a worker of your own against PROTOCOL.md",
                        add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    tune()
    modules = {"launch": "launch", "conformance": "conformance", "keygen": "keys",
               "calibrate": "calibrate"}
    if argv and argv[0] in modules:
        try:
            module = companion("transports", modules[argv[0]])
        except ModuleNotFoundError as error:
            print(f"minidist {argv[0]}: error: {error}", file=sys.stderr)
            return 2
        return module.main(argv[1:], *[this_command("serve")] * (argv[0] == "launch"))
    try:
        parser = arguments(argv)
    except (OSError, ValueError) as error:
        print(f"minidist train: error: {error}", file=sys.stderr)
        return 2
    flags = parser.parse_args(argv)
    if flags.command == "train":
        flags.least, flags.workers = flags.workers
    if flags.command == "serve" and os.environ.get("MINIDIST_ROLE") == "server":
        serve()
        return 0
    try:
        if flags.command == "serve":
            raise ValueError("the environment names no group to serve: `minidist train "
                             "--strategy downpour` and `minidist launch --servers 1` start it")
        if flags.command == "data":
            return describe(flags.names, flags.data_dir)
        if flags.servers is None:
            flags.servers = int(flags.workers > 1 and issubclass(flags.kind, Downpour))
        ranks = launched()  # by ourselves, `minidist launch`, torchrun, ...
        workers = transports().Config.from_env(os.environ).workers if ranks else flags.workers
        prepared(flags, workers)
        if not ranks and (workers > 1 or flags.transport):
            launcher = companion("transports", "launch")
            transport = flags.transport or "tcp"
            job = launcher.Job(
                this_command(*argv, "--data", flags.data), workers, transport, flags.servers or 0,
                this_command("serve"),
                cluster=launcher.cluster_of(transport, flags.cluster, flags.assume),
                restarts=flags.max_restarts, least=flags.least,
                go_on=not flags.kind.lockstep or getattr(flags, "asynchronous", False))
            if workers > 1:  # one alone needs no transport, but a wrong name is said all the same
                return launcher.run_and_tell(job)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"minidist {flags.command}: error: {error}", file=sys.stderr)
        return 2
    train(flags)
    return 0


def describe(names: Sequence[str], folder: str | None) -> int:
    for name in names:
        train, test = load_dataset(name, folder)
        shape = " x ".join(map(str, train.tensors[0].shape[1:]))
        print(f"{name}: {len(train):,} images of {shape} to learn from, {len(test):,} for the test")
    if not names:
        print("digits, mnist, fashion-mnist, cifar10; segments are made on the spot.\n"
              "`minidist data NAME` fetches one, if it is nowhere yet, and describes it.")
    return 0


def this_command(*args: str) -> list[str]:
    return [sys.executable, os.path.abspath(__file__), *args]


def launch(fn: Callable, args: Sequence[Any] = (), workers: int = 2, transport: str = "tcp",
           servers: int = 0, timeout: float | None = None, cluster: Any = None) -> list[Any]:
    """Call fn(*args) on new worker processes, from a notebook cell or a script; return what each
    returned, by rank. Inside, `dist.init_process_group()` joins them. transports/remote.py says
    what can travel: source text and plain data. With transport "sim" the workers are simulated,
    in the cluster that the file or table `cluster` describes: see transports/cluster.py."""
    return companion("transports", "launch").launch(
        fn, args, workers, transport, servers, timeout, this_command("serve"), cluster)


if __name__ == "__main__":
    sys.exit(main())
