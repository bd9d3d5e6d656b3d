"""Test that the demo prints the codes of the emails that its site writes into files."""

import pytest
from django.core import mail
from django.core.mail.backends.filebased import EmailBackend

from coordinator.demo.demo_people import OWNER, STAFF, VOLUNTEERS, DemoPeople
from coordinator.demo.email_printer import EmailPrinter

CODE_TEXT = "Hello from Barnraise!\n\nYour code is:\n\n  ABCD-EFGH\n\nBye.\n"


def test_new_emails_become_one_line_each_with_their_code(tmp_path):
    backend = EmailBackend(file_path=str(tmp_path))
    old = mail.EmailMessage("Old", "x", "site@example.org", ["old@example.org"])
    backend.send_messages([old])
    printer = EmailPrinter(tmp_path)
    assert printer.new_lines() == [], "emails of an earlier demo are not printed"
    messages = [
        mail.EmailMessage("Your code", CODE_TEXT, "site@example.org", ["ünï@example.org"]),
        mail.EmailMessage("A run started", "Its machines train.", "s@example.org", ["b@b.org"]),
        mail.EmailMessage(
            "Join us", "Open\nhttp://site/teams/x/\nto join.", "s@s.org", ["c@c.org"]
        ),
    ]
    EmailBackend(file_path=str(tmp_path)).send_messages(messages)
    lines = printer.new_lines()
    assert lines[0].endswith("code ABCD-EFGH") and "example.org" in lines[0]
    assert lines[1] == "email to b@b.org: “A run started”"
    assert lines[2] == "email to c@c.org: “Join us” http://site/teams/x/"
    assert printer.new_lines() == []


def test_half_written_email_is_printed_once_it_is_complete(tmp_path):
    printer = EmailPrinter(tmp_path)
    path = tmp_path / "20261125.log"
    path.write_text("Subject: Hi\nTo: a@b.org\n\nHello")
    assert printer.new_lines() == []
    with path.open("a") as file:
        file.write("\n" + "-" * 79 + "\n")
    assert printer.new_lines() == ["email to a@b.org: “Hi”"]


@pytest.mark.django_db
def test_people_of_the_demo_exist_once_and_its_staff_has_a_second_factor(tmp_path, valkey):
    first = DemoPeople(tmp_path)
    users = [first.create(person) for person in (OWNER, *VOLUNTEERS, STAFF)]
    assert len({user.pk for user in users}) == 4
    assert users[-1].acts_as_staff and not users[0].is_staff
    assert first.staff_code().isdigit() and len(first.staff_code()) == 6
    again = DemoPeople(tmp_path)
    assert again.password == first.password and again.staff_secret == first.staff_secret
    assert again.create(STAFF) == users[-1]
    assert (tmp_path / "demo_password").stat().st_mode & 0o077 == 0
