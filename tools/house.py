"""The house in numbers: folders, lines, circles of imports, and the files that a prompt and a policy pass.

    python tools/house.py [FOLDER] [--paths]

``FOLDER`` is the root of a checkout, this one by default; so an older one can be held beside it. Circles are counted
over the imports of files, annotations' among them (``TYPE_CHECKING``), those within functions left out. ``--paths``
runs a server of that checkout, with its compiled kernels, on a random model of Llama's shape, and counts over one
request the files of the package in which a function was entered ("a prompt"), those on the deepest stack at a compiled
kernel, and those in which a function was handed the policy, its method, or a plan, reading or selection of
it ("a policy"). Counts of what ran, so any machine gives the same.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

PROMPT = "The key to the north gate lies under the third stone. " * 12
PATH_POLICIES = "dense", "quest(budget=128)", "lfps(k=64)"


def modules(root: Path) -> dict[str, Path]:
    """Files of the package in ``root`` by their module's name."""
    found = {}
    for path in sorted((root / "saccade").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules among ``known`` that a file imports outside of functions."""
    found: set[str] = set()
    for node in outside_functions(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names} & known.keys()
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{one.name}" for one in node.names} & known.keys()
            found |= inner or ({node.module} & known.keys())
    return found


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from outside_functions(node)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of files each of which imports, over others, all of the set: those of more than one, the largest first."""

    def reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
        seen, open_ = {start}, [start]
        while open_:
            new = arrows[open_.pop()] - seen
            seen |= new
            open_ += new
        return seen

    back: dict[str, set[str]] = {name: set() for name in graph}
    for name, others in graph.items():
        for other in others:
            back[other].add(name)
    found, left = [], set(graph)
    while left:
        start = left.pop()
        circle = reached(start, graph) & reached(start, back)
        left -= circle
        if len(circle) > 1:
            found.append(sorted(circle))
    return sorted(found, key=len, reverse=True)


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def print_folders(root: Path) -> None:
    known = modules(root)
    files, count = Counter[str](), Counter[str]()
    for name, path in known.items():
        parts = name.split(".")
        folder = parts[1] if len(parts) > 2 or (len(parts) == 2 and path.name == "__init__.py") else "(single files)"
        if folder == "engine" and len(path.relative_to(root).parts) > 3:
            files[f"engine/{parts[2]}"] += 1
            count[f"engine/{parts[2]}"] += lines([path])
        files[folder] += 1
        count[folder] += lines([path])
    native = [path for path in (root / "csrc").rglob("*") if path.suffix in (".h", ".cpp")]
    files["csrc"], count["csrc"] = len(native), lines(native)
    print(f"{'folder':24} {'files':>5} {'lines':>7}")
    for folder in sorted(files, key=lambda one: (one == "csrc", one)):
        print(f"{folder:24} {files[folder]:5} {count[folder]:7,}")
    print(f"{'in all':24} {len(known) + len(native):5} {lines(known.values()) + count['csrc']:7,}")
    graph = {name: imported(path, known) - {name} for name, path in known.items()}
    across = {
        (name.split(".")[1], other.split(".")[1])
        for name, others in graph.items()
        for other in others
        if name.count(".") and other.count(".") and name.split(".")[1] != other.split(".")[1]
    }
    inner = {
        name: {one for one in others if one.startswith("saccade.engine.")}
        for name, others in graph.items()
        if name.startswith("saccade.engine.")
    }
    entries = [path for path in (root / "saccade/engine").iterdir() if path.name not in ("__pycache__", "__init__.py")]
    print(f"\nentries of engine/                 {len(entries)}")
    for where, arrows in (("saccade/", graph), ("engine/", inner)):
        found = circles(arrows)
        print(f"circles of imports in {where:12} {len(found)} of {[len(one) for one in found]} files")
    print(f"arrows between folders of saccade/ {len(across)}")


class Watch:
    """Files entered in one request, by any thread; those handed the policy; and those of the deepest stack.

    It counts while it is ``open``."""

    def __init__(self, root: Path) -> None:
        self.inside = str(root / "saccade") + "/"
        self.open = False
        self.clear(())

    def clear(self, kinds: tuple[type, ...]) -> None:
        """Begin anew; ``kinds`` are the types of what a policy is made into."""
        self.kinds = kinds
        self.entered: set[str] = set()
        self.policy: dict[str, None] = {}  # as an ordered set
        self.deepest: list[str] = []

    def event(self, frame: FrameType, event: str, arg: object) -> None:
        """A profile function."""
        name = frame.f_code.co_filename
        if not self.open or event != "call" or not name.startswith(self.inside):
            return
        self.entered.add(name)
        if name not in self.policy and any(isinstance(value, self.kinds) for value in frame.f_locals.values()):
            self.policy[name] = None

    def kernel(self, name: str) -> None:
        """Note that a compiled kernel is called from the frame above the caller's (``watch_kernels``)."""
        chain = self.chain(sys._getframe(2))
        if self.open and len(chain) > len(self.deepest):
            self.deepest = chain

    def chain(self, frame: FrameType | None) -> list[str]:
        """Files of the package on the stack, each once, the outermost first."""
        found: dict[str, None] = {}
        while frame is not None:
            if frame.f_code.co_filename.startswith(self.inside):
                found[frame.f_code.co_filename] = None
            frame = frame.f_back
        return list(found)[::-1]


def print_paths(root: Path) -> None:
    sys.path[:0] = [str(root), str(root / "tests"), str(root / "benchmarks")]
    from python_overhead import watch_kernels
    from server_helpers import serving
    from tiny_models import make_checkpoint

    from saccade import LLM, Policy
    from saccade.methods.base import PolicyPart
    from saccade.selection import Selection
    from saccade.selection.plan import DevicePlan
    from saccade.selection.readings import Choice

    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "max_position_embeddings": 2048}
    watch = Watch(root)
    watch_kernels(watch)
    print(f"\n{'policy':20} a prompt: files   on the deepest stack   a policy: files")
    for text in PATH_POLICIES:
        watch.clear((Policy, PolicyPart, DevicePlan, Choice, Selection))
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_checkpoint("llama", Path(scratch, "model"), **sizes)
            threading.setprofile(watch.event)  # of the threads that the engine and the server start
            try:
                llm = LLM(folder, dtype="float32", kv_memory="64MiB", enable_prefix_caching=False)
                with serving(llm) as running:
                    for watch.open in (False, True):  # what is done once is no request's work
                        answer = running.complete(PROMPT, policy=text, max_tokens=4)
                        assert answer.status_code == 200, answer.text
                    watch.open = False
            finally:
                threading.setprofile(None)  # type: ignore[arg-type]
        print(f"{text:20} {len(watch.entered):15} {len(watch.deepest):22} {len(watch.policy):17}")
        where = Counter(name.removeprefix(watch.inside).partition("/")[0] for name in watch.entered)
        print(f"  entered: {', '.join(f'{folder} {count}' for folder, count in where.most_common())}")
        for title, names in (("deepest stack", watch.deepest), ("policy", list(watch.policy))):
            print(f"  {title}: {' > '.join(name.removeprefix(watch.inside) for name in names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=Path(__file__).parent.parent, type=Path, metavar="FOLDER")
    parser.add_argument("--paths", action="store_true", help="also count the files that a prompt and a policy pass")
    options = parser.parse_args()
    root = options.folder.resolve()
    print_folders(root)
    if options.paths:
        print_paths(root)


if __name__ == "__main__":
    main()
