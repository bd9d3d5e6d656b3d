"""What the hardware probe lets a fake card compute."""

from helpers.cuda.fake_cuda import Card, fake_cuda

from barnraise.swap import hardware_probe


def probe_products(
    dtype: str, widths: tuple[int, ...], vocabularies: tuple[int, ...]
) -> tuple[dict[tuple[str, int], float], list[str]]:
    """Return the FLOPs of each measured product by its key, and the products of unaligned rows."""
    with fake_cuda(Card()) as card:
        calls = hardware_probe.product_calls("cuda", dtype, widths, vocabularies)
        for _, call in calls.values():
            call()
        return {key: flops for key, (flops, _) in calls.items()}, card.unaligned
