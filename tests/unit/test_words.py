"""Checks of words: one word for one thing (docs/developers/glossary.md).

The lists of exceptions may only shrink: an exception that is no longer needed fails the
check until it is removed from its list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tree import Check, Tree, expect_offences, report

# Names of public classes that several packages define, because Horovod does.
SEVERAL = {
    *("BF16Compressor", "Compression", "Compressor", "ElasticSampler"),
    *("FP16Compressor", "NoneCompressor", "Backend", "VariablesHandler"),
    "Coordinator",
}
# Files whose largest class has another name than the file, with the reason.
OTHER = {
    "ringjax/keras/elastic.py": "Horovod's module path",
    "ringjax/mxnet.py": "named after the framework",
    "ringjax/optim.py": "named after optax; the class is its state",
    "ringjax/ray/runner.py": "Horovod's module path",
    "ringjax/run/hosts/processes.py": "functions about processes; the class is one",
    "ringjax/tensorflow/elastic/__init__.py": "Horovod's module path",
    "ringjax/tensorflow/functions.py": "Horovod's module path",
    "xla_ext/base/reduce.h": "a function; the class is its argument",
    "xla_ext/base/reduce_kernels.h": "functions for each operator",
    "xla_ext/binding/module.h": "functions that register each part",
    "xla_ext/collective/cost.h": "a function over the traffic of a step",
    "xla_ext/collective/schedule.h": "a schedule is a list of steps",
    "xla_ext/collective/symbolic.h": "runs a schedule on symbolic memory",
    "xla_ext/collective/table.h": "the table of the algorithms",
    "xla_ext/cuda/blob.h": "a blob holds images",
    "xla_ext/cuda/build_blob.py": "a blob holds images",
    "xla_ext/cuda/cuda_on_cpu.h": "declares CUDA's own names",
    "xla_ext/device/device_event.h": "the context comes before its events",
    "xla_ext/device/fusion.h": "a fusion plan is a list of segments",
    "xla_ext/engine/call/agreement.h": "a function; the class is its argument",
    "xla_ext/engine/call/descriptor.h": "the description of a call",
    "xla_ext/engine/call/executor.h": "a function over endpoints",
    "xla_ext/exact/fixed_point.h": "functions; the class is a result",
    "xla_ext/engine/communicator/straggler_probe.h": "the probe belongs to a policy",
    "xla_ext/ffi/registry.h": "functions over what is registered",
    "xla_ext/transport/ofi.h": "declares names of libfabric",
}

# Words of ringjax that words of the field have replaced. No file may contain them.
RETIRED = {
    *("board", "boards", "condemn", "condemned", "crowded", "farewell", "flights"),
    *("generation", "generations", "inquiry", "laggards", "lend", "lent", "loan"),
    *("loans", "milestone", "milestones", "numbering", "patience", "succession"),
    *("successions", "tale", "tales", "turnstile", "verdict", "verdicts"),
}
GLOSSARY = "docs/developers/glossary.md"
CORE = "xla_ext ringjax/eager tests/native"

# A comment or a docstring that begins with one of these words has no subject.
HEADLESS = re.compile(r"(?i)(?:who|whoever|whose|what|whatever|of|the same)\b")
# A comment at the end of a line that begins with one of these words has no subject.
FRAGMENT = re.compile(
    r"(?i)(?:by|in|on|for(?! example)|to|since|until|without|because|per|at|with)\b"
)

CLASS = {".py": r"(?m)^class (\w+)", ".h": r"(?m)^(?:class|struct) (\w+)[^;{]*\{"}
CLASS_END = {".py": r"(?m)^[^\s#)]", ".h": r"(?m)^\}"}
WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"


def _classes(tree: Tree, path: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number of lines, the name and the place of each top-level class."""
    kind, text = Path(path).suffix, tree.text(path)
    for place, match in tree.matches(CLASS[kind], path):
        end = re.compile(CLASS_END[kind]).search(text, match.end())
        lines = text.count("\n", match.start(), end.start() if end else len(text))
        yield lines, match[1], place


def _words(name: str) -> set[str]:
    """Returns the words of a name in lower case, in the singular."""
    return {word.lower().removesuffix("s") for word in re.findall(WORD, name)}


