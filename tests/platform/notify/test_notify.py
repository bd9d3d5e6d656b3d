"""Test notifications: each is sent once, where its person wants it; webhooks stay outside."""

import base64
import hashlib
import hmac
import json
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network

import pytest
from django.core import mail
from django.core.cache import cache
from django.test import Client
from django.utils import timezone
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.site.notices import notify
from helpers.site.pages import text as page
from helpers.site.remote_telemetry import EXCHANGE

from barnraise.protocol import enums
from coordinator.accounts.models import SiteSettings
from coordinator.audit.models import AuditEntry
from coordinator.celery import app
from coordinator.fleet.models import Membership, VerdictRecord
from coordinator.fleet.verdict_requests import ExclusionRequest
from coordinator.lib import safe_http
from coordinator.notify import models, tasks
from coordinator.notify.detectors import detect_all
from coordinator.notify.models import Delivery, Notification, NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.replication.volunteer_salt import volunteer_pseudonym
from coordinator.runs.models import Run

pytestmark = pytest.mark.django_db
SLOW = 0  # stands for an answer that does not come in time
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def set_silent_for(run: Run, minutes: float) -> None:
    """Set the last report of all machines of a run back by so many minutes."""
    Membership.objects.filter(run=run).update(
        last_seen=timezone.now() - timedelta(minutes=minutes), activity=enums.Activity.TRAINING
    )


def detect_kinds_and_people(since: datetime = LONG_AGO) -> list[tuple[str, str]]:
    """Run all detectors; return (notification type, email address) of what they find."""
    return sorted((draft.kind.value, draft.person.email) for draft in detect_all(since))


@pytest.fixture
def receiver(settings):
    """Run an HTTP server on this machine, which the settings allow.

    Yields:
        Its URL, the calls received as (headers, body), and the statuses of its next answers.
    """
    calls = []
    answers = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            calls.append(({name.lower(): value for name, value in self.headers.items()}, body))
            status = answers.pop(0) if answers else 200
            if status == SLOW:
                time.sleep(0.1)
                return
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{server.url}/elsewhere")
            self.end_headers()

    settings.OUTSIDE_NETWORKS = [ip_network("127.0.0.0/8")]
    server = LocalServer(Handler)
    yield f"{server.url}/hook", calls, answers
    server.close()


# ---- detection


def test_started_run_notifies_owner_and_people_with_machines(person, adas_run, volunteer):
    run, _ = adas_run
    volunteer(person("bob@example.org"), 2).join(run)
    volunteer(person("eve@example.org"), 3)
    assert detect_kinds_and_people() == [
        ("run.started", "ada@example.org"),
        ("run.started", "bob@example.org"),
    ]


def test_sweep_continues_until_everybody_concerned_is_notified(
    person, adas_run, volunteer, monkeypatch
):
    run, _ = adas_run
    for n, name in enumerate(("bob", "eve"), 2):
        volunteer(person(f"{name}@example.org"), n).join(run)
    monkeypatch.setattr(tasks, "MAX_NOTIFICATIONS", 2)
    assert tasks.sweep() == 2, "a sweep exceeded its limit"
    assert tasks.sweep() == 1
    assert Notification.objects.filter(kind=NotificationType.RUN_STARTED).count() == 3
    assert detect_kinds_and_people() == []
    assert tasks.sweep() == 0


def test_finished_run_is_notified_and_cancelled_draft_is_not(adas_run, draft):
    run, _ = adas_run
    draft(run.owner, name="Never mind").cancel()
    run.finish()
    finished = [
        detected
        for detected in detect_all(LONG_AGO)
        if detected.kind is NotificationType.RUN_FINISHED
    ]
    assert [detected.title for detected in finished] == ["A run finished"]
    assert "has the model" in finished[0].text
    assert finished[0].data["run"]["status"] == "finished"


