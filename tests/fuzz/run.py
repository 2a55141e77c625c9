"""The long job: atheris searches for inputs that reach new code.

    python -m venv .fuzz && .fuzz/bin/pip install atheris numpy
    .fuzz/bin/python tests/fuzz/run.py SECONDS [TARGET ...]

for so many seconds each of the targets of targets.py, by default all. It begins with the seeds and
with corpus/TARGET.txt, an input in hex on each line, and leaves there what is worth keeping: as few
inputs as reach all that was reached, and what failed, at the end. Every run of the tests begins
with them. The exit code is 0 if nothing failed.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
import conftest  # noqa: E402, F401 - finds minidist_transports

with atheris.instrument_imports(include=["minidist_transports"]):
    import targets


def search(name, seconds):
    """Fuzz one target; True if nothing failed."""
    path = HERE / "corpus" / f"{name}.txt"
    with tempfile.TemporaryDirectory() as scratch:
        found, least = Path(scratch, "found"), Path(scratch, "least")
        for folder in (found, least, Path(scratch, "failed")):
            folder.mkdir()
        for i, data in enumerate(targets.corpus(name)):
            (found / str(i)).write_bytes(data)

        # A program of its own, as libFuzzer starts itself once more to merge.
        program = Path(scratch, "fuzz")
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} --one {name} "$0" "$@"\n')
        program.chmod(0o700)

        def fuzz(*options):
            done = subprocess.run([program, *map(str, options)], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        code, text = fuzz(f"-max_total_time={seconds}", "-max_len=600", "-print_final_stats=1",
                          f"-artifact_prefix={scratch}/failed/", found)
        fuzz("-merge=1", least, found)
        failed = list(Path(scratch, "failed").iterdir())
        kept = [each.read_bytes().hex() for each in sorted(least.iterdir()) + failed]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in kept))
    number = [line.split()[-1] for line in text.splitlines() if "number_of_executed" in line]
    print(f"{name}: {' '.join(number)} inputs, {len(kept)} kept, "
          f"{'failed: ' + text[-2000:] if code or failed else 'nothing failed'}", flush=True)
    return not (code or failed)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        atheris.Setup(sys.argv[3:], targets.TARGETS[sys.argv[2]])
        atheris.Fuzz()
    good = [search(name, int(sys.argv[1])) for name in sys.argv[2:] or targets.TARGETS]
    sys.exit(not all(good))
