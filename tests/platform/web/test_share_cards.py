"""Test the pictures and tags of links to runs and certificates."""

import io
import re

import pytest
from django.test import Client
from PIL import Image, ImageFont

from coordinator.web.share_cards import SIZE, draw_card, spell_in_latin, wrap_text


def test_card_is_a_picture_of_the_usual_size_whatever_the_title(built_frontend):
    for title in ("Dawn", "x" * 300, "many words " * 40, "🪵🪵", ""):
        picture = Image.open(io.BytesIO(draw_card(title, ["124 M parameters", "y" * 200], 0.4)))
        assert picture.size == SIZE and picture.format == "PNG"


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Crème brûlée – “à deux”", "Crème brûlée – “à deux”"),
        ("Привет, мир", "Privet, mir"),
        ("Łódź at night", "Lódz at night"),
        ("深層学習", "ShenCengXueXi"),
        ("Dawn 🪵 dusk", "Dawn dusk"),
        ("🪵\u202e\n", "Barnraise"),
    ],
)
def test_card_spells_other_scripts_in_letters_that_its_fonts_have(title, expected):
    assert spell_in_latin(title) == expected


def test_barn_of_a_card_rises_with_the_share(built_frontend):
    def timber(share: float) -> int:
        picture = Image.open(io.BytesIO(draw_card("Dawn", [], share))).convert("RGB")
        return sum(colour == (0x8A, 0x5A, 0x2B) for colour in picture.get_flattened_data())

    assert timber(0) == 0 < timber(0.5) < timber(1)


def test_wrap_text_breaks_at_words_and_shortens_the_last_line():
    font = ImageFont.load_default(20)
    lines = wrap_text("one two three four five six seven", font, 110, 2)
    assert len(lines) == 2 and lines[-1].endswith("…")
    assert all(font.getlength(line) <= 110 for line in lines)
    assert wrap_text("", font, 110, 2) == []


@pytest.mark.django_db
def test_public_run_has_a_card_and_a_hidden_one_has_none(
    person, launched_run, valkey, built_frontend
):
    run, _ = launched_run(person(), name='Dawn "&" dusk')
    client = Client()
    page = client.get(f"/runs/{run.slug}/").content.decode()
    address = re.search(r'property="og:image" content="http://testserver([^"]+)"', page)[1]
    assert 'og:title" content="Dawn &quot;&amp;&quot; dusk"' in page
    answer = client.get(address)
    assert answer["Content-Type"] == "image/png" and "max-age=300" in answer["Cache-Control"]
    run.visibility, run.access = "invited", "invitation"
    run.save()
    client.force_login(run.owner)
    assert "og:image" not in client.get(f"/runs/{run.slug}/").content.decode()
    assert client.get(address).status_code == 404
