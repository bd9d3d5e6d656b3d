"""The documentation that comes with this version, and what a stranger wants to know at home."""

import re
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from django.conf import settings
from django.db.models import Exists, OuterRef
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.html import format_html, strip_tags
from django.utils.safestring import SafeString, mark_safe
from django.views.decorators.http import require_safe

from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs import markdown
from coordinator.runs.join_policy import Visibility
from coordinator.runs.models import Run, Status
from coordinator.telemetry import samples

FOLDER = Path(settings.ROOT) / "docs"
FIRST = "README.md"
HEADING = re.compile(r"(?m)^#(#+ )")  # the page has a heading above those of the document
RENDERED_HEADING = re.compile(r"<(h[3-6])>(.*?)</h[3-6]>")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")  # of Markdown: its text and its target
# Around a table, which a phone shows by scrolling.
SCROLLED = '<div class="table-scroll" role="group" tabindex="0" aria-label="A table">'
PROOF_SECONDS = 60.0


@dataclass(frozen=True)
class FinishedModel:
    """A model that people have trained here, with what it wrote last."""

    run: Run
    prompt: str
    text: str


_proof: TtlCache[None, FinishedModel | None] = TtlCache(PROOF_SECONDS)


def find_finished_model() -> FinishedModel | None:
    """Return the newest public model that is finished and wrote something."""
    return _proof.get(None, _search_finished_model)


def _search_finished_model() -> FinishedModel | None:
    wrote = samples.WrittenSample.objects.filter(run=OuterRef("pk"))
    finished = Run.objects.filter(
        Exists(wrote), status=Status.FINISHED, visibility=Visibility.PUBLIC, archived=None
    )
    run = finished.order_by("-finished").first()
    groups = samples.list_sample_groups(run, 1) if run else []
    return FinishedModel(run, *groups[0].texts[0]) if run and groups else None


@require_safe
def show_document(request: HttpRequest, name: str = FIRST) -> HttpResponse:
    """Show one document of this version."""
    document = _load_documents().get(name)
    if document is None:
        raise Http404
    title, html = document
    return render(request, "document.html", {"title": title, "html": html})


@require_safe
def show_licence(request: HttpRequest) -> HttpResponse:
    """Show the licence of this version."""
    text = (Path(settings.ROOT) / "LICENSE").read_text("utf-8")
    html = format_html("<pre>{}</pre>", text)
    return render(request, "document.html", {"title": "Licence", "html": html})


@lru_cache(maxsize=1)
def _load_documents() -> dict[str, tuple[str, SafeString]]:
    """Read and render all documents: their paths in the folder → title and HTML."""
    documents = {}
    for path in FOLDER.rglob("*.md"):
        title, _, text = path.read_text("utf-8").partition("\n")
        text = LINK.sub(partial(_keep_link, path.parent), HEADING.sub(r"\1", text))
        html = RENDERED_HEADING.sub(_add_anchor, markdown.render_document(text))
        html = mark_safe(
            html.replace("<table>", f"{SCROLLED}<table>").replace("</table>", "</table></div>")
        )
        documents[path.relative_to(FOLDER).as_posix()] = (title.lstrip("# "), html)
    return documents


def _add_anchor(heading: re.Match[str]) -> str:
    """Give a heading the anchor that links of documents name, as GitHub forms it."""
    tag, content = heading.groups()
    words = re.sub(r"[^\w\- ]", "", strip_tags(content).lower())
    return f'<{tag} id="{words.replace(" ", "-")}">{content}</{tag}>'


def _keep_link(folder: Path, link: re.Match[str]) -> str:
    """Return a link to another document or site as it is, and of any other its text alone."""
    target = link[2].partition("#")[0]
    if "://" in link[2] or not target:
        return link[0]
    path = (folder / target).resolve()
    is_document = path.suffix == ".md" and path.is_relative_to(FOLDER.resolve()) and path.exists()
    return link[0] if is_document else link[1]
