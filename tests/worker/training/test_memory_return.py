"""Test which pages a paused worker gives back, and that it computes as before afterwards."""

import psutil
import torch

from barnraise.training.memory_return import clean_mappings, return_memory

SMAPS = """7f00000000-7f00002000 r-xp 00000000 08:01 1234    /usr/lib/libtorch_cpu.so
Rss:                8 kB
Private_Dirty:      0 kB
Anonymous:          0 kB
Swap:               0 kB
7f00002000-7f00003000 r--p 00002000 08:01 1234    /usr/lib/libtorch_cpu.so
Rss:                4 kB
Private_Dirty:      4 kB
Anonymous:          4 kB
7f00003000-7f00004000 rw-p 00003000 08:01 1234    /usr/lib/libtorch_cpu.so
Private_Dirty:      0 kB
7f00004000-7f00005000 r-xp 00000000 00:00 0    [vdso]
Private_Dirty:      0 kB
7f00005000-7f00006000 r--s 00000000 08:01 99    /var/cache/shard
Swap:               4 kB
7f00006000-7f00009000 r--p 00000000 08:01 77    /usr/lib/locale
Private_Dirty:      0 kB
"""


def test_only_pages_that_a_file_has_are_dropped():
    assert list(clean_mappings(SMAPS)) == [
        (0x7F00000000, 0x7F00002000),
        (0x7F00006000, 0x7F00009000),
    ]
    assert list(clean_mappings("")) == []


def test_process_that_gave_memory_back_computes_as_before():
    torch.manual_seed(1)
    matrix = torch.randn(64, 64, requires_grad=True)

    def gradient() -> torch.Tensor:
        matrix.grad = None
        torch.nn.functional.gelu(matrix @ matrix).sum().backward()
        assert matrix.grad is not None
        return matrix.grad.clone()

    before = gradient()
    used = psutil.Process().memory_info().rss
    return_memory()
    assert psutil.Process().memory_info().rss < used
    assert torch.equal(gradient(), before)
