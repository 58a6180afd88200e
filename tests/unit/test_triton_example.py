"""`examples/triton`: the Python backend's model, with stand-ins for Triton and for the service."""

from __future__ import annotations

import json
import re
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import moeserve
from tests.support.service import ROOT

FOLDER = ROOT / "examples" / "triton" / "moeserve"


class FakeLLM:
    def __init__(self, model: str, **settings: Any) -> None:
        self.made, self.closed = (model, settings), False

    def generate(self, prompts: list[str], **fields: Any) -> list[SimpleNamespace]:
        if fields.get("max_tokens") == 0:
            raise ValueError("`max_tokens` must be at least 1")
        return [SimpleNamespace(text=f"{prompt} {fields}") for prompt in prompts]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    backend = SimpleNamespace(
        get_input_tensor_by_name=lambda request, name: request.get(name),
        InferenceResponse=lambda output_tensors=(), error=None: (output_tensors, error),
        Tensor=lambda name, array: (name, list(array)),
        TritonError=str,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    monkeypatch.setattr(moeserve, "LLM", FakeLLM, raising=False)
    return runpy.run_path(str(FOLDER / "1" / "model.py"))["TritonPythonModel"]()


def tensor(*values: Any) -> SimpleNamespace:
    return SimpleNamespace(as_numpy=lambda: np.array(values, dtype=object if isinstance(values[0], bytes) else None))


def test_the_backend_answers_with_the_llm_that_its_configuration_names(model: Any) -> None:
    config = (FOLDER / "config.pbtxt").read_text()
    found = dict(re.findall(r'key: "(\w+)", value: { string_value: "((?:\\.|[^"])*)" }', config))
    parameters = {name: {"string_value": value.replace('\\"', '"')} for name, value in found.items()}
    model.initialize({"model_config": json.dumps({"parameters": parameters})})
    assert model._llm.made == ("demo", {"kv_disk_path": "none"})
    requests = [{"text_input": tensor(b"a", b"b"), "max_tokens": tensor(3)}, {"text_input": tensor(b"c")}]
    first, second = model.execute(requests)
    assert first == ([("text_output", [b"a {'max_tokens': 3}", b"b {'max_tokens': 3}"])], None)
    assert second == ([("text_output", [b"c {}"])], None)
    ((_, error),) = model.execute([{"text_input": tensor(b"a"), "max_tokens": tensor(0)}])
    assert error == "`max_tokens` must be at least 1"
    model.finalize()
    assert model._llm.closed
