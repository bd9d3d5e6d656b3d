"""Test which checkpoints a run's page shows, and how it says that the model can be fetched."""

import pytest
from django.test import Client
from helpers.site.pages import open_client

from barnraise.protocol import reports
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import Checkpoint, CheckpointRow
from coordinator.telemetry.rollup import drain_queue
from coordinator.web.model_card import MAX_SHOWN, build_model_card


def build_row(tokens: int, serving: int = 0, **changed) -> CheckpointRow:
    fields = {
        "machines": 2,
        "people": 2,
        "holders": ("barn", "loft"),
        "alive": serving,
        "confirmed": True,
        "disputed": False,
        "serving": serving,
        **changed,
    }
    return CheckpointRow(Checkpoint(tokens=tokens, digest=f"{tokens:064x}", size=8), **fields)


def test_card_shows_best_and_last_and_folds_what_nobody_sends():
    rows = [build_row(tokens * 1000, serving=2 * (tokens == 9)) for tokens in range(9, 0, -1)]
    losses = {9_000: 2.5, 4_000: 2.1, 3_000: 2.2}
    card = build_model_card("dawn", rows, losses)
    assert [(line.row.checkpoint.tokens, line.label) for line in card.shown] == [
        (9_000, "last"),
        (4_000, "best"),
    ]
    assert len(card.folded) == 7 and not any(line.can_be_fetched for line in card.folded)
    assert card.sharing == ("barn", "loft") and card.others_sharing == 0
    assert card.last and card.last.can_be_fetched


def test_card_of_many_checkpoints_shows_every_nth():
    rows = [build_row(tokens, serving=1) for tokens in range(100, 0, -1)]
    card = build_model_card("dawn", rows, {})
    assert len(card.shown) <= MAX_SHOWN and len(card.shown) + len(card.folded) == 100
    assert card.shown[0].label == "last" and "best" not in [line.label for line in card.shown]


def test_disputed_checkpoint_is_never_the_best():
    rows = [build_row(2_000), build_row(1_000, disputed=True)]
    card = build_model_card("dawn", rows, {2_000: 3.0, 1_000: 0.1})
    assert [line.label for line in card.shown] == ["best, last"]
    assert build_model_card("dawn", [], {}).last is None


def test_checkpoint_of_one_person_with_an_invented_loss_is_never_the_best():
    rows = [build_row(2_000), build_row(1_500, confirmed=False, people=1), build_row(1_000)]
    losses = {2_000: 2.0, 1_500: 0.01, 1_000: 3.0}
    card = build_model_card("dawn", rows, losses)
    assert [line.label for line in card.shown if line.label] == ["best, last"]
    alone = [build_row(1_500, confirmed=False, people=1)]
    assert build_model_card("dawn", alone, losses).shown[0].label == "best, last", (
        "in a run of one person nobody else could confirm it"
    )


def test_checkpoint_of_strangers_alone_is_not_the_last():
    """Machines whose owners' word counts for nothing announce weights of more tokens."""
    rows = [build_row(9_000, serving=1, confirmed=False, people=0), build_row(2_000)]
    card = build_model_card("dawn", rows, {})
    assert card.last and card.last.row.checkpoint.tokens == 2_000


def test_commands_name_the_run():
    card = build_model_card("dawn", [build_row(1_000)], {})
    assert card.fetch_command == "barnraise fetch dawn model"
    assert "--format gguf" in card.ollama_commands and "ollama run dawn" in card.ollama_commands
    compile(card.transformers_snippet, "snippet", "exec")
    dawn = build_model_card("夜明け", [build_row(1_000)], {}).ollama_commands
    assert "fetch 夜明け" in dawn and "ollama run model" in dawn, "Ollama takes ASCII names alone"


def is_model_card_swapped(client: Client, run: Run, sentence: str) -> bool:
    """Return whether what an open page fetches again replaces its card by one with a sentence."""
    TtlCache.clear_all()
    html = client.get(f"/runs/{run.slug}/checkpoints/").content.decode()
    checkpoints, _, card = html.partition('id="model"')
    return 'id="checkpoints"' in checkpoints and "hx-swap-oob" in card and sentence in card


@pytest.mark.django_db
def test_page_says_who_shares_the_model(
    person, launched_run, numbered_report, volunteer, built_frontend
):
    run, ada = launched_run(person(organiser=True))
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    client = open_client(run.owner)
    # The page has a place for the card before the first checkpoint.
    assert '<div id="model" hidden></div>' in client.get(f"/runs/{run.slug}/").content.decode()
    assert is_model_card_swapped(client, run, "hidden")
    older = reports.CheckpointView(
        tokens=1_000, vector="a" * 64, digest="c" * 64, checksum="0" * 16, size=4_000
    )
    newer = older.model_copy(update={"tokens": 2_000, "vector": "b" * 64, "digest": "d" * 64})
    point = reports.MeasuredLoss(kind="validation", tokens=2_000, loss=4.25)
    for machine in (ada, bob):
        machine.report(run, numbered_report(1, checkpoint=older, anchor=None))
        machine.report(run, numbered_report(2, checkpoint=newer, anchor=None, points=[point]))
    drain_queue()
    assert is_model_card_swapped(client, run, "The weights at 2.00 K tokens")
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert "hx-swap-oob" not in page
    assert "Get the model" in page and "Shared now by" in page
    assert f"barnraise fetch {run.slug} model" in page and "4.250" in page
    assert page.count("Train on</button>") == 1, "nobody has the older weights any longer"
    assert "1 more checkpoint<" in page
    Run.objects.filter(pk=run.pk).update(status="finished")
    run.memberships.update(activity="left")
    TtlCache.clear_all()
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert is_model_card_swapped(client, run, "No machine shares it now")
    assert "No machine shares it now" in page and f"barnraise serve {run.slug}" in page
    assert ">Unconfirmed<" in page and '<div data-tile="confirmed" hidden' in page
    assert "Train on</button>" not in page and "Join with a machine" not in page
