import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from batchgen.errors import SourceError, TemplateError
from batchgen.jobs.prompts import DOUBLE_BOS, PromptRenderer
from batchgen.jobs.row import Prompt, Row, RowPosition, SourceBatch
from batchgen.jobs.sections import InputSpec, PromptSpec
from batchgen.jobs.settings_sections import SamplingSpec
from batchgen.jobs.sources import open_source
from batchgen.outputs import FailureCode, RowFailure
from batchgen.seeds import row_seed
from batchgen.testing import ByteTokenizer
from batchgen.tokenizer.chat import ChatTemplate

GUARDED_CHAT = """\
{%- if messages[0].role == 'assistant' %}{{ raise_exception('the first turn must be the user') }}{% endif -%}
{%- for message in messages %}
{%- if not loop.first and message.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}
{%- endif -%}
{{ '<s>' + message.role + '\\n' + message.content + '</s>' }}
{%- endfor %}{{ '<s>assistant\\n' }}"""


class ChatTokenizer(ByteTokenizer):
    """Bytes, with a chat template of a real model's kind."""

    def __init__(self, template: str = GUARDED_CHAT):
        self._template = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})

    def render_chat(self, messages, **kwargs):
        return self._template.render(messages, **kwargs)


class TestBed:
    """Renders rows of a small table."""

    __test__ = False

    def __init__(
        self, columns, prompt, *, sampling=None, tokenizer=None, max_model_len=None, is_typed=True, **batch
    ):
        data = pa.record_batch(columns)
        self.batch = SourceBatch(RowPosition(2, 10, 100), data, **batch)
        self.renderer = PromptRenderer(
            PromptSpec.model_validate(prompt),
            SamplingSpec.model_validate(sampling or {}),
            data.schema,
            tokenizer or ByteTokenizer(),
            max_model_len,
            is_typed=is_typed,
        )

    def __call__(self, offset=0) -> Prompt | RowFailure:
        return self.renderer.render(Row(self.batch, offset))

    def all(self):
        return [self(offset) for offset in range(len(self.batch))]

    def codes(self):
        return [result.code if isinstance(result, RowFailure) else None for result in self.all()]


def text_ids(text: str) -> list[int]:
    return list(text.encode())


def test_a_template_becomes_text_and_ids_with_special_tokens_added_once():
    prompt = TestBed({"text": ["é"], "n": [3]}, {"template": "{{ text }} {{ n }}\r\n"})()
    assert prompt.text == "é 3\r\n"
    assert prompt.token_ids == [256, *text_ids("é 3\r\n")]
    assert prompt.warnings == ()


def test_special_tokens_can_be_left_out():
    bed = TestBed({"text": ["x"]}, {"template": "<s>{{ text }}", "add_special_tokens": False})
    assert bed().token_ids == [256, *text_ids("x")]
    assert bed().warnings == ()


def test_a_prompt_that_begins_with_two_bos_tokens_is_flagged():
    prompt = TestBed({"text": ["x"]}, {"template": "<s>{{ text }}"})()
    assert prompt.token_ids == [256, 256, *text_ids("x")]
    assert prompt.warnings == (DOUBLE_BOS,)


def test_a_chat_prompt_has_the_templates_special_tokens_and_no_others():
    bed = TestBed({"text": ["x"]}, {"column": "text", "chat": True}, tokenizer=ChatTokenizer())
    prompt = bed()
    assert prompt.token_ids == [256, *text_ids("user\nx"), 257, 256, *text_ids("assistant\n")]
    assert prompt.warnings == ()


def test_the_byte_tokenizer_reads_parts_as_the_real_one():
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b</s> "}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    talks = [[{"role": "user", "content": content}] for content in (parts, "a\n\nb</s> ", image)]
    bed = TestBed({"m": [json.dumps(talk) for talk in talks]}, {"messages_column": "m"})
    assert bed(0).text == bed(1).text == "[user]\na\n\nb</s> \n\n[assistant]\n"
    assert bed(0).token_ids == bed(1).token_ids == text_ids(bed(0).text)
    assert bed(2).code == FailureCode.INVALID_MESSAGES and "type 'image_url'" in bed(2).message
    going_on = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    text = ByteTokenizer().render_chat(going_on, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user]\na\n\n[assistant]\nb "


