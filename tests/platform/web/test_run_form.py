"""Test the form of a run: the run that it creates, and the errors that it shows."""

import re
from dataclasses import replace

import pytest
from helpers.site.checkpoint_views import build_checkpoint
from helpers.site.pages import field_error, text

from barnraise.spec import Start, preset
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.web import run_form_fields
from coordinator.web.forms import RunForm

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend")]
GOOD = {"name": "Evening shift", "preset": "gpt-nano"}


def test_run_form_with_name_and_preset_creates_draft(signed_in):
    client, ada = signed_in()
    response = client.post("/runs/new/", GOOD)
    run = Run.objects.get()
    assert response.status_code == 302 and response["Location"] == f"/runs/{run.slug}/"
    assert (run.owner, run.name, run.status) == (ada, "Evening shift", "draft")
    assert run.spec.model.layers == 4 and run.token_budget == 2_000_000


def test_run_form_creates_and_launches_at_once(signed_in):
    client, _ = signed_in()
    page = client.post("/runs/new/", GOOD | {"then": "launch"}, follow=True)
    assert Run.objects.get().launch_requested
    assert "Launched. Training starts once" in text(page)


def test_run_named_like_a_page_gets_another_address(signed_in):
    client, _ = signed_in()
    for name in ("New", "Estimate"):
        response = client.post("/runs/new/", {**GOOD, "name": name}, follow=True)
        assert f"<h1>{name}</h1>" in response.content.decode()


def test_run_form_marks_what_only_one_source_of_text_needs(signed_in):
    """The style sheet hides the field and the help of sources that are not chosen."""
    page = signed_in(organiser=True)[0].get("/runs/new/").content.decode()
    assert 'data-field="text.places"' in page
    for source in ("huggingface", "urls", "files"):
        assert f'data-help="{source}"' in page


def test_run_form_names_what_this_site_bears_at_its_interval(signed_in, monkeypatch):
    monkeypatch.setattr(run_form_fields, "count_web_processes", lambda: 4)
    page = text(signed_in()[0].get("/runs/new/"))
    assert "4 web processes bear some 4,000 machines, 660 of them at 5 s" in page


def test_run_form_accepts_numbers_as_people_write_them(signed_in):
    client, _ = signed_in()
    client.post(
        "/runs/new/",
        {**GOOD, "recipe.token_budget": "5e6", "recipe.evaluate_every": "50,000", "quorum": "2"},
    )
    run = Run.objects.get()
    assert (run.token_budget, run.spec.recipe.evaluate_every, run.quorum) == (5_000_000, 50_000, 2)


@pytest.mark.parametrize(
    ("field", "typed", "error"),
    [
        ("name", "", "name of 1 to 80"),
        ("name", "x" * 81, "name of 1 to 80"),
        ("model.heads", "7", "try 8"),
        ("model.context", "99999", "between 8 and 16,384"),
        ("model.layers", "four", "must be a whole number, not 'four'"),
        ("text.source", "the-pile", "not one of the available choices"),
        ("recipe.token_budget", "-5", "token budget must be between"),
        ("recipe.learning_rate", "nan", "learning rate must be between"),
        ("recipe.matrix_rate", "0.02", "only Muon has a learning rate of its own"),
        ("quorum", "0", "between 1 and 10,000"),
        ("quorum", "many", "must be a whole number"),
        ("report_every", "0.01", "between 0.2 and 3,600"),
    ],
)
def test_run_form_shows_error_at_invalid_field_and_retains_input(signed_in, field, typed, error):
    client, _ = signed_in()
    fields = {**GOOD, "recipe.weight_decay": "0.25", field: typed}
    response = client.post("/runs/new/", fields)
    page = response.content.decode()
    assert response.status_code == 422
    assert error.lower() in field_error(page, field).lower().replace("&#x27;", "'")
    assert 'value="0.25"' in page, "the other fields retain their input"
    if typed and not field.startswith("text.source"):
        assert f'value="{typed}"' in page
        assert re.search(rf'name="{re.escape(field)}"[^>]*aria-invalid="true"', page)
    assert not Run.objects.exists()


def test_run_form_with_error_in_advanced_field_opens_the_section(signed_in):
    client, _ = signed_in()
    section = r'<details class="card disclosure"( open)?>'
    page = client.get("/runs/new/").content.decode()
    assert not re.search(section, page)[1]
    page = client.post("/runs/new/", {**GOOD, "model.heads": "7"}).content.decode()
    assert re.search(section, page)[1]


def test_run_form_lists_all_problems_with_links_to_their_fields(signed_in):
    client, _ = signed_in()
    bad = {"preset": "gpt-nano", "recipe.token_budget": "-5", "model.heads": "7", "quorum": "x"}
    page = client.post("/runs/new/", bad).content.decode()
    for name in ("name", "recipe.token_budget", "model.heads", "quorum"):
        assert field_error(page, name) and f'href="#id_{name}"' in page


