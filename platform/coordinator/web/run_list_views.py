"""The list of runs with its search, filters and orders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.db.models import Case, IntegerField, Q, QuerySet, Value, When
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from barnraise.protocol.enums import RunStatus
from coordinator.runs.models import Run
from coordinator.telemetry.run_cards import RunCard, load_run_cards
from coordinator.web.svg_art import sparkline

PAGE_SIZE = 40  # runs on one page
MAX_PAGE = 10_000
MAX_SORTED = 400  # runs that are ordered by a figure: the newest of those that match
MAX_QUERY = 100  # characters
OVER = (RunStatus.FINISHED.value, RunStatus.CANCELLED.value)
SCOPES = {"all": "All", "mine": "Mine", "joined": "Joined by my machines"}
STATUSES = {
    "": "Any",
    "active": "Active",
    **{status.value: status.value.capitalize() for status in RunStatus},
}
SORTS = {
    "newest": "Newest",
    "name": "Name",
    "progress": "Progress",
    "loss": "Loss",
    "rate": "Tokens/s",
    "machines": "Machines",
}


@dataclass(frozen=True)
class RunFilter:
    """What a visitor selects in the list; a value that is not allowed becomes its default."""

    text: str = ""
    scope: str = "all"
    status: str = ""
    sort: str = "newest"
    page: int = 1

    @classmethod
    def parse(cls, request: HttpRequest) -> "RunFilter":
        """Read the filter from the address."""
        get = request.GET.get
        text = " ".join(get("q", "").replace("\0", "").split())[:MAX_QUERY]
        scope = get("show", "all")
        status = get("status", "")
        sort = get("sort", "newest")
        page = get("page", "1")
        is_number = page.isascii() and page.isdigit() and len(page) < 6
        return cls(
            text=text,
            scope=scope if scope in SCOPES and request.user.is_authenticated else "all",
            status=status if status in STATUSES else "",
            sort=sort if sort in SORTS else "newest",
            page=min(MAX_PAGE, max(1, int(page))) if is_number else 1,
        )

    def select(self, request: HttpRequest) -> QuerySet[Run]:
        """Select the matching runs; active ones come first."""
        runs = Run.objects.listed_for(request.user).select_related("owner", "parent")
        if self.text:
            runs = runs.filter(Q(name__icontains=self.text) | Q(owner__name__icontains=self.text))
        if self.scope == "mine":
            runs = runs.filter(owner=request.user)
        elif self.scope == "joined":
            machines = request.user.machines.values("pk")  # pyright: ignore[reportAttributeAccessIssue]  # signed in
            runs = runs.filter(memberships__machine__in=machines).distinct()
        if self.status == "active":
            runs = runs.exclude(status__in=OVER)
        elif self.status:
            runs = runs.filter(status=self.status)
        is_over = Case(
            When(status__in=OVER, then=Value(1)), default=Value(0), output_field=IntegerField()
        )
        if self.sort == "name":
            return runs.order_by("name", "-pk")
        return runs.annotate(ended=is_over).order_by("ended", "-pk")

    def address(self, page: int) -> str:
        """Return the address of a page of this list."""
        values = {
            "q": self.text,
            "show": "" if self.scope == "all" else self.scope,
            "status": self.status,
            "sort": "" if self.sort == "newest" else self.sort,
            "page": "" if page == 1 else str(page),
        }
        return "/runs/?" + urlencode({name: value for name, value in values.items() if value})


@dataclass(frozen=True)
class RunRow:
    """One row of the list."""

    run: Run
    card: RunCard
    parent: Run | None = None  # that it was copied from, if the visitor may know it

    @property
    def share(self) -> float:
        """The trained share of the budget."""
        return min(1.0, self.run.ledger_tokens / max(1, self.run.token_budget))

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the budget is spent; None if the run does not train."""
        return self.card.seconds_left(self.run)

    @property
    def curve(self) -> str:
        """The points of the small curve, in a drawing of 100 by 24 units."""
        return sparkline(self.card.curve)


def _first_highest(value: float | None) -> tuple[bool, float]:
    return value is None, -(value or 0)


# What each order by a figure compares; the lowest comes first.
FIGURES: dict[str, Callable[[RunRow], Any]] = {
    "progress": lambda row: -row.share,
    "loss": lambda row: (row.card.loss is None, row.card.loss or 0),
    "rate": lambda row: _first_highest(row.card.rate or None),
    "machines": lambda row: _first_highest(row.card.machines or None),
}


@require_safe
def list_runs(request: HttpRequest) -> HttpResponse:
    """List the runs that match the filter in the address."""
    wanted = RunFilter.parse(request)
    first = (wanted.page - 1) * PAGE_SIZE
    selected = wanted.select(request)
    key = FIGURES.get(wanted.sort)
    if key:
        runs = list(selected[:MAX_SORTED])
        rows = sorted(_build_rows(request, runs), key=key)[first : first + PAGE_SIZE + 1]
    else:
        # One run more than the page shows reveals whether there is a next page.
        rows = _build_rows(request, list(selected[first : first + PAGE_SIZE + 1]))
    context = {
        "filter": wanted,
        "rows": rows[:PAGE_SIZE],
        "previous": wanted.address(wanted.page - 1) if wanted.page > 1 else "",
        "next": wanted.address(wanted.page + 1) if len(rows) > PAGE_SIZE else "",
        "here": wanted.address(wanted.page),
        "scopes": SCOPES if request.user.is_authenticated else {},
        "statuses": STATUSES,
        "sorts": SORTS,
        "is_filtered": wanted != RunFilter(sort=wanted.sort, page=wanted.page),
    }
    is_fragment = request.headers.get("HX-Request") == "true"
    return render(request, "parts/run_list.html" if is_fragment else "runs.html", context)


def _build_rows(request: HttpRequest, runs: list[Run]) -> list[RunRow]:
    cards: dict[UUID, RunCard] = load_run_cards(runs)
    parents = {run.parent_id for run in runs if run.parent_id}
    shown = Run.objects.listed_for(request.user).exclude(spec_text="").in_bulk(parents)
    return [
        RunRow(run, cards[run.pk], shown.get(run.parent_id) if run.parent_id else None)
        for run in runs
    ]
