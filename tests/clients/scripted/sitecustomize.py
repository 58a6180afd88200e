"""Python loads it at its start where PYTHONPATH names this folder: the frontend then has a model with some judgement.

An answer's form is decided for it where a request gets its grammar. The grammar, the sampler that obeys it, the parsers
and the wire are the service's own.
"""

import sys

if "launcher.frontend_main" in sys.orig_argv:
    from dataclasses import replace

    from scripted_answers import scripted_form

    from moeserve.frontend.dialects.internal import ToolChoice
    from moeserve.frontend.routes.generate import GenerateRoute

    _constrain = GenerateRoute._constrain

    async def _constrain_scripted(self, request, *others):
        constrained = await _constrain(self, request, *others)
        form = scripted_form(request)
        if form is None:
            return constrained
        decided = replace(request, tool_choice=ToolChoice("none"), output_format=form)
        return replace(request, sampling=(await _constrain(self, decided, *others)).sampling)

    GenerateRoute._constrain = _constrain_scripted
