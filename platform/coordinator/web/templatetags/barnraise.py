"""What the templates need beyond Django: built files, the theme, drawings, and numbers as people read them."""

import json
import math
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from django import template
from django.conf import settings
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from barnraise.protocol.enums import RunStatus
from barnraise.protocol.mirror_list import MirrorEntry
from coordinator.replication import mirror_list
from coordinator.web import svg_art
from coordinator.web.run_form_fields import CODEC_LABELS

register = template.Library()
FONTS = (
    "besley-latin-wght-normal.woff2",
    "public-sans-latin-wght-normal.woff2",
)  # of the first screen


class FrontendNotBuiltError(Exception):
    """frontend/dist is not there: `make setup` builds it."""


@lru_cache(maxsize=4)
def _manifest(path: Path, changed: int) -> dict:
    return json.loads(path.read_text())


def load_manifest() -> dict:
    path = settings.DIST / "manifest.json"
    try:
        return _manifest(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise FrontendNotBuiltError("the frontend is not built: run `make setup`") from None


@register.simple_tag
def frontend_assets() -> SafeString:
    """The page's style sheets, script and first fonts, by the hashed names Vite gave them."""
    files = load_manifest()
    entry = files["src/main.ts"]
    fonts = [(static(part["file"]),) for name, part in files.items() if name.endswith(FONTS)]
    styles = [(static(name),) for name in entry.get("css", [])]
    return format_html(
        '{}{}<script type="module" src="{}"></script>',
        format_html_join(
            "", '<link rel="preload" href="{}" as="font" type="font/woff2" crossorigin>', fonts
        ),
        format_html_join("", '<link rel="stylesheet" href="{}">', styles),
        static(entry["file"]),
    )


@register.simple_tag
def other_mirrors() -> list[MirrorEntry]:
    """Of the list; none where there is no list."""
    return mirror_list.other_mirrors() if mirror_list.current_version()[0] else []


@register.simple_tag(takes_context=True)
def theme(context) -> SafeString:
    """The attribute for <html> when the visitor chose a theme; the system decides otherwise."""
    request = context.get("request")
    chosen = request.COOKIES.get("theme") if request else None
    return (
        format_html(' data-theme="{}"', chosen) if chosen in ("light", "dark") else SafeString("")
    )


@register.simple_tag
def timber_frame(share: float = 1.0, label: str = "") -> SafeString:
    """The barn, raised as far as `share` (0 to 1) says. `label` is what it says to those who do not see it."""
    plan = svg_art.timber_frame()
    standing = svg_art.count_raised(float(share), len(plan.members))
    lines = format_html_join(
        "",
        '<g data-member="{}" class="{}"><line class="plan" {}/><line class="edge" {}/><line class="timber" {}/></g>',
        ((m.order, _classes(m, standing), _ends(m), _ends(m, 5), _ends(m)) for m in plan.members),
    )
    role = (
        format_html('role="img" aria-label="{}" data-frame', label)
        if label
        else SafeString('aria-hidden="true"')
    )
    return format_html(
        '<svg class="frame" viewBox="0 0 {} {}" {}>{}</svg>', plan.width, plan.height, role, lines
    )


def _classes(member: svg_art.Timber, standing: int) -> str:
    return " ".join(["is-slender"] * member.slender + ["is-raised"] * (member.order < standing))


def _ends(m: svg_art.Timber, short: float = 0) -> SafeString:
    """`short`: how far from each end the line stops; a gap around a timber must not cut those it is joined to."""
    across, down = m.x2 - m.x1, m.y2 - m.y1
    part = short / max(1.0, math.hypot(across, down))
    ends = (m.x1 + across * part, m.y1 + down * part, m.x2 - across * part, m.y2 - down * part)
    return format_html('x1="{}" y1="{}" x2="{}" y2="{}"', *(f"{end:.1f}" for end in ends))


@register.simple_tag
def quilt(name: object) -> SafeString:
    """The barn quilt that stands for a run, by its id."""
    return _quilt(str(name))


@lru_cache(maxsize=4096)
def _quilt(name: str) -> SafeString:
    patches = format_html_join("", '<polygon class="{}" points="{}"/>', svg_art.quilt(name))
    ground = SafeString('<rect class="g" width="6" height="6"/>')
    return format_html(
        '<svg class="quilt" viewBox="0 0 6 6" aria-hidden="true">{}{}</svg>', ground, patches
    )


@register.filter
def count(value: float) -> str:
    """1234567 → "1.23 M": as src/format.ts."""
    value = float(value)
    for unit in ("", " K", " M", " B", " T"):
        if value < 999.5:
            digits = 0 if not unit else 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} P"


@register.filter
def size(value: float) -> str:
    """Bytes in GiB or MiB."""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


@register.filter
def percent(share: float) -> str:
    """As src/format.ts: never 100 % before it is."""
    value = max(0.0, min(1.0, float(share))) * 100
    return (
        f"{value:.0f} %"
        if value in (0, 100)
        else f"{value:.1f} %"
        if value < 9.95
        else f"{int(value)} %"
    )


@register.filter
def codec_label(codec: str) -> str:
    """Name a codec as the run form does, such as "Every value, 4 bits"."""
    return CODEC_LABELS.get(codec, codec)


@register.filter
def status_word(status: str) -> str:
    return RunStatus(status).value.capitalize()


@register.filter
def span(seconds: float) -> str:
    """How long, in the one unit that says it best: 0.42 s, 35 s, 12 min, 3.4 h, 5.2 days, 8 years."""
    seconds = float(seconds)
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, length, past in (("min", 60, 90), ("h", 3600, 48), ("days", 86_400, 730)):
        if (value := seconds / length) < past:
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 31_557_600:,.0f} years"


@register.filter
def skew(ahead: float) -> str:
    """Of a clock, in seconds: "right" within one."""
    return "right" if abs(ahead) < 1 else f"{ahead:+,.0f} s"


@register.filter
def gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


@register.filter
def ago(then: datetime) -> str:
    """As timesince, without its "0 minutes"."""
    return f"{timesince(then)} ago" if (timezone.now() - then).total_seconds() >= 60 else "just now"


@register.filter
def rate(value: float, unit: str) -> str:
    """1.83e11, "FLOP" → "183 GFLOP/s": with the letters that rates have, which are not those of counts."""
    return f"{count(value).replace(' B', ' G') if value >= 1000 else f'{value:.0f} '}{unit}/s"
