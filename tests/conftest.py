"""Tests see the repository as an installed minidist: `import minidist_transports`."""
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

if "minidist_transports" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "minidist_transports", ROOT / "transports" / "__init__.py",
        submodule_search_locations=[str(ROOT / "transports")])
    module = importlib.util.module_from_spec(spec)
    sys.modules["minidist_transports"] = module
    spec.loader.exec_module(module)

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes test side by side: a core for each
    import minidist

    minidist.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """What tests recorded as their "report" stands at the end, side by side runs included."""
    for test in terminalreporter.getreports("passed"):
        for name, text in test.user_properties:
            if name == "report":
                terminalreporter.section(test.nodeid)
                terminalreporter.write_line(text)
