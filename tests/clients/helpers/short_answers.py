"""For schemathesis, which makes up requests without bounds on their answers: the demo writes a few tokens for each."""

import schemathesis

MOST = 4
FIELDS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


@schemathesis.hook
def before_call(context, case, **_):
    field = FIELDS.get(case.operation.path)
    if field is None or not isinstance(case.body, dict):
        return
    asked = case.body.get(field)
    # Where the field may not be left out, leaving it out is a case of its own.
    is_free = asked is None and case.operation.path != "/v1/messages"
    if is_free or (type(asked) is int and asked > MOST):
        case.body = {**case.body, field: MOST}
