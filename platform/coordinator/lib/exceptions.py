"""What a person is told when something cannot be."""


class UserError(Exception):
    """A person asked for what cannot be; the text says why, as a sentence without its capital and full stop."""

    @property
    def sentence(self) -> str:
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"
