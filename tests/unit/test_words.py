"""One word for one thing, the field's word: see docs/developers/glossary.md.

A ratchet: lists and numbers of today's exceptions may only shrink. An exception that is
none any more fails, too, until it is taken out here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tree import Check, Tree, expect_offences, report

# Names of public classes that several packages have by intention: Horovod's.
HOROVODS = {
    *("BF16Compressor", "Compression", "Compressor", "ElasticSampler"),
    *("FP16Compressor", "NoneCompressor", "Backend", "VariablesHandler"),
    "Coordinator",
}
# Names that mean another thing in each of several packages, until they are renamed.
SEVERAL_TODAY = {
    *("Call", "Fenced", "Host", "Job", "Listener", "Membership", "Node"),
    *("Rank", "Reduction", "Report", "Row", "Seat", "Settings", "Share"),
    "Status",
}
# Files whose largest class shares no word with the name of the file.
OTHER_TODAY = {
    f"{folder}/{name}"
    for folder, names in {
        "ringjax": "compression.py failpoints.py optim.py sync.py",
        "ringjax/collectives": "arguments.py",
        "ringjax/control": """
            handshake.py launch_environment.py listener.py objects.py sealing.py
            server.py tls.py waiting.py
        """,
        "ringjax/doctor": "calling.py finding.py sharing.py",
        "ringjax/eager": "arrays.py lane.py",
        "ringjax/elastic": """
            checkpoint.py description.py jax_leaves.py leaves.py loop.py transfer.py
        """,
        "ringjax/keras": "elastic.py",
        "ringjax/keras/backends": "base.py tensorflow.py",
        "ringjax/links": "calibration.py descriptors.py mesh.py",
        "ringjax/membership": "orders.py rendezvous_lookup.py verdicts.py",
        "ringjax/monitor": "metrics.py sockets.py stragglers.py",
        "ringjax/profile": "breakdown.py clocks.py exchanges.py rows.py",
        "ringjax/ray": "adapter.py ray_logger.py runner.py train.py",
        "ringjax/run": "__init__.py cli.py options.py output.py",
        "ringjax/run/elastic": """
            bounds.py liveness.py replacement.py seats.py
        """,
        "ringjax/run/hosts": """
            dialling.py files.py host_command.py names.py processes.py reached.py
        """,
        "ringjax/run/monitor": "endpoint.py",
        "ringjax/spark": "jobs.py task.py",
        "ringjax/spark/common": "loop.py prepared.py saving.py",
        "ringjax/spark/learners": "keras.py",
        "ringjax/tensorflow": """
            alike.py c_api.py compression.py gradient_names.py gradients.py
            xla_handlers.py
        """,
        "ringjax/tensorflow/data": "directory.py",
        "ringjax/tensorflow/elastic": "state.py",
        "ringjax/top": "table.py",
        "ringjax/torch": "autograd.py functions.py readiness.py",
        "ringjax/tuning": "step.py",
        "ringjax/world": """
            coordinates.py elastic_devices.py forming.py profiling.py report.py
            telling.py
        """,
        "ringjax/xla": "lowering.py shares.py ties.py tokens.py",
        "xla_ext/base": "reduce.h reduce_kernels.h",
        "xla_ext/binding": "module.h",
        "xla_ext/collective": "cost.h schedule.h symbolic.h table.h",
        "xla_ext/cuda": "blob.h build_blob.py cuda_on_cpu.h",
        "xla_ext/device": "device_event.h fusion.h",
        "xla_ext/engine/call": "agreement.h descriptor.h executor.h",
        "xla_ext/engine/communicator": "straggler_probe.h",
        "xla_ext/ffi": "registry.h",
    }.items()
    for name in names.split()
}

# Our own words that the field's words have replaced. No name, comment or text has one.
RETIRED = {
    *("board", "boards", "condemn", "condemned", "crowded", "farewell", "flights"),
    *("generation", "generations", "inquiry", "laggards", "lend", "lent", "loan"),
    *("loans", "milestone", "milestones", "numbering", "patience", "succession"),
    *("successions", "tale", "tales", "turnstile", "verdict", "verdicts"),
}
GLOSSARY = "docs/developers/glossary.md"
CORE = "xla_ext ringjax/eager tests/native"  # where they are retired already

# A comment that begins so has no subject. How many there are today, by folder.
HEADLESS = re.compile(r"(?i)(?:who|whoever|what|of|the same)\b")
HEADLESS_TODAY = {"xla_ext": 0, "ringjax": 132}

CLASS = {".py": r"(?m)^class (\w+)", ".h": r"(?m)^(?:class|struct) (\w+)[^;{]*\{"}
CLASS_END = {".py": r"(?m)^[^\s#)]", ".h": r"(?m)^\}"}
WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"


def _classes(tree: Tree, path: str) -> Iterator[tuple[int, str, str]]:
    """How many lines, which name and which place each class at the top level has."""
    kind, text = Path(path).suffix, tree.text(path)
    for place, match in tree.matches(CLASS[kind], path):
        end = re.compile(CLASS_END[kind]).search(text, match.end())
        lines = text.count("\n", match.start(), end.start() if end else len(text))
        yield lines, match[1], place


def _words(name: str) -> set[str]:
    """The words of a name, in the singular."""
    return {word.lower().removesuffix("s") for word in re.findall(WORD, name)}


def one_name_is_one_class(tree: Tree) -> Iterator[str]:
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for path in tree.files("ringjax", ".py"):
        package = path.split("/")[1].removesuffix(".py")
        for _, name, place in _classes(tree, path):
            if not name.startswith("_") and name not in HOROVODS:
                places[name].setdefault(package, place)
    several = {name: found for name, found in places.items() if len(found) > 1}
    for name in sorted(several.keys() - SEVERAL_TODAY):
        for place in several[name].values():
            yield f"{place}: {name} is a class of {', '.join(several[name])}"
    if tree.root == Tree.root:
        for name in sorted(SEVERAL_TODAY - several.keys()):
            yield f"take {name} out of SEVERAL_TODAY: it is one class now"


def a_file_has_a_word_of_its_largest_class(tree: Tree) -> Iterator[str]:
    other = {}
    for path in tree.files("ringjax xla_ext", ".py .h"):
        stem = Path(path.removesuffix("/__init__.py")).stem
        _, name, place = max(_classes(tree, path), default=(0, stem, path))
        if not _words(name) & _words(stem):
            other[path] = (
                f"{place}: {name} is the largest class: name the file after it"
            )
    yield from (other[path] for path in sorted(other.keys() - OTHER_TODAY))
    if tree.root == Tree.root:
        for path in sorted(OTHER_TODAY - other.keys()):
            yield f"take {path} out of OTHER_TODAY"


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
        if ((whole and not before) or trailing) and HEADLESS.match(comment):
            yield f"{path}:{number}: a comment without a subject: {comment}"
        before = bool(whole)


def comments_have_a_subject(tree: Tree) -> Iterator[str]:
    for folder, today in HEADLESS_TODAY.items():
        paths = tree.files(folder, ".py .h .cc .cu")
        found = [offence for path in paths for offence in _headless(tree, path)]
        if len(found) > today or tree.root != Tree.root:
            yield from found
        elif len(found) < today:
            yield f"HEADLESS_TODAY[{folder!r}] is {len(found)} now"


CHECKS: list[Check] = [
    *(one_name_is_one_class, a_file_has_a_word_of_its_largest_class),
    *(no_retired_word_is_left, comments_have_a_subject),
]


@pytest.mark.parametrize("check", CHECKS)
def test_no_file_breaks_the_rule(check: Check) -> None:
    report(check)


def test_each_offence_is_named(tmp_path: Path) -> None:
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
# The rank that waits. What it
# what it waits for
y = lent_memory # !! lent is a retired word
""",
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
