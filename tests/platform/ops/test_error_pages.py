"""Test which errors are outages."""

import psycopg.errors
import pytest
import redis.exceptions
from django.db import OperationalError

from coordinator.ops.error_pages import outage_message

FULL = "MISCONF Errors writing to the AOF file: No space left on device"


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ConnectionError("Connection refused"),
        redis.exceptions.ResponseError(FULL),
        redis.exceptions.ResponseError(f"Command # 1 (SET a 1) of pipeline caused error: {FULL}"),
        redis.exceptions.OutOfMemoryError("command not allowed"),
    ],
    ids=str,
)
def test_valkey_that_is_gone_or_cannot_write_is_an_outage(error):
    assert "live store" in outage_message(error)


def test_database_whose_disk_is_full_is_an_outage():
    wrapped = OperationalError("no space left on device")
    wrapped.__cause__ = psycopg.errors.DiskFull()
    assert "database" in outage_message(wrapped)


def test_mistake_in_a_command_is_no_outage():
    assert not outage_message(redis.exceptions.ResponseError("WRONGTYPE Operation against a key"))
    assert not outage_message(ValueError("MISCONF"))
