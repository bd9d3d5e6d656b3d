"""Test that databases made from the dump are as a migration leaves them."""

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from helpers.site import migrated_database


@pytest.mark.django_db
def test_created_database_lacks_no_migration_and_counts_on():
    executor = MigrationExecutor(connection)
    assert not executor.migration_plan(executor.loader.graph.leaf_nodes())
    newest = ContentType.objects.order_by("-pk").first()
    assert newest and ContentType.objects.create(app_label="barn", model="roof").pk > newest.pk


def test_other_code_or_requirements_need_another_dump(tmp_path, monkeypatch):
    monkeypatch.setattr(migrated_database, "ROOT", tmp_path)
    (tmp_path / "platform").mkdir()
    digests = set()
    for name, text in (
        ("requirements.txt", "django==5.2"),
        ("platform/models.py", ""),
        ("platform/models.py", "class Roof: ..."),
        ("platform/views.py", ""),
        ("requirements.txt", "django==6.0"),
    ):
        (tmp_path / name).write_text(text)
        digests.add(migrated_database.code_digest())
    assert len(digests) == 5
