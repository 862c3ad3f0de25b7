"""Two hosts made on one machine: network namespaces joined by a pair of virtual interfaces, which can be slowed.

Each host has a name, addresses and /etc/hosts of its own. Needs root; `TwoHosts.missing` says what is not there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("h1", "h2")
ADDRESSES = ("10.77.43.1", "10.77.43.2")

AGENT = """#!/bin/bash
# Stands for ssh: agent [options] HOST COMMAND...
while [[ "${{1:-}}" == -* ]]; do shift; done
case $1 in {cases} *) echo "unknown host $1" >&2; exit 1;; esac
shift
exec ip netns exec $space unshare --uts --mount bash -c "hostname $host; mount --bind {hosts} /etc/hosts; $*"
"""


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


class TwoHosts:
    """In a `with` block there are the hosts h1 and h2, joined by a link of `rate` (as tc writes it), which lets `burst`
    pass at once."""

    def __init__(self, rate: str, burst: str = "256kb") -> None:
        self._rate, self._burst = rate, burst
        self._spaces = [f"shoal-{os.getpid()}-{name}" for name in NAMES]
        self._folder = Path(tempfile.mkdtemp(prefix="two-hosts-"))
        self.agent = self._folder / "agent"

    @staticmethod
    def missing() -> str:
        """Why there cannot be two hosts here, or an empty text."""
        tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
        if tools:
            return f"there is no {tools[0]}"
        name = f"shoal-{os.getpid()}-try"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        return f"no network namespace can be made ({made.stderr.strip()})" if made.returncode else ""

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wrapped(self, command: list[str]) -> list[str]:
        """The command, an mpiexec with its arguments, to be run on h1 with two of its ranks on each host."""
        options = ["--mca", "plm_ssh_agent", str(self.agent), "--host", "h1:2,h2:2", "--map-by", "slot"]
        return [str(self.agent), "h1", shlex.join([command[0], *options, *command[1:]])]

    def _make(self) -> None:
        hosts = self._folder / "hosts"
        named = zip(ADDRESSES, NAMES, strict=True)
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in named))
        of = zip(NAMES, ADDRESSES, self._spaces, strict=True)
        cases = " ".join(f"{name}|{address}) host={name} space={space};;" for name, address, space in of)
        self.agent.write_text(AGENT.format(cases=cases, hosts=hosts))
        self.agent.chmod(0o755)
        for space in self._spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        first, second = self._spaces
        _ip("link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link0", "netns", second)
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "link0")
            _ip("-n", space, "link", "set", "link0", "up")
            shape = (
                f"ip netns exec {space} tc qdisc replace dev link0 root tbf rate {self._rate} "
                f"burst {self._burst} latency 50ms"
            )
            subprocess.run(shape.split(), capture_output=True, check=True)