def test_run_form_with_unknown_preset_is_refused_at_its_field(signed_in):
    client, _ = signed_in()
    response = client.post("/runs/new/", {**GOOD, "preset": "gpt-9"})
    assert response.status_code == 422 and field_error(response.content.decode(), "preset")


def test_run_form_with_bytes_tokenizer_sets_vocabulary_of_256(signed_in):
    client, _ = signed_in()
    client.post("/runs/new/", {**GOOD, "text.tokenizer": "bytes"})
    assert Run.objects.get().spec.model.vocabulary == 256


def test_draft_is_editable_until_its_launch(signed_in):
    client, _ = signed_in()
    client.post(
        "/runs/new/",
        {**GOOD, "preset": "gpt-micro", "recipe.learning_rate": "0.002", "text.tokenizer": "bytes"},
    )
    run = Run.objects.get()
    seed = run.spec.seed
    page = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert 'value="0.002"' in page and re.search(r'value="gpt-micro"\s+checked', page)
    form = RunForm(run=run)
    values = {field.name: field.value() or "" for field in form}
    values |= {"name": "Renamed", "recipe.token_budget": "9000"}
    assert client.post(f"/runs/{run.slug}/edit/", values).status_code == 302
    run.refresh_from_db()
    assert (run.name, run.token_budget) == ("Renamed", 9000)
    assert (run.spec.recipe.learning_rate, run.spec.seed) == (0.002, seed)
    assert run.spec.model.layers == 6 and run.spec.model.vocabulary == 256

    run.launch()
    response = client.post(f"/runs/{run.slug}/edit/", values | {"name": "Again"}, follow=True)
    assert "cannot be changed" in text(response)
    run.refresh_from_db()
    assert run.name == "Renamed"


def test_run_form_groups_presets_by_family_and_a_llama_can_become_a_gpt(signed_in):
    client, _ = signed_in()
    page = client.get("/runs/new/").content.decode()
    families = re.findall(r'<details class="preset-family"( open)?>\s*<summary><b>([^<]+)', page)
    assert families == [(" open", "GPT-2 and GPT-3"), ("", "Llama"), ("", "SmolLM2"), ("", "Qwen3")]
    assert "25.7 MB of memory" in page
    assert "37.4 GB of memory, more than one GPU has; or 43.6 GB of disk" in page
    client.post("/runs/new/", {**GOOD, "preset": "qwen3-0.6b", "model.hidden": "2048"})
    run = Run.objects.get()
    model = run.spec.model
    assert (model.architecture, model.qk_norm, model.hidden) == ("llama", True, 2048)
    for name, architecture in (("llama-nano", "llama"), ("gpt-nano", "gpt2")):
        values = {field.name: field.value() or "" for field in RunForm(run=run)}
        shape = {name: "" for name in values if name.startswith("model.")}
        response = client.post(f"/runs/{run.slug}/edit/", {**values, **shape, "preset": name})
        assert response.status_code == 302
        run.refresh_from_db()
        assert run.spec.model.architecture == architecture and not run.spec.model.qk_norm


def test_shape_of_a_llama_differs_from_its_preset_as_typed(signed_in):
    client, _ = signed_in()
    shape = {"key_value_heads": "1", "hidden": "512", "rope_theta": "5e5", "norm_epsilon": "1e-6"}
    typed = {f"model.{name}": value for name, value in shape.items()}
    flags = {"model.qk_norm": "True", "model.tied_head": "False"}
    client.post("/runs/new/", {**GOOD, "preset": "llama-nano", **typed, **flags})
    run = Run.objects.get()
    changed = dict(key_value_heads=1, hidden=512, rope_theta=5e5, norm_epsilon=1e-6)
    assert run.spec.model == replace(preset("llama-nano"), **changed, qk_norm=True, tied_head=False)
    form = RunForm(run=run)
    assert {name: form[name].value() for name in flags} == flags
    values = {field.name: field.value() or "" for field in form} | {"model.tied_head": ""}
    assert client.post(f"/runs/{run.slug}/edit/", values).status_code == 302
    run.refresh_from_db()
    assert run.spec.model == replace(preset("llama-nano"), **changed, qk_norm=True)


