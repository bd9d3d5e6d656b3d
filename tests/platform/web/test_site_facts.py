"""Test what every page says of its site: legal links, and where emails go."""

import pytest
from django.test import Client

pytestmark = pytest.mark.django_db


def test_legal_links_are_at_the_foot_and_at_the_sign_up_form(settings, valkey, built_frontend):
    assert "Imprint" not in Client().get("/").content.decode()
    settings.LEGAL_LINKS = [("Imprint", "https://example.org/imprint?a=1&b=2")]
    link = '<a href="https://example.org/imprint?a=1&amp;b=2">Imprint</a>'
    assert Client().get("/").content.decode().count(link) == 1
    assert Client().get("/accounts/signup/").content.decode().count(link) == 2


def test_licence_is_a_page_and_the_source_a_link_where_it_is_set(settings, valkey, built_frontend):
    home = Client().get("/").content.decode()
    assert '<a href="/licence/">Licence</a>' in home and ">Source</a>" not in home
    assert "Apache License" in Client().get("/licence/").content.decode()
    settings.SOURCE_URL = "https://example.org/source?a=1&b=2"
    link = '<a href="https://example.org/source?a=1&amp;b=2">Source</a>'
    assert link in Client().get("/licence/").content.decode()


def test_page_for_the_code_says_where_it_is_without_a_mail_server(settings, valkey, built_frontend):
    settings.EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
    fields = {"email": "new@example.org", "password1": "wooden-barn-9", "name": "New"}
    page = Client().post("/accounts/signup/", fields, follow=True).content.decode()
    assert "Check your email" in page and "the code in the log of Celery" in page