def test_silent_run_is_stalled_and_silent_machine_is_quiet(adas_run):
    run, _ = adas_run
    Run.objects.update(started=LONG_AGO)
    set_silent_for(run, 2)
    assert detect_kinds_and_people() == []
    set_silent_for(run, 7)
    assert detect_kinds_and_people() == [("run.stalled", "ada@example.org")]
    set_silent_for(run, 20)
    assert detect_kinds_and_people() == [
        ("machine.quiet", "ada@example.org"),
        ("run.stalled", "ada@example.org"),
    ]
    set_silent_for(run, 60 * 24)
    assert detect_kinds_and_people() == [], "a silence of a day is still notified"


def test_machine_that_left_or_is_revoked_or_busy_elsewhere_is_not_quiet(adas_run, draft):
    run, ada = adas_run
    Run.objects.update(started=LONG_AGO)
    set_silent_for(run, 20)
    Membership.objects.update(activity=enums.Activity.LEFT)
    assert detect_kinds_and_people() == [("run.stalled", "ada@example.org")]
    set_silent_for(run, 20)
    other = draft(run.owner, name="Another")
    Membership.objects.create(run=other, machine=ada.machine)
    assert detect_kinds_and_people() == [("run.stalled", "ada@example.org")]
    Membership.objects.filter(run=other).delete()
    ada.machine.revoke()
    assert ("machine.quiet", "ada@example.org") not in detect_kinds_and_people()


def test_silence_while_the_site_was_down_is_not_notified(adas_run, valkey):
    run, _ = adas_run
    Run.objects.update(started=LONG_AGO)
    set_silent_for(run, 60)
    assert timezone.now() - tasks.reporting_since() < timedelta(seconds=5), (
        "the site counts reports from before it started"
    )
    assert detect_kinds_and_people(since=tasks.reporting_since()) == []
    valkey.set(tasks.SINCE_KEY, 0)
    assert detect_kinds_and_people(since=tasks.reporting_since()) != []
    valkey.delete(tasks.SWEEPING_KEY)  # as after two minutes without a sweep
    assert detect_kinds_and_people(since=tasks.reporting_since()) == []


# ---- notifications on the site


def test_sweep_without_news_needs_few_queries(
    person, adas_run, volunteer, django_assert_max_num_queries
):
    run, _ = adas_run
    for n in range(2, 12):
        volunteer(person(f"{n}@example.org"), n).join(run)
    assert tasks.sweep() == 11
    with django_assert_max_num_queries(14):
        assert tasks.sweep() == 0


def test_machine_that_goes_quiet_twice_is_notified_twice(adas_run):
    run, _ = adas_run
    Run.objects.update(started=LONG_AGO)
    for minutes in (20, 16):
        set_silent_for(run, minutes)
        for draft in [*detect_all(LONG_AGO), *detect_all(LONG_AGO)]:
            Notification.create_once(draft)
    assert Notification.objects.filter(kind=NotificationType.MACHINE_QUIET).count() == 2, (
        "two silences were taken for one"
    )


def test_refused_join_is_notified_once_a_day(person, launched_run, volunteer):
    run, _ = launched_run(person(name="Ada"), name="Guests only")
    Run.objects.update(access="invitation")
    bob = volunteer(person("bob@example.org"), 2)
    for _ in range(3):
        assert bob.request_join(run).status_code == 403
    notice = Notification.objects.get(person=bob.machine.owner)
    assert "Guests only refused" in notice.title and "invited" in notice.text


def test_excluded_volunteer_is_notified_once(person, launched_run, volunteer):
    run, _ = launched_run(person("ada@example.org"), name="Dusk")
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    exclusion = ExclusionRequest(bob.machine.owner)
    VerdictRecord.issue(run, [], "noise", exclude=[exclusion], actor=run.owner)
    [draft] = [draft for draft in detect_all(LONG_AGO) if "excluded" in draft.title]
    assert draft.person == bob.machine.owner
    assert (draft.title, draft.text) == ("Dusk has excluded you", "noise")


