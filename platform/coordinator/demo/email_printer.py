"""Print the emails of the demo's site, above all their codes and links."""

import email
import email.policy
import re
from email.message import EmailMessage
from pathlib import Path

LINK = re.compile(r"https?://\S+")
CODE = re.compile(r"^\s*([A-Z0-9]{3,}-[A-Z0-9]{3,})\s*$", re.MULTILINE)


class EmailPrinter:
    """Watches a folder into which Django's file backend writes emails.

    Args:
        folder: the folder; what lies there already is not printed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._read = {path: path.stat().st_size for path in folder.glob("*.log")}

    def new_lines(self) -> list[str]:
        """Return a line for each email that has arrived since the last call."""
        lines = []
        for path in sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime):
            text = path.read_bytes()[self._read.get(path, 0) :]
            # Django ends each email with a line of dashes; an unfinished one is read next time.
            complete, mark, _ = text.rpartition(b"-" * 79 + b"\n")
            self._read[path] = self._read.get(path, 0) + len(complete) + len(mark)
            for part in filter(bytes.strip, complete.split(b"-" * 79 + b"\n")):
                message = email.message_from_bytes(part.lstrip(), policy=email.policy.default)
                assert isinstance(message, EmailMessage)
                lines.append(describe_email(message))
        return lines


def describe_email(message: EmailMessage) -> str:
    """Return who receives an email, and its code, or its subject and its first link."""
    content = message.get_body(("plain",))
    text = content.get_content() if content else ""
    code, link = CODE.search(text), LINK.search(text)
    about = f"“{message['Subject']}”" + (f" {link[0]}" if link else "")
    if code:
        about = f"code {code[1]}"
    return f"email to {message['To']}: {about}"
