"""The job's key: 32 random bytes, from the environment or a file that only its owner reads.

Never from the command line: every user of a machine sees the arguments of every process.
"""
from __future__ import annotations

import argparse
import os
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence


def private(path: str) -> str:
    """The text of a file that nobody but its owner may read or write; else PermissionError."""
    with open(path) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise PermissionError(f"{path} can be read or written by others (its mode is "
                                  f"{mode:04o}, expected 0600): chmod 600 {path}, and make "
                                  "another key if it was so for long")
        return file.read(1000)


def key_of(env: Mapping[str, str]) -> bytes | None:
    """The key that MINIDIST_KEY (64 hex digits) or MINIDIST_KEY_FILE gives; None: there is none.

    Raises ValueError or OSError, which never show the key."""
    text, name = env.get("MINIDIST_KEY", ""), "MINIDIST_KEY"
    if not text and env.get("MINIDIST_KEY_FILE"):
        name = f"the file {env['MINIDIST_KEY_FILE']} (MINIDIST_KEY_FILE)"
        text = private(env["MINIDIST_KEY_FILE"]).strip()
        if not text:
            raise ValueError(f"{name} is empty: `minidist keygen FILE` makes a key")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if text and len(key) != 32:
        raise ValueError(f"{name} is set, but not to 64 hex digits, which are 32 random bytes: "
                         "`minidist keygen` makes them")
    return key or None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "minidist keygen", description="Make a key for a job: 32 random bytes as 64 hex digits. "
        "All its nodes need the same one, in the environment variable MINIDIST_KEY, or in a file "
        "that only you may read and that MINIDIST_KEY_FILE names.")
    parser.add_argument("file", nargs="?", metavar="FILE",
                        help="a new file to write it to, with mode 0600; else it is printed")
    path = parser.parse_args(argv).file
    key = secrets.token_hex(32)
    if path is None:
        print(key)
        return 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        print(f"minidist keygen: error: {path}: {error.strerror}", file=sys.stderr)
        return 2
    with os.fdopen(handle, "w") as file:
        file.write(key + "\n")
    return 0
