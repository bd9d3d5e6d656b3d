"""Define the errors that reach a person as a sentence."""

from django.core.management import CommandError


class UserError(Exception):
    """A person requested something impossible.

    The text says why, as a sentence without its capital and full stop.
    """

    @property
    def sentence(self) -> str:
        """Return the text as a whole sentence; an address at its beginning stays as it is."""
        text = str(self)
        if "://" not in text.partition(" ")[0]:
            text = text[:1].upper() + text[1:]
        return text if text.endswith((".", "?", "!")) else f"{text}."


class OtherSiteError(UserError, CommandError):
    """This host's keys are not those of the site whose database it uses."""


class RestorePendingError(Exception):
    """This site was restored from a backup and changes nothing yet."""

    sentence = (
        "This site was restored from a backup and is read-only until another mirror has returned "
        "what happened since. Nothing was changed; use another mirror, or try again in a moment."
    )
