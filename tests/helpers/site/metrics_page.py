"""Read the page that Prometheus reads."""


def parse_metrics(text: str) -> dict[str, float]:
    """Return series → value from the text of the metrics page."""
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }
