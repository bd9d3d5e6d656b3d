"""Tests of one group run in one process of pytest-xdist."""

import os

import pytest


@pytest.mark.xdist_group("groups")
def test_group_is_part_of_the_name_that_the_scheduler_reads(request):
    """Some versions of pytest ignore the name that pytest-xdist 3.8.0 sets; then nothing fails.

    Each process would start a site of its own, and `make test` would take two minutes longer.
    """
    is_distributed = "PYTEST_XDIST_WORKER" in os.environ
    groups_count = is_distributed and request.config.option.loadgroup
    assert request.node.nodeid.endswith("@groups") == bool(groups_count)
