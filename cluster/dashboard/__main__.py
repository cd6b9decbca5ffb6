"""The dashboard as the driver's child process: run directory and listening socket by argument, token on the first line
of standard input, whose end is the end of the process."""

import socket
import sys
from pathlib import Path

from cluster.dashboard.serve import serve

if __name__ == "__main__":
    token = sys.stdin.buffer.readline().strip().decode() or None
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), token, parent=True)
