"""Store the mirror list in every version, and the last known status of each other mirror."""

from django.db import models
from django.utils import timezone

from barnraise.protocol.mirror_list import SignedMirrorList


class MirrorListVersion(models.Model):
    """Store one version exactly as it was signed.

    Versions are kept: a mirror that was away for long needs those that changed the roots.
    """

    version = models.BigIntegerField(primary_key=True)
    body = models.TextField()
    signatures = models.JSONField()
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["version"]
        verbose_name = "mirror list"

    def __str__(self) -> str:
        return f"mirror list {self.version}"

    @property
    def signed(self) -> SignedMirrorList:
        """Return the list with its signatures."""
        return SignedMirrorList(body=self.body, signatures=self.signatures)


class PeerStatus(models.Model):
    """Store what this site last learned about another mirror."""

    key = models.CharField(max_length=64, primary_key=True)
    last_attempt = models.DateTimeField(default=timezone.now)
    last_seen = models.DateTimeField(null=True)
    # Of the last attempt; "" if nothing was wrong.
    last_error = models.CharField(max_length=300, blank=True)
    failures = models.PositiveSmallIntegerField(default=0)  # in a row
    unreachable = models.BooleanField(default=False, db_default=False)  # no answer, or a 503
    state_hash = models.CharField(max_length=64, blank=True)
    list_version = models.BigIntegerField(default=0)
    diverged_since = models.DateTimeField(null=True)  # None while its state equals ours
    protocols = models.JSONField(default=list)
    heads = models.JSONField(default=dict)  # log → number of its last event there

    def __str__(self) -> str:
        return self.key[:8]
