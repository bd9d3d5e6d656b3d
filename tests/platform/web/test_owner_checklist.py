"""Test the owner's steps from a draft to the first loss."""

from collections.abc import Sequence

from django.test import Client
from django.utils import timezone

from coordinator.accounts.models import Machine
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.web.owner_checklist import count_participants, is_shown, list_steps

SITE = "https://barn.example.org"


def done_steps(run: Run, machines: Sequence[Machine]) -> list[bool]:
    return [step.done for step in list_steps(run, SITE, machines, count_participants(run))]


def test_steps_follow_what_the_owner_does(person, launched_run, draft, volunteer):
    ada = person()
    assert done_steps(draft(ada, "Idea"), []) == [False] * 5
    run, pc = launched_run(ada)
    machines = [pc.machine]
    assert done_steps(run, machines) == [True, True, True, False, False] and is_shown(run)
    volunteer(person("bob@example.org"), 2).join(run)
    run.record_ledger_tokens(10)
    assert done_steps(run, machines) == [True] * 5 and not is_shown(run)


def test_text_step_names_the_command_for_each_source(person):
    def command(**fields) -> str:
        spec = spec_from_fields({name.replace("__", "."): value for name, value in fields.items()})
        run = Run.create(person(f"{len(Run.objects.all())}@example.org"), NewRun("X", spec))
        text = next(
            s
            for s in list_steps(run, SITE, [Machine(confirmed=timezone.now())], 0)
            if s.title == "Prepare the text"
        )
        return text.command.replace(f"{SITE}/runs/{run.slug}", "RUN")

    assert command(text__source="files") == "barnraise prepare RUN FOLDER"
    assert command(start__model="folder") == "barnraise prepare RUN --model FOLDER"
    assert command() == ""


def test_steps_show_one_command_that_enrols_and_trains(person):
    def commands(source: str, machines: int) -> list[str]:
        spec = spec_from_fields({"text.source": source})
        run = Run.create(person(f"{source}-{machines}@example.org"), NewRun("X", spec))
        address = f"{SITE}/runs/{run.slug}"
        steps = list_steps(run, SITE, [Machine(confirmed=timezone.now())] * machines, 0)
        return [step.command.replace(address, "RUN") for step in steps if step.command]

    assert commands("stdlib", 0) == commands("stdlib", 1) == ["barnraise join RUN"]
    assert commands("files", 0) == ["barnraise prepare RUN FOLDER"]
    assert commands("files", 1) == ["barnraise prepare RUN FOLDER", "barnraise join RUN"]


def test_checklist_is_the_owners_alone_and_shows_the_next_command(person, draft, built_frontend):
    ada, bob = person(), person("bob@example.org")
    run = draft(ada)
    client, other = Client(), Client()
    client.force_login(ada)
    other.force_login(bob)
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert "Your run, step by step" in page
    assert f"barnraise join http://testserver/runs/{run.slug}" in page
    assert "Join with a machine" not in page
    fragment = client.get(f"/runs/{run.slug}/checklist/").content.decode()
    assert fragment.count('data-done="no"') == 5 and 'aria-current="step"' in fragment
    assert other.get(f"/runs/{run.slug}/checklist/").status_code == 404


def test_step_becomes_confirm_with_its_button_until_a_machine_is_confirmed(
    signed_in, draft, volunteer, built_frontend
):
    client, ada = signed_in()
    run = draft(ada)
    machines = [volunteer(ada, 1).machine, volunteer(ada, 2).machine]
    Machine.objects.update(confirmed=None)
    fragment = client.get(f"/runs/{run.slug}/checklist/").content.decode()
    assert "Confirm a machine" in fragment and fragment.count('name="run"') == 2
    assert machines[0].key in fragment and "Confirm pc-1" in fragment
    answer = client.post(f"/machines/{machines[0].pk}/confirm/", {"run": run.slug})
    assert answer["Location"] == run.get_absolute_url(), "the button leads back to the run"
    assert "Confirm" not in client.get(f"/runs/{run.slug}/checklist/").content.decode()
