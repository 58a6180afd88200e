"""Counts how often Triton would compile the attention kernels while batches of all sizes are served.

`python -m tests.support.attention_variants` prints one line per kernel: its name and the number of compiled variants.
"""

from tests.support.attention_launches import launch_prefill, launch_split, shape
from tests.support.compile_only import compiled_for_sm90


def main() -> None:
    of = shape(64, 64, 8)
    with compiled_for_sm90() as found:
        for num_seqs, max_blocks, num_tokens, offset in (
            (1, 1, 1, 0),
            (2, 7, 17, 1),
            (16, 16, 64, 3),
            (33, 48, 1000, 0),
        ):
            batch = {"num_seqs": num_seqs, "max_blocks": max_blocks, "offset": offset}
            launch_split(of, **batch, window=16 * num_seqs)
            launch_prefill(of, **batch, window=16 * num_seqs, num_tokens=num_tokens)
    for name in sorted({kernel.name for kernel in found}):
        print(name, len({kernel.ptx for kernel in found if kernel.name == name}))


if __name__ == "__main__":
    main()
