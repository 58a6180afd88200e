"""What each family's template renders for an assistant that says something and makes two calls."""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

ANSWERS = {
    "hermes": (
        "I look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
    ),
    "qwen3-coder": (
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n"
        "</parameter>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": (
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome", "days": 1}'
    ),
    "deepseek": (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>'
        '{"city": "Rome", "days": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "glm": (
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_weather"
        "<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>1</arg_value></tool_call>"
    ),
    "kimi": (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1'
        '<|tool_call_argument_begin|>{"city": "Rome", "days": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax": (
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_weather">\n'
        '<parameter name="city">Rome</parameter>\n<parameter name="days">1</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "harmony": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>'
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Rome", "days": 1}<|call|>'
    ),
    "llama3": (
        'I look.<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 1}}'
    ),
    "granite": (
        'I look.<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]'
    ),
    "mimo": (
        "I look.<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>2</parameter>"
        "</function></tool_call><tool_call><function=get_weather><parameter=city>Rome</parameter>"
        "<parameter=days>1</parameter></function></tool_call>"
    ),
    "seed": (
        "I look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Rome</parameter>\n<parameter=days>1</parameter>\n</function>\n</seed:tool_call>"
    ),
    "zaya": (
        "I look.\n<zyphra_tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        "2\n</parameter>\n</function>\n</zyphra_tool_call>\n<zyphra_tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1\n</parameter>\n</function>\n</zyphra_tool_call>"
    ),
    "deepseek-v3.2": (
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "hy": (
        "I look.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_weather<tool_sep>"
        "<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>1</arg_value></tool_call>"
        "</tool_calls>"
    ),
    "longcat": (
        "I look.\n<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>\n<longcat_tool_call>"
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}</longcat_tool_call>'
    ),
    "kimi-k3": (
        'I look.<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="get_weather" index="2"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "dots": (
        'I look.<dots_function_call><invoke name="get_weather"><parameter name="city">Paris</parameter>'
        '<parameter name="days">2</parameter></invoke><invoke name="get_weather">'
        '<parameter name="city">Rome</parameter><parameter name="days">1</parameter></invoke></dots_function_call>'
    ),
    "step3": (
        'I look.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>"
        '<steptml:invoke name="get_weather"><steptml:parameter name="city">Rome</steptml:parameter>'
        '<steptml:parameter name="days">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>'
    ),
    "k2-horizon": (
        "I look.<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key>"
        "<ifm|arg_type>string</ifm|arg_type><ifm|arg_value>Paris</ifm|arg_value><ifm|arg_key>days</ifm|arg_key>"
        "<ifm|arg_value>2</ifm|arg_value></ifm|tool_call><ifm|tool_call>"
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}</ifm|tool_call></ifm|tool_calls>'
    ),
    "solar": (
        "I look.<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>2<|tool_arg:end|>\n<|tool_call:end|><|tool_call:start|>get_weather\n"
        "<|tool_arg:start|>city<|tool_arg:value|>Rome<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>1<|tool_arg:end|>\n<|tool_call:end|>"
    ),
    "muse": (
        " to=user<|message|>I look.<|eom|><|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
        "<|start|>assistant to=weather.get_weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="weather.get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
        '<atem:parameter name="days">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>'
    ),
    "inkling": (
        "<|content_text|>I look.<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>"
        '{"name": "get_weather", "args": {"city": "Paris", "days": 2}}<|end_message|>'
        '<|message_model|><|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Rome","days":1}}'
        "<|content_model_end_sampling|>"
    ),
    "hunyuan": (
        'I look. <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]</tool_calls>'
    ),
    "cohere": (
        'I look.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "Paris", "days": 2}},\n    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": '
        '{"city": "Rome", "days": 1}}\n]<|END_ACTION|>'
    ),
    "apertus": (
        'I look.<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 2}}, '
        '{"get_weather": {"city": "Rome", "days": 1}}]<|tools_suffix|>'
    ),
    "phi": (
        'I look. functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]'
    ),
    "lfm2": (
        "I look.<|tool_call_start|>[get_weather(city='Paris', days=2), get_weather(city=\"Rome\", days=1)]"
        "<|tool_call_end|>"
    ),
    "llama4": "I look.\n[get_weather(city='Paris', days=2), get_weather(city='Rome', days=1)]",
    "olmo3": (
        "I look.\n<function_calls>\nget_weather(city='Paris', days=2)\nget_weather(city='Rome', days=1)\n"
        "</function_calls>"
    ),
    "gemma4": (
        'I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        '<|tool_call>call:get_weather{days:1,city:<|"|>Rome<|"|>}<tool_call|>'
    ),
    "minimax-m3": (
        'I look.\nP<tool_call>\nP<invoke name="get_weather">P<city>ParisP</city>P<days>2P</days>P</invoke>\n'
        'P<invoke name="get_weather">P<city>RomeP</city>P<days>1P</days>P</invoke>\nP</tool_call>'
    ).replace("P<", "]<]minimax[>[<"),
}

# The same with other spellings of some tags.
ANSWERS["deepseek-v4"] = ANSWERS["deepseek-v3.2"].replace("function_calls", "tool_calls")
ANSWERS["deepseek-v4.1"] = ANSWERS["deepseek-v3.2"].replace("function_calls", "calls").replace("｜DSML｜", "｜DSML｜ ")
