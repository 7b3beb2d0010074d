import os
import pickle
from pathlib import Path

import pytest

from batchgen.config import engine_arg_homes
from batchgen.errors import ConfigError, InputError, ModelError, SourceError, TemplateError
from batchgen.jobs.prepare import prepare
from batchgen.jobs.settings_sections import MOVED_ENGINE_KEYS, EngineSpec, SamplingSpec
from batchgen.jobs.spec import JobSpec, load_spec
from batchgen.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

JOB = """\
model: some/model
input:
  path: data.parquet
prompt:
  template: "Say {{ text }}"
sampling:
  temperature: 0.5
output:
  path: out
"""


def write(tmp_path: Path, text: str = JOB) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def mistakes(tmp_path: Path, text: str, **options) -> list[str]:
    """The mistakes found in a job file, with the folder cut off its name."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_spec(path, **options)
    lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    return lines[1:] if len(lines) > 1 else lines


def test_a_small_job_has_documented_defaults(tmp_path):
    spec = load_spec(write(tmp_path))
    assert spec.model.path == "some/model"
    assert spec.input.path == ("data.parquet",)
    assert spec.prompt.kind == "template"
    assert spec.sampling.given_params() == {"temperature": 0.5}
    assert spec.sampling.job_seed == 0
    assert (spec.output.shard_rows, spec.output.commit_interval_s, spec.output.drain_timeout_s) == (
        10_000,
        5.0,
        5.0,
    )
    assert spec.output_dir == tmp_path / "out"
    assert spec.limit is None
    assert spec.notes == ()


def test_typed_validation_names_file_line_key_and_value(tmp_path):  # BG-39
    found = mistakes(
        tmp_path,
        JOB.replace("temperature: 0.5", "temperature: 1e-1")
        + "engine:\n  max_num_seqs: '64'\n  max_num_batched_tokens: 64.5\n",
    )
    assert found == ["job.yaml:12: engine.max_num_batched_tokens: must be a whole number; got 64.5"]


def test_a_grammar_is_written_inline_and_survives_overrides(tmp_path):
    schema = "{type: object, properties: {b: {}, a: {enum: [on, 1]}}}"
    text = JOB.replace("temperature: 0.5", f"structured_outputs:\n    json: {schema}\n  best_of: 3")
    spec = load_spec(write(tmp_path, text)).with_overrides(["sampling.repetition_detection.min_count=4"])
    given = spec.sampling.given_params()
    wanted = {"type": "object", "properties": {"b": {}, "a": {"enum": ["on", 1]}}}
    assert given["structured_outputs"] == StructuredOutputsParams(json=wanted)
    assert list(given["structured_outputs"].json["properties"]) == ["b", "a"]
    assert given["repetition_detection"] == RepetitionDetectionParams(min_count=4)
    assert given["best_of"] == 3


def test_beams_are_no_copies(tmp_path):
    text = JOB.replace(
        "temperature: 0.5", "{n: 4, temperature: 0, use_beam_search: true, early_stopping: never}"
    )
    assert load_spec(write(tmp_path, text.replace("sampling:\n  {", "sampling: {"))).sampling.n == 4


def test_number_like_text_is_a_number_where_one_is_due(tmp_path):  # BG-39
    text = JOB.replace(
        "temperature: 0.5", "temperature: '1e-1'\n  min_p: 1e-5\n  max_tokens: '64'\n  seed: 1e3"
    )
    spec = load_spec(write(tmp_path, text))
    params = SamplingParams(**spec.sampling.given_params())
    assert (params.temperature, params.min_p, params.max_tokens, params.seed) == (0.1, 1e-5, 64, 1000)
    assert type(params.max_tokens) is int


def test_text_that_yaml_takes_for_something_else_must_be_quoted(tmp_path):  # BG-39
    found = mistakes(
        tmp_path,
        JOB.replace("temperature: 0.5", "stop: [no, on, true]\n  seed_column: 0123")
        + "engine:\n  dtype: false\n",
    )
    assert found == [
        'job.yaml:7: sampling.stop.2: must be text, but true is a boolean in YAML; quote it: "true"',
        'job.yaml:8: sampling.seed_column: must be text, but 0123 is a number in YAML; quote it: "0123"',
        'job.yaml:12: engine.dtype: must be text, but false is a boolean in YAML; quote it: "false"',
    ]
    spec = load_spec(write(tmp_path, JOB.replace("temperature: 0.5", "stop: [no, 'true']")))
    assert spec.sampling.given_params() == {"stop": ("no", "true")}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("sampling:\n  temprature: 1", "9: sampling.temprature: unknown key; did you mean 'temperature'?"),
        ("modle: x", "8: modle: unknown key; did you mean 'model'?"),
        ("temperature: 1", "8: temperature: belongs under 'sampling'"),
        ("sampling:\n  max_model_len: 9", "9: sampling.max_model_len: belongs under 'engine'"),
        ("engine:\n  revision: main", "9: engine.revision: belongs elsewhere: write model.revision"),
        ("engine:\n  seed: 3", "9: engine.seed: belongs elsewhere: write sampling.seed"),
        ("temprature: 1", "8: temprature: unknown key; did you mean 'sampling.temperature'?"),
        ("base_dir: /x", "8: base_dir: unknown key"),
        ("engine:\n  block_size: 17", "9: engine.block_size: must be a multiple of 16; got 17"),
        (
            "engine:\n  tensor_parallel_size: 2",
            "9: engine.tensor_parallel_size: more than one device is not built",
        ),
        (
            "engine:\n  dtype: bfloat16\n  quantization: int8",
            "10: engine.quantization: built for float32 on a CPU, not for dtype='bfloat16'; leave one of",
        ),
        (
            "engine:\n  quantization: awq",
            "9: engine.quantization: must be auto, int8, fp8, int4, gguf or null; got 'awq'",
        ),
        ("engine:\n  enforce_eager: true", "9: engine.enforce_eager: is not offered: nothing is captured"),
        (
            "sampling:\n  guided_json: {}",
            "9: sampling.guided_json: is not offered: use structured_outputs: {j",
        ),
        ("sampling:\n  structured_outputs: {ebnf: x}", "9: sampling.structured_outputs.ebnf: is not offered"),
        ("engine: 3", "8: engine: must be a mapping of keys to values; got 3"),
        ("sampling:\n  top_p: 0", "9: sampling.top_p: must be above 0 and at most 1; got 0"),
        ("sampling:\n  skip_clone: true", "9: sampling.skip_clone: is not offered (got True); leave it out"),
        (
            "sampling:\n  structured_outputs:\n    jsn: {}",
            "10: sampling.structured_outputs.jsn: unknown key; did you mean 'json'?",
        ),
        (
            "sampling:\n  structured_outputs: {choice: [yes, 2]}",
            '9: sampling.structured_outputs.choice.1: must be text, but 2 is a number in YAML; quote it: "2"',
        ),
        (
            "sampling:\n  structured_outputs: {json: {}, regex: a}",
            "9: sampling.structured_outputs: structured_outputs needs exactly one of json, json_object, "
            "regex, choice, grammar; got json and regex",
        ),
        (
            "sampling:\n  repetition_detection:\n    max_pattern_size: 4\n    min_count: 1",
            "11: sampling.repetition_detection.min_count: must be a whole number, 2 or more; got 1",
        ),
        (
            "sampling:\n  early_stopping: soon",
            '9: sampling.early_stopping: must be true, false or "never"; got ',
        ),
        (
            "sampling:\n  truncate_prompt_tokens: 9",
            "9: sampling.truncate_prompt_tokens: belongs elsewhere: write prompt.truncate",
        ),
        (
            "sampling:\n  min_tokens: 9\n  max_tokens: 5",
            "9: sampling.min_tokens: must be at most max_tokens (5)",
        ),
        ("sampling:\n  n: 2\n  temperature: 0", "9: sampling.n: 2 samples at temperature 0 are 2 copies"),
        (
            "sampling:\n  seed: 1\n  seed_column: s",
            "9: sampling.seed: seed_column gives every row its own seed",
        ),
        ("sampling:\n  max_tokens: 3\n  max_new_tokens: 5", "10: sampling.max_new_tokens: the same setting"),
        (
            "sampling:\n  logit_bias: {word: 5}",
            "9: sampling.logit_bias.word: must be a whole number; got 'word'",
        ),
        ("sampling:\n  ignore_eos: 1", "9: sampling.ignore_eos: must be true or false; got 1"),
        ("limit: 0", "8: limit: must be greater than or equal to 1; got 0"),
    ],
)
def test_each_mistake_is_named_with_its_line(tmp_path, broken, message):
    text = JOB.replace("sampling:\n  temperature: 0.5\n", "") + broken + "\n"
    (found,) = mistakes(tmp_path, text)
    assert found.startswith(f"job.yaml:{message}")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{}", "prompt: nothing says what the prompt is"),
        ("{template: a, column: b}", "prompt: template and column are both given"),
        ("{template: ''}", "prompt.template: must"),
        (
            "{column: a, chat: true, chat_template_kwargs: {messages: 1}}",
            "prompt.chat_template_kwargs: the messages",
        ),
        ("{messages: []}", "prompt.messages: must hold at least one message"),
        ("{messages: [{role: user}]}", "prompt.messages.0.content: missing"),
        (
            "{messages: [{role: asistant, content: a}]}",
            "prompt.messages.0.role: must be 'system', 'user', 'assistant' or 'tool'; got 'asistant'; "
            "did you mean 'assistant'?",
        ),
        (
            "{messages: [{role: user, content: a, name: b}]}",
            "prompt.messages.0.name: unknown key",
        ),
        ("{messages: [{role: user, content: a}], system: s}", "prompt.system: put the system message first"),
        (
            "{template: a, system: s}",
            "prompt.system: a system message needs the chat template; add chat: true",
        ),
        ("{template: a, chat_template_kwargs: {x: 1}}", "prompt.chat_template_kwargs: plain text does not"),
        ("{messages_column: m, chat: false}", "prompt.chat: messages_column always goes through"),
        (
            "{template: a, truncate: {column: c, side: lef}}",
            "prompt.truncate.side: must be 'left', 'right' or",
        ),
        (
            "{template: a, truncate: {column: c, max_tokens: 0}}",
            "prompt.truncate.max_tokens: must be greater",
        ),
    ],
)
def test_prompts_that_cannot_be_are_refused(tmp_path, prompt, message):
    text = JOB.replace('prompt:\n  template: "Say {{ text }}"', f"prompt: {prompt}")
    (found,) = mistakes(tmp_path, text)
    assert found.startswith(f"job.yaml:4: {message}")


def test_several_mistakes_are_listed_together_in_the_order_of_the_file(tmp_path):
    path = write(
        tmp_path, JOB.replace("model: some/model", "modell: x").replace("path: out", "path: 7\n  x: 1")
    )
    with pytest.raises(ConfigError) as caught:
        load_spec(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 4 mistakes"
    assert [line.removeprefix(f"{path}") for line in lines[1:]] == [
        ": model: missing",
        ":1: modell: unknown key; did you mean 'model'?",
        ':9: output.path: must be text, but 7 is a number in YAML; quote it: "7"',
        ":10: output.x: unknown key; known here: commit_interval_s, drain_timeout_s, format, path, prefix, "
        "shard_rows",
    ]


def test_missing_sections_and_no_mapping_at_all_are_said(tmp_path):
    assert mistakes(tmp_path, "") == [
        f"job.yaml: {section}: missing" for section in ("model", "input", "prompt", "output")
    ]
    assert mistakes(tmp_path, "- a\n") == [
        "job.yaml: a job file is a mapping of sections (model, input, prompt, output, ...)"
    ]


def test_overrides_win_over_the_file_and_later_over_earlier(tmp_path):
    spec = load_spec(
        write(tmp_path),
        overrides=[
            "sampling.temperature=0.2",
            "engine.max_num_seqs=8",
            "sampling.stop=[a, b]",
            "model.revision=v1",
            "engine.max_num_seqs='16'",
        ],
        limit=3,
        output=tmp_path / "elsewhere",
    )
    assert spec.sampling.given_params() == {"temperature": 0.2, "stop": ("a", "b")}
    assert spec.engine.given() == {"max_num_seqs": 16}
    assert (spec.model.path, spec.model.revision) == ("some/model", "v1")
    assert (spec.limit, spec.output_dir) == (3, tmp_path / "elsewhere")
    assert load_spec(write(tmp_path), overrides=["model=another"]).model.path == "another"


def test_the_model_is_overridden_by_its_name_or_by_a_mapping(tmp_path):
    path = write(tmp_path)
    for override in ("model=echo:?batch=2", 'model={path: "echo:?batch=2", revision: null}'):
        assert load_spec(path, overrides=[override]).model.path == "echo:?batch=2"


def test_text_with_a_colon_is_to_be_quoted(tmp_path):
    found = mistakes(tmp_path, JOB.replace("model: some/model", "model: echo:"))
    assert found == ["job.yaml:1: mapping values are not allowed here; text that holds a colon needs quotes"]


def test_an_error_about_the_model_gets_its_line(tmp_path):
    spec = load_spec(write(tmp_path))
    for kind in (ModelError, ConfigError):
        with pytest.raises(kind, match=r"job\.yaml:1: no such model"), spec.placing_errors("model"):
            raise kind("no such model")
    other = load_spec(write(tmp_path, JOB.replace("some/model", '"echo:?bad=1"')))
    with pytest.raises(ConfigError, match=r"job\.yaml:1: .*unknown echo option 'bad'"):
        prepare(other)


def test_an_output_given_on_the_command_line_starts_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert load_spec(write(tmp_path), output="results").output_dir == tmp_path / "here" / "results"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sampling.temprature=1",
            "--set sampling.temprature=1: sampling.temprature: unknown key; did you mean",
        ),
        ("sampling.n=many", "--set sampling.n=many: sampling.n: must be a whole number; got 'many'"),
        ("sampling.n", "--set sampling.n: write it as section.key=value"),
        ("model.path.x=1", "--set model.path.x=1: model.path is 'some/model' in "),
        ("sampling.stop=[a", "--set sampling.stop=[a"),
        (
            "prompt.template={{ a }}",
            "--set prompt.template={{ a }}:1: a key must be a plain word; the value is YAML",
        ),
    ],
)
def test_a_bad_override_is_named_as_it_was_typed(tmp_path, override, message):
    found = mistakes(tmp_path, JOB, overrides=[override])
    assert found[0].startswith(message)


def test_max_new_tokens_is_read_as_max_tokens_and_says_so(tmp_path):
    spec = load_spec(write(tmp_path, JOB.replace("temperature: 0.5", "max_new_tokens: 7")))
    assert spec.sampling.max_tokens == 7
    assert spec.notes == ("sampling.max_new_tokens is read as sampling.max_tokens",)
    found = mistakes(tmp_path, JOB.replace("temperature: 0.5", "max_new_tokens: 0"))
    assert found == ["job.yaml:7: sampling.max_tokens: must be 1 or more, or null; got 0"]


def test_environment_variables_are_not_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "value")
    spec = load_spec(write(tmp_path, JOB.replace("data.parquet", "$SECRET/${SECRET}.parquet")))
    assert spec.input.path == ("$SECRET/${SECRET}.parquet",)


def test_every_engine_argument_has_exactly_one_home():
    assert set(EngineSpec.model_fields) | set(MOVED_ENGINE_KEYS) == set(engine_arg_homes())
    assert not set(EngineSpec.model_fields) & set(MOVED_ENGINE_KEYS)
    for home in MOVED_ENGINE_KEYS.values():
        section, key = home.split(".")
        assert key in JobSpec.model_fields[section].annotation.model_fields


def test_sampling_defaults_are_those_of_sampling_params():
    given = SamplingSpec().model_dump(exclude={"seed_column"})
    assert SamplingParams(**given) == SamplingParams()


def test_settings_reach_the_engine_with_local_paths_made_absolute(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    text = JOB.replace(
        "model: some/model",
        "model: {path: weights, tokenizer: org/tok, chat_template: chat.jinja, revision: v2}",
    )
    config = load_spec(write(tmp_path, text), overrides=["engine.max_num_seqs=5"]).engine_config()
    assert config.model.model == str(tmp_path / "weights")
    assert (config.model.tokenizer, config.model.revision) == ("org/tok", "v2")
    assert config.model.chat_template == "{{ messages }}"
    assert config.scheduler.max_num_seqs == 5
    assert load_spec(write(tmp_path)).engine_config().model.model == "some/model"


def test_a_chat_template_file_that_is_not_there_is_refused(tmp_path):
    found = mistakes(
        tmp_path, JOB.replace("model: some/model", "model:\n  path: x\n  chat_template: no.jinja")
    )
    assert len(found) == 1
    assert found[0].startswith("job.yaml:3: model.chat_template: chat template file")


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    assert mistakes(tmp_path, JOB.replace("path: out", "path: taken")) == [
        f"job.yaml:9: output.path: {tmp_path}/taken is a file, not a folder".replace(f"{tmp_path}/", "")
    ]
    assert "cannot be made" in mistakes(tmp_path, JOB.replace("path: out", "path: taken/inside"))[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder_is_refused(tmp_path):  # BS-19
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    (found,) = mistakes(tmp_path, JOB.replace("path: out", "path: locked/out"))
    assert "no permission in locked" in found


def test_looking_at_a_job_makes_no_folder(tmp_path):
    load_spec(write(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def test_a_mapping_is_held_to_the_same_rules(tmp_path):
    data = {
        "model": "some/model",
        "input": {"path": ["a.parquet", "b.parquet"], "schema": {"n": "int64"}},
        "prompt": {"messages": [{"role": "user", "content": "{{ text }}"}]},
        "output": {"path": "out"},
    }
    spec = JobSpec.from_mapping(data, tmp_path)
    assert spec.input.path == ("a.parquet", "b.parquet")
    assert spec.input.declared_schema == {"n": "int64"}
    assert spec.prompt.messages[0].role == "user"
    assert spec.base_dir == tmp_path
    assert data["model"] == "some/model"
    with pytest.raises(
        ConfigError, match=r"^job: sampling\.temprature: unknown key; did you mean 'temperature'\?$"
    ):
        JobSpec.from_mapping({**data, "sampling": {"temprature": 1}}, tmp_path)
    with pytest.raises(ConfigError, match=r"sampling\.n"):
        JobSpec.from_mapping(data, tmp_path, overrides=["sampling.n=0"])


def test_a_job_can_be_changed_and_sent_to_another_process(tmp_path):
    spec = load_spec(write(tmp_path))
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    changed = spec.with_overrides(["sampling.temperature=1"], limit=2, output=tmp_path / "other")
    assert (changed.sampling.temperature, changed.limit) == (1.0, 2)
    assert changed.output_dir == tmp_path / "other"
    assert changed.base_dir == spec.base_dir
    with pytest.raises(ValueError, match="frozen"):
        spec.sampling.temperature = 3.0


def test_errors_about_data_and_prompt_get_their_line(tmp_path):
    spec = load_spec(write(tmp_path))
    cases = [
        (
            TemplateError("prompt.template, line 1: no column 'x'"),
            ":5: prompt.template, line 1: no column 'x'",
        ),
        (SourceError("input.path: nothing"), ":3: input.path: nothing"),
        (SourceError("column 'a' is wrong"), ":2: column 'a' is wrong"),
        (SourceError("sampling.seed_column: gone"), ":6: sampling.seed_column: gone"),
    ]
    for error, message in cases:
        with pytest.raises(InputError) as caught, spec.placing_errors():
            raise error
        assert type(caught.value) is type(error)
        assert str(caught.value) == f"{tmp_path}/job.yaml{message}"


def test_options_of_the_command_line_are_named_once(tmp_path):
    assert mistakes(tmp_path, JOB, limit=0) == ["--limit: must be greater than or equal to 1; got 0"]
    (line,) = mistakes(tmp_path, JOB, overrides=["samplin.temperature=0"])
    assert line.startswith("--set samplin.temperature=0: samplin: unknown key; did you mean 'sampling'?")
    (line,) = mistakes(tmp_path, JOB, overrides=["sampling.n=2", "sampling.temperature=0"])
    assert "sampling.n: 2 samples at temperature 0" in line
