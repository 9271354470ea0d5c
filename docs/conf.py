"""How Sphinx builds the site: `make docs`. What ours does besides is in extensions/."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "extensions"))
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project = "ringjax"
author = copyright = PROJECT["authors"][0]["name"]
version = release = PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "pages",
    "reference",
]
exclude_patterns = ["_build"]
nitpicky = False  # single backquotes in docstrings are code more often than names
default_role = "py:obj"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
repository = PROJECT["urls"].get("Source", "")  # empty: there is none yet

# What the notebook shows is what it has just printed; a cell that fails is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# The adapters are described without them: two of these in one process would end each
# other, and the site needs no gigabytes. c_api reads TensorFlow's libraries.
autodoc_mock_imports = ["tensorflow", "torch", "keras", "h5py"]
autodoc_mock_imports += ["ringjax.tensorflow.c_api"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# `make links`: GitHub's pages make their anchors in the browser.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]

html_theme = "furo"
pygments_style = "default"  # which colours a diff
html_title = f"ringjax {version}"
html_theme_options = {}
if repository:
    html_theme_options = {"source_repository": repository, "source_branch": "main"}
    html_theme_options["source_directory"] = "docs/"
html_copy_source = html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