def test_suspended_run_notifies_its_owner_and_says_so_on_its_page(person, launched_run, client):
    run, _ = launched_run(person(), name="Dusk")
    Run.objects.update(status="training", started=timezone.now())
    path = f"/runs/{run.slug}/"
    assert "run.suspended" not in [kind for kind, _ in detect_kinds_and_people()]
    assert "grew faster" not in client.get(path).content.decode()
    run.memberships.update(activity="suspended", last_seen=timezone.now())
    [draft] = [d for d in detect_all(LONG_AGO) if d.kind is NotificationType.RUN_SUSPENDED]
    assert draft.person == run.owner and draft.title == "Dusk is suspended"
    assert "Exclude the volunteer who stated too many" in draft.text
    assert "its tokens grew faster than machines can train" in client.get(path).content.decode()


def test_owner_is_notified_of_a_suspended_volunteer_and_clears_them(
    person, launched_run, volunteer, client
):
    run, _ = launched_run(person(), name="Dusk")
    Run.objects.update(status="training", started=timezone.now())
    people = [person(f"{name}@example.org", name=name) for name in ("Bob", "Eve", "Joe")]
    for number, other in enumerate(people, 2):
        volunteer(other, number).join(run)
    run.memberships.update(activity="training", last_seen=timezone.now())
    pseudonym = volunteer_pseudonym(people[1].pk)
    report = EXCHANGE.model_copy(update={"suspended": [pseudonym[:16]]}).model_dump()
    members = {member.machine.owner: member for member in run.memberships.all()}

    def drafts() -> list[NotificationDraft]:
        return [d for d in detect_all(LONG_AGO) if d.kind is NotificationType.RUN_DOUBTED]

    for stranger in people:
        Membership.objects.filter(pk=members[stranger].pk).update(exchange=report)
    assert drafts() == [], "accounts that the owner has not let in accuse nobody"
    Membership.objects.filter(pk=members[run.owner].pk).update(exchange=report)
    [draft] = drafts()
    mark = members[people[1]].machine.key[:16]
    assert draft.person == run.owner and draft.title == f"Eve ({mark}) is suspended in Dusk"
    client.force_login(people[0])
    assert "Eve is suspended" not in client.get(f"/runs/{run.slug}/").content.decode()
    client.force_login(run.owner)
    page = client.get(f"/runs/{run.slug}/").content.decode()
    isolated = f"<bdi>Eve ({mark})</bdi>"  # A name may turn the direction of what follows.
    assert f"Exclude {isolated}" in page and f"Clear {isolated}" in page
    assert f"{isolated} is suspended" in page
    assert f'value="{people[1].pk}" selected' in client.get(draft.url).content.decode()
    for nobody in ("", run.owner.pk.hex[::-1]):
        assert client.post(f"/runs/{run.slug}/clear/", {"person": nobody}).status_code == 404
    answer = client.post(f"/runs/{run.slug}/clear/", {"person": people[1].pk}, follow=True)
    assert f"Eve ({mark}) is cleared" in answer.content.decode()
    assert VerdictRecord.objects.get().message.cleared == [pseudonym]
    assert "Cleared: 1 volunteer" in client.get(f"/runs/{run.slug}/verdicts/").content.decode()


def test_each_type_is_switched_off_separately_on_site_and_by_email(signed_in, launched_run, valkey):
    client, ada = signed_in()
    launched_run(ada)
    form = client.get("/notifications/settings/")
    assert (
        form.content.decode().count('type="checkbox"')
        == form.content.decode().count("checked")
        == 2 * len(NotificationType)
    )
    choices = {
        f"{where}-{kind}": "on" for kind in NotificationType.values for where in ("site", "email")
    }
    del choices["email-run.started"], choices["site-run.stalled"]
    assert client.post("/notifications/settings/", choices).status_code == 302
    tasks.sweep()
    assert Notification.objects.get().email_due is None and Notification.objects.get().shown
    notify(ada, kind=NotificationType.RUN_STALLED, title="It stalled")
    stalled = Notification.objects.get(kind=NotificationType.RUN_STALLED)
    assert stalled.email_due and not stalled.shown
    assert "It stalled" not in page(client.get("/notifications/"))


