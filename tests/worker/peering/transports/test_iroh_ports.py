"""Test on which ports iroh listens where it accepts peers from all networks."""

import pytest

from barnraise.peering.addresses.addresses import port_of
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.signing import Identity


async def test_one_port_serves_both_versions_of_ip() -> None:
    transport = IrohTransport(Identity(b"1" * 32).secret)
    await transport.start()
    try:
        port = transport.mappable_port
        assert {port_of(address) for address in transport.addresses()} == {port}
        taken = IrohTransport(Identity(b"2" * 32).secret, port=port)
        with pytest.raises(OSError, match="cannot listen"):
            await taken.start()
    finally:
        await transport.close()


async def test_port_on_this_computer_alone_is_not_mapped() -> None:
    transport = IrohTransport(Identity(b"1" * 32).secret, "127.0.0.1")
    await transport.start()
    try:
        assert transport.mappable_port == 0
    finally:
        await transport.close()
