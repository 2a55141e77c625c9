"""Data sets: found, downloaded, read, and never believed.

Small files in the real formats, from folders and from an HTTP server of this machine.
The oracles are the arrays that the files were written from.
"""
import gzip
import hashlib
import http.server
import io
import re
import struct
import sys
import tarfile
import threading

import numpy as np
import pytest

import conftest
import minidist as md

datasets = md.companion("tutorials", "datasets")
RNG = np.random.default_rng(0)


def idx(array, kind=8):
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + \
        array.tobytes()


def mnist_files(train=20, test=6, size=28):
    """The four files, and what they hold."""
    files, arrays = {}, []
    for part, count in ("train", train), ("t10k", test):
        images = RNG.integers(0, 256, (count, size, size), np.uint8)
        labels = RNG.integers(0, 10, count, np.uint8)
        files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(images))
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels))
        arrays += [images, labels]
    return files, arrays


def cifar_file(counts=(3, 2, 1, 4, 2, 5)):
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    records = [np.concatenate([RNG.integers(0, 10, (n, 1)), RNG.integers(0, 256, (n, 3072))], 1)
               .astype(np.uint8) for n in counts]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, rows in zip(names, records, strict=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = rows.nbytes
            archive.addfile(member, io.BytesIO(rows.tobytes()))
    return file.getvalue(), np.concatenate(records[:5]), records[5]


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path, monkeypatch):
    """Neither this machine's data sets nor the network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIDIST_DATA", raising=False)
    real = datasets.Path
    monkeypatch.setattr(datasets, "Path", lambda path, *more: real(
        str(path).replace("/usr/share/datasets", str(tmp_path / "share")), *more))
    monkeypatch.setattr(datasets, "SOURCES", {
        name: ("http://127.0.0.1:9/", checksums) for name, (_, checksums)
        in datasets.SOURCES.items()})


# ---- reading ----------------------------------------------------------------

@pytest.mark.parametrize("place", ["folder", "folder/mnist", "share/mnist", "cache/minidist/mnist",
                                   "variable", "variable/mnist"])
def test_mnist_is_found_and_read(tmp_path, monkeypatch, place):
    files, (images, labels, test_images, test_labels) = mnist_files()
    write(tmp_path / place, files)
    if place.startswith("variable"):
        monkeypatch.setenv("MINIDIST_DATA", str(tmp_path / "variable"))
    folder = tmp_path / "folder" if place.startswith("folder") else None
    train, test = md.load_dataset("mnist", folder)
    x, y = train.tensors
    assert x.shape == (20, 1, 28, 28) and x.dtype == np.float32 and y.dtype == np.int64
    np.testing.assert_array_equal(x.numpy(), (images[:, None] / 255).astype(np.float32))
    np.testing.assert_array_equal(y.numpy(), labels)
    np.testing.assert_array_equal((test.tensors[0].numpy() * 255).round(), test_images[:, None])
    np.testing.assert_array_equal(test.tensors[1].numpy(), test_labels)


def test_unpacked_files_do_as_well(tmp_path):
    files, (images, *_) = mnist_files()
    write(tmp_path, {name[:-3]: gzip.decompress(data) for name, data in files.items()})
    train, _ = datasets.load("fashion-mnist", tmp_path)
    np.testing.assert_array_equal((train[0] * 255).round(), images[:, None])


def test_cifar10(tmp_path):
    data, train_rows, test_rows = cifar_file()
    write(tmp_path, {"cifar-10-binary.tar.gz": data})
    train, test = datasets.load("cifar10", tmp_path)
    assert train[0].shape == (12, 3, 32, 32) and test[0].shape == (5, 3, 32, 32)
    np.testing.assert_array_equal(train[1], train_rows[:, 0])
    # The first 1024 bytes after the label are the red plane, row by row.
    np.testing.assert_array_equal((train[0][:, 0, 0] * 255).round(), train_rows[:, 1:33])
    np.testing.assert_array_equal((test[0][:, 2, 31] * 255).round(), test_rows[:, -32:])


def test_digits_are_split_once_and_for_all():
    train, test = datasets.load("digits")
    assert train[0].shape == (1433, 1, 8, 8) and test[0].shape == (364, 1, 8, 8)
    assert train[0].min() == 0 and train[0].max() == 1
    share = np.bincount(test[1]) / (np.bincount(test[1]) + np.bincount(train[1]))
    assert ((0.2 <= share) & (share < 0.21)).all()
    digest = hashlib.sha256((test[0] * 16).astype(np.uint8).tobytes() + test[1].tobytes())
    assert digest.hexdigest() == TEST_ROWS


TEST_ROWS = "bfcbef1212c058999192717f19f6e079ce5856ab9297fb4fad10268af1a7a1e6"


def test_segments_need_no_file():
    train, test = md.load_dataset("segments")
    again = md.load_dataset("segments")[0]
    assert train.tensors[0].shape == (1200, 1, 8, 8) and len(test) == 300
    np.testing.assert_array_equal(train.tensors[0].numpy(), again.tensors[0].numpy())
    assert set(train.tensors[1].numpy()) == set(range(10))


# ---- not believing ----------------------------------------------------------

def broken_mnist(**changes):
    files, _ = mnist_files()
    return files | {f"train-{name}-ubyte.gz": gzip.compress(data)
                    for name, data in changes.items()}


IMAGES = "images-idx3"
LABELS = np.zeros(20, np.uint8)


@pytest.mark.parametrize("name, data, says", [
    (IMAGES, b"", "begins with ; "),
    (IMAGES, b"\0\0\x0d\3" + bytes(12), "begins with 00 00 0d 03"),
    (IMAGES, idx(np.zeros((2, 3, 3), np.uint8))[:-1], "holds 17 elements; its head says 2 x 3 x 3"),
    (IMAGES, idx(np.zeros((2, 3, 3), np.uint8)) + b"x", "holds 19 elements"),
    (IMAGES, b"\0\0\x08\3" + b"\xff" * 12, "holds 0 elements; its head says 4294967295 x"),
    (IMAGES, idx(np.zeros((0, 3, 3), np.uint8)), "0 images and 20 labels"),
    ("labels-idx1", idx(LABELS[:19]), "20 images and 19 labels"),
    ("labels-idx1", idx(LABELS + 10), "labels up to 10"),
])
def test_damaged_idx_files_are_named(tmp_path, name, data, says):
    write(tmp_path, mnist_files()[0] | {f"train-{name}-ubyte.gz": gzip.compress(data)})
    with pytest.raises(datasets.DatasetError, match=re.escape(says)):
        datasets.load("mnist", tmp_path)


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(bytes(500))[:-9],
                                  gzip.compress(b"x")[:-4] + b"1234"],
                         ids=["no gzip", "cut", "checksum"])
def test_damaged_gzip_files_are_named(tmp_path, data):
    name = "train-images-idx3-ubyte.gz"
    write(tmp_path, mnist_files()[0] | {name: data})
    with pytest.raises(datasets.DatasetError, match=f"{name} can't be read"):
        datasets.load("mnist", tmp_path)


def test_a_file_that_unpacks_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "LARGEST", 1000)
    write(tmp_path, mnist_files()[0])
    with pytest.raises(datasets.DatasetError, match="unpacks to more than 1000 bytes"):
        datasets.load("mnist", tmp_path)


@pytest.mark.parametrize("change", [lambda d: gzip.compress(b"x" * 2000), lambda d: d[:-500],
                                    lambda d: gzip.compress(bytes(10240))])
def test_damaged_archives_are_named(tmp_path, change):
    write(tmp_path, {"cifar-10-binary.tar.gz": change(cifar_file()[0])})
    with pytest.raises(datasets.DatasetError, match="cifar-10-binary.tar.gz"):
        datasets.load("cifar10", tmp_path)


def test_half_a_record_in_an_archive(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.size = 3072
        archive.addfile(member, io.BytesIO(bytes(3072)))
    write(tmp_path, {"cifar-10-binary.tar.gz": file.getvalue()})
    with pytest.raises(datasets.DatasetError, match="data_batch_1.bin, records of 3073 bytes"):
        datasets.load("cifar10", tmp_path)


@pytest.mark.parametrize("line", ["1,2", "x" + ",0" * 64, "17" + ",0" * 64, "-1" + ",0" * 64,
                                  "0" + ",0" * 65, ",".join("0" * 64) + ",10", ""])
def test_damaged_digits_are_named(tmp_path, line):
    write(tmp_path, {"digits.csv": f"{line}\n".encode() * 50})
    with pytest.raises(datasets.DatasetError, match="digits"):
        datasets.load("digits", tmp_path)


def test_a_missing_set_says_where_it_was_searched(tmp_path):
    with pytest.raises(datasets.DatasetError) as error:
        datasets.load("mnist", tmp_path / "a")
    assert f"{tmp_path}/a/mnist" in str(error.value) and "downloaded" in str(error.value)
    with pytest.raises(datasets.DatasetError, match="no data set 'mnits'; there are digits, "):
        datasets.load("mnits")


# ---- downloads --------------------------------------------------------------

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, data = self.server, self.server.files.get(self.path[1:])
        server.seen.append((self.path[1:], self.headers.get("Range")))
        if data is None:
            self.send_error(404)
            return
        start = 0
        if server.ranges and (asked := self.headers.get("Range")):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:start + server.cut])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    files, arrays = mnist_files()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.images, server.seen = files, arrays[0], []
        server.ranges, server.cut = True, 1 << 30
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setitem(datasets.SOURCES, "mnist", (
            f"http://127.0.0.1:{server.server_port}/",
            {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}))
        yield server
        server.shutdown()
        thread.join()


def check(server):
    train, _ = datasets.load("mnist")
    np.testing.assert_array_equal((train[0] * 255).round(), server.images[:, None])


def test_a_download_is_kept(server, tmp_path):
    check(server)
    assert len(server.seen) == 4
    check(server)
    assert len(server.seen) == 4
    kept = sorted(p.name for p in (tmp_path / "cache/minidist/mnist").iterdir())
    assert kept == sorted(server.files)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on(server, ranges):
    server.ranges, server.cut = ranges, 5000
    with pytest.raises(datasets.DatasetError, match="ended after 5000 of .* Try again to go on"):
        check(server)
    server.cut = 1 << 30
    check(server)
    assert server.seen[:2] == [("train-images-idx3-ubyte.gz", None),
                               ("train-images-idx3-ubyte.gz", "bytes=5000-")]


def test_a_download_that_broke_after_its_last_byte(server, tmp_path):
    name = "train-images-idx3-ubyte.gz"
    write(tmp_path / "cache/minidist/mnist", {name + ".part": server.files[name]})
    check(server)


def test_a_wrong_checksum_is_refused_and_not_kept(server, tmp_path):
    name = "t10k-labels-idx1-ubyte.gz"
    right, server.files[name] = server.files[name], b"something else"
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(datasets.DatasetError, match=f"{name} has the SHA-256 {found}, not"):
        check(server)
    assert not list((tmp_path / "cache/minidist/mnist").glob(name + "*"))
    server.files[name] = right
    check(server)


def test_a_server_without_the_file(server):
    del server.files["train-images-idx3-ubyte.gz"]
    with pytest.raises(datasets.DatasetError, match="404.*--data-dir"):
        check(server)


def test_no_server():
    with pytest.raises(datasets.DatasetError, match="http://127.0.0.1:9/train-images.*--data-dir"):
        datasets.load("mnist")


def test_a_server_that_sends_without_end(server, monkeypatch):
    monkeypatch.setattr(datasets, "LARGEST", 3000)
    with pytest.raises(datasets.DatasetError, match="sends more than 3000 bytes"):
        check(server)


def test_the_bar_counts_bytes(server):
    bars = []

    class Bar:
        def __init__(self, total, what, unit, done):
            self.total, self.count = total, done
            bars.append(self)

        def advance(self, n):
            self.count += n

        def close(self):
            pass

    datasets.load("mnist", progress=Bar)
    assert [(b.total, b.count) for b in bars] == [(len(d),) * 2 for d in server.files.values()]


def test_the_lesson_runs(capsys, monkeypatch):
    import runpy

    runpy.run_path(str(conftest.ROOT / "tutorials" / "datasets.py"), run_name="__main__")
    assert "1433 digits to learn from, 364 to be tested on" in capsys.readouterr().out
    assert "minidist" in sys.modules