def test_inbox_shows_new_notifications_until_they_are_read(signed_in, valkey):
    client, ada = signed_in()
    notify(ada, title="Dawn <b>started</b>", text="\u202eText", url="/runs/dawn/")
    shown = client.get("/notifications/").content.decode()
    assert "Dawn &lt;b&gt;started" in shown and 'href="/runs/dawn/"' in shown
    assert 'title="1 new notifications"' in client.get("/").content.decode()
    client.post("/notifications/read/")
    assert "new notifications" not in client.get("/").content.decode()
    assert "Dawn" not in page(signed_in("eve@example.org")[0].get("/notifications/")), (
        "another person sees the notification"
    )


# ---- emails


def test_due_notifications_of_a_person_go_out_in_one_email(person, valkey, settings):
    settings.SITE_URL = "https://barn.example.org"
    ada, bob = person(), person("bob@example.org")
    for recipient, key in ((ada, "one"), (ada, "two"), (bob, "one")):
        notify(recipient, key=key, title=f"Run\n{key} started", url="/runs/x/")
    assert tasks.send_emails() == 2 and tasks.send_emails() == 0
    messages = {message.to[0]: message for message in mail.outbox}
    assert messages["ada@example.org"].subject.endswith("2 notifications")
    assert messages["bob@example.org"].subject.endswith("Run one started"), (
        "the subject has a line break"
    )
    assert "https://barn.example.org/runs/x/" in messages["bob@example.org"].body
    assert not Notification.objects.filter(emailed=None).exists()


def test_failed_email_is_retried_a_limited_number_of_times(person, valkey, settings):
    notify(person())
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT, settings.EMAIL_TIMEOUT = "127.0.0.1", 1, 1
    for attempts in range(1, len(models.RETRY_SECONDS) + 2):
        assert tasks.send_emails() == 0
        notice = Notification.objects.get()
        assert notice.email_tries == attempts and notice.emailed is None
        assert tasks.send_emails() == 0 and Notification.objects.get().email_tries == attempts, (
            "retried before it was due"
        )
        Notification.objects.filter(email_due__isnull=False).update(email_due=timezone.now())
    assert notice.email_due is None


def test_unsubscribe_link_acts_on_post_and_not_on_get(person, valkey, settings):
    ada = person()
    notify(ada)
    tasks.send_emails()
    message = mail.outbox[0]
    link = message.extra_headers["List-Unsubscribe"].strip("<>").removeprefix(settings.SITE_URL)
    strict = Client(enforce_csrf_checks=True)
    assert strict.get(link).status_code == 200
    assert all(choice.email for choice in NotificationPreference.for_person(ada).values()), (
        "opening the link switched emails off"
    )
    assert strict.post(link, {"List-Unsubscribe": "One-Click"}).status_code == 200
    assert not any(choice.email for choice in NotificationPreference.for_person(ada).values())
    assert all(choice.site for choice in NotificationPreference.for_person(ada).values())
    assert strict.get(link[:-3] + "x/").status_code == 404


# ---- webhooks


def test_webhook_is_called_once_with_a_verifiable_signature(person, receiver, valkey):
    url, calls, _ = receiver
    ada = person()
    hook = Webhook.add(ada, url, [NotificationType.RUN_STARTED])
    for key, kind in (("one", NotificationType.RUN_STARTED), ("two", NotificationType.RUN_STALLED)):
        notify(ada, kind=kind, key=key, title="It happened", data={"run": {"slug": "dawn"}})
    assert tasks.deliver_webhooks() == 1 and tasks.deliver_webhooks() == 0
    ((headers, body),) = calls
    assert json.loads(body)["type"] == "run.started"
    assert json.loads(body)["data"] == {"run": {"slug": "dawn"}}
    key = base64.b64decode(hook.secret.removeprefix("whsec_"))
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert Delivery.objects.get().delivered and Webhook.objects.get().last_answer == "200"


