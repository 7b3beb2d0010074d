import pyarrow as pa
import pytest

from batchgen.errors import TemplateError
from batchgen.jobs.template import RowTemplate, RowTemplateError
from batchgen.jobs.template_environment import null_column
from batchgen.outputs import FailureCode

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("n", pa.int64()),
        ("meta", pa.struct([("lang", pa.string()), ("items", pa.list_(pa.string()))])),
        ("tags", pa.list_(pa.string())),
        ("range", pa.string()),
    ]
)


def template(source: str) -> RowTemplate:
    return RowTemplate(source, "prompt.template", SCHEMA)


def render(source: str, **values) -> str:
    compiled = template(source)
    return compiled.render(
        {name: null_column(name) if values.get(name) is None else values[name] for name in compiled.columns}
    )


def failure(source: str, **values) -> tuple[FailureCode, str]:
    with pytest.raises(RowTemplateError) as caught:
        render(source, **values)
    return caught.value.code, str(caught.value)


def test_literal_braces_survive_and_data_is_never_evaluated():  # BS-07
    source = '{"name": "x", "list": [{}, {"a": {"b": 1}}]} {{ text }}'
    data = "{0} {{ x }} {% if %} {{ 7*7 }} {# no #} {text} %s"
    assert render(source, text=data) == '{"name": "x", "list": [{}, {"a": {"b": 1}}]} ' + data


def test_a_str_format_placeholder_is_refused(  # BS-07
):
    with pytest.raises(
        TemplateError, match=r"line 2: \{text\} is written out as it stands; a column is \{\{ text \}\}"
    ):
        template("Say this:\n{text}")
    with pytest.raises(TemplateError, match=r"\{ n \} is written out"):
        template("{{ text }} { n }")
    # No column, so no placeholder; and the way to write one all the same.
    assert render("{name} {{ '{text}' }}") == "{name} {text}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "Summarise: {{ txet }}",
            r"prompt\.template, line 1: no column 'txet'; did you mean 'text'\? \(columns: text, n,",
        ),
        ("a\n\n{{ text | default('x') }}{{ txet | default('x') }}", "line 3: no column 'txet'"),
        ("{% if txet %}a{% endif %}", "no column 'txet'"),
        ("{% for x in tegs %}{{ x }}{% endfor %}", "no column 'tegs'; did you mean 'tags'"),
        ("{% for x in tags %}{{ y }}{% endfor %}", "no column 'y'"),
        ("{{ text | trim | uper }}", "no filter 'uper'; did you mean 'upper'"),
        ("{{ text is definedd }}", "no test 'definedd'; did you mean 'defined'"),
        ("{% if false %}{{ text | nonsense }}{% endif %}", "no filter 'nonsense'"),
        ("{{ meta.lnag }}", "no field 'lnag'; did you mean 'lang'"),
        ("{{ meta['lnag'] }}", "no field 'lnag'"),
        ("{{ text | random }}", "no filter 'random'"),
        ("{{ lipsum() }}", "no column 'lipsum'"),
        ("{{ text", "line 1: unexpected end of template"),
        ("a\n{% if text %}", "line 2: Unexpected end of template"),
        ("{% include 'secrets.txt' %}", "other templates cannot be included"),
        ("{% extends text %}", "other templates cannot be included"),
        ("{% import 'x' as x %}", "other templates cannot be included"),
        ("{% block a %}{% endblock %}{% block a %}{% endblock %}", "block 'a' defined twice"),
    ],
)
def test_wrong_names_are_found_before_any_row(source, message):  # BG-07
    with pytest.raises(TemplateError, match=message):
        template(source)


def test_loops_assignments_and_macros_define_their_own_names():
    assert render("{% set x = n + 1 %}{{ x }}", n=1) == "2"
    assert render("{% for t in tags %}{{ loop.index }}{{ t }} {% endfor %}", tags=["a", "b"]) == "1a 2b "
    assert render("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(text) }}", text="x") == "<x>"
    assert render("{% set meta = {'lnag': 'x'} %}{{ meta.lnag }}") == "x"
    assert (
        render(
            "{% for t in tags %}{% if t == 'b' %}{% break %}{% endif %}{{ t }}{% endfor %}", tags=["a", "b"]
        )
        == "a"
    )


def test_a_column_may_have_the_name_of_a_jinja_global():
    assert template("{{ range }}").columns == ("range",)
    assert render("{{ range }}", range="far") == "far"
    assert render("{% for i in dict(a=1) %}{{ i }}{% endfor %}") == "a"


def test_only_the_columns_in_use_are_named():
    assert template("{{ n }} {% if meta.lang %}{{ text }}{% endif %}").columns == ("text", "n", "meta")
    assert template("no column").columns == ()


