"""A run whose tokens grow faster than its machines can train waits for its owner."""

import time

import torch
from helpers.updates.tickets import sign_ticket
from helpers.wait_for import wait_until

from barnraise.durable_io import write_atomically
from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.ledger.codec import encode
from barnraise.ledger.ledger import Ledger
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.verdicts import SignedVerdict, Verdict

OWNER = MIRROR = Identity(b"m" * 32)  # the key that signs the swarm's tickets
HOARDER = Identity(b"h" * 32)
BUDGET = 5_000_000


class HoardingPeer:
    """A key that received a ticket a day ago and states the tokens of that day at once."""

    def __init__(self, run, spec, folder, network, rate: int):
        self.now = time.time() - 86_400
        ticket = sign_ticket(
            MIRROR,
            HOARDER.key,
            run=run,
            volunteer="7" * 64,
            max_tokens_per_second=rate,
            issued=self.now,
            expires=self.now + 2 * 86_400,
        )
        config = ExchangeConfig(
            spec=spec,
            run=run,
            identity=HOARDER,
            incarnation="7" * 16,
            ticket=ticket,
            mirrors=frozenset([MIRROR.key]),
            clock=lambda: self.now,
        )
        self.ledger = Ledger(folder)
        self.exchange = Exchange(config, self.ledger, network.transport(HOARDER.key))
        self.exchange.start({})
        self.fragments = spec.model.fragments()

    def state_a_day(self, tokens: int) -> str:
        """Publish an update without content that states this many tokens; return its author."""
        self.now = time.time()
        with self.exchange.new_update(tokens) as update:
            for index, fragment in enumerate(self.fragments):
                update.add(index, *encode(torch.zeros(fragment.size, dtype=torch.int32)))
        return update.header.author

    def stop(self) -> None:
        self.exchange.stop()
        self.ledger.close()


def test_hoarded_tokens_suspend_a_run_until_its_owner_retracts_them(swarm, tmp_path):
    run = swarm(token_budget=BUDGET)
    ada = run.start("ada", max_tokens_per_second=3_000)
    run.until(lambda: ada.status.get("updates_sent", 0) > 0)
    key = ada.worker.key
    joined = ada.worker.joined
    hoarder = HoardingPeer(joined.run, run.spec, tmp_path / "hoarder", run.network, rate=3_000)
    try:
        hoarder.exchange.add_peers([Peer(key=key, addresses=[f"memory:{key[:16]}"])])
        wait_until(lambda: hoarder.exchange.stats.peers)
        author = hoarder.state_a_day(BUDGET)
        run.until(lambda: ada.status.get("activity") == "suspended")
        assert ada.status["ledger_tokens"] >= BUDGET and ada.thread.is_alive()
        verdict = Verdict(run=joined.run, after={author: 0}, issued=time.time())
        signed = OWNER.sign("verdict", verdict)
        ruling = SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})
        path = joined.folder.path / VERDICT_FOLDER / f"{digest(signed.body)}.json"
        write_atomically(path, ruling.model_dump_json().encode())
        run.until(lambda: ada.status.get("activity") == "training")
        assert ada.status["ledger_tokens"] < BUDGET
    finally:
        hoarder.stop()
    ada.leave()
