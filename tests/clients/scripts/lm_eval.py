"""lm-eval's local-completions: log likelihoods of given answers, and generated ones, on tasks of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, V1, Checks

check = Checks("completions")
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " banana"], "answer": 0, "said": "Paris"},
    {"question": "Two and two make", "choices": [" purple", " four"], "answer": 1, "said": "four"},
    {"question": "The opposite of hot is", "choices": [" cold", " bicycle"], "answer": 0, "said": "cold"},
]
CHOOSE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
SAY = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{said}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(name, task):
    """Run a task; return its results."""
    folder = Path(name).resolve()
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / f"{name}.yaml").write_text(task.format(name=name, data=data))
    arguments = (
        f"model={MODEL},base_url={V1}/completions,tokenizer={os.environ['TOKENIZER']},num_concurrent=2,max_retries=1"
    )
    command = [str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "local-completions"]
    options = ["--model_args", arguments, "--tasks", name, "--include_path", str(folder), "--output_path", str(folder)]
    done = subprocess.run(
        [*command, *options, "--log_samples"],
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:]
    (samples,) = folder.rglob("samples_*.jsonl")
    (results,) = folder.rglob("results_*.json")
    return json.loads(results.read_text())["results"][name], [json.loads(line) for line in samples.open()]


@check
def loglikelihood():
    results, samples = evaluate("choose", CHOOSE)
    assert len(samples) == len(QUESTIONS), samples
    assert results["acc,none"] == 1, results


@check
def generate_until():
    _, samples = evaluate("say", SAY)
    said = [sample["resps"][0][0] for sample in samples]
    assert all(said), said
    assert not any("." in text for text in said), said
