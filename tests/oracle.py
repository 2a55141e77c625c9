"""PyTorch says what is right, one line a test.

    check(lambda m, x, y: m.maximum(x, y), (3, 1), (2, 1, 4))

The function is an expression in `m`, which means the same for m = minidist and m = torch. `check`
runs it with both on equal inputs, in float32 and float64, and compares: values, dtypes, shapes,
who requires grad, the gradients of all inputs (leaves and intermediate results), and the second
derivatives, with respect to the inputs and to the gradient that came in.
"""
import importlib
import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minidist as md


def required(name: str) -> Any:
    """A package that the tests compare with: missing, they skip, but in CI they fail."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"compares with {name}: pip install {name}", allow_module_level=True)


def driven() -> set[str]:
    """Names that test_conformance.py takes from PyTorch's databases."""
    text = Path(__file__).with_name("test_conformance.py").read_text()
    return set(text.replace("nn.functional.", "").replace('"', " ").split())


torch = required("torch")
torch.set_num_threads(1)

FLOATS = ("float32", "float64")
# torch.testing.assert_close's own: relative and absolute
TOLERANCE = {"float16": (1e-3, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}


# -- inputs: a shape stands for normal numbers; an array of floats is cast to the dtype ------------


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape))


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return np.abs(normal(*shape, seed=seed)) + 0.2


def integers(*shape: int, high: int = 5, low: int = 0, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng([seed, *shape]).integers(low, high, shape))


def booleans(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(normal(*shape, seed=seed) > 0)


def array_of(x: Any, dtype: str, seed: int) -> np.ndarray:
    x = normal(*x, seed=seed) if isinstance(x, tuple) else np.asarray(x)
    return x.astype(dtype) if x.dtype.kind == "f" else x


def make(m: Any, array: np.ndarray, requires_grad: bool | None = None) -> Any:
    """The array as a tensor of minidist or of torch; floats require grad."""
    array = np.array(array)
    wanted = array.dtype.kind == "f" if requires_grad is None else requires_grad
    return (md.tensor if m is md else torch.from_numpy)(array).requires_grad_(wanted)


def to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return (x.detach() + 0 if x._is_zerotensor() else x.detach()).numpy()
    return x.detach().numpy() if isinstance(x, md.Tensor) else np.asarray(x)


def as_list(x: Any) -> list:
    return list(x) if isinstance(x, (tuple, list)) else [x]


# -- comparison ------------------------------------------------------------------------------------


def close(ours: Any, theirs: Any, what: str = "value", factor: float = 1.0) -> None:
    """Shape, dtype and value of one tensor (or number) against torch's."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, md.Tensor), f"{what}: {type(ours)}, not a Tensor"
        expected = str(theirs.dtype).removeprefix("torch.")
        assert ours.dtype.name == expected, f"{what}: {ours.dtype}, torch has {expected}"
    a, b = to_numpy(ours), to_numpy(theirs)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, torch has {b.shape}"
    rtol, atol = TOLERANCE.get(b.dtype.name, (0, 0))
    np.testing.assert_allclose(a, b, rtol * factor, atol * factor, err_msg=what)


def run(m: Any, function: Any, arrays: list, orders: int) -> dict[str, Any]:
    """What is to be compared, by name."""
    leaves = [make(m, a) for a in arrays]
    inputs = [x * 1 if x.requires_grad else x for x in leaves]  # intermediate results
    outputs = as_list(function(m, *inputs))
    for x, o in itertools.product(inputs, outputs) if m is md else ():
        if isinstance(o, md.Tensor) and np.may_share_memory(x._array, o._array):
            assert o._storage is x._storage, "a result shares its input's memory, but is no view"
    found = {f"value {i}": o for i, o in enumerate(outputs)}
    found |= {f"requires_grad {i}": getattr(o, "requires_grad", False)
              for i, o in enumerate(outputs)}
    outputs = [o for o in outputs if getattr(o, "requires_grad", False)]
    if not outputs or not orders:
        return found
    points = [x for x, leaf in zip(inputs, leaves) if leaf.requires_grad]
    seeds = [make(m, normal(*o.shape, seed=7).astype(to_numpy(o).dtype)) for o in outputs]
    first = m.autograd.grad(outputs, points, seeds, create_graph=True, materialize_grads=True,
                            allow_unused=True)
    found |= {f"gradient {i}": g.detach() for i, g in enumerate(first)}
    recorded = [g for g in first if g.requires_grad]
    if orders > 1:
        second = [m.zeros_like(x) for x in (*points, *seeds)]
        if recorded:
            weights = [make(m, normal(*g.shape, seed=8).astype(to_numpy(g).dtype), False)
                       for g in recorded]
            second = m.autograd.grad(recorded, [*points, *seeds], weights, retain_graph=True,
                                     materialize_grads=True, allow_unused=True)
        found |= {f"second derivative {i}": g for i, g in enumerate(second)}
    sum((o * s.detach()).sum() for o, s in zip(outputs, seeds)).backward()
    found |= {f"grad of leaf {i}": x.grad for i, x in enumerate(leaves)}
    return found


def check(function: Any, *inputs: Any, dtypes: Any = FLOATS, orders: int = 2,
          factor: float = 1.0) -> None:
    """Compare function(minidist, *inputs) with function(torch, *inputs). `orders`: of
    derivatives; `factor`: how much wider than torch's own tolerance."""
    for dtype in dtypes:
        arrays = [array_of(x, dtype, i) for i, x in enumerate(inputs)]
        with warnings.catch_warnings(action="ignore"):
            theirs = run(torch, function, arrays, orders)
        ours = run(md, function, arrays, orders)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            if isinstance(theirs[name], (bool, type(None))):
                assert ours[name] == theirs[name], f"{name}: {ours[name]}, torch: {theirs[name]}"
            else:
                close(ours[name], theirs[name], f"{name} ({dtype})", factor)


def both_raise(function: Any, *inputs: Any) -> None:
    """What torch refuses, minidist refuses."""
    arrays = [array_of(x, "float32", i) for i, x in enumerate(inputs)]
    for m in (torch, md):
        with pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
            function(m, *[make(m, a) for a in arrays])
