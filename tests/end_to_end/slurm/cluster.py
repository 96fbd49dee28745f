"""A real SLURM of several nodes on this one machine: configured, started and stopped, with nothing left behind.

    python tests/end_to_end/slurm/cluster.py start /tmp/slurm     # as root, with Debian's packages slurm-wlm and munge
    export SLURM_CONF=/tmp/slurm/slurm.conf            # as it says: now sinfo, sbatch, ... speak to this cluster
    python tests/end_to_end/slurm/cluster.py stop /tmp/slurm      # also after a start that failed; twice does no harm

Everything is in the folder: configuration, MUNGE's key and socket, state, spool and logs. Ports are free ones of this
machine, so that clusters in several folders do not meet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
PORTS = range(17000, 20000, 100)
"""Where to look for the ports of a cluster, which takes one for its controller and one for each node."""
CONFIGURATION = Path(__file__).with_name("slurm.conf")


class Cluster:
    """One controller and the nodes n1, n2, ..., each with a daemon of its own, on this machine.

        with Cluster(Path("/tmp/slurm")) as cluster:
            cluster.run("sbatch", "--nodes=2", "job.sh")

    Args:
        folder: of everything that it writes, to be made; a short path, as it holds a socket.
        num_nodes: number of nodes.
        cpus_per_node: cores that SLURM gives out on each, whatever the machine has.
    """

    def __init__(self, folder: Path, *, num_nodes: int = 4, cpus_per_node: int = 4) -> None:
        self.folder = folder.resolve()
        self.nodes = tuple(f"n{index}" for index in range(1, num_nodes + 1))
        self.configuration = self.folder / "slurm.conf"
        self._cpus_per_node = cpus_per_node
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def obstacle() -> str:
        """Why no cluster can be started here; empty: it can."""
        missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
        if missing:
            return f"SLURM is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge"
        return "" if os.geteuid() == 0 else "SLURM's daemons run jobs as root, and this is another user"

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """For commands that are to speak to this cluster; without what an outer one says of its job."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH_"))}
        return inherited | {"PATH": _path(), "SLURM_CONF": str(self.configuration)}

    def start(self, *, timeout: float = 30.0) -> None:
        """Write the configuration, start the daemons and return when every node is idle.

        Raises:
            RuntimeError: SLURM is not installed, or this is not root.
            FileExistsError: the folder exists.
            TimeoutError: it did not come up within `timeout` seconds; says what the daemons logged. All are stopped.
        """
        if obstacle := self.obstacle():
            raise RuntimeError(f"cannot start SLURM: {obstacle}")
        if self.folder.exists():
            raise FileExistsError(f"got {self.folder}, expected a folder that does not exist; stop the cluster there")
        try:
            self._configure()
            self._start_munge(timeout)
            self._start_daemon("slurmctld", "-D", name="slurmctld")
            for node in self.nodes:
                self.start_node(node)
            self.wait_for_nodes("idle", timeout=timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the daemons and what they run, and remove the folder; idempotent, and whoever started them.

        Does nothing where the folder is not that of such a cluster: another SLURM may run there.
        """
        if f"={self.folder}/state".encode() not in _read(self.configuration):
            return
        self._kill_all(lambda: [*self.daemon_pids(), *self.task_pids()])
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self.folder)

    def run(self, *command: str) -> str:
        """What a command of SLURM's prints.

        Raises:
            RuntimeError: it failed; says what it complained of.
        """
        result = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=30
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}: status {result.returncode}: {result.stderr.strip()}")
        return result.stdout.strip()

    def kill_node(self, node: str) -> None:
        """SIGKILL to the slurmd of `node` and to all that it runs, as if its power were cut."""
        self._kill_all(lambda: [*self.daemon_pids(node), *self.task_pids(f"SLURMD_NODENAME={node}")])
        self._daemons.pop(node).wait()

    def start_node(self, node: str) -> None:
        """Start the slurmd of `node`, for the first time or again."""
        (self.folder / node / "spool").mkdir(parents=True, exist_ok=True)
        self._start_daemon("slurmd", "-D", "-N", node, name=node)

    def wait_for_nodes(self, state: str, *, timeout: float, nodes: Sequence[str] = ()) -> None:
        """Return when these nodes, or all, are in `state` as sinfo names it."""
        expected = {f"{node} {state}" for node in nodes or self.nodes}

        def is_reached() -> bool:
            try:
                return expected <= set(self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines())
            except RuntimeError:  # the controller does not answer yet; the deadline is the caller's
                return False

        self.wait_until(is_reached, f"nodes that are {state}", timeout=timeout)

    def wait_until(self, is_true: Callable[[], bool], what: str, *, timeout: float) -> None:
        """Poll until `is_true()`.

        Raises:
            TimeoutError: not within `timeout` seconds; says what was waited for, and the ends of SLURM's logs.
        """
        deadline = time.monotonic() + timeout
        while not is_true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:.0f} s for {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of the logs of the daemons."""
        texts = {path.name: path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))}
        return "\n".join(f"-- {name}\n{text[-2000:]}" for name, text in texts.items() if text)

    def task_pids(self, *variables: str) -> list[int]:
        """Processes of the jobs of this cluster that have all these `NAME=value` in their environment."""
        expected = {f"SLURM_CONF={self.configuration}", *variables}
        pids = []
        for pid in _pids():
            present = _read(Path("/proc", str(pid), "environ")).decode(errors="replace").split("\0")
            # A shell that speaks to the cluster is not in a job.
            if expected.issubset(present) and any(variable.startswith("SLURM_JOB_ID=") for variable in present):
                pids.append(pid)
        return pids

    def daemon_pids(self, node: str = "") -> list[int]:
        """SLURM's and MUNGE's own processes, all or those of a node, by where they were started."""
        folder = self.folder / node
        pids = []
        for pid in _pids():
            try:
                program, started_in = (Path(os.readlink(f"/proc/{pid}/{link}")) for link in ("exe", "cwd"))
            except OSError:  # it has ended, or is the kernel's
                continue
            is_here = folder in (started_in, *started_in.parents)
            if is_here and program.name.startswith(("slurm", "munge")):
                pids.append(pid)
        return pids

    def _kill_all(self, find: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + 30
        while pids := find():  # one that is being killed may just have started another
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} of {self.folder} do not end 30 s after SIGKILL")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _configure(self) -> None:
        num_nodes = len(self.nodes)
        port = _free_ports(num_nodes + 1)
        text = CONFIGURATION.read_text(encoding="utf-8").format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            port=port,
            first_port=port + 1,
            last_port=port + num_nodes,
            num_nodes=num_nodes,
            cpus_per_node=self._cpus_per_node,
        )
        self.folder.mkdir(parents=True)
        self.configuration.write_text(text, encoding="utf-8")
        (self.folder / "state").mkdir()

    def _start_munge(self, timeout: float) -> None:
        self.run("mungekey", "--create", f"--keyfile={self.folder / 'munge.key'}")
        files = [f"--{name}-file={self.folder / f'munge.{name}'}" for name in ("key", "pid", "seed")]
        munge_socket = self.folder / "munge.socket"
        # --force: the folder may be closed to other users, who have no jobs here.
        self._start_daemon("munged", "--foreground", "--force", f"--socket={munge_socket}", *files, name="munged")
        self.wait_until(munge_socket.exists, "munged", timeout=timeout)

    def _start_daemon(self, *command: str, name: str) -> None:
        # Where a daemon is started, its processes are found again: they replace their environments.
        started_in = self.folder / name if name in self.nodes else self.folder
        with (self.folder / f"{name}.log").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=started_in,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where Debian has daemons, and users have none


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for first in PORTS:
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError(f"got no {count} free ports in a row at {PORTS}, expected some; stop other clusters")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-nodes", type=int, default=4, help="for start (default: 4)")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.folder, num_nodes=arguments.num_nodes)
    if arguments.action == "stop":
        cluster.stop()
        return
    try:
        cluster.start()
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"export SLURM_CONF={cluster.configuration}")


if __name__ == "__main__":
    main()
