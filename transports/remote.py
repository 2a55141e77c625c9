"""A function and its values, sent to a new process and back, without pickle.

`launch` in launch.py starts workers that run this file: `python remote.py FOLDER`.
The folder is private to this run and holds

    path.json    where the caller finds its modules
    cell.py      the function's source text and that of all it names, unless the
                 workers can import it
    call/        its arguments and the plain values that it names
    result0/ ... what each worker's function returned

Values are JSON, with a .npy file for each array, so reading them runs no code.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class NotPortable(TypeError):
    """Something that can't travel to another process."""


# ---------------------------------------------------------------------------
# 1. The call
# ---------------------------------------------------------------------------


def send(folder: Path, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """What the caller leaves in the folder."""
    paths = [p or os.getcwd() for p in sys.path]
    (folder / "path.json").write_text(json.dumps(paths))
    call = portable(fn, folder / "cell.py")
    try:
        save(folder / "call", {**call, "args": list(args)})
    except NotPortable as error:
        raise NotPortable(f"an argument of {fn.__name__} can't travel to the workers: {error}"
                          ) from None


def answer(folder: str) -> None:
    """What the worker does with it."""
    path = Path(folder)
    sys.path[:] = json.loads((path / "path.json").read_text())
    values = load(path / "call")
    if values["module"]:
        module = importlib.import_module(values["module"])
    else:
        spec = importlib.util.spec_from_file_location("minidist_cell", path / "cell.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        vars(module).update(values["globals"])
        spec.loader.exec_module(module)
    fn: Any = module
    for name in values["name"].split("."):
        fn = getattr(fn, name)
    result = fn(*values["args"])
    try:
        save(path / f"result{os.environ['RANK']}", result)
    except NotPortable as error:
        raise NotPortable(f"what {values['name']} returned can't travel back: {error}") from None


def portable(fn: Callable[..., Any], cell: Path) -> dict[str, Any]:
    """How a worker finds fn: the name of its module, or a file written to `cell`."""
    if not inspect.isfunction(fn) or fn.__name__ == "<lambda>":
        raise NotPortable(f"launch needs a function made with `def`, not {fn!r}")
    if importable(fn):
        return {"module": fn.__module__, "name": fn.__qualname__, "globals": {}}
    parts: dict[str, str] = {}
    values: dict[str, Any] = {}
    collect(fn.__name__, fn, parts, values)
    for name, value in values.items():
        try:
            pack(value, [])
        except NotPortable as error:
            raise NotPortable(f"{fn.__name__} names {name!r}, which can't travel to the workers: "
                              f"{error}. Make it inside the function") from None
    cell.write_text("\n".join(parts.values()), encoding="utf-8")
    return {"module": "", "name": fn.__name__, "globals": values}


def importable(thing: Any) -> bool:
    """Would `import` in another process find this very function or class?"""
    top = (thing.__module__ or "__main__").partition(".")[0]
    if top == "__main__" or not any(f.find_spec(top, None) for f in sys.meta_path):
        return False
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def collect(name: str, thing: Any, parts: dict[str, str], values: dict[str, Any]) -> None:
    """Make `name` mean `thing` in the worker: add its text to `parts`, behind
    the text of all that it names itself, or, if it is no code, to `values`."""
    if name in parts or name in values:
        return
    if isinstance(thing, ModuleType):
        parts[name] = f"import {thing.__name__} as {name}"
    elif not (inspect.isfunction(thing) or inspect.isclass(thing)):
        values[name] = thing
    elif importable(thing):
        outer, _, rest = thing.__qualname__.partition(".")
        parts[name] = f"from {thing.__module__} import {outer} as {name}"
        if rest:
            parts[name] += f"\n{name} = {name}.{rest}"
    else:
        text = source_of(thing)
        parts[name] = ""  # begun; functions may name each other
        for other, value in named_by(thing, text):
            collect(other, value, parts, values)
        del parts[name]
        parts[name] = text if thing.__name__ == name else f"{text}\n{name} = {thing.__name__}"


def source_of(thing: Any) -> str:
    # inspect does not know classes of a notebook, but their methods know the cell.
    for method in vars(thing).values() if inspect.isclass(thing) else ():
        if inspect.isfunction(method):
            lines = linecache.getlines(method.__code__.co_filename)
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    return textwrap.dedent("".join(lines[first - 1:node.end_lineno]))
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        raise NotPortable(f"the source text of {thing.__name__!r} can't be found, so it can't be "
                          "sent to the workers: put it into a file or a notebook cell") from None


def named_by(thing: Any, text: str) -> Iterator[tuple[str, Any]]:
    """The names that the text takes from outside itself, with what they mean here."""
    try:
        table = symtable.symtable(text, "cell", "exec")
    except SyntaxError as error:  # such as `nonlocal` without its outer function
        raise NotPortable(f"{thing.__name__!r} can't be sent to the workers by itself: {error.msg}"
                          ) from None
    if inspect.isclass(thing):
        known = dict(vars(sys.modules[thing.__module__]))
    else:
        known = thing.__globals__ | inspect.getclosurevars(thing).nonlocals
    for name in free_names(table):
        if name in known and not name.startswith("__"):
            yield name, known[name]


def free_names(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from free_names(child)


# ---------------------------------------------------------------------------
# 2. Values
# ---------------------------------------------------------------------------


def save(folder: Path, value: Any) -> None:
    """A value as a folder: JSON, and a .npy file for each array. Nothing in it is code."""
    import numpy as np

    arrays: list[Any] = []
    text = json.dumps(pack(value, arrays))
    folder.mkdir()
    (folder / "value.json").write_text(text)
    for i, array in enumerate(arrays):
        np.save(folder / f"{i}.npy", array, allow_pickle=False)


def load(folder: Path) -> Any:
    return unpack(json.loads((folder / "value.json").read_text()), folder)


def pack(value: Any, arrays: list[Any]) -> Any:
    """JSON for `value`: lists as they are, all other kinds as {kind: content}."""
    import numpy as np

    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        arrays.append(value)
        return {"array" if isinstance(value, np.ndarray) else "scalar": len(arrays) - 1}
    if type(value).__module__ == "minidist" and hasattr(value, "numpy"):
        arrays.append(value.detach().numpy())
        return {"tensor": len(arrays) - 1}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [pack(v, arrays) for v in value]
    if type(value) in (tuple, set, frozenset):
        return {type(value).__name__: [pack(v, arrays) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(k, arrays), pack(v, arrays)] for k, v in value.items()]}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    raise NotPortable(f"a {type(value).__name__} is none of None, numbers, strings, bytes, lists, "
                      "tuples, sets, dicts, arrays and Tensors")


def unpack(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [unpack(v, folder) for v in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind in ("array", "scalar", "tensor"):
        import numpy as np

        array = np.load(folder / f"{content}.npy", allow_pickle=False)
        if kind == "tensor":
            return importlib.import_module("minidist").tensor(array)
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {unpack(k, folder): unpack(v, folder) for k, v in content}
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(content, folder))


if __name__ == "__main__":
    del sys.path[0]  # this folder, where other modules must not be found
    answer(sys.argv[1])
