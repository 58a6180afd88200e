"""Python loads it at its start where PYTHONPATH names this folder: the frontend's requests then ask for scripted texts.

A grammar that allows one text is added where requests are turned into the engine's. The sampler that obeys it, the
parsers and the wire are the service's own.
"""

import sys

if "launcher.frontend_main" in sys.orig_argv:
    from dataclasses import replace

    from scripted_answers import exact_grammar, scripted_text

    from moeserve.frontend import generate

    _build = generate.build_generates

    def _build_scripted(request, *arguments, **options):
        generates = _build(request, *arguments, **options)
        text = scripted_text(request)
        if text is not None:
            grammar = exact_grammar(text)
            for message in generates:
                message.sampling = replace(message.sampling, grammar=grammar)
        return generates

    generate.build_generates = _build_scripted
