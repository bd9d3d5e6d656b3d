"""What `barnraise doctor` found on a machine, for the machine's page."""

from typing import Literal

from pydantic import Field

from barnraise.protocol.types import Message, PlainText, Version

MAX_FINDINGS = 40


class CheckupFinding(Message):
    """One thing that was checked."""

    subject: PlainText = Field(max_length=40)
    level: Literal["ok", "unknown", "warning", "problem"]
    sentence: PlainText = Field(max_length=600)


class Checkup(Message):
    """The last result of `barnraise doctor` on a machine."""

    version: Version
    reach: PlainText = Field(max_length=20)  # how peers reach the machine: a `ReachVerdict`
    findings: list[CheckupFinding] = Field(max_length=MAX_FINDINGS)
