"""Section 6: datasets, orders, batches; and checkpoints, with the safetensors package as judge."""
import collections
import io
import json
import os
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minidist as md
from minidist.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)
from oracle import required, torch

safe_numpy, safe_torch = required("safetensors.numpy"), required("safetensors.torch")

# -- datasets and loaders --------------------------------------------------------------------------


class Squares(Dataset):
    def __getitem__(self, i):
        return i, float(i * i)

    def __len__(self):
        return 7


def test_tensor_dataset():
    data = TensorDataset(md.arange(12).reshape(6, 2), md.arange(6))
    x, y = data[2]
    assert x.tolist() == [4, 5] and y.item() == 2 and len(data) == 6
    with pytest.raises(ValueError, match=r"\[6, 5\]"):
        TensorDataset(md.zeros(6), md.zeros(5))
    batches = list(DataLoader(data, batch_size=4))
    assert [type(b) for b in batches] == [list, list]
    assert batches[1][0].tolist() == [[8, 9], [10, 11]] and batches[1][1].tolist() == [4, 5]


def test_subset_and_random_split():
    md.manual_seed(0)
    data = Squares()
    assert [Subset(data, [3, 5])[i][0] for i in range(2)] == [3, 5]
    for lengths, expected in (([5, 2], [5, 2]), ([0.5, 0.5], [4, 3]), ([0.2, 0.3, 0.5], [2, 2, 3])):
        parts = random_split(data, lengths)
        assert [len(p) for p in parts] == expected
        assert [len(p) for p in torch.utils.data.random_split(range(7), lengths)] == expected
        assert sorted(x for p in parts for x, _ in (p[i] for i in range(len(p)))) == list(range(7))
    a, b = (random_split(data, [5, 2], md.Generator().manual_seed(1)) for _ in range(2))
    assert a[0].indices == b[0].indices
    with pytest.raises(ValueError, match="add up to the 7"):
        random_split(data, [5, 5])


def test_loader_collates_as_torch_does():
    samples = [
        [(1, 2.0), (3, 4.0)], [{"a": 1, "b": [1.0, 2.0]}, {"a": 2, "b": [3.0, 4.0]}],
        [np.ones(2, np.float32), np.zeros(2, np.float32)], ["x", "y"], [True, False],
        [collections.namedtuple("P", "x y")(1, 2.0)] * 2, [np.float64(1), np.float64(2)],
    ]

    def plain(x):
        if isinstance(x, (md.Tensor, torch.Tensor)):
            return [str(x.dtype).removeprefix("torch."), x.tolist()]
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [type(x).__name__, *map(plain, x)]
        return x

    for batch in samples:
        theirs = torch.utils.data.default_collate(batch)
        assert plain(default_collate(batch)) == plain(theirs)
    assert default_collate([md.ones(2), md.zeros(2)]).shape == (2, 2)
    with pytest.raises(RuntimeError, match="different lengths"):
        default_collate([(1, 2), (1,)])


def test_loader_options():
    data = Squares()
    assert [b[0].tolist() for b in DataLoader(data, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    dropping = DataLoader(data, 3, drop_last=True)
    assert len(dropping) == len(list(dropping)) == 2
    assert list(DataLoader(data, 2, collate_fn=len)) == [2, 2, 2, 1]
    assert [b[0].tolist() for b in DataLoader(data, 2, sampler=[5, 1, 3])] == [[5, 1], [3]]
    assert [b[0].tolist() for b in DataLoader(data, batch_sampler=[[1], [2, 3]])] == [[1], [2, 3]]
    assert len(DataLoader(data, batch_sampler=[[1], [2, 3]])) == 2
    assert list(DataLoader(TensorDataset(md.zeros(0)), 2)) == []
    for bad in ({"batch_size": 0}, {"sampler": [0], "shuffle": True}):
        with pytest.raises(ValueError):
            DataLoader(data, **bad)
    with pytest.raises(NotImplementedError, match="Dataset defines no __getitem__"):
        Dataset()[0]


def test_random_samplers():
    data = md.utils.data
    for sampler, n in ((data.RandomSampler(range(5), num_samples=12), 12),
                       (data.RandomSampler(range(5), True, 50), 50),
                       (data.RandomSampler(range(0)), 0)):
        order = list(sampler)
        assert len(order) == len(sampler) == n and set(order) <= set(range(5))
    order = list(data.RandomSampler(range(5), num_samples=12))
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))


