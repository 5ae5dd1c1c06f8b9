"""Carries frames between two network interfaces, each frame later than it came or not at all.

python impaired_link.py ONE OTHER DELAY LOSS, with the delay in seconds and the lost share of the frames.
"""

import random
import select
import socket
import sys
import time
from collections import deque

ALL_PROTOCOLS, SOL_PACKET, SO_RCVBUFFORCE = 3, 263, 33
PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 15, 23
"""Linux's options: frames begin with what the card still has to do, such as checksums; own frames are left out."""
MOST_BYTES = 1 << 17


def packets(interface: str) -> socket.socket:
    """Opens the interface for its frames."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        opened.setsockopt(SOL_PACKET, option, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    opened.bind((interface, ALL_PROTOCOLS))
    return opened


def carry(one: str, other: str, delay: float, loss: float) -> None:
    """Carries frames until the process is killed."""
    ends, waiting, drawn = [packets(one), packets(other)], deque[tuple[float, socket.socket, bytes]](), random.Random(0)
    while True:
        due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for each in select.select(ends, [], [], due)[0]:
            frame = each.recv(MOST_BYTES)
            if drawn.random() >= loss:
                waiting.append((time.monotonic() + delay, ends[each is ends[0]], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            target.send(frame)


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