def test_control_token_text_in_data_stays_text():
    columns = {"text": ["a</s>b"], "nested": [{"t": ["<s>"]}]}
    for prompt in (
        {"template": "{{ text }}"},
        {"column": "text"},
    ):
        assert TestBed(columns, prompt)().token_ids == [256, *text_ids("a</s>b")]
    assert TestBed(columns, {"template": "{{ nested.t[0] }}"})().token_ids == [256, *text_ids("<s>")]
    chat = TestBed(columns, {"template": "{{ text }}", "chat": True}, tokenizer=ChatTokenizer())()
    assert chat.token_ids == [256, *text_ids("user\na</s>b"), 257, 256, *text_ids("assistant\n")]
    assert chat.text == "<s>user\na</s>b</s><s>assistant\n"
    opted_in = TestBed(columns, {"template": "{{ text }}", "allow_special_tokens": True})()
    assert opted_in.token_ids == [256, ord("a"), 257, ord("b")]
    # The template's own control tokens are meant.
    assert TestBed(columns, {"template": "</s>{{ text }}"})().token_ids == [256, 257, *text_ids("a</s>b")]


def test_control_token_text_hidden_by_json_escapes_stays_text():
    hidden = '[{"role": "user", "content": "a\\u003c/s>b"}]'
    prompt = TestBed({"m": [hidden]}, {"messages_column": "m"}, tokenizer=ChatTokenizer())()
    assert prompt.token_ids == [256, *text_ids("user\na</s>b"), 257, 256, *text_ids("assistant\n")]


def test_null_empty_and_non_text_cells_are_row_failures():
    bed = TestBed({"text": ["x", None, ""]}, {"column": "text"})
    assert bed.codes() == [None, FailureCode.NULL_PROMPT, FailureCode.EMPTY_PROMPT]
    bed = TestBed({"text": ["x", None, ""]}, {"column": "text", "chat": True}, tokenizer=ChatTokenizer())
    assert bed.codes() == [None, FailureCode.NULL_PROMPT, FailureCode.EMPTY_PROMPT]
    bed = TestBed({"text": ["x", None, ""]}, {"template": "{{ text }}"})
    assert bed.codes() == [None, FailureCode.NULL_PROMPT, FailureCode.EMPTY_PROMPT]


def test_a_column_of_another_type_is_refused_before_any_row_where_types_are_declared():
    with pytest.raises(
        SourceError, match=r"prompt\.column: column 'n' is int64, not text; use a template: \{\{ n \}\}"
    ):
        TestBed({"n": [1]}, {"column": "n"})
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        assert TestBed({"t": pa.array(["x"]).cast(kind)}, {"column": "t"})().text == "x"


def test_cells_that_are_no_text_fail_their_row_where_types_are_guessed():
    bed = TestBed(
        {"text": ["x", "5"]}, {"column": "text"}, is_typed=False, json_text={"text": frozenset({1})}
    )
    assert bed.codes() == [None, FailureCode.NOT_A_STRING]
    assert TestBed({"n": [1, None]}, {"column": "n"}, is_typed=False).codes() == [
        FailureCode.NOT_A_STRING,
        FailureCode.NULL_PROMPT,
    ]
    template = TestBed(
        {"text": ["x", "5"]}, {"template": "{{ text }}"}, is_typed=False, json_text={"text": frozenset({1})}
    )
    assert template(1).text == "5"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"column": "txet"}, r"prompt\.column: no column 'txet'; did you mean 'text'"),
        (
            {"messages_column": "mesages"},
            r"prompt\.messages_column: no column 'mesages'; did you mean 'messages'",
        ),
        ({"messages_column": "n"}, r"column 'n' is int64; it must be list<struct<role, content>>"),
        ({"messages_column": "from"}, r"column 'from' is list<.*it must be list<struct<role, content>>"),
        (
            {"template": "{{ n }}", "truncate": {"column": "text"}},
            r"'text' is not in the prompt, which uses n",
        ),
        (
            {"template": "{{ n }}", "truncate": {"column": "n"}},
            r"prompt\.truncate\.column: column 'n' is int64, not",
        ),
        ({"template": "{{ n }}", "truncate": {"column": "m"}}, r"prompt\.truncate\.column: no column 'm'"),
        ({"messages_column": "messages", "truncate": {"column": "text"}}, r"'text' is not in the prompt"),
    ],
)
def test_columns_are_checked_before_any_row(prompt, message):
    columns = {
        "text": ["x"],
        "n": [1],
        "messages": [[{"role": "user", "content": "x"}]],
        "from": [[{"from": "user", "value": "x"}]],
    }
    with pytest.raises(SourceError, match=message):
        TestBed(columns, prompt, tokenizer=ChatTokenizer())