def test_failing_webhook_is_retried_and_finally_switched_off(person, receiver, valkey):
    url, calls, answers = receiver
    ada = person()
    Webhook.add(ada, url, NotificationType.values)
    answers += [500, 302]
    notify(ada)
    assert tasks.deliver_webhooks() == 0 and tasks.deliver_webhooks() == 0 and len(calls) == 1
    for expected in (0, 1):
        Delivery.objects.update(due=timezone.now())
        assert tasks.deliver_webhooks() == expected
    assert len(calls) == 3, "a redirect is not followed: it counts as a failure"
    assert len({headers["webhook-id"] for headers, _ in calls}) == 1, "retries have different ids"
    answers += [500] * models.MAX_FAILURES
    for n in range(models.MAX_FAILURES):
        Webhook.objects.get().create_delivery(None, {"n": n})
        tasks.deliver_webhooks()
    assert not Webhook.objects.get().active
    assert not Delivery.objects.filter(due__isnull=False).exists()
    assert AuditEntry.objects.filter(action="webhook.off").exists()


def test_slow_webhooks_wait_in_a_queue_that_holds_up_no_reports(valkey):
    valkey.delete("celery", "webhooks")
    tasks.deliver_webhooks.delay()
    assert (valkey.llen("webhooks"), valkey.llen("celery")) == (1, 0)
    assert list(app.amqp.queues.consume_from) == ["celery"], "a plain worker calls webhooks"
    valkey.delete("webhooks")


def test_webhook_that_answers_slowly_on_purpose_is_disabled(person, receiver, valkey, monkeypatch):
    url, _, answers = receiver
    answers += [SLOW] * models.MAX_FAILURES
    monkeypatch.setattr(safe_http, "TIMEOUT_SECONDS", 0.05)
    hook = Webhook.add(person(), url, NotificationType.values)
    for n in range(models.MAX_FAILURES):
        hook.create_delivery(None, {"n": n})
    while Webhook.objects.get().active:
        assert tasks.deliver_webhooks() == 0
    assert Webhook.objects.get().last_answer == "no answer in time"


def test_test_calls_are_limited_to_one_a_minute(signed_in, receiver, valkey):
    client, ada = signed_in()
    url, _, _ = receiver
    hooks = [Webhook.add(ada, url, NotificationType.values) for _ in range(2)]
    cache.delete(f"webhook-test:{ada.pk}")
    for hook in hooks * 3:
        answer = client.post(f"/notifications/webhooks/{hook.pk}/test/", follow=True)
    assert "One test call a minute" in answer.content.decode()
    assert Delivery.objects.count() == 1


def test_slow_webhooks_of_one_person_leave_room_for_others(person, receiver, valkey):
    url, calls, _ = receiver
    ada, bob = person(), person("bob@example.org")
    flood = [Webhook.add(ada, url, NotificationType.values) for _ in range(models.MAX_WEBHOOKS)]
    for n in range(100):
        flood[n % len(flood)].create_delivery(None, {"by": "ada"})
    Webhook.add(bob, url, NotificationType.values).create_delivery(None, {"by": "bob"})
    tasks.deliver_webhooks()
    senders = [json.loads(body)["data"]["by"] for _, body in calls]
    assert sorted(senders) == ["ada"] * tasks.MAX_DELIVERIES_PER_PERSON + ["bob"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://example.org/", "https://"),
        ("ftp://example.org/", "https://"),
        ("https://user:secret@example.org/", "user or password"),
        ("https://example.org:22/", "port 443"),
        ("https://[::1", "not a URL"),
        ("https://example.org:99999/", "not a URL"),
        ("https://example.org:0/", "not a URL"),
        ("https://example.org: 443/", "not a URL"),
        ("https://example .org/", "not a URL"),
        ("https://*.example.org/", "not a URL"),
        ("https://a..b.invalid/", "not a URL"),
        ("https://example.org./\x01", "not a URL"),
        (f"https://{'a' * 64}.invalid/", "not a URL"),
        ("https://999.1.1.1/", "not a URL"),
        ("https://\u2603\u20dd.invalid/", "not a URL"),
        ("https://", "name a host"),
        ("https://127.0.0.1/", "not a public address"),
        ("https://2130706433/", "not a public address"),
        ("https://localhost/", "not a public address"),
        ("https://0.0.0.0/", "not a public address"),
        ("https://no-such-host.invalid/", "no address"),
    ],
)
def test_webhook_to_a_private_address_is_refused_with_the_reason(signed_in, valkey, url, problem):
    with pytest.raises(safe_http.UnsafeUrlError, match=problem):
        safe_http.resolve_target(url)
    client, _ = signed_in()
    answer = client.post("/notifications/webhooks/", {"url": url, "kinds": ["run.started"]})
    assert answer.status_code == 422
    assert problem.lower() in page(answer).lower()
    assert not Webhook.objects.exists()