def test_loaders_refuse_what_they_do_not_know():
    class Stream(md.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for make, words in ((lambda: DataLoader([1], batchsize=4), "batchsize"),
                        (lambda: DataLoader([1], None), "iterate over the dataset itself"),
                        (lambda: DataLoader(Stream(), shuffle=True), "its own order")):
        with pytest.raises((TypeError, ValueError), match=words):
            make()
    ids = []
    loader = DataLoader(Squares(), 2, None, num_workers=1, worker_init_fn=ids.append, timeout=9,
                        pin_memory=True, persistent_workers=True, prefetch_factor=None)
    assert len(list(loader)) == 4 and ids == [0]


def test_shuffled_orders():
    def epochs(loader, n=3):
        return [[i for b in loader for i in b[0].tolist()] for _ in range(n)]

    md.manual_seed(5)
    first = epochs(DataLoader(Squares(), 2, shuffle=True))
    other = epochs(DataLoader(Squares(), 2, shuffle=True))
    md.manual_seed(5)
    md_again = epochs(DataLoader(Squares(), 2, shuffle=True))
    assert first == md_again != other and first[0] != first[1]
    assert all(sorted(order) == list(range(7)) for order in first)
    loader = DataLoader(Squares(), 2, shuffle=True, generator=md.Generator().manual_seed(1))
    again = DataLoader(Squares(), 3, shuffle=True, generator=md.Generator().manual_seed(1))
    for a, b in zip(epochs(loader), epochs(again)):
        assert a == b  # whatever the batch size
    md.manual_seed(0)
    loader = DataLoader(Squares(), 2, shuffle=True)
    expected = epochs(loader)
    md.manual_seed(0)
    loader = DataLoader(Squares(), 2, shuffle=True)
    found = []
    for _ in range(3):
        found.append([i for b in loader for i in b[0].tolist()])
        md.randn(10)  # what else draws numbers does not move the order
    assert found == expected


# -- files -----------------------------------------------------------------------------------------

DTYPES = "bool uint8 int8 int16 int32 int64 float16 float32 float64".split()


def arrays():
    rng = np.random.default_rng(0)
    a = {f"a.{d}": (rng.standard_normal((3, 4)) * 9).astype(d) for d in DTYPES}
    return a | {"0-d": np.array(2.5), "empty": np.zeros((0, 3), np.float32),
                "fortran": np.asfortranarray(a["a.float64"]), "t": a["a.int16"].T,
                "strided": a["a.float32"][:, ::2], "back": a["a.int64"][::-1],
                "übung/ \"x\"": a["a.int8"], "nan": np.array([np.nan, np.inf, -0.0])}


def test_files_go_both_ways(tmp_path):
    path, wanted = tmp_path / "x.safetensors", arrays()
    md.save({k: md.tensor(v) for k, v in wanted.items()}, path)
    theirs = safe_numpy.load_file(path)
    ours = md.load(path)
    assert list(ours) == list(theirs) or set(ours) == set(theirs)
    for name, array in wanted.items():
        for found in (theirs[name], ours[name].numpy()):
            assert found.dtype == array.dtype and found.shape == array.shape
            np.testing.assert_array_equal(found, array)
    other = tmp_path / "y.safetensors"
    safe_numpy.save_file({k: np.ascontiguousarray(v) for k, v in wanted.items()}, other,
                                metadata={"format": "np"})
    for name, tensor in md.load(other).items():
        np.testing.assert_array_equal(tensor.numpy(), wanted[name])
        tensor.fill_(1)  # loaded tensors can be written to
    flat = wanted["a.float32"]
    md.save({"x": flat}, path)  # a flat dict is the plain format: no metadata
    assert path.read_bytes() == (safe_numpy.save({"x": flat}))


def test_open_files_and_arrays(tmp_path):
    """As PyTorch programs do it: torch.save(array, open(path, "wb"))."""
    state = {"data": np.arange(6.0).reshape(2, 3), "step": 3}
    with open(tmp_path / "x.pt", "wb") as file:
        file.write(b"before")
        md.save(state, file)
    for file in (open(tmp_path / "x.pt", "rb"), io.BytesIO((tmp_path / "x.pt").read_bytes())):
        with file:
            file.seek(6)
            found = md.load(file)
        assert found["step"] == 3 and isinstance(found["data"], np.ndarray)
        np.testing.assert_array_equal(found["data"], state["data"])
    with open(tmp_path / "y.pt", "wb") as file:
        md.save(np.ones(3), file)
    assert md.from_numpy(md.load(tmp_path / "y.pt")).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        md.load(io.BytesIO(b"short"))


def test_bfloat16_is_read(tmp_path):
    values = torch.tensor([1.5, -3.25, 1e30, float("inf"), 0.1], dtype=torch.bfloat16)
    safe_torch.save_file({"x": values, "y": torch.ones(3)}, tmp_path / "x")
    found = md.load(tmp_path / "x")["x"]
    assert found.dtype == md.float32 and found.tolist() == values.float().tolist()


def test_a_model_of_torch(tmp_path):
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    safe_torch.save_file(theirs.state_dict(), tmp_path / "x")
    ours = md.nn.Sequential(md.nn.Linear(3, 4), md.nn.BatchNorm1d(4))
    ours.load_state_dict(md.load(tmp_path / "x"))
    md.save(ours.state_dict(), tmp_path / "y")
    theirs.load_state_dict(safe_torch.load_file(tmp_path / "y"), strict=True)


def same(a, b):
    if isinstance(a, (md.Tensor, np.ndarray)):
        return isinstance(b, md.Tensor) and np.array_equal(np.asarray(a), np.asarray(b)) \
            and np.asarray(a).dtype == b.dtype
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def test_nested_states(tmp_path):
    state = {"step": 3, "rate": 0.1, "name": "lenet", "flag": True, "none": None, "big": 2**70,
             "list": [1, md.ones(2), {"x": md.zeros(())}], "tuple": (1, (2.5, "a")), 7: "seven",
             "$tuple": [1], "in": {"$x": 1}, "out": {"x": {"$tensor": "list.1"}},
             2.5: "float key", "dtype": md.float32, "inf": float("inf"), "empty": {}, "nothing": []}
    md.save(state, tmp_path / "x")
    assert same(state, md.load(tmp_path / "x"))
    for value in (md.ones(2), [md.ones(2)], 5, "text", {}, []):
        md.save(value, tmp_path / "x")
        assert same(value, md.load(tmp_path / "x"))
    md.save({"a": np.float32(1.5), "b": np.int64(2)}, tmp_path / "x")
    assert md.load(tmp_path / "x") == {"a": 1.5, "b": 2}
    for bad in ({"a": object()}, {"f": print}, {"s": {1, 2}}, {(1, 2): 3}, {"c": 1j},
                {"c": np.array([1j])}, {"o": np.array(["a"])}):
        with pytest.raises(TypeError, match="cannot save|key|complex|dtype"):
            md.save(bad, tmp_path / "x")


@settings(max_examples=25, deadline=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture])
@given(st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
              st.lists(st.integers(0, 9)).map(lambda v: md.tensor(v, dtype=md.int64))),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(
        st.one_of(st.text(), st.integers()), inner)), max_leaves=20))