def test_a_model_without_a_chat_template_is_said_before_any_row():
    tokenizer = ByteTokenizer()
    tokenizer.has_chat_template = False
    for prompt in ({"column": "text", "chat": True}, {"messages": [{"role": "user", "content": "x"}]}):
        with pytest.raises(TemplateError, match="the model has no chat template"):
            TestBed({"text": ["x"]}, prompt, tokenizer=tokenizer)
    TestBed({"text": ["x"]}, {"column": "text"}, tokenizer=tokenizer)


def test_message_templates_and_the_system_message_are_rendered_from_columns():
    columns = {"text": ["x", None], "lang": ["de", "fr"]}
    messages = [
        {"role": "system", "content": "Answer in {{ lang }}"},
        {"role": "user", "content": "{{ text | default('nothing') }}"},
    ]
    bed = TestBed(columns, {"messages": messages}, tokenizer=ChatTokenizer())
    assert bed(0).text == "<s>system\nAnswer in de</s><s>user\nx</s><s>assistant\n"
    assert bed(1).text == "<s>system\nAnswer in fr</s><s>user\nnothing</s><s>assistant\n"
    same = TestBed(
        columns,
        {"template": "{{ text | default('nothing') }}", "chat": True, "system": "Answer in {{ lang }}"},
        tokenizer=ChatTokenizer(),
    )
    assert [prompt.text for prompt in same.all()] == [prompt.text for prompt in bed.all()]
    with pytest.raises(TemplateError, match=r"prompt\.system, line 1: no column 'lnag'; did you mean 'lang'"):
        TestBed(columns, {"column": "text", "chat": True, "system": "{{ lnag }}"}, tokenizer=ChatTokenizer())
    with pytest.raises(TemplateError, match=r"prompt\.messages\.0\.content, line 1: no column 'txt'"):
        TestBed(columns, {"messages": [{"role": "user", "content": "{{ txt }}"}]}, tokenizer=ChatTokenizer())


def test_what_the_chat_template_refuses_fails_only_its_row():  # BG-09
    def turns(*roles):
        return [{"role": role, "content": "x"} for role in roles]

    conversations = [
        turns("user"),
        turns("user", "assistant", "user"),
        turns("user", "user"),
        turns("assistant"),
        turns("user"),
    ]
    bed = TestBed({"m": conversations}, {"messages_column": "m"}, tokenizer=ChatTokenizer())
    assert bed.codes() == [None, None, FailureCode.TEMPLATE_ERROR, FailureCode.TEMPLATE_ERROR, None]
    assert "roles must alternate" in bed(2).message
    assert "the first turn must be the user" in bed(3).message


def test_messages_are_the_same_as_structs_and_as_json_text():  # BS-09
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    plain = [[{"role": "user", "content": "A\nB"}]]
    listed = [[{"role": "user", "content": parts}]]
    for conversations in (plain, listed):
        for column in (pa.array(conversations), pa.array([json.dumps(each) for each in conversations])):
            bed = TestBed({"m": column}, {"messages_column": "m"}, tokenizer=ChatTokenizer())
            assert bed().text == "<s>user\nA\nB</s><s>assistant\n"


