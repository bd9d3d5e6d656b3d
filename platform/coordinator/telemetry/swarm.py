"""The machines of a run as a graph: who is connected to whom, and what the connections carry."""

from typing import Any

from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue
from coordinator.telemetry.run_table import machine_rows

MAX_NODES = 64  # machines in the graph: those that report, the oldest first
KEY_START = 16  # characters by which a report names a peer


def build_swarm(run: Run) -> dict[str, Any]:
    """Build the graph of the machines that report.

    A connection counts as soon as one of both ends reports it. What one end sends and the other
    receives is the same traffic: of two figures the higher one counts, because reports are of
    different moments.

    Returns:
        {"nodes": [{"id", "name", "person", "rate", "agrees"}, …], "links": [{"source", "target",
        "forward", "backward", "agrees", "relayed"}, …], "hidden": machines that are left out}.
        Rates are tokens/s and bytes/s; `agrees` is None while nothing was compared, `relayed` while
        neither end says whether a relay server is in between.
    """
    alive = sorted((row for row in machine_rows(run) if row["alive"]), key=lambda row: row["id"])
    shown = {row["id"]: row for row in alive[:MAX_NODES]}
    members = Membership.everywhere.filter(run=run, machine__in=list(shown))
    by_key = {
        key[:KEY_START]: str(machine)
        for machine, key in members.values_list("machine", "machine__key")
    }
    links: dict[tuple[str, str], dict[str, Any]] = {}
    live = report_queue.live_rows(run.pk)
    for machine in shown:
        for link in live.get(machine, {}).get("links") or ():
            peer = by_key.get(link["peer"])
            if peer and peer != machine:
                _add_report(links, machine, peer, link)
    return {
        "nodes": [
            {name: row[name] for name in ("id", "name", "person", "rate", "agrees")}
            for row in shown.values()
        ],
        "links": [links[pair] for pair in sorted(links)],
        "hidden": len(alive) - len(shown),
    }


def _add_report(
    links: dict[tuple[str, str], dict[str, Any]], machine: str, peer: str, report: dict[str, Any]
) -> None:
    """Add what `machine` reports of its connection to `peer`."""
    source, target = min(machine, peer), max(machine, peer)
    empty = {"source": source, "target": target, "forward": 0.0, "backward": 0.0}
    link = links.setdefault((source, target), empty | {"agrees": None, "relayed": None})
    sent, received = ("forward", "backward") if machine == source else ("backward", "forward")
    link[sent] = max(link[sent], report["sent_rate"])
    link[received] = max(link[received], report["received_rate"])
    if report["agrees"] is not None:
        link["agrees"] = report["agrees"] and link["agrees"] is not False
    if report.get("relayed") is not None:
        link["relayed"] = report["relayed"] or link["relayed"] is True
