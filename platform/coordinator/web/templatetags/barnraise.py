"""Template tags and filters: built files, the theme, drawings, and readable numbers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from django import template
from django.conf import settings
from django.templatetags.static import static
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from barnraise.formats import (
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_share,
)
from barnraise.protocol.enums import Activity
from barnraise.protocol.mirror_list import MirrorEntry
from coordinator.accounts import sign_up
from coordinator.accounts.models import Machine
from coordinator.fleet.crew_places import find_crew_place
from coordinator.fleet.models import Membership
from coordinator.replication import mirror_list
from coordinator.runs.models import Run
from coordinator.telemetry.run_cards import describe_progress
from coordinator.web import install_lines, svg_art, worker_wheel
from coordinator.web.run_form_fields import CODEC_LABELS

register = template.Library()
# The fonts of the first screen.
HTMX = "/htmx.org/dist/htmx.esm.js"  # which the script of every page imports later
FONTS = ("besley-latin-wght-normal.woff2", "public-sans-latin-wght-normal.woff2")


SECONDS_PER_YEAR = 31_557_600
SPARK_WIDTH, SPARK_HEIGHT = 240, 40  # drawing units
BARS_WIDTH, BARS_HEIGHT = 900, 120
EDGE_GAP = 5  # drawing units: the edge around a timber must not cut the timbers that it joins


class FrontendNotBuiltError(Exception):
    """Raised when frontend/dist is missing; `make setup` builds it."""


@lru_cache(maxsize=4)
def _read_manifest(path: Path, modified_ns: int) -> dict[str, Any]:
    """Read the manifest; the time of modification makes the cache forget an older version."""
    return json.loads(path.read_text())


def load_manifest() -> dict[str, Any]:
    """Read Vite's manifest, or the cached one if the file has not changed."""
    path = settings.DIST / "manifest.json"
    try:
        return _read_manifest(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise FrontendNotBuiltError("the frontend is not built: run `make setup`") from None


@register.simple_tag
def frontend_assets() -> SafeString:
    """Link the style sheets, the script and the first fonts by their hashed names."""
    files = load_manifest()
    entry = files["src/main.ts"]
    fonts = [(static(part["file"]),) for name, part in files.items() if name.endswith(FONTS)]
    styles = [(static(name),) for name in entry.get("css", [])]
    htmx = next(part["file"] for name, part in files.items() if name.endswith(HTMX))
    return format_html(
        '{}{}<link rel="modulepreload" href="{}"><script type="module" src="{}"></script>',
        format_html_join(
            "", '<link rel="preload" href="{}" as="font" type="font/woff2" crossorigin>', fonts
        ),
        format_html_join("", '<link rel="stylesheet" href="{}">', styles),
        static(htmx),
        static(entry["file"]),
    )


@register.inclusion_tag("parts/install.html", takes_context=True)
def install_block(context: dict[str, Any]) -> dict[str, Any]:
    """Show how to install the worker, for the visitor's system first."""
    request = context["request"]
    wheel = worker_wheel.find_wheel()
    if wheel is None:
        return {"wheel": None}
    wheel_url, constraints_url = (
        request.build_absolute_uri(reverse("download", args=[name]))
        for name in (wheel.name, worker_wheel.CONSTRAINTS)
    )
    return {
        "wheel": wheel,
        "systems": install_lines.SYSTEMS.items(),
        "hardware": install_lines.HARDWARE.items(),
        "system": install_lines.detect_system(request.headers.get("User-Agent", "")),
        "choices": install_lines.install_choices(wheel_url, constraints_url, wheel.sha256),
        "unsupported": install_lines.UNSUPPORTED,
    }


@register.inclusion_tag("parts/share_tags.html", takes_context=True)
def share_tags(
    context: dict[str, Any], title: str, description: str, card: str, key: object
) -> dict[str, Any]:
    """Describe a page to chat programs that show a link to it (OpenGraph); `card` is a route."""
    request = context["request"]
    return {
        "title": title,
        "description": description,
        "url": request.build_absolute_uri(request.path),
        "image": request.build_absolute_uri(reverse(card, args=[key])),
    }


@register.simple_tag
def day_bars(days: Sequence[tuple[date, int]], label: str) -> SafeString:
    """Draw a bar for each day; `label` is for screen readers, and each bar has a tooltip."""
    most = max((tokens for _, tokens in days), default=0) or 1
    width = BARS_WIDTH / max(1, len(days))
    bars = format_html_join(
        "",
        '<rect x="{}" y="{}" width="{}" height="{}"><title>{}: {} tokens</title></rect>',
        (
            (
                f"{n * width:.2f}",
                f"{BARS_HEIGHT * (1 - tokens / most):.2f}",
                f"{width * 0.8:.2f}",
                f"{BARS_HEIGHT * tokens / most:.2f}",
                f"{day:%-d %B}",
                format_count(tokens),
            )
            for n, (day, tokens) in enumerate(days)
        ),
    )
    total = format_count(sum(tokens for _, tokens in days))
    return format_html(
        '<svg class="day-bars" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}: {} tokens in {} days, at most {} in one day">{}</svg>',
        BARS_WIDTH,
        BARS_HEIGHT,
        label,
        total,
        len(days),
        format_count(most if total != "0" else 0),
        bars,
    )


@register.simple_tag
def sign_up_closed() -> str:
    """Say why a visitor cannot create an account."""
    return sign_up.closed_sentence()


@register.simple_tag
def preload_script(source: str) -> SafeString:
    """Let the browser fetch a script of one page, and what it imports, while it reads the page.

    Args:
        source: the script's name in the manifest, such as "src/runPage.ts".
    """
    files = load_manifest()
    names = list(_collect_imports(files, source))
    scripts = [(static(files[name]["file"]),) for name in names]
    styles = [(static(style),) for name in names for style in files[name].get("css", [])]
    return format_html(
        "{}{}",
        format_html_join("", '<link rel="modulepreload" href="{}">', scripts),
        format_html_join("", '<link rel="stylesheet" href="{}">', styles),
    )


def _collect_imports(files: dict[str, Any], source: str) -> Iterator[str]:
    """Yield a script and all that it imports, without the script of every page."""
    waiting, seen = [source], {"src/main.ts"}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        waiting += files[name].get("imports", [])


@register.simple_tag
def other_mirrors() -> list[MirrorEntry]:
    """List the other mirrors; none where there is no mirror list."""
    return mirror_list.other_mirrors() if mirror_list.current_version()[0] else []


@register.simple_tag(takes_context=True)
def theme(context: dict[str, Any]) -> SafeString:
    """Render the attribute of <html> for the chosen theme; without it the system decides."""
    request = context.get("request")
    chosen = request.COOKIES.get("theme") if request else None
    if chosen not in ("light", "dark"):
        return SafeString("")
    return format_html(' data-theme="{}"', chosen)


@register.simple_tag
def timber_frame(share: float = 1.0, label: str = "") -> SafeString:
    """Draw the barn, raised to `share` (0 to 1); `label` is its text for screen readers."""
    drawing = svg_art.timber_frame()
    raised = svg_art.count_raised(float(share), len(drawing.members))
    lines = format_html_join(
        "",
        '<g data-timber="{}" class="{}"><line class="outline" {}/><line class="gap" {}/>'
        '<line class="timber" {}/></g>',
        (
            (
                timber.order,
                _timber_classes(timber, raised),
                _line_ends(timber),
                _line_ends(timber, EDGE_GAP),
                _line_ends(timber),
            )
            for timber in drawing.members
        ),
    )
    role = SafeString('aria-hidden="true"')
    if label:
        role = format_html('role="img" aria-label="{}" data-barn', label)
    return format_html(
        '<svg class="barn" viewBox="0 0 {} {}" {}>{}</svg>',
        drawing.width,
        drawing.height,
        role,
        lines,
    )


def _timber_classes(timber: svg_art.Timber, raised: int) -> str:
    """Return the CSS classes of a timber while so many timbers are raised."""
    classes = []
    if timber.slender:
        classes.append("is-slender")
    if timber.order < raised:
        classes.append("is-raised")
    return " ".join(classes)


def _line_ends(timber: svg_art.Timber, gap: float = 0) -> SafeString:
    """Render the coordinates of a timber's line, shortened by `gap` units at both ends."""
    across = timber.x2 - timber.x1
    down = timber.y2 - timber.y1
    part = gap / max(1.0, math.hypot(across, down))
    coordinates = (
        timber.x1 + across * part,
        timber.y1 + down * part,
        timber.x2 - across * part,
        timber.y2 - down * part,
    )
    return format_html('x1="{}" y1="{}" x2="{}" y2="{}"', *(f"{c:.1f}" for c in coordinates))


@register.simple_tag
def spark_line(values: Sequence[float], label: str) -> SafeString:
    """Draw a small line of values, each as far from the next; `label` is for screen readers."""
    most = max(values, default=0.0) or 1.0
    step = SPARK_WIDTH / max(1, len(values) - 1)
    points = " ".join(
        f"{n * step:.1f},{SPARK_HEIGHT - value / most * SPARK_HEIGHT:.1f}"
        for n, value in enumerate(values)
    )
    return format_html(
        '<svg class="spark-line" viewBox="0 -2 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}, from {} to {}, at most {}"><polyline points="{}"/></svg>',
        SPARK_WIDTH,
        SPARK_HEIGHT + 4,
        label,
        format_count(values[0] if values else 0),
        format_count(values[-1] if values else 0),
        format_count(max(values, default=0)),
        points,
    )


@register.simple_tag
def quilt(name: object) -> SafeString:
    """Draw the barn quilt of a run, by its id."""
    return _draw_quilt(str(name))


@lru_cache(maxsize=4096)
def _draw_quilt(name: str) -> SafeString:
    patches = format_html_join("", '<polygon class="{}" points="{}"/>', svg_art.quilt(name))
    ground = SafeString('<rect class="quilt-ground" width="6" height="6"/>')
    return format_html(
        '<svg class="quilt" viewBox="0 0 6 6" aria-hidden="true">{}{}</svg>', ground, patches
    )


# Figures are written as in terminals and by the frontend's src/format.ts.
register.filter("count", format_count)
register.filter("size", format_bytes)
register.filter("percent", format_share)
register.filter("loss", format_loss)
register.filter("duration", format_duration)
register.filter("crew_place", find_crew_place)
register.filter("progress", describe_progress)


@register.filter
def item(values: Mapping[Any, Any], key: object) -> Any:
    """Return a value of a mapping; "" without one."""
    return values.get(key, "")


@register.filter
def current_membership(machine: Machine) -> Membership | None:
    """Return a machine's part in the run that it trains now, or in which it was seen last.

    The machine's memberships come with the newest first, as `machines_of_person` loads them.
    """
    memberships = machine.memberships.all()
    trains = (each for each in memberships if each.is_alive and each.activity == Activity.TRAINING)
    return next(trains, memberships[0] if memberships else None)


@register.filter
def code_words(text: str) -> SafeString:
    """Show what stands between backticks as code, as in a terminal's sentences."""
    parts = text.split("`")
    return format_html_join(
        "",
        "{}",
        (
            (part if n % 2 == 0 else format_html("<code>{}</code>", part),)
            for n, part in enumerate(parts)
        ),
    )


@register.filter
def codec_label(codec: str) -> str:
    """Name a codec as the run form does, such as "Every value, 4 bits"."""
    return CODEC_LABELS.get(codec, codec)


@register.filter
def status_word(run: Run) -> str:
    """Name a run's status; a draft that its owner has launched is launching."""
    return "Launching" if run.is_launching else run.status.capitalize()


@register.filter
def span(seconds: float) -> str:
    """Format a duration in one unit: 0.42 s, 35 s, 12 min, 3.4 h, 5.2 days, 8 years."""
    seconds = float(seconds)
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, unit_seconds, limit in (("min", 60, 90), ("h", 3600, 48), ("days", 86_400, 730)):
        value = seconds / unit_seconds
        if value < limit:
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / SECONDS_PER_YEAR:,.0f} years"


@register.filter
def moment(seconds: float) -> str:
    """Format seconds since 1970 as day and time in UTC: "25 Nov 21:05:09"."""
    at = datetime.fromtimestamp(float(seconds), UTC)
    return f"{at.day} {at:%b %H:%M:%S}"


@register.filter
def skew(offset: float) -> str:
    """Format a clock's offset in seconds; "correct" within one second."""
    return "correct" if abs(offset) < 1 else f"{offset:+,.0f} s"


@register.filter
def ago(then: datetime) -> str:
    """Format how long ago something was; "just now" within a minute."""
    if (timezone.now() - then).total_seconds() < 60:
        return "just now"
    return f"{timesince(then)} ago"


@register.filter
def rate(value: float, unit: str) -> str:
    """Format a rate, such as 1.83e11, "FLOP" → "183 GFLOP/s", with SI prefixes."""
    number = format_count(value).replace(" B", " G") if value >= 1000 else f"{value:.0f} "
    return f"{number}{unit}/s"