def test_messages_of_mixed_kinds_in_json_lines_keep_their_kinds(tmp_path):  # BS-09
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    rows = [
        {"m": [{"role": "user", "content": content}], "n": n} for n, content in ((1, "A\nB"), ("x", parts))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(InputSpec(path=("a.jsonl",)), tmp_path)
    (batch,) = source.batches(RowPosition(0, 0, 0))
    prompts = [
        PromptRenderer(
            PromptSpec.model_validate(section),
            SamplingSpec(),
            source.schema,
            ChatTokenizer(),
            None,
            is_typed=False,
        ).render(Row(batch, offset))
        for section in ({"messages_column": "m"}, {"template": "{{ m[0].role }} {{ n + n }}"})
        for offset in (0, 1)
    ]
    assert [prompt.text for prompt in prompts] == [
        "<s>user\nA\nB</s><s>assistant\n",
        "<s>user\nA\nB</s><s>assistant\n",
        "user 2",
        "user xx",
    ]


def test_text_that_is_no_utf8_fails_its_row():
    broken = pa.StringArray.from_buffers(
        2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")
    )
    bed = TestBed({"text": broken}, {"column": "text"})
    assert bed.codes() == [None, FailureCode.INVALID_ENCODING]


def test_null_keys_of_a_struct_are_not_there():
    template = "{% for m in messages %}{{ m.keys() | join(' ') }};{% endfor %}"
    conversations = [
        [{"role": "user", "content": "x", "name": None}, {"role": "user", "content": "y", "name": "Bo"}]
    ]
    bed = TestBed({"m": conversations}, {"messages_column": "m"}, tokenizer=ChatTokenizer(template))
    assert bed().text == "role content;role content name;"


@pytest.mark.parametrize(
    ("cell", "code", "message"),
    [
        (None, FailureCode.NULL_PROMPT, "column 'm' is null"),
        ("[]", FailureCode.EMPTY_PROMPT, "holds no messages"),
        ("[{", FailureCode.INVALID_MESSAGES, "column 'm' is not JSON"),
        ('{"role": "user"}', FailureCode.INVALID_MESSAGES, "holds dict, not a list of messages"),
        ('["x"]', FailureCode.INVALID_MESSAGES, "message 0 is str"),
        ('[{"content": "x"}]', FailureCode.INVALID_MESSAGES, "message 0 has no role"),
        ('[{"role": 5, "content": "x"}]', FailureCode.INVALID_MESSAGES, "message 0 has no role"),
        ('[{"role": "user", "content": null}]', FailureCode.INVALID_MESSAGES, "message 0 has no content"),
        ('[{"role": "user", "content": 5}]', FailureCode.INVALID_MESSAGES, "content must be text"),
        (
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
            FailureCode.INVALID_MESSAGES,
            "image_url",
        ),
    ],
)
def test_what_is_no_conversation_fails_its_row(cell, code, message):  # BS-09
    bed = TestBed({"m": pa.array([cell], pa.string())}, {"messages_column": "m"}, tokenizer=ChatTokenizer())
    failure = bed()
    assert (failure.code, message in failure.message) == (code, True), failure


def test_a_prompt_that_leaves_no_room_is_a_failure_with_both_numbers():  # BG-21
    lengths = [10, 63, 64, 65, 500, 10]
    bed = TestBed(
        {"text": ["x" * n for n in lengths]},
        {"column": "text", "add_special_tokens": False},
        max_model_len=64,
    )
    assert [isinstance(result, Prompt) for result in bed.all()] == [True, True, False, False, False, True]
    assert bed(2).code == FailureCode.PROMPT_TOO_LONG
    assert "64 tokens" in bed(2).message
    assert "500 tokens" in bed(4).message
    assert "max_model_len 64" in bed(4).message


@pytest.mark.parametrize(("side", "kept"), [("right", "abcdef"), ("left", "uvwxyz"), ("middle", "abcxyz")])
def test_truncation_is_token_exact_and_recorded(side, kept):  # BG-21
    text = "abcdefghijklmnopqrstuvwxyz"
    bed = TestBed(
        {"text": [text, "short"]},
        {
            "template": "<{{ text }}>",
            "truncate": {"column": "text", "side": side},
            "add_special_tokens": False,
        },
        sampling={"max_tokens": 8},
        max_model_len=16,
    )
    prompt = bed(0)
    assert prompt.text == f"<{kept}>"
    assert len(prompt.token_ids) == 8  # 16, less the answer's 8
    assert prompt.warnings == (
        f"column 'text' was cut ({side}) from 26 to 6 characters, the prompt from 28 to 8 tokens",
    )
    assert bed(1).warnings == ()


@pytest.mark.parametrize(
    ("sampling", "truncate", "expected"),
    [
        ({}, {}, 63),  # room for one token
        ({"max_tokens": 8}, {}, 56),
        ({"max_tokens": 4096}, {}, 32),  # never more than half of the context for the answer
        ({"max_tokens": 8}, {"max_tokens": 20}, 20),
        ({}, {"max_tokens": 100}, 63),
    ],
)
def test_how_long_a_truncated_prompt_is(sampling, truncate, expected):
    bed = TestBed(
        {"text": ["x" * 500]},
        {"column": "text", "truncate": {"column": "text", **truncate}},
        sampling=sampling,
        max_model_len=64,
    )
    assert len(bed().token_ids) == expected


def test_truncation_never_splits_a_character_and_keeps_within_the_limit():
    bed = TestBed(
        {"text": ["ü" * 100]},
        {"column": "text", "truncate": {"column": "text", "max_tokens": 10}},
        max_model_len=64,
    )
    prompt = bed()
    assert prompt.text == "üüüü"
    assert len(prompt.token_ids) == 9


def test_what_is_too_long_even_without_the_column_is_a_failure():
    bed = TestBed(
        {"text": ["x" * 50, None]},
        {"template": "y" * 100 + "{{ text | default('') }}", "truncate": {"column": "text"}},
        max_model_len=64,
    )
    assert bed.codes() == [FailureCode.PROMPT_TOO_LONG] * 2
    assert "even without column 'text'" in bed(0).message


def test_truncated_data_is_still_guarded():
    bed = TestBed(
        {"text": ["</s>" * 20]},
        {"column": "text", "truncate": {"column": "text", "max_tokens": 9}, "add_special_tokens": False},
        max_model_len=64,
    )
    assert bed().token_ids == text_ids("</s></s><")


def test_seeds_come_from_the_rows_place_or_its_column():
    bed = TestBed({"text": ["x", "y"]}, {"column": "text"}, sampling={"seed": 5})
    assert [prompt.seed for prompt in bed.all()] == [row_seed(5, 2, 10), row_seed(5, 2, 11)]
    assert TestBed({"text": ["x"]}, {"column": "text"})().seed == row_seed(0, 2, 10)
    columns = {"text": ["x"] * 3, "s": [7, None, -1]}
    bed = TestBed(columns, {"column": "text"}, sampling={"seed_column": "s"})
    assert (bed(0).seed, bed(2).seed) == (7, -1)
    assert bed(1).code == FailureCode.INVALID_PARAMETER
    with pytest.raises(SourceError, match=r"sampling\.seed_column: column 'text' is string, not an integer"):
        TestBed(columns, {"column": "text"}, sampling={"seed_column": "text"})
    with pytest.raises(SourceError, match=r"sampling\.seed_column: no column 'sed'"):
        TestBed(columns, {"column": "text"}, sampling={"seed_column": "sed"})


def test_what_the_source_said_about_a_row_is_kept():
    bad = RowFailure(FailureCode.INVALID_JSON, "line 2 is not JSON")
    bed = TestBed({"text": ["x", None]}, {"column": "text"}, failures={1: bad}, warnings={0: ("mended",)})
    assert bed(0).warnings == ("mended",)
    assert bed(1) is bad


def test_values_without_a_python_form_fail_their_row():
    dates = pa.array([0, 2**60], pa.int64()).cast(pa.timestamp("us"))
    bed = TestBed({"when": dates}, {"template": "{{ when }}"})
    assert bed(0).text == "1970-01-01 00:00:00"
    assert bed(1).code == FailureCode.TEMPLATE_ERROR
    assert "column 'when'" in bed(1).message


def test_many_threads_render_alike():
    columns = {"text": [f"row {n} </s>" for n in range(400)], "tags": [["a", f"{n}"] for n in range(400)]}
    prompt = {"template": "{% for t in tags %}{{ t }},{% endfor %}{{ text }}", "chat": True}
    bed = TestBed(columns, prompt, tokenizer=ChatTokenizer())
    expected = [prompt.token_ids for prompt in bed.all()]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda offset: bed(offset).token_ids, range(400)))
    assert found == expected
