"""A model of Triton's Python backend that answers with moeserve's LLM class: all requests share its prefix cache."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from moeserve import LLM


class TritonPythonModel:
    """Triton makes one instance, and calls it with several requests at once."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model that `config.pbtxt` names."""
        parameters = json.loads(args["model_config"])["parameters"]
        settings = json.loads(parameters["settings"]["string_value"])
        self._llm = LLM(parameters["model"]["string_value"], **settings)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the texts of all requests, each with its own sampling."""
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """End the model's processes."""
        self._llm.close()

    def _answer(self, request: Any) -> Any:
        texts = [text.decode() for text in _array(request, "text_input").ravel()]
        fields = {name: _array(request, name) for name in ("max_tokens", "temperature")}
        given = {name: array.ravel()[0].item() for name, array in fields.items() if array is not None}
        try:
            answers = self._llm.generate(texts, **given)
        except Exception as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        said = np.array([answer.text.encode() for answer in answers], dtype=object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", said)])


def _array(request: Any, name: str) -> Any:
    """Return the array of an input, None of one that was left out."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()