@pytest.mark.parametrize(
    ("name", "field", "typed", "error"),
    [
        ("llama-nano", "model.key_value_heads", "3", "try 2"),
        ("llama-nano", "model.head_size", "31", "must have an even size"),
        ("llama-nano", "model.rope_theta", "0.5", "rotary base must be between"),
        ("llama-nano", "model.norm_epsilon", "1", "norm epsilon must be between"),
        ("llama-nano", "model.qk_norm", "maybe", "not one of the available choices"),
        ("gpt-nano", "model.hidden", "512", "a preset of another family"),
        ("gpt-nano", "model.tied_head", "False", "a preset of another family"),
    ],
)
def test_wrong_shape_is_refused_at_its_field(signed_in, name, field, typed, error):
    client, _ = signed_in()
    response = client.post("/runs/new/", {**GOOD, "preset": name, field: typed})
    assert response.status_code == 422
    assert error in field_error(response.content.decode(), field)


def test_edit_in_the_browser_keeps_settings_without_a_field(signed_in, draft):
    client, ada = signed_in()
    fields = {"verdict_horizon": 50, "max_tokens_per_update": 123_456, "seed": 7}
    for run in (draft(ada, "set", spec_from_fields(fields)), draft(ada, "default")):
        typed = {field.name: field.value() or "" for field in RunForm(run=run)}
        typed |= {"recipe.round_steps": "20", "name": f"{run.name} twice"}
        assert client.post(f"/runs/{run.slug}/edit/", typed).status_code == 302
    specs = {run.name: run.spec for run in Run.objects.all()}
    kept = specs["set twice"]
    assert (kept.verdict_horizon, kept.max_tokens_per_update) == (50, 123_456)
    longer = spec_from_fields({"recipe.round_steps": 20}).max_tokens_per_update
    assert specs["default twice"].max_tokens_per_update == longer, "it follows from the rounds"


def test_run_form_starts_from_a_hugging_face_model(signed_in):
    client, _ = signed_in()
    start = {**GOOD, "start.kind": "model", "start.model": "owner/tiny@v1"}
    client.post("/runs/new/", start)
    run = Run.objects.get()
    assert run.spec.start == Start(model="owner/tiny@v1")
    page = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert 'value="owner/tiny@v1"' in page and re.search(r'value="model"[^>]*checked', page)
    assert "owner/tiny@v1" in client.get(f"/runs/{run.slug}/").content.decode()
    start["access"] = "anyone"
    client.post(f"/runs/{run.slug}/edit/", {**start, "start.model": "folder"})
    run.refresh_from_db()
    assert run.spec.start.model == "folder"
    assert "--model FOLDER" in client.get(f"/runs/{run.slug}/").content.decode()
    client.post(f"/runs/{run.slug}/edit/", {**start, "start.kind": "random"})
    run.refresh_from_db()
    assert run.spec.start == Start()
    for model, error in (("", "name the model"), ("../secret", "owner/name")):
        answer = client.post("/runs/new/", {**start, "start.model": model})
        assert answer.status_code == 422 and error in text(answer).lower()


def test_run_form_starts_from_another_run(signed_in, launched_run, numbered_report):
    client, ada = signed_in()
    assert "start.checkpoint" not in client.get("/runs/new/").content.decode()
    run, machine = launched_run(ada, name="Dusk")
    machine.store_reports(run, numbered_report(4, checkpoint=build_checkpoint(tokens=4000)))
    checkpoint = run.checkpoints.get()
    assert "Dusk, 4,000 tokens" in client.get("/runs/new/").content.decode()
    start = {**GOOD, "name": "Dawn", "start.kind": "run", "start.checkpoint": str(checkpoint.pk)}
    answer = client.post("/runs/new/", {**start, "start.checkpoint": ""})
    assert "Choose a checkpoint" in field_error(answer.content.decode(), "start.checkpoint")
    client.post("/runs/new/", {**start, "preset": "gpt-micro", "model.layers": "9"})
    created = Run.objects.get(name="Dawn")
    assert created.spec.start == checkpoint.to_start() and created.parent == run
    assert created.spec.model == run.spec.model


def test_run_form_sets_up_to_five_sample_prompts(signed_in):
    client, _ = signed_in()
    client.post("/runs/new/", {**GOOD, "prompts": " Once upon \n\n def f(x):\nWände "})
    run = Run.objects.get()
    assert run.spec.prompts == ("Once upon", "def f(x):", "Wände")
    page = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert "Once upon\ndef f(x):\nWände" in page
    for prompts in ("\n".join("abcdef"), "x" * 161):
        answer = client.post("/runs/new/", {**GOOD, "prompts": prompts})
        assert field_error(answer.content.decode(), "prompts")


def test_estimate_of_partly_filled_form_needs_no_name(signed_in):
    client, _ = signed_in()
    response = client.post("/runs/estimate/", {"preset": "gpt2-124m"})
    assert response.status_code == 200 and "124 M" in text(response)
    response = client.post("/runs/estimate/", {**GOOD, "model.heads": "7"})
    assert "One field needs fixing" in text(response)
