"""A bell on each rank: what wakes a sleeping reserve within the node.

A reserve must not poll MPI all the time (most MPIs spin in every wait), so it sleeps in the kernel, on a
datagram socket in the abstract name space, which leaves no file behind. The order itself comes by MPI; the
bell only says: look now. Ranks on other nodes, and systems without abstract sockets, look every few ms.
"""

from __future__ import annotations

import select
import socket
import sys

_PERIOD_S = 10e-3
_PERIOD_WITHOUT_BELL_S = 2e-3


class Bell:
    """The bell of the rank named `name`; names are unique among the jobs of a machine."""

    def __init__(self, name: str) -> None:
        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.bind(f"\0{name}")

    def sleep(self) -> None:
        """Sleep until somebody rings, or for a few ms."""
        if self._socket is None:
            select.select([], [], [], _PERIOD_WITHOUT_BELL_S)
        elif select.select([self._socket], [], [], _PERIOD_S)[0]:
            self._socket.recv(1)

    def ring(self, name: str) -> None:
        """Wake the rank of that name if it sleeps on this node; a rank elsewhere looks by itself."""
        if self._socket is not None:
            try:
                self._socket.sendto(b"!", f"\0{name}")
            except OSError:
                return

    def close(self) -> None:
        """Give the name back."""
        if self._socket is not None:
            self._socket.close()