def one_name_is_one_class(tree: Tree) -> Iterator[str]:
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for path in tree.files("ringjax", ".py"):
        package = path.split("/")[1].removesuffix(".py")
        for _, name, place in _classes(tree, path):
            if not name.startswith("_"):
                places[name].setdefault(package, place)
    several = {name: found for name, found in places.items() if len(found) > 1}
    for name in sorted(several.keys() - SEVERAL):
        for place in several[name].values():
            yield f"{place}: {name} is a class of {', '.join(several[name])}"
    if tree.root == Tree.root:
        for name in sorted(SEVERAL - several.keys()):
            yield f"take {name} out of SEVERAL: it is one class now"


def a_file_has_a_word_of_its_largest_class(tree: Tree) -> Iterator[str]:
    other = {}
    for path in tree.files("ringjax xla_ext", ".py .h"):
        stem = Path(path.removesuffix("/__init__.py")).stem
        _, name, place = max(_classes(tree, path), default=(0, stem, path))
        if not _words(name) & _words(stem):
            other[path] = (
                f"{place}: {name} is the largest class: name the file after it"
            )
    yield from (other[path] for path in sorted(other.keys() - OTHER))
    if tree.root == Tree.root:
        for path in sorted(OTHER.keys() - other.keys()):
            yield f"take {path} out of OTHER"


def no_retired_word_is_left(tree: Tree) -> Iterator[str]:
    for path in tree.files(CORE, ".h .cc .cu .py"):
        for number, line in enumerate(tree.text(path).splitlines(), 1):
            for word in RETIRED & {word.lower() for word in re.findall(WORD, line)}:
                yield f"{path}:{number}: {word} is a retired word: see {GLOSSARY}"


def _headless(tree: Tree, path: str) -> Iterator[str]:
    mark = "#" if path.endswith(".py") else "//"
    before = False
    for number, line in enumerate(tree.text(path).splitlines(), 1):
        code, found, comment = line.partition(f"{mark} ")
        whole = found and not code.strip()
        trailing = found and code.endswith("  ") and code.strip()
        begins = (whole and not before) or trailing
        fragment = trailing and FRAGMENT.match(comment)
        if begins and (HEADLESS.match(comment) or fragment):
            yield f"{path}:{number}: a comment without a subject: {comment}"
        before = bool(whole)
        if path.endswith(".py") and HEADLESS.match(line.partition('"""')[2]):
            yield f"{path}:{number}: a docstring without a subject: {line.strip()}"


def comments_have_a_subject(tree: Tree) -> Iterator[str]:
    for path in tree.files("ringjax xla_ext benchmarks", ".py .h .cc .cu"):
        yield from _headless(tree, path)


CHECKS: list[Check] = [
    *(one_name_is_one_class, a_file_has_a_word_of_its_largest_class),
    *(no_retired_word_is_left, comments_have_a_subject),
]


@pytest.mark.parametrize("check", CHECKS)
def test_all_files_follow_the_rules(check: Check) -> None:
    report(check)


def test_each_offence_is_reported(tmp_path: Path) -> None:
    files = {
        "ringjax/one.py": """'''D.'''
class Depot: # !! Depot is a class of one, two !! Depot is the largest class
    pass
""",
        "ringjax/two/depots.py": """'''D.'''
class Depot: # !! Depot is a class of one, two
    pass
""",
        "ringjax/eager/lane.py": """'''D.'''
x = 1  # Who waits. !! a comment without a subject
z = 1  # by rank !! a comment without a subject
# The rank that waits. What it
# what it waits for
y = lent_memory # !! lent is a retired word
""",
        "ringjax/eager/depth.py": '"""Who waits.""" # !! a docstring without a subject',
        "xla_ext/call.h": """// A call.
struct Small {
};
class Boards { // !! Boards is the largest class !! boards is a retired word
  int a;
};
void TakeLoan(); // !! loan is a retired word
// Of the call. !! a comment without a subject
int condemned_; // !! condemned is a retired word
""",
        "xla_ext/link.h": "// A link.\nstruct RingLink {\n  int boarding, stale;\n};\n",
        "tests/native/a.cc": "// T.\nint patience; // !! patience is a retired word\n",
    }
    expect_offences(CHECKS, tmp_path, files)
