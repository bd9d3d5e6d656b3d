"""Test what chat programs receive: names that people chose format and mention nothing."""

import json
from email.header import decode_header

import pytest

from coordinator.notify.models import Delivery, Webhook
from coordinator.notify.webhook_formats import CallContent, WebhookFormat, render_call

URL = "https://barn.example.org/runs/dawn/"
HOSTILE = CallContent("<b>@everyone</b> *dawn* ünï", "A & B.", URL, {"type": "run.started"})


def render(receiver: WebhookFormat) -> dict:
    body, headers = render_call(receiver, HOSTILE)
    assert headers == {"Content-Type": "application/json"}
    return json.loads(body)


def test_standard_calls_are_the_signed_json():
    assert render(WebhookFormat.STANDARD) == {"type": "run.started"}


def test_slack_text_is_escaped_and_links_the_page():
    text = render(WebhookFormat.SLACK)["text"]
    assert "&lt;b&gt;@everyone" in text and "A &amp; B." in text and f"<{URL}|Open>" in text
    assert text.count("*") == 4 and "\u200b*dawn\u200b*" in text


def test_discord_mentions_nobody_and_fits():
    message = render(WebhookFormat.DISCORD)
    assert message["allowed_mentions"] == {"parse": []}
    assert r"\*dawn\*" in message["content"] and message["content"].endswith(URL)
    body, _ = render_call("discord", CallContent("x" * 3000, "y" * 3000, URL, {}))
    content = json.loads(body)["content"]
    assert len(content) <= 2000 and content.endswith(URL)


def test_matrix_gets_text_and_escaped_html():
    message = render(WebhookFormat.MATRIX)
    assert "&lt;b&gt;" in message["html"] and URL in message["text"]


def test_ntfy_gets_text_with_title_and_link_as_headers():
    body, headers = render_call("ntfy", HOSTILE)
    assert body == b"A & B." and headers["Click"] == URL
    assert headers["Title"].isascii() and "\n" not in headers["Title"]
    (title, charset), *_ = decode_header(headers["Title"])
    assert title.decode(charset) == HOSTILE.title
    assert render_call("ntfy", CallContent("t", "", "", {}))[1].keys() == {"Content-Type", "Title"}


@pytest.mark.django_db
def test_webhook_of_a_chat_program_is_created_changed_and_tested(signed_in, settings, valkey):
    settings.OUTSIDE_NETWORKS = []
    client, ada = signed_in(organiser=True)
    hook = Webhook.objects.create(person=ada, url="https://example.org/", secret="whsec_AAAA")
    path = f"/notifications/webhooks/{hook.pk}/kinds/"
    assert client.post(path, {"kinds": ["run.started"], "format": "slack"}).status_code == 302
    hook.refresh_from_db()
    assert hook.format == "slack" and hook.kinds == ["run.started"]
    assert client.post(path, {"kinds": ["run.started"], "format": "fax"}).status_code == 422
    body, _ = render_call(hook.format, hook.create_test_delivery().content)
    assert "Hello from Barnraise" in json.loads(body)["text"]
    assert Delivery.objects.get().body["type"] == "test"
