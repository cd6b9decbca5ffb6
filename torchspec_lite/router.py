"""The receiver's socket: bound to one named interface, encrypted and closed to strangers when there are keys."""

import zmq

from torchspec_lite.errors import UserError
from torchspec_lite.keys import ZAP_ENDPOINT, ReceiverKeys, check_bind_host, is_loopback
from torchspec_lite.peer import limit_handshake

MESSAGES_READ_AHEAD = 2  # per connection, before the connection itself is held back


def open_router(context: zmq.Context, host: str, port: int, keys: ReceiverKeys | None, unencrypted: bool,
                max_frame_bytes: int, heartbeat_s: float) -> tuple[zmq.Socket, zmq.Socket | None]:
    """Bind a ROUTER, and with keys the socket on which ZeroMQ asks whom to let in (ZAP).

    A frame larger than `max_frame_bytes` cuts its connection before memory is allocated for it. Raises UserError for
    a host that cannot or must not be bound.
    """
    check_bind_host(host)
    zap = None
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    socket.rcvhwm = MESSAGES_READ_AHEAD
    socket.maxmsgsize = max_frame_bytes
    limit_handshake(socket, heartbeat_s)
    if keys:
        zap = context.socket(zmq.REP)
        zap.bind(ZAP_ENDPOINT)
        socket.zap_domain = b"torchspec-lite"
        socket.curve_server = True
        socket.curve_secretkey = keys.own.secret.encode()
    try:
        socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        raise UserError(f"stream.host {host!r}, port {port}: {error.strerror}; give an address or the name of an "
                        "interface of this machine") from error
    if not keys and not unencrypted and not is_loopback(bound_endpoint(socket)):
        raise UserError(f"stream.host {host!r} is not loopback, so anyone on its network could read and send: "
                        "leave stream.encrypt at auto, or set it to off where you trust the network")
    return socket, zap


def bound_endpoint(socket: zmq.Socket) -> str:
    """`tcp://address:port` with the port that the system gave."""
    return socket.last_endpoint.decode().rstrip("\0")
