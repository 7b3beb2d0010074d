"""Chat templates render as transformers renders them; content of parts is joined; what is wrong is said."""

from typing import Any

import pytest

from batchgen.errors import InputError, TemplateError
from batchgen.tokenizer import Tokenizer
from batchgen.tokenizer.chat import ChatTemplate

TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "Wie groß? <b>&amp;</b>"},
    {"role": "assistant", "content": "  1 m  "},
    {"role": "user", "content": "Danke"},
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "z": "ü", "a": [1, True]}},
    }
]

TEMPLATES = {
    "blocks are trimmed": (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n"
        "    {%- else -%}\n{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n  {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}A:{% endif %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }};"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "tojson": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages[1].content | tojson }}",
    "namespace and slices": (
        "{% set ns = namespace(n=0, s='') %}{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.s = ns.s ~ m.role[0] | upper %}{% endfor %}{{ ns.n }}{{ ns.s }}"
        "{{ messages[-1]['content'][::-1] }}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "extra arguments": (
        "{{ enable_thinking }}{{ missing is defined }}{{ documents is none }}{{ tools is none }}"
    ),
    "reasoning": "{% for m in messages %}{{ m.reasoning_content or '-' }}{{ m.thinking or '-' }}{% endfor %}",
    "date": "{{ strftime_now('%Y') | length }}",
    "macro": (
        "{% macro turn(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_transformers(name: str, generate: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    talk = [*TALK, {"role": "assistant", "content": "x", "reasoning": "because", "tool_calls": None}]
    tools = TOOLS if "tojson" in source else None
    theirs, _ = render_jinja_template(
        [[{key: value for key, value in message.items() if value is not None} for message in talk]],
        chat_template=source, tools=tools, add_generation_prompt=generate, enable_thinking=False, **NAMES,
    )  # fmt: skip
    ours = ChatTemplate(source, NAMES).render(
        talk, tools=tools, add_generation_prompt=generate, enable_thinking=False
    )
    assert ours == theirs[0]


def test_the_demo_models_template(smollm2: Tokenizer) -> None:
    assert smollm2.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        smollm2.render_chat(TALK[:1], add_generation_prompt=False)
        == "<|im_start|>system\nBe brief.\n<|im_end|>\n"
    )
    assert smollm2.render_chat(TALK, chat_template="{{ eos_token }}") == "<|im_end|>"


class TestParts:
    """BS-09: content given as a list of parts."""

    def test_text_parts_are_joined_with_one_newline(self, smollm2: Tokenizer) -> None:
        whole = smollm2.render_chat([{"role": "user", "content": "A\nB"}])
        for parts in (
            [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            # As a Parquet list of structs comes, with null fields.
            [
                {"type": "text", "text": "A", "image_url": None},
                {"type": "text", "text": "B", "image_url": None},
            ],
            ["A", "B"],
        ):
            assert smollm2.render_chat([{"role": "user", "content": parts}]) == whole

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {"url": "x"}}],
             "message 1, part 1: type 'image_url'"),
            ([{"type": "text", "text": None}], "message 1, part 0: no text"),
            ([], "message 1: content is an empty list"),
            (3, "message 1: content must be text or a list of parts, not int"),
        ],
    )  # fmt: skip
    def test_anything_else_is_refused(self, content: Any, message: str, smollm2: Tokenizer) -> None:
        with pytest.raises(InputError, match=message):
            smollm2.render_chat([TALK[0], {"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages, not str"),
        ({"role": "user"}, "messages must be a list"),
        (["hi"], "message 0 must be a mapping"),
        ([{"content": "hi"}], "message 0 has no 'role'"),
    ],
)
def test_messages_of_a_wrong_shape(messages: Any, message: str, smollm2: Tokenizer) -> None:
    with pytest.raises(InputError, match=message):
        smollm2.render_chat(messages)


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def test_an_answer_of_tool_calls_alone_has_empty_content() -> None:
    template = ChatTemplate("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}", {})
    for call in (CALL, CALL | {"content": None}):
        assert template.render([TALK[1], call]) == f"<{TALK[1]['content']}><>"
    with pytest.raises(TemplateError, match=r"attribute 'content'; message 1 has no content$"):
        template.render([TALK[1], {"role": "user"}])


def test_tools_that_a_template_would_not_show_are_refused(smollm2: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(TemplateError, match="shows no tools; give one that does"):
        smollm2.render_chat(TALK, tools=[tool])
    assert smollm2.render_chat(TALK, tools=[]) == smollm2.render_chat(TALK)
    shown = ChatTemplate("{% for t in tools %}{{ t.function.name }}{% endfor %}", {})
    assert shown.render(TALK, tools=[tool]) == "f"
    for wrong in ("f", tool, ["f"], 3):
        with pytest.raises(InputError, match="tools must be a list of mappings, each the JSON schema"):
            shown.render(TALK, tools=wrong)  # type: ignore[arg-type]


def test_names_that_a_template_does_not_look_at_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate("{{ enable_thinking }}", {})
    for _ in range(3):
        assert template.render(TALK, enable_thinking=False, enable_thinkin=True) == "False"
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template does not look at 'enable_thinkin', which has no effect"
    ]


class TestErrors:
    def test_the_template_refuses(self) -> None:
        template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
        with pytest.raises(TemplateError, match="roles must alternate"):
            template.render(TALK)

    def test_the_template_is_no_jinja(self) -> None:
        with pytest.raises(TemplateError, match="chat template, line 2"):
            ChatTemplate("a\n{% for %}", {})

    def test_the_template_fails_on_these_messages(self) -> None:
        with pytest.raises(TemplateError, match="TypeError"):
            ChatTemplate("{{ messages[0].content + 1 }}", {}).render(TALK)
        with pytest.raises(TemplateError, match="nothing"):
            ChatTemplate("{{ messages[0].nothing.deeper }}", {}).render(TALK)

    def test_a_template_cannot_leave_its_sandbox(self) -> None:
        for source in (
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ namespace.__init__.__globals__ }}",
        ):
            with pytest.raises(TemplateError):
                ChatTemplate(source, {}).render(TALK)

    def test_a_model_without_a_template(self, smollm2: Tokenizer) -> None:
        bare = Tokenizer(
            smollm2.backend, vocab_size=1, bos_token_id=None, eos_token_ids=(), special_names={},
            chat_template=None, identity={},
        )  # fmt: skip
        assert not bare.has_chat_template
        with pytest.raises(TemplateError, match="has no chat template; give one"):
            bare.render_chat(TALK)
        assert bare.render_chat(TALK, chat_template="{{ messages | length }}") == "4"


class TestContinuing:
    TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"

    @pytest.mark.parametrize("source", [TEMPLATE, TRIMMING])
    @pytest.mark.parametrize("content", ["Sure, ", "Sure,", "a</>b"])
    def test_text_equals_transformers(self, source: str, content: str) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        talk = [TALK[1], {"role": "assistant", "content": content}]
        theirs, _ = render_jinja_template([talk], chat_template=source, continue_final_message=True)
        ours = ChatTemplate(source, {}).render(talk, add_generation_prompt=False, continue_final_message=True)
        assert ours == theirs[0]

    def test_not_together_with_a_new_turn(self) -> None:
        with pytest.raises(TemplateError, match="exclude each other"):
            ChatTemplate(self.TEMPLATE, {}).render(TALK, continue_final_message=True)

    def test_a_template_that_drops_the_last_message(self) -> None:
        with pytest.raises(TemplateError, match="leaves out the end"):
            ChatTemplate("{{ messages[0].content }}", {}).render(
                TALK, add_generation_prompt=False, continue_final_message=True
            )
