"""Three typical machines of volunteers, for the estimate.

The rates are what such machines sustain, not what vendors state. Every machine measures its own
when it joins.
"""

from barnraise.planning.hardware import FP32_SHARE, Hardware, MatmulRates, UpdateRate

GB = 10**9
T = 1e12  # FLOP/s

# The same CPU in all three, or nearly: eight cores, two channels of memory, an NVMe disk.
_HOST = {"disk": 200 * GB, "stream": 30e9, "disk_read": 2.0e9, "disk_write": 1.2e9}
_CPU_UPDATES = (
    UpdateRate("host", "float32", 32, 0.9e9),
    UpdateRate("host", "bfloat16", 32, 0.8e9),
    UpdateRate("host", "float32", 8, 0.5e9),
    UpdateRate("host", "bfloat16", 8, 0.45e9),
)


def _describe_gpu(
    name: str, memory: int, device_memory: int, flops: float, bandwidth: float, link: float
) -> Hardware:
    """Describe a computer with a GPU.

    Args:
        name: what it is called.
        memory: bytes of RAM.
        device_memory: bytes of GPU memory.
        flops: sustained FLOP/s in bf16.
        bandwidth: bytes per second of the GPU's memory.
        link: bytes per second between GPU and RAM.
    """
    updates = tuple(
        UpdateRate("device", dtype, bits, bandwidth / bytes_)
        for dtype, bits, bytes_ in (
            ("float32", 32, 28),
            ("bfloat16", 32, 30),
            ("float32", 8, 48),
            ("bfloat16", 8, 56),
        )
    )
    matmul = ((256, 0.3 * flops), (1024, 0.85 * flops), (4096, flops))
    in_fp32 = tuple((width, FP32_SHARE * rate) for width, rate in matmul)
    return Hardware(
        device="cuda",
        name=name,
        cores=8,
        memory=memory,
        device_memory=device_memory,
        dtype="bfloat16",
        matmul=matmul,
        products=(MatmulRates("float32", in_fp32, in_fp32),),
        attention=0.4 * flops,
        elementwise=0.8 * bandwidth,
        to_device=link,
        from_device=link,
        adam=0.9e9,
        attention_backward=0.35 * flops,
        updates=(*_CPU_UPDATES, *updates),
        **_HOST,
    )


LAPTOP = Hardware(
    device="cpu",
    name="a laptop with 8 GB",
    cores=4,
    memory=8 * GB,
    device_memory=0,
    dtype="float32",
    matmul=((256, 0.09 * T), (1024, 0.15 * T)),
    attention=0.05 * T,
    elementwise=12e9,
    to_device=12e9,
    from_device=12e9,
    adam=0.6e9,
    attention_backward=0.05 * T,
    updates=(UpdateRate("host", "float32", 32, 0.6e9),),
    **_HOST | {"disk": 100 * GB, "stream": 20e9, "disk_read": 1.5e9, "disk_write": 0.8e9},
)
REFERENCE_MACHINES = (
    ("8 GB laptop", LAPTOP),
    ("12 GB GPU", _describe_gpu("a GPU with 12 GB", 32 * GB, 12 * GB, 25 * T, 360e9, 12e9)),
    ("24 GB GPU", _describe_gpu("a GPU with 24 GB", 64 * GB, 24 * GB, 70 * T, 900e9, 22e9)),
)
