"""The mirrors that count in a run: those that launched it and those of the newest list. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from barnraise.protocol.mirror_list import MirrorList, missing_signatures


@dataclass(frozen=True)
class RunMirrors:
    """The mirrors of one run."""

    run: str
    keys: frozenset[str]  # keys of the mirrors whose tickets count
    roots: frozenset[str]  # keys of the mirrors that launched the run
    threshold: int = 1  # how many mirrors together may sign a verdict at least
    # Those of `keys` whose tickets no longer permit a connection.
    expelled: frozenset[str] = frozenset()
    newest_list: MirrorList | None = None  # the newest mirror list, if the run's mirrors are in it

    @property
    def admitting(self) -> frozenset[str]:
        """Return the keys of the mirrors whose tickets permit a connection."""
        return self.keys - self.expelled

    @property
    def list_version(self) -> int:
        """Return the version of the newest mirror list; 0 without one."""
        return self.newest_list.version if self.newest_list else 0

    def with_list(self, newest: MirrorList) -> "RunMirrors":
        """Return what follows from a mirror list; the same if it is of other mirrors."""
        if not self.roots & newest.keys:
            return self
        return replace(
            self, keys=self.roots | newest.keys, expelled=newest.expelled, newest_list=newest
        )

    def missing_signatures(self, signers: Collection[str], version: int) -> int:
        """Return how many mirrors' signatures are missing from what binds all machines."""
        return missing_signatures(self.roots, self.threshold, self.newest_list, signers, version)