def test_webhook_host_of_any_script_is_called_by_its_ascii_name():
    assert safe_http.check_url("https://Bücher.example/ö").netloc == "xn--bcher-kva.example"


async def test_webhook_name_that_resolves_to_private_address_is_not_called(settings):
    settings.OUTSIDE_NETWORKS = []
    with pytest.raises(safe_http.UnsafeUrlError):
        await safe_http.post("https://localhost/", b"", {})


def test_webhook_types_can_change_but_not_be_empty(signed_in, receiver, valkey):
    client, ada = signed_in(organiser=True)
    url, *_ = receiver
    changed_hook, other_hook = (
        Webhook.add(ada, url, list(NotificationType.values)) for _ in range(2)
    )
    kinds_path = f"/notifications/webhooks/{changed_hook.pk}/kinds/"
    assert client.post(kinds_path, {"kinds": ["run.finished", "run.started"]}).status_code == 302
    changed_hook.refresh_from_db()
    other_hook.refresh_from_db()
    assert changed_hook.kinds == ["run.started", "run.finished"]
    assert other_hook.kinds == list(NotificationType.values)
    assert AuditEntry.objects.get(action="webhook.change").detail == {"kinds": changed_hook.kinds}
    client.post(kinds_path, {"kinds": changed_hook.kinds})
    assert AuditEntry.objects.filter(action="webhook.change").count() == 1, (
        "an unchanged form was recorded as a change"
    )
    for wrong, sentence in (
        ({}, "Choose at least one"),
        ({"kinds": ["run.exploded"]}, "run.exploded"),
    ):
        refused = client.post(kinds_path, wrong)
        assert refused.status_code == 422 and sentence in refused.content.decode()
    changed_hook.refresh_from_db()
    assert changed_hook.kinds == ["run.started", "run.finished"]
    notify(ada, kind=NotificationType.MACHINE_QUIET, key="quiet", title="A machine went quiet")
    assert changed_hook.deliveries.count() == 0 and other_hook.deliveries.count() == 1


def test_webhooks_are_tested_switched_off_and_removed_by_organisers(signed_in, receiver, valkey):
    url, _, _ = receiver
    client, ada = signed_in()
    hook = Webhook.add(ada, url, NotificationType.values)
    assert client.post(f"/notifications/webhooks/{hook.pk}/dance/").status_code == 404
    assert hook.secret in client.get("/notifications/webhooks/").content.decode()
    client.post(f"/notifications/webhooks/{hook.pk}/test/")
    assert tasks.deliver_webhooks() == 1
    client.post(f"/notifications/webhooks/{hook.pk}/off/")
    assert not Webhook.objects.get().active
    client.post(f"/notifications/webhooks/{hook.pk}/remove/")
    assert not Webhook.objects.exists()
    SiteSettings.set_organisers("granted", ada)
    answer = client.post("/notifications/webhooks/", {"url": url, "kinds": ["run.started"]})
    assert answer.status_code == 422 and "for organisers" in page(answer)
