"""tritonclient over HTTP: what it asks of a server and its model. Its `infer` sends tensors, which are not served."""

import tritonclient.http as triton
from client_checks import KEY, MODEL, UNKNOWN, URL, Checks, raised
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(URL.partition("://")[2])
HEADERS = {"Authorization": f"Bearer {KEY}"}
check = Checks("triton")


@check
def server_lives():
    assert client.is_server_live()


@check
def server_is_ready():
    assert client.is_server_ready()


@check
def server_is_described():
    assert client.get_server_metadata(headers=HEADERS)["name"] == "moeserve"


@check
def model_is_ready():
    assert client.is_model_ready(MODEL, headers=HEADERS)


@check
def model_is_described():
    said = client.get_model_metadata(MODEL, headers=HEADERS)
    assert [one["name"] for one in said["inputs"]] == ["text_input"], said
    assert [one["name"] for one in said["outputs"]] == ["text_output"], said


@check
def unknown_model_is_an_error():
    unknown = raised(lambda: client.get_model_metadata(UNKNOWN, headers=HEADERS), InferenceServerException)
    assert UNKNOWN in unknown.message(), unknown
