"""Host. docs/aot.md holds what the command says of the configs that ship."""

import importlib.util

from tests.aot.targets import ROOT


def test_the_reports_in_the_document_are_the_commands():
    spec = importlib.util.spec_from_file_location("aot_doc", ROOT / "scripts" / "aot_doc.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert text.split(script.BEGIN)[1].split(script.END)[0] == script.written()
