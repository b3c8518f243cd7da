"""The network interface through which this host reaches another, by name, for libraries that want to be told (gloo)."""

from __future__ import annotations

import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def loopback() -> str:
    """The interface on which a host talks to itself."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_towards(host: str) -> str | None:
    """The interface that packets to ``host`` leave by, or the one that has its address; None when there is no route or no way to tell."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only asks for the route
            address = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
    except OSError:
        return None


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, or None (it has none, or this is not Linux)."""
    if sys.platform != "linux":
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
