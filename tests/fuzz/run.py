"""The long job: atheris searches for inputs that reach new code.

    python -m venv .fuzz && .fuzz/bin/pip install atheris numpy
    .fuzz/bin/python tests/fuzz/run.py frames -max_total_time=3600 tests/fuzz/corpus/frames

Names of targets: those of targets.py, `all` in turn for SECONDS each:

    .fuzz/bin/python tests/fuzz/run.py all 300

What it finds goes into tests/fuzz/corpus/TARGET/, small: with `-merge=1 NEW OLD` libFuzzer keeps
what adds to the coverage. Every run of the tests begins with the corpus.
"""
import subprocess
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
import conftest  # noqa: E402, F401 - finds minidist_transports

with atheris.instrument_imports(include=["minidist_transports"]):
    import targets


def every(seconds):
    failed = []
    for name in targets.TARGETS:
        print(f"== {name}", flush=True)
        folder = HERE / "corpus" / name
        done = subprocess.run([
            sys.executable, __file__, name, f"-max_total_time={seconds}", "-max_len=600",
            "-print_final_stats=1", f"-artifact_prefix={folder}/", str(folder)],
            capture_output=True, text=True)
        print("\n".join(line for line in (done.stdout + done.stderr).splitlines()
                        if "stat::" in line or "DONE" in line or "Error" in line), flush=True)
        failed += [name] * (done.returncode != 0)
    return failed


if __name__ == "__main__":
    name = sys.argv[1]
    if name == "all":
        sys.exit(f"failed: {failed}" if (failed := every(int(sys.argv[2]))) else 0)
    if not (folder := HERE / "corpus" / name).exists():
        folder.mkdir(parents=True)
        for i, each in enumerate(targets.seeds(name)):
            (folder / f"seed{i}").write_bytes(each)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], targets.TARGETS[name])
    atheris.Fuzz()
