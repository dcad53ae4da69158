"""Several hosts on one machine: namespaces of the kernel, on a bridge that is in a namespace too.

Nothing of it is seen from the machine's own network. No namespace has a name, so none can be left over: each lives as long as
a shell in it waits for its standard input, which ends with the test, however that ends; and since the shell is the first
process of its namespace, the kernel then kills all others in it.

The thread of the test stands at the bridge, in the network of none of the hosts: what it starts and connects to is there. So
the receiver of the calls and those who send events are outside, and reach every host.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.system.harness import ROOT

#: The network of the bridge; as no route leads out of it, it may be anybody's.
NETWORK: Final = "10.77.0"

#: Where the thread of the test is.
OUTSIDE: Final = f"{NETWORK}.1"

#: From <sched.h>: the namespace of networks.
_CLONE_NEWNET: Final = 0x40000000

_OWN: Final = ("unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

#: What is run in a new host: its name, and then nothing for as long as somebody holds the other end.
_LIFE: Final = 'hostname "$0" && ip link set lo up && echo up && read -r _'


def impossible() -> str | None:
    """Why there can be no hosts here; None where there can."""
    missing = [name for name in ("ip", "iptables", "hostname", "nsenter", "unshare") if not shutil.which(name)]
    if missing:
        return f"several hosts need the programs {', '.join(missing)} (Debian: iproute2, iptables, hostname, util-linux)"
    trial = "hostname trial && ip link add name trial type bridge && iptables -A INPUT -s 10.0.0.1 -j DROP"
    tried = subprocess.run([*_OWN, "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"this user may not make networks of hosts (it takes root): {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """A host with a network, a name and processes of its own; `address` is its address, "" where it has none."""

    def __init__(self, *, name: str, address: str = "") -> None:
        self.name = name
        self.address = address
        self._shell = subprocess.Popen([*_OWN, "sh", "-c", _LIFE, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._shell.stdout is not None
        if self._shell.stdout.readline() != b"up\n":
            raise RuntimeError(f"the host {name} does not come up")
        (self.pid,) = (int(pid) for pid in Path(f"/proc/{self._shell.pid}/task/{self._shell.pid}/children").read_text().split())

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` as a process of this host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount", f"--wdns={ROOT}"]
        return [*enter, *command]

    def on_network(self, *command: str) -> list[str]:
        """The command line that runs `command` in this host's network, as a process of the machine."""
        return ["nsenter", f"--target={self.pid}", "--net", *command]

    def run(self, *command: str) -> None:
        """Run a command in this host's network."""
        _run(self.on_network(*command))

    def power_off(self) -> None:
        """All of its processes are gone at once, and the host with them."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.wait(10)
        self._shell.stdout.close()

    # -- its cable ----------------------------------------------------------------------------------------------

    def unplug(self) -> None:
        """What it sends, and what is sent to it, is gone; nobody is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def plug(self) -> None:
        """It is reached again."""
        self.run("ip", "link", "set", "eth0", "up")


class Network:
    """The bridge, and the hosts on it. Made by `network`."""

    def __init__(self) -> None:
        self._hosts: list[Host] = []
        self._cuts: list[tuple[Host, str]] = []

    def host(self, name: str, number: int) -> Host:
        """A new host, whose address ends in `number`."""
        host = Host(name=name, address=f"{NETWORK}.{number}")
        self._hosts.append(host)
        port = f"port{number}"
        _run(["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)])
        _run(["ip", "link", "set", port, "master", "bridge", "up"])
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.plug()
        return host

    def move(self, address: str, host: Host) -> None:
        """Give an address to a host. All others forget whose it was: what moves an address tells them, or they would go on asking
        the old one for most of a minute.
        """
        host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for other in self._hosts:
            other.run("ip", "neighbour", "flush", "to", address)
        _run(["ip", "neighbour", "flush", "to", address])

    def cut(self, host: Host, other: Host, *addresses: str) -> None:
        """Packets between two hosts are dropped on arrival; `addresses` are further ones of `other`."""
        for where, sender in [(other, host.address), *((host, address) for address in (other.address, *addresses))]:
            where.run("iptables", "-A", "INPUT", "-s", sender, "-j", "DROP")
            self._cuts.append((where, sender))

    def heal(self) -> None:
        """All cuts are mended."""
        for where, sender in self._cuts:
            where.run("iptables", "-D", "INPUT", "-s", sender, "-j", "DROP")
        self._cuts.clear()

    def close(self) -> None:
        """Power off all hosts."""
        for host in self._hosts:
            host.power_off()


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network; within the block the calling thread, and every thread that it starts, is at `OUTSIDE`."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    bridge = Host(name="bridge", address=OUTSIDE)
    net = Network()
    try:
        _enter(f"/proc/{bridge.pid}/ns/net")
        _run(["ip", "link", "add", "name", "bridge", "type", "bridge"])
        _run(["ip", "address", "add", f"{OUTSIDE}/24", "dev", "bridge"])
        _run(["ip", "link", "set", "bridge", "up"])
        yield net
    finally:
        _enter(f"/proc/self/fd/{before}")
        os.close(before)
        net.close()
        bridge.power_off()


def _enter(namespace: str) -> None:
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(fd)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
