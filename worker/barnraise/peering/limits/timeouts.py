"""How long a peer may take for each stage of a connection, in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionTimeouts:
    """The stages in their order; those of a peer that connects are as short as a distant one needs.

    Attributes:
        dial_seconds: Until a dialled peer has answered at one of its addresses.
        quic_handshake_seconds: Until an incoming QUIC connection is established.
        quic_stream_seconds: After that, until its stream is open.
        quic_probe_seconds: Until a machine whose reachability is tested has answered.
        tcp_connect_seconds: Until a TCP connection is established; slower machines are too far
            away to average weights with.
        tls_connect_seconds: Until a machine that is dialled by TCP has proven its key.
        tls_handshake_seconds: For TLS's handshake.
        tls_proof_seconds: Until both machines have proven their keys over TLS.
        tls_goodbye_seconds: For TLS's farewell.
        hello_seconds: Until a peer that connected has introduced itself.
        dialled_hello_seconds: Until a peer that this machine dialled has: its line may be slow.
        keep_alive_seconds: Between two frames that show over TLS that this machine is there.
        peer_silence_seconds: Without a message after which a peer is disconnected; the longest
            interval between two States is shorter by a quarter.
        goodbye_seconds: After a peer's goodbye until it is disconnected.
        close_seconds: For the last frames of a channel that is closed.
    """

    dial_seconds: float = 15.0
    quic_handshake_seconds: float = 5.0
    quic_stream_seconds: float = 2.0
    quic_probe_seconds: float = 5.0
    tcp_connect_seconds: float = 2.0
    tls_connect_seconds: float = 5.0
    tls_handshake_seconds: float = 5.0
    tls_proof_seconds: float = 5.0
    tls_goodbye_seconds: float = 1.0
    hello_seconds: float = 2.0
    dialled_hello_seconds: float = 10.0
    keep_alive_seconds: float = 10.0
    peer_silence_seconds: float = 20.0
    goodbye_seconds: float = 5.0
    close_seconds: float = 2.0

    @property
    def silence_seconds(self) -> float:
        """Without a byte over TLS after which a machine counts as gone: two frames may be late."""
        return 3 * self.keep_alive_seconds


TIMEOUTS = ConnectionTimeouts()
