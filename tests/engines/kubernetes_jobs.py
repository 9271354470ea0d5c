"""Manifests of examples/kubernetes: strictly valid, and what they set is understood.

There is no cluster here; schemas are those of kubernetes-validate.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.launch import ROOT

from ringjax.config import Config
from ringjax.control import launch_environment

validation = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")
FILE = ROOT / "examples" / "kubernetes" / "indexed-job.yaml"


def _documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def test_the_manifests_are_valid() -> None:
    kinds = []
    for document in _documents(FILE.read_text()):
        validation.validate(document, "1.37", strict=True)
        kinds.append(document["kind"])
    assert kinds == ["Service", "Job"]


def test_a_wrong_key_is_found() -> None:
    text = FILE.read_text().replace("completionMode:", "completionMod:")
    with pytest.raises(validation.ValidationError):
        for document in _documents(text):
            validation.validate(document, "1.37", strict=True)


def test_pods_learn_their_place() -> None:
    service, job = _documents(FILE.read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    given = {e["name"]: e for e in pod["containers"][0]["env"]}
    path = given["RINGJAX_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert re.fullmatch(
        r"metadata\.annotations\['batch\.kubernetes\.io/.*index'\]", path
    )
    env = {name: e["value"] for name, e in given.items() if "value" in e}
    env |= {"RINGJAX_RANK": "3", "RINGJAX_SECRET": "ab" * 32}
    place = launch_environment.find(Config.from_env(env), env)
    assert (place.rank, place.size) == (3, job["spec"]["completions"])
    assert not place.one_host
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert (place.first_host, place.ports) == (first, (29400,))
