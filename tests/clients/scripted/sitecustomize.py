"""Python loads it at its start where PYTHONPATH names this folder: the frontend then has a model with some judgement.

An answer's form is decided for it where a request gets its grammar. The grammar, the sampler that obeys it, the parsers
and the wire are the service's own.
"""

import sys

if {"launcher.frontend_main", "moeserve.frontend.prepare.text_program"} & set(sys.orig_argv):
    from dataclasses import replace

    from scripted_answers import scripted_form

    from moeserve.frontend.dialects.internal import ToolChoice
    from moeserve.frontend.prepare.prepare import Preparer

    _constrained = Preparer._constrained

    def _scripted(self, request, prompt, eos_token_ids):
        asked = _constrained(self, request, prompt, eos_token_ids)
        form = scripted_form(request)
        if form is None:
            return asked
        free = replace(request, tool_choice=ToolChoice("none"), output_format=form)
        return _constrained(self, free, prompt, eos_token_ids)

    Preparer._constrained = _scripted

if "launcher.frontend_main" in sys.orig_argv:
    from moeserve.frontend.routes.generate import GenerateRoute

    _generate = GenerateRoute.__call__

    async def _noted_generate(self, scope, receive, send):
        """Say in the log line whose request it is."""
        scope["state"]["log"]["caller"] = scope["state"]["identity"].digest.hex()
        await _generate(self, scope, receive, send)

    GenerateRoute.__call__ = _noted_generate
