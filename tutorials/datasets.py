"""Pictures to learn from: digits, MNIST, Fashion-MNIST, CIFAR-10.

    (images, labels), (test_images, test_labels) = load("fashion-mnist")

The digits lie beside this file. The others are searched where they usually lie, and
downloaded if they are nowhere; a download counts only if its SHA-256 is the one expected.
The formats are a few numbers and then bytes: no library is needed to read them, and
nothing in a file can make a reader run code or take more memory than the file is long.
`minidist train --data NAME` uses this module; it needs NumPy alone.
"""
import gzip
import hashlib
import http.client
import io
import math
import os
import struct
import tarfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IDX_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k")
             for kind in ("images-idx3", "labels-idx1")]
SOURCES: dict[str, tuple[str, dict[str, str]]] = {  # name: (address, {file: SHA-256})
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", dict(zip(IDX_FILES, [
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"], strict=True))),
    "fashion-mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", dict(zip(IDX_FILES, [
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"], strict=True))),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/", {"cifar-10-binary.tar.gz":
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}),
}
LARGEST = 1 << 30  # bytes: more than any of these files holds, packed or not

Arrays = tuple[np.ndarray, np.ndarray]  # images, labels
Find = Callable[[str], Path]


class DatasetError(OSError):
    """A data set that is not there, is damaged, or could not be downloaded."""


def load(name: str, folder: Any = None, progress: Any = None) -> tuple[Arrays, Arrays]:
    """The training and the test part: images (N, channels, height, width) as float32 from 0 to
    1, labels (N,) as int64.

    Files are searched in `folder` and its subfolder `name`; without a folder in $MINIDIST_DATA,
    /usr/share/datasets and the user's cache, where downloads go. `progress(total, what, unit,
    done)` makes a bar with a method advance(n)."""
    readers = {"digits": read_digits, "cifar10": read_cifar10,
               "mnist": read_mnist, "fashion-mnist": read_mnist}
    if name not in readers:
        raise DatasetError(f"there is no data set {name!r}; there are {', '.join(readers)}")
    parts = []
    for part in "train", "test":
        images, labels = readers[name](part, lambda file: find(name, file, folder, progress))
        if not 0 < len(images) == len(labels) or labels.max() > 9:
            raise DatasetError(f"{name}, {part}: {len(images)} images and {len(labels)} labels up "
                               f"to {labels.max(initial=0)}; expected as many, labels up to 9")
        scale = np.float32(16 if name == "digits" else 255)
        parts.append((images.astype(np.float32) / scale, labels.astype(np.int64)))
    return parts[0], parts[1]


# ---- where the files are ----------------------------------------------------

def find(name: str, file: str, folder: Any = None, progress: Any = None) -> Path:
    """Where the file lies, packed or not; it is downloaded if it lies nowhere."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minidist"
    roots = [folder] if folder is not None else [
        os.environ.get("MINIDIST_DATA"), "/usr/share/datasets", cache]
    places = [place for root in roots if root for place in (Path(root), Path(root, name))]
    if name == "digits" and folder is None:
        places.insert(0, Path(__file__).with_name("data"))
    for place in places:
        for path in place / file, place / file.removesuffix(".gz"):
            if path.is_file():
                return path
    if folder is None and name in SOURCES:
        url, checksums = SOURCES[name]
        return download(url + file, cache / name / file, checksums[file], progress)
    cure = "leave --data-dir out and it is downloaded" if name in SOURCES else (
        "it comes with minidist, in tutorials/data")
    raise DatasetError(f"{file} ({name}) is in none of {', '.join(map(str, places))}: {cure}")


def download(url: str, path: Path, sha256: str, progress: Any = None) -> Path:
    """Fetch a file, going on where an earlier attempt ended; keep it if the checksum is right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    cure = "or get the file by other means and name its folder with --data-dir"
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            if answer.status != 206:  # the server sends it from the beginning
                have = 0
            total = have + int(answer.headers.get("Content-Length") or 0)
            bar = progress and progress(total, path.name, "B", have)
            with open(part, "ab" if have else "wb") as file:
                while have <= LARGEST and (block := answer.read(1 << 16)):
                    have += file.write(block)
                    if bar:
                        bar.advance(len(block))
            if bar:
                bar.close()
        if have > LARGEST:
            raise OSError(f"it sends more than {LARGEST} bytes")
        if have < total:
            raise OSError(f"the connection ended after {have} of {total} bytes")
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "code", None) != 416:  # 416: nothing is left to send
            raise DatasetError(f"{url}: {error}. Try again to go on from there, {cure}") from None
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == sha256:
        return part.replace(path)
    part.unlink()
    raise DatasetError(f"{url} has the SHA-256 {found}, not {sha256}: it was damaged on its way, "
                       f"or another file is there now. Try again, {cure}")


# ---- what is in them --------------------------------------------------------

def content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} can't be read: {error}") from None
    if len(data) > LARGEST:
        raise DatasetError(f"{path} unpacks to more than {LARGEST} bytes")
    return data


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """MNIST's format: 0, 0, 8 (it holds bytes), the number of dimensions; the size of each in
    four bytes, the highest first; the elements."""
    data, start = content(path), 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < start:
        raise DatasetError(f"{path} begins with {data[:4].hex(' ')}; an IDX file of bytes in "
                           f"{dimensions} dimensions begins with 00 00 08 0{dimensions}")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise DatasetError(f"{path} holds {len(data) - start} elements; its head says "
                           f"{' x '.join(map(str, shape))} = {math.prod(shape)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_mnist(part: str, find: Find) -> Arrays:
    images, labels = IDX_FILES[:2] if part == "train" else IDX_FILES[2:]
    return read_idx(find(images), 3)[:, None], read_idx(find(labels), 1)


def read_cifar10(part: str, find: Find) -> Arrays:
    """Records of a label and the red, green and blue planes of 32x32 pixels, in an archive."""
    path = find("cifar-10-binary.tar.gz")
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
    blocks: list[np.ndarray] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content(path)), mode="r:") as archive:
            for name in names:
                file = archive.extractfile(f"cifar-10-batches-bin/{name}")
                data = file.read() if file else b""
                blocks.append(np.frombuffer(data, np.uint8).reshape(-1, 3073))
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise DatasetError(f"{path} should hold cifar-10-batches-bin/{names[len(blocks)]}, records "
                           f"of 3073 bytes: {error}") from None
    rows = np.concatenate(blocks)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def read_digits(part: str, find: Find) -> Arrays:
    """8x8 pixels from 0 to 16 and the label, a line each. Of each class the first row, and then
    every fifth, are for testing: the same rows everywhere, once and for all."""
    path = find("digits.csv.gz")
    try:
        rows = np.array([line.split(b",") for line in content(path).split()]).astype(np.int64)
        images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1]
        if rows.min() < 0 or images.max() > 16:
            raise ValueError(f"found numbers from {rows.min()} to {images.max()}")
    except (ValueError, IndexError) as error:
        raise DatasetError(f"{path}: expected lines of 64 numbers from 0 to 16 and a label from 0 "
                           f"to 9, joined by commas: {error}") from None
    place = np.zeros(len(labels), int)  # of a row among those of its class
    for label in range(10):
        place[labels == label] = np.arange(np.count_nonzero(labels == label))
    chosen = (place % 5 == 0) == (part == "test")
    return images[chosen], labels[chosen]


if __name__ == "__main__":
    (images, labels), (test_images, _) = load("digits")
    print(f"{len(images)} digits to learn from, {len(test_images)} to be tested on. The first:\n")
    for row in images[0, 0]:
        print("    " + "".join(" .:-=+*#%"[int(pixel * 8)] * 2 for pixel in row))
    print(f"\n    is a {labels[0]}")