def test_any_state_comes_back(tmp_path, state):
    md.save(state, tmp_path / "x")
    assert same(state, md.load(tmp_path / "x"))


def test_names_that_collide_stay_apart(tmp_path):
    state = {"a": {"b": md.ones(1)}, "a.b": md.zeros(1), "1": md.ones(2), 1: md.zeros(2)}
    md.save(state, tmp_path / "x")
    assert same(state, md.load(tmp_path / "x"))
    state = {"__metadata__": md.ones(1), "x": 1}
    md.save(state, tmp_path / "x")
    assert same(state, md.load(tmp_path / "x"))


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    md.save({"x": md.ones(3)}, path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full)
        with pytest.raises(OSError, match="No space"):
            md.save({"x": md.zeros(3)}, path)
        monkeypatch.undo()
    with pytest.raises(TypeError):
        md.save({"x": object()}, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x"]


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


BROKEN = {
    "no bytes": lambda p: p.write_bytes(b""), "seven bytes": lambda p: p.write_bytes(b"1234567"),
    "no header": lambda p: p.write_bytes(bytes(8)),
    "a huge header": lambda p: write(p, b"{}", length=2**63),
    "a header beyond the file": lambda p: write(p, b"{}", length=3),
    "not JSON": lambda p: write(p, b"{x"), "not UTF-8": lambda p: write(p, b'{"\xff": 1}'),
    "a list": lambda p: write(p, []), "a number": lambda p: write(p, 5),
    "an entry of numbers": lambda p: write(p, {"x": 5}),
    "no shape": lambda p: write(p, {"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "an unknown dtype": lambda p: write(p, entry("F7"), bytes(4)),
    "a dtype that is a list": lambda p: write(p, entry(["F32"]), bytes(4)),
    "a dtype that is null": lambda p: write(p, entry(None), bytes(4)),
    "a negative size": lambda p: write(p, entry(shape=(-1, -1)), bytes(4)),
    "a size that is text": lambda p: write(p, entry(shape=("1",)), bytes(4)),
    "a shape that is text": lambda p: write(p, entry(shape="1"), bytes(4)),
    "a size that is a fraction": lambda p: write(p, entry(shape=(1.0,)), bytes(4)),
    "a size that is true": lambda p: write(p, entry(shape=(True,)), bytes(4)),
    "a shape too large": lambda p: write(p, entry(shape=(2**62, 2**62), offsets=(0, 4)), bytes(4)),
    "a shape too large that is empty": lambda p: write(
        p, entry(shape=(2**62, 2**62, 0), offsets=(0, 0))),
    "a shape of too many dimensions": lambda p: write(p, entry(shape=(1,) * 99), bytes(4)),
    "offsets beyond the file": lambda p: write(p, entry(shape=(2**40,), offsets=(0, 2**42)),
                                               bytes(4)),
    "a hole": lambda p: write(p, entry(offsets=(4, 8)), bytes(8)),
    "a rest": lambda p: write(p, entry(), bytes(5)),
    "too little": lambda p: write(p, entry(), bytes(3)),
    "an overlap": lambda p: write(p, entry() | {"y": entry()["x"]}, bytes(4)),
    "reversed offsets": lambda p: write(p, entry(offsets=(4, 0)), bytes(4)),
    "three offsets": lambda p: write(p, entry(offsets=(0, 4, 4)), bytes(4)),
    "a name twice": lambda p: write(p, b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                                       b'"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
                                    bytes(8)),
    "deep nesting": lambda p: write(p, b"[" * 100_000),
    "our metadata, broken": lambda p: write(p, {"__metadata__": {"minidist": "{"}}),
    "our metadata, an unknown kind": lambda p: write(
        p, {"__metadata__": {"minidist": '{"$eval": "1"}'}}),
    "our metadata, no such tensor": lambda p: write(
        p, {"__metadata__": {"minidist": '{"$tensor": "y"}'}}),
    "our metadata, a dtype that is none": lambda p: write(
        p, {"__metadata__": {"minidist": '{"$dtype": "object"}'}}),
    "our metadata, a key that is a list": lambda p: write(
        p, {"__metadata__": {"minidist": '{"$dict": [[[1], 1]]}'}}),
    "metadata that is a list": lambda p: write(p, {"__metadata__": [1]}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name, tmp_path):
    path = tmp_path / "x"
    BROKEN[name](path)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not a valid safetensors file"):
            md.load(path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files(tmp_path, data):
    """Whatever is changed in a file: a ValueError, or tensors of the sizes that the file holds."""
    path, sound = tmp_path / "x", tmp_path / "sound"
    if not sound.exists():
        md.save({"a": [md.ones(2), 1.5, "t"], "b": {"c": md.zeros(3)}}, sound)
    content = bytearray(sound.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["change", "cut", "insert"]))
        place = data.draw(st.integers(0, len(content) - 1))
        if kind == "change":
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[place : place + data.draw(st.integers(1, 9))]
        else:
            content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        if not content:
            break
    path.write_bytes(content)
    try:
        md.load(path)
    except ValueError as error:
        assert "not a valid safetensors file" in str(error)


def test_saving_replaces_files_alone(tmp_path):
    """A file that appears complete or not replaces another: a device (/dev/null!) must not go."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="folder or a device"):
            md.save({"x": md.ones(2)}, tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for value in (1, 2):
        md.save({"x": md.full((2,), value)}, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert md.load(tmp_path / "file")["x"].tolist() == [value, value]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "pipe"]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_is_recognised(tmp_path, zipped):
    torch.save({"x": torch.ones(2)}, tmp_path / "x", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"torch.save's.*safetensors.torch.save_file\(torch.load"):
        md.load(tmp_path / "x")


def test_a_checkpoint_is_read_by_torch(tmp_path):
    """As the docstring of `save` says."""
    ours, theirs = md.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    md.save({"model": ours.state_dict(), "epochs": 3}, tmp_path / "x")
    state = safe_torch.load_file(tmp_path / "x")
    theirs.load_state_dict({name.removeprefix("model."): tensor
                            for name, tensor in state.items() if name.startswith("model.")})
    assert theirs.weight.tolist() == ours.weight.tolist()


def test_progress(monkeypatch, capsys):
    """Lines, and few of them, where stderr is no terminal; else one line drawn over, with a
    clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(md.time, "monotonic", lambda: now[0])
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for job in (None, "1"):
        monkeypatch.delenv("MINIDIST_JOB", raising=False)
        if job:
            monkeypatch.setenv("MINIDIST_JOB", job)
        with md.Progress(1000, "lenet", "steps") as bar:
            for _ in range(1000):
                now[0] += 0.02
                bar.advance(1, "loss 1")
        text = capsys.readouterr().err
        if job:
            assert 100 < text.count("\r") < 300 and text.count("\n") == 1
        else:
            assert text.endswith("\nlenet: 1,000 of 1,000 steps loss 1\n")
            assert "\r" not in text and 4 <= text.count("\n") <= 6


def test_loading_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        md.load(tmp_path / "nothing")
