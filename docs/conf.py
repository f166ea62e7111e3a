"""Sphinx: `sphinx-build -W -b html docs build/docs`; see releasing.md."""

import inspect
from importlib.metadata import version as _version

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.ext.autodoc.preserve_defaults import DefaultValue
from sphinx.util.inspect import stringify_signature

project = "jaxsparse"
author = "the jaxsparse authors"
release = version = _version("jaxsparse")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 3

# `name` in a docstring is a link where that name is documented here, code elsewhere.
default_role = "py:obj"
autodoc_typehints = "none"  # the docstrings say what is taken
autodoc_member_order = "bysource"
napoleon_use_param = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"jaxsparse {release}"
html_show_sourcelink = False
html_math_renderer = "mathml"  # browsers draw it: nothing is fetched from elsewhere

# Of an example, what is typed.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True


def _whole_first_line(app, what, name, value, options, lines):
    # Or napoleon takes "What it is: more" of an attribute for "type: description".
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def _signature_of_init(app, what, name, value, options, signature, result):
    # Flax's metaclass hides it.
    if what == "class" and signature == "(*args, **kwargs)":
        whole = inspect.signature(value.__init__)
        parameters = [
            p.replace(default=DefaultValue(p.default.__name__))
            if callable(p.default) and p.default is not p.empty
            else p
            for p in list(whole.parameters.values())[1:]
        ]
        own = whole.replace(parameters=parameters)
        return stringify_signature(own, show_annotation=False), result
    return None


def _inline_formula(writer, node):
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _displayed_formula(writer, node):
    tex = node.astext()
    if r"\\" in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    writer.body.append(f'<div class="math">{tex2mathml(tex, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    """Connects what mends signatures and docstrings, and what writes formulas."""
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_displayed_formula, None))
    app.connect("autodoc-process-docstring", _whole_first_line, priority=400)
    app.connect("autodoc-process-signature", _signature_of_init)