@pytest.mark.parametrize(
    "source", ["a\r\nb\r\n", "a\n", "\n\na\n\n\n", "a\rb", "a", "\r\n{# x\r\n #}\r\n", "\x1c\r\n\x1d"]
)
def test_line_ends_and_a_trailing_newline_are_kept_as_written(source):
    import re

    assert render(source) == re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
    assert render(source + "{{ text }}" + source, text="x\r\ny\n").count("x\r\ny\n") == 1


def test_carriage_returns_inside_tags_are_space_and_inside_quotes_are_kept():
    assert render("{{ text\r\n ~ '\r\n' }}", text="x") == "x\r\n"
    assert render("a\r\n{%- if n -%}\r\nb\r\n{%- endif %}", n=1) == "ab"


def test_a_null_column_is_a_failure_unless_the_template_handles_it():
    assert failure("{{ text }}") == (FailureCode.NULL_PROMPT, "prompt.template: column 'text' is null")
    for use in (
        "{{ text | upper }}",
        "{{ 'x' ~ text }}",
        "{% for c in text %}{% endfor %}",
        "{{ text | length }}",
        "{{ text + 'x' }}",
        "{{ text | trim }}",
        "{{ text.upper() and 1 }}",
    ):
        assert failure(use)[0] in (FailureCode.NULL_PROMPT, FailureCode.TEMPLATE_ERROR), use
    assert render("{{ text | default('none') }}") == "none"
    assert render("{{ text | d('none') }}") == "none"
    assert render("{{ text or 'none' }}") == "none"
    assert render("{% if text is none %}none{% endif %}{% if text %}some{% endif %}") == "none"
    assert render("{% if text == none %}none{% endif %}{% if text != none %}some{% endif %}") == "none"
    assert render("{{ text | tojson }}") == "null"


def test_a_null_sub_field_is_a_failure_unless_it_has_a_default():  # BG-07
    for meta in (None, {"lang": None, "items": None}):
        code, message = failure("{{ meta.lang }}", meta=meta)
        assert code == FailureCode.TEMPLATE_ERROR
        assert "lang' is null; give it a default" in message
        assert render("{{ meta.lang | default('en') }}", meta=meta) == "en"
        assert render("{{ meta['lang'] | default('en') }}", meta=meta) == "en"
        assert failure("{{ meta.lang | upper }}", meta=meta)[0] == FailureCode.TEMPLATE_ERROR
    assert render("{{ meta.lang }}", meta={"lang": "de", "items": None}) == "de"
    assert (
        failure("{% for t in tags %}{{ t }}{% endfor %}", tags=["a", None])[0] == FailureCode.TEMPLATE_ERROR
    )
    assert render("{% for t in tags %}{{ t | default('-') }}{% endfor %}", tags=["a", None]) == "a-"


def test_a_struct_field_wins_over_a_method_of_its_name():
    assert render("{{ meta.items | join(',') }}", meta={"lang": "x", "items": ["a", "b"]}) == "a,b"
    code, message = failure("{{ meta.keys }}", meta={"lang": "x", "items": []})
    assert code == FailureCode.TEMPLATE_ERROR
    # The same on every run: no addresses.
    assert message == "prompt.template: a method is written out; were its parentheses forgotten?"
    assert render("{{ meta.keys() | join(',') }}", meta={"lang": "x", "items": []}) == "lang,items"


def test_numbers_render_and_json_is_not_escaped():
    assert render("{{ n }} {{ n / 4 }}", n=3) == "3 0.75"
    assert (
        render("{{ meta | tojson }}", meta={"lang": "<é'&>", "items": None})
        == '{"lang": "<é\'&>", "items": null}'
    )
    assert render("{{ text }}", text="<b>&amp;</b>") == "<b>&amp;</b>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ text.__class__ }}",
        "{{ text.__init__.__globals__ }}",
        "{{ tags.append('x') }}",
        "{{ '{0.__class__}'.format(text) }}",
        "{{ n / 0 }}",
        "{{ tags[0:'x'] }}",
        "{% for i in namespace(a=1) %}{% endfor %}",
        "{{ text[0](1) }}",
    ],
)
def test_what_a_template_may_not_or_cannot_do_fails_only_its_row(source):
    assert (
        failure(source, text="abc", n=1, tags=["a"], meta={"lang": "x", "items": []})[0]
        == FailureCode.TEMPLATE_ERROR
    )


def test_binary_values_are_not_written_out_as_python():
    compiled = RowTemplate("{{ raw }}", "prompt.template", pa.schema([("raw", pa.binary())]))
    with pytest.raises(RowTemplateError, match="a binary value is written out"):
        compiled.render({"raw": b"x"})
