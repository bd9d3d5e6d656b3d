"""Test which part of an address follows from a name."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from coordinator.accounts.replicated.teams import TeamCreated
from coordinator.lib.slugs import normalize_slug, slug_of
from coordinator.runs.replicated.run_events import DraftContent


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("夜明け", "夜明け"),
        ("夜明け v2!", "夜明け-v2"),
        ("が", "が"),
        (unicodedata.normalize("NFD", "夜明げ"), "夜明げ"),
        ("Рассвет № 7", "рассвет-no-7"),
        ("हिन्दी मॉडल", "हिन्दी-मॉडल"),
        ("ฟ้าสาง", "ฟ้าสาง"),
        ("Même  nom!", "meme-nom"),
        ("Straße", "straße"),
        (" -- First/Barn -- ", "firstbarn"),
        ("A & B", "a-b"),
        ("🚀 ½ …", "12"),
        ("🚀", ""),
        ("❤️", ""),
        ("I ❤️ GPT", "i-gpt"),
        ("🏳️‍🌈 run", "run"),
        ("葛\U000e0100", "葛"),
    ],
)
def test_slug_has_the_letters_and_digits_of_a_name(name, slug):
    assert slug_of(name) == normalize_slug(slug)


@given(st.text(max_size=80))
def test_every_slug_is_one_part_of_an_address_that_mirrors_accept(name):
    slug = slug_of(name)
    assert len(slug) <= 60 and slug == normalize_slug(slug) and slug.isprintable()
    assert not set("/ .%?#&<>\"'") & set(slug)
    for message in (DraftContent, TeamCreated):
        if slug:
            field = message.model_fields["slug"]
            TypeAdapter(field.annotation).validate_python(slug)
            message.__pydantic_validator__.validate_assignment(
                message.model_construct(), "slug", slug
            )
