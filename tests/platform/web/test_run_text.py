"""A run's page shows the counts of its text; a text with few tokens sets the run's vocabulary."""

import pytest
from helpers.site.pages import text

from barnraise.protocol.coordinator_messages import TextCounts
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.runs.spec_form import spec_from_fields

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend")]
COUNTS = TextCounts(
    files=3, left_out=2, documents=1200, duplicates=1, skipped_rows=4, bytes=9, characters=50_000
)


@pytest.fixture
def post_manifest(manifest, volunteer):
    """Return a function that posts a manifest for a run as a machine of its owner."""

    def post(run, owner, **fields):
        machine = volunteer(owner, 1)
        signed = machine.identity.sign("manifest", manifest(run, **fields))
        return machine.send_request("POST", f"/runs/{run.slug}/manifest", signed)

    return post


def test_text_with_fewer_tokens_sets_the_runs_vocabulary(signed_in, draft, post_manifest):
    client, ada = signed_in()
    run = draft(ada)
    asked = run.spec.model.vocabulary
    assert post_manifest(run, ada, vocabulary=704, counts=COUNTS).status_code == 200
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert f"704 (of {asked} asked for: the text has no more)" in page
    form = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert 'value="704"' not in form, "the form shows what the owner asked for"
    run.refresh_from_db()
    assert run.launch()
    run.refresh_from_db()
    advance_run(run)
    run.refresh_from_db()
    assert run.spec_text and run.spec.model.vocabulary == 704


def test_page_shows_the_counts_of_the_text(signed_in, draft, post_manifest):
    client, ada = signed_in()
    run = draft(ada)
    assert post_manifest(run, ada, counts=COUNTS).status_code == 200
    page = client.get(f"/runs/{run.slug}/").content.decode()
    for shown in ("in 3 files", "1 copy, 4 rows without text, 2 files", "held out"):
        assert shown in page, shown
    assert "asked for" not in page


def test_text_that_is_used_whole_has_nothing_left_out(signed_in, draft, post_manifest):
    client, ada = signed_in()
    run = draft(ada)
    whole = COUNTS.model_copy(update={"left_out": 0, "duplicates": 0, "skipped_rows": 0})
    assert post_manifest(run, ada, counts=whole).status_code == 200
    assert "Left out" not in client.get(f"/runs/{run.slug}/").content.decode()


def test_small_share_of_a_text_is_not_written_as_nothing(signed_in, draft):
    client, ada = signed_in()
    page = text(client.get(f"/runs/{draft(ada, spec=spec_from_fields({})).slug}/"))
    assert "Passes over the text about 2.5" in page
    short = spec_from_fields({"recipe.token_budget": "10K"})
    page = text(client.get(f"/runs/{draft(ada, 'Short', spec=short).slug}/"))
    assert "Passes over the text less than 0.1" in page


@pytest.mark.parametrize("vocabulary", [700, 256, 4096])
def test_vocabulary_that_no_text_can_give_is_refused(person, draft, post_manifest, vocabulary):
    ada = person()
    answer = post_manifest(draft(ada), ada, vocabulary=vocabulary)
    assert answer.status_code == 422 and "smaller multiple of 64" in answer.content.decode()
