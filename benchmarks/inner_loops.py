"""Instructions of the kernels' inner loops: how many a loop has, and how many products each makes.

    python benchmarks/inner_loops.py OBJECT... [--objdump aarch64-linux-gnu-objdump]

OBJECT is kernels_avx2.cpp.o and the like, as a build leaves them. Loops without branches within that multiply are
listed by the kernel they belong to, the densest first; a product is one multiplication and addition of two
numbers, so 8 fused multiply-adds of 8 lanes make 64. Where one CPU makes more products an instruction than another, it
needs fewer of them for the same attention.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from pathlib import Path

# Products of an instruction, by what it is called and which registers it works on.
PRODUCTS = [
    (re.compile(r"vdpbf16ps.*zmm"), 32),
    (re.compile(r"vfn?m(add|sub).*ps.*zmm"), 16),
    (re.compile(r"vfn?m(add|sub).*ps.*ymm"), 8),
    (re.compile(r"bfdot.*\.4s"), 8),
    (re.compile(r"fml[as].*\.4s"), 4),
]
LOADS = re.compile(r"^(?!prf|prefetch|st).*(\[(x|sp)|\()")
JUMP = re.compile(r"^(j\w+|b\.\w+|b|cbn?z|tbn?z)\s+(?:\w+, )?(?:#\d+, )?([0-9a-f]+)\b")
KERNELS = {"prefill": "Prefill|TileTask|prefill", "decode": "Decode|decode", "lists": "Gather|gather"}


def loops(path: Path, objdump: str) -> dict[str, set[tuple[int, int, int]]]:
    """(products, multiplications, loads, instructions) of every loop, by kernel."""
    text = subprocess.run(
        [objdump, "-dC", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for function in re.split(r"\n\n", text):
        lines = re.findall(r"^ *([0-9a-f]+):\s+(.*)$", function, re.MULTILINE)
        kernel = next((k for k, name in KERNELS.items() if re.search(name, function.lstrip().split("\n", 1)[0])), None)
        if kernel is None:
            continue
        at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        for i, (_, line) in enumerate(lines):
            jump = JUMP.match(line)
            first = at.get(int(jump[2], 16)) if jump else None
            if first is None or first >= i:
                continue
            body = [text for _, text in lines[first : i + 1]]
            if any(JUMP.match(x) for x in body[:-1]):
                continue
            made = [n for x in body for pattern, n in PRODUCTS if pattern.search(x)]
            if made:
                loads = sum(bool(LOADS.search(x)) for x in body)
                found[kernel].add((sum(made), len(made), loads, len(body)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", type=Path)
    parser.add_argument("--objdump", default="objdump")
    parser.add_argument("--most", type=int, default=3, help="loops of a kernel")
    options = parser.parse_args()
    print("| kernel | set | products | of them multiplying | loads | instructions | products each |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for path in options.objects:
        for kernel, rows in loops(path, options.objdump).items():
            for products, multiplying, loads, count in sorted(rows, key=lambda x: x[0] / x[3], reverse=True)[
                : options.most
            ]:
                name = path.name.removeprefix("kernels_").split(".")[0]
                print(
                    f"| {kernel} | {name} | {products} | {multiplying} | {loads} | {count} | {products / count:.2f} |"
                )


if __name__ == "__main__":
    main()
