"""Create the exchange of a run, as the owner of this machine allows it."""

from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.ledger.ledger import Ledger
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import Transport
from barnraise.planning.limits import Limits
from barnraise.training.join import JoinedRun


def create_exchange(
    joined: JoinedRun, limits: Limits, ledger: Ledger, transport: Transport | None
) -> Exchange:
    """Create a run's exchange, which connects to nobody yet; None is the transport iroh."""
    identity = joined.coordinator.identity
    config = ExchangeConfig(
        spec=joined.spec,
        run=joined.run,
        identity=identity,
        incarnation=joined.folder.label.incarnation,
        ticket=joined.ticket,
        mirrors=frozenset(joined.spec.roots),
        clock=joined.coordinator.now,
        reincarnate=joined.folder.renew_incarnation,
        announced=limits.announce,
        port_mapping=limits.port_mapping,
        relays=limits.relay,
    )
    exchange = Exchange(config, ledger, transport or IrohTransport(identity.secret))
    if limits.uplink is not None:
        exchange.set_uplink_limit(limits.uplink)
    if limits.download is not None:
        exchange.set_download_limit(limits.download)
    return exchange
