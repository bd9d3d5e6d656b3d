"""Test that pages and the table of machines say the same of a pause."""

import re

from helpers.paths import ROOT

from barnraise.protocol.enums import PauseReason
from coordinator.fleet.pause_texts import PAUSE_TEXTS

TABLE = ROOT / "frontend" / "src" / "views" / "pauseTexts.ts"


def test_every_reason_has_one_text_on_all_pages():
    assert set(PAUSE_TEXTS) == set(PauseReason)
    found = dict(re.findall(r'^  (\w+): "(.+)",$', TABLE.read_text(), re.MULTILINE))
    assert found == {reason.value: text for reason, text in PAUSE_TEXTS.items()}
