"""The mirror list in every version, and what this site last heard from each other mirror."""

from django.db import models
from django.utils import timezone

from barnraise.protocol.mirror_list import SignedMirrorList


class MirrorListVersion(models.Model):
    """One version, exactly as it was signed. They stay: who was away for long needs those that changed the roots."""

    version = models.BigIntegerField(primary_key=True)
    body = models.TextField()
    signatures = models.JSONField()
    taken = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["version"]
        verbose_name = "mirror list"

    def __str__(self) -> str:
        return f"mirror list {self.version}"

    @property
    def signed(self) -> SignedMirrorList:
        return SignedMirrorList(body=self.body, signatures=self.signatures)


class PeerStatus(models.Model):
    """What we last heard of another mirror. `why`: what was wrong with the last try; "" where nothing was."""

    key = models.CharField(max_length=64, primary_key=True)
    tried = models.DateTimeField(default=timezone.now)
    heard = models.DateTimeField(null=True)
    why = models.CharField(max_length=300, blank=True)
    failures = models.PositiveSmallIntegerField(default=0)  # in a row
    silent = models.BooleanField(
        default=False, db_default=False
    )  # the last of them was no answer at all, or a 503
    state = models.CharField(max_length=64, blank=True)
    version = models.BigIntegerField(default=0)  # of its list
    apart = models.DateTimeField(
        null=True
    )  # since when its state has been another than ours; None: it is the same
    protocols = models.JSONField(default=list)
    heads = models.JSONField(default=dict)  # log → how far it has come

    def __str__(self) -> str:
        return self.key[:8]
