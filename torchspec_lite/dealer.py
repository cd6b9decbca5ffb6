"""The sender's socket: connects to one receiver, encrypted when there are keys."""

import zmq

from torchspec_lite.control import MAX_CONTROL
from torchspec_lite.keys import SenderKeys
from torchspec_lite.peer import limit_handshake


def open_dealer(context: zmq.Context, keys: SenderKeys | None, heartbeat_s: float) -> zmq.Socket:
    """A DEALER, not connected yet, so that its owner can watch the connection from its start."""
    socket = context.socket(zmq.DEALER)
    socket.immediate = True
    socket.linger = 0
    socket.sndhwm = 0  # credits bound what is queued
    socket.maxmsgsize = MAX_CONTROL
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
    limit_handshake(socket, heartbeat_s)
    if keys:
        socket.curve_serverkey = keys.receiver_public.encode()
        socket.curve_publickey = keys.own.public.encode()
        socket.curve_secretkey = keys.own.secret.encode()
    return socket
